"""Stand-in for the Megatron-LM fork that reaches nemo.lens through one facade module, on SpanRegistry.

Its call sites import the facade as `_otel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from opentelemetry.context import Context

from . import callforms
from .callforms import Body, Run, Site

try:
    from nemo.lens import SpanRegistry, is_span_group_enabled, trace_fn
    from nemo.lens import managed_span as _managed_span
    from nemo.lens import safe_set_span_attributes as _safe_set_span_attributes
    from nemo.lens import span_cm as _span_cm
except ModuleNotFoundError as error:
    # Anything else that is missing is a defect, and must be loud.
    if error.name not in {"nemo", "nemo.lens"}:
        raise
    from .fallbacks import is_span_group_enabled, trace_fn
    from .fallbacks import managed_span as _managed_span
    from .fallbacks import safe_set_span_attributes as _safe_set_span_attributes
    from .fallbacks import span_cm as _span_cm

    SpanRegistry = None


ENV_PREFIX = "MEGATRON_OTEL"
JOB, TRAIN, CKPT = "megatron.job", "megatron.train", "megatron.ckpt"
EVAL, INFERENCE, DETAIL = "megatron.eval", "megatron.inference", "megatron.detail"
GROUPS = frozenset({JOB, TRAIN, CKPT, EVAL, INFERENCE, DETAIL})
PRESETS = {
    "default": frozenset({JOB, CKPT, EVAL, INFERENCE}),
    "per_step": frozenset({JOB, CKPT, EVAL, INFERENCE, TRAIN}),
    "profiling": GROUPS,
}
if SpanRegistry is not None:
    SpanRegistry.register("megatron", GROUPS, PRESETS)


def initialize(generation: str, rank: int = 0, world_size: int = 1, **sinks: Any) -> Any | None:
    """This generation has no rank: the caller says it by resource attributes, which children inherit."""
    if SpanRegistry is None:
        return None
    from nemo.lens import NemoLensConfig, setup_telemetry
    from nemo.lens.resources.attributes import publish_otel_resource_attributes

    identity = {"nv.dl.rank": rank, "nv.dl.world_size": world_size}
    with ExitStack() as published:
        published.enter_context(publish_otel_resource_attributes(identity))
        config = NemoLensConfig.from_env(prefix=ENV_PREFIX, fallback_prefix="NEMO_LENS")
        return setup_telemetry(config, resource_attributes=identity, **sinks)


def emit_span(*args: Any, group: str, **kwargs: Any) -> None:
    if is_span_group_enabled(group):
        from nemo.lens import span_utilities

        span_utilities.emit_span(*args, group=group, **kwargs)


def managed_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> AbstractContextManager[Any]:
    return _managed_span(group, name, tracer=tracer, **attributes)


def span_cm(name: str, tracer: Any = None, **attributes: Any) -> AbstractContextManager[Any]:
    return _span_cm(name, tracer=tracer, **attributes)


def safe_set_span_attributes(span: Any, attributes: dict[str, Any]) -> None:
    if span is not None:
        _safe_set_span_attributes(span, attributes)


def lazy_span(
    group: str, name: str, tracer: Any, attributes: dict[str, Callable[[], Any]]
) -> AbstractContextManager[Any]:
    """Calls for the attributes only while the group is on."""
    if not is_span_group_enabled(group) or tracer is None:
        return nullcontext()
    return span_cm(name, tracer=tracer, **{key: value() for key, value in attributes.items()})


@contextmanager
def save_span(group: str, name: str, attributes: dict[str, Any]) -> Iterator[Any]:
    if not is_span_group_enabled(group):
        yield None
        return
    with managed_span(group, name, **attributes) as span:
        yield span


def iteration_span(group: str, name: str, attributes: dict[str, Any]) -> AbstractContextManager[Any]:
    """Not entered yet."""
    return managed_span(group, name, **attributes)


class LENS:
    emit_span = staticmethod(emit_span)
    is_span_group_enabled = staticmethod(is_span_group_enabled)
    managed_span = staticmethod(managed_span)
    safe_set_span_attributes = staticmethod(safe_set_span_attributes)
    span_cm = staticmethod(span_cm)
    trace_fn = staticmethod(trace_fn)


def _built_before_entry(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        manager = iteration_span(site.group, site.name, site.attributes)
        with callforms.timer("iteration"), manager as span:
            callforms.note(lens, site, span)
            return body()

    return run


def _lazy(lens: Any, site: Site) -> Run:
    def read(key: str) -> Any:
        assert is_span_group_enabled(site.group), "computed although the group is off"
        return site.attributes[key]

    lazy = {key: functools.partial(read, key) for key in site.attributes}

    def run(body: Body) -> Any:
        with lazy_span(site.group, site.name, site.tracer, lazy) as span:
            callforms.note(lens, site, span)
            return body()

    return run


def _save(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        with save_span(site.group, site.name, site.attributes):
            return body()

    return run


def _manual(lens: Any, site: Site) -> Run:
    """The intervals are roots, each with a link to the one before."""
    root = "linked span" in site.forms
    return callforms.manual(lens, site, parent=lambda: Context() if root else None)


SHAPES = {
    "with, positional only": callforms.positional,
    "with, one-entry dict expansion": callforms.dict_expansion,
    "object built before entry": _built_before_entry,
    "conditional expression with span_cm": _lazy,
    "explicit gate then with": _save,
    "decorator trace_fn on module function": callforms.traced_function,
    "decorator trace_fn on method": callforms.traced_method,
    "manual start_span": _manual,
    "backdated span": callforms.emitted,
}


def call_site(site: Site) -> Run:
    return SHAPES[site.forms[0]](LENS, site)
