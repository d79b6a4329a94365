"""Which span groups are enabled in this process.

The enabled set is process-wide. Reading it takes no lock. It is set in one of two ways, of which the last one wins:
`set_enabled_span_groups` pins an exact set; `set_span_group_spec` keeps a spec string that is resolved again whenever
a library registers or unregisters groups.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from . import groups as _groups
from ._backend import gate, span_group

__all__ = [
    "enabled_span_groups",
    "get_pp_trace_carrier",
    "is_span_group_enabled",
    "pending_span_groups",
    "refresh_enabled_span_groups",
    "set_enabled_span_groups",
    "set_pp_trace_carrier",
    "set_span_group_spec",
    "span_group",
]

logger = logging.getLogger(__name__)

is_span_group_enabled = gate.is_span_group_enabled

# Lock order: this one before the registry's.
_LOCK = threading.RLock()
_spec: str | None = None
_span_group_cls: Any = None  # an older group class whose names count beside the registry's; setup_telemetry sets it
_pending: frozenset[str] = frozenset()
_reported: tuple[str, frozenset[str]] | None = None
# The original's names, which tests of its users assign to.
_ENABLED_GROUPS: frozenset[str] = gate.enabled()
_PP_TRACE_CARRIER: dict[str, Any] | None = None

if hasattr(os, "register_at_fork"):
    # A fork while another thread held one of these must not leave the child waiting for ever.
    os.register_at_fork(after_in_child=lambda: _LOCK._at_fork_reinit())  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=lambda: _groups.SpanRegistry._LOCK._at_fork_reinit())  # type: ignore[attr-defined]


def set_enabled_span_groups(groups: Iterable[str]) -> None:
    """Enable exactly `groups`, from now on: drops the spec, so later registrations change nothing.

    Args:
        groups: a collection of group names, usually a frozenset. It is copied. Names need not be registered.

    Raises:
        TypeError: `groups` is not a collection of hashable values, or is a str.
    """
    global _spec, _pending, _reported
    exact = _exact(groups)
    with _LOCK:
        _spec, _pending, _reported = None, frozenset(), None
        _publish(exact)


def _exact(groups: Iterable[str]) -> frozenset[str]:
    if isinstance(groups, (str, bytes)) or not isinstance(groups, Iterable):
        raise TypeError(
            f"set_enabled_span_groups() takes a set of group names, such as frozenset({{'step'}}), not {groups!r}; "
            "for a spec string use set_span_group_spec()"
        )
    return frozenset(groups)


def _publish(groups: frozenset[str]) -> None:
    """Move the gate. Call with _LOCK held."""
    global _ENABLED_GROUPS
    _ENABLED_GROUPS = groups
    gate.publish(groups)


def _is_on(group: str) -> bool:
    """is_span_group_enabled() for traced functions that were copied or are being compiled: the same set, in Python."""
    return group in _ENABLED_GROUPS


class _StateModule(ModuleType):
    """This module: assigning to its `_ENABLED_GROUPS` from outside moves the gate, as in the original."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_ENABLED_GROUPS":
            with _LOCK:
                _publish(_exact(value))
        else:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _StateModule


def set_span_group_spec(spec: str) -> None:
    """Enable what `spec` names, now and whenever registrations change.

    Args:
        spec: group and preset names, comma-separated, in any case, such as `"default,layer"`, of the registry and of
            the group class that setup_telemetry was given. A name that nobody has registered is logged, stays pending
            and takes effect once it is registered.

    Raises:
        TypeError: `spec` is not a str.
    """
    follow_spec(spec, _span_group_cls)


def check_spec(spec: str, span_group_cls: Any = None) -> None:
    """Raise what is wrong with a spec, before anything is changed.

    Raises:
        TypeError: it is not a str.
        ValueError: `span_group_cls` is given, and neither it nor the registry knows a name.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a span-group spec is a str such as 'default,step', not {spec!r}")
    if span_group_cls is not None:
        snapshot = _groups.SpanRegistry._snapshot()
        if _groups.resolve_with_class(spec, span_group_cls, snapshot)[1]:
            span_group_cls.resolve(spec)  # raises the class's own error


def follow_spec(spec: str, span_group_cls: Any) -> None:
    """set_span_group_spec() for setup_telemetry, which knows of the older group classes."""
    global _spec, _span_group_cls, _reported
    check_spec(spec)
    with _LOCK:
        _spec, _span_group_cls, _reported = spec, span_group_cls, None
        message = _resolve()
    if message:
        logger.warning(message)


def refresh_enabled_span_groups() -> None:
    """Resolve the live spec again. Does nothing without one; the registry calls it after every change."""
    with _LOCK:
        message = _resolve()
    if message:
        logger.warning(message)


_groups.SpanRegistry._on_change = staticmethod(refresh_enabled_span_groups)


def enabled_span_groups() -> frozenset[str]:
    """The names that are enabled now."""
    return gate.enabled()


def pending_span_groups() -> frozenset[str]:
    """The names in the live spec that no library has registered."""
    return _pending


def set_pp_trace_carrier(carrier: dict[str, Any] | None) -> None:
    """Keep the trace carrier of the pipeline-parallel peer, for this process."""
    global _PP_TRACE_CARRIER
    _PP_TRACE_CARRIER = carrier


def get_pp_trace_carrier() -> dict[str, Any] | None:
    """The object last given to set_pp_trace_carrier, None before."""
    return _PP_TRACE_CARRIER


def _resolve() -> str | None:
    """Publish what the spec names; returns a warning that has not been given yet. Call with _LOCK held."""
    global _pending, _reported
    spec = _spec
    if spec is None:
        return None
    snapshot = _groups.SpanRegistry._snapshot()
    span_group_cls = _span_group_cls
    if span_group_cls is None:
        enabled, pending = snapshot.resolve(spec)
    else:
        enabled, pending = _groups.resolve_with_class(spec, span_group_cls, snapshot)
    if _spec is not spec:
        return None  # a signal handler has set something else
    _pending = pending
    _publish(enabled)
    message = _warning(spec, enabled, pending, snapshot, span_group_cls)
    condition = (message.split(":")[0], pending) if message else None
    if condition == _reported:
        return None
    _reported = condition
    return message


def _warning(
    spec: str,
    enabled: frozenset[str],
    pending: frozenset[str],
    snapshot: _groups.RegistrySnapshot,
    span_group_cls: Any,
) -> str | None:
    if not any(_groups.spec_tokens(spec)):
        return None
    if span_group_cls is None and not snapshot.groups:
        return (
            f"span groups {spec!r} enable nothing: no library has registered any span groups in this process yet "
            "(they take effect when one does)"
        )
    if pending:
        known = sorted(snapshot.all_groups() | getattr(span_group_cls, "ALL_GROUPS", frozenset()))
        presets = sorted({*snapshot.all_presets(), *getattr(span_group_cls, "_PRESETS", ())})
        return (
            f"span groups {', '.join(sorted(pending))} in {spec!r}: no library registered in this process provides "
            f"them (ignored until one does). Registered groups: {', '.join(known) or 'none'}; "
            f"presets: {', '.join(presets)}; namespaces: {', '.join(sorted(snapshot.groups)) or 'none'}"
        )
    if not enabled:
        return f"span groups {spec!r}: resolved to no span groups, since no member is registered"
    return None
