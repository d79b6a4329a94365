"""Enabled spans: managed_span, handle.span, span_cm, attributes, exceptions, contexts."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import enum
import gc
import inspect
import logging
import threading
from contextlib import ExitStack

import pytest
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode


@pytest.fixture
def spans(exporter):
    """The finished spans by name."""
    return lambda: {span.name: span for span in exporter.get_finished_spans()}


@pytest.fixture
def on(lensfast, exporter):
    """The package with the group "on" enabled and a provider installed."""
    lensfast.set_enabled_span_groups({"on"})
    return lensfast


def managers(package, name="s", **attributes):
    """One of each kind of context manager that makes a span."""
    return {
        "managed_span": package.managed_span("on", name, **attributes),
        "handle": package.span_group("on").span(name, **attributes),
        "span_cm": package.span_cm(name, **attributes),
    }


EACH = pytest.mark.parametrize("kind", ["managed_span", "handle", "span_cm"])


@EACH
def test_a_span_is_current_and_recorded(on, spans, kind):
    before = context_api.get_current()
    with managers(on, "outer", a=1)[kind] as outer:
        assert trace.get_current_span() is outer
        assert outer.is_recording()
        with managers(on, "inner")[kind] as inner:
            assert trace.get_current_span() is inner
        assert trace.get_current_span() is outer
    assert context_api.get_current() is before
    found = spans()
    assert found["outer"].parent is None
    assert found["inner"].parent.span_id == found["outer"].context.span_id
    assert found["outer"].kind is SpanKind.INTERNAL
    assert found["outer"].status.status_code is StatusCode.UNSET
    assert found["outer"].instrumentation_scope.name == "nemo.lens.helpers"
    assert dict(found["outer"].attributes) == {"a": 1}


@EACH
def test_a_span_starts_when_it_is_entered(on, exporter, kind):
    manager = managers(on)[kind]
    assert exporter.get_finished_spans() == ()
    with on.span_cm("parent") as parent, manager:
        pass
    child = exporter.get_finished_spans()[0]
    assert child.parent.span_id == parent.get_span_context().span_id


@EACH
def test_every_way_of_entering(on, exporter, kind):
    with ExitStack() as stack:
        assert stack.enter_context(managers(on)[kind]) is trace.get_current_span()
    manager = managers(on)[kind]
    span = type(manager).__enter__(manager)
    assert trace.get_current_span() is span
    assert type(manager).__exit__(manager, None, None, None) is None
    manager = managers(on)[kind]
    manager.__enter__()
    manager.__exit__(None, None, None)
    assert len(exporter.get_finished_spans()) == 3
    assert trace.get_current_span() is trace.INVALID_SPAN


@EACH
def test_a_manager_may_be_entered_again_and_within_itself(on, exporter, kind):
    """As the shared disabled span may, so that switching a group on breaks nothing."""
    manager = managers(on)[kind]
    with manager as first:
        with manager as second:
            assert trace.get_current_span() is second
        assert trace.get_current_span() is first
    with manager:
        pass
    inner, outer, third = exporter.get_finished_spans()
    assert inner.parent.span_id == outer.context.span_id
    assert outer.parent is None
    assert third.parent is None


def test_leaving_without_entering_raises(on):
    with pytest.raises(RuntimeError, match="without being entered"):
        on.managed_span("on", "s").__exit__(None, None, None)


def test_disabled_groups_record_nothing(on, exporter):
    with on.managed_span("off", "s") as span, on.span_group("off").span("s"):
        assert span is None
        assert trace.get_current_span() is trace.INVALID_SPAN
    assert exporter.get_finished_spans() == ()


def test_switching_inside_the_block(on, exporter):
    with on.managed_span("on", "kept"):
        on.set_enabled_span_groups(frozenset())
    with on.managed_span("on", "never"):
        on.set_enabled_span_groups({"on"})
    assert [span.name for span in exporter.get_finished_spans()] == ["kept"]


def test_recursion(on, exporter):
    def factorial(n):
        with on.managed_span("on", f"factorial {n}"):
            return 1 if n == 0 else n * factorial(n - 1)

    assert factorial(20) == 2432902008176640000
    finished = exporter.get_finished_spans()
    assert [span.name for span in finished] == [f"factorial {n}" for n in range(21)]
    assert [span.parent.span_id for span in finished[:-1]] == [span.context.span_id for span in finished[1:]]


def test_span_kind_is_chosen_on_the_handle(on, spans):
    handle = on.span_group("on")
    with handle.span("server", span_kind=SpanKind.SERVER, a=1):
        pass
    with on.managed_span("on", "attribute", span_kind="just an attribute"):
        pass
    assert spans()["server"].kind is SpanKind.SERVER
    assert dict(spans()["server"].attributes) == {"a": 1}
    assert spans()["attribute"].kind is SpanKind.INTERNAL
    assert dict(spans()["attribute"].attributes) == {"span_kind": "just an attribute"}


def test_a_wrong_span_kind_is_logged_and_internal(on, spans, caplog):
    with on.span_group("on").span("s", span_kind="server"):
        pass
    assert spans()["s"].kind is SpanKind.INTERNAL
    assert "span_kind" in caplog.text
    assert "SpanKind" in caplog.text


def test_attribute_names_that_are_parameters_elsewhere(on, spans):
    with on.span_group("on").span("s", group="g", handle="h", self="s", record_exception="r"):
        pass
    with on.managed_span("on", "m", self="s", record_exception="r", span_kind="k", handle="h"):
        pass
    with on.span_cm("c", group="g", self="s"):
        pass
    assert dict(spans()["s"].attributes) == {"group": "g", "handle": "h", "self": "s", "record_exception": "r"}
    assert dict(spans()["m"].attributes) == {"self": "s", "record_exception": "r", "span_kind": "k", "handle": "h"}
    assert dict(spans()["c"].attributes) == {"group": "g", "self": "s"}


# Attributes


class Color(str, enum.Enum):
    RED = "red"


class Loss(float):
    pass


ATTRIBUTES = {
    "bool": (True, True),
    "int": (7, 7),
    "float": (1.5, 1.5),
    "str": ("x", "x"),
    "empty str": ("", ""),
    "float subclass": (Loss(2.5), 2.5),
    "str enum": (Color.RED, "red"),
    "list": ([1, 2], (1, 2)),
    "tuple": (("a", "b"), ("a", "b")),
    "empty list": ([], ()),
    "tokens": ("not a redacted key", "not a redacted key"),
    "Token": ("case counts", "case counts"),
    "user.token": ("the whole name counts", "the whole name counts"),
    "token": ("hunter2", "[REDACTED]"),
    "password": ("hunter2", "[REDACTED]"),
    "prompt": ("hello", "[REDACTED]"),
    "input_text": ("hello", "[REDACTED]"),
    "output_text": ("hello", "[REDACTED]"),
    "text": ("hello", "[REDACTED]"),
    "secret": ("hunter2", "[REDACTED]"),
    "key": (17, 17),
}
DROPPED = {
    "None": None,
    "dict": {"a": 1},
    "set": {1},
    "bytes": b"x",
    "nested list": [[1]],
    "list with None": [1, None],
    "object": object(),
    "complex": 1j,
    "generator": (i for i in ()),
}


@EACH
def test_attributes(on, exporter, kind):
    given = {**{name: value for name, (value, _) in ATTRIBUTES.items()}, **DROPPED}
    with managers(on, "s", **given)[kind]:
        pass
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes) == {name: expected for name, (_, expected) in ATTRIBUTES.items()}


def test_safe_set_span_attributes(on, spans):
    with on.span_cm("s") as span:
        on.safe_set_span_attributes(span, {name: value for name, (value, _) in ATTRIBUTES.items()} | DROPPED)
    assert dict(spans()["s"].attributes) == {name: expected for name, (_, expected) in ATTRIBUTES.items()}
    with on.span_cm("own keys") as span:
        on.safe_set_span_attributes(
            span, {"token": "kept", "mine": "hidden", "list": ["x"]}, frozenset({"mine", "list"})
        )
    assert dict(spans()["own keys"].attributes) == {"token": "kept", "mine": "[REDACTED]", "list": ("x",)}


def test_safe_set_span_attributes_on_other_spans(on):
    class NotRecording(trace.NonRecordingSpan):
        def set_attribute(self, key, value):
            raise AssertionError("not asked")

    on.safe_set_span_attributes(NotRecording(trace.INVALID_SPAN_CONTEXT), {"a": 1})
    with pytest.raises(AttributeError):
        on.safe_set_span_attributes(None, {"a": 1})


def test_redact_value(lensfast):
    assert lensfast.redact_value("token", "x") == "[REDACTED]"
    assert lensfast.redact_value("Token", "x") == "x"
    assert lensfast.redact_value("token", "x", frozenset()) == "x"
    assert lensfast.DEFAULT_REDACT_KEYS == {
        "prompt", "input_text", "output_text", "text", "password", "token", "secret", "key",
    }  # fmt: skip


def test_signatures_are_the_originals(lensfast):
    def shape(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind.name, p.default) for p in parameters]

    none, word = inspect.Parameter.empty, "POSITIONAL_OR_KEYWORD"
    keys = lensfast.DEFAULT_REDACT_KEYS
    assert shape(lensfast.managed_span) == [
        ("group", word, none), ("name", word, none), ("tracer", word, None), ("attributes", "VAR_KEYWORD", none),
    ]  # fmt: skip
    assert shape(lensfast.trace_fn) == [("group", word, none), ("name", word, none), ("tracer", word, None)]
    assert shape(lensfast.span_cm) == [
        ("name", word, none), ("tracer", word, None), ("record_exception", word, True),
        ("attributes", "VAR_KEYWORD", none),
    ]  # fmt: skip
    assert shape(lensfast.safe_set_span_attributes) == [
        ("span", word, none), ("attributes", word, none), ("redact_keys", word, keys),
    ]  # fmt: skip
    assert shape(lensfast.redact_value) == [("key", word, none), ("value", word, none), ("redact_keys", word, keys)]
    assert shape(lensfast.span_attributes) == [("attributes", word, none)]
    assert shape(lensfast.is_span_group_enabled) == [("group", word, none)]
    assert shape(lensfast.span_group("on").span) == [
        ("name", word, none), ("tracer", word, None), ("span_kind", "KEYWORD_ONLY", None),
        ("attributes", "VAR_KEYWORD", none),
    ]  # fmt: skip


# Exceptions


def described(kind):
    return "boom" if kind in {"managed_span", "handle"} else "ValueError: boom"


@EACH
def test_an_exception_is_recorded_and_goes_on(on, spans, kind):
    error = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as caught, managers(on)[kind]:
        raise error
    assert caught.value is error
    span = spans()["s"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, described(kind))
    (event,) = span.events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == "ValueError"
    assert event.attributes["exception.message"] == "boom"
    assert event.attributes["exception.escaped"] == "False"
    assert "ValueError: boom" in event.attributes["exception.stacktrace"]
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_span_cm_without_the_event(on, spans):
    with pytest.raises(ValueError, match="boom"), on.span_cm("s", record_exception=False):
        raise ValueError("boom")
    assert spans()["s"].events == ()
    assert spans()["s"].status.status_code is StatusCode.ERROR
    assert spans()["s"].status.description == "ValueError: boom"


@EACH
@pytest.mark.parametrize("error", [KeyboardInterrupt("x"), SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_a_base_exception_is_not_an_error(on, spans, kind, error):
    with pytest.raises(type(error)) as caught, managers(on)[kind]:
        raise error
    assert caught.value is error
    assert spans()["s"].status.status_code is StatusCode.UNSET
    assert spans()["s"].events == ()
    assert spans()["s"].end_time is not None


@EACH
def test_stop_iteration_stays_itself(on, spans, kind):
    with pytest.raises(StopIteration) as caught, managers(on)[kind]:
        raise StopIteration(5)
    assert caught.value.value == 5
    assert spans()["s"].status.status_code is StatusCode.ERROR


def test_every_level_records_the_exception(on, spans):
    with pytest.raises(ValueError, match="boom"), on.managed_span("on", "outer"), on.managed_span("on", "inner"):
        raise ValueError("boom")
    assert [len(spans()[name].events) for name in ("outer", "inner")] == [1, 1]


def test_a_status_of_ok_stays(on, spans):
    with pytest.raises(ValueError, match="boom"), on.managed_span("on", "s") as span:
        span.set_status(StatusCode.OK)
        raise ValueError("boom")
    assert spans()["s"].status.status_code is StatusCode.OK
    assert len(spans()["s"].events) == 1


def test_an_exception_that_cannot_be_told(on, spans, caplog):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(Mute), on.managed_span("on", "s"):
        raise Mute
    assert (spans()["s"].status.status_code, spans()["s"].status.description) == (StatusCode.ERROR, "Mute")
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_value_that_cannot_be_looked_at_costs_only_itself(on, spans, caplog):
    class Evil:
        @property
        def __class__(self):
            raise RuntimeError("no class")

    with on.managed_span("on", "s", a=1, evil=Evil(), z=2):
        pass
    assert dict(spans()["s"].attributes) == {"a": 1, "z": 2}
    assert "could not use attribute 'evil'" in caplog.text


@pytest.mark.parametrize("name", [None, 3, "", b"name", "x" * 1_000_000])
def test_odd_span_names_do_not_break_the_block(on, exporter, name):
    with on.managed_span("on", name), on.span_cm(name):
        pass
    assert len(exporter.get_finished_spans()) == 2


def test_the_context_is_left_before_the_span_ends(lensfast):
    seen = []

    class Watcher(SimpleSpanProcessor):
        def on_end(self, span):
            seen.append((span.name, getattr(trace.get_current_span(), "name", None)))

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Watcher(InMemorySpanExporter()))
    trace.set_tracer_provider(provider)
    lensfast.set_enabled_span_groups({"on"})
    with lensfast.managed_span("on", "outer"), lensfast.managed_span("on", "inner"):
        pass
    assert seen == [("inner", "outer"), ("outer", None)]


def test_attributes_come_after_the_start(lensfast):
    seen = []

    class Watcher(SimpleSpanProcessor):
        def on_start(self, span, parent_context=None):
            seen.append(dict(span.attributes))

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Watcher(InMemorySpanExporter()))
    trace.set_tracer_provider(provider)
    with lensfast.span_cm("s", a=1):
        pass
    assert seen == [{}]


# Contexts: threads, tasks, generators


def test_threads_have_their_own_current_span(on, exporter):
    barrier = threading.Barrier(4)

    def work(number):
        with on.managed_span("on", f"outer {number}"):
            barrier.wait()
            with on.managed_span("on", f"inner {number}"):
                barrier.wait()

    with on.managed_span("on", "main"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {span.name: span for span in exporter.get_finished_spans()}
    for number in range(4):
        assert found[f"outer {number}"].parent is None
        assert found[f"inner {number}"].parent.span_id == found[f"outer {number}"].context.span_id


def test_tasks_inherit_and_do_not_disturb(on, exporter):
    async def work(number):
        with on.managed_span("on", f"task {number}") as span:
            await asyncio.sleep(0)
            assert trace.get_current_span() is span
            with on.managed_span("on", f"step {number}"):
                await asyncio.sleep(0)
            assert trace.get_current_span() is span

    async def main():
        with on.managed_span("on", "main"):
            await asyncio.gather(*(work(number) for number in range(20)))

    asyncio.run(main())
    found = {span.name: span for span in exporter.get_finished_spans()}
    for number in range(20):
        assert found[f"task {number}"].parent.span_id == found["main"].context.span_id
        assert found[f"step {number}"].parent.span_id == found[f"task {number}"].context.span_id


@EACH
def test_left_in_another_context(on, spans, kind, caplog):
    """The span ends, nothing is logged, and no dead span stays current where it was entered."""
    caplog.set_level(logging.DEBUG)
    with on.span_cm("parent") as parent:
        manager = managers(on)[kind]
        manager.__enter__()
        contextvars.Context().run(manager.__exit__, None, None, None)
        assert spans()["s"].end_time is not None
        assert trace.get_current_span() is parent
        with on.span_cm("next"):
            pass
    assert spans()["next"].parent.span_id == parent.get_span_context().span_id
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert caplog.text == ""


@EACH
def test_left_in_a_copy_of_its_context(on, spans, kind, caplog):
    caplog.set_level(logging.DEBUG)
    with on.span_cm("parent") as parent:
        manager = managers(on)[kind]
        manager.__enter__()

        def leave():
            manager.__exit__(None, None, None)
            return trace.get_current_span()

        assert contextvars.copy_context().run(leave) is parent
        assert trace.get_current_span() is parent
    assert caplog.text == ""


@EACH
def test_a_generator_closed_in_another_thread(on, spans, kind, caplog):
    caplog.set_level(logging.DEBUG)

    def generate():
        with managers(on)[kind]:
            yield 1

    generator = generate()
    assert next(generator) == 1
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert spans()["s"].status.status_code is StatusCode.UNSET
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert caplog.text == ""


@EACH
def test_overlapping_generators(on, exporter, kind):
    """Closed in the order they were opened: neither leaves a dead span behind."""

    def generate(name):
        with managers(on, name)[kind]:
            yield

    first, second = generate("first"), generate("second")
    next(first), next(second)
    first.close()
    second.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["first", "second"]
    assert trace.get_current_span() is trace.INVALID_SPAN


@EACH
def test_nested_spans_left_elsewhere(on, exporter, kind, caplog):
    """Outer and inner both end in another context; neither stays current where they were opened."""
    caplog.set_level(logging.DEBUG)

    def generate():
        with managers(on, "outer")[kind], managers(on, "inner")[kind]:
            yield

    context = contextvars.copy_context()
    generator = generate()
    context.run(next, generator)
    generator.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["inner", "outer"]
    assert context.run(trace.get_current_span) is trace.INVALID_SPAN
    assert caplog.text == ""


@EACH
@pytest.mark.parametrize("order", ["bac", "acb", "abc", "cab", "bca", "cba"])
def test_left_in_any_order(on, exporter, kind, order):
    with on.span_cm("parent") as parent:
        open_managers = {name: managers(on, name)[kind] for name in "abc"}
        for manager in open_managers.values():
            manager.__enter__()
        for name in order:
            open_managers[name].__exit__(None, None, None)
        assert trace.get_current_span() is parent
    assert [span.name for span in exporter.get_finished_spans()] == [*order, "parent"]
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert not on._spans._redirected


def test_a_foreign_span_left_in_any_order(on, exporter):
    """A span of another library need not be hashable, nor weakly referable."""

    class Odd(trace.NonRecordingSpan):
        __slots__ = ()
        __hash__ = None

        def is_recording(self):
            return True

    class Tracer:
        def start_span(self, name, **_):
            return Odd(trace.INVALID_SPAN_CONTEXT)

    open_managers = [on.span_cm("s", Tracer()) for _ in range(3)] + [on.span_cm("ours")]
    for manager in open_managers:
        manager.__enter__()
    for manager in open_managers:
        manager.__exit__(None, None, None)
    assert [span.name for span in exporter.get_finished_spans()] == ["ours"]


@EACH
def test_an_abandoned_generator(on, exporter, kind, caplog):
    def generate():
        with managers(on)[kind]:
            yield

    def abandon():
        next(generate())

    contextvars.copy_context().run(abandon)
    gc.collect()
    assert [span.name for span in exporter.get_finished_spans()] == ["s"]
    assert caplog.text == ""


def test_a_cancelled_task(on, exporter, caplog):
    async def work():
        with on.managed_span("on", "cancelled"):
            await asyncio.sleep(60)

    async def main():
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert trace.get_current_span() is trace.INVALID_SPAN

    asyncio.run(main())
    assert [span.name for span in exporter.get_finished_spans()] == ["cancelled"]
    assert caplog.text == ""


def test_a_context_attached_inside_and_forgotten(on):
    """What the block left attached goes with it, as a token's reset would have it."""
    with on.managed_span("on", "s"):
        context_api.attach(context_api.set_value("left", "behind"))
    assert context_api.get_value("left") is None


