"""Device time on spans and their NVTX mirror, on a stand-in for the device: work is done there when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from conftest import run_code

DURATION = "gpu.duration_ms"


class Stream:
    def __init__(self, gpu, device_index, cuda_stream):
        self.gpu = gpu
        self.device_index = device_index
        self.cuda_stream = cuda_stream
        self.queued = []
        self.clock = 0.0
        self.capturing = False

    def run(self, *milliseconds):
        """The device goes on with the queued recordings of events, one for each duration of the work before it."""
        for duration in milliseconds:
            self.clock += duration
            self.queued.pop(0).happened = self.clock


class Event:
    """As torch's, it refuses other devices once recorded, and has no elapsed time before it has happened."""

    def __init__(self, gpu, enable_timing=False):
        gpu.fail_if_told("Event")
        assert enable_timing
        self.gpu = gpu
        self.device_index = None
        self.last = None
        gpu.events.append(self)

    def record(self, stream):
        self.gpu.fail_if_told("record")
        assert self.device_index in (None, stream.device_index)
        if stream.capturing:
            self.gpu.offences.append("an event in the capture")
        self.device_index = stream.device_index
        self.last = SimpleNamespace(happened=None)
        stream.queued.append(self.last)

    def query(self):
        self.gpu.fail_if_told("query")
        self.gpu.queries += 1
        thread = threading.current_thread()
        if thread.name != "lensfast-device-time":
            self.gpu.offences.append(f"query in {thread.name}")
        if any(stream.capturing for stream in self.gpu.streams.values()) and thread not in self.gpu.relaxed:
            self.gpu.offences.append("query during a capture")
        if self.gpu.device_of(thread) != self.device_index:
            self.gpu.offences.append("query from another device")
        return self.last.happened is not None

    def elapsed_time(self, end):
        self.gpu.fail_if_told("elapsed_time")
        assert self.last.happened is not None
        assert end.last.happened is not None
        return end.last.happened - self.last.happened

    def synchronize(self):
        self.gpu.offences.append("synchronize")


class Gpu:
    """What torch.cuda is in these tests."""

    def __init__(self):
        self.initialized = True
        self.contexts = {0, 1}
        self.streams = {}
        self.events = []
        self.queries = 0
        self.relaxed = set()
        self.ranges = []
        self.offences = []
        self.failing = {}
        self._local = threading.local()
        self._devices = {}
        self.nvtx = SimpleNamespace(range_start=self._range_start, range_end=self._range_end)

    def fail_if_told(self, function):
        if function in self.failing:
            raise self.failing[function]

    def device_of(self, thread):
        return self._devices.get(thread, 0)

    def stream_of(self, device_index, cuda_stream=0):
        key = device_index, cuda_stream
        return self.streams.setdefault(key, Stream(self, *key))

    # Those of torch.cuda.

    def is_initialized(self):
        self.fail_if_told("is_initialized")
        return self.initialized

    def current_device(self):
        self.fail_if_told("current_device")
        return self.device_of(threading.current_thread())

    def set_device(self, device):
        self.fail_if_told("set_device")
        self._devices[threading.current_thread()] = device

    def current_stream(self):
        self.fail_if_told("current_stream")
        return getattr(self._local, "stream", None) or self.stream_of(self.current_device())

    def is_current_stream_capturing(self):
        self.fail_if_told("is_current_stream_capturing")
        return self.current_stream().capturing

    @contextlib.contextmanager
    def device(self, device):
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    @contextlib.contextmanager
    def stream(self, stream):
        self.fail_if_told("stream")
        before = getattr(self._local, "stream", None)
        with self.device(stream.device_index):
            self._local.stream = stream
            try:
                yield
            finally:
                self._local.stream = before

    def Event(self, enable_timing=False):  # noqa: N802
        return Event(self, enable_timing)

    def _range_start(self, name):
        self.fail_if_told("range_start")
        self.ranges.append(("start", name))
        return len(self.ranges) - 1  # from 0 on, which torch returns where no tool listens

    def _range_end(self, range_id):
        self.fail_if_told("range_end")
        self.ranges.append(("end", self.ranges[range_id][1]))


@pytest.fixture
def contrib(lensfast, request):
    """lensfast.contrib.torch with a resolver of its own, all switched off again afterwards."""
    contrib = lensfast.contrib.torch
    contrib._device._resolver = contrib._device._Resolver()
    lensfast.set_enabled_span_groups({"on"})
    yield contrib
    contrib.cuda_timing = contrib.nvtx = False
    contrib._device._EXIT_S, usual = 0.0, contrib._device._EXIT_S
    contrib._device._resolver.close()
    contrib._device._EXIT_S = usual


