"""A native span is a span of the SDK: the same code runs on both providers, and all that can be seen of it is equal.

The behaviours are functions that get a maker of providers and return what they saw; what the SDK's provider makes of
them, with its exceptions and log messages, is what the native one must make of them. Then hypothesis writes programs,
and what they export is compared message by message.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import enum
import gc
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.version import __version__ as sdk_version
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
    use_span,
)

from conftest import at_once, load_backend, run_code, take_modules

SURROGATE = "\ud800"
T0 = 1_700_000_000_000_000_000
NOW = 1_600_000_000_000_000_000  # what the SDK's clock shows; that of native spans is real


# Both providers


class FixedIds(IdGenerator):
    """The same ids in every run."""

    def __init__(self) -> None:
        self.trace_id, self.span_id = 0xA0000000000000000000000000000000, 0x1000000000000000

    def generate_trace_id(self) -> int:
        self.trace_id += 1
        return self.trace_id

    def generate_span_id(self) -> int:
        self.span_id += 1
        return self.span_id


class Keep(SpanProcessor):
    """What it was called with."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.ended: list[Any] = []
        self.seen: list[Any] = []  # of those that ended, as they were then

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.started.append(span)

    def on_end(self, span: Any) -> None:
        self.ended.append(span)
        self.seen.append(attempt(lambda: readable(span)))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules on the C backend, which native spans need: this table has nothing to say about the other one."""
    modules = load_backend("c")
    for name in list(os.environ):
        if name.startswith(("OTEL_", "NEMO_LENS_", "LENSFAST_")):
            monkeypatch.delenv(name)
    before = take_modules("lensfast")
    sys.modules.update(modules)
    assert modules["lensfast._native"].why_not() is None
    yield modules
    take_modules("lensfast")
    sys.modules.update(before)


@pytest.fixture
def native(package: dict[str, ModuleType]) -> Any:
    return package["lensfast._native"]


@pytest.fixture
def both(native: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[Any], None]:
    """both(behaviour) runs it on each provider and compares."""
    monkeypatch.setattr(sdk, "time_ns", lambda: NOW)
    caplog.set_level(logging.INFO)

    def run(provider_class: Any, behaviour: Any) -> Any:
        def new(*processors: Any, **options: Any) -> Any:
            provider = provider_class(**{"shutdown_on_exit": False, "id_generator": FixedIds(), **options})
            for processor in processors:
                provider.add_span_processor(processor)
            return provider

        caplog.clear()
        outcome = behaviour(new)
        logged = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
        return outcome, logged

    def compare(behaviour: Any) -> None:
        by_sdk, by_native = run(sdk.TracerProvider, behaviour), run(native.TracerProvider, behaviour)
        assert differences(by_sdk, by_native) == []

    return compare


def differences(by_sdk: Any, by_native: Any, path: tuple[Any, ...] = ()) -> list[Any]:
    """Where two results differ, as (where, that of the SDK, ours)."""
    if type(by_sdk) is type(by_native) and isinstance(by_sdk, (list, tuple, dict)) and len(by_sdk) == len(by_native):
        if not isinstance(by_sdk, dict):
            by_sdk, by_native = dict(enumerate(by_sdk)), dict(enumerate(by_native))
        if by_sdk.keys() == by_native.keys():
            return [found for key in by_sdk for found in differences(by_sdk[key], by_native[key], (*path, key))]
    return [] if by_sdk == by_native else [(path, by_sdk, by_native)]


def when(nanoseconds: Any) -> Any:
    """A time, or `now` if no time was given."""
    if type(nanoseconds) is int and (nanoseconds == NOW or abs(time.time_ns() - nanoseconds) < 600 * 10**9):
        return "now"
    return typed(nanoseconds)


def typed(value: Any) -> Any:
    """A value in a form in which 1, 1.0 and True, and a tuple and a list, differ, and nan is nan."""
    if isinstance(value, (tuple, list)) and not isinstance(value, SpanContext):
        return type(value).__name__, [typed(item) for item in value]
    if isinstance(value, dict):
        return type(value).__name__, [(key, typed(item)) for key, item in value.items()]
    return type(value).__name__, repr(value)


def context_of(context: Any) -> Any:
    return None if context is None else (tuple(context)[:4], list(context.trace_state.items()), context.is_valid)


def attributes_of(attributes: Any) -> Any:
    return None if attributes is None else [(typed(key), typed(value)) for key, value in attributes.items()]


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def json_of(span: Any) -> Any:
    seen = json.loads(span.to_json())
    return json.dumps({key: value for key, value in seen.items() if key not in ("start_time", "end_time")})


def seen(span: Any) -> dict[str, Any]:
    """All that is to be seen of a span, recording or not, live or ended."""
    of = {
        "recording": span.is_recording() if hasattr(span, "is_recording") else False,
        "context": context_of(span.get_span_context()),
    }
    if not isinstance(span, ReadableSpan):
        return {**of, "type": type(span).__name__}
    return {
        **of,
        "name": typed(span.name),
        "same context": span.context == span.get_span_context(),
        "parent": context_of(span.parent),
        "kind": span.kind,
        "start": when(span.start_time),
        "end": when(span.end_time),
        "status": attempt(lambda: (span.status.status_code, span.status.description)),
        "attributes": attempt(lambda: attributes_of(span.attributes)),
        "events": attempt(
            lambda: [
                (event.name, when(event.timestamp), attributes_of(event.attributes), event.dropped_attributes)
                for event in span.events
            ]
        ),
        "links": attempt(
            lambda: [(context_of(x.context), attributes_of(x.attributes), x.dropped_attributes) for x in span.links]
        ),
        "dropped": (span.dropped_attributes, span.dropped_events, span.dropped_links),
        "resource": (dict(span.resource.attributes), span.resource.schema_url),
        "scope": span.instrumentation_scope,
        "info": span._instrumentation_info,
        "json": attempt(lambda: json_of(span)),
        "repr": repr(span) if isinstance(span, sdk.Span) else None,
    }


def readable(span: Any) -> dict[str, Any]:
    """What is to be seen of a span in on_end, where the SDK hands over a copy that can only be read."""
    return {key: value for key, value in seen(span).items() if key not in ("recording", "repr")}


def remote(flags: int = 1, state: Any = None, trace_id: int = 0xAB, span_id: int = 0xCD, is_remote: bool = True) -> Any:
    """A Context with a parent that is no span of this process."""
    context = SpanContext(trace_id, span_id, is_remote, TraceFlags(flags), state)
    return set_span_in_context(NonRecordingSpan(context))


TABLE: list[Any] = []


def behaviour(function: Any = None, **cases: Any) -> Any:
    """Put a function into the table; with cases, once for each, which it gets as second argument."""
    if function is None:
        return lambda function: behaviour_of_cases(function, cases)
    TABLE.append(pytest.param(function, id=function.__name__))
    return function


def behaviour_of_cases(function: Any, cases: dict[str, Any]) -> Any:
    for name, case in cases.items():

        def one(new: Any, case: Any = case) -> Any:
            return function(new, case)

        TABLE.append(pytest.param(one, id=f"{function.__name__}-{name}"))
    return function


def span_of(new: Any, name: Any = "span", *processors: Any, options: Any = (), **arguments: Any) -> Any:
    return new(*processors, **dict(options)).get_tracer("scope").start_span(name, **arguments)


# What it is


@behaviour
def types(new: Any) -> Any:
    provider = new()
    tracer = provider.get_tracer("scope")
    span = tracer.start_span("span")
    return [
        isinstance(provider, sdk.TracerProvider),
        isinstance(tracer, sdk.Tracer),
        [isinstance(span, kind) for kind in (trace.Span, sdk.Span, ReadableSpan, sdk._Span)],
        [issubclass(type(span), kind) for kind in (trace.Span, sdk.Span, ReadableSpan)],
        type(span).__name__,
    ]


@behaviour
def fresh_span(new: Any) -> Any:
    span = span_of(new)
    return seen(span), readable(span._readable_span()), type(span._readable_span()).__name__


@behaviour
def whole_span(new: Any) -> Any:
    keep = Keep()
    provider = new(keep, resource=Resource({"r": 1}, "https://resource.invalid"))
    tracer = provider.get_tracer("scope", "1.2", "https://scope.invalid", {"s": (1, 2)})
    link = Link(SpanContext(5, 6, True), {"l": 1})
    span = tracer.start_span("é", remote(), SpanKind.SERVER, {"a": 1}, [link], T0, False, False)
    span.set_attribute("b", "two")
    span.set_attributes({"c": 3.0, "d": [True]})
    span.add_event("event", {"e": 1}, T0 + 1)
    span.set_status(StatusCode.ERROR, "why")
    live = seen(span)
    span.end(T0 + 2)
    return live, seen(span), readable(keep.ended[0]), [seen(s) for s in keep.started]


@behaviour
def wrong_calls(new: Any) -> Any:
    tracer = new().get_tracer("scope")
    span = tracer.start_span("span")
    return [
        attempt(call)
        for call in (
            lambda: span.set_attribute(),
            lambda: span.set_attribute("key"),
            lambda: span.set_attribute("key", 1, 2),
            lambda: span.set_attribute("key", value=1, other=2),
            lambda: span.set_attributes(),
            lambda: span.end(1, 2),
            lambda: span.end(time=1),
            lambda: span.add_event(),
            lambda: tracer.start_span(),
            lambda: tracer.start_span("a", unknown=1),
            lambda: tracer.start_span("a", name="b"),
            lambda: tracer.start_span("a", None, SpanKind.INTERNAL, None, (), None, True, True, 9),
        )
    ], [
        attempt(lambda name=name: setattr(span, name, None)).partition(":")[0]
        for name in ("name", "attributes", "context", "kind", "events", "start_time", "status", "resource")
    ]


@behaviour
def keyword_calls(new: Any) -> Any:
    span = span_of(new, links=None, kind=SpanKind.CLIENT, start_time=None, record_exception=0, context=None)
    span.set_attribute(value=1, key="a")
    span.set_attribute("b", value=2)
    span.set_attributes(attributes={"c": 3})
    live = seen(span), span._record_exception, span._set_status_on_exception
    span.end(end_time=T0)
    return live, seen(span)


@behaviour
def a_class_without_a_tracer(new: Any) -> Any:
    kind = type(span_of(new))
    with pytest.raises(TypeError):
        kind()
    return kind.__name__


@behaviour
def attributes_of_its_own(new: Any) -> Any:
    span: Any = span_of(new)
    span.mine = [1]
    span._mine = 2
    return span.mine, span._mine, "mine" in vars(span), attempt(lambda: span.not_there is None) != ""


@behaviour
def identity(new: Any) -> Any:
    one, two = span_of(new), span_of(new)
    return one == one, one == two, len({one, two}), weakref.ref(one)() is one, bool(one)


@behaviour
def copies(new: Any) -> Any:
    """Exporters that redact copy what they get."""
    keep = Keep()
    span = span_of(new, "span", keep, attributes={"a": 1, "l": [1]})
    span.add_event("event", {"b": 2})
    span.end(T0)
    copied = [copy.copy(keep.ended[0])]
    if hasattr(sdk.BoundedAttributes, "__deepcopy__"):
        copied.append(copy.deepcopy(keep.ended[0]))
    for each in copied:
        each._name = "another"
    return [readable(each) for each in (*copied, keep.ended[0])]


# Attributes


class Text(str):
    pass


class Colour(enum.IntEnum):
    RED = 1


class Mood(str, enum.Enum):
    GOOD = "good"


class Real(float):
    pass


class Odd:
    def __str__(self) -> str:
        return "odd"


VALUES: dict[str, Any] = {
    "true": True, "false": False, "zero": 0, "negative": -1, "largest": 2**63 - 1, "smallest": -(2**63),
    "over": 2**63, "huge": -(2**200), "float": 1.5, "minus_zero": -0.0, "inf": float("inf"), "nan": float("nan"),
    "empty": "", "text": "text", "unicode": "é\u4e2d\U0001f600", "nul": "a\0b", "surrogate": SURROGATE,
    "long": "x" * 70_000, "bytes": b"", "utf8": "é".encode(), "binary": b"\xff\x00", "none": None, "list": [1, 2],
    "empty_list": [], "tuple": ("a", "b"), "with_none": ["a", None], "mixed": [1, "a"], "bools_and_ints": [True, 1],
    "floats": [1.0, float("nan")], "nested": [[1, [2, ("a",)]], []], "deep": [[[[[[[1]]]]]]], "dict": {"a": 1},
    "nested_dict": {"a": {"b": [1, {"c": None}]}}, "empty_dict": {}, "odd_keys": {1: 2, "": 3, "a": 4},
    "dict_in_list": [{"a": 1}], "range": range(3), "str_subclass": Text("sub"), "int_enum": Colour.RED,
    "str_enum": Mood.GOOD, "float_subclass": Real(0.5), "object": Odd(), "class": int, "decimal": Decimal("1.5"),
    "set": {1}, "bytearray": bytearray(b"a"), "mapping": MappingProxyType({"a": 1}), "list_of_bytes": [b"a", b"\xff"],
    "long_texts": ["x" * 100, "y"], "complex": 1j,
}  # fmt: skip


@behaviour(**VALUES)
def value_of_an_attribute(new: Any, value: Any) -> Any:
    outcomes = []
    for limit in (None, 0, 3):
        limits = SpanLimits(max_span_attribute_length=limit)
        outcomes.append(seen(span_of(new, attributes={"k": value}, options={"span_limits": limits})))
        span = span_of(new, options={"span_limits": limits})
        outcomes.append(attempt(lambda span=span: span.set_attribute("k", value)))
        outcomes.append(attempt(lambda span=span: span.set_attributes({"first": 1, "k": value, "last": 2})))
        outcomes.append(seen(span))
    return outcomes


@behaviour(
    empty="", none=None, number=1, bytes=b"k", subclass=Text("k"), enumerated=Mood.GOOD, long="k" * 1000,
    surrogate=SURROGATE, unicode="clé", nul="\0", true=True, pair=("a", "b"),
)  # fmt: skip
def key_of_an_attribute(new: Any, key: Any) -> Any:
    outcomes = [attempt(lambda: seen(span_of(new, attributes={"a": 1, key: "value", "b": 2})))]
    span = span_of(new)
    outcomes.append(attempt(lambda: span.set_attribute(key, 1)))
    outcomes.append(attempt(lambda: span.set_attribute(key, 2)))
    outcomes.append(attempt(lambda: span.set_attributes({"a": 1, key: 3, "b": 2})))
    return outcomes, seen(span)


@behaviour(
    none=None, empty={}, ordered=OrderedDict(b=1, a=2), proxy=MappingProxyType({"a": 1}), chain=ChainMap({"a": 1}),
    empty_list=[], pairs=[("a", 1)], zero=0,
)  # fmt: skip
def container_of_attributes(new: Any, given: Any) -> Any:
    at_start = attempt(lambda: seen(span_of(new, attributes=given)))
    span = span_of(new, attributes={"before": 1})
    return at_start, attempt(lambda: span.set_attributes(given)), seen(span)


@behaviour
def attributes_set_again(new: Any) -> Any:
    span = span_of(new, attributes={"a": 1, "b": 2, "c": 3})
    outcomes = [seen(span)]
    for change in (
        lambda: span.set_attribute("a", 4),
        lambda: span.set_attributes({"b": 5, "d": 6}),
        lambda: span.set_attribute("c", [7]),
        lambda: span.set_attributes({"c": [8], "a": None}),
        lambda: span._attributes.pop("d"),
        lambda: span.set_attribute("e", 9),
        lambda: span.set_attribute("a", 10),
    ):
        change()
        outcomes.append(seen(span))
    return outcomes


@behaviour
def attributes_are_copied(new: Any) -> Any:
    given, inner = {"a": 1, "l": [1]}, [1]
    span = span_of(new, attributes=given)
    given["a"] = 2
    given["l"].append(2)
    span.set_attribute("inner", inner)
    inner.append(2)
    view = span.attributes
    before = dict(view)
    span.set_attribute("later", 1)
    return before, dict(view), seen(span), attempt(lambda: view.__setitem__("a", 1)).partition(":")[0]


@behaviour(
    none={"max_span_attributes": SpanLimits.UNSET}, zero={"max_span_attributes": 0}, one={"max_span_attributes": 1},
    three={"max_span_attributes": 3}, default={}, all_of_them={"max_attributes": 2},
    both={"max_attributes": 2, "max_span_attributes": 4}, length={"max_attribute_length": 2},
    span_length={"max_attribute_length": 2, "max_span_attribute_length": 4}, no_length={"max_span_attribute_length": 0},
    unset_length={"max_attribute_length": 2, "max_span_attribute_length": SpanLimits.UNSET},
    huge={"max_span_attributes": 2**70, "max_span_attribute_length": 2**70},
    events={"max_events": 2}, no_events={"max_events": 0}, links={"max_links": 2}, no_links={"max_links": 0},
    of_events={"max_event_attributes": 1}, of_links={"max_link_attributes": 1},
    none_of_events={"max_event_attributes": 0},
)  # fmt: skip
def limits(new: Any, limits: Any) -> Any:
    outcomes = []
    four = [Link(SpanContext(5, 6 + i, True), {"a": "long", "b": i}) for i in range(4)]
    options = {"span_limits": SpanLimits(**limits)}
    for count in (0, 1, 2, 3, 4, 5, 130):
        given = {f"k{i}": f"value {i}" for i in range(count)}
        outcomes.append(seen(span_of(new, attributes=given, options=options)))
        span = span_of(new, options=options)
        for key, value in given.items():
            span.set_attribute(key, value)
        span.set_attribute("k1", "again")
        span.set_attribute("k0", ["again", 1])
        outcomes.append(seen(span))
        span = span_of(new, attributes={"k1": 0}, options=options)
        span.set_attributes(given)
        span.set_attributes({"k1": 1, "k0": 2})
        outcomes.append(seen(span))
    span = span_of(new, links=four[:3], options=options)
    span.add_link(four[3].context, {"a": "long", "b": 1, "c": 2})
    for i in range(4):
        span.add_event(f"event {i}", {"a": "long", "b": i}, T0 + i)
    span.end(T0)
    return outcomes, seen(span), repr(span._limits)


VARIABLES = (
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_SPAN_LINK_COUNT_LIMIT",
)


@pytest.mark.parametrize("variable", VARIABLES)
def test_limits_of_the_environment(both: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    def behaviour(new: Any) -> Any:
        def work() -> Any:
            span = span_of(new, attributes={"a": "text", "b": ["text", "x"], "c": 1}, links=links())
            span.set_attributes({"d": "text", "e": 2})
            for i in range(3):
                span.add_event("event", {"a": "text", "b": i}, T0)
            return seen(span), repr(span._limits)

        def links() -> Any:
            return [Link(SpanContext(5, 6 + i, True), {"a": "long", "b": i}) for i in range(3)]

        outcomes = []
        for text in ("2", " 0 ", "", "-1", "many", "1000"):
            monkeypatch.setenv(variable, text)
            outcomes.append(attempt(work))
        monkeypatch.delenv(variable)
        return outcomes

    both(behaviour)


# Events, links, exceptions, status


@behaviour
def events(new: Any) -> Any:
    span = span_of(new)
    untouched = span.events, len(span._events)
    for name, attributes, timestamp in (
        ("one", None, None), ("two", {"a": [1, "b"], "": 2, "c": object}, 5), ("", {}, 0), ("three", {"a": b"x"}, 1.5),
        (SURROGATE, {SURROGATE: SURROGATE}, -1), ("é", {"n": None}, 2**70),
    ):  # fmt: skip
        span.add_event(name, attributes, timestamp)
    frozen = attempt(lambda: span.events[0].attributes.__setitem__("a", 1)).partition(":")[0]
    return untouched, seen(span), frozen


@behaviour
def links_of_every_kind(new: Any) -> Any:
    valid, invalid = SpanContext(5, 6, True), SpanContext(0, 0, False)
    state = TraceState([("k", "v")])
    given = [
        Link(valid), Link(valid, {"a": [1]}), Link(invalid), Link(invalid, {"a": 1}), Link(invalid, {}), None,
        Link(SpanContext(0, 0, True, TraceFlags(1), state)), Link(SpanContext(7, 8, False, TraceFlags(1), state)),
    ]  # fmt: skip
    span = span_of(new, links=given)
    for link in given:
        if link is not None:
            span.add_link(link.context, link.attributes)
    span.add_link(None)
    generated = span_of(new, links=(link for link in given))
    return seen(span), seen(generated), seen(span_of(new, links=[])), attempt(lambda: seen(span_of(new, links=5)))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


class Refused(Exception):
    pass


@behaviour
def exceptions(new: Any) -> Any:
    span = span_of(new)
    span.record_exception(raised(ValueError("bad")))
    span.record_exception(Refused("not raised"), {"exception.message": "other", "more": 1}, T0, True)
    span.record_exception(raised(KeyboardInterrupt()), attributes={"a": [1, None]}, timestamp=0)
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise Refused("second") from first
    except Refused as error:
        span.record_exception(error)
    return seen(span)


STATUSES: list[Any] = [
    (Status(StatusCode.ERROR, "one"),), (StatusCode.ERROR, "two"), (StatusCode.ERROR,), (StatusCode.OK,),
    (StatusCode.OK, "described"), (StatusCode.UNSET,), (Status(StatusCode.UNSET),), (Status(StatusCode.OK),),
    (Status(StatusCode.ERROR, "three"), "ignored"), (StatusCode.ERROR, 5), ("error",), (None,), (StatusCode.ERROR, ""),
]  # fmt: skip


@behaviour
def statuses(new: Any) -> Any:
    outcomes = []
    for first in STATUSES:
        for second in STATUSES:
            span = span_of(new)
            span.set_status(*first)
            span.set_status(*second)
            outcomes.append((span.status.status_code, span.status.description))
    return outcomes, seen(span)


@behaviour
def names(new: Any) -> Any:
    outcomes = []
    for name in ("", "é", SURROGATE, Text("sub"), None, 5, "x" * 10_000):
        span = attempt(lambda name=name: span_of(new, name))
        span.update_name("second")
        outcomes.append(seen(span))
        span.update_name(name)
        outcomes.append(seen(span))
    return outcomes


# The end


@behaviour
def ended_span(new: Any) -> Any:
    keep = Keep()
    span = span_of(new, "span", keep, attributes={"a": 1})
    span.end(T0)
    for change in (
        lambda: span.set_attribute("a", 2), lambda: span.set_attribute("b", [2]), lambda: span.set_attribute("", 2),
        lambda: span.set_attributes({"a": 2}), lambda: span.set_attributes({"a": [2]}), lambda: span.set_attributes({}),
        lambda: span.add_event("event"), lambda: span.add_link(SpanContext(5, 6, True)), lambda: span.add_link(None),
        lambda: span.record_exception(ValueError()), lambda: span.set_status(StatusCode.ERROR),
        lambda: span.update_name("other"), lambda: span.end(), lambda: span.end(T0 + 1), lambda: span.start(),
        lambda: span.__exit__(None, None, None), lambda: span.__exit__(ValueError, ValueError("x"), None),
    ):  # fmt: skip
        assert change() is None
    return seen(span), [readable(s) for s in keep.ended]


@behaviour
def attributes_of_an_ended_span(new: Any) -> Any:
    outcomes = []
    for attributes in (None, {"a": 1}, {"a": [1]}):
        span = span_of(new, attributes=attributes)
        span.end(T0)
        outcomes.append(attempt(lambda span=span: span._attributes.__setitem__("z", 1)))
        outcomes.append(attributes_of(span.attributes))
        span = span_of(new, attributes=attributes)
        held = span._attributes
        span.end(T0)
        outcomes.append(attempt(lambda held=held: held.__setitem__("z", 1)))
        outcomes.append(attributes_of(span.attributes))
    return outcomes


TIMES: dict[str, Any] = {
    "zero": 0, "one": 1, "usual": T0, "largest": 2**63 - 1, "over": 2**63, "unsigned": 2**64 - 1, "huge": 2**100,
    "negative": -1, "float": 1.5, "true": True, "text": "now", "none": None,
}  # fmt: skip


@behaviour(**TIMES)
def times(new: Any, given: Any) -> Any:
    span = span_of(new, start_time=given)
    live = seen(span)
    span.end(given)
    another = span_of(new)
    another.end(end_time=given)
    again = attempt(lambda: another.end(given))
    return live, seen(span), seen(another), again


@behaviour
def start_of_a_started_span(new: Any) -> Any:
    span = span_of(new, start_time=T0)
    span.start(5)
    span.start(start_time=6, parent_context=None)
    return seen(span)


@behaviour
def end_of_a_span_that_was_not_started(new: Any) -> Any:
    span = span_of(new)
    span._start_time = None
    outcome = attempt(span.end)
    span.start(T0)
    span.end(T0 + 1)
    return outcome, seen(span)


# Parents, flags, trace state, kinds


@behaviour(**{str(kind): kind for kind in (*SpanKind, None, 3)})
def kinds(new: Any, kind: Any) -> Any:
    return seen(span_of(new, kind=kind))


class ForeignSpan(NonRecordingSpan):
    """As of a bridge to another tracing library."""

    def get_span_context(self) -> Any:
        return SpanContext(0x77, 0x88, False, TraceFlags(1), TraceState([("foreign", "1")]))


class Contextless(ForeignSpan):
    def get_span_context(self) -> Any:
        return None


class Wrong(ForeignSpan):
    def get_span_context(self) -> Any:
        return "a context"


STATE = TraceState([("a", "1"), ("b", "2")])
PARENTS: dict[str, Any] = {
    "none": None, "empty": context_api.Context(), "plain_dict": {}, "remote": remote(), "unsampled": remote(0),
    "random": remote(3), "only_random": remote(2), "all_flags": remote(0xFF), "state": remote(1, STATE),
    "empty_state": remote(1, TraceState()), "local": remote(is_remote=False), "local_off": remote(0, is_remote=False),
    "no_trace_id": remote(trace_id=0), "no_span_id": remote(span_id=0), "long_ids": remote(trace_id=2**128 - 1),
    "too_long": remote(trace_id=2**128), "invalid": set_span_in_context(INVALID_SPAN),
    "foreign": set_span_in_context(ForeignSpan(SpanContext(1, 1, False))),
    "contextless": set_span_in_context(Contextless(SpanContext(1, 1, False))),
    "wrong": set_span_in_context(Wrong(SpanContext(1, 1, False))),
    "no_span": context_api.set_value("current-span", 5), "others": context_api.set_value("key", 1, remote(1, STATE)),
    "of_no_dict": SimpleNamespace(get=lambda key, default=None: None),
}  # fmt: skip


@behaviour(**PARENTS)
def parents(new: Any, parent: Any) -> Any:
    tracer = new().get_tracer("scope")

    def family() -> Any:
        child = tracer.start_span("child", parent)
        grandchild = tracer.start_span("grandchild", set_span_in_context(child))
        child.end(T0)
        late = tracer.start_span("late", set_span_in_context(child))
        return seen(child), seen(grandchild), seen(late)

    given = attempt(family)
    token = context_api.attach(parent if parent is not None else context_api.Context())
    try:
        return given, attempt(lambda: seen(tracer.start_span("current")))
    finally:
        context_api.detach(token)


@behaviour
def spans_of_both_kinds_in_one_trace(new: Any) -> Any:
    others = sdk.TracerProvider(shutdown_on_exit=False, id_generator=FixedIds()).get_tracer("other")
    tracer = new().get_tracer("scope")
    ours = tracer.start_span("ours", remote(3, STATE))
    theirs = others.start_span("theirs", set_span_in_context(ours))
    below = tracer.start_span("below", set_span_in_context(theirs))
    return seen(ours), seen(theirs), seen(below), trace.get_current_span(set_span_in_context(ours)) is ours


@behaviour
def a_context_as_a_key(new: Any) -> Any:
    parent = span_of(new)
    tracer = new().get_tracer("scope")
    child = tracer.start_span("child", set_span_in_context(parent))
    context = parent.get_span_context()
    hashes = attempt(lambda: hash(child.parent) == hash(context))
    return child.parent == context, hashes, context_of(copy.copy(context)), repr(context)


# Samplers


def custom_sampler(answer: Any) -> Any:
    class Custom(sampling.Sampler):
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def should_sample(self, parent_context: Any, trace_id: Any, name: Any, *others: Any, **named: Any) -> Any:
            self.asked.append((parent_context is None, trace_id, name, others, named))
            return answer(others)

        def get_description(self) -> str:
            return "custom"

    return Custom()


SAMPLERS: dict[str, Any] = {
    "always_on": sampling.ALWAYS_ON, "always_off": sampling.ALWAYS_OFF,
    "record_only": sampling.StaticSampler(sampling.Decision.RECORD_ONLY),
    "parentbased_on": sampling.ParentBased(sampling.ALWAYS_ON),
    "parentbased_off": sampling.ParentBased(sampling.ALWAYS_OFF), "ratio_0": sampling.TraceIdRatioBased(0.0),
    "ratio_1": sampling.TraceIdRatioBased(1.0), "ratio_half": sampling.TraceIdRatioBased(0.5),
    "ratio_tiny": sampling.TraceIdRatioBased(1e-15), "parentbased_ratio": sampling.ParentBasedTraceIdRatio(0.5),
    "default_on": sampling.DEFAULT_ON, "default_off": sampling.DEFAULT_OFF,
    "upside_down": sampling.ParentBased(
        sampling.TraceIdRatioBased(0.5), sampling.ALWAYS_OFF, sampling.ALWAYS_ON,
        sampling.StaticSampler(sampling.Decision.RECORD_ONLY), sampling.ParentBased(sampling.ALWAYS_ON),
    ),
}  # fmt: skip
if hasattr(sampling, "AlwaysRecordSampler"):
    SAMPLERS["always_record"] = sampling.AlwaysRecordSampler(sampling.ALWAYS_OFF)


@behaviour(**SAMPLERS)
def samplers(new: Any, sampler: Any) -> Any:
    class Ids(FixedIds):
        def generate_trace_id(self) -> int:
            number = super().generate_trace_id()
            return (number << 64 | (number * 0x9E3779B97F4A7C15) % 2**64) % 2**128

    keep = Keep()
    tracer = new(keep, sampler=sampler, id_generator=Ids()).get_tracer("scope")
    outcomes = []
    for parent in (None, remote(), remote(0), remote(3, STATE), remote(is_remote=False), remote(0, STATE, 5, 5, False)):
        for _ in range(6):
            span = tracer.start_span("span", parent, attributes={"a": 1}, links=[Link(SpanContext(5, 6, True))])
            child = tracer.start_span("child", set_span_in_context(span))
            outcomes += [seen(span), seen(child)]
            child.end(T0)
            span.end(T0)
    return outcomes, [readable(span) for span in keep.ended]


def answers(*arguments: Any) -> Any:
    return lambda others: sampling.SamplingResult(*arguments)


CUSTOM: dict[str, Any] = {
    "drop": answers(sampling.Decision.DROP, {"a": 1}, STATE), "only": answers(sampling.Decision.RECORD_ONLY),
    "only_with_state": answers(sampling.Decision.RECORD_ONLY, {"by": "sampler", "l": [1]}, STATE),
    "sample": answers(sampling.Decision.RECORD_AND_SAMPLE),
    "own_attributes": answers(sampling.Decision.RECORD_AND_SAMPLE, {"by": "sampler"}),
    "more_attributes": lambda others: sampling.SamplingResult(
        sampling.Decision.RECORD_AND_SAMPLE, {**(others[1] or {}), "more": [1, None]}
    ),
    "state": answers(sampling.Decision.RECORD_AND_SAMPLE, None, STATE),
    "empty_state": answers(sampling.Decision.RECORD_AND_SAMPLE, None, TraceState()),
    "raises": lambda others: 1 / 0, "nothing": lambda others: None,
}  # fmt: skip


@behaviour(**CUSTOM)
def custom_samplers(new: Any, answer: Any) -> Any:
    keep, sampler = Keep(), custom_sampler(answer)
    provider = new(keep, sampler=sampler)
    tracer = provider.get_tracer("scope")

    def work() -> Any:
        outcomes = []
        for parent in (None, remote(3, TraceState([("c", "3")])), remote(0)):
            span = tracer.start_span("span", parent, SpanKind.CLIENT, {"a": 1}, [Link(SpanContext(5, 6, True), {})])
            child = tracer.start_span("child", set_span_in_context(span))
            outcomes += [seen(span), seen(child)]
            child.end(T0)
            span.end(T0)
        return outcomes

    outcome = attempt(work)
    asked = [(*first, (*others[:2], others[2:]), named) for *first, others, named in sampler.asked]
    asked = [repr((none, trace_id, name, others[0], others[1], named)) for none, trace_id, name, others, named in asked]
    links = [len(others[2]) for *_, others, _ in sampler.asked]
    return outcome, asked, links, [readable(span) for span in keep.ended]


@pytest.mark.parametrize(
    "name",
    ["always_on", "always_off", "parentbased_always_on", "parentbased_always_off", "traceidratio",
     "parentbased_traceidratio", "TRACEIDRATIO", "unknown", ""],
)  # fmt: skip
@pytest.mark.parametrize("argument", [None, "0", "0.5", "1", "2", "much"])
def test_sampler_of_the_environment(
    both: Any, monkeypatch: pytest.MonkeyPatch, name: str, argument: str | None
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    if argument is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)

    def behaviour(new: Any) -> Any:
        parents = (None, None, None, remote(), remote(0), remote(trace_id=0x8000000000000000))
        provider = attempt(new)
        if isinstance(provider, str):
            return provider
        tracer = provider.get_tracer("scope")
        return provider.sampler.get_description(), [seen(tracer.start_span("span", parent)) for parent in parents]

    both(behaviour)


# Ids


def ids(trace_ids: Any = (5,), span_ids: Any = (7,), **more: Any) -> Any:
    """A generator that repeats these ids."""

    class Ids(IdGenerator):
        def __init__(self) -> None:
            self.count = 0

        def generate_trace_id(self) -> Any:
            self.count += 1
            return trace_ids[self.count % len(trace_ids)]

        def generate_span_id(self) -> Any:
            self.count += 1
            return span_ids[self.count % len(span_ids)]

    return type("Given", (Ids,), more)()


GENERATORS: dict[str, Callable[[], Any]] = {
    "usual": ids, "small": lambda: ids([1], [1]), "largest": lambda: ids([2**128 - 1], [2**64 - 1]),
    "no_span_id": lambda: ids([5], [0]), "no_trace_id": lambda: ids([0], [7]), "no_ids": lambda: ids([0], [0]),
    "random": lambda: ids(is_trace_id_random=lambda self: True),
    "not_random": lambda: ids(is_trace_id_random=lambda self: False), "sdk": sdk.RandomIdGenerator,
}  # fmt: skip


@behaviour(**GENERATORS)
def id_generators(new: Any, make: Any) -> Any:
    generator = make()
    drawn = type(generator) is sdk.RandomIdGenerator
    tracer = new(id_generator=generator).get_tracer("scope")
    outcomes = []
    for parent in (None, remote(), remote(2), remote(trace_id=0)):
        span = tracer.start_span("span", parent)
        child = tracer.start_span("child", set_span_in_context(span))
        for each in (span, child):
            context = each.get_span_context()
            outcomes.append((context.trace_flags, context.is_valid, getattr(each, "parent", None) is None))
            outcomes.append(None if drawn else seen(each))
    return outcomes


@behaviour
def an_id_generator_that_raises(new: Any) -> Any:
    class Raises(FixedIds):
        def generate_span_id(self) -> int:
            raise Refused("no id")

    keep = Keep()
    tracer = new(keep, id_generator=Raises()).get_tracer("scope")
    return attempt(lambda: tracer.start_span("span")), len(keep.started)


@behaviour
def an_id_generator_that_is_random_at_times(new: Any) -> Any:
    generator = ids(random=False, is_trace_id_random=lambda self: self.random)
    tracer = new(id_generator=generator).get_tracer("scope")
    flags = [tracer.start_span("span").get_span_context().trace_flags]
    generator.random = True
    return [*flags, tracer.start_span("span").get_span_context().trace_flags]


# Processors


class Log(SpanProcessor):
    """Notes its calls in a list that it shares."""

    def __init__(self, name: str, calls: list[Any], **does: Callable[[Any], Any]) -> None:
        self.name = name
        self.calls = calls
        self.does = does

    def _note(self, method: str, span: Any, *more: Any) -> None:
        self.calls.append((self.name, method, span.name, span.end_time is None, *more))
        if method in self.does:
            self.does[method](span)

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._note("on_start", span, isinstance(span, sdk.Span), parent_context)

    def _on_ending(self, span: Any) -> None:
        self._note("_on_ending", span, isinstance(span, sdk.Span))

    def on_end(self, span: Any) -> None:
        self._note("on_end", span, isinstance(span, ReadableSpan))


def refuse(span: Any) -> None:
    raise Refused(span.name)


def mutate(span: Any) -> None:
    span.set_attribute("by", "processor")
    span.set_attributes({"l": [1, 2], "b": True})
    span.add_event("event", {"a": 1}, T0)
    span.add_link(SpanContext(5, 6, True))
    span.update_name("renamed")
    span.set_status(StatusCode.ERROR, "processor")


ACTIONS: dict[str, dict[str, Any]] = {
    "nothing": {}, "mutates_at_start": {"on_start": mutate}, "mutates_while_ending": {"_on_ending": mutate},
    "raises_at_start": {"on_start": refuse}, "raises_while_ending": {"_on_ending": refuse},
    "raises_at_end": {"on_end": refuse}, "ends_at_start": {"on_start": lambda span: span.end(T0)},
    "ends_while_ending": {"_on_ending": lambda span: span.end(T0)},
    "names_at_end": {"on_end": lambda span: setattr(span, "_name", "renamed")},
    "replaces_attributes_at_end": {"on_end": lambda span: setattr(span, "_attributes", {"redacted": True})},
    "replaces_the_rest_at_end": {"on_end": lambda span: (
        setattr(span, "_resource", Resource({"other": 1})), setattr(span, "_status", Status(StatusCode.OK)),
        setattr(span, "_events", []), setattr(span, "_links", ()), setattr(span, "_kind", SpanKind.CLIENT),
        setattr(span, "_start_time", 1), setattr(span, "_end_time", 2), setattr(span, "_parent", None),
        setattr(span, "_context", SpanContext(1, 2, False, TraceFlags(1))),
    )},
}  # fmt: skip


@behaviour(**ACTIONS)
def processors(new: Any, does: Any) -> Any:
    calls: list[Any] = []
    keep = Keep()
    tracer = new(Log("first", calls), Log("second", calls, **does), Log("third", calls), keep).get_tracer("scope")
    spans = []

    def work() -> None:
        spans.append(tracer.start_span("span", attributes={"a": 1}, start_time=T0))
        spans[-1].end(T0 + 1)

    context = remote()
    outcomes = [attempt(work), attempt(work), attempt(lambda: seen(tracer.start_span("remote", context)))]
    given = [call[-1] is context for call in calls if call[1] == "on_start"]
    calls = [call[:4] if call[1] == "on_start" else call for call in calls]
    return outcomes, given, calls, [span.is_recording() for span in spans], keep.seen


MULTI: dict[str, Any] = {
    "synchronous": sdk.SynchronousMultiSpanProcessor, "concurrent": sdk.ConcurrentMultiSpanProcessor,
    "subclass": type("Multi", (sdk.SynchronousMultiSpanProcessor,), {}), "none": lambda: None,
}  # fmt: skip


@behaviour(**MULTI)
def active_span_processors(new: Any, make: Any) -> Any:
    multi, calls = make(), []
    if multi is not None:
        multi.add_span_processor(Log("before", calls))
    provider = new(Log("at once", calls), active_span_processor=multi)
    tracer = provider.get_tracer("scope")
    with contextlib.ExitStack() as stack:
        if isinstance(multi, sdk.ConcurrentMultiSpanProcessor):
            stack.callback(multi._executor.shutdown)
        tracer.start_span("one").end(T0)
        provider.add_span_processor(Log("by the provider", calls))
        tracer.start_span("two").end(T0)
        if multi is not None:
            multi.add_span_processor(Log("by its owner", calls))
        tracer.start_span("three").end(T0)
    held = provider._active_span_processor is multi, tracer.span_processor is provider._active_span_processor
    kind = isinstance(provider._active_span_processor, sdk.SynchronousMultiSpanProcessor)
    return sorted(map(repr, calls)), held, kind


@behaviour
def processors_that_come_and_go(new: Any) -> Any:
    calls: list[Any] = []
    provider = new()
    tracer = provider.get_tracer("scope")
    open_all_the_time = tracer.start_span("open")
    tracer.start_span("none").end(T0)
    for name in ("a", "b"):
        provider.add_span_processor(Log(name, calls))
        tracer.start_span(name).end(T0)
    multi = provider._active_span_processor
    multi._span_processors = multi._span_processors[1:]
    tracer.start_span("only b").end(T0)
    multi._span_processors = ()
    tracer.start_span("nobody").end(T0)
    multi._span_processors = (Log("c", calls),)
    tracer.start_span("only c").end(T0)
    provider._active_span_processor = sdk.SynchronousMultiSpanProcessor()
    provider.add_span_processor(Log("d", calls))
    tracer.start_span("still c").end(T0)
    provider.get_tracer("a new scope").start_span("only d").end(T0)
    tracer.span_processor = Log("e", calls)
    tracer.start_span("only e").end(T0)
    del open_all_the_time
    return calls


@behaviour
def a_processor_of_a_span_that_is_open_when_it_comes(new: Any) -> Any:
    calls: list[Any] = []
    provider = new()
    tracer = provider.get_tracer("scope")
    span = tracer.start_span("span")
    provider.add_span_processor(Log("late", calls))
    span.end(T0)
    return calls


@behaviour
def mocks_as_processors(new: Any) -> Any:
    outcomes = []
    for processor in (
        mock.Mock(),
        mock.MagicMock(),
        mock.Mock(spec=SpanProcessor),
        mock.create_autospec(SpanProcessor),
    ):
        new(processor).get_tracer("scope").start_span("span").end(T0)
        outcomes.append([call[0] for call in processor.method_calls])
    return outcomes


class Proxy:
    """Finds all in another object, by __getattr__ only."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@behaviour