# Tracers and providers


def new_provider():
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return provider, memory


def names(memory):
    return [span.name for span in memory.get_finished_spans()]


def test_the_default_tracer_follows_the_provider(lensfast, monkeypatch):
    lensfast.set_enabled_span_groups({"on"})

    @lensfast.trace_fn("on", "function")
    def function():
        pass

    def use():
        with lensfast.managed_span("on", "managed") as span:
            function()
        return span

    assert use().is_recording() is False
    for _ in range(2):
        provider, memory = new_provider()
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        use()
        use()
        assert names(memory) == ["function", "managed"] * 2
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert use().is_recording() is False
    assert len(names(memory)) == 4


def test_the_default_tracer_is_resolved_when_the_span_starts(lensfast, monkeypatch):
    manager = lensfast.span_cm("s")
    provider, memory = new_provider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with manager:
        pass
    assert names(memory) == ["s"]


@pytest.mark.parametrize("patched", ["get_tracer", "get_tracer_provider"])
def test_a_patched_api_is_asked(on, exporter, monkeypatch, patched):
    with on.managed_span("on", "before"):
        pass
    provider, memory = new_provider()
    replacement = provider.get_tracer if patched == "get_tracer" else lambda: provider
    monkeypatch.setattr(on.helpers.trace, patched, replacement)
    with on.managed_span("on", "patched"):
        pass
    assert names(memory) == ["patched"]
    second, second_memory = new_provider()
    monkeypatch.setattr(on.helpers.trace, patched, second.get_tracer if patched == "get_tracer" else lambda: second)
    with on.managed_span("on", "patched again"):
        pass
    assert (names(memory), names(second_memory)) == (["patched"], ["patched again"])
    monkeypatch.undo()
    with on.managed_span("on", "after"):
        pass
    assert names(exporter) == ["before", "after"]


