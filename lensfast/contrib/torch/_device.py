"""Device time of spans, by CUDA events, and their mirror in NVTX.

An event is recorded on the current stream as a span starts, and another as it ends. A thread looks now and then which
of them the device has passed, and only then ends the span, with the time that it was left at. Nothing waits for the
device. No lock is taken where a span ends: signal handlers and finalizers end spans in the middle of that, too.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from opentelemetry.trace import Span

from ... import _spans, handle
from ..._spans import report_failure

logger = logging.getLogger("lensfast.contrib.torch")

GPU_DURATION = "gpu.duration_ms"
_POLL_S = 0.01
_GIVE_UP_S = 30.0
_EXIT_S = 2.0
_MOST_WAITING = 2**16
_MOST_POOLED = 1024  # a stream's launch queue holds no more than about as many
_MEASURE = "measure the device time of span"

_package: Any = sys.modules[__package__]
_cuda_timing: bool | frozenset[str] = False
_nvtx: bool | frozenset[str] = False


def choose(setting: str, value: Any) -> bool | frozenset[str]:
    """Let what is assigned to `cuda_timing` or `nvtx` of lensfast.contrib.torch take effect; returns what it reads as.

    Raises:
        TypeError: it is neither a bool or None nor a collection of str.
    """
    chosen: Any = False if value is None else value
    if not isinstance(chosen, bool):
        is_collection = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        chosen = tuple(value) if is_collection else (None,)
        if not all(isinstance(group, str) for group in chosen):
            raise TypeError(
                f"lensfast.contrib.torch.{setting} takes True, False or a set of group names such as {{'step'}}, "
                f"not {value!r}"
            )
        chosen = frozenset(chosen)
    globals()[f"_{setting}"] = chosen
    _spans.watch = watch if _cuda_timing or _nvtx else None
    return chosen  # type: ignore[no-any-return]


def watch(group: str | None, name: str) -> _Watch | None:
    """lensfast._spans.watch, while a setting is on."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None:
        return None
    range_id = _open_range(cuda, name) if _nvtx is True or (_nvtx and group in _nvtx) else None
    timed = _cuda_timing is True or (_cuda_timing and group in _cuda_timing)
    clock = _resolver.start_clock(torch, name) if timed else None
    return None if clock is None and range_id is None else _Watch(cuda, name, clock, range_id)


class _Watch:
    """One span's, from start to end."""

    __slots__ = ("_clock", "_cuda", "_name", "_range_id")

    def __init__(self, cuda: Any, name: str, clock: _Clock | None, range_id: Any) -> None:
        self._cuda = cuda
        self._name = name
        self._clock = clock
        self._range_id = range_id

    def end(self, span: Span) -> None:
        if self._range_id is not None:
            try:
                self._cuda.nvtx.range_end(self._range_id)
            except Exception as failure:
                report_failure("end the NVTX range of span", self._name, failure)
        if self._clock is None or not self._clock.stop(self._cuda, span):
            span.end()


def _open_range(cuda: Any, name: str) -> Any:
    nvtx = getattr(cuda, "nvtx", None)
    if nvtx is None:  # torch is being imported
        return None
    try:
        # A range of the process, not of the thread's stack: spans overlap, and end on other threads.
        return nvtx.range_start(name)
    except (AttributeError, RuntimeError):  # which of the two depends on the version
        logger.warning(
            "this build of torch has no NVTX: spans are not mirrored, and lensfast.contrib.torch.nvtx is False again"
        )
        _package.nvtx = False
    except Exception as failure:
        report_failure("start an NVTX range for span", name, failure)
    return None


