"""Native spans: a TracerProvider whose spans are the SDK's to everyone who meets them, and mostly C.

A span's class inherits from the SDK's. What is fast (its start and end, the ids, the attributes, the samplers of the
SDK) is in csrc/span.c; for the rest it has the SDK's own methods, which find what they need under the SDK's private
names. So what is odd (an attribute that needs cleaning, a limit that is reached, an event, a link, a status) is done by
the SDK's code, in the way of the SDK that is installed.

Those private names are why an SDK that is not known gets its own spans: see why_not().
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from opentelemetry import context as context_api
from opentelemetry import trace as trace_api
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace import sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.version import __version__ as sdk_version
from opentelemetry.trace import Status

from ._backend import TRUE_WORDS, backend_reason, compiled
from .helpers import _scoped_attributes
from .sampling import RankAwareSampler

logger = logging.getLogger("lensfast.providers")

OLDEST_SDK = (1, 27)
NEWEST_SDK = (1, 45)
_ASK, _ON, _OFF, _RATIO = range(4)  # as in csrc/span.h
_RANDOM_TRACE_ID = 2


def why_not() -> str | None:
    """Why spans can't be native in this process; None if they can."""
    if compiled is None:
        return backend_reason
    if type(context_api._RUNTIME_CONTEXT) is not ContextVarsRuntimeContext:
        return f"the context is kept by {type(context_api._RUNTIME_CONTEXT).__name__} (OTEL_PYTHON_CONTEXT)"
    if os.environ.get("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "").strip().lower() in TRUE_WORDS:
        return "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED is set"
    try:
        version = tuple(int(part) for part in sdk_version.split(".")[:2])
    except ValueError:
        version = ()
    if not OLDEST_SDK <= version <= NEWEST_SDK:
        return "opentelemetry-sdk {} is not one from {}.{} to {}.{}".format(sdk_version, *OLDEST_SDK, *NEWEST_SDK)
    return None


class _NoBase:
    """Lets this module be imported, to no use, where there is no extension."""

    __slots__ = ()


_SpanBase: Any = _NoBase if compiled is None else compiled.SpanBase
_TracerBase: Any = _NoBase if compiled is None else compiled.TracerBase


class _Span(_SpanBase, sdk._Span):  # type: ignore[misc]
    """A span whose start, end and attributes are in C. Made by a tracer only."""

    __slots__ = ()

    # What processors and exporters get of the SDK is a readable copy; those that redact copy that again.

    def __copy__(self) -> sdk.ReadableSpan:
        return self._readable_span()

    def __deepcopy__(self, memo: dict[int, Any]) -> sdk.ReadableSpan:
        return copy.deepcopy(self._readable_span(), memo)


class Tracer(_TracerBase, sdk.Tracer):  # type: ignore[misc]
    """The SDK's tracer, with start_span in C."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        compiled.outdate_plans()

    @classmethod
    def like(cls, tracer: sdk.Tracer) -> Tracer:
        """A tracer of the same provider, scope and settings."""
        native: Tracer = cls.__new__(cls)
        native.__dict__.update(tracer.__dict__)
        return native

    def _make_plan(self) -> Any:
        """Called by start_span, first and after something has changed. None: the SDK's code is to start the spans."""
        enabled = getattr(self, "_is_enabled", None)
        if enabled is not None and not enabled():
            return None
        metrics = getattr(self, "_tracer_metrics", None)
        if metrics is not None and type(metrics).__name__ != "NoOpTracerMetrics":
            return None
        return compiled.Plan(_plan(self))

    def _start_sdk_span(self, *args: Any, **kwargs: Any) -> Any:
        return sdk.Tracer.start_span(self, *args, **kwargs)


class _Processors(sdk.SynchronousMultiSpanProcessor):
    """Tells when a processor is added."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        compiled.outdate_plans()


_ACTIVE_SPAN_PROCESSOR = 3  # its place among the arguments of TracerProvider


class TracerProvider(sdk.TracerProvider):
    """The SDK's TracerProvider, with the same arguments, whose tracers make native spans."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) <= _ACTIVE_SPAN_PROCESSOR and not kwargs.get("active_span_processor"):
            kwargs["active_span_processor"] = _Processors()  # type: ignore[no-untyped-call]
        super().__init__(*args, **kwargs)
        self._native_tracers: dict[Any, Tracer] = {}

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace_api.Tracer:
        tracer = super().get_tracer(*args, **kwargs)
        if type(tracer) is not sdk.Tracer:
            return tracer  # it is one of ours already, or spans are disabled
        native = Tracer.like(tracer)
        scope = tracer._instrumentation_scope
        kept = getattr(self, "_tracers", None)
        if kept is None:
            # An older SDK, which makes a tracer each time.
            return self._native_tracers.setdefault(scope, native)
        with self._tracers_lock:
            if kept.get(scope) is tracer:
                kept[scope] = native
            return kept.get(scope, native)  # type: ignore[no-any-return]  # another thread may have been faster


@functools.cache  # a plan may have to be made while the interpreter ends, when nothing can be imported any more
def _late() -> tuple[Any, ...]:
    from ._export import EncodingSpanProcessor, encoded_frame
    from .providers import _OpenSpanCloser, _ScopedSpanAttributes

    return EncodingSpanProcessor, encoded_frame, _OpenSpanCloser, _ScopedSpanAttributes


def _plan(tracer: Tracer) -> SimpleNamespace:
    """What compiled.Plan is made from."""
    encoding, encoded_frame, closing, scoping = _late()
    processors = tracer.span_processor
    each: tuple[Any, ...] = (processors,)
    if type(processors) is _Processors:
        each = processors._span_processors
    closers = [processor for processor in each if isinstance(processor, closing)]
    scoped = [processor for processor in each if isinstance(processor, scoping)]
    sinks = {id(processor): processor.sink for processor in each if isinstance(processor, encoding)}
    limits = tracer._span_limits
    resource_head, resource_tail, scope_head, scope_tail = b"", b"", b"", b""
    if sinks:
        # Where it can't be encoded, no span of the tracer can: each is tried by the stock encoder, and counted.
        with suppress(Exception):
            resource_head, resource_tail, scope_head, scope_tail = encoded_frame(
                tracer.resource, tracer._instrumentation_scope
            )
    return SimpleNamespace(
        span_type=_Span,
        sampler=tracer.sampler,
        rules=_rules(tracer.sampler),
        id_generator=tracer.id_generator,
        own_ids=vars(type(tracer.id_generator)).get("drawn_in_c", False),
        inherited_flags=_RANDOM_TRACE_ID if hasattr(IdGenerator, "is_trace_id_random") else 0,
        calls_on_ending=hasattr(sdk.SpanProcessor, "_on_ending"),
        freezes="_immutable" in sdk.Span.end.__code__.co_names,
        max_attributes=_c_limit(limits.max_span_attributes),
        max_length=_c_limit(limits.max_span_attribute_length),
        on_start=tuple(processor for processor in each if _does(processor, "on_start") and processor not in closers),
        on_ending=tuple(processor for processor in each if _does(processor, "_on_ending")),
        on_end=tuple(
            sinks.get(id(processor), processor)
            for processor in each
            if _does(processor, "on_end") and processor not in closers
        ),
        scoped=scoped[0] if scoped else None,
        scoped_variable=_scoped_attributes,
        open_spans=closers[0].open_spans if closers else None,
        resource=tracer.resource,
        scope=tracer._instrumentation_scope,
        info=tracer.instrumentation_info,
        limits=limits,
        processor=processors,
        tracer=tracer,
        unset_status=_UNSET,
        bounded_attributes=_bounded_attributes,
        bounded_list=_bounded_list,
        set_links=_set_links,
        sdk_set_attribute=sdk.Span.set_attribute,
        sdk_set_attributes=sdk.Span.set_attributes,
        sdk_end=sdk.Span.end,
        resource_head=resource_head,
        resource_tail=resource_tail,
        scope_head=scope_head,
        scope_tail=scope_tail,
    )


_UNSET = Status()
_IDLE = {
    getattr(processor, method, None)
    for processor in (sdk.SpanProcessor, BatchSpanProcessor, SimpleSpanProcessor)
    for method in ("on_start", "_on_ending", "on_end")
} - {BatchSpanProcessor.on_end, SimpleSpanProcessor.on_end}


def _does(processor: Any, method: str) -> bool:
    """Whether a processor's method may have something to do. `_on_ending` is one that older SDKs do not call."""
    if method == "_on_ending" and not (hasattr(sdk.SpanProcessor, method) and hasattr(processor, method)):
        return False
    if method in getattr(processor, "__dict__", ()):
        return True
    function = getattr(type(processor), method, None)  # None: of a proxy or a mock
    return function is None or not (function in _IDLE or getattr(function, "does_nothing", False) is True)


def _c_limit(limit: int | None) -> int | None:
    return None if limit is None else min(limit, 2**62)


_ON_OR_OFF = {sampling.StaticSampler, sampling._AlwaysOn, sampling._AlwaysOff}
_BY_PARENT = {
    sampling.ParentBased,
    sampling.ParentBasedTraceIdRatio,
    sampling._ParentBasedAlwaysOn,
    sampling._ParentBasedAlwaysOff,
}


def _rules(sampler: Any) -> list[tuple[int, int]]:
    """What C does in place of asking the sampler: for a root, and below a remote or a local parent, sampled or not."""
    if type(sampler) in _BY_PARENT:
        return [
            _rule(getattr(sampler, f"_{name}"))
            for name in (
                "root",
                "remote_parent_sampled",
                "remote_parent_not_sampled",
                "local_parent_sampled",
                "local_parent_not_sampled",
            )
        ]
    return [_rule(sampler)] * 5


def _rule(sampler: Any) -> tuple[int, int]:
    if type(sampler) in _ON_OR_OFF and sampler._decision is not sampling.Decision.RECORD_ONLY:
        return (_ON if sampler._decision is sampling.Decision.RECORD_AND_SAMPLE else _OFF), 0
    if type(sampler) is RankAwareSampler:
        return (_ON if sampler._sampled else _OFF), 0
    if type(sampler) is sampling.TraceIdRatioBased:
        return (_RATIO, sampler.bound) if sampler.bound < 2**64 else (_ON, 0)
    return _ASK, 0


def _bounded_attributes(limits: Any, attributes: dict[str, Any], immutable: bool) -> BoundedAttributes:
    """A BoundedAttributes around a dict that has been kept to the limits."""
    bounded = BoundedAttributes(
        limits.max_span_attributes, None, immutable=False, max_value_len=limits.max_span_attribute_length
    )
    bounded._dict = attributes
    bounded._immutable = immutable
    return bounded


def _bounded_list(limits: Any, limit: str) -> BoundedList[Any]:
    return BoundedList(getattr(limits, limit))


def _set_links(span: Any, links: Any) -> None:
    span._links = sdk.Span._new_links(span, links)
