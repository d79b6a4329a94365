"""How ended spans reach the exporter, and the counts of what became of them."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from opentelemetry import context, metrics, trace
from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from otlp_receiver import PROTOCOLS, Receiver, _Handler, free_port, run_script

from conftest import BACKENDS, load_backend

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture(params=PROTOCOLS)
def protocol(request):
    return request.param


@pytest.fixture(params=BACKENDS)
def backend(request):
    load_backend(request.param)  # skips, or fails, where it is not built
    return request.param


class ScriptedExporter:
    """In place of the sending of the OTLP exporter: it takes, refuses, raises or blocks, as it is told."""

    def __init__(self):
        self.sizes = []
        self.names = []
        self.outcome = SpanExportResult.SUCCESS
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()

    def export(self, spans):
        self.sizes.append(len(spans))
        request = ExportTraceServiceRequest.FromString(trace_bytes(spans))
        self.names += [span.name for span in spans_of([request])]
        self.entered.set()
        assert self.may_go.wait(60)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def trace_bytes(spans):
    """The request that a batch stands for, whichever form it has."""
    is_message = hasattr(spans, "SerializeToString")
    return (spans if is_message else trace_encoder.encode_spans(spans)).SerializeToString()


def spans_of(requests):
    return [
        span
        for request in requests
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


@pytest.fixture
def scripted(monkeypatch, lensfast):
    """What set_up() exports to, unless the test names an endpoint; blocked exports are let go at the end."""
    exporter = ScriptedExporter()
    monkeypatch.setattr(OTLPSpanExporter, "export", lambda self, spans, **kwargs: exporter.export(spans))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    # An endpoint of its own, since an outage is logged once for each.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    yield exporter
    exporter.outcome = SpanExportResult.SUCCESS
    exporter.may_go.set()


def set_up(lensfast, exporter="otlp", span_exporter=None, metric_reader=None, **fields):
    config = lensfast.NemoLensConfig(
        enabled=True, exporter=exporter, span_groups="all", metrics_enabled=metric_reader is not None, **fields
    )
    return lensfast.setup_telemetry(config, span_exporter=span_exporter, metric_reader=metric_reader)


def send_to(receiver, protocol, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint(protocol))


def make_spans(handle, count, name="work"):
    for _ in range(count):
        handle.tracer.start_span(name).end()


def flush(timeout_ms=20_000):
    return trace.get_tracer_provider().force_flush(timeout_ms)


def counts(handle):
    """The counts without the zeros; they add up."""
    stats = handle.stats()
    assert stats.ended == stats.queued + stats.exported + stats.failed + stats.dropped
    return {name: count for name, count in vars(stats).items() if count}


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def own_messages(caplog):
    """Without what the SDK adds in some versions."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("lensfast")
    ]


def is_native(lensfast):
    return lensfast.backend == "c"


# ---- delivery ----


def run_mixed(lensfast, handle):
    """Spans that C encodes and spans that it does not, of several scopes; returns how many were sampled."""
    other = trace.get_tracer("app.other", "2.1")
    with lensfast.managed_span("job", "outer", iterations=4, rate=0.5, names=("a", "b"), model="größe") as outer:
        first = outer.get_span_context()
        with other.start_as_current_span("linked", kind=SpanKind.SERVER, links=[Link(first, {"why": "so"})]):
            handle.tracer.start_span("plain").end()
        with contextlib.suppress(ValueError), handle.tracer.start_as_current_span("raises"):
            raise ValueError("boom")
        with other.start_as_current_span("event", attributes={"n": -1}) as span:
            span.add_event("happened", {"at": 3})
            span.add_event("again")
        with handle.tracer.start_as_current_span("failed") as span:
            span.set_status(Status(StatusCode.ERROR, "why"))
        other.start_span("").end()
    return 7


def check_against_stock(receiver, spans):
    """What arrived is what the stock encoder makes of these spans: each, with its resource and its scope."""

    def by_span_id(requests):
        return {
            span.span_id: (span, resource_spans.resource, resource_spans.schema_url, scope_spans.scope)
            for request in requests
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        }

    arrived = receiver.requests["/v1/traces"]
    expected = by_span_id([trace_encoder.encode_spans([span]) for span in spans])
    assert by_span_id(arrived) == expected
    assert len(spans_of(arrived)) == len(spans)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_what_arrives_is_what_the_stock_encoder_makes(lensfast, monkeypatch, protocol, compression):
    """With a processor of the user's beside it: that one gets the spans, the exporter still its bytes."""
    with Receiver() as receiver:
        send_to(receiver, protocol, monkeypatch)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
        handle = set_up(lensfast)
        memory = InMemorySpanExporter()
        trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(memory))
        number = run_mixed(lensfast, handle)
        assert flush()
        assert counts(handle) == {"ended": number, "exported": number}
        spans = memory.get_finished_spans()
        assert len(spans) == number
        assert all(isinstance(span, sdk.ReadableSpan) for span in spans)
        if is_native(lensfast):
            assert type(lensfast.providers.export_processor) is lensfast._export.EncodingSpanProcessor
        check_against_stock(receiver, spans)
        handle.shutdown()
        assert counts(handle) == {"ended": number, "exported": number}
    assert not receiver.bad_requests


class HeaderReceiver(Receiver):
    """Keeps the headers of each request for traces, and the paths of HTTP."""

    def __init__(self):
        super().__init__()
        self.headers = headers = []
        self.paths = paths = []

        class Handler(_Handler):
            def do_POST(self):  # noqa: N802
                headers.append({name.lower(): value for name, value in self.headers.items()})
                paths.append(self.path)
                super().do_POST()

        self._http.RequestHandlerClass = Handler

    def _taker(self, path):
        take = super()._taker(path)

        def export(request, context):
            self.headers.append({pair.key: pair.value for pair in context.invocation_metadata()})
            return take(request, context)

        return export


def test_headers_and_compression_of_the_environment(lensfast, monkeypatch, protocol):
    with HeaderReceiver() as receiver:
        send_to(receiver, protocol, monkeypatch)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=of-all")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-token=of-traces,x-team=speech")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
        handle = set_up(lensfast)
        make_spans(handle, 3)
        handle.shutdown()
    (headers,) = receiver.headers
    assert (headers["x-token"], headers["x-team"]) == ("of-traces", "speech")
    if protocol == "http/protobuf":
        assert headers["content-encoding"] == "gzip"
        assert headers["content-type"] == "application/x-protobuf"
    assert len(receiver.spans()) == 3


