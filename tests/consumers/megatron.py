"""Stand-in for Megatron-LM's integration, generations with MegatronSpanGroup: the first one, main, and the MIMO series.

Each file of it imports the five functions under private names, at its top, with its own no-ops in their stead.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from opentelemetry.context import Context

from . import callforms
from .callforms import Body, Run, Site

try:
    from nemo.lens.helpers import managed_span as _otel_managed_span
    from nemo.lens.helpers import safe_set_span_attributes as _otel_safe_set_attrs
    from nemo.lens.helpers import span_cm as _otel_span_cm
    from nemo.lens.helpers import trace_fn as _otel_trace_fn
    from nemo.lens.state import is_span_group_enabled as _otel_sg_enabled
except ImportError:
    # Main takes the library's own no-ops where there are some.
    try:
        from nemo.lens.fallbacks import is_span_group_enabled as _otel_sg_enabled
        from nemo.lens.fallbacks import managed_span as _otel_managed_span
        from nemo.lens.fallbacks import safe_set_span_attributes as _otel_safe_set_attrs
        from nemo.lens.fallbacks import span_cm as _otel_span_cm
        from nemo.lens.fallbacks import trace_fn as _otel_trace_fn
    except ImportError:
        from .fallbacks import is_span_group_enabled as _otel_sg_enabled
        from .fallbacks import managed_span as _otel_managed_span
        from .fallbacks import safe_set_span_attributes as _otel_safe_set_attrs
        from .fallbacks import span_cm as _otel_span_cm
        from .fallbacks import trace_fn as _otel_trace_fn

try:
    from nemo.lens.groups import SpanGroup

    class MegatronSpanGroup(SpanGroup):
        MICROBATCH = "microbatch"
        LAYER = "layer"
        COMMUNICATION = "communication"
        ACTIVATION_OFFLOAD = "activation_offload"
        DATA_LOADING = "data_loading"
        INFERENCE = "inference"

        ALL_GROUPS = SpanGroup.ALL_GROUPS | {
            MICROBATCH,
            LAYER,
            COMMUNICATION,
            ACTIVATION_OFFLOAD,
            DATA_LOADING,
            INFERENCE,
        }
        _PRESETS: ClassVar = {
            "default": frozenset({SpanGroup.JOB, SpanGroup.CHECKPOINT, SpanGroup.EVALUATE, INFERENCE}),
            "per_step": ALL_GROUPS - {MICROBATCH, LAYER, ACTIVATION_OFFLOAD},
            "all": ALL_GROUPS,
        }

    class MegatronMainSpanGroup(MegatronSpanGroup):
        FIRST_ITERATION = "first_iteration"
        TRACE_REGION = "trace_region"

        ALL_GROUPS = MegatronSpanGroup.ALL_GROUPS | {FIRST_ITERATION, TRACE_REGION}
        _PRESETS: ClassVar = {
            "default": MegatronSpanGroup._PRESETS["default"] | {FIRST_ITERATION},
            "per_step": MegatronSpanGroup._PRESETS["per_step"] | {FIRST_ITERATION},
            "profiling": ALL_GROUPS,
            "all": ALL_GROUPS,
        }

except ImportError:

    class MegatronSpanGroup:  # type: ignore[no-redef]
        """What is there without the library."""

        STEP = "step"

        @classmethod
        def resolve(cls, spec: str) -> frozenset[str]:
            raise RuntimeError("span groups need nemo-lens: pip install nemo-lens")

    MegatronMainSpanGroup = MegatronSpanGroup


ENV_PREFIX = "MEGATRON_OTEL"


def initialize(
    generation: str, rank: int = 0, world_size: int = 1, args: Namespace | None = None, **sinks: Any
) -> Any | None:
    """Set up from MEGATRON_OTEL_*, else NEMO_LENS_*; command line arguments win. None without the library."""
    try:
        from nemo.lens.config import NemoLensConfig
        from nemo.lens.handle import setup_telemetry
    except ImportError:
        return None
    newer = generation in {"megatron-main", "megatron-mimo"}
    config = NemoLensConfig.from_env(
        prefix=ENV_PREFIX,
        fallback_prefix="NEMO_LENS",
        span_group_cls=MegatronMainSpanGroup if newer else MegatronSpanGroup,
    )
    if args is not None:
        config.enabled = config.enabled or args.otel_enabled
        config.service_name = args.otel_service_name or config.service_name
        config.span_groups = args.otel_span_groups or config.span_groups
    return setup_telemetry(
        config,
        rank=rank,
        world_size=world_size,
        resource_attributes={"dl.tensor_parallel.size": 1, "dl.pipeline_parallel.size": 1},
        **sinks,
    )


_INSTRUMENTS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def record_training_metrics(handle: Any, loss: Callable[[], float], iteration_s: float) -> None:
    """`loss` reads the value off the device, so it is called on exporting ranks only."""
    if handle is None or not handle.is_exporting:
        return
    instruments = _INSTRUMENTS.get(handle.meter)
    if instruments is None:
        instruments = _INSTRUMENTS[handle.meter] = {
            "loss": handle.meter.create_gauge("megatron.train.loss"),
            "iteration": handle.meter.create_histogram("megatron.train.iteration_time", unit="s"),
        }
    instruments["loss"].set(loss())
    instruments["iteration"].record(iteration_s)


def _keyword_attribute(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        if "iteration" in site.attributes:
            group, iteration = MegatronSpanGroup.STEP, site.attributes["iteration"]
            with _otel_managed_span(group, site.name, iteration=iteration) as span:
                callforms.note(lens, site, span)
                return body()
        goodput = site.attributes["is_goodput_span"]
        with _otel_managed_span(site.group, site.name, is_goodput_span=goodput):
            return body()

    return run


def _keyword_and_dict(lens: Any, site: Site) -> Run:
    dotted = dict(site.attributes)
    goodput = dotted.pop("is_goodput_span")

    def run(body: Body) -> Any:
        with (
            callforms.timer(site.name),
            _otel_managed_span(site.group, site.name, is_goodput_span=goodput, **dotted) as span,
        ):
            if "current-span attribute" in site.forms:
                callforms.note_on_current(lens, site)
            else:
                callforms.note(lens, site, span)
            return body()

    return run


def _built_before_entry(lens: Any, site: Site) -> Run:
    dotted = dict(site.attributes)
    goodput = dotted.pop("is_goodput_span")

    def run(body: Body, first: bool = True) -> Any:
        manager = (
            _otel_managed_span(site.group, site.name, is_goodput_span=goodput, **dotted) if first else nullcontext()
        )
        with callforms.timer("loop"), manager:
            return body()

    return run


def _custom_op(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        with _otel_span_cm(site.name, tracer=site.tracer, **site.attributes):
            return body()

    return run


def _linked(lens: Any, site: Site) -> Run:
    """Receive from the previous pipeline stage: a span that knows the sender's, and is never current."""

    def run(body: Body) -> Any:
        if not _otel_sg_enabled(site.group) or site.tracer is None:
            return body()
        from nemo.lens.distributed import create_linked_span
        from nemo.lens.state import get_pp_trace_carrier, set_pp_trace_carrier

        set_pp_trace_carrier(site.carrier)  # done by whoever broadcasts, before the schedule runs
        span = create_linked_span(site.tracer, site.name, remote_carrier=get_pp_trace_carrier(), **site.attributes)
        try:
            return body()
        finally:
            span.end()

    return run