def a_proxy_as_a_processor(new: Any) -> Any:
    calls: list[Any] = []
    new(Proxy(Log("inner", calls))).get_tracer("scope").start_span("span").end(T0)
    return calls


@behaviour
def a_processor_whose_methods_are_its_own(new: Any) -> Any:
    calls: list[Any] = []
    processor: Any = SpanProcessor()
    log = Log("own", calls)
    processor.on_start, processor._on_ending, processor.on_end = log.on_start, log._on_ending, log.on_end
    new(processor).get_tracer("scope").start_span("span").end(T0)
    return calls


@behaviour
def a_processor_that_is_patched_later(new: Any) -> Any:
    ended: list[str] = []
    processor: Any = Keep()
    tracer = new(processor).get_tracer("scope")
    tracer.start_span("before").end(T0)
    processor.on_end = lambda span: ended.append(span.name)
    tracer.start_span("after").end(T0)
    return ended, len(processor.ended)


@behaviour(sink={"sink": []}, open_spans={"open_spans": {}}, scoped={"only_scoped_attributes": True})
def a_processor_with_attributes_of_the_names_that_lensfast_uses(new: Any, attributes: Any) -> Any:
    calls: list[Any] = []
    processor = Log("other", calls)
    vars(processor).update(attributes)
    new(processor).get_tracer("scope").start_span("span").end(T0)
    return calls


