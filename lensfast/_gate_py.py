"""The gate in Python: the same interface and behaviour as the compiled lensfast._gate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanKind, Tracer

_enabled: frozenset[Any] = frozenset()
_handles: dict[str, GroupHandle] = {}


class NoopSpan:
    """The shared context manager of disabled spans: enters as None, does nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        return None

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "a managed span can't be used as a decorator: the group may be switched later, "
            "and this object would not notice; decorate with trace_fn(group, name) instead"
        )

    def __repr__(self) -> str:
        return "<disabled span>"

    def __reduce__(self) -> str:
        return "NOOP"


NOOP = NoopSpan()


def is_span_group_enabled(group: str) -> bool:
    """Whether the span group named `group` is enabled: `group in enabled_span_groups()`.

    Case-sensitive. A name nobody registered is simply not enabled; an unhashable one raises TypeError.
    Lock-free and safe from any thread.
    """
    return group in _enabled


is_span_group_enabled.__module__ = "lensfast.state"


def publish(groups: frozenset[Any]) -> None:
    """Make exactly `groups` enabled."""
    global _enabled
    _enabled = groups


def enabled() -> frozenset[Any]:
    """The frozenset last published."""
    return _enabled


_group_span: Callable[..., Any]


class GroupHandle:
    """The one handle of a span group, made by span_group(name): truthy while the group is enabled."""

    __slots__ = ("_name",)
    _name: str

    def __new__(cls) -> NoReturn:
        raise TypeError("cannot create 'GroupHandle' instances")

    @property
    def name(self) -> str:
        """The group's name (str)."""
        return self._name

    @property
    def enabled(self) -> bool:
        """Whether the group is enabled now (bool)."""
        return self._name in _enabled

    def __bool__(self) -> bool:
        return self._name in _enabled

    def span(
        self,
        /,
        name: str,
        tracer: Tracer | None = None,
        *,
        span_kind: SpanKind | None = None,
        **attributes: Any,
    ) -> AbstractContextManager[Span | None]:
        """A context manager for one span of this group: yields the span, or None while the group is disabled."""
        if self._name not in _enabled:
            return NOOP
        return _group_span(self, name, tracer, span_kind=span_kind, **attributes)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<span group {self._name!r}: {'enabled' if self else 'disabled'}>"

    def __reduce__(self) -> tuple[Callable[[str], GroupHandle], tuple[str]]:
        return span_group, (self._name,)

    def __copy__(self) -> GroupHandle:
        return self

    def __deepcopy__(self, memo: object) -> GroupHandle:
        return self


_GroupHandleType: Any = GroupHandle


def span_group(name: str) -> GroupHandle:
    """The one handle of the group `name` (str); it lives as long as the process."""
    exact: str = str.__str__(name)
    handle = _handles.get(exact)
    if handle is None:
        new: GroupHandle = object.__new__(_GroupHandleType)
        new._name = exact
        # Atomic, and takes no lock that a signal handler could find taken.
        handle = _handles.setdefault(exact, new)
    return handle


def install(managed_span: Callable[..., Any], group_span: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the gate the Python primitives; returns the managed_span to export."""
    global _group_span
    _group_span = group_span
    return managed_span


class TracedFunction:
    """A traced coroutine or generator function: looks to inspect like the function it wraps."""

    # Not in the __dict__, which what traces this in turn gets as well.
    __slots__ = ("__dict__", "__weakref__", "_shown", "_traced")
    _shown: Callable[..., Any]
    _traced: tuple[Callable[..., Any], str, Callable[..., Any]]

    def __init__(
        self, function: Callable[..., Any], group: str, runner: Callable[..., Any], shown: Callable[..., Any]
    ) -> None:
        self._traced = function, group, runner
        self._shown = shown

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        function, group, runner = self._traced
        # By the function that torch.compile knows.
        return (runner if is_span_group_enabled(group) else function)(*args, **kwargs)

    # As for wrapt's proxies: what asks for a function, such as torch or mock, is to find one.
    __class__ = property(lambda self: FunctionType)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # A copy under construction has neither yet.
        if name in {"_shown", "_traced"}:
            raise AttributeError(name)
        return getattr(self._shown, name)

    def __repr__(self) -> str:
        return f"<traced {self._traced[0]!r}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[no-any-return]


def traced(function: Callable[..., Any], group: str, runner: Callable[..., Any], shown: Any) -> Any:
    """A callable that is `function` while `group` is off and `runner` while it is on.

    `shown` is a Python function of the same behaviour; the result is that, or has its attributes.
    """
    suspends = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    return TracedFunction(function, group, runner, shown) if shown.__code__.co_flags & suspends else shown
