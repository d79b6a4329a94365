"""Log records of the program as OpenTelemetry log records, with the trace and span they were made in."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

from opentelemetry import context as context_api

from ._spans import report_failure

__all__ = ["setup_logging_bridge"]

logger = logging.getLogger(__name__)

# OpenTelemetry's processors set this in the context while they export.
_SENDING = getattr(context_api, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")


def setup_logging_bridge(logger_name: str = "", level: int = logging.INFO) -> None:
    """Export what a logger and its descendants log, through the provider of setup_telemetry's `logs_enabled`.

    Call it after setup_telemetry, which does not call it. Does nothing in a process whose global logger provider is not
    the SDK's. A second call for the same logger sets the level anew; bridging a logger and its ancestor exports records
    twice. Records of OpenTelemetry itself, and those made while telemetry is being sent, are not exported: each would
    lead to the next. Not thread-safe: call it from the main thread; logging goes on from any.

    Args:
        logger_name: default: the root logger, so everything.
        level: the least severe level to export. The logger's own level, WARNING by default, still holds.

    Raises:
        TypeError, ValueError: `level` is no level.
    """
    try:
        from opentelemetry._logs import get_logger_provider
        from opentelemetry.sdk._logs import LoggerProvider
    except ImportError:
        return
    provider = get_logger_provider()
    if not isinstance(provider, LoggerProvider):
        logger.debug("no log records are exported: setup_telemetry() has not set logs up in this process")
        return
    target = logging.getLogger(logger_name)
    try:
        handler_class = _handler_class()
        handler = next((h for h in target.handlers if _feeds(h, handler_class, provider)), None)
        if handler is None:
            with warnings.catch_warnings():
                # The SDK's is deprecated in favour of one in a package of its own, and does all that is needed.
                warnings.simplefilter("ignore", DeprecationWarning)
                handler = handler_class(logger_provider=provider)
            # At exit it would start a thread, which some Pythons refuse with a traceback; the provider flushes itself.
            handler.flush = _do_nothing
    except Exception as failure:
        report_failure("bridge to OpenTelemetry the logger", logger_name or "root", failure)
        return
    handler.setLevel(level)
    handler.addFilter(_is_no_echo)
    target.addHandler(handler)


def _handler_class() -> Any:
    handler_class = getattr(importlib.import_module("opentelemetry.sdk._logs"), "LoggingHandler", None)
    return handler_class or importlib.import_module("opentelemetry.instrumentation.logging.handler").LoggingHandler


def _do_nothing() -> None:
    """In place of a flush."""


def _feeds(handler: logging.Handler, handler_class: Any, provider: Any) -> bool:
    return isinstance(handler, handler_class) and getattr(handler, "_logger_provider", None) is provider


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Whether a record is the program's, not one that exporting it would make again."""
    return not context_api.get_value(_SENDING) and not record.name.startswith("opentelemetry.")