@EACH
def test_an_explicit_tracer_is_used(on, exporter, kind):
    provider, memory = new_provider()
    with managers(on, tracer=provider.get_tracer("mine"))[kind]:
        pass
    assert names(exporter) == []
    (span,) = memory.get_finished_spans()
    assert span.instrumentation_scope.name == "mine"


def test_no_tracer_is_looked_up_while_disabled(on, monkeypatch):
    def forbidden(*_):
        raise AssertionError("looked up")

    monkeypatch.setattr(trace, "get_tracer", forbidden)
    with on.managed_span("off", "s"):
        pass


@EACH
def test_without_a_provider_the_span_does_not_record(lensfast, kind):
    lensfast.set_enabled_span_groups({"on"})
    with managers(lensfast)[kind] as span:
        assert span is not None
        assert span.is_recording() is False


# Telemetry never breaks the program


class Broken:
    """A tracer whose spans fail at one point."""

    def __init__(self, at):
        self.at = at

    def start_span(self, name, **_):
        if self.at == "start_span":
            raise RuntimeError("broken at start_span")
        at = self.at

        class BrokenSpan(trace.NonRecordingSpan):
            def is_recording(self):
                return True

            def fail(self, *_, **__):
                raise RuntimeError(f"broken at {at}")

        setattr(BrokenSpan, at, BrokenSpan.fail)
        return BrokenSpan(trace.INVALID_SPAN_CONTEXT)