@pytest.fixture
def device(contrib):
    return contrib._device


@pytest.fixture
def gpu(contrib, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    gpu = Gpu()
    for name in (
        "is_initialized",
        "current_device",
        "set_device",
        "current_stream",
        "is_current_stream_capturing",
        "device",
        "stream",
        "Event",
        "nvtx",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in gpu.contexts, raising=False)
    monkeypatch.setattr(contrib._device, "_spare_captures", lambda torch: gpu.relaxed.add(threading.current_thread()))
    monkeypatch.setattr(contrib._device, "_POLL_S", 0.001)
    yield gpu
    assert gpu.offences == []


@pytest.fixture
def dynamo(lensfast):
    """Imported before torch.cuda is a stand-in, which it would find fault with."""
    return pytest.importorskip("torch._dynamo", reason="torch is not installed")


@pytest.fixture
def timing(contrib, gpu):
    contrib.cuda_timing = True
    return gpu


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def finished(exporter, count=1):
    """The finished spans in order of their ends, once there are `count` of them."""
    wait_until(lambda: len(exporter.get_finished_spans()) >= count)
    spans = exporter.get_finished_spans()
    assert len(spans) == count, [span.name for span in spans]
    return spans


def durations(exporter, count):
    return {span.name: (span.attributes or {}).get(DURATION) for span in finished(exporter, count)}


def warnings(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


# The settings.


@pytest.mark.parametrize("setting", ["cuda_timing", "nvtx"])
def test_a_setting_takes_a_bool_or_group_names(lensfast, contrib, setting):
    assert getattr(contrib, setting) is False
    assert lensfast._spans.watch is None
    for value, reads in (
        (True, True),
        ({"step"}, {"step"}),
        (None, False),
        (["step", "layer"], {"step", "layer"}),
        (frozenset(), set()),
        (False, False),
    ):
        setattr(contrib, setting, value)
        assert getattr(contrib, setting) == reads
        assert (lensfast._spans.watch is not None) is bool(value)


@pytest.mark.parametrize("setting", ["cuda_timing", "nvtx"])
@pytest.mark.parametrize("value", ["step", b"step", 1, 0, 0.5, object(), {1}, ["step", None], [[]]], ids=repr)
def test_other_values_raise_and_change_nothing(contrib, setting, value):
    setattr(contrib, setting, {"step"})
    with pytest.raises(TypeError, match=f"{setting} takes True, False or a set of group names"):
        setattr(contrib, setting, value)
    assert getattr(contrib, setting) == {"step"}


def test_a_set_is_copied(contrib, gpu, lensfast, exporter):
    groups = {"other"}
    contrib.nvtx = groups
    groups.add("on")
    with lensfast.managed_span("on", "span"):
        pass
    assert gpu.ranges == []


def test_both_off_leaves_no_watch(lensfast, contrib):
    contrib.cuda_timing = contrib.nvtx = True
    contrib.cuda_timing = False
    assert lensfast._spans.watch is not None
    contrib.nvtx = False
    assert lensfast._spans.watch is None


def test_without_torch_spans_are_as_ever(lensfast, contrib, exporter, monkeypatch, caplog):
    monkeypatch.delitem(lensfast._spans.sys.modules, "torch", raising=False)
    contrib.cuda_timing = contrib.nvtx = True
    with lensfast.managed_span("on", "span"):
        pass
    assert durations(exporter, 1) == {"span": None}
    assert "torch" not in lensfast._spans.sys.modules
    assert not caplog.records


def test_while_torch_is_being_imported(lensfast, contrib, exporter, monkeypatch, caplog):
    contrib.cuda_timing = contrib.nvtx = True
    for number, torch in enumerate([SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())], 1):
        monkeypatch.setitem(lensfast._spans.sys.modules, "torch", torch)
        with lensfast.managed_span("on", "span"):
            pass
        finished(exporter, number)
    assert contrib.nvtx is True
    assert not caplog.records


# Device time.


def test_the_time_between_the_events_of_start_and_end(lensfast, timing, exporter):
    with lensfast.managed_span("on", "span", size=3):
        pass
    left_at = time.time_ns()
    stream = timing.stream_of(0)
    stream.run(100.0)
    seen = timing.queries
    wait_until(lambda: timing.queries > seen + 1)
    assert not exporter.get_finished_spans()
    stream.run(2.5)
    (span,) = finished(exporter)
    assert span.attributes == {"size": 3, DURATION: 2.5}
    assert isinstance(span.attributes[DURATION], float)
    assert span.start_time <= span.end_time <= left_at


def test_every_way_to_make_a_span(lensfast, timing, exporter):
    @lensfast.trace_fn("on", "function")
    def function():
        pass

    @lensfast.trace_fn("on", "generator")
    def generator():
        yield 1

    @lensfast.trace_fn("on", "coroutine")
    async def coroutine():
        pass

    @lensfast.span_cm("decorated")
    def decorated():
        pass

    with lensfast.managed_span("on", "managed"):
        pass
    with lensfast.span_cm("span_cm"):
        pass
    with lensfast.span_group("on").span("handle"):
        pass
    function()
    assert list(generator()) == [1]
    asyncio.run(coroutine())
    decorated()
    timing.stream_of(0).run(*range(14))
    # The event numbered n comes after n ms of work: each span's are from its second event.
    names = ["managed", "span_cm", "handle", "function", "generator", "coroutine", "decorated"]
    assert durations(exporter, 7) == {name: 2.0 * number + 1 for number, name in enumerate(names)}


def test_nested_spans_and_an_exception(lensfast, timing, exporter):
    with pytest.raises(ValueError, match="bad"), lensfast.managed_span("on", "outer") as outer:
        with lensfast.managed_span("on", "inner"):
            assert trace.get_current_span() is not outer
        assert trace.get_current_span() is outer
        raise ValueError("bad")
    assert trace.get_current_span() is trace.INVALID_SPAN
    timing.stream_of(0).run(1.0, 1.0, 2.0, 4.0)
    inner, outer = finished(exporter, 2)
    assert (inner.name, inner.attributes[DURATION]) == ("inner", 2.0)
    assert (outer.name, outer.attributes[DURATION], outer.status.description) == ("outer", 7.0, "bad")
    assert inner.parent.span_id == outer.context.span_id


def test_per_group(lensfast, contrib, gpu, exporter):
    lensfast.set_enabled_span_groups({"on", "other"})
    contrib.cuda_timing = {"other", "off"}
    for group in ("on", "other"):
        with lensfast.managed_span(group, group):
            pass
    with lensfast.span_cm("without a group"):
        pass
    with lensfast.managed_span("off", "off"):
        pass
    gpu.stream_of(0).run(1.0, 2.0)
    assert durations(exporter, 3) == {"on": None, "other": 2.0, "without a group": None}


def test_switched_off_between_start_and_end(lensfast, contrib, timing, exporter):
    with lensfast.managed_span("on", "span"):
        contrib.cuda_timing = False
    with lensfast.managed_span("on", "later"):
        pass
    timing.stream_of(0).run(1.0, 2.0)
    assert durations(exporter, 2) == {"span": 2.0, "later": None}


def test_cuda_is_not_initialised_for_it(lensfast, timing, exporter, caplog):
    timing.initialized = False
    for function in ("current_device", "current_stream", "is_current_stream_capturing", "Event"):
        timing.failing[function] = AssertionError("this would initialise CUDA")
    with lensfast.managed_span("on", "span"):
        pass
    assert durations(exporter, 1) == {"span": None}
    assert not caplog.records


def test_no_context_is_made_for_it(lensfast, timing, exporter, caplog):
    timing.contexts = {1}
    for function in ("current_stream", "is_current_stream_capturing", "Event"):
        timing.failing[function] = AssertionError("this may make a context")
    with lensfast.managed_span("on", "span"):
        pass
    timing.failing.clear()
    assert durations(exporter, 1) == {"span": None}
    assert not caplog.records
    with timing.device(1), lensfast.managed_span("on", "later"):
        pass
    timing.stream_of(1).run(1.0, 2.0)
    assert durations(exporter, 2) == {"span": None, "later": 2.0}


def test_spans_that_do_not_record_are_not_held(lensfast, timing, device):
    trace.set_tracer_provider(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    for _ in range(3):
        with lensfast.managed_span("on", "span") as span:
            assert not span.is_recording()
    assert len(timing.events) == 1
    assert not device._resolver.waiting


# Captures.


def test_in_a_capture_nothing_is_recorded(lensfast, timing, exporter, caplog):
    stream = timing.stream_of(0, 7)
    stream.capturing = True
    with timing.stream(stream), lensfast.managed_span("on", "captured"):
        pass
    assert durations(exporter, 1) == {"captured": None}
    assert not timing.events
    assert not caplog.records


def test_a_capture_that_begins_in_the_span(lensfast, timing, exporter):
    with lensfast.managed_span("on", "span"):
        timing.stream_of(0).capturing = True
    assert durations(exporter, 1) == {"span": None}
    timing.stream_of(0).capturing = False
    with lensfast.managed_span("on", "later"):
        pass
    timing.stream_of(0).run(4.0, 1.0, 2.0)
    assert durations(exporter, 2) == {"span": None, "later": 2.0}
    assert len(timing.events) == 2


def test_the_stream_of_the_start_is_captured_and_another_is_current(lensfast, timing, exporter):
    for device_index in (0, 1):
        manager = lensfast.managed_span("on", f"span {device_index}")
        captured = timing.stream_of(device_index, 7)
        with timing.stream(captured):
            manager.__enter__()
        captured.capturing = True
        manager.__exit__(None, None, None)
        assert timing.current_stream() is timing.stream_of(0)
    assert durations(exporter, 2) == {"span 0": None, "span 1": None}


def test_a_capture_within_the_span(lensfast, timing, exporter):
    captured = timing.stream_of(0, 7)
    with lensfast.managed_span("on", "around"):
        captured.capturing = True
        with timing.stream(captured), lensfast.managed_span("on", "inside"):
            pass
        captured.capturing = False
    timing.stream_of(0).run(1.0, 2.0)
    assert durations(exporter, 2) == {"inside": None, "around": 2.0}


def test_events_are_asked_for_during_a_capture(lensfast, timing, exporter):
    with lensfast.managed_span("on", "before"):
        pass
    timing.stream_of(0, 7).capturing = True
    timing.stream_of(0).run(1.0, 2.0)
    assert durations(exporter, 1) == {"before": 2.0}  # and the fixture: in a thread that may


def test_where_a_capture_can_not_be_spared(lensfast, timing, exporter, device, monkeypatch, caplog):
    def fail(torch):
        raise RuntimeError("no such function")

    monkeypatch.setattr(device, "_spare_captures", fail)
    timing.failing["query"] = AssertionError("not asked for")
    for name in ("first", "second"):
        with lensfast.managed_span("on", name):
            pass
        finished(exporter, {"first": 1, "second": 2}[name])
    assert durations(exporter, 2) == {"first": None, "second": None}
    assert len(timing.events) == 2
    assert ["can't be measured" in record.message for record in warnings(caplog)] == [True]


class Library:
    def __init__(self, name, log, code=0):
        def exchange(mode):
            log.append((name, ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value))
            return code

        setattr(self, name, exchange)


@pytest.mark.parametrize("with_runtime", [True, False])
def test_the_thread_changes_its_mode_by_the_runtime_or_the_driver(device, monkeypatch, with_runtime):
    log = []
    libraries = {"libcuda.so.1": Library("cuThreadExchangeStreamCaptureMode", log)}
    if with_runtime:
        libraries["/torch/lib/libc10_cuda.so"] = Library("cudaThreadExchangeStreamCaptureMode", log)

    def load(name):
        if name not in libraries:
            raise OSError(name)
        return libraries[name]

    monkeypatch.setattr(ctypes, "CDLL", load)
    device._spare_captures(SimpleNamespace(__file__="/torch/__init__.py"))
    # 2 is cudaStreamCaptureModeRelaxed.
    assert log == [("cudaThreadExchangeStreamCaptureMode" if with_runtime else "cuThreadExchangeStreamCaptureMode", 2)]


def test_a_mode_that_can_not_be_changed(device, monkeypatch):
    torch = SimpleNamespace(__file__="/torch/__init__.py")

    def load(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(RuntimeError, match="found no function"):
        device._spare_captures(torch)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library("cudaThreadExchangeStreamCaptureMode", [], 35))
    with pytest.raises(RuntimeError, match="cudaThreadExchangeStreamCaptureMode failed with CUDA error 35"):
        device._spare_captures(torch)


# Streams, devices, threads.


def test_the_end_is_on_the_stream_of_the_start(lensfast, timing, exporter):
    manager = lensfast.managed_span("on", "span")
    with timing.stream(timing.stream_of(1, 3)):
        manager.__enter__()
    with timing.stream(timing.stream_of(0, 4)):
        manager.__exit__(None, None, None)
    timing.stream_of(1, 3).run(1.0, 2.0)
    assert durations(exporter, 1) == {"span": 2.0}


def test_a_span_that_ends_on_another_thread(lensfast, timing, exporter):
    manager = lensfast.managed_span("on", "span")
    with timing.device(1):
        manager.__enter__()
    thread = threading.Thread(target=manager.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    timing.stream_of(1).run(1.0, 2.0)
    assert durations(exporter, 1) == {"span": 2.0}


def test_a_slow_stream_holds_no_other_up(lensfast, timing, exporter):
    for number in (1, 2, 3):
        with timing.stream(timing.stream_of(number % 2, number)), lensfast.managed_span("on", f"span {number}"):
            pass
    timing.stream_of(1, 3).run(1.0, 3.0)
    timing.stream_of(0, 2).run(1.0, 2.0)
    assert durations(exporter, 2) == {"span 2": 2.0, "span 3": 3.0}
    timing.stream_of(1, 1).run(1.0, 1.0)
    assert durations(exporter, 3)["span 1"] == 1.0


def test_events_are_used_again_on_their_device(lensfast, timing, exporter):
    for number in range(1, 11):
        stream = timing.stream_of(number % 2)
        with timing.device(number % 2), lensfast.managed_span("on", f"span {number}"):
            pass
        stream.run(1.0, float(number))
        assert durations(exporter, number)[f"span {number}"] == number
    assert [event.device_index for event in timing.events] == [1, 1, 0, 0]


def test_the_pool_is_bounded(lensfast, timing, exporter, device, monkeypatch):
    monkeypatch.setattr(device, "_MOST_POOLED", 4)
    for _ in range(20):
        with lensfast.managed_span("on", "span"):
            pass
    timing.stream_of(0).run(*[1.0] * 40)
    finished(exporter, 20)
    assert len(device._resolver._pool[0]) == 4


ACTIONS = st.tuples(st.sampled_from(["enter", "leave", "run", "capture"]), st.integers(0, 3), st.integers(0, 9))


@given(st.lists(ACTIONS, max_size=60))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_starts_ends_and_completions(lensfast, timing, exporter, device, actions):
    exporter.clear()
    streams = [timing.stream_of(index, number) for index in (0, 1) for number in (5, 6)]
    entered, recordings = [], {}

    def leave(manager, name, stream):
        manager.__exit__(None, None, None)
        if stream.capturing:
            recordings[name] = None
        elif recordings[name]:
            recordings[name].append(stream.queued[-1])

    for number, (action, which, amount) in enumerate(actions):
        stream = streams[which]
        with timing.stream(stream):
            if action == "enter":
                manager = lensfast.managed_span("on", str(number))
                manager.__enter__()
                entered.append((manager, str(number), stream))
                recordings[str(number)] = None if stream.capturing else [stream.queued[-1]]
            elif action == "leave" and entered:
                leave(*entered.pop(amount % len(entered)))
            elif action == "run" and stream.queued:
                stream.run(amount)
            elif action == "capture":
                stream.capturing = not stream.capturing
    for manager, name, stream in entered:
        leave(manager, name, stream)
    for stream in streams:
        stream.capturing = False
        stream.run(*[1] * len(stream.queued))
    device.flush(20)
    expected = {name: pair and pair[1].happened - pair[0].happened for name, pair in recordings.items()}
    assert durations(exporter, len(recordings)) == expected


@pytest.mark.parametrize("nvtx", [False, True])
def test_around_a_compiled_region(lensfast, dynamo, contrib, timing, exporter, caplog, nvtx):
    """The compiler does not look into what watches a span, though it is on while that runs."""
    torch = sys.modules["torch"]
    contrib.nvtx = nvtx

    @lensfast.trace_fn("on", "around")
    def function(x):
        return x + 1

    dynamo.reset()
    dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend="eager")
    for number in range(1, 4):
        assert compiled(torch.ones(1)).item() == 2
        timing.stream_of(0).run(1.0, float(number))
        assert finished(exporter, number)[-1].attributes == {DURATION: number}
    assert len(timing.events) == 2
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert timing.ranges == [("start", "around"), ("end", "around")] * (3 * nvtx)
    assert not warnings(caplog)


# Failures.


@pytest.mark.parametrize(
    "function",
    [
        "is_initialized",
        "current_device",
        "current_stream",
        "is_current_stream_capturing",
        "Event",
        "record",
        "query",
        "elapsed_time",
        "set_device",
    ],
)
@pytest.mark.parametrize("since", ["before the start", "before the end"])
def test_a_function_of_torch_that_fails(lensfast, timing, exporter, caplog, function, since):
    broken = {function: RuntimeError("CUDA error: unspecified launch failure")}
    if since == "before the start":
        timing.failing.update(broken)
    for number in (1, 2):
        with lensfast.managed_span("on", f"span {number}"):
            timing.failing.update(broken)
        left_at = time.time_ns()
        stream = timing.stream_of(0)
        stream.run(*[1.0] * len(stream.queued))
        span = finished(exporter, number)[-1]
        assert span.start_time <= span.end_time <= left_at
    needed_at_end = function != "is_initialized"
    untimed = since == "before the start" or needed_at_end
    assert durations(exporter, 2) == {"span 1": None if untimed else 1.0, "span 2": None}
    assert len(warnings(caplog)) == 1


def test_the_check_of_another_stream_fails(lensfast, timing, exporter, caplog):
    with lensfast.managed_span("on", "span"):
        other = timing.stream_of(0, 9)
        timing._local.stream = other
        timing.failing["stream"] = RuntimeError("CUDA error")
    timing._local.stream = None
    assert durations(exporter, 1) == {"span": None}
    assert len(warnings(caplog)) == 1


def test_an_event_that_does_not_happen(lensfast, timing, exporter, device, monkeypatch, caplog):
    monkeypatch.setattr(device, "_GIVE_UP_S", 0.0)
    for name in ("stuck", "behind"):
        with lensfast.managed_span("on", name):
            pass
    left_at = time.time_ns()
    assert durations(exporter, 2) == {"stuck": None, "behind": None}
    assert all(span.end_time <= left_at for span in exporter.get_finished_spans())
    assert ["within 0 s" in caplog.text for _ in warnings(caplog)] == [True]
    assert not device._resolver._pool
    monkeypatch.setattr(device, "_GIVE_UP_S", 30.0)
    with lensfast.managed_span("on", "later"):
        pass
    timing.stream_of(0).run(*[1.0] * 6)
    assert durations(exporter, 3)["later"] == 1.0


def test_too_many_are_waiting(lensfast, timing, exporter, device, monkeypatch, caplog):
    monkeypatch.setattr(device, "_MOST_WAITING", 3)
    for number in range(6):
        with lensfast.managed_span("on", f"span {number}"):
            pass
    left_at = time.time_ns()
    assert durations(exporter, 3) == {"span 3": None, "span 4": None, "span 5": None}
    assert len(warnings(caplog)) == 1
    timing.stream_of(0).run(*[1.0] * 12)
    assert durations(exporter, 6)["span 0"] == 1.0
    assert all(span.end_time <= left_at for span in exporter.get_finished_spans())


def test_no_thread_is_to_be_had(lensfast, timing, exporter, monkeypatch, caplog):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with lensfast.managed_span("on", "span"):
            pass
    assert durations(exporter, 1) == {"span": None}
    assert len(warnings(caplog)) == 1
    with lensfast.managed_span("on", "later"):
        pass
    timing.stream_of(0).run(1.0, 1.0, 1.0, 1.0)
    assert durations(exporter, 2) == {"span": None, "later": 1.0}


class Raising(SpanProcessor):
    def __init__(self, error):
        self.error = error

    def on_end(self, span):
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)], ids=["exception", "the end of the thread"])
def test_a_processor_that_raises(lensfast, timing, exporter, error):
    trace.get_tracer_provider().add_span_processor(Raising(error))  # behind the exporter's
    for number in (1, 2):
        with lensfast.managed_span("on", f"span {number}"):
            pass
        timing.stream_of(0).run(1.0, float(number))
        assert durations(exporter, number)[f"span {number}"] == number
        if isinstance(error, SystemExit) and number == 1:
            for thread in threading.enumerate():
                if thread.name == "lensfast-device-time" and thread in timing.relaxed:
                    thread.join(20)


