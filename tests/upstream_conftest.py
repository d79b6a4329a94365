"""The conftest.py that nemo-lens's own test suite needs, and that its source distribution lacks.

tests/test_upstream_suite.py puts it beside those tests. LENSFAST_UPSTREAM=install makes nemo.lens lensfast before they
import it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

__all__ = ["InMemorySpanExporter"]  # the tests import it from here

if os.environ.get("LENSFAST_UPSTREAM") == "install":
    import lensfast

    lensfast.install()

from nemo.lens import handle, state, strategies


def pytest_report_header() -> str:
    return f"nemo.lens is {handle.__name__.rpartition('.')[0]}"


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """OpenTelemetry's globals and nemo.lens's, by the names that its users' fixtures reset, too."""
    with strategies._REGISTRY_LOCK:
        registered = dict(strategies._REGISTRY)
    _reset()
    yield
    _reset()
    with strategies._REGISTRY_LOCK:
        strategies._REGISTRY.clear()
        strategies._REGISTRY.update(registered)


def _reset() -> None:
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    handle._INITIALIZED = False
    state.set_enabled_span_groups(frozenset())
    state.set_pp_trace_carrier(None)
