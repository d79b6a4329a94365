"""Builds the OpenTelemetry providers of an exporting rank. Needs the SDK: `pip install 'lensfast[sdk]'`."""

from __future__ import annotations

import importlib
import logging
import os
import random
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from opentelemetry.context import Context

from . import package_info
from ._backend import compiled
from ._otlp import (
    NEEDS_SDK,
    _resolve_otlp_protocol,  # noqa: F401  (where the original has it)
    build_exporter,
    check_variables,
    forget_collectors,
)
from .helpers import _scoped_attributes, safe_set_span_attributes
from .resources import detect_resource
from .resources.attributes import get_otel_resource_attributes
from .sampling import RankAwareSampler
from .semconv.resources import normalize_resource_attributes

if TYPE_CHECKING:
    from .config import NemoLensConfig

logger = logging.getLogger(__name__)

_VALID_EXPORTERS = frozenset({"otlp", "console"})
_DEFAULT_METRIC_INTERVAL_MS = 10_000
TRUNCATED = "nemo.span.truncated"


class SeedIndependentIdGenerator:
    """Trace and span ids from a private source that the OS seeds.

    Trainers seed `random` alike on every rank; ids drawn from it would collide. A forked child draws from a new seed.
    """

    drawn_in_c = True  # native spans draw in the same way, without a call (not those of a subclass)

    def __init__(self) -> None:
        self._random = random.Random()
        if hasattr(os, "register_at_fork"):
            reseed = weakref.WeakMethod(self._reseed)
            os.register_at_fork(after_in_child=lambda: (method := reseed()) and method())

    def _reseed(self) -> None:
        self._random = random.Random()

    def generate_span_id(self) -> int:
        """A random 64-bit integer that is not 0."""
        return self._random.getrandbits(64) or self.generate_span_id()

    def generate_trace_id(self) -> int:
        """A random 128-bit integer that is not 0."""
        return self._random.getrandbits(128) or self.generate_trace_id()

    def is_trace_id_random(self) -> bool:
        """True: W3C Trace Context's random flag may be set."""
        return True


