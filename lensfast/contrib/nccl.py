"""Trace context as bytes, to be sent along with tensors. Needs neither torch nor NCCL. Thread-safe."""

from __future__ import annotations

import json
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.context import Context

from .._spans import report_failure
from ..propagation import extract_context, inject_context

__all__ = ["deserialize_context", "extract_nccl_context", "serialize_context"]


def serialize_context() -> bytes:
    """The headers of the current span and baggage as JSON in UTF-8: `b"{}"` without them. Never raises."""
    carrier: dict[str, Any] = {}
    inject_context(carrier)
    try:
        return json.dumps(carrier).encode()
    except Exception as failure:
        report_failure("serialize", "trace context", failure)
        return b"{}"


def deserialize_context(data: bytes) -> Any:
    """The headers in `data`, or None if it is not JSON in UTF-8.

    JSON that is no object comes back as what it is; extract_nccl_context takes that for undecodable.

    Raises:
        AttributeError: `data` is not bytes.
    """
    try:
        return json.loads(data.decode())
    except ValueError:
        return None


def extract_nccl_context(data: bytes) -> Context:
    """The context that `data` describes, as by extract_context; the current context if `data` is undecodable.

    Raises:
        AttributeError: `data` is not bytes.
    """
    carrier = deserialize_context(data)
    return extract_context(carrier) if isinstance(carrier, dict) else context_api.get_current()
