"""Test fixtures for code that is instrumented with lensfast: a pytest plugin.

Switch it on by one line in the conftest.py at the root of your tests, ``pytest_plugins = ["lensfast.testing"]``, or by
``pytest -p lensfast.testing``. Needs pytest and the OpenTelemetry SDK.

Fixtures: `clean_telemetry`, `span_exporter`, `capture_spans`, `metric_reader`. None is automatic.

PYTEST_DONT_REWRITE, for pytest would warn where this is imported before it is made a plugin.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, overload

import pytest
from opentelemetry import context, metrics, propagate, trace
from opentelemetry._logs import _internal as _logs_internal
from opentelemetry.metrics import _internal as _metrics_internal
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export import in_memory_span_exporter as _sdk
from opentelemetry.util._once import Once

from . import _spans, handle, helpers, providers, state, strategies
from .groups import SpanRegistry
from .instruments import registry

__all__ = [
    "CapturedSpans",
    "InMemorySpanExporter",
    "capture_spans",
    "clean_telemetry",
    "metric_points",
    "metric_reader",
    "reset_telemetry",
    "span_exporter",
]

_BUILTIN_STRATEGIES = {name: strategies.get_export_strategy(name) for name in strategies.BUILTIN_STRATEGIES}
_PROPAGATOR = propagate.get_global_textmap()
_SHUTDOWN_SECONDS = 5.0


class InMemorySpanExporter(_sdk.InMemorySpanExporter):
    """The SDK's exporter with a list in place of a tuple. After shutdown() an export fails. Thread-safe."""

    def get_finished_spans(self) -> list[ReadableSpan]:  # type: ignore[override]
        """The spans exported since the last clear(), in the order they ended."""
        return list(super().get_finished_spans())