def test_a_span_whose_attributes_can_not_be_set(lensfast, timing, exporter, caplog):
    with lensfast.managed_span("on", "span") as span:

        def fail(*arguments):
            raise ValueError("no attributes here")

        span.set_attribute = fail
    timing.stream_of(0).run(1.0, 1.0)
    assert durations(exporter, 1) == {"span": None}
    assert len(warnings(caplog)) == 1


# Shutdown.


@pytest.fixture
def handle(lensfast, timing):
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    config = lensfast.NemoLensConfig(enabled=True, metrics_enabled=False, span_groups="job")
    handle = lensfast.setup_telemetry(config, span_exporter=memory)
    lensfast.set_enabled_span_groups({"on"})
    handle.exporter = memory
    return handle


def test_shutdown_waits_for_the_device(lensfast, timing, handle, monkeypatch):
    with lensfast.managed_span("on", "span"):
        pass
    work = threading.Thread(target=timing.stream_of(0).run, args=(1.0, 2.0))
    functions = [lambda timeout_s: work.start(), *lensfast.handle._before_shutdown]
    monkeypatch.setattr(lensfast.handle, "_before_shutdown", functions)
    handle.shutdown(timeout_ms=100_000)
    work.join()
    (span,) = handle.exporter.get_finished_spans()
    assert span.attributes == {DURATION: 2.0}