@behaviour
def no_processor(new: Any) -> Any:
    provider = new()
    span = provider.get_tracer("scope").start_span("span", attributes={"a": 1})
    live = seen(span)
    span.end(T0)
    return live, seen(span), provider.force_flush(), provider.shutdown()


@behaviour
def shutdown_and_flush(new: Any) -> Any:
    processor = mock.Mock(spec=Keep)
    processor.force_flush.return_value = False
    provider = new(processor)
    flushed = provider.force_flush(1000)
    provider.shutdown()
    provider.get_tracer("scope").start_span("late").end(T0)
    return flushed, [call[0] for call in processor.method_calls if "flush" in call[0] or "shut" in call[0]]


@behaviour
def exporter_in_memory(new: Any) -> Any:
    memory = InMemorySpanExporter()
    tracer = new(SimpleSpanProcessor(memory)).get_tracer("scope")
    for flags in (1, 0):
        tracer.start_span(f"flags {flags}", remote(flags), attributes={"a": 1}, start_time=1).end(2)
    return [readable(span) for span in memory.get_finished_spans()]


# Tracers and providers


@behaviour
def tracers(new: Any) -> Any:
    provider = new()
    asked = [
        ("a",), ("a",), ("a", None), ("a", ""), ("a", "1"), ("a", "1", None), ("a", "1", "url"), ("b", None, "url"),
        ("a", "1", "url", {"x": 1}), ("a", "1", "url", {"x": 1}), ("a", "1", "url", {"x": 2}), ("",), (None,),
        (SURROGATE,),
    ]  # fmt: skip
    made = [provider.get_tracer(*arguments) for arguments in asked]
    # Older SDKs make a tracer each time.
    same = hasattr(provider, "_tracers") and [[one is other for other in made] for one in made]
    spans = [seen(tracer.start_span("span")) for tracer in made]
    return same, spans, [tracer._instrumentation_scope for tracer in made]


