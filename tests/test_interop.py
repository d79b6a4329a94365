"""What others make of native spans: instrumentations, log bridges, propagators, processors and exporters of third
parties, on both backends, and each compared with what they make of the SDK's own spans.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk import _logs as sdk_logs
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SDKSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from otlp_receiver import Receiver

RESOURCE = {"service.name": "interop"}
TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
NAME = "lensfast-test.interop"

Program = Callable[[trace.Tracer], None]


@pytest.fixture
def spans(lensfast: ModuleType) -> InMemorySpanExporter:
    """Telemetry is set up, spans are native where that is possible, and come here as they are flushed."""
    memory = InMemorySpanExporter()
    set_up(lensfast, memory)
    return memory


def set_up(lensfast: ModuleType, exporter: SpanExporter) -> None:
    config = lensfast.NemoLensConfig(enabled=True, span_groups="step", service_name="interop")
    lensfast.SpanRegistry.register("interop", {"step"})
    lensfast.setup_telemetry(config, span_exporter=exporter, metric_reader=InMemoryMetricReader())
    native = isinstance(trace.get_tracer_provider(), lensfast._native.TracerProvider)
    assert native is (lensfast.backend == "c"), lensfast._native.why_not()


def is_native(lensfast: ModuleType, span: object) -> bool:
    return type(span) is lensfast._native._Span


def finished(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]
    return {span.name: span for span in memory.get_finished_spans()}


def ids(span: Any) -> tuple[int, int]:
    own = span.get_span_context()
    return own.trace_id, own.span_id


def parent_ids(span: Any) -> tuple[int, int] | None:
    return (span.parent.trace_id, span.parent.span_id) if span.parent else None


def traceparent(span: Any) -> str:
    own = span.get_span_context()
    return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"


def plain(text: str, seen: dict[str, str]) -> dict[str, Any]:
    """A span's JSON without times, its ids numbered in the order in which they appear."""

    def number(value: str | None) -> str | None:
        return value and seen.setdefault(value, f"id {len(seen)}")

    span: dict[str, Any] = json.loads(text)
    assert span.pop("start_time") <= (span.pop("end_time") or "9")
    span["resource"] = None  # that of setup_telemetry says more
    for part in (span["context"], *(link["context"] for link in span["links"])):
        part["trace_id"], part["span_id"] = number(part["trace_id"]), number(part["span_id"])
    span["parent_id"] = number(span["parent_id"])
    for event in span["events"]:
        del event["timestamp"]
        event["attributes"].pop("exception.stacktrace", None)
    return span


def all_plain(texts: list[str]) -> list[dict[str, Any]]:
    seen: dict[str, str] = {}
    return [plain(text, seen) for text in texts]


