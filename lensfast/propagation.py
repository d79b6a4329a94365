"""Trace context that crosses a boundary: the current span and baggage, for another process or another thread.

inject_context and extract_context write and read headers by OpenTelemetry's global propagator (W3C Trace Context and
Baggage, unless OTEL_PROPAGATORS names others and this process does not export). A propagator that fails, and headers
that it can't read, are logged once and don't reach the caller. carry_context is for threads, and needs no headers.
All of it is thread-safe.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar, Token
from typing import Any, TypeVar

from opentelemetry import context as context_api
from opentelemetry.context import Context

from ._spans import report_failure

__all__ = ["ContextCarrier", "carry_context", "extract_context", "inject_context"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def inject_context(carrier: MutableMapping[str, Any]) -> None:
    """Add the headers of the current span and baggage to `carrier`.

    Args:
        carrier: such as the headers of a request. Without a current span or baggage nothing is added.

    Raises:
        TypeError: there is something to add, and `carrier` takes no items.
    """
    try:
        # Not at the top of the file: the import takes milliseconds, and raises if OTEL_PROPAGATORS is misspelled.
        from opentelemetry import propagate

        propagate.inject(carrier)
    except Exception as failure:
        if not hasattr(carrier, "__setitem__"):
            raise
        report_failure("write", "trace context", failure)


def extract_context(carrier: Mapping[str, Any]) -> Context:
    """The context that the headers in `carrier` describe: a parent for spans, or something to attach.

    It starts empty, never from the current context. Without a valid `traceparent` it has no span.

    Args:
        carrier: keys are matched as the mapping matches them; for a dict that is case-sensitively.

    Raises:
        AttributeError: `carrier` is None, or something else that has no get().
    """
    try:
        from opentelemetry import propagate

        return propagate.extract(carrier)
    except Exception as failure:
        if not hasattr(carrier, "get"):
            raise
        report_failure("read", "trace context", failure)
        return Context()


class _Entry:
    """One `with` of a carrier that has not been left."""

    __slots__ = ("carrier", "left", "outer", "token")

    def __init__(self, carrier: ContextCarrier, token: Token[Context], outer: _Entry | None) -> None:
        self.carrier = carrier
        self.token = token
        self.outer = outer
        self.left = False


# The innermost entry of this thread or task.
_entered: ContextVar[_Entry | None] = ContextVar("lensfast_entered_carriers", default=None)


class ContextCarrier:
    """An OpenTelemetry context, kept to be made current elsewhere. Made by carry_context().

    As a context manager it makes the context current in the thread or asyncio task that enters it, until it is left.
    It may be entered again while it is entered, and by any number of threads and tasks at once. It never raises.
    """

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> ContextCarrier:
        try:
            _entered.set(_Entry(self, context_api.attach(self._context), _entered.get()))
        except Exception as failure:
            report_failure("attach", "the carried context", failure)
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        innermost = entry = _entered.get()
        while entry is not None and (entry.left or entry.carrier is not self):
            entry = entry.outer
        if entry is None:
            return  # entered elsewhere: in a thread or task that has its own, or by a generator that moved on
        entry.left = True
        # Undone from the inside, so one that is left before those inside it waits for them.
        while innermost is not None and innermost.left:
            try:
                # The public detach() logs an error with a traceback where this one raises.
                context_api._RUNTIME_CONTEXT.detach(innermost.token)
            except (ValueError, RuntimeError):
                pass  # another context's: a task got the entry from what started it, which has left it since
            except Exception as failure:
                report_failure("detach", "the carried context", failure)
            innermost = innermost.outer
        _entered.set(innermost)

    def __call__(self, function: _Function) -> _Function:
        """A function that does what `function` does, in the carried context: a hook, a callback, a task of a pool.

        A coroutine function gives a coroutine function. Of a generator function only the creation runs in the context.

        Raises:
            TypeError: `function` can't be called.
        """
        if not callable(function):
            raise TypeError(f"a context carrier wraps functions, not {type(function).__name__}")
        wrapped: Any
        if inspect.iscoroutinefunction(function):

            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

        else:

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return functools.wraps(function)(wrapped)  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<carried {self._context!r}>"


def carry_context() -> ContextCarrier:
    """Keep the OpenTelemetry context that is current here, with its span and baggage, for other threads.

    Threads start with an empty context, and so do those on which autograd runs a backward pass on a device. What is
    to belong to the step there is given its context::

        carrier = lensfast.carry_context()
        tensor.register_hook(carrier(hook))      # a function that runs in the context
        with carrier: ...                        # in any thread: a block that does

    Only the context is kept, not what span_attributes() adds. For another process, see inject_context.
    """
    return ContextCarrier(context_api.get_current())