@EACH
@pytest.mark.parametrize(
    "at", ["start_span", "set_attributes", "record_exception", "set_status", "is_recording", "end"]
)
def test_a_broken_tracer_is_logged_once_and_the_block_runs(on, kind, at, caplog):
    with on.span_cm("parent") as parent:
        for _ in range(3):
            ran = False
            with pytest.raises(ValueError, match="from the block"), managers(on, a=1, tracer=Broken(at))[kind] as span:
                assert span is not None
                span.add_event("usable")
                ran = True
                raise ValueError("from the block")
            assert ran
        assert trace.get_current_span() is parent
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the program goes on" in caplog.text
    assert f"broken at {at}" in caplog.text


@pytest.mark.parametrize("tracer", ["a string", 3, object()])
def test_a_tracer_that_is_none(on, tracer, caplog):
    with on.managed_span("on", "s", tracer):
        pass
    assert "could not start span 's'" in caplog.text


# span_cm as a decorator, span_attributes


def test_span_cm_decorates(on, exporter):
    @on.span_cm("s", a=1)
    def add(x, y):
        """Adds."""
        return x + y

    assert (add(1, 2), add(x=3, y=4)) == (3, 7)
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert [dict(span.attributes) for span in exporter.get_finished_spans()] == [{"a": 1}, {"a": 1}]


