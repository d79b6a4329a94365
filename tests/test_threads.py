"""Many threads at once, on everything that they share. Without a GIL they run truly at once, and races crash."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from conftest import at_once

THREADS = 6
pytestmark = pytest.mark.usefixtures("hasty_threads")


class Counts(SpanProcessor):
    """How often spans of each name started and ended."""

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._lock = threading.Lock()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        with self._lock:
            self.started[span.name] += 1

    def on_end(self, span: Any) -> None:
        with self._lock:
            self.ended[span.name] += 1


class Keep:
    """An exporter that keeps the requests, as one."""

    def __init__(self) -> None:
        self.request = b""

    def export(self, batch: Any) -> SpanExportResult:
        self.request += batch.SerializeToString()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to do."""

    def spans(self) -> list[Any]:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        message = service.ExportTraceServiceRequest.FromString(self.request)
        return [span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def native(lensfast: ModuleType) -> Any:
    if reason := lensfast._native.why_not():
        pytest.skip(f"no native spans: {reason}")
    return lensfast._native


def test_sites_while_groups_are_made_and_switched(lensfast: ModuleType, exporter: Any) -> None:
    """Those of a group that is always on make their spans, those of one that never is, none."""
    group = lensfast.span_group("always")
    lensfast.set_enabled_span_groups({"always"})

    @lensfast.trace_fn("always", "traced")
    def traced(value: int) -> int:
        return value + 1

    def work() -> None:
        for i in range(200):
            with lensfast.managed_span("always", "managed", number=i, text="x"):
                assert traced(i) == i + 1
            with group.span("of the handle"), lensfast.managed_span("never", "never", number=i):
                pass
            with lensfast.managed_span(f"switched_{i % 50}", "now and then"):
                pass

    def switch() -> None:
        for i in range(200):
            lensfast.span_group(f"switched_{i}")
            lensfast.set_enabled_span_groups({"always", f"switched_{i % 50}"})

    at_once(switch, *[work] * THREADS)
    names = Counter(span.name for span in exporter.get_finished_spans())
    names.pop("now and then", None)
    assert names == dict.fromkeys(("managed", "traced", "of the handle"), 200 * THREADS)


def test_one_manager_that_many_threads_enter(lensfast: ModuleType, exporter: Any) -> None:
    lensfast.set_enabled_span_groups({"group"})
    counts = Counts()
    trace.get_tracer_provider().add_span_processor(counts)  # type: ignore[attr-defined]
    manager = lensfast.managed_span("group", "shared", a=1)

    def work() -> None:
        for _ in range(100):
            # Left once too often, where others took what it had entered, is an error.
            with contextlib.suppress(RuntimeError), manager:
                pass

    at_once(*[work] * THREADS)
    assert counts.started == counts.ended == {"shared": 100 * THREADS}


def test_providers_that_come_and_go(lensfast: ModuleType, exporter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each span is of the provider that was global before or after."""
    lensfast.set_enabled_span_groups({"group"})
    first = trace.get_tracer_provider()
    counts = Counts()
    first.add_span_processor(counts)  # type: ignore[attr-defined]
    second = type(first)(shutdown_on_exit=False)  # type: ignore[call-arg]
    second.add_span_processor(counts)  # type: ignore[attr-defined]

    def work() -> None:
        for _ in range(200):
            with lensfast.managed_span("group", "span"):
                pass

    def switch() -> None:
        for _ in range(100):
            for provider in (second, first):
                monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)

    at_once(switch, *[work] * THREADS)
    assert counts.started == counts.ended == {"span": 200 * THREADS}


def test_processors_that_are_added(native: Any) -> None:
    """A span reaches all that were there before it began; plans are made anew meanwhile."""
    provider = native.TracerProvider(shutdown_on_exit=False)
    counts = Counts()
    provider.add_span_processor(counts)
    tracer = provider.get_tracer("scope")

    def work() -> None:
        for i in range(200):
            with tracer.start_as_current_span("outer", attributes={"i": i}):
                tracer.start_span("inner").end()

    def add() -> None:
        for _ in range(20):
            provider.add_span_processor(Counts())

    at_once(add, *[work] * THREADS)
    assert counts.started == counts.ended == dict.fromkeys(("outer", "inner"), 200 * THREADS)


def test_one_span_that_all_change_and_read(native: Any) -> None:
    tracer = native.TracerProvider(shutdown_on_exit=False).get_tracer("scope")
    for _ in range(20):
        span = tracer.start_span("span", attributes={"a": 0})

        def change(span: Any = span) -> None:
            for i in range(5):
                span.set_attribute("a", i)
                span.set_attributes({"b": i, "c": "text"})
                span.update_name(f"name {i}")
                span.set_status(trace.StatusCode.ERROR, "x")
                span.add_event("event", {"i": i})

        def read(span: Any = span) -> None:
            for _ in range(10):
                assert set(span.attributes) <= {"a", "b", "c"}
                assert span.name.startswith(("span", "name"))
                assert span.get_span_context().trace_id == span.context.trace_id
                assert all(event.name == "event" for event in span.events)
                # The SDK takes a key out to put it back, and reads without its lock.
                with contextlib.suppress(KeyError):
                    assert span.to_json()

        at_once(change, change, read, read)
        assert len(span.events) == 10
        span.end()
        assert dict(span.attributes) == {"a": 4, "b": 4, "c": "text"}


def test_a_queue_that_many_fill_and_some_empty(native: Any, lensfast: ModuleType) -> None:
    """Spans of many tracers, with attributes of all kinds; what is counted is what arrives."""
    pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    exporter = Keep()
    provider = native.TracerProvider(shutdown_on_exit=False)
    processor = lensfast._export.EncodingSpanProcessor(exporter)
    provider.add_span_processor(processor)
    tracers = [provider.get_tracer(f"scope {i}") for i in range(3)]
    parents = [
        set_span_in_context(
            NonRecordingSpan(SpanContext(i + 1, i + 1, True, TraceFlags(1), TraceState([("vendor", str(i))])))
        )
        for i in range(2)
    ]

    def work() -> None:
        for i in range(150):
            span = tracers[i % 3].start_span("span", parents[i % 2], attributes={"i": i, "text": "\u00e9", "x": 0.5})
            if i % 5 == 0:
                span.set_attribute("list", [1, 2])
            if i % 7 == 0:
                span.add_event("event")
            span.end()

    done = threading.Event()

    def empty() -> None:
        while not done.is_set():
            processor.force_flush()
            assert processor.stats().dropped == 0

    def all_work() -> None:
        try:
            at_once(*[work] * THREADS)
        finally:
            done.set()

    at_once(all_work, empty, empty)
    processor.force_flush()
    spans = exporter.spans()
    stats = processor.stats()
    processor.shutdown()
    assert (stats.ended, stats.exported, stats.queued) == (150 * THREADS, 150 * THREADS, 0)
    assert Counter((span.attributes[0].value.int_value, span.trace_state) for span in spans) == {
        (i, f"vendor={i % 2}"): THREADS for i in range(150)
    }
    assert len({span.span_id for span in spans}) == 150 * THREADS


def test_shutdown_while_all_work(native: Any, lensfast: ModuleType) -> None:
    """Open spans are ended once, by one or the other; all that ended are counted."""
    for _ in range(10):
        exporter = Keep()
        provider = native.TracerProvider(shutdown_on_exit=False)
        processor = lensfast._export.EncodingSpanProcessor(exporter)
        counts = Counts()
        provider.add_span_processor(counts)
        provider.add_span_processor(processor)
        tracer = provider.get_tracer("scope")
        at_once(
            *[lambda tracer=tracer: [tracer.start_span("span").end() for _ in range(100)]] * THREADS,
            provider.shutdown,
        )
        stats = processor.stats()
        assert stats.ended == counts.ended["span"]
        assert stats.queued == 0
        assert stats.exported + stats.dropped == stats.ended


def test_each_thread_has_its_own_current_span(lensfast: ModuleType, exporter: Any) -> None:
    lensfast.set_enabled_span_groups({"group"})

    def work() -> None:
        for _ in range(100):
            with lensfast.managed_span("group", "outer") as outer:
                with lensfast.managed_span("group", "inner") as inner:
                    assert trace.get_current_span() is inner
                    assert inner.parent.span_id == outer.get_span_context().span_id
                assert trace.get_current_span() is outer
            assert context.get_current() == {}

    at_once(*[work] * THREADS)
    assert len({span.context.span_id for span in exporter.get_finished_spans()}) == 200 * THREADS
