"""Setting telemetry up, and shutting it down."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from . import state
from ._backend import TRUE_WORDS
from ._spans import PACKAGE_SCOPE
from .config import NemoLensConfig
from .groups import BuiltInGroups
from .strategies import get_export_strategy

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

    from ._export import SpanStats
    from .strategies import ExportStrategy

logger = logging.getLogger(__name__)

_INITIALIZED = False
# What this process set up, if it exports, for its workers: the handle, and by which arguments.
_exporting_as: tuple[TelemetryHandle, NemoLensConfig, int, int, Mapping[str, Any] | None] | None = None

# Called with seconds, before the providers are shut down: by then, those who hold ended spans back are to give them up.
_before_shutdown: list[Callable[[float], None]] = []


def __getattr__(name: str) -> Any:
    # Imported when asked for: it is half of what `import lensfast` would take.
    if name == "metrics":
        from opentelemetry import metrics

        globals()["metrics"] = metrics
        return metrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _metrics() -> Any:
    return globals().get("metrics") or __getattr__("metrics")


class TelemetryHandle:
    """What setup_telemetry returns."""

    def __init__(self, tracer: Tracer, meter: Meter, is_exporting: bool = False) -> None:
        self._tracer = tracer
        self._meter = meter
        self.is_exporting = is_exporting
        """Whether this process exports. Metrics are worth recording only if it does."""
        self._closed = False
        self._pid = os.getpid()
        self._waiting_closers: list[_Closer] = []

    @property
    def tracer(self) -> Tracer:
        """The tracer named `nemo.lens`."""
        return self._tracer

    @property
    def meter(self) -> Meter:
        """The meter named `nemo.lens`."""
        return self._meter

    def stats(self) -> SpanStats:
        """What has become of this process's sampled spans: a SpanStats with the counts `ended`, `queued`, `exported`,
        `failed` and `dropped`, all 0 where it does not export. `ended` is the sum of the others. Thread-safe.

        Raises:
            ImportError: the SDK is not installed.
        """
        from . import providers
        from ._export import SpanStats

        processor = providers.export_processor
        return SpanStats() if processor is None else processor.stats()

    def shutdown(self, timeout_ms: int = 5000) -> None:
        """Deliver what is queued and shut the global providers down.

        Spans that are still open are ended and marked `nemo.span.truncated`. A second call does nothing. Never raises,
        and returns within about `timeout_ms`, also if the collector does not answer; what could not be delivered by
        then is logged as lost. Groups stay enabled. Runs by itself at interpreter exit. A forked child delivers its
        spans and log records, but no metrics: those are its parent's, counted again. Thread-safe.

        Args:
            timeout_ms: milliseconds for all providers together.
        """
        if self._closed:
            return
        self._closed = True
        providers: dict[str, Any] = {"spans": trace.get_tracer_provider()}
        if os.getpid() == self._pid:
            providers["metrics"] = _metrics().get_meter_provider()
        try:
            from opentelemetry._logs import get_logger_provider

            providers["log records"] = get_logger_provider()
        except ImportError:
            pass
        deadline = time.monotonic() + timeout_ms / 1000
        for hand_over in _before_shutdown:
            hand_over(timeout_ms / 1000 / 5)
        waiting = [closer for closer in self._waiting_closers if closer.is_alive()]
        closers = {what: waiting.pop() if waiting else _Closer() for what in providers}
        for what, closer in closers.items():
            closer.close(what, providers[what], timeout_ms)
        for closer in closers.values():
            if closer.is_alive():
                closer.join(max(0.0, deadline - time.monotonic()))
        if late := [what for what, closer in closers.items() if closer.is_alive()]:
            from ._otlp import report_undelivered

            report_undelivered(late, timeout_ms)


class _OffHandle(TelemetryHandle):
    """The handle of a process that does not export: there may be a provider, but it is somebody else's."""

    def stats(self) -> SpanStats:
        """All 0."""
        from ._export import SpanStats

        return SpanStats()

    def shutdown(self, timeout_ms: int = 5000) -> None:
        """Nothing to do."""


