"""A sampler that takes whole ranks in or out."""

from __future__ import annotations

from typing import Any

from .strategies import rank_is_sampled


class RankAwareSampler:
    """Samples every span of the rank, or none: decided once, by the same rule as the export strategy `sampled`."""

    def __init__(self, rank: int, world_size: int, sample_rate: float = 1.0) -> None:
        self._rank = rank
        self._rate = sample_rate
        self._sampled = rank_is_sampled(rank, sample_rate)

    def should_sample(
        self,
        parent_context: Any = None,
        trace_id: int = 0,
        name: str = "",
        kind: Any = None,
        attributes: Any = None,
        links: Any = None,
        trace_state: Any = None,
    ) -> Any:
        """An SDK SamplingResult, whatever the parent's decision was; a bool where the SDK is not installed."""
        try:
            from opentelemetry.sdk.trace.sampling import Decision, SamplingResult
        except ImportError:
            return self._sampled
        if self._sampled:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        return f"RankAwareSampler(rank={self._rank}, rate={self._rate})"
