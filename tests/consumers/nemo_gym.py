"""Stand-in for NeMo Gym's integration: asynchronous servers, with the gate in front of every site."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from . import callforms
from .callforms import Body, Run, Site
from .resolved import (
    NEMO_LENS_AVAILABLE,
    is_span_group_enabled,
    managed_span,
    safe_set_span_attributes,
    span_cm,
    trace_fn,
)

ENV_PREFIX = "NEMO_GYM_OTEL"
STARTUP_CARRIER = "NEMO_GYM_TRACEPARENT"


class GymSpanGroups:
    JOB = "job"
    SERVER = "server"
    HTTP_CLIENT = "http_client"
    ROLLOUT = "rollout"
    VERIFY = "verify"
    AGENT = "agent"
    MODEL_CALL = "model_call"
    SANDBOX = "sandbox"
    STARTUP = "startup"
    CHECKPOINT = "checkpoint"


_ROLLOUT = {"verify", "agent", "model_call", "server", "http_client", "rollout"}
GROUPS = {"job", "sandbox", "startup", "checkpoint", *_ROLLOUT}
PRESETS = {"default": {"job", "server", "http_client", "rollout", "startup"}, "per_rollout": _ROLLOUT}

GymSpanGroup = None
try:
    from nemo.lens.groups import SpanRegistry

    SpanRegistry.register("nemo_gym", GROUPS, PRESETS)
except ImportError:
    try:
        from nemo.lens.groups import SpanGroup

        class GymSpanGroup(SpanGroup):  # type: ignore[no-redef]
            """The first version's."""

            ALL_GROUPS = SpanGroup.ALL_GROUPS | _ROLLOUT | {"sandbox"}
            _PRESETS: ClassVar = {
                "default": frozenset({"job", "server", "http_client", "rollout"}),
                "per_rollout": frozenset(_ROLLOUT),
                "all": ALL_GROUPS,
            }

    except ImportError:
        pass


def initialize(generation: str, **sinks: Any) -> Any | None:
    """Each server is a process of its own, and all export."""
    if not NEMO_LENS_AVAILABLE:
        return None
    from nemo.lens.config import NemoLensConfig
    from nemo.lens.handle import setup_telemetry

    scheme = {} if GymSpanGroup is None else {"span_group_cls": GymSpanGroup}
    config = NemoLensConfig.from_env(prefix=ENV_PREFIX, fallback_prefix="NEMO_LENS", **scheme)
    config.export_strategy = "all_ranks"
    return setup_telemetry(config, **sinks)


class LENS:
    is_span_group_enabled = staticmethod(is_span_group_enabled)
    managed_span = staticmethod(managed_span)
    safe_set_span_attributes = staticmethod(safe_set_span_attributes)
    span_cm = staticmethod(span_cm)
    trace_fn = staticmethod(trace_fn)


def traced_endpoint(
    group: str, name: str, attributes: Callable[[], dict[str, Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For an endpoint whose parameters the web framework reads through the wrapper."""

    def decorator(endpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(endpoint)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not is_span_group_enabled(group):
                return await endpoint(*args, **kwargs)
            with managed_span(group, name) as span:
                if span is not None:
                    safe_set_span_attributes(span, attributes())
                return await endpoint(*args, **kwargs)

        return wrapper

    return decorator


class _Noted:
    """What checkpoint_span gives: a span, or nothing, behind one face."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def note(self, attributes: dict[str, Any]) -> None:
        if self._span is not None:
            safe_set_span_attributes(self._span, attributes)


@contextmanager
def checkpoint_span(operation: str, **attributes: Any) -> Iterator[_Noted]:
    if not is_span_group_enabled(GymSpanGroups.CHECKPOINT):
        yield _Noted(None)
        return
    with managed_span(GymSpanGroups.CHECKPOINT, f"gym.checkpoint.{operation}", **attributes) as span:
        yield _Noted(span)


def _endpoint(site: Site) -> Run:
    group = getattr(GymSpanGroups, site.group.upper())

    class Server:
        @traced_endpoint(group, site.name, lambda: {**site.attributes, **site.late})
        async def handle(self, body: Body) -> Any:
            return body()

    server = Server()
    return lambda body: callforms.run_async(server.handle(body))


def _early_return(site: Site) -> Run:
    """The job and the sandbox: the plain way first."""

    async def work(body: Body) -> Any:
        return body()

    async def run(body: Body) -> Any:
        if not is_span_group_enabled(site.group):
            return await work(body)
        with managed_span(site.group, site.name, **site.attributes) as span:
            try:
                return await work(body)
            finally:
                callforms.note(LENS, site, span)

    return lambda body: callforms.run_async(run(body))


def _checkpoint(site: Site) -> Run:
    def run(body: Body) -> Any:
        with checkpoint_span(site.name.removeprefix("gym.checkpoint."), **site.attributes) as noted:
            noted.note(site.late)
            return body()

    return run


def _startup(site: Site) -> Run:
    """The supervisor hands its span to the servers that it starts, by their environment."""
    if site.name in {"gym.server.startup", "gym.server.startup.worker"}:
        return callforms.manual(LENS, site, parent=_from_environment)
    exporting = site.handle is not None and site.handle.is_exporting
    shape = callforms.manual(LENS, site, starts=True)

    def run(body: Body) -> Any:
        return shape(lambda: _with_environment(body)) if exporting else body()

    return run


def _with_environment(body: Body) -> Any:
    from nemo.lens.propagation import inject_context

    carrier: dict[str, str] = {}
    inject_context(carrier)
    os.environ[STARTUP_CARRIER] = carrier.get("traceparent", "")
    try:
        return body()
    finally:
        os.environ.pop(STARTUP_CARRIER, None)


def _from_environment() -> Context:
    from nemo.lens.propagation import extract_context

    return extract_context({"traceparent": os.environ.get(STARTUP_CARRIER, "")})


def call_site(site: Site) -> Run:
    form = site.forms[0]
    if form == "negated gate with early return":
        return _endpoint(site) if "consumer-defined decorator over managed_span" in site.forms else _early_return(site)
    if form == "explicit gate then with":
        return _checkpoint(site)
    if form == "backdated span":
        return callforms.backdated(LENS, site)
    if site.group == "startup":
        return _startup(site)
    # A request to another server: managed_span has no kind, so that span is made by hand.
    return callforms.manual(LENS, site, kind=SpanKind.CLIENT)


def serve(app: Any) -> None:
    """Server spans come from the web framework's own instrumentation, if their group is on by then."""
    if is_span_group_enabled(GymSpanGroups.SERVER):
        from nemo.lens.contrib.fastapi import instrument_fastapi

        instrument_fastapi(app, service_name="nemo-gym")


def request_headers() -> dict[str, str]:
    from nemo.lens.propagation import inject_context

    headers: dict[str, str] = {}
    inject_context(headers)
    return headers
