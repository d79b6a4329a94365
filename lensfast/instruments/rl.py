"""Metrics of reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import MetricGroup, MetricSpec

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

_RL = MetricGroup(
    "rl",
    (
        MetricSpec("reward_mean", "rl.reward.mean", description="Mean reward of a batch of rollouts"),
        MetricSpec("kl_divergence", "rl.kl_divergence", description="KL divergence of the policy from the reference"),
        MetricSpec("policy_loss", "rl.policy_loss", description="Loss of the policy"),
        MetricSpec("value_loss", "rl.value_loss", description="Loss of the value function"),
        MetricSpec("entropy", "rl.entropy", description="Entropy of the policy"),
        MetricSpec("response_length_mean", "rl.response_length.mean", description="Mean tokens of a response"),
        MetricSpec("generation_duration_ms", "rl.generation.duration_ms", "histogram", "ms", "Time to generate"),
        MetricSpec("rollout_duration_ms", "rl.rollout.duration_ms", "histogram", "ms", "Time to collect rollouts"),
        MetricSpec("grad_norm", "rl.grad_norm", description="Norm of the gradient"),
        MetricSpec("learning_rate", "rl.learning_rate", description="Learning rate"),
        MetricSpec(
            "throughput_tokens_per_sec", "rl.throughput.tokens_per_sec", unit="{token}/s", description="Tokens a second"
        ),
    ),
)
_RL_INSTRUMENTS = _RL.instruments


def record_rl_metrics(
    meter: Meter,
    reward_mean: float | None = None,
    kl_divergence: float | None = None,
    policy_loss: float | None = None,
    value_loss: float | None = None,
    entropy: float | None = None,
    response_length_mean: float | None = None,
    generation_duration_ms: float | None = None,
    rollout_duration_ms: float | None = None,
    grad_norm: float | None = None,
    learning_rate: float | None = None,
    throughput_tokens_per_sec: float | None = None,
) -> None:
    """Record what is not None. Thread-safe; a failure is logged once and never raises.

    The durations (milliseconds) are histograms, the others gauges. The positional order is that of nemo-lens 0.1.0,
    with the three parameters of 0.2 after it; 0.2 has them before the durations, so pass those by keyword.
    """
    _RL.record(
        meter,
        {
            "reward_mean": reward_mean,
            "kl_divergence": kl_divergence,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "response_length_mean": response_length_mean,
            "generation_duration_ms": generation_duration_ms,
            "rollout_duration_ms": rollout_duration_ms,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "throughput_tokens_per_sec": throughput_tokens_per_sec,
        },
    )
