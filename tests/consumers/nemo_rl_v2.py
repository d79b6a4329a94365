"""Stand-in for NeMo RL's second integration: SpanRegistry, and nemo.lens as a hard dependency."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from nemo.lens import NemoLensConfig, SpanRegistry, is_span_group_enabled, safe_set_span_attributes, span_cm, trace_fn
from nemo.lens import managed_span as _managed_span
from nemo.lens.propagation import extract_context, inject_context
from nemo.lens.state import set_enabled_span_groups

from . import callforms
from .callforms import Body, Run, Site

ENV_PREFIX = "NEMO_RL_OTEL"
_EVERY_STEP = {
    "checkpoint",
    "evaluate",
    "model_init",
    "step",
    "setup",
    "rollout",
    "generation",
    "logprob",
    "reward",
    "advantage",
    "policy_update",
    "data_processing",
    "data_plane",
    "efficiency",
}
GROUPS = {"job", "per_prompt", *_EVERY_STEP}
PRESETS = {
    "default": {"job", "checkpoint", "evaluate", "setup", "model_init"},
    "per_step": {"job", *_EVERY_STEP},
}
BUCKETS = {
    **dict.fromkeys(("generation", "reward", "policy_update"), "productive"),
    **dict.fromkeys(("data_processing", "data_plane", "checkpoint", "logprob", "advantage"), "overhead"),
}

# Workers import this again, and it may have changed.
SpanRegistry.register("nemo_rl", groups=GROUPS, presets=PRESETS, allow_override=True)


def initialize(generation: str, rank: int = 0, world_size: int = 1, **sinks: Any) -> Any:
    import nemo.lens

    config = NemoLensConfig.from_env(prefix=ENV_PREFIX, fallback_prefix="NEMO_LENS")
    return nemo.lens.setup_telemetry(config, resource_attributes={"nv.dl.rank": rank}, **sinks)


def shut_down(handle: Any) -> None:
    """Closes the gate too, so that what runs on pays nothing."""
    set_enabled_span_groups(frozenset())
    handle.shutdown(timeout_ms=1000)


@contextmanager
def managed_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> Iterator[Any]:
    attributes = dict(attributes)
    if group in BUCKETS:
        attributes["rl.bucket"] = BUCKETS[group]
    with _managed_span(group, name, tracer=tracer, **attributes) as span:
        yield span


@contextmanager
def umbrella_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> Iterator[Any]:
    """A span that others nest in, which is in no bucket itself."""
    with _managed_span(group, name, tracer=tracer, **dict(attributes)) as span:
        yield span


def umbrella_trace_fn(group: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with managed_span(group, name):
                return function(*args, **kwargs)

        return wrapper

    return decorator


def traced_worker_init(group: str, name: str, backend: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For the `__init__` of a worker class."""

    def decorator(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            with _managed_span(group, name, **{"rl.backend": backend}):
                init(self, *args, **kwargs)

        return wrapper

    return decorator


_in_prompt: ContextVar[bool] = ContextVar("in_prompt", default=False)
_NOTHING = nullcontext(None)  # entered by many threads and tasks at once


@contextmanager
def per_prompt_scope() -> Iterator[None]:
    token = _in_prompt.set(True)
    try:
        yield
    finally:
        _in_prompt.reset(token)


def data_plane_span(operation: str, **attributes: Any) -> AbstractContextManager[Any]:
    """The most frequent site: its group is computed, and only then is anything else."""
    per_prompt = _in_prompt.get()
    group = "per_prompt" if per_prompt else "data_plane"
    if not is_span_group_enabled(group):
        return _NOTHING
    if not per_prompt:
        attributes["rl.bucket"] = BUCKETS[group]
    return _managed_span(group, f"rl.data_plane.{operation}", **attributes)


class LENS:
    is_span_group_enabled = staticmethod(is_span_group_enabled)
    managed_span = staticmethod(managed_span)
    safe_set_span_attributes = staticmethod(safe_set_span_attributes)
    span_cm = staticmethod(span_cm)
    trace_fn = staticmethod(trace_fn)


class DIRECT(LENS):
    managed_span = staticmethod(_managed_span)


class UMBRELLA(LENS):
    managed_span = staticmethod(umbrella_span)


def _efficiency(site: Site) -> Run:
    attributes = {"rl.efficiency.category": site.name.rpartition(".")[2]}
    if "rl.bucket" in site.attributes:
        attributes["rl.bucket"] = "idle"

    def run(body: Body) -> Any:
        with _managed_span("efficiency", site.name, tracer=site.tracer, **attributes):
            return body()

    return run


def _polling(site: Site) -> Run:
    """One span for a loop of short waits: made by hand, never current, ended when the loop breaks."""

    def run(body: Body) -> Any:
        span = None
        if is_span_group_enabled(site.group) and site.tracer is not None:
            span = site.tracer.start_span(site.name)
        try:
            return body()
        finally:
            if span is not None:
                safe_set_span_attributes(span, {**site.attributes, "rl.bucket": "idle", **site.late})
                span.end()

    return run


def _data_plane(site: Site) -> Run:
    operation = site.name.removeprefix("rl.data_plane.")
    given = {key: value for key, value in site.attributes.items() if key != "rl.bucket"}

    def run(body: Body) -> Any:
        with (
            per_prompt_scope() if site.group == "per_prompt" else nullcontext(),
            data_plane_span(operation, **given) as span,
        ):
            callforms.note(LENS, site, span)
            return body()

    return run


def _prompt(site: Site) -> Run:
    """One task for each prompt group, and many of them at once."""

    async def generate_and_push(body: Body) -> Any:
        with managed_span(site.group, site.name, tracer=site.tracer, **site.attributes):
            await asyncio.sleep(0)
            return body()

    async def step(body: Body) -> Any:
        return await asyncio.create_task(generate_and_push(body))

    return lambda body: callforms.run_async(step(body))


def _rollouts(site: Site) -> Run:
    """An actor's asynchronous method."""

    async def run_rollouts(body: Body) -> Any:
        with _managed_span(site.group, site.name, **site.attributes):
            await asyncio.sleep(0)
            return body()

    return lambda body: callforms.run_async(run_rollouts(body))


def _worker(site: Site) -> Run:
    class Worker:
        @traced_worker_init(site.group, site.name, site.attributes["rl.backend"])
        def __init__(self, body: Body) -> None:
            self.result = body()

    return lambda body: Worker(body).result


def _vllm_method(site: Site) -> Run:
    class VllmGeneration:
        @umbrella_trace_fn(site.group, site.name)
        def generate(self, body: Body) -> Any:
            return body()

    return VllmGeneration().generate


def _finalize(site: Site) -> Run:
    """On a background thread, under a parent that comes in a carrier; it may have ended by then."""

    def start(body: Body) -> Any:
        carrier: dict[str, str] = {}
        inject_context(carrier)

        def work() -> Any:
            with (
                callforms.current_in(extract_context(carrier)),
                _managed_span(site.group, site.name, tracer=site.tracer, **site.attributes),
            ):
                return body()

        return callforms.in_thread(work)

    return start


def call_site(site: Site) -> Run:
    form = site.forms[0]
    if form == "manual start_span":
        return _polling(site)
    if site.group == "efficiency":
        return _efficiency(site)
    if form == "gate plus shared null context":
        return _data_plane(site)
    if site.name == "rl.sc.generate_and_push":
        return _prompt(site)
    if site.name == "rl.gym.run_rollouts":
        return _rollouts(site)
    if site.name == "rl.checkpoint.finalize":
        return _finalize(site)
    if form == "consumer-defined decorator over managed_span":
        return _worker(site) if "rl.backend" in site.attributes else _vllm_method(site)
    if form == "decorator trace_fn on method":
        return callforms.traced_method(LENS, site)
    if form == "with, tracer keyword (possibly None)":
        return callforms.with_tracer(DIRECT, site)
    if form == "with, one-entry dict expansion":
        return callforms.dict_expansion(DIRECT, site)
    # The wrapper adds the bucket by itself.
    lens = LENS if "rl.bucket" in site.attributes else UMBRELLA
    site.attributes = {key: value for key, value in site.attributes.items() if key != "rl.bucket"}
    if "with, positional only" in site.forms:
        return callforms.positional(lens, site)
    if "with, one-entry dict expansion" in site.forms:
        return callforms.dict_expansion(lens, site)
    shape = callforms.with_tracer if "with, parenthesised multi-item" in site.forms else None
    return (shape or callforms.with_tracer_and_dict)(lens, site)
