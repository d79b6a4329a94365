"""Trace context through Ray's remote calls. Needs Ray itself only in the program that uses it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from .._spans import OpenSpan, SpanManager, UnstartedSpan, in_span
from ..propagation import extract_context, inject_context

__all__ = ["extract_ray_context", "inject_ray_context", "ray_dispatch_with_context", "traced_remote_call"]

_SCOPE = "nemo.lens.ray"
_Carrier = Mapping[str, Any]


def inject_ray_context() -> dict[str, Any]:
    """The headers of the current span and baggage, for the driver to pass to a remote call; empty without them."""
    carrier: dict[str, Any] = {}
    inject_context(carrier)
    return carrier


def extract_ray_context(carrier: _Carrier | None = None) -> Context:
    """The context that the headers describe, as by extract_context; the current context if `carrier` is None."""
    return context_api.get_current() if carrier is None else extract_context(carrier)


class _RemoteSpan(SpanManager):
    """A span whose parent came with the call."""

    __slots__ = ("carrier",)

    def __init__(self, name: str, tracer: Tracer | None, carrier: _Carrier | None) -> None:
        super().__init__(name, tracer, _SCOPE)
        self.carrier = carrier

    def start(self) -> OpenSpan | UnstartedSpan:
        token = context_api.attach(extract_ray_context(self.carrier))
        try:
            return super().start()
        finally:
            context_api.detach(token)


def traced_remote_call(method: Callable[..., Any], tracer: Tracer | None = None) -> Callable[..., Any]:
    """Wrap a Ray task or actor method: each call is a span, child of the span of the caller.

    The wrapper takes the headers as the keyword argument `_otel_carrier`, which ray_dispatch_with_context adds, and
    calls `method` without it; None or left out: the parent is the current span. The span has the qualified name of
    `method`, belongs to no group and covers the whole run, also of a coroutine or a generator; the wrapper is of the
    same kind. An Exception is recorded with the status `"<type>: <message>"` and goes on.

    Works as a decorator, below @ray.remote. The wrapper's signature has `_otel_carrier`, and the wrapper no
    `__wrapped__`, since Ray checks the arguments of an actor's method against the innermost wrapped function.

    Args:
        method: a function of any kind.
        tracer: default: the tracer `nemo.lens.ray` of the provider that is global at the call. An SDK tracer can't be
            pickled, as Ray would have to for a function of the driver's script.

    Raises:
        TypeError: `method` can't be called.
    """
    if not callable(method):
        raise TypeError(f"traced_remote_call() wraps a function, not {type(method).__name__}")
    name = getattr(method, "__qualname__", type(method).__name__)

    def traced(carrier: _Carrier | None) -> Callable[..., Any]:
        return in_span(method, lambda: _RemoteSpan(name, tracer, carrier))

    def function(*args: Any, _otel_carrier: _Carrier | None = None, **kwargs: Any) -> Any:
        return traced(_otel_carrier)(*args, **kwargs)

    async def coroutine(*args: Any, _otel_carrier: _Carrier | None = None, **kwargs: Any) -> Any:
        return await traced(_otel_carrier)(*args, **kwargs)

    def generator(*args: Any, _otel_carrier: _Carrier | None = None, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from traced(_otel_carrier)(*args, **kwargs))

    async def async_generator(*args: Any, _otel_carrier: _Carrier | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(traced(_otel_carrier)(*args, **kwargs)) as items:
            async for item in items:
                yield item

    wrapper: Callable[..., Any] = function
    if inspect.iscoroutinefunction(method):
        wrapper = coroutine
    elif inspect.isgeneratorfunction(method):
        wrapper = generator
    elif inspect.isasyncgenfunction(method):
        wrapper = async_generator
    functools.update_wrapper(wrapper, method)
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    # Where it can't be read, the wrapper's own takes any arguments.
    with suppress(Exception):
        signature = inspect.signature(method)
        carrier = inspect.Parameter("_otel_carrier", inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = {**signature.parameters, carrier.name: carrier}.values()
        ordered = sorted(parameters, key=lambda parameter: parameter.kind)
        wrapper.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    return wrapper


def ray_dispatch_with_context(remote_fn: Any, *args: Any, _carrier: _Carrier | None = None, **kwargs: Any) -> Any:
    """`remote_fn.remote(*args, **kwargs)`, with the current trace context as the keyword `_otel_carrier`.

    Args:
        remote_fn: a Ray task or actor method that traced_remote_call wrapped.
        _carrier: headers to send in place of the current ones.

    Returns:
        What remote() returns: an ObjectRef.
    """
    carrier = inject_ray_context() if _carrier is None else _carrier
    return remote_fn.remote(*args, _otel_carrier=carrier, **kwargs)
