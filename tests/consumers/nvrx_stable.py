"""Stand-in for the resiliency extension's stable branch: plain base groups, and a worker process for checkpoints."""

from __future__ import annotations

from typing import Any

# Not nemo.lens.fallbacks: those do nothing also where the library is installed.
from . import callforms
from . import resolved as _otel_fallbacks
from .callforms import Body, Run, Site

ENV_PREFIX = "NEMO_LENS"


def initialize(generation: str, **sinks: Any) -> Any | None:
    """In the launcher, from the environment."""
    if not _otel_fallbacks.NEMO_LENS_AVAILABLE:
        return None
    from nemo.lens.config import NemoLensConfig
    from nemo.lens.handle import setup_telemetry

    return setup_telemetry(NemoLensConfig.from_env(), **sinks)


def bootstrap(span_groups: str) -> dict[str, Any]:
    """What a spawned checkpoint worker is given: plain values, which pickle."""
    from nemo.lens.state import is_span_group_enabled

    enabled = [group for group in ("job", "checkpoint") if is_span_group_enabled(group)]
    return {"span_groups": span_groups, "resolved": enabled}


def initialize_worker(given: dict[str, Any], **sinks: Any) -> Any:
    """In the worker, which exports on its own and takes its groups as they were resolved."""
    from nemo.lens.config import NemoLensConfig
    from nemo.lens.handle import setup_telemetry
    from nemo.lens.state import set_enabled_span_groups

    config = NemoLensConfig(enabled=True, span_groups=given["span_groups"], metrics_enabled=False)
    handle = setup_telemetry(config, **sinks)
    set_enabled_span_groups(frozenset(given["resolved"]))
    return handle


def _category(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        with _otel_fallbacks.managed_span(site.group, site.name, category=site.attributes["category"]):
            return body()

    return run


SHAPES = {
    "with, one-entry dict expansion": callforms.dict_expansion,
    "with, plain keyword attribute": _category,
    "manual start_span": callforms.manual,
    "backdated span": callforms.backdated,
}


def call_site(site: Site) -> Run:
    return SHAPES[site.forms[0]](_otel_fallbacks, site)