class _Clock:
    """The device's time on one stream, from when it was made to stop()."""

    __slots__ = ("begin", "deadline", "device", "end", "end_time", "lane", "name", "resolver", "span", "stream")

    def __init__(self, resolver: _Resolver, name: str, device: int, stream: Any, begin: Any) -> None:
        self.resolver = resolver
        self.name = name
        self.device = device
        self.stream = stream
        self.lane: tuple[int, int] = (device, stream.cuda_stream)
        self.begin = begin

    def stop(self, cuda: Any, span: Span) -> bool:
        """Whether the span will be ended; if not, the caller is to do it."""
        if self.resolver is not _resolver:
            _inherited.append(self)
            return False
        try:
            if self.resolver.closed or not span.is_recording() or _captures(cuda, self.stream):
                self.resolver.give_back(self.device, self.begin)
                return False
            self.end = self.resolver.take_event(cuda, self.device)
            # Whatever stream is current now: the time between events of two streams says nothing about either.
            self.end.record(self.stream)
            self.end_time = time.time_ns()
            self.deadline = time.monotonic() + _GIVE_UP_S
            self.span = span
            self.resolver.hold(self)
            return True
        except Exception as failure:
            report_failure(_MEASURE, self.name, failure)
            return False

    def read(self) -> float | None:
        """Milliseconds; None if the device has not come to the end yet."""
        return float(self.begin.elapsed_time(self.end)) if self.end.query() else None


def _captures(cuda: Any, stream: Any) -> bool:
    if cuda.current_stream() == stream:
        return bool(cuda.is_current_stream_capturing())
    # The outer one leads back to a device that has no context without making it one.
    with cuda.device(stream.device_index), cuda.stream(stream):
        return bool(cuda.is_current_stream_capturing())


class _Resolver:
    """Holds spans until the device has come to their ends, and ends them. One for each process."""

    def __init__(self) -> None:
        # In order of their ends. Who takes a clock out ends its span.
        self.waiting: dict[_Clock, bool] = {}
        self.closed = False
        self.unusable = False
        self._pool: dict[int, list[Any]] = {}
        self._contexts: set[int] = set()
        # put() may be interrupted by a put(), which no lock or Event of threading allows.
        self._doorbell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._ending = False  # the thread has taken a clock out, and its span may not have ended

    def start_clock(self, torch: Any, name: str) -> _Clock | None:
        """A clock on the current stream, if that can be had without initialising or disturbing anything."""
        cuda = torch.cuda
        try:
            if self.closed or self.unusable or not cuda.is_initialized():
                return None
        except AttributeError:  # torch is being imported
            return None
        try:
            device = cuda.current_device()
            if device not in self._contexts:
                # Before a rank chooses its device it is on 0, where an event would take up memory for a context.
                exists = getattr(torch._C, "_cuda_hasPrimaryContext", None)
                if exists is not None and not exists(device):
                    return None
                self._contexts.add(device)
            if cuda.is_current_stream_capturing():
                return None
            stream = cuda.current_stream()
            event = self.take_event(cuda, device)
            event.record(stream)
            return _Clock(self, name, device, stream, event)
        except Exception as failure:
            report_failure(_MEASURE, name, failure)
            return None

    def take_event(self, cuda: Any, device: int) -> Any:
        """An event for streams of this device: once recorded, it is good for no other."""
        with suppress(LookupError):
            return self._pool[device].pop()
        return cuda.Event(enable_timing=True)

    def give_back(self, device: int, *events: Any) -> None:
        """Keep events for later spans. Those that failed, or may never happen, are not given back."""
        pool = self._pool.setdefault(device, [])
        if len(pool) < _MOST_POOLED:
            pool.extend(events)

    def hold(self, clock: _Clock) -> None:
        """Take over its span.

        Raises:
            RuntimeError: too many are waiting, or no thread is to be had. The span is still the caller's.
        """
        if len(self.waiting) >= _MOST_WAITING:
            raise RuntimeError(f"{_MOST_WAITING} spans are waiting for the device")
        if self._thread is None or not self._thread.is_alive():
            self._start_thread(clock.device)
        self.waiting[clock] = True
        if self._doorbell.empty():
            self._doorbell.put(True)

    def _start_thread(self, device: int) -> None:
        if not self._starting.acquire(blocking=False):
            return  # another does
        try:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, args=(device,), name="lensfast-device-time", daemon=True)
                thread.start()
                self._thread = thread
                # Now, as exit functions run last in, first out: before that of the provider that made the span.
                atexit.register(self.close)
        finally:
            self._starting.release()

    def _run(self, device: int) -> None:
        torch = sys.modules["torch"]
        try:
            torch.cuda.set_device(device)
            _spare_captures(torch)
        except Exception as failure:
            self.unusable = True
            logger.warning("the device time of spans can't be measured, and is off in this process", exc_info=failure)
        while self._doorbell.get():
            while self.waiting:
                if self.unusable:
                    self._ending = True
                    self._end_all()
                    self._ending = False
                else:
                    time.sleep(_POLL_S)
                    device = self._sweep(torch.cuda, device)

    def _sweep(self, cuda: Any, device: int) -> int:
        """End what the device has come to the end of, and what it is given up for. Returns the thread's device."""
        behind = set()
        for clock in list(self.waiting):
            duration = None
            try:
                if clock.lane not in behind:
                    if clock.device != device:
                        # Asked from a device without a context, CUDA would make one there.
                        cuda.set_device(clock.device)
                        device = clock.device
                    duration = clock.read()
                if duration is None:
                    behind.add(clock.lane)
                    if time.monotonic() < clock.deadline:
                        continue
                    raise TimeoutError(f"the device has not come to its end within {_GIVE_UP_S:g} s")
                self.give_back(clock.device, clock.begin, clock.end)
            except Exception as failure:
                report_failure(_MEASURE, clock.name, failure)
            self._ending = True
            try:
                self._end(clock, duration)
            finally:
                self._ending = False
        return device

    def _end(self, clock: _Clock, duration: float | None = None) -> bool:
        """End its span, unless another thread does."""
        if not self.waiting.pop(clock, False):
            return False
        try:
            if duration is not None:
                clock.span.set_attribute(GPU_DURATION, duration)
        except Exception as failure:
            report_failure("set attribute", GPU_DURATION, failure)
        try:
            clock.span.end(end_time=clock.end_time)
        except Exception as failure:
            report_failure("end span", clock.name, failure)
        return True

    def _end_all(self) -> int:
        return sum(self._end(clock) for clock in list(self.waiting))

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (self.waiting or self._ending) and time.monotonic() < deadline:
            if self._thread is None or not self._thread.is_alive():
                break
            time.sleep(0.001)
        if count := self._end_all():
            logger.warning(
                "%d span(s) ended without %s: the device had not come to their ends when telemetry was shut down",
                count, GPU_DURATION,
            )  # fmt: skip

    def close(self) -> None:
        """At exit: flush and stop. A thread that is asking the device while the interpreter goes may abort it."""
        if self is not _resolver:
            return
        self.flush(_EXIT_S)
        self.closed = True
        self._end_all()
        self._doorbell.put(False)
        if self._thread is not None:
            self._thread.join(1.0)