def test_an_endpoint_of_traces_only(lensfast, monkeypatch, protocol):
    with HeaderReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        endpoint = receiver.endpoint(protocol) + ("/v1/traces" if protocol == "http/protobuf" else "")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
        handle = set_up(lensfast)
        number = run_mixed(lensfast, handle)
        handle.shutdown()
    assert counts(handle) == {"ended": number, "exported": number}
    assert len(receiver.spans()) == number
    assert receiver.paths == (["/v1/traces"] * len(receiver.paths))


def test_many_scopes_in_one_request(lensfast, monkeypatch, protocol):
    with Receiver() as receiver:
        send_to(receiver, protocol, monkeypatch)
        handle = set_up(lensfast)
        tracers = [lensfast.get_tracer(f"app.{number}") for number in range(30)]
        for _ in range(5):
            for tracer in tracers:
                tracer.start_span("work").end()
        handle.shutdown()
    assert counts(handle) == {"ended": 150, "exported": 150}
    assert len(receiver.requests["/v1/traces"]) == 1
    assert Counter(span.scope for span in receiver.spans()) == {f"app.{number}": 5 for number in range(30)}


def test_an_exporter_in_memory_gets_spans(lensfast):
    memory = InMemorySpanExporter()
    handle = set_up(lensfast, span_exporter=memory)
    number = run_mixed(lensfast, handle)
    assert counts(handle)["ended"] == number
    assert flush()
    assert counts(handle) == {"ended": number, "exported": number}
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert set(spans) == {"outer", "linked", "plain", "raises", "event", "failed", ""}
    assert all(isinstance(span, sdk.ReadableSpan) for span in spans.values())
    assert dict(spans["outer"].attributes) == {"iterations": 4, "rate": 0.5, "names": ("a", "b"), "model": "größe"}
    assert [event.name for event in spans["event"].events] == ["happened", "again"]
    assert spans["linked"].links[0].context.span_id == spans["outer"].context.span_id
    assert spans["raises"].events[0].attributes["exception.message"] == "boom"
    assert spans["failed"].status.description == "why"
    assert spans[""].parent.span_id == spans["outer"].context.span_id


def test_the_console_exporter(tmp_path, backend):
    script = tmp_path / "train.py"
    script.write_text("""
import sys
from lensfast import NemoLensConfig, managed_span, setup_telemetry
handle = setup_telemetry(NemoLensConfig.from_env())
with managed_span("job", "outer", iterations=4):
    with managed_span("job", "inner") as inner:
        inner.add_event("happened", {"at": 3})
handle.shutdown()
print(handle.stats(), file=sys.stderr)
""")
    process = run_script(
        script, backend, NEMO_LENS_ENABLED="1", NEMO_LENS_EXPORTER="console", NEMO_LENS_METRICS_ENABLED="0"
    )
    assert process.stderr == "SpanStats(ended=2, queued=0, exported=2, failed=0, dropped=0)\n"
    inner, outer = map(json.loads, process.stdout.splitlines())
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert inner["parent_id"] == outer["context"]["span_id"]
    assert outer["attributes"] == {"iterations": 4}
    assert [(event["name"], event["attributes"]) for event in inner["events"]] == [("happened", {"at": 3})]


def test_a_process_that_does_not_export_counts_nothing(lensfast):
    handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True), rank=0, world_size=2)
    make_spans(handle, 3)
    assert counts(handle) == {}


