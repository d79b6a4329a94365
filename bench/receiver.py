"""A process that takes OTLP over HTTP and keeps the requests until it is asked how many spans are in them.

It is a process of its own, so that what it costs is not counted. Usage: python bench/receiver.py; prints its port.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

bodies: list[bytes] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(b"")

    def do_GET(self) -> None:
        """How many spans have arrived since the last time this was asked."""
        taken = [bodies.pop() for _ in range(len(bodies))]
        self.answer(str(sum(map(count_spans, taken))).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def count_spans(body: bytes) -> int:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return sum(
        len(of_scope.spans)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for of_scope in of_resource.scope_spans
    )


@contextlib.contextmanager
def started() -> Iterator[str]:
    """The endpoint of a receiver in a process of its own."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def arrived(endpoint: str) -> int:
    """How many spans have arrived there since the last time this was asked."""
    with urllib.request.urlopen(endpoint) as answer:
        return int(answer.read())


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
