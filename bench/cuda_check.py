"""Proves the device time of spans, and their NVTX ranges, on a machine with an NVIDIA GPU. Takes a few minutes.

Usage: python bench/cuda_check.py (needs torch with CUDA and lensfast[sdk])

Prints a table; exit status 1 if a check failed. Without a GPU it says so, and the status is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lensfast
import lensfast.contrib.torch
from lensfast.contrib.torch import _device

try:
    import torch
except ImportError:
    torch: Any = None

DURATION = _device.GPU_DURATION
GROUP = "check"
MATMULS = 20

rows: list[tuple[str, str, str]] = []
memory = InMemorySpanExporter()
cycles_per_ms = 1e6


def report(what: str, passed: bool | None, detail: str) -> None:
    """One row of the table; None: nothing depends on it."""
    verdict = "info" if passed is None else "PASS" if passed else "FAIL"
    rows.append((verdict, what, detail))
    print(f"{verdict}  {what}: {detail}", flush=True)


def span(name: str) -> Any:
    return lensfast.managed_span(GROUP, name)


def spans() -> dict[str, Any]:
    """The spans since the last call, by name. Waits for the device."""
    _device.flush(60)
    found = {finished.name: finished for finished in memory.get_finished_spans()}
    memory.clear()
    return found


def device_ms(finished: Any) -> float | None:
    return (finished.attributes or {}).get(DURATION)


def host_ms(finished: Any) -> float:
    return (finished.end_time - finished.start_time) / 1e6


def text(milliseconds: float | None) -> str:
    return "no time" if milliseconds is None else f"{milliseconds:.3f} ms"


def near(value: float | None, expected: float, relative: float, absolute_ms: float) -> bool:
    return value is not None and abs(value - expected) <= expected * relative + absolute_ms


def same(result: Any, expected: Any) -> bool:
    return bool(torch.allclose(result, expected, rtol=1e-2, atol=1e-2))


def sleep_on_device(milliseconds: float) -> None:
    """Work for the current stream that takes about as long, and no memory.

    What is queued behind it comes without the gaps that a slow host leaves.
    """
    torch.cuda._sleep(int(milliseconds * cycles_per_ms))


def begin_cuda() -> None:
    """Make the context of the current device, without which no span is timed, and see how fast it counts."""
    global cycles_per_ms
    torch.zeros(1, device="cuda")
    for _ in range(2):  # the first time the clock is still speeding up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(200_000_000)
        torch.cuda.synchronize()
        cycles_per_ms = 200_000_000 / (time.perf_counter() - begin) / 1000


@contextlib.contextmanager
def events_around(times: dict[str, Any], name: str) -> Iterator[None]:
    """Let two plain events say how long the block takes on the current stream: times[name]() gives milliseconds."""
    stream = torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    yield
    end.record(stream)
    times[name] = lambda: begin.elapsed_time(end)


def matmuls(x: Any) -> Any:
    for _ in range(MATMULS):
        x = torch.tanh(x @ x)
    return x


@contextlib.contextmanager
def counting_polls() -> Iterator[Callable[[], int]]:
    """Yields a function that says how often the resolver has asked for an event meanwhile."""
    clock_class: Any = _device._Clock
    read = clock_class.read
    count = 0

    def counted(clock: Any) -> float | None:
        nonlocal count
        count += 1
        return read(clock)

    clock_class.read = counted
    try:
        yield lambda: count
    finally:
        clock_class.read = read


# The checks. Each begins with an idle device and no spans.


def check_eager() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    matmuls(x)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the first one sets the profiler up
        matmuls(x)
        torch.cuda.synchronize()

    with torch.profiler.profile(activities=activities) as profile:
        sleep_on_device(100)
        with span("work"):
            matmuls(x)
        torch.cuda.synchronize()
    found = spans()["work"]
    on_device = [
        event.time_range
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    kernels = sorted(on_device, key=lambda interval: interval.start)[1:]  # without the sleep
    extent = (max(interval.end for interval in kernels) - kernels[0].start) / 1000
    total = sum(interval.elapsed_us() for interval in kernels) / 1000
    seen = device_ms(found)
    report(
        "eager, against torch.profiler",
        near(seen, extent, 0.02, 0.05) and len(kernels) >= 2 * MATMULS,
        f"{text(seen)}; {len(kernels)} kernels from first to last {text(extent)}, their sum {text(total)}",
    )
    report(
        "a span is left before the device is there", host_ms(found) < (seen or 0), f"{text(host_ms(found))} on the host"
    )

    times: dict[str, Any] = {}
    sleep_on_device(100)
    with events_around(times, "work"), span("work"):
        matmuls(x)
    torch.cuda.synchronize()
    seen, expected = device_ms(spans()["work"]), times["work"]()
    report("eager, against events around it", near(seen, expected, 0.01, 0.05), f"{text(seen)}; {text(expected)}")

    started = time.perf_counter()
    with span("work"):
        matmuls(x)
    torch.cuda.synchronize()
    expected = (time.perf_counter() - started) * 1000
    seen = device_ms(spans()["work"])
    report(
        "eager, against synchronised wall time",
        near(seen, expected, 0.10, 0.5) and (seen or 0) <= expected,
        f"{text(seen)}; {text(expected)}",
    )


def check_streams_and_threads() -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    times: dict[str, Any] = {}
    sleep_on_device(50)
    with torch.cuda.stream(side):
        sleep_on_device(50)
    with events_around(times, "outer"), span("outer"):
        sleep_on_device(20)
        with torch.cuda.stream(side), events_around(times, "side"), span("side"):
            sleep_on_device(50)
        with events_around(times, "inner"), span("inner"):
            sleep_on_device(10)

    manager = span("handed over")
    with torch.cuda.stream(side), events_around(times, "handed over"):
        manager.__enter__()
        sleep_on_device(50)

        def leave() -> None:
            with torch.cuda.stream(other):
                manager.__exit__(None, None, None)

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    found = spans()
    for name, what in (
        ("outer", "a span with others in it"),
        ("inner", "a span in it"),
        ("side", "a span in it, on another stream"),
        ("handed over", "a span left on another thread and stream"),
    ):
        seen, expected = device_ms(found[name]), times[name]()
        report(what, near(seen, expected, 0.01, 0.05), f"{text(seen)}; {text(expected)} by events around it")


def capture_while_polling(times: dict[str, Any]) -> tuple[int, bool]:
    """Capture a graph in the strictest mode while the resolver asks for the event of another stream.

    Returns how often it asked during the capture, and whether the replay gives what it should.
    """
    x = torch.randn(512, 512, device="cuda")
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.tanh(x @ x)
    torch.cuda.synchronize()
    with counting_polls() as asked:
        with torch.cuda.stream(other):
            sleep_on_device(50)
            with events_around(times, "pending"), span("pending"):
                sleep_on_device(1500)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin()
            before = asked()
            try:
                with span("captured"):
                    result = torch.tanh(x @ x)
                    time.sleep(0.5)
                count = asked() - before
            finally:
                graph.capture_end()
    x.normal_()
    with span("replayed"):
        graph.replay()
    torch.cuda.synchronize()
    return count, same(result, torch.tanh(x @ x))


def check_capture() -> None:
    times: dict[str, Any] = {}
    count, right = capture_while_polling(times)
    found = spans()
    report("a capture while events are asked for", count >= 10, f"asked {count} times")
    report("the replay of that graph", right, "right" if right else "wrong")
    report("a span in a capture", device_ms(found["captured"]) is None, text(device_ms(found["captured"])))
    report("a span around the replay", bool(device_ms(found["replayed"])), text(device_ms(found["replayed"])))
    seen, expected = device_ms(found["pending"]), times["pending"]()
    report("the span that waited meanwhile", near(seen, expected, 0.01, 0.05), f"{text(seen)}; {text(expected)}")
    control = run_part("control")
    report(
        "control: the same without the change of mode", None, control.stdout.strip() or f"status {control.returncode}"
    )


def check_captures_beside_a_thread() -> None:
    x = torch.randn(512, 512, device="cuda")
    other, stop, count = torch.cuda.Stream(), threading.Event(), 0

    def make_spans() -> None:
        nonlocal count
        with torch.cuda.stream(other):
            while not stop.is_set():
                with span("beside"):
                    sleep_on_device(0.5)
                count += 1
                time.sleep(0.001)

    torch.tanh(x @ x)
    torch.cuda.synchronize()
    thread = threading.Thread(target=make_spans)
    thread.start()
    captures, right = 10, 0
    try:
        for _ in range(captures):
            graph = torch.cuda.CUDAGraph()
            with span("around"), torch.cuda.graph(graph):
                with span("captured"):
                    result = torch.tanh(x @ x)
                time.sleep(0.05)
            x.normal_()
            graph.replay()
            right += same(result, torch.tanh(x @ x))
    finally:
        stop.set()
        thread.join()
    _device.flush(60)
    finished = list(memory.get_finished_spans())
    memory.clear()
    report("captures while a thread makes spans", right == captures, f"{right} of {captures} graphs right")
    times = {
        name: [device_ms(one) for one in finished if one.name == name] for name in ("beside", "around", "captured")
    }
    report(
        "the thread's spans",
        len(times["beside"]) == count and None not in times["beside"],
        f"{len(times['beside'])} of {count}, {times['beside'].count(None)} of them without a time",
    )
    untimed = times["around"].count(None)
    report("spans around a capture", not untimed, f"{len(times['around'])}, {untimed} of them without a time")
    report("spans in a capture", set(times["captured"]) == {None}, f"{len(times['captured'])} without a time")


def check_compiled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024)).cuda()
    x = torch.randn(4096, 1024, device="cuda")

    def step(x: Any) -> Any:
        with span("in the region"):
            return model(x)

    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        other, times = torch.cuda.Stream(), {}
        with torch.no_grad():
            expected = model(x)
            for number in range(6):
                with torch.cuda.stream(other), span("pending"):
                    sleep_on_device(50)  # events are asked for while the compiler captures graphs of its own
                sleep_on_device(50)
                with events_around(times, f"around {number}"), span(f"around {number}"):
                    result = compiled(x)
            right = same(result, expected)
        torch.cuda.synchronize()
        found = spans()
        seen, passing = device_ms(found["around 5"]), times["around 5"]()
        report(f"compiled, {mode}: result", right, "right" if right else "wrong")
        detail = f"{text(seen)}; {text(passing)} by events around it"
        report(f"compiled, {mode}: a span around", near(seen, passing, 0.01, 0.05), detail)
        report(f"compiled, {mode}: no span inside", "in the region" not in found, ", ".join(sorted(found)))


def check_nvtx() -> None:
    lensfast.contrib.torch.nvtx = True
    manager = span("other thread")
    manager.__enter__()
    thread = threading.Thread(target=manager.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    times: dict[str, Any] = {}
    sleep_on_device(50)
    with events_around(times, "nvtx"), span("nvtx"):
        sleep_on_device(10)
    found = spans()
    still_on = lensfast.contrib.torch.nvtx is True
    lensfast.contrib.torch.nvtx = False
    seen = device_ms(found["nvtx"])
    passed = still_on and near(seen, times["nvtx"](), 0.01, 0.05)
    report("NVTX ranges", passed, f"{'on' if still_on else 'not in this torch'}; {text(seen)}")


def check_no_synchronisation() -> None:
    x = torch.randn(64, 64, device="cuda")
    x @ x
    torch.cuda.synchronize()
    sleep_on_device(2000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(100):
            with span(f"loop {number}"):
                x @ x
        still_busy = not torch.cuda.current_stream().query()
        time.sleep(0.2)  # the resolver, too, is under this mode
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = spans()
    report(
        "nothing waits for the device",
        still_busy,
        f"100 spans were over {'before' if still_busy else 'after'} the work",
    )
    untimed = sum(device_ms(one) is None for one in found.values())
    report("spans of that loop", len(found) == 100 and not untimed, f"{len(found)}, {untimed} of them without a time")


def check_nccl() -> None:
    """The broadcast of a trace context by tensors on the device, in a group of one."""
    import torch.distributed as dist

    if not dist.is_nccl_available():
        report("broadcast over NCCL", None, "this torch has no NCCL")
        return
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            with span("broadcast") as broadcast:
                carrier = lensfast.broadcast_trace_context(rank=0) or {}
                sent = format(broadcast.get_span_context().trace_id, "032x")
            report("broadcast over NCCL", sent in carrier.get("traceparent", ""), str(carrier))
        finally:
            dist.destroy_process_group()


def check_cost() -> None:
    def cost() -> float:
        """Microseconds of one span."""
        best = float("inf")
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(200):
                with span("cost"):
                    pass
            best = min(best, (time.perf_counter() - begin) / 200)
            torch.cuda.synchronize()
        _device.flush(60)
        memory.clear()
        return best * 1e6

    timed = cost()
    lensfast.contrib.torch.cuda_timing = False
    plain = cost()
    lensfast.contrib.torch.nvtx = True
    ranged = cost()
    lensfast.contrib.torch.nvtx = False
    lensfast.contrib.torch.cuda_timing = True
    detail = f"{plain:.1f} us without, {timed:.1f} us with device time, {ranged:.1f} us with NVTX"
    report("cost of a span", timed - plain < 50, detail)


def check_processes() -> None:
    left = run_part("exit")
    at_exit = left.returncode == 0 and DURATION in left.stdout
    report("exit with the device at work", at_exit, left.stdout.strip() or left.stderr[-300:])
    forked = run_part("fork")
    passed = forked.returncode == 0 and forked.stdout.strip() == "child 0, timed"
    report("a forked child leaves a span of its parent's", passed, forked.stdout.strip() or forked.stderr[-300:])
    if torch.cuda.device_count() > 1:
        second = run_part("second")
        passed = second.returncode == 0 and second.stdout.strip() == "timed, no context on device 0"
        report("a rank on the second device", passed, second.stdout.strip() or second.stderr[-300:])


# Parts in a process of their own.


def part_control() -> None:
    begin_cuda()
    _device._spare_captures = lambda torch: None
    try:
        count, _ = capture_while_polling({})
        print(f"asked {count} times, and the capture went well here")
    except RuntimeError as error:
        print(f"the capture fails, as it should: {str(error).splitlines()[0]}")
    sys.stdout.flush()
    os._exit(0)  # what a broken capture leaves behind is of no interest


def part_exit() -> None:
    exporter = ConsoleSpanExporter(formatter=lambda span: f"{span.name} {dict(span.attributes or {})}\n")
    provider: Any = trace.get_tracer_provider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    begin_cuda()
    with span("last"):
        sleep_on_device(1000)


def part_fork() -> None:
    begin_cuda()
    with span("waiting"):
        sleep_on_device(500)
    manager = span("open")
    manager.__enter__()
    child = os.fork()
    if child == 0:
        manager.__exit__(None, None, None)
        del manager
        gc.collect()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    manager.__exit__(None, None, None)
    found = spans()
    timed = all(device_ms(found[name]) is not None for name in ("waiting", "open"))
    print(f"child {status}, {'timed' if timed else 'not timed'}")


def part_second() -> None:
    torch.cuda.set_device(1)
    begin_cuda()
    with span("span"):
        sleep_on_device(100)
    timed = device_ms(spans()["span"]) is not None
    context = torch._C._cuda_hasPrimaryContext(0)
    print(f"{'timed' if timed else 'not timed'}, {'a' if context else 'no'} context on device 0")


PARTS = {"control": part_control, "exit": part_exit, "fork": part_fork, "second": part_second}


def run_part(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, "--part", name], capture_output=True, text=True, timeout=120, check=False
    )


def set_up() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    lensfast.set_enabled_span_groups({GROUP})
    lensfast.contrib.torch.cuda_timing = True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    part = parser.parse_args().part
    if torch is None or torch.version.cuda is None or not torch.cuda.is_available():
        print(
            "nothing was checked: " + ("torch is not installed" if torch is None else "torch finds no CUDA device here")
        )
        return 0
    set_up()
    if part is not None:
        PARTS[part]()
        return 0
    with span("before CUDA is initialised"):
        pass
    initialised = torch.cuda.is_initialized()
    report("a span does not initialise CUDA", not initialised, f"is_initialized() is {initialised}")
    memory.clear()
    begin_cuda()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}", flush=True)
    for check in (
        check_eager,
        check_streams_and_threads,
        check_capture,
        check_captures_beside_a_thread,
        check_compiled,
        check_nvtx,
        check_no_synchronisation,
        check_nccl,
        check_cost,
        check_processes,
    ):
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            report(check.__name__.removeprefix("check_").replace("_", " "), False, f"{type(error).__name__}: {error}")
        torch.cuda.synchronize()
        spans()
    print()
    width = max(len(what) for _, what, _ in rows)
    for verdict, what, detail in rows:
        print(f"{verdict}  {what:<{width}}  {detail.splitlines()[0]}")
    failed = sum(verdict == "FAIL" for verdict, _, _ in rows)
    print(f"\n{failed} failed, {sum(verdict == 'PASS' for verdict, _, _ in rows)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