class CapturedSpans(Sequence[ReadableSpan]):
    """The spans that ended in a capture_spans block, in that order. May be read in the block and after it."""

    def __init__(self, read: Callable[[], list[ReadableSpan]]) -> None:
        self._read = read

    @overload
    def __getitem__(self, index: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadableSpan]: ...
    def __getitem__(self, index: int | slice) -> ReadableSpan | list[ReadableSpan]:
        return self._read()[index]

    def __len__(self) -> int:
        return len(self._read())

    @property
    def names(self) -> list[str]:
        """The spans' names."""
        return [span.name for span in self._read()]

    def named(self, name: str) -> list[ReadableSpan]:
        """The spans of that name."""
        return [span for span in self._read() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of that name.

        Raises:
            AssertionError: there is none, or more than one.
        """
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans are named {name!r}; captured: {self.names}"
        return found[0]

    def __repr__(self) -> str:
        return f"<captured spans: {self.names}>"


def reset_telemetry() -> None:
    """Put OpenTelemetry and lensfast back to what they are in a new process.

    The global providers are shut down and forgotten, with the bridges of `logging` to them; the propagator, the current
    context, the enabled span groups, the pipeline-parallel carrier and the memory of setup_telemetry and of warnings
    likewise. Registries of span groups, metric groups and export strategies hold what lensfast itself has.
    Not thread-safe.
    """
    _reset_opentelemetry()
    handle._INITIALIZED = False
    state._span_group_cls = None
    # Pinned first, so that clearing the registry resolves no spec.
    state.set_enabled_span_groups(frozenset())
    _restore_registries(({}, {}, {}, _BUILTIN_STRATEGIES))
    state.set_pp_trace_carrier(None)
    helpers._scoped_attributes.set({})
    _spans._reported_failures.clear()
    registry._unknown_groups.clear()
    settings: Any = sys.modules.get("lensfast.contrib.torch")
    if settings is not None:
        settings.cuda_timing = settings.nvtx = False


def _reset_opentelemetry() -> None:
    used = (trace._TRACER_PROVIDER, _metrics_internal._METER_PROVIDER, _logs_internal._LOGGER_PROVIDER)
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()
    _metrics_internal._METER_PROVIDER = None
    _metrics_internal._METER_PROVIDER_SET_ONCE = Once()
    # Meters of the old proxy would follow the next provider.
    _metrics_internal._PROXY_METER_PROVIDER = _metrics_internal._ProxyMeterProvider()
    _logs_internal._LOGGER_PROVIDER = None
    _logs_internal._LOGGER_PROVIDER_SET_ONCE = Once()
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in list(getattr(logger, "handlers", ())):
            if getattr(handler, "_logger_provider", handler) is used[2]:
                logger.removeHandler(handler)  # type: ignore[union-attr]
    propagate.set_global_textmap(_PROPAGATOR)
    context.attach(context.Context())
    for provider in used:
        if shutdown := getattr(provider, "shutdown", None):
            # In a thread, since that of a provider with a dead collector takes half a minute.
            closing = threading.Thread(target=_quietly, args=(shutdown,), daemon=True)
            closing.start()
            closing.join(_SHUTDOWN_SECONDS)


def _quietly(function: Callable[[], object]) -> None:
    with suppress(Exception):  # a broken exporter may be what the test was about
        function()


_Registries = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]


def _registries() -> _Registries:
    spans = SpanRegistry._snapshot()
    return spans.groups, spans.presets, dict(registry._groups), dict(strategies._REGISTRY)


def _restore_registries(saved: _Registries) -> None:
    present: _Registries = (SpanRegistry._GROUPS, SpanRegistry._PRESETS, registry._groups, strategies._REGISTRY)
    for registered, before in zip(present, saved, strict=True):
        registered.clear()
        registered.update(before)
    state.refresh_enabled_span_groups()


@pytest.fixture
def clean_telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No provider, no set-up, no enabled group, no OTEL_* or NEMO_LENS_* variable; all of it again after the test.

    What libraries registered when they were imported stays: span groups, metric groups and export strategies. What the
    test registers, changes or clears is put back after it. So import your library at the top of the test module.

    For code that calls setup_telemetry itself: ``setup_telemetry(config, span_exporter=InMemorySpanExporter())``.
    """
    for name in list(os.environ):
        if name.startswith(("OTEL_", "NEMO_LENS_")):
            monkeypatch.delenv(name)
    saved = _registries()
    reset_telemetry()
    _restore_registries(saved)
    yield
    reset_telemetry()
    _restore_registries(saved)


@pytest.fixture
def span_exporter(clean_telemetry: None) -> InMemorySpanExporter:
    """Collects every span that ends, at once, whoever made it. Includes clean_telemetry.

    Span groups are off; enable them with set_enabled_span_groups, or use capture_spans.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(providers._ScopedSpanAttributes())  # type: ignore[arg-type]
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def capture_spans(
    span_exporter: InMemorySpanExporter,
) -> Callable[[str | Iterable[str]], AbstractContextManager[CapturedSpans]]:
    """``with capture_spans("step,layer") as spans:`` enables those groups in the block and yields CapturedSpans.

    Takes a spec of registered presets and groups, or a set of exact group names, registered or not (such as
    ``MyGroups.resolve("per_step")`` of an older SpanGroup class). An empty one turns all groups off, to test that no
    span is made then. Afterwards the groups are what they were before. Raises ValueError for a spec with a name that
    nobody has registered. Includes span_exporter.
    """

    @contextmanager
    def capture(groups: str | Iterable[str]) -> Iterator[CapturedSpans]:
        chosen = _group_names(groups)
        spec = state._spec
        enabled_before = state.enabled_span_groups()
        start = len(span_exporter.get_finished_spans())
        spans = CapturedSpans(lambda: span_exporter.get_finished_spans()[start:])
        state.set_enabled_span_groups(chosen)
        try:
            yield spans
        finally:
            captured = list(spans)
            spans._read = lambda: captured
            if spec is None:
                state.set_enabled_span_groups(enabled_before)
            else:
                state.set_span_group_spec(spec)

    return capture


def _group_names(groups: str | Iterable[str]) -> frozenset[str]:
    if not isinstance(groups, str):
        return frozenset(groups)
    enabled, unknown = SpanRegistry.resolve(groups)
    if unknown or (groups.strip() and not enabled):
        known = ", ".join(sorted(SpanRegistry.presets().keys() | SpanRegistry.groups()))
        raise ValueError(
            f"{groups!r} names groups that no library has registered (registered are: {known}); "
            "for such groups pass a set of their names"
        )
    return enabled


@pytest.fixture
def metric_reader(clean_telemetry: None) -> InMemoryMetricReader:
    """Collects the metrics of a fresh global meter provider; metric_points() reads it. Includes clean_telemetry."""
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
    return reader


def metric_points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """Metric name to the SDK's data points (`.value`, or `.sum`, `.count` and so on; `.attributes`)."""
    data = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
