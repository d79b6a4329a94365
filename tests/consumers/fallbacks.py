"""A consumer's own no-ops, for when nemo.lens is absent. They import nothing of it, and no OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def managed_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> Iterator[None]:
    yield


@contextmanager
def span_cm(name: str, tracer: Any = None, record_exception: bool = True, **attributes: Any) -> Iterator[None]:
    yield


def trace_fn(group: str, name: str, tracer: Any = None) -> Callable[[Any], Any]:
    return lambda function: function


def is_span_group_enabled(group: str) -> bool:
    return False


def safe_set_span_attributes(span: Any, attributes: dict[str, Any], redact_keys: Any = None) -> None:
    """Does nothing, also where there is no span."""
