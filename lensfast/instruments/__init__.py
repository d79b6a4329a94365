"""Metrics: fixed sets for inference, NeMo Gym and reinforcement learning, and a registry for a library's own."""

from .inference import record_inference_metrics
from .registry import (
    METRIC_KINDS,
    OBSERVABLE_METRIC_KINDS,
    MetricSpec,
    create_metric_instruments,
    record_metrics,
    register_metric_group,
    registered_metric_groups,
    unregister_metric_group,
)

__all__ = [
    "METRIC_KINDS",
    "OBSERVABLE_METRIC_KINDS",
    "MetricSpec",
    "create_metric_instruments",
    "record_inference_metrics",
    "record_metrics",
    "register_metric_group",
    "registered_metric_groups",
    "unregister_metric_group",
]
