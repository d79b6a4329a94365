"""Trace context in dicts and in bytes, on both backends."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture(autouse=True)
def w3c_propagator() -> Iterator[None]:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()]))
    yield
    propagate.set_global_textmap(before)


class BrokenPropagator(TraceContextTextMapPropagator):
    def inject(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no injection")

    def extract(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no extraction")


class OddPropagator(TraceContextTextMapPropagator):
    """Writes what JSON can't hold."""

    def inject(self, carrier: Any, *args: Any, **kwargs: Any) -> None:
        carrier["odd"] = object()


def span_context(of: context.Context) -> trace.SpanContext:
    return trace.get_current_span(of).get_span_context()


def ids(of: context.Context) -> tuple[str, str]:
    found = span_context(of)
    return f"{found.trace_id:032x}", f"{found.span_id:016x}"


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_current_span_is_injected_as_a_traceparent(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    carrier = {"present": "before"}
    with trace.get_tracer("test").start_as_current_span("work") as span:
        lensfast.propagation.inject_context(carrier)
    own = span.get_span_context()
    version, trace_id, span_id, flags = carrier["traceparent"].split("-")
    assert (version, int(trace_id, 16), int(span_id, 16)) == ("00", own.trace_id, own.span_id)
    assert int(flags, 16) & 1 == 1
    assert carrier["present"] == "before"


def test_without_a_span_nothing_is_injected(lensfast: ModuleType) -> None:
    carrier: dict[str, str] = {}
    lensfast.propagation.inject_context(carrier)
    assert carrier == {}


def test_baggage_is_injected_and_extracted_also_without_a_span(lensfast: ModuleType) -> None:
    carrier: dict[str, str] = {}
    token = context.attach(baggage.set_baggage("job", "j7"))
    try:
        lensfast.propagation.inject_context(carrier)
    finally:
        context.detach(token)
    assert carrier == {"baggage": "job=j7"}
    assert baggage.get_baggage("job", lensfast.propagation.extract_context(carrier)) == "j7"


def test_a_traceparent_is_extracted(lensfast: ModuleType) -> None:
    extracted = lensfast.propagation.extract_context({"traceparent": TRACEPARENT, "tracestate": "vendor=1"})
    assert ids(extracted) == (TRACE_ID, SPAN_ID)
    assert span_context(extracted).is_remote
    assert span_context(extracted).trace_state.get("vendor") == "1"


@pytest.mark.parametrize(
    "carrier",
    [{}, {"traceparent": "rubbish"}, {"Traceparent": TRACEPARENT}, {"traceparent": f"00-{'0' * 32}-{SPAN_ID}-01"}],
)
def test_without_a_valid_traceparent_the_extracted_context_is_empty(
    lensfast: ModuleType, exporter: InMemorySpanExporter, carrier: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with trace.get_tracer("test").start_as_current_span("current"):
        assert lensfast.propagation.extract_context(carrier) == {}
    assert warnings_in(caplog) == []


def test_headers_that_are_no_text_are_reported_and_count_as_none(
    lensfast: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert lensfast.propagation.extract_context({"traceparent": 5}) == {}
    assert len(warnings_in(caplog)) == 1


def test_a_carrier_of_the_wrong_type_raises(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(AttributeError):
        lensfast.propagation.extract_context(None)
    with trace.get_tracer("test").start_as_current_span("work"), pytest.raises(TypeError):
        lensfast.propagation.inject_context(None)


def test_a_broken_propagator_does_not_reach_the_program(
    lensfast: ModuleType, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    propagate.set_global_textmap(BrokenPropagator())
    carrier: dict[str, str] = {}
    with trace.get_tracer("test").start_as_current_span("work"):
        for _ in range(2):
            lensfast.propagation.inject_context(carrier)
            assert lensfast.propagation.extract_context({"traceparent": TRACEPARENT}) == {}
    assert carrier == {}
    assert len(warnings_in(caplog)) == 2


def test_importing_needs_no_valid_propagators(tmp_path: Path) -> None:
    """OpenTelemetry's module of propagators raises at import if the variable is wrong."""
    script = (
        "import lensfast.propagation, lensfast.distributed, lensfast.contrib.ray, lensfast.contrib.nccl\n"
        "carrier = {}\n"
        "lensfast.propagation.inject_context(carrier)\n"
        "assert carrier == {}\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "OTEL_PROPAGATORS": "misspelled"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "misspelled" in result.stderr


# Bytes


def nccl(lensfast: ModuleType) -> Any:
    return lensfast.contrib.nccl


def test_the_current_span_goes_through_bytes(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    with trace.get_tracer("test").start_as_current_span("work") as span:
        data = nccl(lensfast).serialize_context()
    assert isinstance(data, bytes)
    assert set(nccl(lensfast).deserialize_context(data)) == {"traceparent"}
    own = span.get_span_context()
    assert ids(nccl(lensfast).extract_nccl_context(data)) == (f"{own.trace_id:032x}", f"{own.span_id:016x}")


def test_without_a_span_the_bytes_are_an_empty_object(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    assert nccl(lensfast).serialize_context() == b"{}"
    assert nccl(lensfast).deserialize_context(b"{}") == {}
    with trace.get_tracer("test").start_as_current_span("current"):
        assert nccl(lensfast).extract_nccl_context(b"{}") == {}


@pytest.mark.parametrize(("data", "value"), [(b"not json", None), (b"\xff\xfe", None), (b"[1]", [1]), (b"5", 5)])
def test_bytes_that_hold_no_headers_mean_the_current_context(
    lensfast: ModuleType, exporter: InMemorySpanExporter, data: bytes, value: object
) -> None:
    assert nccl(lensfast).deserialize_context(data) == value
    with trace.get_tracer("test").start_as_current_span("current") as span:
        assert span_context(nccl(lensfast).extract_nccl_context(data)) == span.get_span_context()


def test_none_in_place_of_bytes_raises(lensfast: ModuleType) -> None:
    with pytest.raises(AttributeError):
        nccl(lensfast).deserialize_context(None)


@pytest.mark.parametrize("propagator", [BrokenPropagator, OddPropagator])
def test_what_can_not_be_serialized_is_left_out(
    lensfast: ModuleType, exporter: InMemorySpanExporter, propagator: type, caplog: pytest.LogCaptureFixture
) -> None:
    propagate.set_global_textmap(propagator())
    with trace.get_tracer("test").start_as_current_span("work"):
        assert nccl(lensfast).serialize_context() == b"{}"
    assert len(warnings_in(caplog)) == 1