class _ScopedSpanAttributes:
    """Span processor: gives new spans the attributes of the enclosing span_attributes() blocks."""

    def on_start(self, span: Any, parent_context: Context | None = None) -> None:
        scoped = _scoped_attributes.get()
        if scoped:
            present = span.attributes or {}
            safe_set_span_attributes(span, {key: value for key, value in scoped.items() if key not in present})

    def _on_ending(self, span: Any) -> None:
        """Nothing to do."""

    def on_end(self, span: Any) -> None:
        """Nothing to do."""

    _on_ending.does_nothing = on_end.does_nothing = True  # type: ignore[attr-defined]

    def shutdown(self) -> None:
        """Nothing to do."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class _OpenSpanCloser:
    """Span processor: ends and marks what is still open at shutdown, so that a killed job's outer spans arrive.

    It stands before the batch processor, which then exports what this ends. A forked child forgets the spans that are
    its parent's.
    """

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}
        # Native spans enter and leave this by themselves.
        self.open_spans = None if compiled is None else compiled.OpenSpans()
        self._lock = threading.RLock()  # a signal handler or a finalizer may make a span in the middle of this
        self._closed = False
        if hasattr(os, "register_at_fork"):
            forget = weakref.WeakMethod(self._forget)
            os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._open = {}
        if self.open_spans is not None:
            self.open_spans.forget()

    def on_start(self, span: Any, parent_context: Context | None = None) -> None:
        with self._lock:
            if not self._closed:
                self._open[span.context.span_id] = span

    def _on_ending(self, span: Any) -> None:
        """Nothing to do."""

    _on_ending.does_nothing = True  # type: ignore[attr-defined]

    def on_end(self, span: Any) -> None:
        with self._lock:
            self._open.pop(span.context.span_id, None)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """True: a flush ends nothing."""
        return True

    def shutdown(self) -> None:
        """End every open span, innermost first, with the attribute and event `nemo.span.truncated`."""
        with self._lock:
            spans = list(reversed(self._open.values()))
            self._open = {}
            self._closed = True
        if self.open_spans is not None:
            spans += self.open_spans.close()
        for span in spans:
            try:
                span.set_attribute(TRUNCATED, True)
                span.add_event(TRUNCATED, {f"{TRUNCATED}.reason": "still open at telemetry shutdown"})
                span.end()
            except Exception:
                logger.debug("could not end the open span %r", span, exc_info=True)


# The processor that exports this process's spans, once there is one: it has their counts.
export_processor: Any = None


def build_noop_providers() -> None:
    """Make the API's no-op tracer and meter providers the global ones.

    OpenTelemetry lets a process set each of them once, so nothing can be exported afterwards; setup_telemetry
    therefore does not call this when telemetry is off, since the API does nothing by itself.
    """
    trace.set_tracer_provider(trace.NoOpTracerProvider())
    metrics.set_meter_provider(metrics.NoOpMeterProvider())


def build_providers(
    config: NemoLensConfig,
    rank: int = 0,
    world_size: int = 1,
    resource_attributes: Mapping[str, Any] | None = None,
    span_exporter: Any = None,
    metric_reader: Any = None,
) -> bool:
    """Build the providers that `config` asks for and make them global.

    Everything is built before anything is installed, so that an error leaves the process as it was.

    Args:
        config: the job's configuration; run_id should be filled in.
        rank, world_size: this process's place in the job.
        resource_attributes: added to the resource; they beat what comes from `config`, detected ones beat them. With
            `nv.dl.rank` among them, or in OTEL_RESOURCE_ATTRIBUTES, the resource is that of the nightly generation.
        span_exporter, metric_reader: used in place of those that `config.exporter` names.

    Returns:
        Whether anything will reach an exporter: False if a no-op provider is in the way.

    Raises:
        ImportError: the SDK or the OTLP exporters are not installed.
        ValueError: an unknown exporter, or an environment variable that an exporter can't work with.
    """
    try:
        from opentelemetry.propagate import set_global_textmap
        from opentelemetry.propagators.composite import CompositePropagator
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise ImportError(f"{NEEDS_SDK} ({error})") from error
    from opentelemetry.baggage.propagation import W3CBaggagePropagator

    metrics_wanted = config.metrics_enabled and not _meter_provider_is_taken()
    signals = {
        "traces": config.traces_enabled and not span_exporter,
        "metrics": metrics_wanted and metric_reader is None,
        "logs": config.logs_enabled,
    }
    built_here = [signal for signal, wanted in signals.items() if wanted]
    if built_here and config.exporter not in _VALID_EXPORTERS:
        _reject_exporter(config.exporter)
    if config.exporter == "otlp":
        check_variables(built_here)
    if config.traces_enabled:
        why_sdk_spans = _why_sdk_spans(config)
        _check_batch_variables("OTEL_BSP", signals["traces"] and config.exporter == "otlp" and why_sdk_spans is None)
    if config.logs_enabled:
        _check_batch_variables("OTEL_BLRP")
    metric_interval_ms = _metric_interval_ms() if signals["metrics"] else 0
    forget_collectors()
    resource = _build_resource(config, rank, world_size, resource_attributes)
    processors: list[Any] = []
    if config.traces_enabled:
        exporter = span_exporter or _build_span_exporter(config)
        processors = [
            _ScopedSpanAttributes(),
            _OpenSpanCloser(),
            _export_processor(exporter, why_sdk_spans is None, span_exporter),
        ]
    if signals["metrics"]:
        metric_exporter = _build_metric_exporter(config)
        metric_reader = PeriodicExportingMetricReader(metric_exporter, export_interval_millis=metric_interval_ms)
        _discard_after_fork(metric_exporter)
    logger_provider = _build_logger_provider(config, resource) if config.logs_enabled else None

    global export_processor
    export_processor = processors[-1] if processors else None
    exporting = False
    if config.traces_enabled:
        sampler: Any = RankAwareSampler(rank, world_size, config.export_sample_rate) if config.sampler_enabled else None
        ids: Any = SeedIndependentIdGenerator()
        provider_class = TracerProvider
        if why_sdk_spans is None:
            from ._native import TracerProvider as provider_class  # noqa: N813
        # The handle shuts down, in bounded time; the SDK's own exit hook may wait for a dead collector.
        provider = provider_class(sampler=sampler, resource=resource, shutdown_on_exit=False, id_generator=ids)
        exporting |= _install_tracer_provider(provider, processors)
        if trace.get_tracer_provider() is provider:
            # What nobody has chosen would be noticed by its cost only.
            level = logging.WARNING if (why_sdk_spans or "").startswith("opentelemetry-sdk ") else logging.INFO
            logger.log(level, "spans are native" if why_sdk_spans is None else f"spans are the SDK's: {why_sdk_spans}")
    if metrics_wanted:
        meter_provider = MeterProvider([metric_reader], resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(meter_provider)
        if export_processor is not None:
            from ._export import report_as_metrics

            report_as_metrics(meter_provider, export_processor)
        exporting = True
    if logger_provider is not None:
        from opentelemetry._logs import set_logger_provider

        set_logger_provider(logger_provider)
        exporting = True
    set_global_textmap(CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()]))
    return exporting


def _why_sdk_spans(config: NemoLensConfig) -> str | None:
    """Why spans are not native; None if they are."""
    if not getattr(config, "native_spans", True):  # a stand-in for a config may be of an older form
        return "native_spans is off (<PREFIX>_NATIVE_SPANS)"
    from ._native import why_not

    return why_not()


def _export_processor(exporter: Any, native: bool, given: Any) -> Any:
    """The processor that has ended spans exported; native ones for OTLP wait for it as bytes."""
    from ._export import CountingSpanProcessor, EncodingSpanProcessor, can_encode, pass_encoded

    if native and given is None and pass_encoded(exporter) and can_encode():
        return EncodingSpanProcessor(exporter)
    return CountingSpanProcessor(exporter, native)


def _install_tracer_provider(provider: Any, processors: list[Any]) -> bool:
    """Make `provider` global or, where another SDK provider already is, export through that one."""
    present: Any = getattr(trace, "_TRACER_PROVIDER", None)
    if present is None:
        trace.set_tracer_provider(provider)
        present = trace.get_tracer_provider()
    elif hasattr(present, "add_span_processor"):
        logger.warning(
            "a TracerProvider is already installed in this process, and OpenTelemetry allows only one: spans go "
            "through it, with its resource and sampler, to lensfast's exporter as well"
        )
    else:
        logger.warning(
            "no span can be exported: %s is already installed as the global tracer provider, and OpenTelemetry does "
            "not let it be replaced; call setup_telemetry() before it is set",
            type(present).__name__,
        )
        return False
    for processor in processors:
        present.add_span_processor(processor)
    return True


def _meter_provider_is_taken() -> bool:
    present: Any = getattr(importlib.import_module("opentelemetry.metrics._internal"), "_METER_PROVIDER", None)
    if present is not None:
        logger.warning(
            "lensfast exports no metrics: %s is already installed as the global meter provider, and OpenTelemetry "
            "allows only one; metrics go where it sends them",
            type(present).__name__,
        )
    return present is not None


def nightly_rank(resource_attributes: Mapping[str, Any] | None) -> Any:
    """The rank as callers of the nightly generation, or their launchers, say it; None for callers of the older ones.

    That generation has no parameter for it, so this attribute is what it is known by.
    """
    rank = (resource_attributes or {}).get("nv.dl.rank", get_otel_resource_attributes().get("nv.dl.rank"))
    return None if rank == "" else rank


def _build_resource(
    config: NemoLensConfig, rank: int, world_size: int, resource_attributes: Mapping[str, Any] | None
) -> Any:
    """The resource, in the form of the generation that the caller's attributes speak.

    0.1.0 and 0.2: dl.rank and dl.world_size from the arguments. Nightly, which is where `nv.dl.rank` is given or
    inherited: neither of them, SLURM as that generation detects it, and numbers of OTEL_RESOURCE_ATTRIBUTES as such.
    """
    from opentelemetry.sdk.resources import Resource

    given = resource_attributes or {}
    inherited = normalize_resource_attributes(get_otel_resource_attributes())
    said_rank = nightly_rank(given)
    nightly = said_rank is not None
    attributes: dict[str, Any] = {
        **(inherited if nightly else {"dl.rank": rank, "dl.world_size": world_size}),
        "service.name": config.service_name,
        "service.version": package_info.__version__,
    }
    if config.run_id:
        attributes["nemo.run.id"] = config.run_id
        # Only here may there be one already: that of OTEL_RESOURCE_ATTRIBUTES.
        attributes["service.instance.id"] = (
            attributes.get("service.instance.id") or f"{config.run_id}-rank{said_rank if nightly else rank}"
        )
    for key, value in (
        ("nemo.user.id", config.user),
        ("wandb.entity", config.wandb_entity),
        ("wandb.project", config.wandb_project),
        ("deployment.environment", os.environ.get("DEPLOYMENT_ENV") or os.environ.get("ENVIRONMENT")),
    ):
        if value:
            attributes[key] = value
    detected = detect_resource(os.environ if nightly else None)
    return Resource.create({**attributes, **given, **detected})


def _reject_exporter(name: object) -> None:
    raise ValueError(
        f"Unknown exporter type {name!r}; allowed: {', '.join(sorted(_VALID_EXPORTERS))} "
        "(the variable <PREFIX>_EXPORTER or NemoLensConfig.exporter)"
    )


def _compact_jsonl_formatter(item: Any) -> str:
    """One JSON object on one line."""
    return f"{item.to_json(indent=None)}\n"


def _build_span_exporter(config: NemoLensConfig) -> Any:
    if config.exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(formatter=_compact_jsonl_formatter)
    if config.exporter != "otlp":
        _reject_exporter(config.exporter)
    return build_exporter("traces", "spans", "trace_exporter", "OTLPSpanExporter")


def _build_metric_exporter(config: NemoLensConfig) -> Any:
    if config.exporter == "console":
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter

        return ConsoleMetricExporter(formatter=_compact_jsonl_formatter)
    if config.exporter != "otlp":
        _reject_exporter(config.exporter)
    return build_exporter("metrics", "metrics", "metric_exporter", "OTLPMetricExporter")


def _discard_after_fork(metric_exporter: Any) -> None:
    """A forked child's reader would go on sending, at each interval, what the parent has measured."""
    if not hasattr(os, "register_at_fork"):
        return
    from opentelemetry.sdk.metrics.export import MetricExportResult

    this_exporter = weakref.ref(metric_exporter)

    def discard() -> None:
        if (present := this_exporter()) is not None:
            present.export = lambda *args, **kwargs: MetricExportResult.SUCCESS

    os.register_at_fork(after_in_child=discard)


