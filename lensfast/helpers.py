"""The instrumentation primitives: what training code calls at each site.

Names, signatures and behaviour are those of nemo.lens.helpers. `managed_span` and `trace_fn` belong to a span group
and cost tens of nanoseconds while it is disabled; `span_cm` is not gated.

Nothing here raises into the program because telemetry failed: a tracer, processor or attribute that raises is logged
once and the block runs on. All of it may be used from any thread and any asyncio task.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeVar

from opentelemetry import trace as trace  # consumers' tests patch helpers.trace.get_tracer
from opentelemetry.trace import Span, SpanKind, Tracer

from ._backend import gate, span_group
from ._gated import gated, with_frame
from ._spans import (
    DEFAULT_REDACT_KEYS,
    PACKAGE_SCOPE,
    REDACTED,
    UNSTARTED,
    GatedSpan,
    UngatedSpan,
    UnstartedSpan,
    in_span,
    report_failure,
    usable_attributes,
)
from .state import _is_on

__all__ = [
    "DEFAULT_REDACT_KEYS",
    "managed_span",
    "redact_value",
    "safe_set_span_attributes",
    "span_attributes",
    "span_cm",
    "span_group",
    "trace_fn",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def redact_value(key: str, value: str, redact_keys: frozenset[str] = DEFAULT_REDACT_KEYS) -> str:
    """`"[REDACTED]"` if `key` is in `redact_keys` (whole name, case-sensitive), else `value`."""
    return REDACTED if key in redact_keys else value


def safe_set_span_attributes(
    span: Span, attributes: Mapping[str, Any], redact_keys: frozenset[str] = DEFAULT_REDACT_KEYS
) -> None:
    """Set on `span` those of `attributes` that a span can carry.

    bool, int, float and str (and subclasses) are set; a str under a key in `redact_keys` as `"[REDACTED]"`. A list or
    tuple of such scalars is set as a list, unredacted. None and everything else (dict, bytes, nested lists, numpy
    scalars) is dropped without a word.

    Args:
        span: a span; nothing happens if it is not recording. None raises AttributeError.
        attributes: name to value.
        redact_keys: names whose str values are secret.
    """
    if span.is_recording():
        for key, value in usable_attributes(attributes, redact_keys).items():
            try:
                span.set_attribute(key, value)
            except Exception as failure:
                report_failure("set attribute", key, failure)


def span_cm(name: str, tracer: Tracer | None = None, record_exception: bool = True, **attributes: Any) -> UngatedSpan:
    """A context manager for one span that belongs to no group: for cold paths.

    Always yields a span (a non-recording one without a provider). An Exception leaving the block sets the status ERROR
    with `"<type>: <message>"`, adds an exception event unless `record_exception` is False, and goes on. Other
    BaseExceptions leave the status alone. Also usable as a decorator: a span per call.

    Args:
        name: the span's name.
        tracer: default: the tracer `nemo.lens.helpers` of the provider that is global when the block is entered.
        record_exception: whether to add the exception event.
        **attributes: filtered as by safe_set_span_attributes, set after the start.
    """
    return UngatedSpan(name, tracer, attributes=attributes, record_exception=record_exception)


def _managed_span(group: str, name: str, tracer: Tracer | None = None, **attributes: Any) -> Any:
    """A context manager for one span of `group`: yields the span, or None while the group is disabled.

    The gate is read at this call: disabled, the result is one shared object whose enter and exit do nothing, and the
    attributes are not looked at. Enabled, the span starts when the block is entered, as a child of the current span,
    becomes current, and is ended on the way out, wherever that happens. An Exception leaving the block is recorded and
    sets the status ERROR with `str(exception)`; other BaseExceptions leave the status alone. All propagate.

    Args:
        group: the group's name. A name nobody registered is not enabled; an unhashable one raises TypeError.
        name: the span's name.
        tracer: default: the tracer `nemo.lens.helpers` of the provider that is global when the block is entered.
        **attributes: filtered as by safe_set_span_attributes, set after the start. Dotted names come in by
            ``**{"megatron.iteration": 5}``.

    Unlike the original's, the object can't decorate a function (TypeError; use trace_fn), and one thread or task may
    enter it again.
    """
    if gate.is_span_group_enabled(group):
        return GatedSpan(name, tracer, group=group, attributes=attributes, names_exception_type=False)
    return gate.NOOP


def _group_span(
    handle: gate.GroupHandle,
    /,
    name: str,
    tracer: Tracer | None = None,
    *,
    span_kind: SpanKind | None = None,
    **attributes: Any,
) -> Any:
    """What GroupHandle.span does: managed_span for that group, with a span kind (INTERNAL if it is no SpanKind)."""
    if handle:
        if span_kind is not None and not isinstance(span_kind, SpanKind):
            report_failure(
                "use the span_kind of span", name, TypeError(f"not an opentelemetry SpanKind: {span_kind!r}")
            )
            span_kind = None
        return GatedSpan(
            name, tracer, group=handle.name, attributes=attributes, kind=span_kind, names_exception_type=False
        )
    return gate.NOOP


_managed_span.__name__ = _managed_span.__qualname__ = "managed_span"
_group_span.__name__ = _group_span.__qualname__ = "span"
managed_span: Callable[..., AbstractContextManager[Span | None]] = gate.install(_managed_span, _group_span)


# A class body makes these methods static or class methods if they are Python functions, and only then.
_IMPLICITLY_STATIC = frozenset({"__new__", "__init_subclass__", "__class_getitem__"})
_SUSPENDING = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _span_if_enabled(group: str, name: str, tracer: Tracer | None) -> UngatedSpan | UnstartedSpan:
    return UngatedSpan(name, tracer, PACKAGE_SCOPE, group) if _is_on(group) else UNSTARTED


def trace_fn(group: str, name: str, tracer: Tracer | None = None) -> Callable[[_Function], _Function]:
    """Decorator: each call of the function is a span of `group`, while the group is enabled at the call.

    The span covers the run of the body, also of a coroutine, a generator or an asynchronous generator (the original
    times only their creation), and is current inside it. An Exception is recorded and sets the status ERROR with
    `"<type>: <message>"`. The function keeps its name, signature, kind (`inspect.iscoroutinefunction` and the like),
    and pickles by reference.

    Args:
        group: the group's name.
        name: the span's name.
        tracer: default: the tracer `nemo.lens` of the provider that is global at the call.

    Raises:
        TypeError: (from the decorator) what is decorated can't be called.
    """

    def traced_function(function: Any, of_one_object: bool) -> Any:
        span = functools.partial(UngatedSpan, name, tracer, PACKAGE_SCOPE, group)
        called = with_frame(function)
        runner = functools.wraps(function)(in_span(called, span))
        shown: Any
        suspending = any(suspends(function) for suspends in _SUSPENDING)
        if suspending:
            shown = in_span(function, functools.partial(_span_if_enabled, group, name, tracer))
        else:
            shown = gated(called, group, runner, _is_on)
        functools.update_wrapper(shown, function)
        # Methods of single objects are in Python: by their code, torch.compile takes those of like layers for one.
        if getattr(function, "__name__", "") in _IMPLICITLY_STATIC or (of_one_object and not suspending):
            return shown
        traced: Any = functools.update_wrapper(gate.traced(called, group, runner, shown), function)
        if suspending:
            # In a compiled region, the bare function: torch.compile can't enter the span of what suspends.
            traced._torchdynamo_inline = function
        return traced

    def decorator(function: _Function) -> _Function:
        if not callable(function):
            raise TypeError(
                f"trace_fn decorates functions, not {type(function).__name__}; "
                "under @staticmethod or @classmethod it goes below, next to the def"
            )
        if isinstance(function, MethodType):
            # A method again: copies follow its object, and what takes it apart finds a traced function.
            traced = traced_function(function.__func__, of_one_object=True)
            return MethodType(traced, function.__self__)  # type: ignore[return-value]
        return traced_function(function, of_one_object=False)  # type: ignore[no-any-return]

    return decorator


_scoped_attributes: ContextVar[Mapping[str, Any]] = ContextVar("lens_span_attributes", default={})  # noqa: B039


@contextmanager
def span_attributes(attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give every span that starts inside the block `attributes`, wherever in the program it is started.

    Inner blocks win over outer ones; a span's own attributes win over both. Values are filtered as by
    safe_set_span_attributes. Follows contextvars: asyncio tasks inherit, plain threads don't. Works for spans of the
    provider that setup_telemetry installed.
    """
    outer = _scoped_attributes.get()
    merged = {**outer, **attributes}
    token = _scoped_attributes.set(merged)
    try:
        yield
    finally:
        try:
            _scoped_attributes.reset(token)
        except ValueError:
            # Left in another context than it was entered in, where these must not stay in force.
            merged.clear()
            merged.update(outer)
