"""Fixtures of the test suite and of the benchmarks: every behaviour test runs on both backends."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

BACKENDS = ("c", "python")
_loaded: dict[str, dict[str, ModuleType]] = {}


def load_backend(backend: str) -> dict[str, ModuleType]:
    """All modules of lensfast, imported afresh on `backend`; the process holds one such set per backend."""
    if backend not in _loaded:
        before = _take_modules()
        os.environ["LENSFAST_PURE_PYTHON"] = "1" if backend == "python" else "0"
        try:
            package = importlib.import_module("lensfast")
            if package.backend != backend:
                reason = importlib.import_module("lensfast._backend").backend_reason
                if os.environ.get("LENSFAST_REQUIRE_EXTENSION") == "1":
                    pytest.fail(f"the C backend is required here: {reason}")
                pytest.skip(f"no C backend: {reason}")
            for module in pkgutil.iter_modules(package.__path__, "lensfast."):
                if module.name not in {"lensfast.__main__", "lensfast._gate"}:
                    importlib.import_module(module.name)
        finally:
            del os.environ["LENSFAST_PURE_PYTHON"]
            modules = _take_modules()
            sys.modules.update(before)
        _loaded[backend] = modules
    return _loaded[backend]


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == "lensfast" or name.startswith("lensfast.")]
    return {name: sys.modules.pop(name) for name in names}


def reset_opentelemetry() -> None:
    """Forget the global providers, which OpenTelemetry lets a process set once."""
    provider = trace._TRACER_PROVIDER
    if hasattr(provider, "shutdown"):
        provider.shutdown()
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()
    meter_provider = metrics._internal._METER_PROVIDER
    if hasattr(meter_provider, "shutdown"):
        meter_provider.shutdown()
    metrics._internal._METER_PROVIDER = None
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._PROXY_METER_PROVIDER = metrics._internal._ProxyMeterProvider()


def reset_lensfast(package: ModuleType) -> None:
    package.handle._INITIALIZED = False
    package.set_enabled_span_groups(frozenset())
    package.SpanRegistry.clear()
    package.state.set_pp_trace_carrier(None)
    package._spans._reported_failures.clear()


@pytest.fixture(params=BACKENDS)
def lensfast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package on one backend, with nothing enabled, nothing registered and no provider."""
    modules = load_backend(request.param)
    for name in list(os.environ):
        if name.startswith(("OTEL_", "NEMO_LENS_", "MEGATRON_OTEL_", "SLURM_", "LENSFAST_")):
            monkeypatch.delenv(name)
    before = _take_modules()
    sys.modules.update(modules)
    package = modules["lensfast"]
    reset_opentelemetry()
    reset_lensfast(package)
    yield package
    reset_lensfast(package)
    reset_opentelemetry()
    _take_modules()
    sys.modules.update(before)


@pytest.fixture
def exporter(lensfast: ModuleType) -> InMemorySpanExporter:
    """Collects the spans of a fresh global SDK provider."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    return memory