def _build_log_exporter(config: NemoLensConfig) -> Any:
    if config.exporter == "console":
        export = importlib.import_module("opentelemetry.sdk._logs.export")
        exporter = getattr(export, "ConsoleLogRecordExporter", None) or export.ConsoleLogExporter
        return exporter(formatter=_compact_jsonl_formatter)
    return build_exporter("logs", "log records", "_log_exporter", "OTLPLogExporter")


def _build_logger_provider(config: NemoLensConfig, resource: Any) -> Any:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(_build_log_exporter(config)))
    return provider


def _metric_interval_ms() -> int:
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL")
    if text is None:
        return _DEFAULT_METRIC_INTERVAL_MS
    value = _integer(text)
    if value is None or value <= 0:
        raise ValueError(f"OTEL_METRIC_EXPORT_INTERVAL must be a positive integer of milliseconds, not {text!r}")
    return value


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _check_batch_variables(prefix: str, encoded: bool = False) -> None:
    """Raise for what the SDK would refuse, and explain less. What it can't read it replaces by its default, with a log.

    Args:
        prefix: of the variables.
        encoded: whether it is for the queue of encoded spans, which has other defaults, and no conflict between them.

    Raises:
        ValueError: a number that is not positive, or a batch larger than the queue.
    """
    values, given = {}, set()
    for name, default in (("SCHEDULE_DELAY", 5000), ("MAX_QUEUE_SIZE", 2048), ("MAX_EXPORT_BATCH_SIZE", 512)):
        read = _integer(os.environ.get(f"{prefix}_{name}", ""))
        values[name] = value = default if read is None else read
        if read is not None:
            given.add(name)
        if value <= 0:
            raise ValueError(f"{prefix}_{name} must be a positive integer, not {value}")
    queue, batch = values["MAX_QUEUE_SIZE"], values["MAX_EXPORT_BATCH_SIZE"]
    if batch > queue and (not encoded or {"MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE"} <= given):
        raise ValueError(
            f"{prefix}_MAX_EXPORT_BATCH_SIZE ({batch}, default 512) must not be larger than "
            f"{prefix}_MAX_QUEUE_SIZE ({queue}, default 2048)"
        )


