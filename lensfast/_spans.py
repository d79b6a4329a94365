"""What an enabled site does: one implementation, behind both gates."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, propagation

from ._backend import compiled, gate

logger = logging.getLogger("lensfast.helpers")

DEFAULT_REDACT_KEYS = frozenset({"prompt", "input_text", "output_text", "text", "password", "token", "secret", "key"})
REDACTED = "[REDACTED]"
_SCALAR_TYPES = (bool, int, float, str)

# Dashboards filter on the original's instrumentation scopes, so these stay as they are.
HELPERS_SCOPE = "nemo.lens.helpers"
PACKAGE_SCOPE = "nemo.lens"


# A patched function is asked each time.
_GET_TRACER = trace.get_tracer
_GET_TRACER_PROVIDER = trace.get_tracer_provider
_tracers: dict[str, tuple[object, Tracer]] = {}


def current_tracer(scope: str) -> Tracer:
    """The tracer named `scope` of the provider that is global now.

    Cached per provider, since trace.get_tracer costs microseconds; a provider that was replaced or reset is noticed.
    """
    provider = getattr(trace, "_TRACER_PROVIDER", None)
    cached = _tracers.get(scope)
    patched = trace.get_tracer is not _GET_TRACER or trace.get_tracer_provider is not _GET_TRACER_PROVIDER
    if cached is not None and cached[0] is provider and not patched:
        return cached[1]
    if provider is None or patched:
        return trace.get_tracer(scope)
    tracer = trace.get_tracer(scope, tracer_provider=provider)  # another may be global by now
    _tracers[scope] = (provider, tracer)
    return tracer


def usable_attributes(
    attributes: Mapping[str, Any], redact_keys: frozenset[str] = DEFAULT_REDACT_KEYS
) -> dict[str, Any]:
    """The attributes a span can carry: scalars and flat lists of them, strings under a sensitive key redacted."""
    usable: dict[str, Any] = {}
    for key, value in attributes.items():
        try:
            if isinstance(value, str):
                usable[key] = REDACTED if key in redact_keys else value
            elif isinstance(value, _SCALAR_TYPES):
                usable[key] = value
            elif isinstance(value, (list, tuple)) and all(isinstance(item, _SCALAR_TYPES) for item in value):
                usable[key] = list(value)
        except Exception as failure:
            report_failure("use attribute", key, failure)
    return usable


_reported_failures: set[tuple[str, type[BaseException]]] = set()


def report_failure(doing: str, name: str, error: BaseException) -> None:
    """Log that telemetry failed, once per kind of failure: it must never break the training loop, nor flood its log."""
    kind = (doing, type(error))
    if kind not in _reported_failures:
        _reported_failures.add(kind)
        logger.warning(
            "could not %s %r (the program goes on; later failures of this kind are not logged)",
            doing,
            name,
            exc_info=error,
        )


# span -> the Contexts that show it in place of one of its children, which was left out of order.
_redirected: weakref.WeakKeyDictionary[Span, list[weakref.ref[Context]]] = weakref.WeakKeyDictionary()


def _redirect(contexts: list[weakref.ref[Context]], span: Span) -> None:
    """Make `span` the current one of `contexts`, in place: whoever holds one must not find an ended span in it."""
    entry = trace.set_span_in_context(span, Context())
    for reference in contexts:
        if (context := reference()) is not None:
            dict.update(context, entry)
    if span.is_recording():
        _redirected.setdefault(span, []).extend(contexts)


class SpanWatch(Protocol):
    """What watches one span, from its start; it is what ends the span, at once or later."""

    def end(self, span: Span) -> None: ...


# Called as each span starts, with its group (None without one) and name. Set by lensfast.contrib.torch.
watch: Callable[[str | None, str], SpanWatch | None] | None = None


RECOMPUTE = "lensfast.recompute"
_CHECKPOINT_FILE = os.path.join("torch", "utils", "checkpoint.py")


def recomputing() -> bool:
    """Whether activation checkpointing is running a forward again, in this thread, for a backward pass.

    What runs in a backward pass with gradients enabled is a forward: hooks and backward functions have them disabled.
    Not where the pass may build a graph of its own, though, nor in a forward's own no_grad block: the call stack tells.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        if torch._C._current_graph_task_id() == -1:
            return False
        if torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph():
            return True
    except AttributeError:  # torch is being imported, or has no such functions
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        code = frame.f_code
        if code.co_qualname.endswith("CheckpointFunction.backward") or code.co_filename.endswith(_CHECKPOINT_FILE):
            return True
        frame = frame.f_back
    return False