def _request(lens: Any, site: Site) -> Run:
    """The inference server: threads, and the caller's trace context from the request's headers."""
    run = callforms.span_cm_or_nothing(lens, site)
    headers: dict[str, str] = {}

    def handle(body: Body) -> Any:
        if not _otel_sg_enabled(site.group):
            return run(body)
        from nemo.lens.propagation import extract_context

        with callforms.current_in(extract_context(headers)):
            return run(body)

    return lambda body: callforms.in_thread(lambda: handle(body))


def _manual(lens: Any, site: Site) -> Run:
    """Roots start from an empty context; the start-up span began before telemetry did."""
    root = "linked span" in site.forms or "backdated span" in site.forms
    return callforms.manual(
        lens, site, parent=lambda: Context() if root else None, starts="backdated span" in site.forms
    )


def _trace_bridge_operation(lens: Any, site: Site) -> Run:
    """The MIMO bridge's decorator."""

    def decorator(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _otel_sg_enabled(site.group):
                return method(self, *args, **kwargs)
            with _otel_managed_span(site.group, site.name, **self.attributes()):
                return method(self, *args, **kwargs)

        return wrapper

    class Bridge:
        def attributes(self) -> dict[str, Any]:
            assert _otel_sg_enabled(site.group), "computed although the group is off"
            return site.attributes

        @decorator
        def operation(self, body: Body) -> Any:
            return body()

    assert Bridge.operation.__wrapped__ is not None
    return Bridge().operation


LENS = SimpleNamespace(
    is_span_group_enabled=_otel_sg_enabled,
    managed_span=_otel_managed_span,
    safe_set_span_attributes=_otel_safe_set_attrs,
    span_cm=_otel_span_cm,
    trace_fn=_otel_trace_fn,
)
SHAPES = {
    "with, positional only": callforms.positional,
    "with, one-entry dict expansion": callforms.dict_expansion,
    "with, plain keyword attribute": _keyword_attribute,
    "with, keyword and dict expansion together": _keyword_and_dict,
    "object built before entry": _built_before_entry,
    "conditional expression with span_cm": callforms.span_cm_or_nothing,
    "span_cm plain": _custom_op,
    "explicit gate then with": callforms.gate_then_with,
    "decorator trace_fn on module function": callforms.traced_function,
    "decorator trace_fn on method": callforms.traced_method,
    "consumer-defined decorator over managed_span": _trace_bridge_operation,
    "manual start_span": _manual,
    "linked span": _linked,
    "backdated span": callforms.backdated,
}


def call_site(site: Site) -> Run:
    shape = _request if "computed span name" in site.forms and site.group == "inference" else SHAPES[site.forms[0]]
    return shape(LENS, site)