@behaviour
def named_arguments_of_get_tracer(new: Any) -> Any:
    tracer = new().get_tracer(
        instrumenting_module_name="a", instrumenting_library_version="1", schema_url="url", attributes={"x": 1}
    )
    return seen(tracer.start_span("span"))


@behaviour
def settings_of_a_tracer(new: Any) -> Any:
    """Its attributes can be set, and each span goes by what they are when it starts."""
    tracer = new().get_tracer("scope")
    outcomes = [seen(tracer.start_span("span", attributes={"a": "text"}))]
    for name, value in (
        ("sampler", sampling.ALWAYS_OFF), ("sampler", sampling.ALWAYS_ON), ("resource", Resource({"other": 1})),
        ("id_generator", ids()), ("_span_limits", SpanLimits(max_span_attribute_length=2)),
    ):  # fmt: skip
        setattr(tracer, name, value)
        outcomes.append(seen(tracer.start_span("span", attributes={"a": "text"})))
    return outcomes


def only(*classes: Any) -> Any:
    """The behaviour of SDKs that have all of that."""
    return behaviour if all(classes) else lambda function: function


@only(hasattr(sdk.TracerProvider, "_set_tracer_configurator"), hasattr(sdk, "_TracerConfig"))
def tracer_configurators(new: Any) -> Any:
    provider = new()
    tracer = provider.get_tracer("scope")
    outcomes = [seen(tracer.start_span("enabled", remote(1, STATE)))]
    open_span = tracer.start_span("open")
    for configurator in (
        sdk._disable_tracer_configurator,
        sdk._default_tracer_configurator,
        lambda scope: sdk._TracerConfig(is_enabled=scope.name != "scope"),
        lambda scope: 1 / 0,
    ):
        provider._set_tracer_configurator(tracer_configurator=configurator)
        outcomes += [seen(tracer.start_span("span", parent)) for parent in (None, remote(1, STATE))]
        outcomes += [seen(provider.get_tracer(name).start_span("span")) for name in ("scope", f"other {len(outcomes)}")]
    open_span.end(T0)
    return outcomes, seen(open_span)


