"""Stand-in for the resiliency extension on SpanRegistry: one telemetry module imports nemo.lens for all others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from . import callforms
from .callforms import Body, Run, Site

try:
    from nemo.lens import NemoLensConfig, SpanRegistry, setup_telemetry
    from nemo.lens.helpers import managed_span, safe_set_span_attributes, span_cm, trace_fn
    from nemo.lens.span_utilities import emit_span
    from nemo.lens.state import is_span_group_enabled
except ImportError:
    from .fallbacks import is_span_group_enabled, managed_span, safe_set_span_attributes, span_cm, trace_fn

    SpanRegistry = None

    def emit_span(*args: Any, **kwargs: Any) -> None:
        return None


ENV_PREFIX = "NEMO_LENS"
JOB, FT, CKPT, PHASES = "nvrx.job", "nvrx.ft", "nvrx.ckpt", "nvrx.ckpt.phases"
GROUPS = frozenset({JOB, FT, CKPT, PHASES})
PRESETS = {"default": GROUPS - {PHASES}, "per_step": GROUPS, "profiling": GROUPS}
if SpanRegistry is not None:
    SpanRegistry.register("nvrx", GROUPS, PRESETS)


class _NoHandle:
    tracer = None
    is_exporting = False

    def shutdown(self, timeout_ms: int = 0) -> None:
        """Nothing to do."""


_handle: Any = _NoHandle()


def initialize(generation: str, **sinks: Any) -> Any:
    global _handle
    if SpanRegistry is not None:
        _handle = setup_telemetry(NemoLensConfig.from_env(), **sinks)
    return _handle


def span(group: str, name: str, attributes: dict[str, Any] | None = None) -> AbstractContextManager[Any]:
    return managed_span(group, name, _handle.tracer, **(attributes or {}))


class ManualSpan:
    """Opened in one function and closed in another, on the same thread."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def open(self, group: str, name: str, attributes: dict[str, Any]) -> Any:
        return self._stack.enter_context(span(group, name, attributes))

    def close(self) -> None:
        self._stack.close()


def traced(
    group: str, name: str, attrs: Callable[[], dict[str, Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator whose attributes are computed only while the group is on."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not is_span_group_enabled(group):
                return function(*args, **kwargs)
            with span(group, name, attrs()):
                return function(*args, **kwargs)

        return wrapper

    return decorator


class LENS:
    emit_span = staticmethod(emit_span)
    is_span_group_enabled = staticmethod(is_span_group_enabled)
    managed_span = staticmethod(managed_span)
    safe_set_span_attributes = staticmethod(safe_set_span_attributes)
    span_cm = staticmethod(span_cm)
    trace_fn = staticmethod(trace_fn)


def _phase(lens: Any, site: Site) -> Run:
    opened = ManualSpan()

    def begin() -> None:
        opened.open(site.group, site.name, site.attributes)

    def end() -> None:
        opened.close()

    def run(body: Body) -> Any:
        begin()
        try:
            return body()
        finally:
            end()

    return run


def _span(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        with span(site.group, site.name, attributes=site.attributes):
            return body()

    return run


def _traced_method(lens: Any, site: Site) -> Run:
    def attrs() -> dict[str, Any]:
        assert is_span_group_enabled(site.group), "computed although the group is off"
        return site.attributes

    class Agent:
        @traced(site.group, site.name, attrs)
        def method(self, body: Body) -> Any:
            return body()

    return Agent().method


SHAPES = {
    "with, tracer as third positional": _span,
    "ExitStack.enter_context": _phase,
    "consumer-defined decorator over managed_span": _traced_method,
    "decorator trace_fn on module function": callforms.traced_function,
    "decorator trace_fn on method": callforms.traced_method,
    "backdated span": callforms.emitted,
}


def call_site(site: Site) -> Run:
    return SHAPES[site.forms[0]](LENS, site)