class _ExportResultTrackingSpanExporter:
    """Passes everything on to an exporter, and remembers whether an export did not succeed."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.failed = False

    def export(self, spans: Any) -> Any:
        try:
            result = self._exporter.export(spans)
        except BaseException:
            self.failed = True
            raise
        self.failed |= getattr(result, "name", "") != "SUCCESS"
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


# More than the arguments of a command can name; the queue would drop what is beyond its size.
_EMITTER_QUEUE_SIZE = 2**18


def _build_span_emitter_provider(
    service_name: str, span_exporter: Any = None
) -> tuple[Any, _ExportResultTrackingSpanExporter]:
    """A provider that is not global, for a process that only hands in spans that it was told of.

    Args:
        service_name: the resource's service.name; the rest is detected.
        span_exporter: default: the one that NEMO_LENS_EXPORTER names.

    Returns:
        The provider, and its exporter, whose `failed` is true once an export did not succeed.

    Raises:
        ImportError: the SDK or the OTLP exporter is not installed.
        ValueError: an unknown exporter, or an environment variable that can't be worked with.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(f"{NEEDS_SDK} ({error})") from error
    from .config import NemoLensConfig

    config = NemoLensConfig.from_env()
    if span_exporter is None:
        if config.exporter == "otlp":
            check_variables(["traces"])
        span_exporter = _build_span_exporter(config)
    _check_batch_variables("OTEL_BSP")
    exporter: Any = _ExportResultTrackingSpanExporter(span_exporter)
    resource = Resource.create(
        {
            **normalize_resource_attributes(get_otel_resource_attributes()),
            **detect_resource(os.environ),
            "service.name": service_name,
        }
    )
    ids: Any = SeedIndependentIdGenerator()
    provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=ids)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_EMITTER_QUEUE_SIZE))
    return provider, exporter
