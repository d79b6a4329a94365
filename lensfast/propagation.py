"""Trace context that crosses a process boundary: the current span and baggage, as a dict of headers.

Both functions use OpenTelemetry's global propagator (W3C Trace Context and Baggage, unless OTEL_PROPAGATORS names
others and this process does not export). A propagator that fails, and headers that it can't read, are logged once and
don't reach the caller. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from opentelemetry.context import Context

from ._spans import report_failure

__all__ = ["extract_context", "inject_context"]


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
