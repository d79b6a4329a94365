"""Stand-in for a small library that follows the documentation's example of registering its own group."""

from __future__ import annotations

from typing import Any

from nemo.lens.config import NemoLensConfig
from nemo.lens.groups import SpanRegistry
from nemo.lens.handle import setup_telemetry
from nemo.lens.helpers import managed_span, safe_set_span_attributes, trace_fn

from . import callforms
from .callforms import Run, Site

ENV_PREFIX = "NEMO_LENS"
GROUPS = {"my_new_group"}
PRESETS = {"per_step": {"my_new_group"}}

SpanRegistry.register("mylib", GROUPS, PRESETS)


def initialize(generation: str, **sinks: Any) -> Any:
    return setup_telemetry(NemoLensConfig.from_env(), **sinks)


class LENS:
    managed_span = staticmethod(managed_span)
    safe_set_span_attributes = staticmethod(safe_set_span_attributes)
    trace_fn = staticmethod(trace_fn)


def call_site(site: Site) -> Run:
    return callforms.positional(LENS, site)
