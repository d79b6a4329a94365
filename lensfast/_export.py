"""How ended spans reach the exporter, and what becomes of them: no span is lost without being counted.

Native spans that go to lensfast's own OTLP exporter are encoded in C as they end (csrc/otlp.c) and wait in a bounded
queue for the thread here, which hands whole requests to the standard exporter. All other spans go through the SDK's
BatchSpanProcessor.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
from opentelemetry.metrics import Observation
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from ._backend import compiled
from ._otlp import encode

logger = logging.getLogger("lensfast.providers")

MAX_QUEUE_BYTES = 64 * 2**20
NATIVE_QUEUE_SIZE = 2**16  # spans as objects, of about a kilobyte
_BATCH_SPANS = 2048
_BATCH_BYTES = 2**20  # a collector takes 4 MiB


@dataclass(frozen=True)
class SpanStats:
    """What became of the sampled spans that ended in this process, since it began or was forked off."""

    ended: int = 0
    """All of them."""
    queued: int = 0
    """Not handed to the exporter yet, or being sent."""
    exported: int = 0
    """Taken by the exporter, which reported success."""
    failed: int = 0
    """Lost by the exporter: it reported a failure or raised, as when the collector does not answer."""
    dropped: int = 0
    """Never handed to the exporter: the queue was full, telemetry had been shut down, or shutdown had no time left."""


class EncodedSpans:
    """A batch as an exporter gets it: so many spans, encoded as one request. They can be counted, and not looked at."""

    def __init__(self, request: bytes, count: int) -> None:
        self.request = request
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    # As of the message that the HTTP exporter asks for its bytes.
    def SerializeToString(self) -> bytes:  # noqa: N802
        """The request."""
        return self.request

    SerializePartialToString = SerializeToString


def pass_encoded(exporter: Any) -> bool:
    """Let an OTLP exporter take EncodedSpans, besides what it takes. False if it is none of the stock ones.

    Both exporters find the encoder under this name in their module.
    """
    module = importlib.import_module(type(exporter).__module__)
    stock = getattr(module, "encode_spans", None)
    if stock is None or not type(exporter).__module__.startswith("opentelemetry.exporter.otlp.proto."):
        return False
    if hasattr(stock, "passes_encoded"):
        return True
    message = None
    if ".grpc." in type(exporter).__module__:
        message = importlib.import_module(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
        ).ExportTraceServiceRequest

    def encode_spans(spans: Any) -> Any:
        if not hasattr(spans, "request"):  # not by the class: this may outlive a first import of lensfast
            return stock(spans)
        # gRPC's stub takes messages only. Protobuf's C code parses one in a fraction of a microsecond a span.
        return spans if message is None else message.FromString(spans.request)

    encode_spans.passes_encoded = True  # type: ignore[attr-defined]
    module.encode_spans = encode_spans  # type: ignore[attr-defined]
    return True


def encoded_frame(resource: Any, scope: Any) -> tuple[bytes, bytes, bytes, bytes]:
    """What is around encoded spans, by the stock encoder: of the resource before and after, and of the scope."""
    encoder = importlib.import_module("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    span = ReadableSpan("", SpanContext(1, 1, False, TraceFlags(1)), resource=resource, instrumentation_scope=scope)
    span._start_time = span._end_time = 1
    (of_resource,) = encoder.encode_spans([span]).resource_spans
    (of_scope,) = of_resource.scope_spans
    of_scope.ClearField("spans")
    schema_url = type(of_scope)(schema_url=of_scope.schema_url).SerializeToString()
    of_scope.ClearField("schema_url")
    resource_schema_url = type(of_resource)(schema_url=of_resource.schema_url).SerializeToString()
    of_resource.ClearField("schema_url")
    of_resource.ClearField("scope_spans")
    return of_resource.SerializeToString(), resource_schema_url, of_scope.SerializeToString(), schema_url


def can_encode() -> bool:
    """Whether C encodes a span as the stock encoder that is installed does: an encoder that has changed is noticed."""
    from . import _native

    encoder = importlib.import_module("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    spans: list[Any] = []

    class Collect(SpanProcessor):
        def on_end(self, span: Any) -> None:
            spans.append(span)

    provider = _native.TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(Collect())
    sink = compiled.Sink(print, max_spans=1, max_bytes=1, batch_spans=1, batch_bytes=1)
    tracer = provider.get_tracer("lensfast.probe")
    state = TraceState([("vendor", "a"), ("other", "c")])
    remote = NonRecordingSpan(SpanContext(2**127 + 1, 2**63 + 1, True, TraceFlags(1), state))
    values: dict[str, Any] = {
        "text": "\u00e9",
        "int": -1,
        "float": 0.5,
        "yes": True,
        "no": False,
        "list": ("a", "b"),
        "empty": (),
    }
    for parent in (INVALID_SPAN, remote):
        span = tracer.start_span("probe", set_span_in_context(parent), SpanKind.CLIENT, values, start_time=1)
        span.set_status(StatusCode.ERROR, "failed")
        tracer.start_span("", set_span_in_context(span), start_time=2).end(3)
        span.end(4)

    def only_span(request: Any) -> Any:
        return request.resource_spans[0].scope_spans[0].spans[0]

    message = type(encoder.encode_spans([]))
    for span in spans:
        encoded = sink.encode(span)
        if encoded is None or only_span(message.FromString(encoded)) != only_span(encoder.encode_spans([span])):
            logger.warning("the OTLP encoder that is installed is not known: spans are encoded by it, more slowly")
            return False
    return True


def report_as_metrics(meter_provider: Any, processor: Any) -> None:
    """Losses, once there are any, as the metrics that OpenTelemetry's semantic conventions name for an SDK."""
    meter = meter_provider.get_meter("lensfast")
    for name, lost, error_type in (
        ("otel.sdk.processor.span.processed", "dropped", "queue_full"),
        ("otel.sdk.exporter.span.exported", "failed", "rejected"),
    ):

        def observe(options: Any, lost: str = lost, error_type: str = error_type) -> list[Observation]:
            count = getattr(processor.stats(), lost)
            return [Observation(count, {"error.type": error_type})] if count else []

        meter.create_observable_counter(name, [observe], "{span}", f"Spans that were lost ({lost})")