def test_span_attributes_scopes(on):
    """Inside the block new spans of lensfast's own provider get them; here only the stack of scopes is looked at."""
    scoped = on.helpers._scoped_attributes
    with on.span_attributes({"a": 1, "b": 1}) as nothing:
        assert nothing is None
        with on.span_attributes({"b": 2}):
            assert scoped.get() == {"a": 1, "b": 2}
        assert scoped.get() == {"a": 1, "b": 1}
    assert scoped.get() == {}
    scope = on.span_attributes({"a": 1})
    scope.__enter__()
    contextvars.Context().run(scope.__exit__, None, None, None)
    assert scoped.get() == {}


# emit_span


def test_emit_span(on, spans):
    emit_span = on.span_utilities.emit_span
    with on.span_cm("parent") as parent:
        span = emit_span(None, "s", 1700000000.5, "1700000001.123456789", attributes={"a": 1, "token": "x", "no": None})
        assert trace.get_current_span() is parent
    found = spans()["s"]
    assert span.get_span_context().span_id == found.context.span_id
    assert (found.start_time, found.end_time) == (1700000000500000000, 1700000001123456789)
    assert dict(found.attributes) == {"a": 1, "token": "[REDACTED]"}
    assert found.parent.span_id == parent.get_span_context().span_id
    assert found.instrumentation_scope.name == "nemo.lens"