def test_shutdown_does_not_wait_for_ever(lensfast, timing, handle, caplog):
    with lensfast.managed_span("on", "done"):
        pass
    timing.stream_of(0).run(1.0, 2.0)
    for name in ("stuck", "behind"):
        with lensfast.managed_span("on", name):
            pass
    left_at = time.time_ns()
    handle.shutdown(timeout_ms=500)
    spans = {span.name: span for span in handle.exporter.get_finished_spans()}
    assert spans["done"].attributes == {DURATION: 2.0}
    assert not spans["stuck"].attributes  # not marked as truncated, either
    assert not spans["behind"].attributes
    assert all(span.end_time <= left_at for span in spans.values())
    assert [record.message.split(":")[0] for record in warnings(caplog)] == ["2 span(s) ended without gpu.duration_ms"]


def test_shutdown_with_a_device_that_does_not_answer(lensfast, timing, handle, device, caplog):
    answer = threading.Event()
    asked = threading.Event()

    def query(event):
        asked.set()
        answer.wait()
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "query", query)
        with lensfast.managed_span("on", "span"):
            pass
        assert asked.wait(20)
        handle.shutdown(timeout_ms=200)
        timing.stream_of(0).run(1.0, 2.0)
        answer.set()
        device._resolver.close()
    (span,) = handle.exporter.get_finished_spans()
    assert not span.attributes
    assert len(warnings(caplog)) == 1  # the span is not ended again


