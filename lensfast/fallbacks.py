"""No-ops with the names and signatures of the instrumentation API, for code that runs without telemetry.

They need nothing but the standard library. Context managers yield None, and `trace_fn` returns its function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = [
    "SpanRegistry",
    "is_span_group_enabled",
    "managed_span",
    "safe_set_span_attributes",
    "span_attributes",
    "span_cm",
    "trace_fn",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def trace_fn(group: str, name: str, tracer: Any = None) -> Callable[[_Function], _Function]:
    """Decorator that returns the function itself."""
    return lambda function: function


@contextmanager
def managed_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> Iterator[None]:
    """A context manager that yields None."""
    yield


@contextmanager
def span_cm(name: str, tracer: Any = None, record_exception: bool = True, **attributes: Any) -> Iterator[None]:
    """A context manager that yields None."""
    yield


def is_span_group_enabled(group: str) -> bool:
    """False."""
    return False


def safe_set_span_attributes(
    span: Any, attributes: Mapping[str, Any], redact_keys: frozenset[str] | None = None
) -> None:
    """Does nothing; `span` may be None."""


@contextmanager
def span_attributes(attributes: Mapping[str, Any]) -> Iterator[None]:
    """A context manager that yields None."""
    yield


class SpanRegistry:
    """A registry that takes every registration and remembers none. Its methods don't raise."""

    @classmethod
    def register(
        cls,
        namespace: str,
        groups: Iterable[str],
        presets: Mapping[str, Iterable[str]] | None = None,
        *,
        allow_override: bool = False,
    ) -> None:
        """Does nothing."""

    @classmethod
    def unregister(cls, namespace: str) -> None:
        """Does nothing."""

    @classmethod
    def clear(cls) -> None:
        """Does nothing."""

    @classmethod
    def groups(cls) -> frozenset[str]:
        """No groups."""
        return frozenset()

    @classmethod
    def namespaces(cls) -> list[str]:
        """No namespaces."""
        return []

    @classmethod
    def presets(cls) -> dict[str, frozenset[str]]:
        """`all`, of no groups."""
        return {"all": frozenset()}

    @classmethod
    def resolve(cls, spec: str) -> tuple[frozenset[str], frozenset[str]]:
        """(enabled, pending): nothing, and every name in `spec`, lower-cased."""
        return frozenset(), frozenset(name for part in spec.split(",") if (name := part.strip().lower()))
