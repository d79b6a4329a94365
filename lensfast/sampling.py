"""A sampler that takes whole ranks in or out."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace

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
        """An SDK SamplingResult, whatever the parent's decision was; a bool where the SDK is not installed.

        The parent's trace state is passed on, as by the SDK's samplers.
        """
        try:
            from opentelemetry.sdk.trace.sampling import Decision, SamplingResult
        except ImportError:
            return self._sampled
        above = trace.get_current_span(parent_context).get_span_context()
        state = above.trace_state if above is not None and above.is_valid else None
        if self._sampled:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, state)
        return SamplingResult(Decision.DROP, None, state)

    def get_description(self) -> str:
        return f"RankAwareSampler(rank={self._rank}, rate={self._rate})"