class _Closer(threading.Thread):
    """Shuts one provider down in a thread of its own: the SDK's flush takes a timeout and may not keep it."""

    def __init__(self) -> None:
        super().__init__(name="lensfast-shutdown", daemon=True)
        self._begin = threading.Event()

    def close(self, what: str, provider: Any, timeout_ms: int) -> None:
        """Begin. The thread may have been started, and wait for this."""
        self._job = what, provider, timeout_ms
        self._begin.set()
        if not self.is_alive():
            try:
                self.start()
            except RuntimeError:
                self.run()  # no thread is to be had: better late than lost

    def run(self) -> None:
        self._begin.wait()
        what, provider, timeout_ms = self._job
        for method, arguments in (("force_flush", {"timeout_millis": timeout_ms}), ("shutdown", {})):
            function = getattr(provider, method, None)
            if function is None:
                continue
            try:
                function(**arguments)
            except Exception:
                logger.warning("%s of the provider of %s failed", method, what, exc_info=True)


def ensure_run_id(config: NemoLensConfig, environ: Mapping[str, str] | None = None) -> str:
    """The job's run id: `config.run_id`, filled in if it is empty.

    By SLURM_JOB_ID, else TORCHELASTIC_RUN_ID (torchrun's --rdzv-id; not its default, "none"), else 12 random hex
    digits, which differ from rank to rank.

    Args:
        config: changed if its run_id is empty.
        environ: default: os.environ.
    """
    if not config.run_id:
        environ = os.environ if environ is None else environ
        elastic = environ.get("TORCHELASTIC_RUN_ID", "").strip()
        if elastic == "none":
            elastic = ""
        config.run_id = environ.get("SLURM_JOB_ID") or elastic or uuid.uuid4().hex[:12]
    return config.run_id


def _should_export(
    config: NemoLensConfig, rank: int, world_size: int, override: Callable[..., Any] | None = None
) -> bool:
    return bool((override or get_export_strategy(config.export_strategy))(config, rank, world_size))


