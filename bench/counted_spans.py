"""The process in which instructions.py counts enabled sites: native spans, as setup_telemetry has them made.

Usage: python bench/counted_spans.py PASSES

Each loop is dumped under the name of its site; callgrind counts nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile

# None is exported meanwhile: the queue is emptied by force_flush alone, before it has a whole batch.
os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "3600000"

import enabled
import sites
from opentelemetry.sdk.trace.export import SpanExportResult

import lensfast

REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def client_requests() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        library = f"{directory}/requests.so"
        compiler = ["cc", "-x", "c", "-O2", "-shared", "-fPIC", "-", "-o", library]
        subprocess.run(compiler, input=REQUESTS, text=True, check=True)
        return ctypes.CDLL(library)


def main() -> None:
    passes = int(sys.argv[1])
    requests = client_requests()
    provider = enabled.native_provider(lensfast)
    processor = enabled.native_processor()
    if type(processor).__name__ != "EncodingSpanProcessor":
        raise SystemExit("spans are not native here")
    processor._exporter.export = lambda spans: SpanExportResult.SUCCESS
    namespace = {**sites.names(lensfast), "span": provider.get_tracer("bench").start_span("live")}
    loops = {site: sites.loop(statement, namespace) for site, statement in sites.NATIVE.items()}
    gc.collect()
    gc.disable()
    for site, run in loops.items():
        run(100)
        provider.force_flush()
        requests.begin()
        run(passes)
        requests.end(site.encode())
    print(processor.stats().dropped, "dropped")
    os._exit(0)


if __name__ == "__main__":
    main()
