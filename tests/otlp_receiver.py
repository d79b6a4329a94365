"""An OTLP collector for tests: takes gRPC and HTTP/protobuf on 127.0.0.1 and keeps what arrives, decoded.

Also the way to start a process that sends to it, as a user would.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from conftest import clean_environment

PATHS = {
    "/v1/traces": (trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse),
    "/v1/metrics": (metrics_service_pb2.ExportMetricsServiceRequest, metrics_service_pb2.ExportMetricsServiceResponse),
    "/v1/logs": (logs_service_pb2.ExportLogsServiceRequest, logs_service_pb2.ExportLogsServiceResponse),
}

PROTOCOLS = ("grpc", "http/protobuf")


def run_script(script: Path, backend: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python script arguments` with `variables` as its environment, on one backend."""
    command = [sys.executable, str(script), *arguments]
    environment = clean_environment(backend, **variables)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


@dataclass
class ReceivedSpan:
    """One span as it arrived; ids are hex, a root's parent_id is empty."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    status: str
    status_message: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[tuple[str, str]]
    start: int
    end: int
    scope: str
    resource: dict[str, Any]


class Receiver:
    """Context manager: a collector on two ports of its own choice, or on those that are given."""

    def __init__(self, grpc_port: int = 0, http_port: int = 0) -> None:
        self.requests: dict[str, list[Any]] = {path: [] for path in PATHS}
        self.http_status = 200
        """What HTTP requests are answered; they are kept only if it is 200."""
        self.bad_requests: list[str] = []
        """Why an HTTP request could not be read, for each such."""
        self._grpc = grpc.server(ThreadPoolExecutor(4))
        for module, service, path in (
            (trace_service_pb2_grpc, "TraceService", "/v1/traces"),
            (metrics_service_pb2_grpc, "MetricsService", "/v1/metrics"),
            (logs_service_pb2_grpc, "LogsService", "/v1/logs"),
        ):
            servicer = getattr(module, f"{service}Servicer")()
            servicer.Export = self._taker(path)
            getattr(module, f"add_{service}Servicer_to_server")(servicer, self._grpc)
        self.grpc_port = self._grpc.add_insecure_port(f"127.0.0.1:{grpc_port}")
        self._http = _HTTPServer(("127.0.0.1", http_port), _Handler)
        self._http.receiver = self
        self.http_port = self._http.server_address[1]
        self._http_thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})

    def _taker(self, path: str) -> Any:
        def export(request: Any, context: Any) -> Any:
            self.requests[path].append(request)
            return PATHS[path][1]()

        return export

    def __enter__(self) -> Receiver:
        self._grpc.start()
        self._http_thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._grpc.stop(None).wait()
        self._http.shutdown()
        self._http_thread.join()
        self._http.close_connections()
        self._http.server_close()

    def endpoint(self, protocol: str) -> str:
        """What OTEL_EXPORTER_OTLP_ENDPOINT must be for `"grpc"` or `"http/protobuf"`."""
        return f"http://127.0.0.1:{self.grpc_port if protocol == 'grpc' else self.http_port}"

    def spans(self) -> list[ReceivedSpan]:
        """All spans, in the order of arrival."""
        return [
            _span(span, scope_spans.scope.name, _attributes(resource_spans.resource.attributes))
            for request in self.requests["/v1/traces"]
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]

    def gauges(self) -> dict[str, list[tuple[str, float, dict[str, Any], dict[str, Any]]]]:
        """name -> [(scope, value, attributes, resource)], in the order of arrival."""
        points: dict[str, list[Any]] = {}
        for request in self.requests["/v1/metrics"]:
            for resource_metrics in request.resource_metrics:
                resource = _attributes(resource_metrics.resource.attributes)
                for scope_metrics in resource_metrics.scope_metrics:
                    for metric in scope_metrics.metrics:
                        for point in metric.gauge.data_points:
                            value = getattr(point, point.WhichOneof("value"))
                            points.setdefault(metric.name, []).append(
                                (scope_metrics.scope.name, value, _attributes(point.attributes), resource)
                            )
        return points

    def log_bodies(self) -> list[tuple[str, Any]]:
        """(scope, body) of all log records, in the order of arrival."""
        return [
            (scope_logs.scope.name, _value(record.body))
            for request in self.requests["/v1/logs"]
            for resource_logs in request.resource_logs
            for scope_logs in resource_logs.scope_logs
            for record in scope_logs.log_records
        ]


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close() waits for them
    receiver: Receiver

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def close_connections(self) -> None:
        """Hang up, as a collector that stops does."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the client was first
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer = b""
        receiver: Receiver = self.server.receiver  # type: ignore[attr-defined]
        status = receiver.http_status if self.path in PATHS else 404
        if status == 200:
            request_type, response_type = PATHS[self.path]
            try:
                receiver.requests[self.path].append(request_type.FromString(body))
            except DecodeError as error:
                receiver.bad_requests.append(f"{self.path}: {error}")
                status = 400
            answer = response_type().SerializeToString()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Silence on stderr, which tests read."""


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _span(span: Any, scope: str, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        status_message=span.status.message,
        attributes=_attributes(span.attributes),
        events=[(event.name, _attributes(event.attributes)) for event in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        scope=scope,
        resource=resource,
    )