def run_on_both(
    program: Program, make: Callable[[], SpanProcessor], read: Callable[[SpanProcessor], list[str]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What a processor of that kind saw of the program on the provider that is set up, and on one of the SDK's."""
    outcomes = []
    of_sdk = TracerProvider(resource=Resource(RESOURCE), shutdown_on_exit=False)
    for provider in (trace.get_tracer_provider(), of_sdk):
        processor = make()
        provider.add_span_processor(processor)  # type: ignore[attr-defined]
        program(provider.get_tracer("app", "1.2", "https://example.invalid/schema"))
        provider.force_flush()  # type: ignore[attr-defined]
        outcomes.append(all_plain(read(processor)))
    of_sdk.shutdown()
    return outcomes[0], outcomes[1]


def varied_spans(tracer: trace.Tracer) -> None:
    """Spans of many kinds."""
    remote = SpanContext(TRACE_ID, SPAN_ID, True, TraceFlags(1), trace.TraceState([("vendor", "a=1")]))
    with (
        tracer.start_as_current_span(
            "server",
            context=trace.set_span_in_context(NonRecordingSpan(remote)),
            kind=SpanKind.SERVER,
            attributes={"http.status": 200, "ok": True, "rate": 0.5, "path": "größe", "shape": [1, 2]},
            links=[Link(remote, {"why": "retry"})],
        ) as server,
        tracer.start_as_current_span("inner", attributes={"a": 1}) as inner,
    ):
        inner.set_attribute("a", 2)
        inner.add_event("half-way", {"step": 5})
        inner.update_name("renamed")
        inner.set_status(Status(StatusCode.OK))
        server.set_attributes({"late": "yes", "odd": object()})  # type: ignore[dict-item]
    try:
        with tracer.start_as_current_span("failing"):
            raise ValueError("boom")
    except ValueError:
        pass
    by_hand = tracer.start_span("", kind=SpanKind.PRODUCER, start_time=1_000)
    by_hand.set_status(StatusCode.ERROR, "by hand")
    by_hand.end(2_000)


# What a native span is to others


def test_a_native_span_is_one_of_the_sdk(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    with lensfast.managed_span("step", "work") as span:
        assert is_native(lensfast, span) is (lensfast.backend == "c")
        assert isinstance(span, SDKSpan)
        assert isinstance(span, ReadableSpan)
        assert isinstance(span, trace.Span)
        assert trace.get_current_span() is span
        assert trace.get_current_span(context.get_current()) is span
        assert span.is_recording()
        assert type(span.get_span_context()) is SpanContext
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_two_providers_parent_each_others_spans(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    others = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(others))
    foreign = provider.get_tracer("somebody")
    with (
        lensfast.managed_span("step", "outer") as outer,
        foreign.start_as_current_span("between", links=[Link(outer.get_span_context())]) as between,
        lensfast.managed_span("step", "inner"),
        trace.use_span(outer),
        foreign.start_as_current_span("beside"),
    ):
        pass
    ours, theirs = finished(spans), {span.name: span for span in others.get_finished_spans()}
    assert set(ours) == {"outer", "inner"}
    assert parent_ids(theirs["between"]) == ids(outer)
    assert [link.context for link in theirs["between"].links] == [outer.get_span_context()]
    assert parent_ids(ours["inner"]) == ids(between)
    assert parent_ids(theirs["beside"]) == ids(outer)
    assert {span.context.trace_id for span in (*ours.values(), *theirs.values())} == {ids(outer)[0]}


def test_use_span_records_what_leaves_it(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    span = trace.get_tracer("app").start_span("work")
    with pytest.raises(KeyError), trace.use_span(span, end_on_exit=True):
        raise KeyError("missing")
    work = finished(spans)["work"]
    assert (work.status.status_code, work.status.description) == (StatusCode.ERROR, "KeyError: 'missing'")
    (event,) = work.events
    assert (event.name, event.attributes["exception.type"]) == ("exception", "KeyError")


def test_the_current_span_follows_copied_contexts(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    """As executors and event loops copy them."""
    seen: list[object] = []

    async def task() -> None:
        await asyncio.sleep(0)
        seen.append(trace.get_current_span())

    async def main() -> None:
        await asyncio.gather(task(), asyncio.to_thread(lambda: seen.append(trace.get_current_span())))

    with lensfast.managed_span("step", "work") as span:
        copied = contextvars.copy_context()
        thread = threading.Thread(target=lambda: seen.append(trace.get_current_span()))
        thread.start()
        thread.join()
        asyncio.run(main())
    assert seen == [trace.INVALID_SPAN, span, span]
    assert copied.run(trace.get_current_span) is span


# Logs


@pytest.fixture
def plain_logging() -> Iterator[logging.Logger]:
    """A logger for the test; leaves no handler, level or record factory behind."""
    factory = logging.getLogRecordFactory()
    loggers = [logging.getLogger(name) for name in ("", NAME)]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    logging.getLogger(NAME).setLevel(logging.INFO)
    yield logging.getLogger(NAME)
    logging.setLogRecordFactory(factory)
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture
def instrument_logging(plain_logging: logging.Logger) -> Iterator[Callable[..., logging.Logger]]:
    """opentelemetry-instrumentation-logging, once it is called; options are the instrumentor's."""
    reason = "opentelemetry-instrumentation-logging is not installed"
    instrumentor = pytest.importorskip("opentelemetry.instrumentation.logging", reason=reason).LoggingInstrumentor()

    def instrument(**options: Any) -> logging.Logger:
        # The newer ones inject only if they are asked to, and else bridge to the log provider.
        instrumentor.instrument(
            skip_dep_check=True, inject_trace_context=True, enable_log_auto_instrumentation=False, **options
        )
        return plain_logging

    yield instrument
    instrumentor.uninstrument()


def injected(record: logging.LogRecord) -> tuple[str, str, bool, str]:
    fields: Any = record
    return fields.otelTraceID, fields.otelSpanID, fields.otelTraceSampled, fields.otelServiceName


def test_logging_instrumentation_sees_our_span(
    lensfast: ModuleType,
    spans: InMemorySpanExporter,
    instrument_logging: Callable[..., logging.Logger],
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = instrument_logging()

    @lensfast.trace_fn("step", "traced")
    def traced() -> trace.Span:
        logger.info("in traced")
        return trace.get_current_span()

    logger.info("outside")
    with lensfast.managed_span("step", "outer") as outer:
        logger.info("in outer")
        inside = traced()
        with trace.get_tracer("app").start_as_current_span("own") as own:
            logger.info("in own")
        logger.info("in outer again")
        with lensfast.managed_span("layer", "disabled"):
            logger.info("in a disabled one")
    logger.info("outside again")

    def line(span: trace.Span | None) -> tuple[str, str, bool, str]:
        if span is None:
            return "0", "0", False, "interop"
        trace_id, span_id = ids(span)
        return f"{trace_id:032x}", f"{span_id:016x}", True, "interop"

    expected = [None, outer, inside, own, outer, outer, None]
    assert [injected(record) for record in caplog.records if record.name == NAME] == [line(span) for span in expected]
    assert len({ids(span) for span in (outer, inside, own)}) == 3


def test_a_log_hook_gets_our_span(
    lensfast: ModuleType, spans: InMemorySpanExporter, instrument_logging: Callable[..., logging.Logger]
) -> None:
    def hook(span: trace.Span, record: logging.LogRecord) -> None:
        if span.is_recording():
            span.add_event(record.getMessage(), {"level": record.levelname})
            span.set_attribute("logged", True)

    logger = instrument_logging(log_hook=hook)
    with lensfast.managed_span("step", "work", n=1):
        logger.info("loss is %d", 3)
    work = finished(spans)["work"]
    assert work.attributes == {"n": 1, "logged": True}
    assert [(event.name, event.attributes) for event in work.events] == [("loss is 3", {"level": "INFO"})]


def test_an_unsampled_span_is_current_in_logs(
    lensfast: ModuleType,
    instrument_logging: Callable[..., logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    set_up(lensfast, InMemorySpanExporter())
    logger = instrument_logging()
    with lensfast.managed_span("step", "work") as span:
        logger.info("inside")
    trace_id, span_id = ids(span)
    assert trace_id
    assert span_id
    assert not span.is_recording()
    (record,) = [record for record in caplog.records if record.name == NAME]
    assert injected(record) == (f"{trace_id:032x}", f"{span_id:016x}", False, "interop")


class LogMemory:
    """Keeps the log records that it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def export(self, batch: Any) -> None:
        self.records += [item.log_record for item in batch]

    def shutdown(self) -> None:
        """Nothing to do."""


def log_provider() -> tuple[LoggerProvider, LogMemory]:
    memory: Any = LogMemory()
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(memory))
    return provider, memory


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("whose", ["sdk", "instrumentation"])
def test_a_log_handler_sees_our_span(
    lensfast: ModuleType, spans: InMemorySpanExporter, plain_logging: logging.Logger, whose: str
) -> None:
    if whose == "sdk":
        handler_class = getattr(sdk_logs, "LoggingHandler", None)
    else:
        reason = "this release of opentelemetry-instrumentation-logging, if there is any, has no handler"
        handler_class = pytest.importorskip(
            "opentelemetry.instrumentation.logging.handler", reason=reason
        ).LoggingHandler
    if handler_class is None:
        pytest.skip("the SDK has no LoggingHandler any more")
    provider, memory = log_provider()
    plain_logging.addHandler(handler_class(logger_provider=provider))
    with lensfast.managed_span("step", "outer") as outer:
        plain_logging.info("in outer")
        with lensfast.managed_span("step", "inner") as inner:
            plain_logging.warning("in inner")
    plain_logging.info("outside")
    found = [(record.body, record.trace_id or 0, record.span_id or 0) for record in memory.records]
    assert found == [("in outer", *ids(outer)), ("in inner", *ids(inner)), ("outside", 0, 0)]
    assert [int(record.trace_flags or 0) & 1 for record in memory.records] == [1, 1, 0]


# Auto-instrumentation


def fetch_with_aiohttp(work: Callable[[], Any]) -> tuple[Any, dict[str, str]]:
    """Run `work` as a context manager around a request of aiohttp's client; (what it yields, the request's headers)."""
    aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    received: list[dict[str, str]] = []

    async def answer(request: Any) -> Any:
        received.append({key.lower(): value for key, value in request.headers.items()})
        return web.Response(text="ok", status=404)

    async def main() -> Any:
        app = web.Application()
        app.router.add_get("/x", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            with work() as span:
                async with session.get(server.make_url("/x")) as response:
                    assert await response.text() == "ok"
            return span

    span = asyncio.run(main())
    (headers,) = received
    return span, headers


def test_aiohttp_client_instrumentation(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    reason = "opentelemetry-instrumentation-aiohttp-client is not installed"
    module = pytest.importorskip("opentelemetry.instrumentation.aiohttp_client", reason=reason)
    instrumentor = module.AioHttpClientInstrumentor()
    stock = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(stock))
    clients, outer = [], []
    for options, work in (
        ({}, lambda: lensfast.managed_span("step", "work")),
        ({"tracer_provider": provider}, lambda: provider.get_tracer("app").start_as_current_span("work")),
    ):
        instrumentor.instrument(skip_dep_check=True, **options)
        try:
            span, headers = fetch_with_aiohttp(work)
        finally:
            instrumentor.uninstrument()
        memory = stock if options else spans
        (client,) = [other for name, other in finished(memory).items() if name != "work"]
        assert parent_ids(client) == ids(span)
        assert headers["traceparent"] == traceparent(client)
        clients.append(client)
        outer.append(span)
    # The instrumentation makes of a native span what it makes of the SDK's, but for the port.
    ours, theirs = clients
    assert ours.attributes.keys() == theirs.attributes.keys()
    assert (ours.name, ours.kind, ours.status.status_code) == (theirs.name, SpanKind.CLIENT, StatusCode.ERROR)
    assert theirs.status.status_code is StatusCode.ERROR
    assert is_native(lensfast, outer[0]) is (lensfast.backend == "c")


def test_a_propagated_header_names_our_span(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    """Where no instrumentation puts one of its own in between."""
    carrier: dict[str, str] = {}
    by_lensfast: dict[str, str] = {}
    with lensfast.managed_span("step", "work") as span:
        propagate.inject(carrier)
        lensfast.inject_context(by_lensfast)
    assert carrier == by_lensfast == {"traceparent": traceparent(span)}
    assert span.get_span_context().trace_flags.sampled


def test_fastapi_instrumentation(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")
    pytest.importorskip("httpx", reason="httpx is not installed")
    reason = "opentelemetry-instrumentation-fastapi is not installed"
    module = pytest.importorskip("opentelemetry.instrumentation.fastapi", reason=reason)
    from fastapi.testclient import TestClient

    app = fastapi.FastAPI()
    current = []

    @app.get("/items/{item}")
    async def item(item: int) -> dict[str, str]:
        current.append(trace.get_current_span())
        with lensfast.managed_span("step", "handler"):
            return {"baggage": str(baggage.get_baggage("run"))}

    module.FastAPIInstrumentor.instrument_app(app)
    with TestClient(app) as client:
        answer = client.get("/items/4", headers={"traceparent": TRACEPARENT, "baggage": "run=7"})
    assert answer.json() == {"baggage": "7"}
    found = {span.kind: span for span in finished(spans).values() if span.kind is not SpanKind.INTERNAL}
    server, handler = found[SpanKind.SERVER], finished(spans)["handler"]
    assert parent_ids(server) == (TRACE_ID, SPAN_ID)
    assert server.parent.is_remote
    assert server.name == "GET /items/{item}"
    assert parent_ids(handler) == ids(server)
    assert is_native(lensfast, current[0]) is (lensfast.backend == "c")
    assert ids(current[0]) == ids(server)


# Propagators


@pytest.mark.parametrize("flags", ["00", "01"])
def test_w3c_trace_context_in_and_out(lensfast: ModuleType, spans: InMemorySpanExporter, flags: str) -> None:
    w3c = TraceContextTextMapPropagator()
    headers = {"traceparent": f"{TRACEPARENT[:-2]}{flags}", "tracestate": "b=2,a=1"}
    token = context.attach(w3c.extract(headers))
    try:
        with lensfast.managed_span("step", "work") as span:
            carrier: dict[str, str] = {}
            w3c.inject(carrier)
            again = trace.get_current_span(w3c.extract(carrier, context.Context()))
    finally:
        context.detach(token)
    own = span.get_span_context()
    assert carrier == {"traceparent": traceparent(span), "tracestate": "b=2,a=1"}
    assert carrier["traceparent"].endswith(flags)  # the parent's decision is followed
    assert own.trace_id == TRACE_ID
    assert dict(own.trace_state) == {"b": "2", "a": "1"}
    assert not own.is_remote
    assert (ids(again), again.get_span_context().is_remote) == (ids(span), True)
    if flags == "01":
        work = finished(spans)["work"]
        assert parent_ids(work) == (TRACE_ID, SPAN_ID)
        assert work.parent.is_remote
        assert dict(work.parent.trace_state) == {"b": "2", "a": "1"}
    else:
        assert finished(spans) == {}


def test_global_propagators_carry_span_and_baggage(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    outer = context.attach(baggage.set_baggage("run", "7"))
    try:
        with lensfast.managed_span("step", "work") as span:
            assert baggage.get_all() == {"run": "7"}
            inner = context.attach(baggage.set_baggage("step", "3"))
            with lensfast.managed_span("step", "inside") as inside:
                carrier: dict[str, str] = {}
                propagate.inject(carrier)
                assert baggage.get_all() == {"run": "7", "step": "3"}
            assert trace.get_current_span() is span
            context.detach(inner)
            assert baggage.get_all() == {"run": "7"}
    finally:
        context.detach(outer)
    assert baggage.get_all() == {}
    assert carrier["traceparent"] == traceparent(inside)
    assert sorted(carrier["baggage"].split(",")) == ["run=7", "step=3"]
    received = propagate.extract(carrier, context.Context())
    assert baggage.get_all(received) == {"run": "7", "step": "3"}
    with trace.get_tracer("app").start_as_current_span("received", context=received) as child:
        # The context that is given says who the parent is; what else is in it does not become current.
        assert baggage.get_all() == {}
    assert parent_ids(finished(spans)["received"]) == ids(inside)
    assert child.get_span_context().trace_id == ids(span)[0]


def test_a_propagator_that_somebody_sets(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    """Injection is by whatever is global, and asks the span that is given."""

    class OneHeader(TraceContextTextMapPropagator):
        def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
            span = trace.get_current_span(context)
            carrier["x-span"] = f"{span.get_span_context().span_id:x}/{span.is_recording()}"

    before = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([OneHeader(), W3CBaggagePropagator()]))
    try:
        inside: dict[str, str] = {}
        later: dict[str, str] = {}
        with lensfast.managed_span("step", "work") as span:
            lensfast.inject_context(inside)
        propagate.inject(later, trace.set_span_in_context(span))
    finally:
        propagate.set_global_textmap(before)
    assert inside == {"x-span": f"{ids(span)[1]:x}/True"}
    assert later == {"x-span": f"{ids(span)[1]:x}/False"}


# Processors


class Meddler(SpanProcessor):
    """Does to spans what third-party processors do: reads them, and changes them while they can be changed."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, span: SDKSpan, parent_context: context.Context | None = None) -> None:
        for key, value in baggage.get_all(parent_context).items():
            span.set_attribute(f"baggage.{key}", str(value))
        span.set_attribute("thread", threading.current_thread().name)
        span.set_attributes({"kind": span.kind.name, "root": span.parent is None, "given": len(span.attributes or ())})
        span.update_name(f"[{span.name}]")
        span.add_event("started", {"recording": span.is_recording(), "has end": span.end_time is not None})
        if hasattr(span, "add_link"):
            span.add_link(SpanContext(1, 2, False))
        if span.name == "[failing]":
            span.set_status(StatusCode.ERROR, "by the processor")
        assert span.start_time is not None

    def _on_ending(self, span: SDKSpan) -> None:
        # The SDK calls it, where it does, when the span has its end time and may be changed no more by its owner.
        self.seen.append(f"ending {span.name} {span.end_time is not None} {span.is_recording()}")

    def on_end(self, span: ReadableSpan) -> None:
        assert span.end_time is not None
        self.seen.append(f"end {span.name} {span.attributes!r} {[event.name for event in span.events]}")


def test_a_processor_that_changes_spans(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    meddlers: list[Meddler] = []

    class Recorder(SimpleSpanProcessor):
        """A Meddler, and behind it an exporter."""

        def __init__(self) -> None:
            self.memory = InMemorySpanExporter()
            super().__init__(self.memory)
            self.meddler = Meddler()
            meddlers.append(self.meddler)

        def on_start(self, span: SDKSpan, parent_context: context.Context | None = None) -> None:
            self.meddler.on_start(span, parent_context)

        def _on_ending(self, span: SDKSpan) -> None:
            self.meddler._on_ending(span)

        def on_end(self, span: ReadableSpan) -> None:
            self.meddler.on_end(span)
            super().on_end(span)

    def program(tracer: trace.Tracer) -> None:
        token = context.attach(baggage.set_baggage("run", "7"))
        with tracer.start_as_current_span("outer"):  # a context that is not given is not passed on
            pass
        with tracer.start_as_current_span("given", context=baggage.set_baggage("step", "3")):
            pass
        context.detach(token)
        varied_spans(tracer)

    def read(processor: Any) -> list[str]:
        return [span.to_json() for span in processor.memory.get_finished_spans()]

    ours, theirs = run_on_both(program, Recorder, read)
    assert ours == theirs
    assert [span["name"] for span in ours] == ["[outer]", "[given]", "renamed", "[server]", "[failing]", "[]"]
    assert ours[1]["attributes"]["baggage.step"] == "3"
    assert ours[4]["status"]["status_code"] == "ERROR"
    of_ours, of_theirs = meddlers
    assert of_ours.seen == of_theirs.seen
    # What was changed at the start also goes to the exporter that was set up.
    assert finished(spans)["[given]"].attributes["kind"] == "INTERNAL"


def test_a_processor_sees_managed_spans_start_and_end(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    order: list[tuple[str, object]] = []

    class Watcher(SpanProcessor):
        def on_start(self, span: SDKSpan, parent_context: context.Context | None = None) -> None:
            order.append(("start", span))
            span.set_attribute("by", "watcher")

        def on_end(self, span: ReadableSpan) -> None:
            order.append(("end", span))

    with lensfast.managed_span("step", "before"):
        # Who comes later is called from the next event on, also for spans that are open.
        trace.get_tracer_provider().add_span_processor(Watcher())  # type: ignore[attr-defined]
        with lensfast.managed_span("step", "outer", n=1) as outer, lensfast.span_cm("inner") as inner:
            pass
    names = [(what, span.name) for what, span in order]  # type: ignore[attr-defined]
    assert names == [("start", "outer"), ("start", "inner"), ("end", "inner"), ("end", "outer"), ("end", "before")]
    assert [span for what, span in order if what == "start"] == [outer, inner]
    assert finished(spans)["outer"].attributes == {"by": "watcher", "n": 1}


def test_a_processor_that_drops_and_one_that_wraps(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    """Filters hand on only some spans; redactors build another ReadableSpan from the one that ended."""

    class Redactor(SpanProcessor):
        def __init__(self, inner: SpanProcessor) -> None:
            self.inner = inner

        def on_end(self, span: ReadableSpan) -> None:
            if span.attributes.get("drop"):
                return
            self.inner.on_end(
                ReadableSpan(
                    name=span.name,
                    context=span.context,
                    parent=span.parent,
                    resource=span.resource,
                    attributes={**span.attributes, "secret": "***"},
                    events=span.events,
                    links=span.links,
                    kind=span.kind,
                    instrumentation_scope=span.instrumentation_scope,
                    status=span.status,
                    start_time=span.start_time,
                    end_time=span.end_time,
                )
            )

        def shutdown(self) -> None:
            self.inner.shutdown()

    def program(tracer: trace.Tracer) -> None:
        varied_spans(tracer)
        tracer.start_span("dropped", attributes={"drop": True}).end()

    memories: list[InMemorySpanExporter] = []

    def make() -> SpanProcessor:
        memories.append(InMemorySpanExporter())
        return Redactor(SimpleSpanProcessor(memories[-1]))

    def read(processor: Any) -> list[str]:
        return [span.to_json() for span in memories[-1].get_finished_spans()]

    ours, theirs = run_on_both(program, make, read)
    assert ours == theirs
    assert len(ours) == 4
    assert {span["attributes"]["secret"] for span in ours} == {"***"}


@pytest.mark.parametrize("between", ["a processor around it", "concurrent processors"])
def test_lensfasts_exporter_behind_other_processors(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """It is handed spans by somebody else then; they arrive as they would without."""

    class Around(SpanProcessor):
        def __init__(self, inner: SpanProcessor) -> None:
            self.inner = inner

        def on_start(self, span: SDKSpan, parent_context: context.Context | None = None) -> None:
            self.inner.on_start(span, parent_context)

        def on_end(self, span: ReadableSpan) -> None:
            self.inner.on_end(span)

        def shutdown(self) -> None:
            self.inner.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return self.inner.force_flush(timeout_millis)

    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint("http/protobuf"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        if between == "concurrent processors":
            provider_class = lensfast._native.TracerProvider if lensfast.backend == "c" else TracerProvider
            processors = ConcurrentMultiSpanProcessor()
            resource = Resource(RESOURCE)
            trace.set_tracer_provider(
                provider_class(resource=resource, active_span_processor=processors, shutdown_on_exit=False)
            )
        lensfast.SpanRegistry.register("interop", {"step"})
        config = lensfast.NemoLensConfig(True, "interop", span_groups="step", metrics_enabled=False)
        handle = lensfast.setup_telemetry(config)
        if between == "a processor around it":
            multi: Any = trace.get_tracer_provider()._active_span_processor  # type: ignore[attr-defined]
            multi._span_processors = tuple(Around(processor) for processor in multi._span_processors)
        with lensfast.managed_span("step", "work", n=1):
            pass
        handle.shutdown()
        (work,) = receiver.spans()
    assert (work.name, work.scope, work.attributes) == ("work", "nemo.lens.helpers", {"n": 1})
    assert work.resource["service.name"] == "interop"


# Exporters


def test_simple_processor_and_console_exporter(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    printed: list[io.StringIO] = []

    def make() -> SpanProcessor:
        printed.append(io.StringIO())
        exporter = ConsoleSpanExporter(out=printed[-1], formatter=lambda span: span.to_json(indent=None) + "\n")
        return SimpleSpanProcessor(exporter)

    ours, theirs = run_on_both(varied_spans, make, lambda _: printed[-1].getvalue().splitlines())
    assert ours == theirs
    assert [span["name"] for span in ours] == ["renamed", "server", "failing", ""]
    assert ours[1]["attributes"]["shape"] == [1, 2]


def test_the_console_exporters_own_format(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    out = io.StringIO()
    trace.get_tracer_provider().add_span_processor(  # type: ignore[attr-defined]
        SimpleSpanProcessor(ConsoleSpanExporter(out=out))
    )
    with lensfast.managed_span("step", "work", n=1) as span:
        pass
    trace_id, span_id = ids(span)
    record = json.loads(out.getvalue())
    assert record["name"] == "work"
    assert record["context"] == {"trace_id": f"0x{trace_id:032x}", "span_id": f"0x{span_id:016x}", "trace_state": "[]"}
    assert record["attributes"] == {"n": 1}
    assert record["resource"]["attributes"]["service.name"] == "interop"


@pytest.mark.parametrize("kind", [SimpleSpanProcessor, BatchSpanProcessor])
def test_processors_of_the_sdk_with_an_exporter_in_memory(
    lensfast: ModuleType, spans: InMemorySpanExporter, kind: type[Any]
) -> None:
    memories: list[InMemorySpanExporter] = []
    made: list[Any] = []

    def make() -> SpanProcessor:
        memories.append(InMemorySpanExporter())
        made.append(kind(memories[-1]))
        return made[-1]  # type: ignore[no-any-return]

    def read(_: SpanProcessor) -> list[str]:
        return [span.to_json() for span in memories[-1].get_finished_spans()]

    ours, theirs = run_on_both(varied_spans, make, read)
    assert ours == theirs
    assert len(ours) == 4
    made[0].shutdown()


def test_an_exporter_that_uses_what_it_gets(lensfast: ModuleType, spans: InMemorySpanExporter) -> None:
    """In sets, as keys, by their private parts, in another thread, and long after."""
    kept: dict[object, tuple[str, int]] = {}

    class Keeper(SpanExporter):
        def export(self, batch: Any) -> SpanExportResult:
            for span in sorted(set(batch), key=lambda span: span.start_time):
                kept[span] = span._name, len(span._attributes)
            return SpanExportResult.SUCCESS

    batch = BatchSpanProcessor(Keeper())
    trace.get_tracer_provider().add_span_processor(batch)  # type: ignore[attr-defined]
    for number in range(3):
        with lensfast.managed_span("step", f"work {number}", n=number):
            pass
    batch.shutdown()
    assert list(kept.values()) == [("work 0", 1), ("work 1", 1), ("work 2", 1)]
    readable: Any = list(kept)
    assert [span.attributes for span in readable] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert not any(getattr(span, "is_recording", bool)() for span in readable)


def test_an_unsampled_span_reaches_no_exporter(lensfast: ModuleType) -> None:
    provider_class = lensfast._native.TracerProvider if lensfast.backend == "c" else TracerProvider
    memory = InMemorySpanExporter()
    provider = provider_class(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with provider.get_tracer("app").start_as_current_span("work") as span:
        assert type(span) is NonRecordingSpan
        assert trace.get_current_span() is span
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
    assert carrier == {"traceparent": traceparent(span)}
    assert not span.get_span_context().trace_flags.sampled
    assert memory.get_finished_spans() == ()
