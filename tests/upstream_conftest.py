"""The conftest.py that nemo-lens's own test suite needs, and that its source distribution lacks.

tests/test_upstream_suite.py puts it beside those tests. LENSFAST_UPSTREAM=install or accelerate calls that before they
import nemo.lens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

__all__ = ["InMemorySpanExporter"]  # the tests import it from here

if "LENSFAST_UPSTREAM" in os.environ:
    import lensfast

    getattr(lensfast, os.environ["LENSFAST_UPSTREAM"])()

from nemo.lens import handle, managed_span, state, strategies


def pytest_report_header() -> str:
    fast = getattr(sys.modules.get("lensfast"), "managed_span", None)
    owner = "lensfast's" if managed_span is fast else "its own"
    return f"nemo.lens is {handle.__name__.rpartition('.')[0]}, managed_span {owner}"


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