def test_emit_span_by_group(on, exporter):
    emit_span = on.span_utilities.emit_span
    assert emit_span(None, "s", "not", "looked at", group="off") is None
    assert emit_span(None, "s", 1, 1, group="on") is not None
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (1_000_000_000, 1_000_000_000)


def test_emit_span_clamps_clock_skew(on, spans, caplog):
    on.span_utilities.emit_span(None, "s", 10.5, 10.25, attributes={"inverted.skew": "overridden"})
    assert (spans()["s"].start_time, spans()["s"].end_time) == (10_500_000_000, 10_500_000_000)
    assert dict(spans()["s"].attributes) == {
        "inverted.skew": True,
        "inverted.start_epoch_seconds": "10.5",
        "inverted.end_epoch_seconds": "10.25",
        "inverted.delta_seconds": "0.25",
    }
    assert "clock skew" in caplog.text


def test_emit_span_is_exact_in_any_decimal_context(on, spans):
    with decimal.localcontext(prec=6, traps=[decimal.Inexact]):
        on.span_utilities.emit_span(None, "s", "1700000000.123456789", "1700000000.1234567899999999999999999999999999")
    assert (spans()["s"].start_time, spans()["s"].end_time) == (1700000000123456789, 1700000000123456789)


def test_emit_span_with_a_broken_tracer(on, caplog):
    assert on.span_utilities.emit_span(Broken("start_span"), "s", 1, 2) is None
    assert "could not emit span 's'" in caplog.text


@pytest.mark.parametrize("wrong", ["x", "", None, float("nan"), float("inf"), "-Infinity", "1e999999", 1e12])
def test_emit_span_wants_finite_times(on, wrong):
    emit_span = on.span_utilities.emit_span
    with pytest.raises(ValueError, match="start_epoch_seconds must be finite"):
        emit_span(None, "s", wrong, 1)
    with pytest.raises(ValueError, match="end_epoch_seconds must be finite"):
        emit_span(None, "s", 1, wrong)


def test_emit_span_context_and_tracer(on, exporter):
    provider, memory = new_provider()
    with on.span_cm("parent"):
        on.span_utilities.emit_span(provider.get_tracer("mine"), "s", 1, 2, context=context_api.Context())
    assert memory.get_finished_spans()[0].parent is None
