"""What an enabled site does: one implementation, behind both gates."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any, NamedTuple

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

logger = logging.getLogger("lensfast.helpers")

DEFAULT_REDACT_KEYS = frozenset({"prompt", "input_text", "output_text", "text", "password", "token", "secret", "key"})
_SCALAR_TYPES = (bool, int, float, str)

# Dashboards filter on the original's instrumentation scopes, so these stay as they are.
HELPERS_SCOPE = "nemo.lens.helpers"
PACKAGE_SCOPE = "nemo.lens"


class _CachedTracer(NamedTuple):
    provider: object
    get_tracer: object
    get_tracer_provider: object
    tracer: Tracer


_tracers: dict[str, _CachedTracer] = {}


def current_tracer(scope: str) -> Tracer:
    """The tracer named `scope` of the provider that is global now.

    Cached per provider: trace.get_tracer costs microseconds. The key is what a call would read, so a provider that
    was replaced or reset, and a patched trace.get_tracer, are noticed.
    """
    provider = getattr(trace, "_TRACER_PROVIDER", None)
    get_tracer = trace.get_tracer
    cached = _tracers.get(scope)
    if (
        cached is not None
        and cached.provider is provider
        and cached.get_tracer is get_tracer
        and cached.get_tracer_provider is trace.get_tracer_provider
    ):
        return cached.tracer
    tracer = get_tracer(scope)
    if provider is not None:
        _tracers[scope] = _CachedTracer(provider, get_tracer, trace.get_tracer_provider, tracer)
    return tracer


def usable_attributes(
    attributes: Mapping[str, Any], redact_keys: frozenset[str] = DEFAULT_REDACT_KEYS
) -> dict[str, Any]:
    """The attributes a span can carry: scalars and flat lists of them, strings under a sensitive key redacted."""
    usable: dict[str, Any] = {}
    for key, value in attributes.items():
        if isinstance(value, str):
            usable[key] = "[REDACTED]" if key in redact_keys else value
        elif isinstance(value, _SCALAR_TYPES):
            usable[key] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(item, _SCALAR_TYPES) for item in value):
            usable[key] = list(value)
    return usable


_reported_failures: set[tuple[str, type[BaseException]]] = set()


def report_failure(doing: str, name: str, error: BaseException) -> None:
    """Log that telemetry failed, once per kind of failure: it must never break the training loop, nor flood its log."""
    kind = (doing, type(error))
    if kind not in _reported_failures:
        _reported_failures.add(kind)
        logger.warning(
            "could not %s span %r (the program goes on; later failures of this kind are not logged)",
            doing,
            name,
            exc_info=error,
        )


class OpenSpan:
    """One started span, made current and un-current any number of times; as a context manager it only ends it."""

    __slots__ = ("_context", "_parent", "_recipe", "_token", "span")

    def __init__(self, recipe: SpanManager, span: Span) -> None:
        self._recipe = recipe
        self.span = span

    def attach(self) -> None:
        self._parent = context_api.get_current()
        self._context = trace.set_span_in_context(self.span, self._parent)
        self._token = context_api.attach(self._context)

    def detach(self) -> None:
        in_order = context_api.get_current() is self._context
        try:
            # The public detach() logs an error with a traceback where this one raises.
            context_api._RUNTIME_CONTEXT.detach(self._token)
        except Exception:
            in_order = False
        if not in_order:
            # Left elsewhere or out of order: whoever still holds our Context must find its parent's span in it.
            parent_span = trace.get_current_span(self._parent)
            dict.update(self._context, trace.set_span_in_context(parent_span, Context()))

    def end(self, error: BaseException | None) -> None:
        span, recipe = self.span, self._recipe
        # A BaseException such as KeyboardInterrupt or GeneratorExit is a way to leave, not a failure of the work.
        if isinstance(error, Exception):
            try:
                if recipe.record_exception:
                    span.record_exception(error)
                message = f"{type(error).__name__}: {error}" if recipe.names_exception_type else str(error)
                span.set_status(Status(StatusCode.ERROR, message))
            except Exception as failure:
                report_failure("record an exception on", recipe.name, failure)
        try:
            span.end()
        except Exception as failure:
            report_failure("end", recipe.name, failure)

    def __enter__(self) -> Span:
        return self.span

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self.end(exc)


class UnstartedSpan:
    """Stands for a span that the tracer could not start."""

    __slots__ = ()
    span = trace.INVALID_SPAN

    def attach(self) -> None:
        """The outer span stays current."""

    def detach(self) -> None:
        """Nothing was attached."""

    def end(self, error: BaseException | None) -> None:
        """Nothing was started."""

    def __enter__(self) -> Span:
        return self.span

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        return None


UNSTARTED = UnstartedSpan()


class SpanManager:
    """Each time it is entered it starts a span and makes it current; on the way out the span is ended."""

    __slots__ = (
        "_open",
        "attributes",
        "kind",
        "name",
        "names_exception_type",
        "record_exception",
        "scope",
        "tracer",
    )

    def __init__(
        self,
        name: str,
        tracer: Tracer | None,
        scope: str = HELPERS_SCOPE,
        attributes: Mapping[str, Any] | None = None,
        kind: SpanKind | None = None,
        record_exception: bool = True,
        names_exception_type: bool = True,
    ) -> None:
        self.name = name
        self.tracer = tracer
        self.scope = scope
        self.attributes = attributes
        self.kind = kind
        self.record_exception = record_exception
        self.names_exception_type = names_exception_type
        # A linked stack: the disabled span may be entered while it is entered, so this may be, too.
        self._open: tuple[OpenSpan | UnstartedSpan, Any] | None = None

    def start(self) -> OpenSpan | UnstartedSpan:
        """Start the span. A tracer that fails is logged and does not reach the caller."""
        try:
            tracer = self.tracer
            if tracer is None:
                tracer = current_tracer(self.scope)
            span = tracer.start_span(self.name) if self.kind is None else tracer.start_span(self.name, kind=self.kind)
        except Exception as failure:
            report_failure("start", self.name, failure)
            return UNSTARTED
        if self.attributes:
            try:
                # After the start, as the original does: samplers and on_start never see them.
                span.set_attributes(usable_attributes(self.attributes))
            except Exception as failure:
                report_failure("set the attributes of", self.name, failure)
        return OpenSpan(self, span)

    def __enter__(self) -> Span:
        opened = self.start()
        self._open = (opened, self._open)
        opened.attach()
        return opened.span

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if self._open is None:
            raise RuntimeError(f"the manager of span {self.name!r} was left without being entered")
        opened, self._open = self._open
        # In this order, so that an on_end processor sees the parent as current.
        opened.detach()
        opened.end(exc)

    def __repr__(self) -> str:
        return f"<span {self.name!r}>"


class GatedSpan(SpanManager):
    """What managed_span and handle.span give while the group is on."""

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "a managed span can't be used as a decorator: the group may be switched later, "
            "and this object would not notice; decorate with trace_fn(group, name) instead"
        )


class UngatedSpan(SpanManager):
    """What span_cm gives: also a decorator, each call of the function in a span of its own."""

    __slots__ = ()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def again() -> SpanManager:
            return UngatedSpan(
                self.name,
                self.tracer,
                self.scope,
                self.attributes,
                record_exception=self.record_exception,
            )

        return functools.wraps(function)(in_span(function, again))


def in_span(function: Callable[..., Any], manager: Callable[[], SpanManager]) -> Callable[..., Any]:
    """A function of the same kind as `function`, whose whole run, not only its call, is one span."""
    if inspect.iscoroutinefunction(function):

        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            with manager():
                return await function(*args, **kwargs)

        return run_coroutine

    # A generator's span is current only while the body runs: between two items the consumer's is.
    if inspect.isasyncgenfunction(function):

        async def run_async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            generator = function(*args, **kwargs)
            step = functools.partial(generator.asend, None)
            opened = manager().start()
            with opened:
                while True:
                    opened.attach()
                    try:
                        item = await step()
                    except StopAsyncIteration:
                        return
                    finally:
                        opened.detach()
                    try:
                        sent = yield item
                    except BaseException as thrown:
                        step = functools.partial(generator.athrow, thrown)
                    else:
                        step = functools.partial(generator.asend, sent)

        return run_async_generator

    if inspect.isgeneratorfunction(function):

        def run_generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            generator = function(*args, **kwargs)
            step = functools.partial(generator.send, None)
            opened = manager().start()
            with opened:
                while True:
                    opened.attach()
                    try:
                        item = step()
                    except StopIteration as stop:
                        return stop.value
                    finally:
                        opened.detach()
                    try:
                        sent = yield item
                    except BaseException as thrown:
                        step = functools.partial(generator.throw, thrown)
                    else:
                        step = functools.partial(generator.send, sent)

        # A generator that types.coroutine made awaitable must stay so.
        awaitable = function.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE
        return types.coroutine(run_generator) if awaitable else run_generator

    def run(*args: Any, **kwargs: Any) -> Any:
        with manager():
            return function(*args, **kwargs)

    return run
