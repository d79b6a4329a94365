"""Spans that belong together across the ranks of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Tracer

from ._spans import report_failure
from .helpers import safe_set_span_attributes
from .propagation import extract_context

__all__ = ["broadcast_trace_context", "create_linked_span"]


def broadcast_trace_context(rank: int, src_rank: int = 0) -> dict[str, Any] | None:
    """Send the trace context of rank `src_rank` to every rank. A collective of the default process group.

    Every rank must call it, exporting or not; it blocks like any collective, so call it from the thread that does the
    others. A context that can't be encoded or decoded counts as empty and is logged, so that no rank waits for one
    that gave up. Errors of the collective itself (timeout, a rank that died) come through as torch raises them: they
    nearly always mean that the job is lost, and one rank going on alone would only hang in the next collective.

    Args:
        rank: this process's rank. Which process sends is decided by the process group's own rank; if the two differ,
            a warning is logged.
        src_rank: the rank whose current span is sent. It must be one that has a span, so one that exports: by default
            that is the last rank.

    Returns:
        The headers, on `src_rank` too, for extract_context or create_linked_span; empty if `src_rank` has no current
        span. None if torch.distributed is not initialised.
    """
    # No process group exists in a process that has not imported it.
    torch, dist = sys.modules.get("torch"), sys.modules.get("torch.distributed")
    if torch is None or dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    from .contrib.nccl import deserialize_context, serialize_context

    group_rank = dist.get_rank()
    if rank != group_rank:
        report_failure(
            "go by the rank given to",
            "broadcast_trace_context",
            ValueError(f"it is {rank}, but torch.distributed says that this is rank {group_rank}"),
        )
    sends = group_rank == src_rank
    data = serialize_context() if sends else b""
    device = _collective_device(dist)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    content = torch.tensor(list(data), dtype=torch.uint8, device=device)
    dist.broadcast(length, src=src_rank)
    if not sends:
        content = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=src_rank)
    # With torch 2.5, gloo's thread may free the last reference while the process group, torn down, waits for it.
    _last_broadcast[:] = length, content
    carrier = deserialize_context(bytes(content.tolist()))
    if not isinstance(carrier, dict):
        report_failure("read", "trace context", ValueError(f"rank {src_rank} sent something else"))
        return {}
    return carrier


_last_broadcast: list[Any] = []


def _collective_device(dist: Any) -> str:
    """Where the default group takes tensors from: the CPU if it can, else (NCCL) the current accelerator."""
    devices = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]  # such as "cpu:gloo,cuda:nccl"
    return "cpu" if "cpu" in devices else devices[0]


def create_linked_span(
    tracer: Tracer,
    name: str,
    remote_context: Context | None = None,
    remote_carrier: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> Span:
    """Start a span with a link to a span of another process, as a child of this process's current span.

    For work that another rank's work led to without being its child, such as a pipeline stage. Belongs to no group. The
    span is not made current, and the caller ends it. Thread-safe.

    Args:
        tracer: starts the span. If it raises, that is logged and the result is a span that records nothing.
        name: the span's name.
        remote_context: what extract_context gave. Without a valid span in it, there is no link.
        remote_carrier: headers, used if `remote_context` is None.
        **attributes: filtered as by safe_set_span_attributes, set after the start.

    Raises:
        AttributeError: `remote_carrier` is not a mapping.
    """
    if remote_context is None and remote_carrier is not None:
        remote_context = extract_context(remote_carrier)
    links = []
    if remote_context is not None:
        remote = trace.get_current_span(remote_context).get_span_context()
        if remote.is_valid:
            links.append(Link(remote))
    try:
        span = tracer.start_span(name, links=links)
    except Exception as failure:
        report_failure("start span", name, failure)
        return trace.INVALID_SPAN
    safe_set_span_attributes(span, attributes)
    return span