def test_spans_that_are_not_sampled_are_not_counted(lensfast, scripted, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    handle = set_up(lensfast)
    make_spans(handle, 3)
    handle.shutdown()
    assert counts(handle) == {}
    assert scripted.sizes == []


# ---- the queue ----


def test_a_burst_with_default_settings(lensfast, monkeypatch):
    """None of 100,000 is lost, where C encodes them; the SDK's queue of 2,048 may lose some, but counts them."""
    number = 100_000 if is_native(lensfast) else 10_000
    with Receiver() as receiver:
        send_to(receiver, "http/protobuf", monkeypatch)
        handle = set_up(lensfast)
        start_span = handle.tracer.start_span
        for index in range(number):
            start_span("step", attributes={"index": index, "loss": 0.5}).end()
        handle.shutdown(timeout_ms=60_000)
        arrived = spans_of(receiver.requests["/v1/traces"])
    stats = handle.stats()
    lost = stats.dropped
    assert counts(handle) == {
        name: count for name, count in (("ended", number), ("exported", number - lost), ("dropped", lost)) if count
    }
    assert len(arrived) == len({span.span_id for span in arrived}) == stats.exported
    if is_native(lensfast):
        assert lost == 0


@pytest.fixture
def small_queue(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")


def test_a_full_queue_drops_and_counts(lensfast, scripted, small_queue, caplog):
    reader = InMemoryMetricReader()
    handle = set_up(lensfast, metric_reader=reader)
    for name in ("opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export"):
        for each in logging.getLogger(name).filters:
            vars(each).pop("last_log", None)  # what an earlier test has logged is not a repetition
    make_spans(handle, 3)
    assert flush()
    metric, failures = "otel.sdk.processor.span.processed", "otel.sdk.exporter.span.exported"
    assert not {metric, failures} & set(lensfast.testing.metric_points(reader))
    scripted.entered.clear()
    scripted.may_go.clear()
    make_spans(handle, 10)
    assert scripted.entered.wait(20)
    make_spans(handle, 50)
    assert counts(handle) == {"ended": 63, "queued": 60, "exported": 3}
    assert messages(caplog) == []
    make_spans(handle, 7)
    assert counts(handle) == {"ended": 70, "queued": 60, "exported": 3, "dropped": 7}
    (warning,) = messages(caplog)
    assert "OTEL_BSP_MAX_QUEUE_SIZE" in warning
    points = lensfast.testing.metric_points(reader)
    (point,) = points[metric]
    assert (point.value, dict(point.attributes)) == (7, {"error.type": "queue_full"})
    assert failures not in points
    scripted.may_go.set()
    assert flush()
    assert counts(handle) == {"ended": 70, "exported": 63, "dropped": 7}
    assert len(scripted.names) == 63
    make_spans(handle, 2)  # there is room again
    assert flush()
    assert counts(handle) == {"ended": 72, "exported": 65, "dropped": 7}


def test_failed_exports_are_a_metric_too(lensfast, scripted):
    reader = InMemoryMetricReader()
    handle = set_up(lensfast, metric_reader=reader)
    scripted.outcome = SpanExportResult.FAILURE
    make_spans(handle, 4)
    assert flush()
    points = lensfast.testing.metric_points(reader)
    (point,) = points["otel.sdk.exporter.span.exported"]
    assert (point.value, set(point.attributes)) == (4, {"error.type"})
    assert "otel.sdk.processor.span.processed" not in points


def test_large_spans_do_not_wait_for_a_full_number(lensfast, scripted, monkeypatch):
    """A queue that is bounded by bytes is sent before it is full of them, however few spans these are."""
    if not is_native(lensfast):
        pytest.skip("the queue of the SDK is bounded by number only")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    handle = set_up(lensfast)
    for _ in range(4):
        handle.tracer.start_span("large", attributes={"model": "x" * 2**19}).end()
    assert scripted.entered.wait(20)
    assert flush()
    assert counts(handle) == {"ended": 4, "exported": 4}


def test_a_queue_that_is_bounded_by_bytes(lensfast, scripted, monkeypatch, caplog):
    if not is_native(lensfast):
        pytest.skip("the queue of the SDK is bounded by number only")
    assert lensfast._export.MAX_QUEUE_BYTES == 64 * 2**20
    monkeypatch.setattr(lensfast._export, "MAX_QUEUE_BYTES", 100_000)
    handle = set_up(lensfast)
    scripted.may_go.clear()
    for number in range(30):
        span = handle.tracer.start_span("large", attributes={"model": "x" * 10_000})
        if number % 2:
            span.set_status(StatusCode.ERROR)
        span.end()
    sink = lensfast.providers.export_processor.sink
    assert 100_000 <= sink.waiting_bytes < 111_000
    assert counts(handle) == {"ended": 30, "queued": 10, "dropped": 20}
    (warning,) = messages(caplog)
    assert "the queue of ended spans is full (10 spans" in warning
    scripted.may_go.set()
    assert flush()
    assert counts(handle) == {"ended": 30, "exported": 10, "dropped": 20}


def test_the_size_of_a_batch(lensfast, scripted, small_queue):
    handle = set_up(lensfast)
    scripted.may_go.clear()
    make_spans(handle, 10)
    assert scripted.entered.wait(20)
    make_spans(handle, 15)
    scripted.may_go.set()
    wait_until(lambda: len(scripted.sizes) == 2)
    assert flush()
    assert scripted.sizes == [10, 10, 5]


@pytest.mark.parametrize("odd", [False, True])
def test_the_delay(lensfast, scripted, monkeypatch, odd):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    handle = set_up(lensfast)
    for number in (1, 2):  # not only the first time
        span = handle.tracer.start_span("work")
        if odd:
            span.add_event("happened")
        span.end()
        wait_until(lambda number=number: counts(handle) == {"ended": number, "exported": number})


def test_a_long_delay_is_kept(lensfast, scripted, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    handle = set_up(lensfast)
    make_spans(handle, 3)
    time.sleep(0.2)
    assert counts(handle) == {"ended": 3, "queued": 3}
    assert flush()
    assert counts(handle) == {"ended": 3, "exported": 3}


# ---- exporters that fail ----


@pytest.mark.parametrize("outcome", [SpanExportResult.FAILURE, RuntimeError("no"), None])
def test_an_export_that_fails(lensfast, scripted, caplog, outcome):
    handle = set_up(lensfast)
    scripted.outcome = outcome
    for _ in range(3):
        make_spans(handle, 4)
        assert flush()
    assert counts(handle) == {"ended": 12, "failed": 12}
    (warning,) = messages(caplog)
    assert "spans do not reach" in warning
    scripted.outcome = SpanExportResult.SUCCESS
    make_spans(handle, 4)
    assert flush()
    assert counts(handle) == {"ended": 16, "failed": 12, "exported": 4}
    assert len(messages(caplog)) == 2
    assert "reach" in messages(caplog)[1]
    assert "3 exports were lost" in messages(caplog)[1]


@pytest.mark.parametrize("raises", [False, True])
def test_an_exporter_of_the_callers_that_fails(lensfast, raises):
    class Failing(SpanExporter):
        def export(self, spans):
            if raises:
                raise RuntimeError("no")
            return SpanExportResult.FAILURE

    handle = set_up(lensfast, span_exporter=Failing())
    make_spans(handle, 4)
    assert flush()
    assert counts(handle) == {"ended": 4, "failed": 4}
    handle.shutdown()
    assert counts(handle) == {"ended": 4, "failed": 4}


def test_an_exporter_that_blocks(lensfast, scripted, caplog):
    handle = set_up(lensfast)
    scripted.may_go.clear()
    make_spans(handle, 4)
    if is_native(lensfast):  # the SDK's takes a timeout and waits for ever
        assert flush(100) is False
        make_spans(handle, 2)
        assert flush(100) is False
        assert counts(handle) == {"ended": 6, "queued": 6}
    began = time.monotonic()
    handle.shutdown(timeout_ms=300)
    assert time.monotonic() - began < 15  # it would block for a minute
    ended = handle.stats().ended
    assert counts(handle) == {"ended": ended, "queued": ended}
    (warning,) = own_messages(caplog)
    assert "spans could not be delivered within 300 ms" in warning


def test_a_flush_delivers(lensfast, scripted):
    handle = set_up(lensfast)
    for number in range(1, 4):
        make_spans(handle, 2)
        assert flush() is True
        assert counts(handle) == {"ended": 2 * number, "exported": 2 * number}
    assert flush() is True  # there is nothing to do
    assert scripted.sizes == [2, 2, 2]


def test_flushes_at_once(lensfast, scripted):
    handle = set_up(lensfast)
    results = []

    def work():
        for _ in range(20):
            make_spans(handle, 3)
            results.append(flush())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80
    assert counts(handle) == {"ended": 240, "exported": 240}
    assert sum(scripted.sizes) == 240


def test_a_dead_collector(lensfast, monkeypatch, protocol, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3" if sdk_is_new() else "1")
    handle = set_up(lensfast)
    if sdk_is_new():  # older exporters try for a minute
        for _ in range(2):
            make_spans(handle, 4)
            assert flush()
        assert counts(handle) == {"ended": 8, "failed": 8}
        assert len(own_messages(caplog)) == 1
    make_spans(handle, 2)
    began = time.monotonic()
    handle.shutdown(timeout_ms=500)
    assert time.monotonic() - began < 10
    (warning,) = own_messages(caplog)
    assert "spans do not reach" in warning or "spans could not be delivered within 500 ms" in warning
    counts(handle)


def sdk_is_new():
    """Whether its exporters keep their timeout over their retries."""
    return hasattr(sdk.SpanProcessor, "_on_ending")


def test_spans_that_end_after_shutdown_are_dropped(lensfast, scripted, caplog):
    handle = set_up(lensfast)
    tracer = handle.tracer
    make_spans(handle, 2)
    handle.shutdown()
    for _ in range(3):
        tracer.start_span("late").end()
    assert counts(handle) == {"ended": 5, "exported": 2, "dropped": 3}
    assert scripted.names == ["work", "work"]
    assert flush() in (False, True)  # either way, at once
    handle.shutdown()
    assert counts(handle) == {"ended": 5, "exported": 2, "dropped": 3}
    assert [text for text in messages(caplog) if "queue" in text.lower()] == []


def test_open_spans_are_delivered_at_shutdown(lensfast, monkeypatch, protocol):
    with Receiver() as receiver:
        send_to(receiver, protocol, monkeypatch)
        handle = set_up(lensfast)
        handle.tracer.start_span("first", attributes={"n": 1})
        handle.tracer.start_span("second")
        make_spans(handle, 1, "ended")
        handle.shutdown()
    assert counts(handle) == {"ended": 3, "exported": 3}
    event = ("nemo.span.truncated", {"nemo.span.truncated.reason": "still open at telemetry shutdown"})
    assert [(span.name, span.attributes, span.events) for span in receiver.spans() if span.name != "ended"] == [
        ("second", {"nemo.span.truncated": True}, [event]),
        ("first", {"n": 1, "nemo.span.truncated": True}, [event]),
    ]


# ---- what OTLP can't carry ----


def test_a_name_that_utf8_cannot_carry(lensfast, monkeypatch, protocol, caplog):
    with Receiver() as receiver:
        send_to(receiver, protocol, monkeypatch)
        handle = set_up(lensfast)
        make_spans(handle, 3, "before")
        make_spans(handle, 2, "bad \ud800")
        make_spans(handle, 3, "after")
        assert flush()
        assert sorted(span.name for span in receiver.spans()) == ["after"] * 3 + ["before"] * 3
        assert len(messages(caplog)) == 1
        assert re.match(r"2 spans can't be encoded as OTLP and are dropped", messages(caplog)[0])
        assert counts(handle) == {"ended": 8, "exported": 6, "failed": 2}
        make_spans(handle, 1, "bad \ud800")  # a batch of nothing else
        assert flush()
        assert counts(handle) == {"ended": 9, "exported": 6, "failed": 3}


def test_a_number_that_otlp_cannot_carry(lensfast, monkeypatch, protocol, caplog):
    with Receiver() as receiver:
        send_to(receiver, protocol, monkeypatch)
        handle = set_up(lensfast)
        make_spans(handle, 2, "before")
        for _ in range(3):
            handle.tracer.start_span("large", attributes={"too.large.here": 2**64, "n": 2**63 - 1}).end()
        make_spans(handle, 2, "after")
        assert flush()
        assert counts(handle) == {"ended": 7, "exported": 7}
        arrived = sorted((span.name, span.attributes) for span in receiver.spans())
    assert [name for name, _ in arrived] == ["after"] * 2 + ["before"] * 2 + ["large"] * 3
    # The stock encoder leaves the value out, or the attribute, by its version.
    assert all(
        {k: v for k, v in attributes.items() if v is not None} == {"n": 2**63 - 1} for _, attributes in arrived[4:]
    )
    assert len(messages(caplog)) <= 1


# ---- other providers and exporters ----


def test_other_otlp_exporters_are_left_alone(lensfast, monkeypatch, protocol):
    """The encoder that they share with ours takes their spans as before."""
    transport = "grpc" if protocol == "grpc" else "http"
    exporters = import_module(f"opentelemetry.exporter.otlp.proto.{transport}.trace_exporter")
    with Receiver() as receiver, Receiver() as others:
        send_to(receiver, protocol, monkeypatch)
        handle = set_up(lensfast)
        endpoint = others.endpoint(protocol) + ("" if transport == "grpc" else "/v1/traces")
        options = {"insecure": True} if transport == "grpc" else {}
        provider = sdk.TracerProvider(resource=Resource({"whose": "other"}), shutdown_on_exit=False)
        memory = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(exporters.OTLPSpanExporter(endpoint=endpoint, **options)))
        provider.add_span_processor(SimpleSpanProcessor(memory))
        tracer = provider.get_tracer("theirs")
        with tracer.start_as_current_span("theirs", attributes={"n": 1}) as span:
            span.add_event("happened")
        make_spans(handle, 2, "ours")
        assert flush()
        provider.shutdown()
        check_against_stock(others, memory.get_finished_spans())
    assert [span.name for span in receiver.spans()] == ["ours", "ours"]
    assert counts(handle) == {"ended": 2, "exported": 2}


def test_the_provider_of_somebody_else(lensfast, monkeypatch, protocol):
    """Its spans are the SDK's, and go out through ours."""
    memory = InMemorySpanExporter()
    provider = sdk.TracerProvider(resource=Resource({"whose": "other"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    with Receiver() as receiver:
        send_to(receiver, protocol, monkeypatch)
        handle = set_up(lensfast)
        assert trace.get_tracer_provider() is provider
        number = run_mixed(lensfast, handle)
        still_open = handle.tracer.start_span("open")
        assert flush()
        assert counts(handle) == {"ended": number, "exported": number}
        check_against_stock(receiver, memory.get_finished_spans())
        handle.shutdown()
        assert not still_open.is_recording()
        assert counts(handle) == {"ended": number + 1, "exported": number + 1}
    assert receiver.spans()[-1].attributes == {"nemo.span.truncated": True}
    assert {span.resource["whose"] for span in receiver.spans()} == {"other"}


def test_two_setups(lensfast, monkeypatch, protocol):
    with Receiver() as first, Receiver() as second:
        for receiver, number in ((first, 3), (second, 5)):
            send_to(receiver, protocol, monkeypatch)
            handle = set_up(lensfast)
            assert counts(handle) == {}
            make_spans(handle, number, f"of {number}")
            assert flush()
            assert counts(handle) == {"ended": number, "exported": number}
            lensfast.testing.reset_telemetry()
    assert [span.name for span in first.spans()] == ["of 3"] * 3
    assert [span.name for span in second.spans()] == ["of 5"] * 5


def test_the_same_exporter_in_two_setups(lensfast):
    class Keeping(SpanExporter):
        def __init__(self):
            self.names = []

        def export(self, spans):
            self.names += [span.name for span in spans]
            return SpanExportResult.SUCCESS

    exporter = Keeping()
    for number in (2, 3):
        handle = set_up(lensfast, span_exporter=exporter)
        make_spans(handle, number, f"of {number}")
        assert flush()
        assert counts(handle) == {"ended": number, "exported": number}
        lensfast.testing.reset_telemetry()
    assert exporter.names == ["of 2"] * 2 + ["of 3"] * 3


# ---- the stock path ----


def decision_lines(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "lensfast.providers" and "spans are" in record.getMessage()
    ]


def check_stock_path(lensfast, monkeypatch, caplog, reason, **fields):
    """Telemetry works, its spans are the SDK's, and one line says why."""
    caplog.set_level(logging.INFO, logger="lensfast.providers")
    with Receiver() as receiver:
        send_to(receiver, "http/protobuf", monkeypatch)
        handle = set_up(lensfast, **fields)
        assert type(trace.get_tracer_provider()) is sdk.TracerProvider
        assert type(handle.tracer.start_span("ours")) is sdk._Span
        number = run_mixed(lensfast, handle)
        handle.shutdown()
    assert counts(handle) == {"ended": number + 1, "exported": number + 1}
    assert len(receiver.spans()) == number + 1
    (line,) = decision_lines(caplog)
    assert line.startswith("spans are the SDK's: ")
    assert reason in line
    # What nobody has chosen is a warning.
    levels = [record.levelname for record in caplog.records if record.getMessage() == line]
    assert levels == ["WARNING" if "opentelemetry-sdk " in line else "INFO"]


def test_native_spans_off_by_the_field(lensfast, monkeypatch, caplog):
    check_stock_path(lensfast, monkeypatch, caplog, "native_spans is off", native_spans=False)


def test_native_spans_off_by_the_variable(lensfast, monkeypatch, caplog):
    monkeypatch.setenv("NEMO_LENS_NATIVE_SPANS", "0")
    assert lensfast.NemoLensConfig.from_env().native_spans is False
    monkeypatch.setenv("NEMO_LENS_NATIVE_SPANS", "1")
    assert lensfast.NemoLensConfig.from_env().native_spans is True
    monkeypatch.delenv("NEMO_LENS_NATIVE_SPANS")
    assert lensfast.NemoLensConfig.from_env().native_spans is True
    monkeypatch.setenv("MEGATRON_OTEL_NATIVE_SPANS", "off")
    config = lensfast.NemoLensConfig.from_env("MEGATRON_OTEL", fallback_prefix="NEMO_LENS")
    assert config.native_spans is False


def test_native_spans_are_said_to_be_on(lensfast, scripted, caplog):
    caplog.set_level(logging.INFO, logger="lensfast.providers")
    handle = set_up(lensfast)
    span = handle.tracer.start_span("ours")
    (line,) = decision_lines(caplog)
    if is_native(lensfast):
        assert line == "spans are native"
        assert type(trace.get_tracer_provider()) is lensfast._native.TracerProvider
        assert type(span) is lensfast._native._Span
    else:
        assert line.startswith("spans are the SDK's: ")
        assert type(span) is sdk._Span
    assert isinstance(span, sdk.Span)


@pytest.mark.parametrize("version", ["1.26.0", "1.999.0", "2.0.0", "nightly"])
def test_an_sdk_that_is_not_known(lensfast, monkeypatch, caplog, version):
    monkeypatch.setattr(lensfast._native, "sdk_version", version)
    check_stock_path(lensfast, monkeypatch, caplog, version if is_native(lensfast) else "")


@pytest.mark.parametrize("version", ["1.27.0", "1.45.2", "1.45.0.dev", "1.30"])
def test_an_sdk_that_is_known(lensfast, monkeypatch, version):
    monkeypatch.setattr(lensfast._native, "sdk_version", version)
    assert (lensfast._native.why_not() is None) is is_native(lensfast)


def test_what_shutdown_has_no_time_for_is_dropped(lensfast, scripted, small_queue):
    handle = set_up(lensfast)
    scripted.entered.clear()
    scripted.may_go.clear()
    make_spans(handle, 40)
    assert scripted.entered.wait(20)
    processor = lensfast.providers.export_processor
    if isinstance(processor, lensfast._export.EncodingSpanProcessor):
        processor.shutdown(timeout_millis=50)
        assert counts(handle) == {"ended": 40, "queued": 10, "dropped": 30}
        scripted.may_go.set()
        wait_until(lambda: counts(handle) == {"ended": 40, "exported": 10, "dropped": 30})
    else:
        # The SDK's processor takes no time for its shutdown: what is left when it returns counts the same.
        scripted.may_go.set()
        processor.shutdown()
        assert counts(handle) == {"ended": 40, "exported": 40}


def test_spans_below_a_trace_state_are_encoded_as_they_end(lensfast, scripted):
    """What vendors' gateways send along is not to make spans slower or larger."""
    set_up(lensfast)
    if not is_native(lensfast):
        pytest.skip("the SDK's spans are encoded as they are sent")
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=s:1,other=2"}
    sink = lensfast.providers.export_processor.sink
    token = context.attach(lensfast.propagation.extract_context(headers))
    for _ in range(10):
        with lensfast.span_cm("below"):
            pass
    context.detach(token)
    request, odd, number = sink.take(True)
    assert (odd, number) == ([], 10)
    assert {span.trace_state for span in spans_of([ExportTraceServiceRequest.FromString(request)])} == {
        "vendor=s:1,other=2"
    }


@pytest.mark.parametrize("value", ["true", "True"])
def test_the_sdk_measures_itself(lensfast, monkeypatch, caplog, value):
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", value)
    reason = "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED" if is_native(lensfast) else ""
    check_stock_path(lensfast, monkeypatch, caplog, reason)


def test_a_runtime_context_of_somebody_else(tmp_path, backend):
    """OTEL_PYTHON_CONTEXT names an entry point, which a distribution on the path has."""
    distribution = tmp_path / "other_context-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: other-context\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[opentelemetry_context]\nother = other_context:OtherContext\n")
    (tmp_path / "other_context.py").write_text("""
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext


class OtherContext(ContextVarsRuntimeContext):
    pass
""")
    script = tmp_path / "train.py"
    script.write_text("""
import logging
import sys
sys.path.insert(0, sys.argv[1])
from lensfast import NemoLensConfig, managed_span, setup_telemetry
from opentelemetry import trace
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
logging.getLogger("lensfast.providers").setLevel(logging.INFO)
handle = setup_telemetry(NemoLensConfig.from_env())
with managed_span("job", "outer") as outer:
    assert trace.get_current_span() is outer
    with managed_span("job", "inner"):
        pass
handle.shutdown()
print(type(outer).__module__, type(outer).__name__)
""")
    with Receiver() as receiver:
        process = run_script(
            script, backend, str(tmp_path),
            OTEL_PYTHON_CONTEXT="other", NEMO_LENS_ENABLED="1", NEMO_LENS_METRICS_ENABLED="0",
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"),
            PYTHONPATH=f"{Path(__file__).parents[1]}{os.pathsep}{tmp_path}",
        )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    lines = process.stdout.splitlines()
    (decision,) = [line for line in lines if line.startswith("spans are")]
    if backend == "c":
        assert decision == "spans are the SDK's: the context is kept by OtherContext (OTEL_PYTHON_CONTEXT)"
    assert lines[-1] == "opentelemetry.sdk.trace _Span"
    inner, outer = receiver.spans()
    assert (inner.name, inner.parent_id) == ("inner", outer.span_id)


def test_an_encoder_that_has_changed(lensfast, monkeypatch, caplog):
    """Spans go to it then as spans; C makes no bytes in the way of the encoder that it knows."""
    stock = trace_encoder.encode_spans

    def encode_spans(spans):
        message = stock(spans)
        for span in spans_of([message]):
            span.dropped_events_count = 77
        return message

    monkeypatch.setattr(trace_encoder, "encode_spans", encode_spans)
    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter.encode_spans", encode_spans)
    caplog.set_level(logging.INFO, logger="lensfast.providers")
    with Receiver() as receiver:
        send_to(receiver, "http/protobuf", monkeypatch)
        handle = set_up(lensfast)
        make_spans(handle, 3)
        handle.shutdown()
    assert counts(handle) == {"ended": 3, "exported": 3}
    assert type(lensfast.providers.export_processor) is lensfast._export.CountingSpanProcessor
    arrived = spans_of(receiver.requests["/v1/traces"])
    assert [span.dropped_events_count for span in arrived] == [77] * 3
    lines = [text for text in messages(caplog, logging.INFO) if "encoder" in text]
    assert len(lines) == (1 if is_native(lensfast) else 0)


# ---- signal handlers, finalizers, threads ----

STRESS = """
import faulthandler
import gc
import signal
import sys
import threading

from lensfast import NemoLensConfig, setup_telemetry
from opentelemetry import trace
from opentelemetry.trace import StatusCode

faulthandler.dump_traceback_later(15, exit=True)
handle = setup_telemetry(NemoLensConfig.from_env())
tracer = handle.tracer
ended = 0
fired = 0
over = False


def in_handler(*args):
    global fired
    fired += 1
    tracer.start_span("handler").end()
    if not over:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)


class Holder:
    def __init__(self):
        self.me = self
        self.span = tracer.start_span("finalizer")

    def __del__(self):
        global fired
        fired += 1
        self.span.end()


def work(count, name):
    global ended
    for number in range(count):
        span = tracer.start_span(name, attributes={"number": number})
        span.events
        if number % 3:
            span.set_status(StatusCode.ERROR, "failed")
        if number % 7 == 0:
            span.add_event("happened")
        span.end()
        if sys.argv[1] == "finalizer":
            Holder()
    ended += count


if sys.argv[1] == "handler":
    signal.signal(signal.SIGALRM, in_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0002)
    work(int(sys.argv[2]), "main")
    over = True
    signal.setitimer(signal.ITIMER_REAL, 0)
elif sys.argv[1] == "finalizer":
    gc.set_threshold(7)
    work(int(sys.argv[2]), "main")
    gc.collect()
else:
    sys.setswitchinterval(1e-5)
    done = threading.Event()

    def flush():
        while not done.is_set():
            trace.get_tracer_provider().force_flush()

    flushing = threading.Thread(target=flush)
    flushing.start()
    threads = [threading.Thread(target=work, args=(int(sys.argv[2]) // 3, "thread")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    flushing.join()
handle.shutdown(timeout_ms=20000)
stats = handle.stats()
print(ended + fired, fired > 5, stats.ended, stats.exported, stats.queued, stats.failed)
"""


# Of spans; as many as are needed to meet, now and then, the middle of each other.
COUNTS = {
    ("c", "handler"): "60000",
    ("c", "finalizer"): "12000",
    ("c", "threads"): "30000",
    **dict.fromkeys((("python", "handler"), ("python", "finalizer"), ("python", "threads")), "3000"),
}


@pytest.mark.parametrize("where", ["handler", "finalizer", "threads"])
def test_spans_that_end_amid_others(tmp_path, backend, where):
    """In a signal handler, in a finalizer and in threads, while others end and are exported: none breaks another."""
    if where == "handler" and not hasattr(__import__("signal"), "setitimer"):
        pytest.skip("this system has no interval timers")
    script = tmp_path / "train.py"
    script.write_text(STRESS)
    with Receiver() as receiver:
        process = run_script(
            script, backend, where, COUNTS[backend, where],
            NEMO_LENS_ENABLED="1", NEMO_LENS_METRICS_ENABLED="0",
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"),
            # The SDK wakes its own thread, once a batch is full, in a way that a signal handler must not interrupt.
            OTEL_BSP_MAX_QUEUE_SIZE="100000",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="100000" if where == "handler" and backend == "python" else "256",
        )  # fmt: skip
        arrived = spans_of(receiver.requests["/v1/traces"])
    assert receiver.bad_requests == []
    assert (process.returncode, process.stderr) == (0, "")
    total, fired, ended, exported, queued, failed = process.stdout.split()
    assert (queued, failed) == ("0", "0")
    assert total == ended == exported
    assert fired == str(where != "threads")
    assert len(arrived) == len({span.span_id for span in arrived}) == int(total)
    assert {span.name for span in arrived} <= {"main", "thread", "handler", "finalizer"}


TAKEN_OFTEN = """
import faulthandler
import sys
import threading

from lensfast import NemoLensConfig, setup_telemetry
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import StatusCode

faulthandler.dump_traceback_later(40, exit=True)
requests = []


def export(self, spans):
    is_message = hasattr(spans, "SerializeToString")
    requests.append((spans if is_message else encode_spans(spans)).SerializeToString())
    return SpanExportResult.SUCCESS


OTLPSpanExporter.export = export
handle = setup_telemetry(NemoLensConfig.from_env())
ending = True


def flush():
    while ending:
        trace.get_tracer_provider().force_flush()


sys.setswitchinterval(1e-6)
flushing = threading.Thread(target=flush)
flushing.start()
for number in range(int(sys.argv[1])):
    span = handle.tracer.start_span("work", attributes={"number": number})
    span.events
    span.set_status(StatusCode.ERROR, f"failed {number}")
    span.end()
ending = False
flushing.join()
handle.shutdown()
seen = sorted(
    (span.attributes[0].value.int_value, span.name, span.status.message)
    for request in requests
    for resource_spans in ExportTraceServiceRequest.FromString(request).resource_spans
    for scope_spans in resource_spans.scope_spans
    for span in scope_spans.spans
)
print(seen == [(number, "work", f"failed {number}") for number in range(int(sys.argv[1]))], handle.stats().exported)
"""


def test_spans_that_end_while_the_queue_is_emptied(tmp_path, backend):
    """What reads a status is Python code, in whose middle another thread may take the batch that is being filled."""
    script = tmp_path / "train.py"
    script.write_text(TAKEN_OFTEN)
    number = "20000" if backend == "c" else "2000"
    process = run_script(
        script, backend, number,
        NEMO_LENS_ENABLED="1", NEMO_LENS_METRICS_ENABLED="0", OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
    )  # fmt: skip
    assert (process.returncode, process.stderr, process.stdout) == (0, "", f"True {number}\n")


def test_the_counts_add_up_at_any_time(lensfast, scripted, monkeypatch):
    """Read while spans end and are sent; where none is lost, none is ever said to be."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100000")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    handle = set_up(lensfast)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    number = 20_000 if is_native(lensfast) else 2000
    ending = threading.Thread(target=make_spans, args=(handle, number))
    seen = Counter()
    try:
        ending.start()
        while ending.is_alive() or not seen:
            stats = handle.stats()
            seen[stats.ended - stats.queued - stats.exported - stats.failed - stats.dropped, stats.dropped] += 1
            assert min(vars(stats).values()) >= 0
        ending.join()
    finally:
        sys.setswitchinterval(interval)
    assert set(seen) == {(0, 0)}, seen
    assert flush()
    assert counts(handle) == {"ended": number, "exported": number}


def test_spans_that_end_in_an_export_are_not_lost(lensfast, scripted):
    """As those of an instrumented HTTP library, unless it heeds that instrumentation is suppressed."""
    handle = set_up(lensfast)
    original = scripted.export

    def export(spans):
        if not scripted.sizes:
            handle.tracer.start_span("inside").end()
        return original(spans)

    scripted.export = export
    make_spans(handle, 2)
    assert flush()
    assert flush()
    assert counts(handle) == {"ended": 3, "exported": 3}
    assert sorted(scripted.names) == ["inside", "work", "work"]


def test_an_exporter_that_flushes(lensfast, scripted):
    """As one might that shuts something down, which flushes all there is."""
    if not is_native(lensfast):
        pytest.skip("the SDK's processor waits for itself then")
    handle = set_up(lensfast)
    original = scripted.export

    def export(spans):
        if not scripted.sizes:
            handle.tracer.start_span("inside").end()
            scripted.export = original
            flush()
        return original(spans)

    scripted.export = export
    make_spans(handle, 2)
    assert flush(5000)
    assert flush(5000)
    assert counts(handle) == {"ended": 3, "exported": 3}
    assert sorted(scripted.names) == ["inside", "work", "work"]


def test_a_shutdown_while_spans_end(lensfast, scripted):
    handle = set_up(lensfast)
    begun, stop = threading.Event(), threading.Event()

    def work():
        while not stop.wait(0.001):  # else they keep the GIL from the thread that empties the queue
            make_spans(handle, 10)
            begun.set()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    handle.shutdown(timeout_ms=20_000)
    stop.set()
    for thread in threads:
        thread.join()
    stats = handle.stats()
    counts(handle)
    assert (stats.exported, stats.failed) == (len(scripted.names), 0)
    if is_native(lensfast):  # in the SDK's queue, one may come to lie after it has been emptied
        assert stats.queued == 0


# ---- fork ----

FORK = """
import multiprocessing
import os
import sys
import threading
import time

from lensfast import NemoLensConfig, setup_telemetry
from opentelemetry import trace

how, backend, arrived, go_on = sys.argv[1:]


def counts(handle):
    stats = handle.stats()
    assert stats.ended == stats.queued + stats.exported + stats.failed + stats.dropped, stats
    return [stats.ended, stats.queued, stats.exported, stats.failed, stats.dropped]


def child(handle):
    first = counts(handle)
    names = {thread.name for thread in threading.enumerate()} - {"MainThread"}
    before = sum("lensfast-span-export" in name for name in names)
    handle.tracer.start_span("child.plain", attributes={"n": 1}).end()
    span = handle.tracer.start_span("child.event")
    span.add_event("happened")
    span.end()
    after = sum(thread.name == "lensfast-span-export" for thread in threading.enumerate())
    print("child", first, before, after, counts(handle)[0], flush=True)


def main():
    handle = setup_telemetry(NemoLensConfig.from_env())
    handle.tracer.start_span("parent.sent").end()
    flushing = threading.Thread(target=trace.get_tracer_provider().force_flush)
    flushing.start()
    if arrived == "-":
        flushing.join()
    else:
        while not os.path.exists(arrived):
            time.sleep(0.005)
    handle.tracer.start_span("parent.queued").end()
    still_open = handle.tracer.start_span("parent.open")
    if how == "fork":
        pid = os.fork()
        if pid == 0:
            child(handle)
            return
        print("status", os.waitpid(pid, 0)[1], flush=True)
    else:
        process = multiprocessing.get_context("fork").Process(target=child, args=(handle,))
        process.start()
        process.join()
        print("status", process.exitcode, flush=True)
    if arrived != "-":
        open(go_on, "w").close()
        flushing.join()
    still_open.end()
    trace.get_tracer_provider().force_flush()
    print("parent", counts(handle), flush=True)


main()
"""


class HoldingFirst(list):
    """Requests, of which the first is answered only once a file appears."""

    def __init__(self, arrived, go_on):
        super().__init__()
        self.arrived, self.go_on = arrived, go_on

    def append(self, request):
        first = not self
        super().append(request)
        if first:
            self.arrived.touch()
            wait_until(self.go_on.exists, 40)


@needs_fork
@pytest.mark.parametrize("when", ["idle", "exporting"])
@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_forked_child(tmp_path, backend, protocol, how, when):
    """It has its own counts and thread, and sends its own spans only, also if its parent was amid sending."""
    if (protocol, when) == ("grpc", "exporting"):
        pytest.skip(
            "gRPC leaves its fork handlers out while it is in a call: now and then a child hangs in its channel"
        )
    script = tmp_path / "train.py"
    script.write_text(FORK)
    arrived, go_on = tmp_path / "arrived", tmp_path / "go_on"
    with Receiver() as receiver:
        if when == "exporting":
            receiver.requests["/v1/traces"] = HoldingFirst(arrived, go_on)
        process = run_script(
            script, backend, how, backend, "-" if when == "idle" else str(arrived), str(go_on),
            NEMO_LENS_ENABLED="1", NEMO_LENS_METRICS_ENABLED="0",
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint(protocol),
            OTEL_EXPORTER_OTLP_TIMEOUT="45",
            PYTHONWARNINGS="ignore",  # that a process with threads is forked
        )  # fmt: skip
        names = sorted(span.name for span in receiver.spans())
    # gRPC says that it is in use.
    said = [line for line in process.stderr.splitlines() if "fork_posix.cc" not in line]
    assert (process.returncode, said) == (0, [])
    native = backend == "c"
    assert sorted(process.stdout.splitlines()) == [
        f"child [0, 0, 0, 0, 0] 0 {1 if native else 0} 2",
        "parent [3, 0, 3, 0, 0]",
        "status 0",
    ]
    assert names == ["child.event", "child.plain", "parent.open", "parent.queued", "parent.sent"]


# ---- the end ----


@pytest.mark.parametrize("number", [1, 5000])
def test_a_process_that_ends_without_shutdown(tmp_path, backend, protocol, number):
    script = tmp_path / "train.py"
    script.write_text("""
import sys
from lensfast import NemoLensConfig, setup_telemetry
handle = setup_telemetry(NemoLensConfig.from_env())
for _ in range(int(sys.argv[1])):
    handle.tracer.start_span("work").end()
handle.tracer.start_span("open")
""")
    with Receiver() as receiver:
        process = run_script(
            script, backend, str(number),
            NEMO_LENS_ENABLED="1", NEMO_LENS_METRICS_ENABLED="0", OTEL_BSP_MAX_QUEUE_SIZE="10000",
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint(protocol),
        )  # fmt: skip
        names = Counter(span.name for span in spans_of(receiver.requests["/v1/traces"]))
    assert (process.returncode, process.stderr) == (0, "")
    assert names == {"work": number, "open": 1}


def test_nothing_is_left_after_shutdown(lensfast, scripted):
    """No thread, and no reference to what the spans held."""
    before = set(threading.enumerate())
    name, value, event = "a name " * 20, "a value " * 20, "an event " * 20
    held = [sys.getrefcount(text) for text in (name, value, event)]
    handle = set_up(lensfast)
    for _ in range(50):
        handle.tracer.start_span(name, attributes={"value": value}).end()
        span = handle.tracer.start_span(name)
        span.add_event(event, {"value": value})
        span.end()
        handle.tracer.start_span(name)
    del span
    handle.shutdown()
    assert counts(handle) == {"ended": 150, "exported": 150}
    wait_until(lambda: set(threading.enumerate()) <= before)
    scripted.names.clear()
    gc.collect()
    assert [sys.getrefcount(text) for text in (name, value, event)] == held
    if is_native(lensfast):
        sink = lensfast.providers.export_processor.sink
        assert (sink.waiting, sink.waiting_bytes) == (0, 0)


def test_spans_that_are_dropped_are_not_kept(lensfast, scripted):
    handle = set_up(lensfast)
    handle.shutdown()
    name = "a name " * 20
    held = sys.getrefcount(name)
    for _ in range(20):
        span = handle.tracer.start_span(name)
        span.add_event("happened")
        span.end()
    del span
    gc.collect()
    assert sys.getrefcount(name) == held


def test_no_meter_is_made_without_metrics(lensfast, scripted):
    handle = set_up(lensfast)
    make_spans(handle, 1)
    handle.shutdown()
    assert not hasattr(metrics.get_meter_provider(), "force_flush")