def _stops_recomputation(error: BaseException) -> bool:
    """Whether this is how checkpointing leaves a forward that it need not run to its end."""
    kind = type(error)
    return kind.__name__ == "_StopRecomputationError" and kind.__module__ == "torch.utils.checkpoint"


def start_watch(group: str | None, name: str) -> SpanWatch | None:
    """What watches a span that has started, if anything does."""
    if watch is not None:
        try:
            return watch(group, name)
        except Exception as failure:
            report_failure("watch span", name, failure)
    return None


def set_attributes(span: Span, name: str, attributes: Mapping[str, Any]) -> None:
    """Give a span that has started the attributes of its site."""
    try:
        # After the start, as the original does: samplers and on_start never see them.
        span.set_attributes(usable_attributes(attributes))
    except Exception as failure:
        report_failure("set the attributes of span", name, failure)


def mark_recomputation(span: Span, name: str) -> None:
    """Mark a span that has started, if it is one of activation checkpointing's."""
    try:
        if recomputing():
            span.set_attribute(RECOMPUTE, True)
    except Exception as failure:
        report_failure("see whether this is a recomputation", name, failure)


def restore(span: Span, name: str, parent: Context, context: Context, in_order: bool) -> None:
    """After `span`, whose context is detached, see to the contexts that must not show it as current any more."""
    contexts: list[weakref.ref[Context]] = []
    with suppress(TypeError):  # a span that can't be hashed or weakly referenced was never put in
        contexts = _redirected.pop(span, contexts)
    if not in_order:
        contexts.append(weakref.ref(context))
    try:
        _redirect(contexts, trace.get_current_span(parent))
    except Exception as failure:
        report_failure("restore the context after span", name, failure)


class SpanRecipe(Protocol):
    """What is known of a span before it starts."""

    @property
    def group(self) -> str | None: ...
    @property
    def name(self) -> str: ...
    @property
    def record_exception(self) -> bool: ...
    @property
    def names_exception_type(self) -> bool: ...


def record_error(recipe: SpanRecipe, span: Span, error: Exception) -> None:
    """An exception leaves the block of `span`."""
    if _stops_recomputation(error):
        return
    try:
        message = f"{type(error).__name__}: {error}" if recipe.names_exception_type else str(error)
    except Exception:
        message = type(error).__name__
    try:
        if span.is_recording():
            span.set_status(Status(StatusCode.ERROR, message))
            if recipe.record_exception:
                span.record_exception(error)
    except Exception as failure:
        report_failure("record an exception on span", recipe.name, failure)


class OpenSpan:
    """One started span; as a context manager it only ends it."""

    __slots__ = ("_body", "_context", "_parent", "_recipe", "_token", "_watch", "span")

    def __init__(self, recipe: SpanRecipe, span: Span) -> None:
        self._recipe = recipe
        self.span = span
        self._watch = start_watch(recipe.group, recipe.name)

    def attach(self) -> None:
        """Make the span current."""
        self._parent = context_api.get_current()
        self._context = trace.set_span_in_context(self.span, self._parent)
        self._token = context_api.attach(self._context)

    def detach(self) -> None:
        """Make current again what was before, wherever and in whatever order that is asked for."""
        in_order = context_api.get_current() is self._context
        try:
            # The public detach() logs an error with a traceback where this one raises.
            context_api._RUNTIME_CONTEXT.detach(self._token)
        except Exception:
            in_order = False
        if not in_order or _redirected:
            restore(self.span, self._recipe.name, self._parent, self._context, in_order)

    def suspend(self) -> None:
        """Between two items of a generator, the consumer's span is current again."""
        self._body = context_api.get_current()
        context_api.detach(self._token)

    def resume(self) -> None:
        """What was current in the generator's body is so again, in whatever context it goes on."""
        self._token = context_api.attach(self._body)

    def end(self, error: BaseException | None) -> None:
        span, recipe = self.span, self._recipe
        # A BaseException such as KeyboardInterrupt or GeneratorExit is a way to leave, not a failure of the work.
        if isinstance(error, Exception):
            record_error(recipe, span, error)
        try:
            if self._watch is None:
                span.end()
            else:
                self._watch.end(span)
        except Exception as failure:
            report_failure("end span", recipe.name, failure)

    def __enter__(self) -> Span:
        return self.span

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self.end(exc)