def setup_telemetry(
    config: NemoLensConfig,
    rank: int | None = None,
    world_size: int | None = None,
    resource_attributes: Mapping[str, Any] | None = None,
    span_exporter: Any = None,
    metric_reader: Any = None,
    export_strategy: ExportStrategy | None = None,
    _allow_reinit: bool = False,
) -> TelemetryHandle:
    """Set this process's telemetry up, once, before training starts.

    On an exporting rank: providers, exporters and propagators are installed and the groups of `config.span_groups` are
    enabled. On every other rank, or if `config.enabled` is false, nothing is installed, no group is enabled, and no
    span object is ever made. Everything is validated before anything is installed.

    Groups: names are looked up in `config._span_group_cls` and in SpanRegistry, live. Without a class those groups of
    SpanGroup count that no library has registered, unless the caller is of the nightly generation, which has none (see
    resource_attributes).

    Args:
        config: its run_id is filled in if empty.
        rank, world_size: this process's place in the job, for the export strategy and the resource. Where neither is
            given, RANK and WORLD_SIZE of the environment say it, as torchrun sets them; where those are not set or
            make no sense (a warning says what), and for the one that is not given beside the other, it is 0 of 1.
            Callers of the nightly generation have no ranks: the environment is not asked.
        resource_attributes: added to the resource. With `nv.dl.rank` among them (how nightly callers say the rank),
            or in OTEL_RESOURCE_ATTRIBUTES, the resource has that generation's attributes in place of `dl.rank`.
        span_exporter: an SDK SpanExporter to use in place of `config.exporter`.
        metric_reader: an SDK MetricReader, likewise.
        export_strategy: called as (config, rank, world_size) in place of the one that `config` names.

    Raises:
        RuntimeError: telemetry has already been set up in this process.
        TypeError: `config` lacks a field, or one that is going to be used is of the wrong type.
        ValueError: unknown exporter, export strategy or (with a group class) group, or an environment variable with a
            value that can't be used; the text names it and what is allowed.
        ImportError: the SDK is not installed.

    Not thread-safe: call it from the main thread.
    """
    global _INITIALIZED, _exporting_as
    try:
        # By its fields: one of nemo.lens's own, made before install(), will do, or a stand-in of the caller's.
        NemoLensConfig.check(config)
    except AttributeError as error:
        raise TypeError(f"setup_telemetry() takes a NemoLensConfig, not {type(config).__name__}: {error}") from None
    span_group_cls = getattr(config, "_span_group_cls", None)
    if _INITIALIZED and config.enabled and not _allow_reinit:
        raise RuntimeError(
            "telemetry has already been initialised in this process; call setup_telemetry() once, and keep its handle"
        )
    ensure_run_id(config)
    rank, world_size, resource_attributes = _place_in_job(config, rank, world_size, resource_attributes)
    exporting = _should_export(config, rank, world_size, export_strategy) and config.enabled
    if exporting and os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() in TRUE_WORDS:
        logger.info("telemetry stays off: OTEL_SDK_DISABLED is set")
        exporting = False
    if not exporting:
        nobody = config.enabled and config.export_strategy == "single_rank" and config.export_rank >= world_size
        if nobody and rank == 0 and export_strategy is None:
            logger.warning(
                "no rank exports: export_rank (<PREFIX>_EXPORT_RANK) is %d and world_size is %d",
                config.export_rank, world_size,
            )  # fmt: skip
        state.set_enabled_span_groups(frozenset())
        _INITIALIZED = _INITIALIZED or config.enabled
        _exporting_as = None
        return _OffHandle(trace.get_tracer(PACKAGE_SCOPE), _metrics().get_meter(PACKAGE_SCOPE))

    from .providers import build_providers, nightly_rank

    state.check_spec(config.span_groups, span_group_cls)
    reaches_exporter = build_providers(config, rank, world_size, resource_attributes, span_exporter, metric_reader)
    built_in = BuiltInGroups if nightly_rank(resource_attributes) is None else None
    state.follow_spec(config.span_groups, span_group_cls or built_in)
    _INITIALIZED = True
    handle = TelemetryHandle(trace.get_tracer(PACKAGE_SCOPE), _metrics().get_meter(PACKAGE_SCOPE), reaches_exporter)
    _exporting_as = handle, config, rank, world_size, resource_attributes
    _shut_down_at_exit(handle)
    return handle


def _place_in_job(
    config: NemoLensConfig, rank: int | None, world_size: int | None, resource_attributes: Mapping[str, Any] | None
) -> tuple[int, int, Mapping[str, Any] | None]:
    """The rank, the world size and the resource attributes that setup_telemetry goes by."""
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    if config.enabled and any(os.environ.get(name, "").strip() for name in names):
        from .providers import nightly_rank
        from .resources.torchrun import detect_rank, detect_torchrun

        if nightly_rank(resource_attributes) is None:
            place = detect_rank() if rank is None and world_size is None else None
            if place:
                rank, world_size = place
                logger.info("this is rank %d of %d, by RANK and WORLD_SIZE of the environment", rank, world_size)
            if place or os.environ.get("TORCHELASTIC_RUN_ID", "").strip():
                resource_attributes = {**detect_torchrun(), **(resource_attributes or {})}
    return rank or 0, 1 if world_size is None else world_size, resource_attributes


def _shut_down_at_exit(handle: TelemetryHandle) -> None:
    if sys.version_info[:3] in {(3, 12, 0), (3, 12, 1)}:
        # These two start no thread in atexit functions.
        handle._waiting_closers = [_Closer(), _Closer(), _Closer()]
        for closer in handle._waiting_closers:
            closer.start()
    atexit.register(handle.shutdown)
    if not hasattr(os, "fork"):
        return
    # Children of multiprocessing leave by os._exit, past atexit; forked ones begin by dropping all finalizers.
    from multiprocessing import util

    def finalize(handle: TelemetryHandle) -> None:
        util.Finalize(handle, handle.shutdown, exitpriority=0)

    finalize(handle)
    util.register_after_fork(handle, finalize)
