"""The providers that enabled sites are measured with, and what is measured in a process of its own.

Usage: python bench/enabled.py memory|burst native|sdk SPANS, with OTEL_EXPORTER_OTLP_ENDPOINT in the environment.

`memory` prints the bytes that each of so many queued spans adds to the process's resident memory. `burst` ends so many
spans as fast as it can, with default settings, and shuts down; the receiver knows how many of them arrived.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import sites
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

# Values as a loop has them: not the same objects each time.
NATIVE_SPANS = """
def run(spans):
    for i in range(spans):
        with managed_span('layer', 'megatron.layer.mlp', iteration=i, loss=i / 7):
            pass
"""
SDK_SPANS = """
def run(spans):
    for i in range(spans):
        with tracer.start_as_current_span('megatron.layer.mlp', attributes={'iteration': i, 'loss': i / 7}):
            pass
"""


def batch_processor(**settings: Any) -> BatchSpanProcessor:
    """The SDK's, with its own OTLP exporter, to what OTEL_EXPORTER_OTLP_ENDPOINT names."""
    return BatchSpanProcessor(OTLPSpanExporter(), **settings)


def roomy_batch_processor() -> BatchSpanProcessor:
    """One that loses no span of a benchmark, and exports when it is told to or has a whole batch."""
    return batch_processor(max_queue_size=1 << 16, schedule_delay_millis=1e6)


def sdk_provider(processor: Any) -> TracerProvider:
    """As nemo-lens sets it up, and any user of the SDK."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def native_provider(package: ModuleType) -> Any:
    """What setup_telemetry installs, now global, sending OTLP over HTTP."""
    config = package.NemoLensConfig(enabled=True, exporter="otlp", metrics_enabled=False)
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
    package.setup_telemetry(config, rank=0, world_size=1)
    package.set_enabled_span_groups(frozenset({"layer"}))
    return trace.get_tracer_provider()


def native_provider_into(package: ModuleType, processor: Any) -> Any:
    """The same, with another processor in the place of lensfast's own."""
    from lensfast import _native, providers

    provider = _native.TracerProvider(shutdown_on_exit=False, id_generator=providers.SeedIndependentIdGenerator())
    for each in (providers._ScopedSpanAttributes(), providers._OpenSpanCloser(), processor):
        provider.add_span_processor(each)
    package.set_enabled_span_groups(frozenset({"layer"}))
    return provider


def native_processor() -> Any:
    """lensfast's own that setup_telemetry has installed."""
    from lensfast import providers

    return providers.export_processor


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def spans_of(library: str, processor: Callable[[], Any]) -> tuple[sites.Loop, Any]:
    """(a loop that makes spans, its provider)"""
    if library == "sdk":
        provider: Any = sdk_provider(processor())
        return sites.function(SDK_SPANS, {"tracer": provider.get_tracer("bench")}), provider
    import lensfast

    provider = native_provider(lensfast)
    if type(native_processor()).__name__ != "EncodingSpanProcessor":
        raise SystemExit("spans are not native here")
    return sites.function(NATIVE_SPANS, {"managed_span": lensfast.managed_span}), provider


def memory(library: str, spans: int) -> float:
    """Bytes per span that waits: nothing is exported meanwhile."""
    everything = {"max_queue_size": 2 * spans, "max_export_batch_size": 2 * spans, "schedule_delay_millis": 1e9}
    run, _ = spans_of(library, lambda: batch_processor(**everything))
    if library == "native":
        native_processor()._exporting.acquire()  # as while a request takes long
    run(2000)  # what there is of pools and caches is filled
    before = resident()
    run(spans)
    grown = resident() - before
    if library == "native":
        assert native_processor().stats().queued == 2000 + spans, native_processor().stats()
    return grown / spans


def burst(library: str, spans: int) -> None:
    run, provider = spans_of(library, batch_processor)
    run(spans)
    provider.shutdown()


def in_own_process(what: str, library: str, spans: int, endpoint: str) -> float:
    """What is printed, as a number; 0.0 where it is nothing."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
    }
    command = [sys.executable, __file__, what, library, str(spans)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(result.stdout or 0)


if __name__ == "__main__":
    what, library, spans = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if what == "memory":
        print(memory(library, spans), flush=True)
        os._exit(0)  # what is queued is not to be sent
    burst(library, spans)