def _spare_captures(torch: Any) -> None:
    """Let this thread ask for events while some stream of the process is captured into a CUDA graph.

    In the mode that threads start with, asking would spoil the capture; torch's own threads change it like this.

    Raises:
        RuntimeError: that can't be had. Then there is no safe moment to ask: a capture is known to its own thread only.
    """
    runtime = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"  # through it, the runtime that torch has loaded
    for library, name in (
        (str(runtime), "cudaThreadExchangeStreamCaptureMode"),
        ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ):
        with suppress(OSError, AttributeError):
            exchange = getattr(ctypes.CDLL(library), name)
            relaxed = ctypes.c_int(2)
            if code := exchange(ctypes.byref(relaxed)):
                raise RuntimeError(f"{name} failed with CUDA error {code}")
            return
    raise RuntimeError("found no function that lets a thread ask for CUDA events during a capture")


_resolver = _Resolver()
# What a forked child has of its parent's: kept for ever, since even to free an event there may abort the child.
_inherited: list[Any] = []


def _begin_anew() -> None:
    global _resolver
    _inherited.append(_resolver)
    _resolver = _Resolver()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def flush(timeout_s: float) -> None:
    """Give the device so many seconds to come to the ends of the spans that wait for it, then end the rest without.

    Never raises. Thread-safe.
    """
    _resolver.flush(timeout_s)


handle._before_shutdown.append(flush)