def test_a_flush_waits_for_the_span_that_is_being_ended(lensfast, timing, device):
    ending, go, ended = threading.Event(), threading.Event(), []

    class Slow(SpanProcessor):
        def on_end(self, span):
            ending.set()
            go.wait()
            ended.append(span.name)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Slow())
    trace.set_tracer_provider(provider)
    with lensfast.managed_span("on", "span"):
        pass
    timing.stream_of(0).run(1.0, 2.0)
    assert ending.wait(20)
    threading.Timer(0.1, go.set).start()
    device.flush(20)
    assert ended == ["span"]


def test_a_flush_without_anything_to_do(device):
    device.flush(0)
    device.flush(600)
    assert device._resolver._thread is None


def test_after_the_close_spans_end_at_once(lensfast, timing, exporter, device, caplog):
    manager = lensfast.managed_span("on", "open")
    manager.__enter__()
    device._resolver.close()
    manager.__exit__(None, None, None)
    with lensfast.managed_span("on", "later"):
        pass
    assert durations(exporter, 2) == {"open": None, "later": None}
    assert not caplog.records


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import atexit, threading, types
import torch
from test_device_time import Gpu
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
import lensfast, lensfast.contrib.torch
from lensfast.contrib.torch import _device

gpu = Gpu()
for name in ("is_initialized", "current_device", "set_device", "current_stream", "is_current_stream_capturing",
             "device", "stream", "Event"):
    setattr(torch.cuda, name, getattr(gpu, name))
