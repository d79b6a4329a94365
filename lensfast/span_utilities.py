"""Spans for intervals that have already happened, and when this process began."""

from __future__ import annotations

import decimal
import logging
import math
import os
import time
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


def linux_process_create_time(
    *,
    stat_text: str | None = None,
    uptime_text: str | None = None,
    read_time: float | None = None,
    stat_path: str = "/proc/self/stat",
    uptime_path: str = "/proc/uptime",
    clock_ticks_per_second: int | None = None,
) -> float:
    """When this process was created, in seconds since the epoch, to about 10 ms: a start for emit_span.

    Args:
        stat_text, uptime_text: in place of what the files at `stat_path` and `uptime_path` hold.
        read_time: when the uptime was read; default: now.
        clock_ticks_per_second: default: the system's.

    Raises:
        RuntimeError: a file can't be read: there is no Linux's /proc here.
        ValueError: the contents are not Linux's, or the clock does not tick.
    """
    stat = _read(stat_path) if stat_text is None else stat_text
    uptime = _read(uptime_path) if uptime_text is None else uptime_text
    if read_time is None:
        read_time = time.time()
    if clock_ticks_per_second is None:
        clock_ticks_per_second = os.sysconf("SC_CLK_TCK")
    if clock_ticks_per_second <= 0:
        raise ValueError(f"clock_ticks_per_second must be positive, not {clock_ticks_per_second!r}")
    try:
        # The second field is the program's name in parentheses, with whatever it may hold; the third follows the last.
        ticks = int(stat.rpartition(")")[2].split()[22 - 3])
        up = float(uptime.split()[0])
        if not math.isfinite(up):
            raise ValueError(up)
    except (ValueError, IndexError):
        raise ValueError(f"{stat_path} and {uptime_path} are not as Linux has them: {stat!r}, {uptime!r}") from None
    return read_time - (up - ticks / clock_ticks_per_second)


def _read(path: str) -> str:
    try:
        # A program's name is bytes of any kind.
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise RuntimeError(f"{path} can't be read, by which Linux tells when a process began: {error}") from error
