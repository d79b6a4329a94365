"""The OTLP exporters: chosen and checked by the standard variables, and made to say clearly when they can't deliver."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger("lensfast.providers")

_PROTOCOLS = ("grpc", "http/protobuf", "http/json")
NEEDS_SDK = (
    "exporting needs the OpenTelemetry SDK and its OTLP exporters: pip install 'lensfast[sdk]' "
    "(nemo-lens[sdk] has the same packages)"
)


def _otlp_variable(signal: str, setting: str) -> tuple[str, str]:
    """(name, value) of the standard variable that holds for a signal; `("", "")` if none is set."""
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{setting}", f"OTEL_EXPORTER_OTLP_{setting}"):
        if text := os.environ.get(name, "").strip():
            return name, text
    return "", ""


def _resolve_otlp_protocol(signal: str) -> str:
    """`"grpc"`, `"http/protobuf"` or `"http/json"`, from the standard variables; grpc in place of anything else."""
    protocol = _otlp_variable(signal, "PROTOCOL")[1].lower()
    return protocol if protocol in _PROTOCOLS else "grpc"


def check_variables(signals: list[str]) -> None:
    """Say once what is wrong with the variables of OTLP: the exporters say it once each, unclearly, or when they send.

    Raises:
        ValueError: a value can't be used.
    """
    logged = set()
    for signal in signals:
        name, text = _otlp_variable(signal, "PROTOCOL")
        if name and text.lower() not in _PROTOCOLS and name not in logged:
            logger.warning("%s=%r is not one of %s; grpc is used", name, text, ", ".join(_PROTOCOLS))
            logged.add(name)
        over_http = _resolve_otlp_protocol(signal).startswith("http/")
        name, text = _otlp_variable(signal, "TIMEOUT")
        if name and not _is_number(text):
            raise ValueError(f"{name} must be a number of seconds, not {text!r}")
        if name and not 0 < float(text) < math.inf:
            logger.warning("%s=%r: nothing can be delivered in that time", name, text)
        name, text = _otlp_variable(signal, "COMPRESSION")
        allowed = ("none", "gzip", "deflate") if over_http else ("none", "gzip")
        if name and text.lower() not in allowed:
            problem = f"{name} must be one of {', '.join(allowed)}, not {text!r}"
            if not over_http:
                raise ValueError(problem)
            logger.warning("%s; nothing is compressed", problem)
        if not (_otlp_variable(signal, "ENDPOINT")[1] or "http://").startswith("http://"):
            for setting in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
                name, text = _otlp_variable(signal, setting)
                if name and not os.path.exists(text):
                    raise ValueError(f"{name} must be the path of a PEM file; there is no {text!r}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def build_exporter(signal: str, what: str, module: str, class_name: str) -> Any:
    """The OTLP exporter of a signal; where only the other transport's package is installed, that one."""
    protocol = _resolve_otlp_protocol(signal)
    transports = ["http", "grpc"] if protocol.startswith("http/") else ["grpc", "http"]
    missing: ImportError | None = None
    for transport in transports:
        try:
            exporters = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{transport}.{module}")
        except ImportError as error:
            missing = missing or error
            continue
        if missing is not None:
            logger.warning("the OTLP exporter for %s is not installed; %s is used", protocol, transport)
        options = {}
        if transport == "grpc" and _otlp_variable(signal, "COMPRESSION")[1].lower() == "none":
            # A standard value, which this exporter does not know.
            options["compression"] = importlib.import_module("grpc").Compression.NoCompression
        try:
            exporter = getattr(exporters, class_name)(**options)
        except Exception as error:
            raise ValueError(
                f"the OTLP {transport} exporter for {what} could not be built: {error}. Check the variables "
                f"OTEL_EXPORTER_OTLP_[{signal.upper()}_]..., such as ENDPOINT (http://localhost:4317) and HEADERS"
            ) from error
        return _report_outages(exporter, transport, signal, what)
    raise ImportError(f"{NEEDS_SDK} ({missing})") from missing


