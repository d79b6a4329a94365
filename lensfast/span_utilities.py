"""Spans for intervals that have already happened."""

from __future__ import annotations

import decimal
import logging
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

from ._spans import PACKAGE_SCOPE, current_tracer, report_failure
from .helpers import safe_set_span_attributes
from .state import is_span_group_enabled

logger = logging.getLogger(__name__)

# A context of our own: the program's may round, or trap.
_EXACT = decimal.Context(prec=60, rounding=decimal.ROUND_DOWN, traps=[])
_LARGEST = 2**63 // 10**9


def emit_span(
    tracer: Tracer | None,
    name: str,
    start_epoch_seconds: float | str | Decimal,
    end_epoch_seconds: float | str | Decimal,
    *,
    group: str | None = None,
    context: Context | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Span | None:
    """Record a span with explicit times, ended and never current.

    Args:
        tracer: None: the tracer `nemo.lens` of the provider that is global now.
        name: the span's name.
        start_epoch_seconds, end_epoch_seconds: seconds since the epoch; text and Decimal keep every digit, the rest
            below a nanosecond is cut off. An end before the start (clock skew) is moved to the start, logged, and told
            in the attributes inverted.skew, .start_epoch_seconds, .end_epoch_seconds and .delta_seconds.
        group: if given and disabled, nothing is done and None is returned.
        context: the parent's; default: the current one.
        attributes: filtered as by safe_set_span_attributes.

    Raises:
        ValueError: a time is not a finite number, or is centuries away.

    Returns:
        The ended span; None also where the tracer fails, which is logged. Thread-safe.
    """
    if group is not None and not is_span_group_enabled(group):
        return None
    start = _seconds(start_epoch_seconds, "start_epoch_seconds")
    end = _seconds(end_epoch_seconds, "end_epoch_seconds")
    all_attributes = dict(attributes or {})
    if end < start:
        logger.warning(
            "span %r ends %s s before it starts: possible clock skew; its end is moved to its start",
            name,
            _EXACT.subtract(start, end),
        )
        all_attributes["inverted.skew"] = True
        all_attributes["inverted.start_epoch_seconds"] = str(start)
        all_attributes["inverted.end_epoch_seconds"] = str(end)
        all_attributes["inverted.delta_seconds"] = str(_EXACT.subtract(start, end))
        end = start
    try:
        if tracer is None:
            tracer = current_tracer(PACKAGE_SCOPE)
        span = tracer.start_span(name, context=context, start_time=_nanoseconds(start))
        safe_set_span_attributes(span, all_attributes)
        span.end(end_time=_nanoseconds(end))
    except Exception as failure:
        report_failure("emit span", name, failure)
        return None
    return span


def _seconds(value: float | str | Decimal, argument: str) -> Decimal:
    try:
        # By way of str, 1.1 s is 1.1 s and not the nearest binary fraction.
        seconds = value if isinstance(value, Decimal) else Decimal(str(value).strip())
    except InvalidOperation:
        seconds = Decimal("NaN")
    # Beyond 64 bits of nanoseconds there is no time that a span could have.
    if not seconds.is_finite() or seconds.copy_abs() > _LARGEST:
        raise ValueError(f"{argument} must be finite: a number of seconds since the epoch, not {value!r}")
    return seconds


def _nanoseconds(seconds: Decimal) -> int:
    return int(seconds.scaleb(9, _EXACT))
