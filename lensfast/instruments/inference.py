"""Metrics of inference requests, named by OpenTelemetry's GenAI conventions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import MetricGroup, MetricSpec

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

_INFERENCE = MetricGroup(
    "inference",
    (
        MetricSpec(
            "server_request_duration", "gen_ai.server.request.duration", "histogram", "s", "Time to answer a request"
        ),
        MetricSpec("token_usage", "gen_ai.client.token.usage", "histogram", "{token}", "Tokens of a request"),
    ),
)
_INFERENCE_INSTRUMENTS = _INFERENCE.instruments


def record_inference_metrics(
    meter: Meter,
    request_duration_s: float | None = None,
    model: str | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    provider_name: str = "nemo",
    operation_name: str = "text_completion",
) -> None:
    """Record one request. What is None is skipped. Thread-safe; a failure is logged once and never raises.

    Args:
        meter: such as TelemetryHandle.meter.
        request_duration_s: seconds, into `gen_ai.server.request.duration`.
        model: the attribute `gen_ai.request.model` of all points, unless empty.
        input_tokens, output_tokens: numbers of tokens, into `gen_ai.client.token.usage`.
        provider_name, operation_name: the attributes `gen_ai.provider.name` and `gen_ai.operation.name`.
    """
    attributes = {"gen_ai.operation.name": operation_name, "gen_ai.provider.name": provider_name}
    if model:
        attributes["gen_ai.request.model"] = str(model)
    _INFERENCE.record(meter, {"server_request_duration": request_duration_s}, attributes)
    for token_type, tokens in (("input", input_tokens), ("output", output_tokens)):
        _INFERENCE.record(meter, {"token_usage": tokens}, {**attributes, "gen_ai.token.type": token_type})