class _ExporterChatter(logging.Filter):
    """Keeps what an OTLP exporter logs in our own export calls, for the one message that we log instead."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()
        self._unencodable: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(self._here, "listening", False):
            return True
        message = record.getMessage()
        if record.name != _ENCODER_LOGGER:
            # The longest is the one with the reason.
            self._here.heard = max(self._here.heard, message, key=len)
        elif (key := message.split(":")[0]) not in self._unencodable:
            self._unencodable.add(key)
            logger.warning("%s; it is left out, wherever OTLP can't carry it (this is logged once)", message)
        return False

    def listen(self, export: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
        """(result of export, why it failed); the result is None if it raised."""
        self._here.listening, self._here.heard = True, ""
        try:
            result = export(*args, **kwargs)
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"
        else:
            return result, self._here.heard.rstrip(".") or "no reason given"
        finally:
            self._here.listening = False


_ENCODER_LOGGER = "opentelemetry.exporter.otlp.proto.common._internal"
_chatter = _ExporterChatter()
# collector -> what does not reach it -> how many exports were lost. Kept in a forked child, which need not repeat it.
_outages: dict[str, dict[str, int]] = {}
_collectors: dict[str, str] = {}  # what -> its collector


def _report_outages(exporter: Any, transport: str, signal: str, what: str) -> Any:
    """Make `exporter` log one clear message when a collector stops answering, and one when it answers again."""
    modules = ("exporter", "trace_exporter", "metric_exporter", "_log_exporter")
    for name in (_ENCODER_LOGGER, *(f"opentelemetry.exporter.otlp.proto.{transport}.{module}" for module in modules)):
        module_logger = logging.getLogger(name)
        if _chatter not in module_logger.filters:
            # First, before the SDK's own filter drops what it takes for a repetition.
            module_logger.filters.insert(0, _chatter)
    original = exporter.export
    exporter.unencodable = 0  # spans that were left out of exports
    endpoint = getattr(exporter, "_endpoint", None) or "its endpoint"
    collector = _collectors[what] = urlsplit(endpoint).netloc or endpoint
    _reconnect_after_fork(exporter)

    def export(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result, reason = _chatter.listen(original, batch, *args, **kwargs)
        if getattr(result, "name", "") != "SUCCESS" and isinstance(batch, list | tuple) and signal == "traces":
            sendable = encode(batch)[1]
            if len(sendable) < len(batch):
                exporter.unencodable += len(batch) - len(sendable)
                if not sendable:
                    return result
                result, reason = _chatter.listen(original, sendable)
        if getattr(result, "name", "") == "SUCCESS":
            if what in _outages.get(collector, ()) and (outage := _outages.pop(collector, None)):
                logger.warning("%s reach %s again; %d exports were lost", what, endpoint, sum(outage.values()))
            return result
        outage = {what: 0}
        # One outage is one message, whichever exporter meets it first; setdefault() is atomic.
        if _outages.setdefault(collector, outage) is outage:
            logger.warning(
                "%s do not reach %s over OTLP %s: %s. What is sent there is lost until it answers (this is logged "
                "once). Endpoint and protocol are set by OTEL_EXPORTER_OTLP_ENDPOINT (such as http://localhost:4317 "
                "for grpc, http://localhost:4318 for http/protobuf) and OTEL_EXPORTER_OTLP_PROTOCOL (grpc or "
                "http/protobuf)",
                what, endpoint, transport, reason,
            )  # fmt: skip
        outage = _outages.get(collector, outage)
        outage[what] = outage.get(what, 0) + 1
        return result

    exporter.export = export
    return exporter


def forget_collectors() -> None:
    """A new set-up begins: its exporters are not those of an earlier one."""
    _collectors.clear()


def report_undelivered(whats: list[str], timeout_ms: int) -> None:
    """Log what did not leave within the time for shutdown, unless that collector's outage has been logged."""
    untold = [what for what in whats if _collectors.get(what) not in _outages]
    collectors = sorted({_collectors[what] for what in untold if what in _collectors})
    _outages.update({collector: {} for collector in collectors})
    if untold:
        logger.warning(
            "%s could not be delivered within %d ms and are lost: the collector at OTEL_EXPORTER_OTLP_ENDPOINT (%s) "
            "does not answer, or needs a longer shutdown(timeout_ms=...)",
            " and ".join(untold), timeout_ms, ", ".join(collectors) or "or another exporter",
        )  # fmt: skip


def _reconnect_after_fork(exporter: Any) -> None:
    """A forked child that wrote into its parent's HTTP connections would garble both processes' requests."""
    if hasattr(os, "register_at_fork") and hasattr(exporter, "_export_lock"):
        # Older exporters for gRPC hold this while they send.
        this_exporter = weakref.ref(exporter)

        def unlock() -> None:
            if (present := this_exporter()) is not None:
                present._export_lock = threading.Lock()

        os.register_at_fork(after_in_child=unlock)
    client = getattr(exporter, "_client", None)
    session = getattr(exporter, "_session", None) or getattr(getattr(client, "_transport", None), "_session", None)
    if session is None or not hasattr(os, "register_at_fork"):
        return
    inherited = []
    this_session = weakref.ref(session)

    def reconnect() -> None:
        adapters = getattr(this_session(), "adapters", {})
        for prefix, adapter in list(adapters.items()):
            adapters[prefix] = copy.copy(adapter)  # has its settings, not its connections
            inherited.append(adapter)  # closing them takes locks that the parent may have held

    os.register_at_fork(after_in_child=reconnect)


def encode(spans: Sequence[Any]) -> tuple[bytes, list[Any]]:
    """A request of those of `spans` that OTLP can carry, and which they are, by the stock encoder.

    A name with a lone surrogate, for example, would cost the whole batch. What is left out is logged.
    """
    encoder = importlib.import_module("opentelemetry.exporter.otlp.proto.common.trace_encoder")

    def encoded(batch: Sequence[Any]) -> tuple[bytes | None, str]:
        return _chatter.listen(lambda: encoder.encode_spans(batch).SerializeToString())

    request, reason = encoded(spans)
    if request is not None:
        return request, list(spans)
    one_by_one = [(span, encoded([span])[0]) for span in spans]
    sendable = [span for span, alone in one_by_one if alone is not None]
    logger.warning(
        "%d spans can't be encoded as OTLP and are dropped, such as %r (%s)",
        len(spans) - len(sendable), next((span.name for span, alone in one_by_one if alone is None), ""),
        reason,
    )  # fmt: skip
    # Requests, one after the other, are one.
    return b"".join(alone for _, alone in one_by_one if alone is not None), sendable