@only(hasattr(sdk, "_disable_tracer_configurator"))
def a_tracer_that_begins_disabled(new: Any) -> Any:
    provider = new(_tracer_configurator=sdk._disable_tracer_configurator)
    tracer = provider.get_tracer("scope")
    outcomes = [seen(tracer.start_span("disabled", remote()))]
    tracer._set_tracer_config(sdk._TracerConfig(is_enabled=True))
    return [*outcomes, seen(tracer.start_span("enabled", remote()))]


@only(hasattr(sdk.TracerProvider, "_update_resource"))
def an_updated_resource(new: Any) -> Any:
    provider = new(resource=Resource({"a": 1, "b": 2}, "https://one.invalid"))
    tracer = provider.get_tracer("scope")
    before = tracer.start_span("before")
    provider._update_resource(Resource({"b": 3, "c": 4}))
    after = tracer.start_span("after")
    before.end(T0)
    return seen(before), seen(after), seen(provider.get_tracer("another").start_span("span")), provider.resource


@behaviour
def a_subclass_of_the_provider(new: Any) -> Any:
    class Mine(type(new())):  # type: ignore[misc]
        def get_tracer(self, name: str, *args: Any, **kwargs: Any) -> Any:
            return super().get_tracer(f"mine.{name}", *args, **kwargs)

    return seen(Mine(shutdown_on_exit=False, id_generator=FixedIds()).get_tracer("scope").start_span("span"))


