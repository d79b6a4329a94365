"""Random programs that use spans, and an interpreter that runs one on any library with nemo.lens's API."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import enum
import functools
import inspect
import logging
import re
import threading
from contextlib import ExitStack, contextmanager
from typing import Any

from hypothesis import strategies as st
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import NoOpTracer, NoOpTracerProvider, StatusCode
from opentelemetry.util._once import Once

# --- values ---


class Text(str):
    """A str subclass."""


class Integer(int):
    """An int subclass."""


class Real(float):
    """A float subclass, as np.float64 is."""


class Colour(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Scalar:
    """Stands for np.int64 and torch scalars: converts to a number, is none."""

    dtype = "int64"
    shape = ()

    def __int__(self) -> int:
        return 7

    __index__ = __int__

    def __float__(self) -> float:
        return 7.0

    def item(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "Scalar()"


class Array(Scalar):
    """Stands for an array: refuses to be a bool, compares by element."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter((1, 2))

    def __repr__(self) -> str:
        return "Array()"


class Row(list):  # type: ignore[type-arg]
    """A list subclass."""


def pick(*strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One of them, each as likely as the others: st.one_of counts the parts of its parts. Repeat one to weigh it."""

    # A function of its own, since the repr of nested strategies grows beyond all bounds.
    @st.composite
    def picked(draw: Any) -> Any:
        return draw(strategies[draw(st.sampled_from(range(len(strategies))))])

    return picked()


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The first in six cases of seven."""
    return pick(*[usual] * 6, odd)


texts = st.one_of(st.sampled_from(["", "x", "[REDACTED]", "\ud800", "é\0", "y" * 200]), st.text(max_size=5))
integers = st.one_of(st.integers(-3, 3), st.sampled_from([2**63, -(2**63) - 1, 10**400, True]))
floats = st.floats(width=32)
plain_scalars = st.one_of(st.booleans(), integers, floats, texts)
scalars = st.one_of(
    plain_scalars, st.sampled_from([Text("t"), Integer(4), Real(0.5), Colour.RED, Level.LOW, Text("secret")])
)
odd_values = st.sampled_from(
    [None, b"bytes", b"\xff", {"a": 1}, {1, 2}, frozenset({1}), Scalar(), Array(), 1j, decimal.Decimal("1.5"), range(3)]
)
sequences = st.one_of(
    st.lists(scalars, max_size=3),
    st.lists(scalars, max_size=3).map(tuple),
    st.lists(texts, max_size=2).map(Row),
    st.lists(st.one_of(scalars, odd_values, st.just([1]), st.just(("x",))), max_size=3),
)
values = st.one_of(scalars, odd_values, sequences)
KEYS = [
    "a", "b", "", "megatron.iteration", "token", "password", "key", "Token", "user.token", "é", "\ud800", "k" * 100,
    "self", "handle", "span", "kind", "span_kind", "attributes", "args", "scope", "function",
]  # fmt: skip
attributes = st.dictionaries(st.sampled_from(KEYS), values, max_size=4)
mappings = st.dictionaries(st.one_of(st.sampled_from(KEYS), st.sampled_from([1, None, ("a",)])), values, max_size=4)
redact_keys = st.sampled_from([None, frozenset(), frozenset({"a", "b"}), {"a": 1}, ["a", "megatron.iteration"]])

GROUPS = ["g", "h", "i", "j"]
known_groups = st.sampled_from(GROUPS)
odd_groups = st.sampled_from(
    ["", "G", Text("g"), Colour.RED, "red", None, 1, 1.0, True, ("g",), frozenset({"g"}), b"g", "é"]
)
hashable_groups = pick(known_groups, known_groups, odd_groups)
groups = pick(*[known_groups] * 10, odd_groups, st.sampled_from([[], {}, {"g"}, Array()]))
all_groups = st.just(frozenset(GROUPS))
group_sets = pick(
    *[all_groups] * 6,
    st.frozensets(hashable_groups, max_size=6),
    st.one_of(st.sets(known_groups), st.lists(known_groups), st.sampled_from([(), ("g", "h"), {"g": 1}])),
    st.sampled_from(["gh", "", None, 3, b"g", ["g", []]]),
)
names = st.sampled_from(["s", "megatron.train_step", "", "é", "\ud800", "n" * 300, Text("sub"), None, 5])


# --- exceptions ---


class Failure(Exception):
    """An application's own."""


class Odd(Exception):
    def __str__(self) -> str:
        return "\ud800\0é"


class Unprintable(Exception):
    text: str | None = None

    def __str__(self) -> str:
        if self.text is None:
            raise RuntimeError("no text")
        return self.text


class Stop(BaseException):
    """An application's own, beside Exception."""


class Nested:
    class Inner(ValueError):
        """Its qualified name has a dot."""


EXCEPTIONS: dict[str, Any] = {
    "ValueError": lambda: ValueError("boom"),
    "empty": ValueError,
    "OSError": lambda: OSError(2, "gone"),
    "KeyError": lambda: KeyError("k"),
    "long": lambda: RuntimeError("x" * 500),
    "Failure": lambda: Failure("a", 1),
    "Odd": Odd,
    "Unprintable": Unprintable,
    "Inner": lambda: Nested.Inner("in"),
    "StopIteration": lambda: StopIteration("value"),
    "StopAsyncIteration": StopAsyncIteration,
    "group": lambda: ExceptionGroup("many", [ValueError(1), KeyError(2)]),
    "RuntimeError": lambda: RuntimeError("generator raised StopIteration"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "base group": lambda: BaseExceptionGroup("many", [KeyboardInterrupt()]),
    "Stop": Stop,
}
CATCHES: dict[str, Any] = {
    "Exception": Exception,
    "BaseException": BaseException,
    "ValueError": ValueError,
    "StopIteration": StopIteration,
    "KeyboardInterrupt": (KeyboardInterrupt, SystemExit),
}


class RaisedByLibrary(Exception):
    """Stands for an error of the library, whose text may be its own."""


# --- programs: lists of tuples, so that a failing one can be read ---

TRACERS = [None, None, None, "own", "library", "library's other", "no-op", "from the start"]
tracers = st.sampled_from(TRACERS)
PROVIDERS = [*["recording"] * 10, "limited", "limited", "record only", "sampled out", "none", "no-op"]

managers = pick(
    *[st.tuples(st.just("managed_span"), groups, names, tracers, attributes)] * 2,
    st.tuples(st.just("span_cm"), st.booleans(), names, tracers, attributes),
)
KINDS = ["function", "function", "method", "static", "class", "coroutine", "generator", "async generator"]
MISUSES = [
    lambda library: library.managed_span(),
    lambda library: library.managed_span("g"),
    lambda library: library.managed_span("g", "n", None, 1),
    lambda library: library.managed_span("g", "n", group="h"),
    lambda library: library.managed_span("g", "n", name="m"),
    lambda library: library.managed_span("g", "n", None, tracer=None),
    lambda library: library.managed_span([]),
    lambda library: library.span_cm(),
    lambda library: library.span_cm("n", None, True, 1),
    lambda library: library.span_cm("n", name="m"),
    lambda library: library.trace_fn("g"),
    lambda library: library.trace_fn("g", "n", None, 1),
    lambda library: library.trace_fn("g", "n", a=1),
    lambda library: library.is_span_group_enabled(),
    lambda library: library.is_span_group_enabled("g", "h"),
    lambda library: library.set_enabled_span_groups(),
    lambda library: library.safe_set_span_attributes(None, {"a": 1}),
    lambda library: library.safe_set_span_attributes(trace.get_current_span(), None),
    lambda library: library.safe_set_span_attributes(trace.get_current_span()),
    lambda library: library.redact_value("token"),
    lambda library: library.trace_fn("g", "n")(5),
]


_leaves = pick(
    *[
        st.one_of(
            st.tuples(st.just("ask"), pick(known_groups, odd_groups)),
            st.tuples(st.just("attribute"), st.sampled_from(KEYS), values),
            st.tuples(st.just("attributes"), st.just("current"), mappings, redact_keys),
            st.tuples(st.just("status"), st.sampled_from(["OK", "ERROR", "UNSET"])),
            st.tuples(st.just("event"), texts),
            st.tuples(st.just("build"), st.integers(0, 1), managers),
            st.tuples(st.just("call"), st.integers(0, 1)),
            st.tuples(st.just("carrier"), st.sampled_from([None, {}, {"traceparent": "x"}])),
            st.tuples(st.just("redact"), st.sampled_from(KEYS), texts, redact_keys),
        )
    ]
    * 3,
    # These end the block, or change what comes after.
    st.one_of(
        st.tuples(st.just("raise"), st.sampled_from(sorted(EXCEPTIONS))),
        st.tuples(st.just("raise"), st.sampled_from(sorted(EXCEPTIONS))),
        st.tuples(st.just("raise"), st.sampled_from(sorted(EXCEPTIONS))),
        st.tuples(st.just("groups"), group_sets),
        st.tuples(st.just("end")),
        st.tuples(st.just("attributes"), st.sampled_from(["yielded", "first"]), mappings, redact_keys),
        st.tuples(st.just("provider"), st.sampled_from(PROVIDERS)),
        st.tuples(st.just("ask"), groups),
        st.tuples(st.just("misuse"), st.integers(0, len(MISUSES) - 1)),
        st.tuples(st.just("decorate with managed_span"), st.sampled_from(GROUPS)),
    ),
)


@functools.cache
def _blocks(depth: int) -> st.SearchStrategy[Any]:
    body = _bodies(depth - 1)
    return st.one_of(
        st.tuples(st.just("with"), managers, st.just("with"), body),
        st.tuples(st.just("with"), managers, st.sampled_from(["ExitStack", "dunder"]), body),
        st.tuples(st.just("with"), managers, st.just("with"), body, st.sampled_from(sorted(EXCEPTIONS))),
        st.tuples(st.just("stack"), st.lists(managers, min_size=1, max_size=3), st.booleans(), body),
        st.tuples(st.just("enter"), st.integers(0, 1), managers, body),
        st.tuples(st.just("traced"), st.sampled_from(KINDS), groups, names, tracers, values, body),
        st.tuples(st.just("define"), st.integers(0, 1), st.sampled_from(GROUPS), names, tracers, body),
        st.tuples(st.just("decorated"), st.booleans(), names, tracers, attributes, st.integers(0, 2), body),
        st.tuples(st.just("try"), st.sampled_from(sorted(CATCHES)), body),
        st.tuples(st.just("elsewhere"), st.sampled_from(["thread", "context", "task"]), body),
    )


@st.composite
def _bodies(draw: Any, depth: int) -> Any:
    blocks = [_blocks(depth)] if depth else []
    return draw(st.lists(pick(_leaves, _leaves, *blocks), min_size=1, max_size=3))


programs = st.tuples(
    st.sampled_from(PROVIDERS),
    group_sets,
    st.lists(pick(_leaves, *[_blocks(4)] * 3), min_size=2, max_size=6),
)


# --- running one ---


class RecordOnly(Sampler):
    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        return SamplingResult(Decision.RECORD_ONLY)

    def get_description(self) -> str:
        return "RecordOnly"


def plain(value: Any) -> Any:
    """A value as its types and texts, so that True and 1, or two nans, compare as they should."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    return type(value).__name__, repr(value)


def facts(span: Any) -> dict[str, Any]:
    """What a finished span says, without times and ids."""
    return {
        "name": plain(span.name),
        "kind": span.kind.name,
        "scope": (span.instrumentation_scope.name, span.instrumentation_scope.version),
        "status": (span.status.status_code.name, span.status.description),
        "attributes": [(key, plain(value)) for key, value in span.attributes.items()],
        "events": [
            (event.name, {k: plain(v) for k, v in event.attributes.items() if k != "exception.stacktrace"})
            for event in span.events
        ],
        "stack traces": sum("exception.stacktrace" in event.attributes for event in span.events),
        "dropped": (span.dropped_attributes, span.dropped_events, span.dropped_links),
        "sampled": span.context.trace_flags.sampled,
    }


class Recorder:
    """A span processor that writes down what every other one would see."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self.started: list[Any] = []
        self.ended: list[Any] = []
        self.first: Any = None

    def _of(self, context: Any) -> Any:
        """A span as the number of its start."""
        return None if context is None or not context.is_valid else self._index.get(context.span_id, "foreign")

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._index[span.context.span_id] = len(self.started)
        self.first = self.first or span
        self.started.append(
            {
                "name": plain(span.name),
                "parent": self._of(span.parent),
                "remote parent": span.parent is not None and span.parent.is_remote,
                "given context": self._of(trace.get_current_span(parent_context).get_span_context()),
                "attributes at start": dict(span.attributes or {}),
                "one trace with parent": span.parent is None or span.parent.trace_id == span.context.trace_id,
            }
        )

    def _on_ending(self, span: Any) -> None:
        """Nothing to do."""

    def on_end(self, span: Any) -> None:
        self.ended.append(
            {
                "start": self._of(span.context),
                **facts(span),
                "links": [
                    (self._of(link.context), link.context.is_remote, dict(link.attributes)) for link in span.links
                ],
                "current at end": self._of(trace.get_current_span().get_span_context()),
            }
        )

    def shutdown(self) -> None:
        """Nothing to do."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def install_provider(kind: str, recorder: Recorder) -> None:
    """Make a provider global, as test fixtures do between two tests."""
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()
    if kind == "none":
        return
    if kind == "no-op":
        trace.set_tracer_provider(NoOpTracerProvider())
        return
    sampler = {"sampled out": ALWAYS_OFF, "record only": RecordOnly()}.get(kind, ALWAYS_ON)
    limits = SpanLimits(max_span_attributes=2, max_attribute_length=3, max_events=1) if kind == "limited" else None
    provider = TracerProvider(sampler=sampler, span_limits=limits, shutdown_on_exit=False)
    provider.add_span_processor(recorder)  # type: ignore[arg-type]
    trace.set_tracer_provider(provider)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextmanager
def listening(name: str) -> Any:
    """The warnings of a logger and those below it, which go nowhere else meanwhile."""
    logger, listener = logging.getLogger(name), _Listener()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(listener)
    try:
        yield listener.heard
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagate


def drive(kind: str, made: Any) -> Any:
    """Run what a function of that kind returned to its end; its result."""
    if kind == "coroutine":
        try:
            made.send(None)
        except StopIteration as stop:
            return stop.value
    elif kind == "generator":
        while True:
            try:
                next(made)
            except StopIteration as stop:
                return stop.value
    elif kind == "async generator":
        while True:
            try:
                made.asend(None).send(None)
            except StopIteration:
                continue
            except StopAsyncIteration:
                return "exhausted"
    return made


class Run:
    """One run of a program on a library."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.recorder = Recorder()
        self.log: list[Any] = []
        self.managers: dict[int, Any] = {}
        self.functions: dict[int, Any] = {}
        self.yielded: list[Any] = []
        self.depth = 0
        self.budget = 150
        self.limited = False

    def program(self, program: Any) -> dict[str, Any]:
        provider, enabled, body = program
        with listening("opentelemetry") as warnings:
            self.do_provider(provider)
            self.tracer_from_the_start = self.library.get_tracer("from the start")
            before = context_api.get_current()
            for statement in [("groups", enabled), *body]:
                self.do_try("BaseException", [statement])
            self.log.append(("context as before", context_api.get_current() is before))
        return {
            "log": self.log,
            "started": self.recorder.started,
            "ended": self.recorder.ended,
            "warnings": warnings,
        }

    def describe(self, error: BaseException | None) -> Any:
        if error is None:
            return None
        known = getattr(error, "by_program", False) or isinstance(error, RaisedByLibrary)
        # Nothing else than these of Python itself; an error of this interpreter must not look like a program's.
        assert known or re.search(r"unhashable type|^(async )?(coroutine|generator) raised", str(error)), repr(error)
        return (
            type(error).__qualname__,
            repr(error.args),
            self.describe(error.__cause__),
            self.describe(error.__context__),
            error.__suppress_context__,
            getattr(error, "__notes__", None),
        )

    def ask_library(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            kind = type(error).__name__
        self.log.append(("the library raised", kind))
        raise RaisedByLibrary(kind)

    def body(self, body: Any) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, statement: Any) -> None:
        self.budget -= 1
        if self.depth > 8 or self.budget < 0:
            self.log.append("too deep or long")
            return
        self.depth += 1
        try:
            getattr(self, "do_" + statement[0].replace(" ", "_"))(*statement[1:])
        finally:
            self.depth -= 1

    # parts

    def tracer(self, key: str | None) -> Any:
        return {
            None: lambda: None,
            "own": lambda: trace.get_tracer("own", "1.0"),
            "library": self.library.get_tracer,
            "library's other": lambda: self.library.get_tracer("other"),
            "no-op": NoOpTracer,
            "from the start": lambda: self.tracer_from_the_start,
        }[key]()

    def manager(self, manager: Any) -> Any:
        kind, group_or_record, name, tracer, attributes = manager
        if kind == "managed_span":
            return self.ask_library(self.library.managed_span, group_or_record, name, self.tracer(tracer), **attributes)
        return self.ask_library(
            self.library.span_cm, name, self.tracer(tracer), record_exception=group_or_record, **attributes
        )

    def see(self, span: Any) -> None:
        """Note what a manager yielded."""
        self.yielded.append(span)
        if span is None:
            self.log.append(("yielded", None))
        else:
            current = trace.get_current_span() is span
            self.log.append(("yielded", type(span).__name__, span.is_recording(), current))

    def inside(self, span: Any, body: Any) -> None:
        self.see(span)
        try:
            self.body(body)
        finally:
            self.yielded.pop()

    def block(self, manager: Any, body: Any) -> None:
        before = context_api.get_current()
        try:
            with manager as span:
                self.inside(span, body)
        finally:
            self.log.append(("after the block, context as before", context_api.get_current() is before))

    # statements

    def do_with(self, manager: Any, style: str, body: Any, error: str | None = None) -> None:
        if error:
            body = [*body, ("raise", error)]
        manager = self.manager(manager)
        if style == "with":
            self.block(manager, body)
        elif style == "ExitStack":
            with ExitStack() as stack:
                self.inside(stack.enter_context(manager), body)
        else:
            self.by_dunders(manager, body)

    def by_dunders(self, manager: Any, body: Any) -> None:
        span = type(manager).__enter__(manager)
        try:
            self.inside(span, body)
        except BaseException as error:
            swallowed = type(manager).__exit__(manager, type(error), error, error.__traceback__)
            self.log.append(("__exit__ returned", bool(swallowed)))
            raise
        swallowed = type(manager).__exit__(manager, None, None, None)
        self.log.append(("__exit__ returned", bool(swallowed)))

    def do_stack(self, managers: Any, closed_elsewhere: bool, body: Any) -> None:
        with ExitStack() as stack:
            for manager in managers:
                self.see(stack.enter_context(self.manager(manager)))
            try:
                self.body(body)
            finally:
                del self.yielded[-len(managers) :]
            if closed_elsewhere:
                closing = stack.pop_all()

                def close() -> None:
                    closing.close()

                close()

    def do_build(self, slot: int, manager: Any) -> None:
        self.managers[slot] = self.manager(manager)

    def do_enter(self, slot: int, manager: Any, body: Any) -> None:
        if slot not in self.managers:
            self.managers[slot] = self.manager(manager)
        self.block(self.managers[slot], body)

    def do_traced(self, kind: str, group: Any, name: Any, tracer: Any, result: Any, body: Any) -> None:
        received = []

        def run(*args: Any, **kwargs: Any) -> Any:
            """Doc."""
            received.append((args[-1], len(args), kwargs))
            self.body(body)
            return result

        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        def run_generator(*args: Any, **kwargs: Any) -> Any:
            received.append((args[-1], len(args), kwargs))
            for statement in body:
                self.statement(statement)
                yield
            return result

        async def run_async_generator(*args: Any, **kwargs: Any) -> Any:
            received.append((args[-1], len(args), kwargs))
            for statement in body:
                self.statement(statement)
                yield

        function = {
            "coroutine": run_coroutine,
            "generator": run_generator,
            "async generator": run_async_generator,
        }.get(kind, run)
        returned = self.library.run_traced(kind, group, name, self.tracer(tracer), function, self.ask_library)
        expected = "exhausted" if kind == "async generator" else result
        self.log.append(("returned", returned is expected, received))

    def do_define(self, slot: int, group: str, name: Any, tracer: Any, body: Any) -> None:
        def function(first: int, *, second: int = 2) -> int:
            self.body(body)
            return first + second

        self.functions[slot] = self.ask_library(self.library.trace_fn, group, name, self.tracer(tracer))(function)

    def do_call(self, slot: int) -> None:
        if slot in self.functions:
            function = self.functions[slot]
            self.log.append(("call gives", function(1), function.__name__, function.__wrapped__.__name__))
            self.log.append(("call gives", function(first=1, second=5), str(inspect.signature(function))))
            try:
                function(second=5)
            except TypeError as error:
                self.log.append(("call gives", str(error)))

    def do_decorated(self, record: bool, name: Any, tracer: Any, attributes: Any, times: int, body: Any) -> None:
        @self.manager(("span_cm", record, name, tracer, attributes))
        def function(value: int) -> int:
            """Doc."""
            self.body(body)
            return value

        self.log.append((function.__name__, function.__doc__, [function(number) for number in range(times)]))

    def do_decorate_with_managed_span(self, group: str) -> None:
        self.ask_library(self.library.managed_span(group, "n"), lambda: None)

    def do_ask(self, group: Any) -> None:
        self.log.append(("enabled", group, self.ask_library(self.library.is_span_group_enabled, group)))

    def do_groups(self, groups: Any) -> None:
        self.ask_library(self.library.set_enabled_span_groups, groups)

    def do_carrier(self, carrier: Any) -> None:
        self.library.state.set_pp_trace_carrier(carrier)
        self.log.append(("carrier", self.library.state.get_pp_trace_carrier() is carrier))

    def do_redact(self, key: str, value: str, keys: Any) -> None:
        extra = [] if keys is None else [keys]
        self.log.append(("redacted", self.library.redact_value(key, value, *extra)))

    def do_misuse(self, index: int) -> None:
        self.log.append(("misuse gives", index, self.ask_library(MISUSES[index], self.library) is None))

    def do_attribute(self, key: str, value: Any) -> None:
        if self.yielded and self.yielded[-1] is not None:
            self.yielded[-1].set_attribute(key, value)

    def do_attributes(self, target: str, attributes: Any, keys: Any) -> None:
        if target == "current":
            span = trace.get_current_span()
        else:
            span = self.recorder.first if target == "first" else (self.yielded or [None])[-1]
        extra = {} if keys is None else {"redact_keys": keys}
        self.ask_library(self.library.safe_set_span_attributes, span, attributes, **extra)

    def do_status(self, code: str) -> None:
        if self.yielded and self.yielded[-1] is not None:
            self.yielded[-1].set_status(StatusCode[code])

    def do_event(self, name: str) -> None:
        trace.get_current_span().add_event(name)

    def do_end(self) -> None:
        if self.yielded and self.yielded[-1] is not None:
            self.yielded[-1].end()

    def do_raise(self, key: str) -> None:
        # The event that the original makes of this one could push another out of a limited span.
        error = EXCEPTIONS["ValueError" if key == "Unprintable" and self.limited else key]()
        error.by_program = True
        raise error

    def do_try(self, key: str, body: Any) -> None:
        try:
            self.body(body)
        except CATCHES[key] as error:
            self.log.append(("caught", self.describe(error)))

    def do_provider(self, kind: str) -> None:
        self.limited |= kind == "limited"
        install_provider(kind, self.recorder)

    def do_elsewhere(self, where: str, body: Any) -> None:
        """In another thread, in a copy of the context, or in an asyncio task, each waited for."""
        yielded, self.yielded = self.yielded, []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self.body(body)
            except BaseException as error:
                failed.append(error)

        if where == "thread":
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        elif where == "context":
            contextvars.copy_context().run(run)
        else:

            async def main() -> None:
                await asyncio.create_task(asyncio.sleep(0))
                await asyncio.create_task(as_task())

            async def as_task() -> None:
                run()

            if self.in_event_loop():
                run()
            else:
                asyncio.run(main())
        self.yielded = yielded
        if failed:
            raise failed[0]

    @staticmethod
    def in_event_loop() -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True
