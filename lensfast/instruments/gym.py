"""Metrics of NeMo Gym."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import MetricGroup, MetricSpec

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

# fmt: off
GYM_DURATION_BOUNDARIES_MS = (
    100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 120000, 300000, 600000, 1200000, 1800000, 3600000,
)
# fmt: on


def _duration(key: str, name: str, description: str) -> MetricSpec:
    return MetricSpec(key, name, "histogram", "ms", description, bucket_boundaries=GYM_DURATION_BOUNDARIES_MS)


_GYM = MetricGroup(
    "gym",
    (
        _duration("server_request_duration_ms", "gym.server.request_duration_ms", "Time to answer a server request"),
        _duration("rollout_duration_ms", "gym.rollout.duration_ms", "Time to collect a rollout"),
        _duration("verify_duration_ms", "gym.verify.duration_ms", "Time to verify a rollout"),
        MetricSpec("verify_success_rate", "gym.verify.success_rate", description="Share of verifications that succeed"),
        MetricSpec("active_servers", "gym.servers.active", description="Servers that are running"),
    ),
)
_GYM_INSTRUMENTS = _GYM.instruments


def record_gym_metrics(
    meter: Meter,
    server_request_duration_ms: float | None = None,
    rollout_duration_ms: float | None = None,
    verify_duration_ms: float | None = None,
    verify_success_rate: float | None = None,
    active_servers: int | None = None,
) -> None:
    """Record what is not None. Thread-safe; a failure is logged once and never raises.

    The durations (milliseconds) are histograms with the boundaries GYM_DURATION_BOUNDARIES_MS, as in the nightly
    nemo-lens (releases have OpenTelemetry's, which end at 10 s), the others gauges.
    """
    _GYM.record(
        meter,
        {
            "server_request_duration_ms": server_request_duration_ms,
            "rollout_duration_ms": rollout_duration_ms,
            "verify_duration_ms": verify_duration_ms,
            "verify_success_rate": verify_success_rate,
            "active_servers": active_servers,
        },
    )