@pytest.mark.parametrize("text", ["true", " TRUE ", "1", "", "false"])
def test_a_disabled_sdk(both: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", text)
    both(lambda new: (type(new().get_tracer("scope")).__module__.split(".")[1] == "trace", seen(span_of(new))))


# Current spans and managers


@behaviour
def a_span_as_a_manager(new: Any) -> Any:
    outcomes = []
    for record, status in ((True, True), (False, True), (True, False), (False, False)):
        for error in (None, ValueError("bad"), KeyboardInterrupt(), GeneratorExit()):
            span = span_of(new, record_exception=record, set_status_on_exception=status)
            with contextlib.suppress(BaseException), span as entered:
                assert entered is span
                span.set_attribute("current", trace.get_current_span() is span)
                if error is not None:
                    raise error
            outcomes.append(seen(span))
    return outcomes


@behaviour
def start_as_current_span(new: Any) -> Any:
    keep = Keep()
    tracer = new(keep).get_tracer("scope")
    with tracer.start_as_current_span("outer", attributes={"a": 1}, kind=SpanKind.SERVER) as outer:
        with tracer.start_as_current_span("inner", start_time=T0) as inner:
            current = trace.get_current_span() is inner, context_of(trace.get_current_span().get_span_context())
        with pytest.raises(ValueError, match="bad"), tracer.start_as_current_span("failing"):
            raise ValueError("bad")
        for options in (
            {"record_exception": False}, {"set_status_on_exception": False}, {"end_on_exit": False},
        ):  # fmt: skip
            with pytest.raises(Refused), tracer.start_as_current_span(str(options), **options):
                raise Refused("no")
        back = trace.get_current_span() is outer
        with tracer.start_as_current_span("already ended") as span:
            span.end(T0)
        with tracer.start_as_current_span("status") as span:
            span.set_status(StatusCode.OK)
        with tracer.start_as_current_span("remote", remote(1, STATE)):
            pass
    return current, back, [readable(span) for span in keep.ended], trace.get_current_span() is INVALID_SPAN


@behaviour
def start_as_current_span_as_a_decorator(new: Any) -> Any:
    keep = Keep()
    tracer = new(keep).get_tracer("scope")

    @tracer.start_as_current_span("plain")
    def plain(x: int) -> int:
        trace.get_current_span().set_attribute("x", x)
        return x

    @tracer.start_as_current_span("failing")
    def failing() -> None:
        raise Refused("no")

    @tracer.start_as_current_span("coroutine")
    async def coroutine() -> Any:
        await asyncio.sleep(0)
        return trace.get_current_span().is_recording()

    returned = [plain(1), plain(2), attempt(failing), asyncio.run(coroutine())]
    return returned, [readable(span) for span in keep.ended], plain.__name__


@behaviour
def use_span_in_every_way(new: Any) -> Any:
    outcomes = []
    for end in (True, False):
        for record in (True, False):
            for status in (True, False):
                span = span_of(new)
                with pytest.raises(Refused), use_span(span, end, record, status):
                    raise Refused("no")
                outcomes.append(seen(span))
    return outcomes


# What third parties do to private attributes


WRITES: dict[str, dict[str, Any]] = {
    "name": {"_name": "other"}, "odd_name": {"_name": None}, "kind": {"_kind": SpanKind.SERVER},
    "context": {"_context": SpanContext(1, 2, False, TraceFlags(3), STATE)}, "no_context": {"_context": None},
    "parent": {"_parent": SpanContext(3, 4, True)}, "no_parent": {"_parent": None},
    "start": {"_start_time": 5}, "odd_start": {"_start_time": 1.5}, "end": {"_end_time": 6},
    "no_end": {"_end_time": None}, "odd_end": {"_end_time": 2**70},
    "status": {"_status": Status(StatusCode.ERROR, "other")}, "no_status": {"_status": None},
    "attributes": {"_attributes": lambda: sdk.BoundedAttributes(2, {"x": 1}, immutable=False)},
    "plain_attributes": {"_attributes": lambda: {"x": 1}},
    "events": {"_events": lambda: [sdk.Event("other", {"x": 1}, 7)]},
    "links": {"_links": lambda: [Link(SpanContext(8, 9, True))]},
    "resource": {"_resource": Resource({"other": 1})}, "scope": {"_instrumentation_scope": None},
    "limits": {"_limits": SpanLimits(max_events=1, max_event_attributes=0)}, "exception": {"_record_exception": False},
    "on_exception": {"_set_status_on_exception": False}, "lock": {"_lock": threading.RLock},
    "sampler": {"_sampler": None}, "trace_config": {"_trace_config": 1},
}  # fmt: skip


@behaviour(**WRITES)
def written_attributes(new: Any, writes: Any) -> Any:
    keep = Keep()
    tracer = new(keep).get_tracer("scope")
    outcomes = []
    for ended in (False, True):
        span = tracer.start_span("span", remote(), attributes={"a": 1}, start_time=T0)
        if ended:
            span.end(T0 + 1)
        for name, value in writes.items():
            made = value() if callable(value) else value
            setattr(span, name, made)
            outcomes.append(getattr(span, name) == made)
        for change in (
            lambda span=span: span.set_attribute("b", 2),
            lambda span=span: span.set_attribute("c", [3]),
            lambda span=span: span.set_attributes({"d": 4}),
            lambda span=span: span.add_event("event", {"e": 5}, T0),
            lambda span=span: span.add_event("another", {"e": 6}, T0),
            lambda span=span: span.set_status(StatusCode.ERROR, "why"),
            lambda span=span: seen(tracer.start_span("child", set_span_in_context(span))),
            lambda span=span: seen(span),
            lambda span=span: span.end(T0 + 2),
            lambda span=span: seen(span),
        ):
            outcomes.append(attempt(change))
    return outcomes, keep.seen


@behaviour
def written_items(new: Any) -> Any:
    span = span_of(new, attributes={"a": 1})
    span._attributes["b"] = [2]
    span.set_attribute("c", 3)
    del span._attributes["a"]
    span._attributes._dict["d"] = 4
    span.set_attributes({"e": 5, "b": 6})
    span._events.append(sdk.Event("event", None, T0))
    span._links.append(Link(SpanContext(8, 9, True)))
    span._attributes._dict = {"new": 1}
    span.set_attribute("f", 7)
    with span._lock:
        held = span._lock.locked()
    return seen(span), held


@behaviour
def a_written_span_processor(new: Any) -> Any:
    first, second = Keep(), Keep()
    span = span_of(new, "span", first)
    span._span_processor = second
    span.end(T0)
    return len(first.ended), len(second.ended)


@pytest.mark.parametrize("behaviour", TABLE)
def test_behaviour(both: Any, behaviour: Any) -> None:
    both(behaviour)


# Memory and threads


def test_spans_do_not_stay(native: Any) -> None:
    provider = native.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanProcessor())
    tracer = provider.get_tracer("scope")

    def work() -> None:
        for i in range(200):
            with contextlib.suppress(Refused), tracer.start_as_current_span("outer", attributes={"i": i}) as outer:
                span = tracer.start_span("span", links=[Link(SpanContext(5, 6, True))], attributes={"l": ["x", str(i)]})
                span.add_event("event", {"a": 1})
                span.set_status(StatusCode.ERROR, "x")
                span.itself = span  # a cycle
                outer.of = span._readable_span(), span.parent, span.context, span._lock
                if i % 2:
                    span.end()
                raise Refused

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    work()
    before = count()
    for _ in range(5):
        work()
    assert count() - before < 100
    span = tracer.start_span("span")
    gone = weakref.ref(span)
    del span
    assert gone() is None


def test_a_provider_that_nobody_holds_goes_with_all_its_spans(native: Any) -> None:
    memory = InMemorySpanExporter()
    provider = native.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("scope")
    tracer.start_span("span").end()
    memory.cycle = [provider, tracer, memory]  # type: ignore[attr-defined]
    gone = [weakref.ref(each) for each in (provider, tracer, memory, memory.get_finished_spans()[0])]
    del provider, tracer, memory
    gc.collect()
    assert [each() for each in gone] == [None] * 4


def test_threads_that_change_a_span(native: Any, hasty_threads: None) -> None:
    tracer = native.TracerProvider(shutdown_on_exit=False, span_limits=SpanLimits(*[SpanLimits.UNSET] * 8)).get_tracer(
        "scope"
    )
    for _ in range(20):
        span = tracer.start_span("span")

        def change(number: int, span: Any = span) -> Callable[[], None]:
            def run() -> None:
                for i in range(25):
                    span.set_attribute(f"{number}.{i}", i)
                    span.set_attribute(f"{number}.{i}.list", [i])
                    span.add_event(f"{number}.{i}")

            return run

        at_once(*(change(number) for number in range(4)))
        span.end()
        numbers = [(f"{number}.{i}", i) for number in range(4) for i in range(25)]
        assert dict(span.attributes) == {**dict(numbers), **{f"{name}.list": (i,) for name, i in numbers}}
        assert sorted(event.name for event in span.events) == sorted(name for name, _ in numbers)