torch._C._cuda_hasPrimaryContext = lambda index: True
_device._spare_captures = lambda torch: gpu.relaxed.add(threading.current_thread())
_device._EXIT_S = {exit_s}
provider = TracerProvider()  # it shuts down at exit by itself
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(
    formatter=lambda span: f"{{span.name}} {{dict(span.attributes)}}\\n")))
trace.set_tracer_provider(provider)
lensfast.contrib.torch.cuda_timing = True
with lensfast.span_cm("span"):
    pass
{after}
print("end of the program", flush=True)
"""


@pytest.mark.parametrize(
    ("after", "exit_s", "printed"),
    [
        ("gpu.stream_of(0).run(1.0, 2.0)", 60, "span {'gpu.duration_ms': 2.0}"),
        ("", 0.1, "span {}"),
        ("gpu.failing['query'] = RuntimeError('context lost')", 60, "span {}"),
    ],
    ids=["done", "never done", "context lost"],
)
def test_at_exit(lensfast, tmp_path, after, exit_s, printed):
    pytest.importorskip("torch", reason="torch is not installed")
    program = PROGRAM.format(tests=os.path.dirname(__file__), after=after, exit_s=exit_s)
    result = run_code(program, lensfast.backend, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr.replace("Traceback", "", int("context lost" in result.stderr))
    assert printed in result.stdout.splitlines()


# Fork.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_spans_alone(lensfast, timing, exporter, device):
    with lensfast.managed_span("on", "waiting"):
        pass
    manager = lensfast.managed_span("on", "open")
    manager.__enter__()
    parent = device._resolver
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            timing.initialized = False  # as torch says in a forked child
            for function in ("record", "query", "elapsed_time", "Event"):
                timing.failing[function] = AssertionError("CUDA is not for forked children")
            manager.__exit__(None, None, None)
            with lensfast.managed_span("on", "child"):
                pass
            device.flush(20)
            names = [span.name for span in exporter.get_finished_spans()]
            fresh = device._resolver is not parent and not device._resolver.waiting and parent.waiting
            kept = parent in device._inherited and any(clock is not parent for clock in device._inherited)
            os._exit(0 if names == ["open", "child"] and fresh and kept and not timing.offences else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    manager.__exit__(None, None, None)
    timing.stream_of(0).run(1.0, 2.0, 0.0, 3.0)
    assert durations(exporter, 2) == {"waiting": 2.0, "open": 3.0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_times_spans_where_it_can(lensfast, timing, exporter):
    """Forked before CUDA was initialised, a child may use it."""
    with lensfast.managed_span("on", "parent's"):
        pass
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            timing.streams.clear()
            with lensfast.managed_span("on", "child"):
                pass
            timing.stream_of(0).run(1.0, 5.0)
            os._exit(0 if durations(exporter, 1) == {"child": 5.0} else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# NVTX.


def test_ranges_for_spans(lensfast, contrib, gpu, exporter):
    contrib.nvtx = True
    with lensfast.managed_span("on", "outer"), lensfast.span_cm("inner"):
        assert gpu.ranges == [("start", "outer"), ("start", "inner")]
    assert gpu.ranges[2:] == [("end", "inner"), ("end", "outer")]
    assert durations(exporter, 2) == {"inner": None, "outer": None}
    assert not gpu.events


def test_ranges_need_no_cuda(lensfast, contrib, gpu, exporter):
    gpu.initialized = False
    contrib.nvtx = contrib.cuda_timing = True
    with lensfast.managed_span("on", "span"):
        pass
    assert gpu.ranges == [("start", "span"), ("end", "span")]


def test_ranges_per_group(lensfast, contrib, gpu, exporter):
    lensfast.set_enabled_span_groups({"on", "other"})
    contrib.nvtx = {"other"}
    for group in ("on", "other"):
        with lensfast.managed_span(group, group):
            pass
    assert gpu.ranges == [("start", "other"), ("end", "other")]


def test_ranges_and_device_time_together(lensfast, contrib, timing, exporter):
    contrib.nvtx = True
    captured = timing.stream_of(0, 7)
    captured.capturing = True
    with timing.stream(captured), lensfast.managed_span("on", "captured"):
        pass
    with lensfast.managed_span("on", "span"):
        pass
    # The range is over where the span is left, before the device has come there.
    assert timing.ranges == [("start", "captured"), ("end", "captured"), ("start", "span"), ("end", "span")]
    timing.stream_of(0).run(1.0, 2.0)
    assert durations(exporter, 2) == {"captured": None, "span": 2.0}


def test_a_range_that_ends_on_another_thread(lensfast, contrib, gpu, exporter):
    contrib.nvtx = True
    manager = lensfast.managed_span("on", "span")
    manager.__enter__()
    thread = threading.Thread(target=manager.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert gpu.ranges == [("start", "span"), ("end", "span")]


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'_NVTXStub' object has no attribute 'rangeStartA'"),
        RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?"),
    ],
    ids=["attribute", "runtime"],
)
def test_a_build_without_nvtx(lensfast, contrib, gpu, exporter, caplog, error):
    contrib.nvtx = True
    gpu.failing["range_start"] = error
    for _ in range(2):
        with lensfast.managed_span("on", "span"):
            pass
    finished(exporter, 2)
    assert ["has no NVTX" in record.message for record in warnings(caplog)] == [True]
    assert contrib.nvtx is False
    assert lensfast._spans.watch is None


def test_torch_for_the_cpu_has_no_nvtx(lensfast, contrib, exporter, caplog):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has CUDA")
    contrib.nvtx = True
    with lensfast.managed_span("on", "span"):
        pass
    assert contrib.nvtx is False
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("function", ["range_start", "range_end"])
def test_ranges_that_fail(lensfast, contrib, gpu, exporter, caplog, function):
    contrib.nvtx = True
    gpu.failing[function] = TypeError("not a name")
    for _ in range(2):
        with lensfast.managed_span("on", "span"):
            pass
    finished(exporter, 2)
    assert contrib.nvtx is True
    assert len(warnings(caplog)) == 1
