"""Stand-in for NeMo RL's first integration: RLSpanGroup, and wrappers that put spans into buckets.

The library is optional. Its manager is driven by a generator manager of the consumer's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from opentelemetry.context import Context

from . import callforms
from .callforms import Body, Run, Site

try:
    from nemo.lens.helpers import managed_span as _managed_span
    from nemo.lens.helpers import safe_set_span_attributes as _safe_set_span_attributes
    from nemo.lens.helpers import span_cm, trace_fn
    from nemo.lens.state import is_span_group_enabled
except ImportError:
    from .fallbacks import is_span_group_enabled, span_cm, trace_fn
    from .fallbacks import managed_span as _managed_span
    from .fallbacks import safe_set_span_attributes as _safe_set_span_attributes

try:
    from nemo.lens.groups import SpanGroup
    from nemo.lens.propagation import extract_context, inject_context
except ImportError:

    class SpanGroup:  # type: ignore[no-redef]
        ALL_GROUPS: frozenset[str] = frozenset()

    def inject_context(carrier: dict[str, str]) -> None:
        """Nothing to hand on."""

    def extract_context(carrier: dict[str, str]) -> Context:
        return Context()


class RLSpanGroup(SpanGroup):
    ROLLOUT = "rollout"
    GENERATION = "generation"
    LOGPROB = "logprob"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    POLICY_UPDATE = "policy_update"
    REFERENCE_POLICY = "reference_policy"
    DATA_PROCESSING = "data_processing"
    EFFICIENCY = "efficiency"

    _OWN = frozenset(
        {
            ROLLOUT,
            GENERATION,
            LOGPROB,
            REWARD,
            ADVANTAGE,
            POLICY_UPDATE,
            REFERENCE_POLICY,
            DATA_PROCESSING,
            EFFICIENCY,
        }
    )
    ALL_GROUPS = SpanGroup.ALL_GROUPS | _OWN
    _PRESETS: ClassVar = {
        "default": frozenset({"job", "checkpoint", "evaluate"}),
        "per_step": frozenset({"checkpoint", "evaluate", "model_init", "step"}) | _OWN,
        "all": ALL_GROUPS,
    }


ENV_PREFIX = "NEMO_RL_OTEL"
BUCKETS = {
    "generation": "productive",
    "reward": "productive",
    "policy_update": "productive",
    "data_processing": "overhead",
    "checkpoint": "overhead",
    "logprob": "overhead",
    "advantage": "overhead",
}


def initialize(generation: str, rank: int = 0, world_size: int = 1, **sinks: Any) -> Any | None:
    """Called in the driver and in each actor's constructor."""
    try:
        import nemo.lens
    except ImportError:
        return None
    config = nemo.lens.NemoLensConfig.from_env(
        prefix=ENV_PREFIX, fallback_prefix="NEMO_LENS", span_group_cls=RLSpanGroup
    )
    # Looked up at the call, since this consumer's tests replace it.
    return nemo.lens.setup_telemetry(config, rank=rank, world_size=world_size, **sinks)


def safe_set_span_attributes(span: Any, attributes: dict[str, Any]) -> None:
    """The library's raises where there is no span."""
    if span is not None:
        _safe_set_span_attributes(span, attributes)


@contextmanager
def managed_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> Iterator[Any]:
    attributes = dict(attributes)
    if group in BUCKETS:
        attributes["rl.bucket"] = BUCKETS[group]
    with _managed_span(group, name, tracer=tracer, **attributes) as span:
        yield span


@contextmanager
def efficiency_span(label: str, tracer: Any = None, on_driver: bool = True) -> Iterator[Any]:
    """An idle phase; only the driver's count as idle time of the job."""
    attributes = {"rl.efficiency.category": label.rpartition(".")[2]}
    if on_driver:
        attributes["rl.bucket"] = "idle"
    with _managed_span(RLSpanGroup.EFFICIENCY, f"rl.{label}", tracer=tracer, **attributes) as span:
        yield span


def bucket_trace_fn(group: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with managed_span(group, name):
                return function(*args, **kwargs)

        return wrapper

    return decorator


class LENS:
    """The wrappers under the library's names."""

    is_span_group_enabled = staticmethod(is_span_group_enabled)
    managed_span = staticmethod(managed_span)
    safe_set_span_attributes = staticmethod(safe_set_span_attributes)
    span_cm = staticmethod(span_cm)
    trace_fn = staticmethod(trace_fn)


class DIRECT(LENS):
    managed_span = staticmethod(_managed_span)


def _efficiency(site: Site) -> Run:
    def run(body: Body) -> Any:
        label = site.name.removeprefix("rl.")
        with efficiency_span(label, tracer=site.tracer, on_driver="rl.bucket" in site.attributes):
            return body()

    return run


def _collector(site: Site) -> Run:
    """A worker thread whose parent comes in a carrier."""
    run = callforms.with_tracer_and_dict(LENS, site)

    def start(body: Body) -> Any:
        carrier: dict[str, str] = {}
        inject_context(carrier)

        def work() -> Any:
            with callforms.current_in(extract_context(carrier)):
                return run(body)

        return callforms.in_thread(work)

    return start


def _vllm_method(site: Site) -> Run:
    class VllmGeneration:
        @bucket_trace_fn(site.group, site.name)
        def generate(self, body: Body) -> Any:
            return body()

    return VllmGeneration().generate


def call_site(site: Site) -> Run:
    # The wrapper adds the bucket by itself.
    given = {key: value for key, value in site.attributes.items() if key != "rl.bucket"}
    if site.group == "efficiency":
        return _efficiency(site)
    site.attributes = given
    if site.name == "rl.grpo.collect_rollouts" and "rl.weight_version" in given:
        return _collector(site)
    if site.forms[0] == "consumer-defined decorator over managed_span":
        return _vllm_method(site)
    if site.forms[0] == "with, tracer keyword (possibly None)":
        return callforms.with_tracer(DIRECT, site)
    if site.forms[0] == "generator wrapper around managed_span":
        shape = callforms.with_tracer if "with, parenthesised multi-item" in site.forms else None
        return (shape or callforms.with_tracer_and_dict)(LENS, site)
    if site.forms[0] == "decorator trace_fn on method":
        return callforms.traced_method(LENS, site)
    return callforms.traced_function(LENS, site)