def test_threads_that_change_a_span_as_it_ends(
    native: Any, hasty_threads: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    keep = Keep()
    provider = native.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(keep)
    tracer = provider.get_tracer("scope")
    for _ in range(100):
        keep.ended.clear()
        span = tracer.start_span("span", attributes={"a": 0})

        def change(span: Any = span) -> None:
            for i in range(5):
                span.set_attribute("a", i)
                span.set_attributes({"b": [i]})
                span.add_event("event")
                span.set_status(StatusCode.ERROR, "x")
                span.update_name("name")

        at_once(change, change, span.end, span.end)
        assert [ended.name for ended in keep.ended] == [span.name]
        left = seen(span)
        change()
        assert seen(span) == left


def test_an_attribute_set_while_another_thread_asks_for_the_first_time(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = native._bounded_attributes
    spans: list[Any] = []

    def slow(*arguments: Any) -> Any:
        if spans:
            at_once(lambda: spans.pop().set_attribute("a", 1))
        return make(*arguments)

    monkeypatch.setattr(native, "_bounded_attributes", slow)
    span = native.TracerProvider(shutdown_on_exit=False).get_tracer("scope").start_span("span")
    spans.append(span)
    assert "b" not in span.attributes
    assert dict(span.attributes) == {"a": 1}


# The wire


class FakeExporter:
    """Keeps what it gets, as bytes."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    def export(self, batch: Any) -> SpanExportResult:
        self.requests.append(batch.SerializeToString())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to do."""

    def take(self) -> Any:
        message = ExportTraceServiceRequest.FromString(b"".join(self.requests))
        self.requests.clear()
        return message


@pytest.fixture
def encoding(package: dict[str, ModuleType]) -> Iterator[Any]:
    """An EncodingSpanProcessor with a fake exporter."""
    exporter = FakeExporter()
    processor = package["lensfast._export"].EncodingSpanProcessor(exporter)
    yield SimpleNamespace(processor=processor, exporter=exporter, native=package["lensfast._native"])
    processor.shutdown()


def fields(message: Any) -> dict[str, Any]:
    """The fields of a message that are there, each as bytes: 0.0 and -0.0 differ, and nan is nan."""
    found = {}
    for descriptor, value in message.ListFields():
        repeated = not hasattr(value, "SerializeToString") and not isinstance(value, (str, bytes, int, float))
        found[descriptor.name] = (
            [item.SerializeToString(deterministic=True) for item in value]
            if repeated
            else value.SerializeToString(deterministic=True)
            if hasattr(value, "SerializeToString")
            else value
        )
    return found


def decoded(message: Any, ids_and_times: bool = True) -> list[Any]:
    """Each span with the resource and the scope that it is under."""
    found = []
    for of_resource in message.resource_spans:
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                found.append(
                    (span.span_id, fields(of_resource.resource), of_resource.schema_url, fields(of_scope.scope),
                     of_scope.schema_url, fields(span))
                )  # fmt: skip
    return sorted(found, key=lambda entry: entry[0])


SCOPES: list[tuple[Any, ...]] = [
    ("plain",), ("versioned", "1.2"), ("with a url", None, "https://scope.invalid"),
    ("with attributes", "1", "https://scope.invalid", {"a": 1, "b": ("x", "é"), "c": True}), ("é",), ("",),
]  # fmt: skip
RESOURCES = [
    Resource({}), Resource({"service.name": "é", "n": 1}), Resource({"a": ("x", "y"), "f": 0.5}, "https://r.invalid"),
]  # fmt: skip

texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "x" * 127, "x" * 128, "é" * 64, "x" * 16_384, "a\0b"]),
)
odd_texts = st.one_of(texts, st.sampled_from([SURROGATE, f"a{SURROGATE}b"]))
numbers = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 127, 128, 2**14]),
)
scalars = st.one_of(odd_texts, numbers, st.booleans(), st.floats(), st.binary(max_size=200))
if tuple(map(int, sdk_version.split(".")[:2])) < (1, 40):
    # An older SDK has no None and no nested values: what its encoder is given of them it leaves out.
    values: Any = st.one_of(scalars, st.none(), st.lists(texts, max_size=4), st.lists(numbers, max_size=4))
else:
    values = st.recursive(
        st.one_of(scalars, st.none()),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(odd_texts, inner, max_size=3)),
        max_leaves=12,
    )
keys = st.one_of(st.sampled_from(list("abcdef")), odd_texts, st.sampled_from(["k" * 200, 1, None, Text("sub")]))
attributes = st.one_of(st.none(), st.dictionaries(keys, values, max_size=6))
span_times = st.one_of(st.integers(1, 2**63 - 1), st.sampled_from([0, 1, T0, 2**63, 2**64 - 1]))
which = st.integers(0, 5)
link = st.builds(
    lambda trace_id, span_id, is_remote, state, attributes: (
        (trace_id, span_id, is_remote, TraceFlags(1), state),
        attributes,
    ),
    st.integers(0, 3), st.integers(0, 3), st.booleans(), st.sampled_from([None, STATE]), attributes,
)  # fmt: skip
spans = st.builds(
    lambda *arguments: ("start", *arguments),
    texts,
    st.one_of(which, st.sampled_from(list(PARENTS)).filter(lambda name: name not in ("wrong", "of_no_dict"))),
    st.sampled_from(SpanKind),
    attributes,
    st.lists(link, max_size=2),
    span_times,
    st.integers(0, len(SCOPES) - 1),
)
operations = st.one_of(
    spans,
    spans,
    st.tuples(st.just("attribute"), which, keys, values),
    st.tuples(st.just("attribute"), which, keys, values),
    st.tuples(st.just("attributes"), which, attributes),
    st.tuples(st.just("event"), which, texts, attributes, span_times),
    st.tuples(st.just("link"), which, link),
    st.tuples(st.just("exception"), which, texts, attributes, span_times),
    st.tuples(st.just("status"), which, st.sampled_from(StatusCode), st.one_of(st.none(), texts)),
    st.tuples(st.just("name"), which, texts),
    st.tuples(st.just("end"), which, span_times),
)
few = st.sampled_from([None, None, None, SpanLimits.UNSET, 0, 1, 3])
span_limits = st.builds(
    lambda **limits: limits,
    max_attributes=few, max_span_attributes=few, max_events=few, max_links=few, max_event_attributes=few,
    max_link_attributes=few, max_attribute_length=few, max_span_attribute_length=few,
)  # fmt: skip
programs = st.tuples(
    span_limits,
    st.integers(0, len(RESOURCES) - 1),
    st.sampled_from(["default_on", "always_on", "ratio_half", "upside_down"]),
    st.lists(operations, min_size=1, max_size=25),
)


def run_program(provider_class: Any, program: Any, *processors: Any) -> None:
    """Start, change and end spans as the program says, with ids that are fixed."""
    limits, resource, sampler, steps = program
    provider = provider_class(
        resource=RESOURCES[resource], sampler=SAMPLERS[sampler], span_limits=SpanLimits(**limits),
        id_generator=FixedIds(), shutdown_on_exit=False,
    )  # fmt: skip
    for processor in processors:
        provider.add_span_processor(processor)
    tracers = [provider.get_tracer(*scope) for scope in SCOPES]
    started: list[Any] = []
    for step, *arguments in steps:
        if step == "start":
            name, parent, kind, attributes, links, start, scope = arguments
            if isinstance(parent, int):
                parent = set_span_in_context(started[parent % len(started)]) if started else None
            else:
                parent = PARENTS[parent]
            made = [Link(SpanContext(*context), attributes) for context, attributes in links]
            started.append(
                tracers[scope].start_span(name, parent, kind, copy.deepcopy(attributes), made, start_time=start)
            )
        elif started:
            span = started[arguments[0] % len(started)]
            rest = copy.deepcopy(arguments[1:])
            if step == "attribute":
                span.set_attribute(*rest)
            elif step == "attributes":
                span.set_attributes(rest[0] or {})
            elif step == "event":
                span.add_event(*rest)
            elif step == "link":
                span.add_link(SpanContext(*rest[0][0]), rest[0][1])
            elif step == "exception":
                span.record_exception(ValueError(rest[0]), *rest[1:])
            elif step == "status":
                span.set_status(*rest)
            elif step == "name":
                span.update_name(*rest)
            else:
                span.end(*rest)
    for number, span in enumerate(reversed(started)):
        span.end(T0 + number)


