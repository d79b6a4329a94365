"""Millions of native spans through the queue, encoded, to an exporter that only counts: memory must stay flat.

Usage: python bench/soak.py [--spans N] [--quick]

Spans have attributes of all types, and every fifth is inside another. Every hundredth has an event and a status, and
some have a link. A tenth of the spans is warm-up: from then on, resident memory must not grow by more than 4 MB,
however many follow. Every span must be exported. Exit status 1 otherwise. --quick is for CI: 300,000 spans.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from time import perf_counter, process_time
from typing import Any

os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"

import enabled
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Link, Status, StatusCode

import lensfast

SPANS, QUICK = 10_000_000, 300_000
BLOCK = 2_000
MOST_GROWTH = 4 * 2**20
REPORTS = 20


class CountingExport:
    """Takes the place of the exporter's export(): the request is written, as for sending, and thrown away."""

    def __init__(self) -> None:
        self.spans = self.bytes = self.requests = 0

    def __call__(self, batch: Any) -> SpanExportResult:
        request = batch.request
        if self.requests % 500 == 0:
            self.check(request, len(batch))
        self.spans += len(batch)
        self.bytes += len(request)
        self.requests += 1
        return SpanExportResult.SUCCESS

    @staticmethod
    def check(request: bytes, spans: int) -> None:
        """Now and then, a decoded request has the spans that it should."""
        message = ExportTraceServiceRequest.FromString(request)
        found = sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)
        if found != spans:
            raise SystemExit(f"{found} spans are in a request of {spans}")


def block(first: int, tracer: Any) -> None:
    """BLOCK spans. Names and values differ, so that what is kept of them would add up."""
    managed_span = lensfast.managed_span
    for i in range(first, first + BLOCK, 5):
        for n in range(i, i + 3):
            with managed_span("layer", "megatron.layer.mlp", iteration=n, loss=n / 7, phase="forward", last=n % 2 == 0):
                pass
        with managed_span("layer", f"layer {i % 96}", text=f"value {i}", shape=(i, 2, 3)) as outer:
            outer.set_attribute("late", i)
            if i % 100 == 0:
                outer.add_event("checkpoint", {"iteration": i})
                outer.set_status(Status(StatusCode.ERROR, f"no. {i}"))
            links = [Link(outer.get_span_context(), {"of": i})] if i % 300 == 0 else None
            tracer.start_span("inner", attributes={"iteration": i}, links=links).end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, help=f"default: {SPANS:,}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} spans")
    arguments = parser.parse_args()
    spans = arguments.spans or (QUICK if arguments.quick else SPANS)
    logging.basicConfig(level=logging.WARNING)

    provider = enabled.native_provider(lensfast)
    processor = enabled.native_processor()
    if type(processor).__name__ != "EncodingSpanProcessor":
        raise SystemExit("spans are not native here")
    exporter = CountingExport()
    processor._exporter.export = exporter
    tracer = provider.get_tracer("soak")

    made, most_queued, sizes = 0, 0, []
    warm = max(spans // 10, BLOCK)
    reports = [warm + (spans - warm) * i // REPORTS for i in range(REPORTS + 1)]
    began, used = perf_counter(), process_time()
    while made < spans:
        block(made, tracer)
        made += BLOCK
        stats = processor.stats()
        most_queued = max(most_queued, stats.queued)
        if made >= reports[0]:
            reports = [at for at in reports if at > made]
            provider.force_flush()
            sizes.append(enabled.resident())
            print(f"{made:12,} spans  {sizes[-1] / 2**20:8.1f} MB resident  {processor.stats()}", flush=True)
    elapsed, used = perf_counter() - began, process_time() - used

    provider.force_flush()
    stats = processor.stats()
    threads = threading.active_count()
    provider.shutdown()
    growth = max(sizes[1:], default=sizes[0]) - sizes[0]
    print(
        f"{made:,} spans in {elapsed:.1f} s, {used / made * 1e6:.2f} us of CPU each; {exporter.requests:,} requests, "
        f"{exporter.bytes / made:.0f} bytes a span; at most {most_queued:,} queued; {threads} threads"
    )
    problems = []
    if growth > MOST_GROWTH:
        problems.append(f"resident memory grew by {growth / 2**20:.1f} MB after the first {warm:,} spans")
    if not stats.ended == stats.exported == exporter.spans == made:
        problems.append(f"not every span was exported: {stats}, {exporter.spans:,} counted")
    print("\n".join(problems) or f"memory is flat: {growth / 2**20:+.1f} MB after the first {warm:,} spans")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