def _warn_of_drops(queued: int) -> None:
    logger.warning(
        "the queue of ended spans is full (%d spans): spans are dropped until they can be sent. "
        "TelemetryHandle.stats() counts them (this is logged once). OTEL_BSP_MAX_QUEUE_SIZE sets its size",
        queued,
    )


def _environ_int(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return default


def _answer(requests: SimpleQueue[Any]) -> None:
    """Let go those who wait for a flush that nobody will do."""
    with contextlib.suppress(Empty):
        while True:
            if isinstance(request := requests.get_nowait(), threading.Event):
                request.set()


class EncodingSpanProcessor(SpanProcessor):
    """Span processor: a bounded queue of encoded spans, and the thread that empties it.

    The settings are those of the SDK's BatchSpanProcessor: OTEL_BSP_SCHEDULE_DELAY (5,000 ms),
    OTEL_BSP_MAX_QUEUE_SIZE and OTEL_BSP_MAX_EXPORT_BATCH_SIZE; but the queue is bounded by 64 MiB of encoded spans if
    no number is set, and a batch is of at most 2,048 spans or 1 MiB.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._delay = _environ_int("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000
        queue_size = _environ_int("OTEL_BSP_MAX_QUEUE_SIZE", 2**62)
        batch_size = _environ_int("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(_BATCH_SPANS, queue_size))
        self.sink = compiled.Sink(
            self._wake,
            max_spans=queue_size,
            max_bytes=MAX_QUEUE_BYTES,
            batch_spans=batch_size,
            batch_bytes=_BATCH_BYTES,
        )
        self._begin()
        self._start_thread()
        if hasattr(os, "register_at_fork"):
            begin = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (method := begin()) and method())

    def _begin(self) -> None:
        # Its put() may be interrupted by a signal handler that ends a span, too: an Event's set() may not.
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._exporting = threading.RLock()  # an exporter may flush
        self._exported = 0
        self._failed = 0
        self._stopped = False
        self._ended = False  # the thread is about to end

    def _after_fork(self) -> None:
        """In a child, what waits is the parent's, and its thread is not there. One starts with the first span."""
        self.sink.forget()
        stopped = self._stopped
        self._begin()
        self._stopped = stopped

    def _start_thread(self) -> None:
        self._thread = thread = threading.Thread(
            target=self._run, args=(self._requests,), name="lensfast-span-export", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            if self._thread is thread:
                self._thread = None  # none is to be had: what waits is sent by force_flush and shutdown

    def _wake(self, word: str) -> None:
        """Called by the queue, in the thread that ended a span: `first`, `full` or `dropped`."""
        try:
            if word == "dropped":
                _warn_of_drops(self.sink.waiting)
                return
            self._requests.put(word)
            if self._thread is None and not self._stopped:
                self._start_thread()
        except Exception:
            logger.debug("could not wake the export of spans", exc_info=True)

    def _run(self, requests: SimpleQueue[Any]) -> None:
        due: float | None = None
        while True:
            try:
                request = requests.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except Empty:
                request = "due"
            if self._thread is not threading.current_thread():
                # Two were started at once, and this is one too many.
                requests.put("first" if request == "due" else request)
                return
            if request == "first":
                due = time.monotonic() + self._delay
                continue
            try:
                self._export(everything=request != "full")
            except Exception:
                logger.exception("the export of spans failed")
            if request != "full":
                due = None
            if isinstance(request, threading.Event):
                request.set()
            elif request == "stop":
                self._ended = True
                _answer(requests)
                return

    def _export(self, everything: bool) -> None:
        """Hand the full batches to the exporter, or all there is."""
        with self._exporting:
            while not self._stopped and (taken := self.sink.take(everything)) is not None:
                request, odd, count = taken
                result = None
                token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
                try:
                    if odd:
                        encoded, sendable = encode(odd)
                        request += encoded  # two requests, one after the other, are one
                        count -= len(odd) - len(sendable)
                        self._failed += len(odd) - len(sendable)
                    if count:
                        result = self._exporter.export(EncodedSpans(request, count))
                except Exception:
                    logger.exception("the exporter of spans raised")
                finally:
                    detach(token)
                    exported = count if result is SpanExportResult.SUCCESS else 0
                    self._exported += exported
                    self._failed += count - exported

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Nothing to do."""

    def _on_ending(self, span: Any) -> None:
        """Nothing to do."""

    on_start.does_nothing = _on_ending.does_nothing = True  # type: ignore[attr-defined]

    def on_end(self, span: ReadableSpan) -> None:
        """Take in a span that is not native; native ones go to the sink."""
        if span.context is not None and span.context.trace_flags.sampled:
            self.sink.add(span)

    def force_flush(self, timeout_millis: float | None = 30_000) -> bool:
        """Send what waits. False if that takes longer."""
        if self._stopped:
            return False
        thread = self._thread
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            self._export(everything=True)
            return True
        done = threading.Event()
        self._requests.put(done)
        if self._ended:  # the thread may not have seen it
            _answer(self._requests)
        return done.wait(None if timeout_millis is None else timeout_millis / 1000)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Take in no more, send what waits if it can be sent in that time, and shut the exporter down."""
        if self._stopped:
            return
        self.sink.close()
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._requests.put("stop")
            thread.join(timeout_millis / 1000)
        else:
            self._export(everything=True)
        self._stopped = True
        self.sink.discard()  # lost: the exporter could not take it in that time
        self._exporter.shutdown()

    def stats(self) -> SpanStats:
        """The counts, as of now."""
        # In this order, for spans end and are sent meanwhile: what has left the queue has been taken in.
        exported, failed, dropped = self._exported, self._failed, self.sink.dropped
        accepted = self.sink.accepted
        return SpanStats(accepted + dropped, accepted - exported - failed, exported, failed, dropped)


class CountingSpanProcessor(BatchSpanProcessor):
    """The SDK's BatchSpanProcessor, with the counts of EncodingSpanProcessor.

    Native spans end faster than the SDK's, so the queue for them is longer, if no number is set.
    """

    def __init__(self, exporter: Any, native: bool = False) -> None:
        queue_size = NATIVE_QUEUE_SIZE if native and not os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip() else None
        super().__init__(exporter, max_queue_size=queue_size)
        self._forget()
        self._closed = False
        original = exporter.export

        def export(spans: Any, *args: Any, **kwargs: Any) -> Any:
            result = None
            left_out = -getattr(exporter, "unencodable", 0)
            try:
                result = original(spans, *args, **kwargs)
                return result
            finally:
                left_out += getattr(exporter, "unencodable", 0)
                exported = len(spans) - left_out if result is SpanExportResult.SUCCESS else 0
                with self._lock:
                    self._exported += exported
                    self._failed += len(spans) - exported

        with contextlib.suppress(AttributeError):  # an exporter with slots is not counted
            exporter.export = export
        if hasattr(os, "register_at_fork"):
            forget = weakref.WeakMethod(self._forget)
            os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a signal handler or a finalizer may end a span in the middle of this
        self._ended = self._dropped = self._exported = self._failed = 0
        self._warned = False

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        queue = self._queued_spans()
        with self._lock:
            self._ended += 1
            full = len(queue) == queue.maxlen
            if not full and not self._closed:
                super().on_end(span)
                return
            # Not left to the SDK, which would drop the oldest one, and count nothing.
            self._dropped += 1
            warn = full and not self._warned and not self._closed
            self._warned |= warn
        if warn:
            _warn_of_drops(len(queue))

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Send what waits; what is left then, and what ends from now on, is dropped."""
        self._closed = True
        try:
            super().shutdown(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            queue = self._queued_spans()
            with self._lock:
                self._dropped += len(queue)
                queue.clear()

    def _queued_spans(self) -> Any:
        inner = getattr(self, "_batch_processor", None)  # newer SDKs have the queue in there
        return vars(self)["queue"] if inner is None else inner._queue

    def stats(self) -> SpanStats:
        """The counts, as of now."""
        with self._lock:
            ended, exported, failed, dropped = self._ended, self._exported, self._failed, self._dropped
        return SpanStats(ended, ended - exported - failed - dropped, exported, failed, dropped)