@given(program=programs)
@settings(max_examples=500, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_programs(encoding: Any, program: Any) -> None:
    logging.disable(logging.CRITICAL)
    try:
        by_sdk, by_native = Keep(), Keep()
        run_program(sdk.TracerProvider, program, by_sdk)
        run_program(encoding.native.TracerProvider, program, by_native, encoding.processor)
        sampled = [span for span in by_sdk.ended if span.context.trace_flags.sampled]
        assert encoding.processor.force_flush()
        exported = encoding.exporter.take()
        assert differences(by_sdk.seen, by_native.seen) == []
        expected = decoded(encode_spans(sampled))
        ours = [span for span in by_native.ended if span.context.trace_flags.sampled]
        assert differences(expected, decoded(encode_spans(ours))) == []
        assert differences(expected, decoded(exported)) == []
        stats = encoding.processor.stats()
        assert (stats.ended, stats.queued, stats.dropped, stats.failed) == (stats.exported, 0, 0, 0)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_value_on_the_wire(encoding: Any, value: Any) -> None:
    """Each alone, as a span attribute and deep inside of one."""
    messages = []
    for provider_class in (sdk.TracerProvider, encoding.native.TracerProvider):
        keep = Keep()
        provider = provider_class(shutdown_on_exit=False, id_generator=FixedIds())
        provider.add_span_processor(keep)
        if provider_class is not sdk.TracerProvider:
            provider.add_span_processor(encoding.processor)
        for inner in (value, [value], (value, value), [[value]], {"inner": value}, [[[[[value]]]]]):
            tracer = provider.get_tracer("scope")
            tracer.start_span("span", attributes={"a": 1, "k": inner, "z": 2}, start_time=T0).end(T0 + 1)
        messages.append(encode_spans(keep.ended))
    encoding.processor.force_flush()
    expected, by_stock = map(decoded, messages)
    assert by_stock == expected
    assert decoded(encoding.exporter.take()) == expected


def test_many_scopes_in_one_batch(encoding: Any) -> None:
    messages = []
    for provider_class in (sdk.TracerProvider, encoding.native.TracerProvider):
        keep = Keep()
        ids = FixedIds()
        for resource in RESOURCES:
            provider = provider_class(shutdown_on_exit=False, id_generator=ids, resource=resource)
            provider.add_span_processor(keep)
            if provider_class is not sdk.TracerProvider:
                provider.add_span_processor(encoding.processor)
            for number in range(12):
                for scope in [*SCOPES, (f"scope {number}", "1", "https://scope.invalid", {"n": number})]:
                    span = provider.get_tracer(*scope).start_span("span", start_time=T0, attributes={"n": number})
                    if number % 5 == 4:
                        span.add_event("event", timestamp=T0)
                    span.end(T0 + 1)
        messages.append(encode_spans(keep.ended))
    encoding.processor.force_flush()
    assert len(messages[0].resource_spans) == 3
    assert decoded(messages[1]) == decoded(messages[0])
    assert decoded(encoding.exporter.take()) == decoded(messages[0])


def test_ids_and_times_of_their_own(encoding: Any) -> None:
    """Apart from what is drawn or read from a clock, which must be plausible."""
    by_kind = []
    for provider_class in (sdk.TracerProvider, encoding.native.TracerProvider):
        keep = Keep()
        provider = provider_class(shutdown_on_exit=False)
        provider.add_span_processor(keep)
        if provider_class is not sdk.TracerProvider:
            provider.add_span_processor(encoding.processor)
        before = time.time_ns()
        tracer = provider.get_tracer("scope")
        with tracer.start_as_current_span("outer", attributes={"a": 1}):
            for _ in range(3):
                with tracer.start_as_current_span("inner", kind=SpanKind.CLIENT):
                    pass
        after = time.time_ns()
        encoding.processor.force_flush()
        message = encode_spans(keep.ended) if provider_class is sdk.TracerProvider else encoding.exporter.take()
        spans = list(message.resource_spans[0].scope_spans[0].spans)
        assert len({span.span_id for span in spans}) == 4
        assert len({span.trace_id for span in spans}) == 1
        assert [len(spans[0].trace_id), len(spans[0].span_id)] == [16, 8]
        assert [span.parent_span_id for span in spans] == [spans[3].span_id] * 3 + [b""]
        assert all(before <= span.start_time_unix_nano <= span.end_time_unix_nano <= after for span in spans)
        drawn = {"trace_id", "span_id", "parent_span_id", "start_time_unix_nano", "end_time_unix_nano"}
        by_kind.append([{k: v for k, v in fields(span).items() if k not in drawn} for span in spans])
    assert by_kind[1] == by_kind[0]


UNENCODABLE: dict[str, Callable[[Any], Any]] = {
    "name": lambda tracer: tracer.start_span(SURROGATE).end(),
    "status": lambda tracer: with_status(tracer.start_span("odd"), SURROGATE).end(),
    "event": lambda tracer: with_event(tracer.start_span("odd"), SURROGATE).end(),
    "float_start": lambda tracer: tracer.start_span("odd", start_time=1.5).end(),
    "negative_start": lambda tracer: tracer.start_span("odd", start_time=-1).end(),
    "huge_end": lambda tracer: tracer.start_span("odd").end(2**70),
    "kind": lambda tracer: tracer.start_span("odd", kind=None).end(),
    "name_of_no_text": lambda tracer: tracer.start_span(5).end(),
}


def with_status(span: Any, text: str) -> Any:
    span.set_status(StatusCode.ERROR, text)
    return span


def with_event(span: Any, name: str) -> Any:
    span.add_event(name)
    return span


@pytest.mark.parametrize("make", UNENCODABLE.values(), ids=UNENCODABLE)
def test_what_no_encoder_takes_takes_no_other_span_with_it(
    encoding: Any, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    provider = encoding.native.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(encoding.processor)
    tracer = provider.get_tracer("scope")
    tracer.start_span("before").end()
    with_event(tracer.start_span("odd but good"), "event").end()
    make(tracer)
    tracer.start_span("after").end()
    encoding.processor.force_flush()
    arrived = {entry[-1].get("name") for entry in decoded(encoding.exporter.take())}
    assert arrived >= {"before", "odd but good", "after"}
    stats = encoding.processor.stats()
    assert (stats.ended, stats.exported + stats.failed, stats.queued, stats.dropped) == (4, 4, 0, 0)
    assert stats.exported == len(arrived)
    assert len(arrived) == 4 or any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("arguments", [(SURROGATE,), ("scope", SURROGATE), ("scope", "1", SURROGATE)])
def test_a_scope_that_no_encoder_takes(encoding: Any, arguments: Any) -> None:
    """The spans of the application start and end; others arrive."""
    provider = encoding.native.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(encoding.processor)
    tracer = provider.get_tracer("scope")
    tracer.start_span("before").end()
    odd = provider.get_tracer(*arguments).start_span("odd")
    odd.end()
    tracer.start_span("after").end()
    encoding.processor.force_flush()
    assert {"before", "after"} <= {entry[-1]["name"] for entry in decoded(encoding.exporter.take())}
    stats = encoding.processor.stats()
    assert stats.ended == stats.exported + stats.failed + stats.dropped == 3


QUEUE_PROGRAM = """
import sys
import threading

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Status, StatusCode

from lensfast import _export, _native


class Exporter:
    requests = []

    def export(self, batch):
        self.requests.append(batch.SerializeToString())
        return SpanExportResult.SUCCESS

    def shutdown(self):
        pass


processor = _export.EncodingSpanProcessor(Exporter())
provider = _native.TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(processor)
tracer = provider.get_tracer("scope")


def arrived():
    processor.force_flush()
    request = ExportTraceServiceRequest.FromString(b"".join(Exporter.requests))
    return [span for r in request.resource_spans for s in r.scope_spans for span in s.spans]

"""


def test_a_span_that_ends_while_another_is_being_encoded(tmp_path: Path) -> None:
    """As by another thread, for which the SDK's Python code in a Status makes room. A process of its own may crash."""
    code = """
inner = tracer.start_span("inner", attributes={"a": 1})


class Ends(Status):
    @property
    def status_code(self):
        if inner.is_recording():
            inner.end()
            processor.force_flush()
        return StatusCode.ERROR


outer = tracer.start_span("outer", attributes={"a": 1})
outer._status = Ends(StatusCode.ERROR, "why")
outer.end()
for span in arrived():
    print(span.name, len(span.attributes), span.status.code)
"""
    result = run_code(QUEUE_PROGRAM + code, "c", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == ["inner 1 0", "outer 1 2"]


@pytest.mark.parametrize("change", ["set_status(StatusCode.ERROR, 'why')", "events", "_events", "_attributes"])
def test_threads_that_end_spans(tmp_path: Path, change: str) -> None:
    """Encoded while the queue is being emptied. A process of its own may crash."""
    code = f"""
sys.setswitchinterval(1e-6)


def work():
    for i in range(2000):
        span = tracer.start_span("span", attributes={{"i": i}})
        span.{change}
        span.end()


threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    processor.force_flush()
spans = arrived()
print(len(spans), sorted(span.attributes[0].value.int_value for span in spans) == sorted(list(range(2000)) * 4))
"""
    result = run_code(QUEUE_PROGRAM + code, "c", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["8000", "True"]


# Where spans are not native


def provider_after_set_up(lensfast: ModuleType, **options: Any) -> tuple[Any, list[Any]]:
    memory = InMemorySpanExporter()
    config = lensfast.NemoLensConfig(enabled=True, metrics_enabled=False, **options)
    handle = lensfast.setup_telemetry(config, span_exporter=memory)
    provider = trace.get_tracer_provider()
    with lensfast.managed_span("job", "managed"), trace.get_tracer("scope").start_as_current_span("by hand") as span:
        pass
    handle.shutdown()
    assert [span.name for span in memory.get_finished_spans()] == ["by hand", "managed"]
    return type(provider), span


def test_why_not_and_what_set_up_does(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    native = lensfast._native
    caplog.set_level(logging.INFO, "lensfast")
    reason = native.why_not()
    if lensfast.backend == "python":
        assert isinstance(reason, str)
        assert reason
    else:
        assert reason is None
    kind, span = provider_after_set_up(lensfast)
    assert issubclass(kind, sdk.TracerProvider)
    assert (kind is sdk.TracerProvider) is (lensfast.backend == "python")
    assert (type(span) is sdk._Span) is (lensfast.backend == "python")
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("spans are")]
    assert said == ["spans are native" if reason is None else f"spans are the SDK's: {reason}"]


def test_native_spans_are_turned_off(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lensfast")
    kind, span = provider_after_set_up(lensfast, native_spans=False)
    assert (kind, type(span)) == (sdk.TracerProvider, sdk._Span)
    assert sum(record.getMessage().startswith("spans are the SDK's: ") for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("1.27.0", True), ("1.27.1", True), ("1.33.1", True), ("1.45.0", True), ("1.45.0rc1", True), ("1.26.0", False),
        ("1.999.0", False), ("2.0.0", False), ("0.9", False), ("main", False), ("1", False),
    ],
)  # fmt: skip
def test_an_unknown_sdk(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.setattr(lensfast._native, "sdk_version", version)
    reason = lensfast._native.why_not()
    if lensfast.backend == "c" and known:
        assert reason is None
        return
    assert reason
    if lensfast.backend == "c":
        assert version in reason
    kind, span = provider_after_set_up(lensfast)
    assert (kind, type(span)) == (sdk.TracerProvider, sdk._Span)


def test_a_runtime_context_of_another_kind(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(type(context_api._RUNTIME_CONTEXT)):  # type: ignore[misc]
        pass

    monkeypatch.setattr(context_api, "_RUNTIME_CONTEXT", Other())
    assert lensfast._native.why_not()
    kind, span = provider_after_set_up(lensfast)
    assert (kind, type(span)) == (sdk.TracerProvider, sdk._Span)


def test_metrics_of_the_sdk_itself(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "true")
    assert lensfast._native.why_not()