class UnstartedSpan:
    """Stands for a span that the tracer could not start, or that is not wanted."""

    __slots__ = ()
    span = trace.INVALID_SPAN

    def start(self) -> UnstartedSpan:
        """Nothing, again: where a manager is asked for, this is one that starts no span."""
        return self

    def attach(self) -> None:
        """The outer span stays current."""

    def detach(self) -> None:
        """Nothing was attached."""

    suspend = resume = detach

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
        "group",
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
        group: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        kind: SpanKind | None = None,
        record_exception: bool = True,
        names_exception_type: bool = True,
    ) -> None:
        self.name = name
        self.tracer = tracer
        self.scope = scope
        self.group = group
        self.attributes = attributes
        self.kind = kind
        self.record_exception = record_exception
        self.names_exception_type = names_exception_type
        # The disabled span may be entered while it is entered, so this may be, too.
        self._open: list[OpenSpan | UnstartedSpan] = []

    def start(self) -> OpenSpan | UnstartedSpan:
        """Start the span. A tracer that fails is logged and does not reach the caller."""
        try:
            tracer = self.tracer
            if tracer is None:
                tracer = current_tracer(self.scope)
            span = tracer.start_span(self.name) if self.kind is None else tracer.start_span(self.name, kind=self.kind)
        except Exception as failure:
            report_failure("start span", self.name, failure)
            return UNSTARTED
        if self.attributes:
            set_attributes(span, self.name, self.attributes)
        mark_recomputation(span, self.name)
        return OpenSpan(self, span)

    def __enter__(self) -> Span:
        opened = self.start()
        opened.attach()
        self._open.append(opened)  # at last: another thread may leave what is in there
        return opened.span

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        try:
            opened = self._open.pop()
        except IndexError:
            raise RuntimeError(f"the manager of span {self.name!r} was left without being entered") from None
        # In this order, so that an on_end processor sees the parent as current.
        opened.detach()
        opened.end(exc)

    def __repr__(self) -> str:
        return f"<span {self.name!r}>"


class GatedSpan(SpanManager):
    """What managed_span and handle.span give while the group is on."""

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> None:
        gate.NOOP(*args, **kwargs)  # refuses to decorate, as the disabled span does


class UngatedSpan(SpanManager):
    """What span_cm gives: also a decorator, each call of the function in a span of its own."""

    __slots__ = ()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return decorated(self, function)


def decorated(manager: UngatedSpan, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, each call in a span like that of `manager`."""
    return functools.wraps(function)(in_span(function, functools.partial(again, manager)))


if compiled is not None and type(context_api._RUNTIME_CONTEXT) is ContextVarsRuntimeContext:
    # The same two in C. A context that is kept in another way is for Python.
    compiled.use_managers(
        globals(), vars(trace), context_api._RUNTIME_CONTEXT._current_context, Context, propagation._SPAN_KEY
    )
    GatedSpan, UngatedSpan = compiled.GatedSpan, compiled.UngatedSpan  # type: ignore[misc]


def again(manager: UngatedSpan) -> UngatedSpan:
    """A manager like this one, for another call."""
    return UngatedSpan(
        manager.name,
        manager.tracer,
        manager.scope,
        attributes=manager.attributes,
        record_exception=manager.record_exception,
    )


def in_span(function: Callable[..., Any], manager: Callable[[], SpanManager | UnstartedSpan]) -> Callable[..., Any]:
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
            hooks = sys.get_asyncgen_hooks()
            # The event loop closes the outer generator, which closes this one; both at once would be an error.
            sys.set_asyncgen_hooks(None, None)
            try:
                step = generator.asend(None)
            finally:
                sys.set_asyncgen_hooks(*hooks)
            opened = manager().start()
            with opened:
                opened.attach()
                try:
                    while True:
                        try:
                            item = await step
                        except StopAsyncIteration:
                            return
                        opened.suspend()
                        try:
                            sent = yield item
                        except BaseException as thrown:
                            opened.resume()
                            step = generator.athrow(thrown)
                        else:
                            opened.resume()
                            step = generator.asend(sent)
                finally:
                    opened.detach()

        return run_async_generator

    if inspect.isgeneratorfunction(function):

        def run_generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            generator = function(*args, **kwargs)
            step = functools.partial(generator.send, None)
            opened = manager().start()
            with opened:
                opened.attach()
                try:
                    while True:
                        try:
                            item = step()
                        except StopIteration as stop:
                            return stop.value
                        opened.suspend()
                        try:
                            sent = yield item
                        except BaseException as thrown:
                            step = functools.partial(generator.throw, thrown)
                        else:
                            step = functools.partial(generator.send, sent)
                        opened.resume()
                finally:
                    opened.detach()

        # A generator that types.coroutine made awaitable must stay so.
        flags: int = getattr(getattr(function, "__code__", None), "co_flags", 0)
        awaitable = flags & inspect.CO_ITERABLE_COROUTINE
        return types.coroutine(run_generator) if awaitable else run_generator

    def run(*args: Any, **kwargs: Any) -> Any:
        with manager():
            return function(*args, **kwargs)

    return run
