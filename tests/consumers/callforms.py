"""The shapes of call sites that several consumers share.

A shape takes the functions that a consumer calls (`lens`: its stand-in, or a namespace) and a site, and gives a
function that runs a body inside that site and returns what the body returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Body = Callable[[], Any]
Run = Callable[[Body], Any]


@dataclass
class Site:
    """One place in a program that opens a span."""

    name: str
    group: str | None
    attributes: dict[str, Any]
    """Given at the call."""
    late: dict[str, Any]
    """Set while the span is open."""
    forms: tuple[str, ...]
    handle: Any
    """The TelemetryHandle, None where nemo.lens is absent."""
    carrier: dict[str, str]
    """Trace context of another process."""
    times: tuple[float, float]
    """Start and end in seconds since the epoch, of an interval that was measured before."""

    @property
    def tracer(self) -> Any:
        return self.handle.tracer if self.handle is not None else None

    @property
    def links(self) -> list[Link]:
        """To the previous interval's span."""
        if "linked span" not in self.forms:
            return []
        context = TraceContextTextMapPropagator().extract(self.carrier)
        return [Link(trace.get_current_span(context).get_span_context())]


def nanoseconds(seconds: float) -> int:
    return int(Decimal(seconds) * 1_000_000_000)


def nvtx_decorator() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Stands for the profiler's decorator, which trace_fn is stacked on."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return ranged

    return decorator


@contextmanager
def timer(label: str) -> Iterator[None]:
    """Stands for the timer that is entered in the same `with`."""
    yield


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in an event loop of its own, in the current contextvars, also inside another loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()


def in_thread(call: Callable[[], Any]) -> Any:
    """Call in a new thread, which inherits no context."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


@contextmanager
def current_in(context: Context) -> Iterator[None]:
    token = attach(context)
    try:
        yield
    finally:
        detach(token)


def note(lens: Any, site: Site, span: Any) -> None:
    """Set the late attributes, after the check that every consumer makes."""
    if span is not None and site.late:
        lens.safe_set_span_attributes(span, site.late)


def note_on_current(lens: Any, site: Site) -> None:
    if site.late and lens.is_span_group_enabled(site.group):
        for key, value in site.late.items():
            trace.get_current_span().set_attribute(key, value)


def positional(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        with lens.managed_span(site.group, site.name) as span:
            note(lens, site, span)
            return body()

    return run


def dict_expansion(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        with lens.managed_span(site.group, site.name, **site.attributes) as span:
            note(lens, site, span)
            return body()

    return run


def with_tracer(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        if "with, parenthesised multi-item" in site.forms:
            with timer(site.name), lens.managed_span(site.group, site.name, tracer=site.tracer) as span:
                note(lens, site, span)
                return body()
        with lens.managed_span(site.group, site.name, tracer=site.tracer) as span:
            note(lens, site, span)
            return body()

    return run


def with_tracer_and_dict(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        with lens.managed_span(site.group, site.name, tracer=site.tracer, **site.attributes) as span:
            note(lens, site, span)
            return body()

    return run


def gate_then_with(lens: Any, site: Site) -> Run:
    def run(body: Body) -> Any:
        if lens.is_span_group_enabled(site.group):
            with lens.managed_span(site.group, site.name, **site.attributes) as span:
                note(lens, site, span)
                return body()
        else:
            return body()

    return run


def span_cm_or_nothing(lens: Any, site: Site) -> Run:
    """The conditional expression: the attributes are computed only behind the gate."""

    def attributes() -> dict[str, Any]:
        assert lens.is_span_group_enabled(site.group), "computed although the group is off"
        return site.attributes

    def run(body: Body) -> Any:
        wanted = lens.is_span_group_enabled(site.group)
        if "gate in an or/and chain" in site.forms:
            either = lens.is_span_group_enabled(site.group) or lens.is_span_group_enabled("optimizer")
            wanted = either and lens.is_span_group_enabled(site.group)
        manager = (
            lens.span_cm(site.name, tracer=site.tracer, **attributes())
            if wanted and site.tracer is not None
            else nullcontext()
        )
        with timer(site.name), manager as span:
            note(lens, site, span)
            return body()

    return run


def traced_function(lens: Any, site: Site) -> Run:
    @lens.trace_fn(site.group, site.name)
    def function(body: Body) -> Any:
        note_on_current(lens, site)
        return body()

    return function


def traced_method(lens: Any, site: Site) -> Run:
    class Owner:
        @lens.trace_fn(site.group, site.name)
        @nvtx_decorator()
        def method(self, *unused: Any, body: Body) -> Any:
            assert isinstance(self, Owner)
            note_on_current(lens, site)
            return body()

    # The schedule keeps the bound method, and calls it with the parameters.
    callback = Owner().method
    parameters = iter([1, 2])

    def run(body: Body) -> Any:
        result = callback(parameters, body=body)
        assert next(parameters, 1) == 1, "somebody read the parameters"
        return result

    return run


def manual(
    lens: Any,
    site: Site,
    parent: Callable[[], Context | None] = lambda: None,
    starts: bool = False,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Run:
    """Gate, start_span, attach; detach and end afterwards. `parent` is asked at the start: None is the current one."""

    def run(body: Body) -> Any:
        if not lens.is_span_group_enabled(site.group) or site.tracer is None:
            return body()
        span = site.tracer.start_span(
            site.name,
            context=parent(),
            kind=kind,
            links=site.links,
            start_time=nanoseconds(site.times[0]) if starts else None,
        )
        lens.safe_set_span_attributes(span, site.attributes)
        token = attach(trace.set_span_in_context(span))
        try:
            lens.safe_set_span_attributes(span, site.late)
            return body()
        finally:
            detach(token)
            span.end()

    return run


def backdated(lens: Any, site: Site) -> Run:
    """The interval is over when the span is made."""

    def run(body: Body) -> Any:
        result = body()
        if lens.is_span_group_enabled(site.group) and site.tracer is not None:
            span = site.tracer.start_span(site.name, start_time=nanoseconds(site.times[0]))
            lens.safe_set_span_attributes(span, site.attributes)
            span.end(end_time=nanoseconds(site.times[1]))
        return result

    return run


def emitted(lens: Any, site: Site) -> Run:
    """As `backdated`, with the library's helper, whose gate is its argument."""

    def run(body: Body) -> Any:
        result = body()
        lens.emit_span(site.tracer, site.name, *site.times, group=site.group, attributes=site.attributes)
        return result

    return run
