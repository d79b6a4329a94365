"""What an installed lensfast must do at least, on the C gate: python tools/smoke.py

Disabled sites, spans of the SDK, and native spans as an OTLP/HTTP collector receives them. Needs opentelemetry-sdk and
opentelemetry-exporter-otlp-proto-http, but no pytest and no second process: it is also run in an emulator.
"""

import os
import platform
import sys
import sysconfig
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lensfast
from lensfast import state
from lensfast._backend import backend_reason

ATTRIBUTES = {"negative": -(2**63), "fraction": 0.1, "word": "é", "yes": True, "list": ["a", "b"]}
received = []


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@lensfast.trace_fn("step", "smoke.step")
def step(loss):
    with lensfast.managed_span("layer", "smoke.layer", **ATTRIBUTES) as span:
        return loss, span


def check_disabled():
    assert step(1) == (1, None)
    assert not lensfast.is_span_group_enabled("step")
    assert not lensfast.span_group("step")


def check_spans_of_the_sdk():
    """In memory, on a provider that is not the global one."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    state.set_enabled_span_groups({"layer"})
    with lensfast.managed_span("layer", "smoke.layer", tracer=provider.get_tracer("smoke"), **ATTRIBUTES):
        pass
    state.set_enabled_span_groups(set())
    (span,) = exporter.get_finished_spans()
    assert span.name == "smoke.layer"
    assert dict(span.attributes) == {**ATTRIBUTES, "list": ("a", "b")}


def check_native_spans():
    """As the collector gets them: encoded in C, parent and child, every type of attribute."""
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.server_port}"
    lensfast.SpanRegistry.register("smoke", {"step", "layer"})
    config = lensfast.NemoLensConfig(enabled=True, span_groups="step,layer", exporter="otlp", metrics_enabled=False)
    telemetry = lensfast.setup_telemetry(config)
    _, layer = step(2)
    assert isinstance(layer, ReadableSpan)
    assert isinstance(layer, lensfast._native._Span), "spans are not native"
    context = layer.get_span_context()
    trace.get_tracer_provider().force_flush()
    stats = telemetry.stats()
    telemetry.shutdown()
    collector.shutdown()
    assert (stats.ended, stats.exported) == (2, 2), stats
    resources = [r for body in received for r in ExportTraceServiceRequest.FromString(body).resource_spans]
    spans = {span.name: span for r in resources for scope in r.scope_spans for span in scope.spans}
    assert spans.keys() == {"smoke.step", "smoke.layer"}
    child, parent = spans["smoke.layer"], spans["smoke.step"]
    assert child.parent_span_id == parent.span_id
    assert parent.parent_span_id == b""
    assert child.trace_id == parent.trace_id == context.trace_id.to_bytes(16)
    assert child.span_id == context.span_id.to_bytes(8)
    values = {each.key: each.value for each in child.attributes}
    assert values.keys() == ATTRIBUTES.keys()
    assert values["negative"].int_value == -(2**63)
    assert values["fraction"].double_value == 0.1
    assert values["word"].string_value == "é"
    assert values["yes"].bool_value is True
    assert [each.string_value for each in values["list"].array_value.values] == ["a", "b"]
    assert parent.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano


assert lensfast.backend == "c", backend_reason
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    assert not sys._is_gil_enabled(), "something that was imported has switched the GIL on"
check_disabled()
check_spans_of_the_sdk()
check_native_spans()
print(f"ok: lensfast {lensfast.__version__}, CPython {platform.python_version()}, {sysconfig.get_platform()}")
