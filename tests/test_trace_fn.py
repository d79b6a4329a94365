"""trace_fn on every kind of function."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import pickle
import threading
import types
import weakref
from unittest import mock

import pytest
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from conftest import IMMORTAL_FUNCTIONS


@pytest.fixture
def on(lensfast, exporter):
    """The package with the group "on" enabled and a provider installed."""
    lensfast.set_enabled_span_groups({"on"})
    return lensfast


def current_name():
    return getattr(trace.get_current_span(), "name", None)


# Plain functions


def test_each_call_is_a_span(on, exporter):
    @on.trace_fn("on", "add")
    def add(x, y=10, *rest, scale=1, **more):
        return current_name(), (x + y) * scale, rest, more

    assert add(1) == ("add", 11, (), {})
    assert add(1, 2, 3, scale=2, other=4) == ("add", 6, (3,), {"other": 4})
    assert [span.name for span in exporter.get_finished_spans()] == ["add", "add"]
    assert exporter.get_finished_spans()[0].instrumentation_scope.name == "nemo.lens"


def test_the_gate_is_read_at_each_call(on, exporter):
    @on.trace_fn("off", "s")
    def function(*args, **kwargs):
        return current_name(), args, kwargs

    assert function(1, a=2) == (None, (1,), {"a": 2})
    on.set_enabled_span_groups({"off"})
    assert function(1, a=2) == ("s", (1,), {"a": 2})
    on.set_enabled_span_groups(frozenset())
    assert function() == (None, (), {})
    assert len(exporter.get_finished_spans()) == 1


def test_many_arguments(on):
    def function(*args, **kwargs):
        return args, kwargs

    for group in ("on", "off"):
        traced = on.trace_fn(group, "s")(function)
        args = tuple(range(300))
        kwargs = {f"k{i}": i for i in range(300)}
        assert traced(*args, **kwargs) == (args, kwargs)


def test_an_exception_is_recorded(on, exporter):
    error = ValueError("boom")

    @on.trace_fn("on", "s")
    def fail():
        raise error

    with pytest.raises(ValueError, match="boom") as caught:
        fail()
    assert caught.value is error
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ValueError: boom")
    assert [event.name for event in span.events] == ["exception"]


def test_a_base_exception_is_not_an_error(on, exporter):
    @on.trace_fn("on", "s")
    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.events) == (StatusCode.UNSET, ())


def test_recursion_and_threads(on, exporter):
    @on.trace_fn("on", "s")
    def count_down(n):
        return [] if n == 0 else [current_name(), *count_down(n - 1)]

    assert count_down(5) == ["s"] * 5
    threads = [threading.Thread(target=count_down, args=(5,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(exporter.get_finished_spans()) == 6 * 5


def test_an_explicit_tracer(on):
    asked = []

    class Tracer:
        def start_span(self, name, **_):
            asked.append(name)
            return trace.INVALID_SPAN

    @on.trace_fn("on", "s", Tracer())
    def function():
        return 1

    assert function() == 1
    assert asked == ["s"]


class Model:
    """Has methods of every kind; traced in the fixture below."""

    def method(self, x):
        return self, x

    def of_class(cls, x):  # noqa: N805
        return cls, x

    def of_nothing(x):  # noqa: N805
        return x


def traced_model(package, group):
    trace_fn = package.trace_fn(group, "s")
    return type(
        "TracedModel",
        (),
        {
            "method": trace_fn(Model.method),
            "of_class": classmethod(trace_fn(Model.of_class)),
            "of_nothing": staticmethod(trace_fn(Model.of_nothing)),
            "value": property(trace_fn(lambda self: 5)),
            "__call__": trace_fn(lambda self, x: ("called", x)),
        },
    )


@pytest.mark.parametrize("group", ["on", "off"])
def test_methods(on, exporter, group):
    cls = traced_model(on, group)
    model = cls()
    assert model.method(1) == (model, 1)
    assert cls.method(model, x=1) == (model, 1)
    bound = model.method
    assert bound(1) == (model, 1)
    assert bound.__self__ is model
    assert bound.__name__ == "method"
    assert model.of_class(2) == (cls, 2)
    assert cls.of_class(2) == (cls, 2)
    assert model.of_nothing(3) == 3
    assert model.value == 5
    assert model(4) == ("called", 4)
    assert str(inspect.signature(model.method)) == "(x)"
    assert len(exporter.get_finished_spans()) == (8 if group == "on" else 0)


def test_methods_and_inheritance(on, exporter):
    class Base:
        @on.trace_fn("on", "base")
        def work(self):
            return ["base"]

    class Child(Base):
        @on.trace_fn("on", "child")
        def work(self):
            return ["child", *super().work()]

    assert Child().work() == ["child", "base"]
    base, child = exporter.get_finished_spans()
    assert base.parent.span_id == child.context.span_id


def test_a_bound_method_stored_as_a_callback(on, exporter):
    class Ddp:
        @on.trace_fn("on", "grad_sync")
        def start_grad_sync(self, *unused):
            return unused

    callback = Ddp().start_grad_sync
    parameters = (i for i in range(3))
    (passed,) = callback(parameters)
    assert passed is parameters
    assert list(parameters) == [0, 1, 2]


def test_the_function_keeps_its_face(lensfast):
    def original(x: int, *, y: str = "a") -> float:
        """Does it."""
        return 1.0

    original.custom = "attribute"
    traced = lensfast.trace_fn("on", "s")(original)
    assert traced.__wrapped__ is original
    assert traced.__name__ == "original"
    assert traced.__qualname__ == original.__qualname__
    assert traced.__doc__ == "Does it."
    assert traced.__module__ == __name__
    assert traced.__annotations__ == original.__annotations__
    assert traced.custom == "attribute"
    assert inspect.signature(traced) == inspect.signature(original)
    assert inspect.unwrap(traced) is original
    assert "original" in repr(traced)
    traced.also = 1
    assert traced.also == 1
    assert not hasattr(original, "also")
    with pytest.raises(AttributeError):
        traced.missing  # noqa: B018


def test_what_is_not_a_function(on, exporter):
    partial = on.trace_fn("on", "partial")(functools.partial(int, base=2))
    assert partial("101") == 5
    builtin = on.trace_fn("on", "builtin")(len)
    assert builtin([1, 2]) == 2
    assert builtin.__name__ == "len"

    class Callable:
        def __call__(self, x):
            return x

    assert on.trace_fn("on", "object")(Callable())(3) == 3
    cls = on.trace_fn("on", "class")(dict)
    assert cls(a=1) == {"a": 1}
    assert [span.name for span in exporter.get_finished_spans()] == ["partial", "builtin", "object", "class"]


def test_partials_of_every_kind(on, exporter):
    async def coroutine(x):
        return x

    def generator(x):
        yield x

    async def asynchronous_generator(x):
        yield x

    async def collect(items):
        return [item async for item in items]

    trace_fn = on.trace_fn("on", "s")
    assert asyncio.run(trace_fn(functools.partial(coroutine, 1))()) == 1
    assert list(trace_fn(functools.partial(generator, 2))()) == [2]
    assert asyncio.run(collect(trace_fn(functools.partial(asynchronous_generator, 3))())) == [3]
    assert len(exporter.get_finished_spans()) == 3


@pytest.mark.parametrize("group", ["on", "off"])
def test_implicitly_static_methods(on, exporter, group):
    trace_fn = on.trace_fn(group, "s")

    class Base:
        @trace_fn
        def __new__(cls, x):
            return super().__new__(cls)

        @trace_fn
        def __init_subclass__(cls, **kwargs):
            cls.kwargs = kwargs

        @trace_fn
        def __class_getitem__(cls, item):
            return cls, item

    class Child(Base, a=1):
        pass

    assert isinstance(Base(1), Base)
    assert isinstance(Child(2).__new__(Child, 3), Child)
    assert Child.kwargs == {"a": 1}
    assert Base[int] == (Base, int)
    assert len(exporter.get_finished_spans()) == (5 if group == "on" else 0)


def test_it_passes_for_a_function(on):
    async def coroutine(x):
        """Waits."""

    for original in (plain_function, coroutine):
        traced = on.trace_fn("off", "s")(original)
        assert isinstance(traced, types.FunctionType)
        assert inspect.isfunction(traced)
        assert inspect.getsource(traced) == inspect.getsource(original)
    with pytest.raises(TypeError):
        mock.create_autospec(on.trace_fn("off", "s")(plain_function))(1, 2)


class Owner:
    """Keeps a traced method of its own, as trainers keep callbacks and modules a replaced forward."""

    def __init__(self, value):
        self.value = value

    def method(self, more=0):
        return self.value + more


def test_a_traced_bound_method(on, exporter):
    owner = Owner(1)
    method = owner.method
    owner.method = on.trace_fn("on", "outer")(on.trace_fn("on", "inner")(method))
    assert owner.method(2) == 3
    assert [span.name for span in exporter.get_finished_spans()] == ["inner", "outer"]
    assert inspect.ismethod(owner.method)
    assert isinstance(owner.method, types.MethodType)
    assert owner.method.__self__ is owner
    assert types.MethodType(owner.method.__func__, Owner(5))() == 5
    assert [span.name for span in exporter.get_finished_spans()][2:] == ["inner", "outer"]
    assert inspect.unwrap(owner.method) is Owner.method
    assert inspect.signature(owner.method) == inspect.signature(method)
    assert inspect.getsource(owner.method) == inspect.getsource(method)


def test_a_traced_bound_method_is_copied_with_its_object(on, exporter):
    owner = Owner(1)
    owner.method = on.trace_fn("on", "outer")(on.trace_fn("on", "inner")(owner.method))
    twin = copy.deepcopy(owner)
    twin.value = 10
    assert (owner.method(), twin.method()) == (1, 10)
    assert twin.method.__self__ is twin
    assert [span.name for span in exporter.get_finished_spans()] == ["inner", "outer"] * 2


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_traced_bound_method_pickles_as_the_method(on, exporter, protocol):
    """So that the object can be read where lensfast is not; what is read is not traced."""
    owner = Owner(1)
    owner.method = on.trace_fn("on", "s")(owner.method)
    for dumps in (pickle.dumps, pickle._dumps):
        pickled = dumps(owner, protocol)
        assert b"lensfast" not in pickled
        twin = pickle.loads(pickled)
        twin.value = 10
        assert type(twin.method) is types.MethodType
        assert twin.method(1) == 11
        assert pickle.loads(dumps(owner.method, protocol))(1) == 2
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("wrong", [None, 3, "name", classmethod(lambda cls: None)])
def test_what_cannot_be_called_is_refused(lensfast, wrong):
    with pytest.raises(TypeError, match="@staticmethod or @classmethod"):
        lensfast.trace_fn("on", "s")(wrong)


def test_odd_groups(lensfast):
    """As is_span_group_enabled treats them, at the call."""
    traced = lensfast.trace_fn(None, "s")(lambda: "ran")
    assert traced() == "ran"
    lensfast.set_enabled_span_groups({None})
    assert traced() == "ran"
    unhashable = lensfast.trace_fn([], "s")(lambda: "ran")
    with pytest.raises(TypeError, match="unhashable"):
        unhashable()


@pytest.mark.parametrize("arguments", [(), ("on",), ("on", "s", None, "more")])
def test_wrong_calls_of_the_factory(lensfast, arguments):
    with pytest.raises(TypeError, match="trace_fn"):
        lensfast.trace_fn(*arguments)


def plain_function(x):
    return x


def test_pickle_and_copy_by_reference(lensfast, monkeypatch):
    traced = lensfast.trace_fn("on", "s")(plain_function)
    monkeypatch.setitem(globals(), "plain_function", traced)
    assert pickle.loads(pickle.dumps(traced)) is traced
    assert copy.copy(traced) is traced
    assert copy.deepcopy([traced])[0] is traced


@pytest.mark.skipif(IMMORTAL_FUNCTIONS, reason="beside a second thread, 3.13t frees no function that is not nested")
def test_weak_references_and_cycles(lensfast):
    traced = lensfast.trace_fn("on", "s")(lambda: None)
    reference = weakref.ref(traced)
    traced.itself = traced
    del traced
    gc.collect()
    assert reference() is None


# Coroutines, generators, asynchronous generators: the whole run, not the creation

GROUPS = pytest.mark.parametrize("group", ["on", "off"])


@GROUPS
def test_the_kind_of_a_function_stays(on, group):
    async def coroutine(): ...
    def generator():
        yield

    async def asynchronous_generator():
        yield

    def plain(): ...

    @types.coroutine
    def awaitable_generator():
        yield

    trace_fn = on.trace_fn(group, "s")
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    for function in (coroutine, generator, asynchronous_generator, plain, awaitable_generator):
        assert [kind(trace_fn(function)) for kind in kinds] == [kind(function) for kind in kinds]
        cls = type("C", (), {"method": trace_fn(function)})
        assert [kind(cls().method) for kind in kinds] == [kind(function) for kind in kinds]
        assert trace_fn(function).__name__ == function.__name__
    assert asyncio.iscoroutinefunction(trace_fn(coroutine))


@GROUPS
def test_a_coroutine(on, exporter, group):
    @on.trace_fn(group, "s")
    async def work(x):
        before = current_name()
        await asyncio.sleep(0)
        return before, current_name(), x

    coroutine = work(5)
    assert inspect.iscoroutine(coroutine)
    assert exporter.get_finished_spans() == ()
    name = "s" if group == "on" else None
    assert asyncio.run(coroutine) == (name, name, 5)
    assert len(exporter.get_finished_spans()) == (group == "on")


def test_a_coroutine_is_gated_when_it_is_called(on, exporter):
    @on.trace_fn("on", "s")
    async def work():
        return current_name()

    gated_on = work()
    on.set_enabled_span_groups(frozenset())
    gated_off = work()
    on.set_enabled_span_groups({"on"})
    assert asyncio.run(gated_on) == "s"
    assert asyncio.run(gated_off) is None


def test_a_coroutine_that_fails_and_one_that_is_cancelled(on, exporter):
    @on.trace_fn("on", "s")
    async def work(error):
        await asyncio.sleep(0)
        raise error

    with pytest.raises(ValueError, match="boom"):
        asyncio.run(work(ValueError("boom")))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work(asyncio.CancelledError()))
    failed, cancelled = exporter.get_finished_spans()
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "ValueError: boom")
    assert cancelled.status.status_code is StatusCode.UNSET


@GROUPS
def test_concurrent_coroutines(on, exporter, group):
    @on.trace_fn(group, "s")
    async def work():
        with on.managed_span("on", "inside") as span:
            await asyncio.sleep(0)
            assert trace.get_current_span() is span

    async def main():
        await asyncio.gather(*(work() for _ in range(10)))

    asyncio.run(main())
    found = exporter.get_finished_spans()
    outer = {span.context.span_id for span in found if span.name == "s"}
    assert len(outer) == (10 if group == "on" else 0)
    assert {span.parent.span_id for span in found if span.name == "inside" and span.parent} == outer


@GROUPS
def test_a_generator(on, exporter, group):
    log = []

    @on.trace_fn(group, "s")
    def generate(n):
        log.append(current_name())
        received = yield n
        log.append(received)
        try:
            yield n + 1
        except ValueError:
            log.append(current_name())
        yield n + 2
        return "result"

    def consume():
        generator = generate(1)
        assert inspect.isgenerator(generator)
        assert exporter.get_finished_spans() == ()
        assert next(generator) == 1
        assert current_name() == "consumer"
        assert generator.send("sent") == 2
        assert generator.throw(ValueError("thrown in")) == 3
        assert current_name() == "consumer"
        return (yield from generator)

    with on.span_cm("consumer"):
        whole = consume()
        with pytest.raises(StopIteration) as stop:
            next(whole)
    assert stop.value.value == "result"
    name = "s" if group == "on" else "consumer"
    assert log == [name, "sent", name]
    assert [span.name for span in exporter.get_finished_spans()] == (["s"] if group == "on" else []) + ["consumer"]


def test_a_generator_takes_the_time_of_its_whole_run(on, exporter):
    """Spans made between its items lie within it in time, and are no children of it."""

    @on.trace_fn("on", "generator")
    def generate():
        yield
        yield

    for _ in generate():
        with on.span_cm("between"):
            pass
    *between, generator = exporter.get_finished_spans()
    assert [span.parent for span in between] == [None, None]
    for span in between:
        assert generator.start_time <= span.start_time <= span.end_time <= generator.end_time


@GROUPS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_spans_open_across_yields(on, exporter, group, asynchronous):
    """What is current in the body stays current in the body; the consumer does not see it."""
    held = []

    @on.trace_fn(group, "generator")
    def generate():
        with on.managed_span("on", "epoch"):
            held.append(context_api.get_current())
            for number in range(3):
                with on.managed_span("on", f"batch {number}"):
                    pass
                yield
        with on.managed_span("on", "after"):
            pass

    @on.trace_fn(group, "generator")
    async def generate_asynchronously():
        with on.managed_span("on", "epoch"):
            for number in range(3):
                with on.managed_span("on", f"batch {number}"):
                    pass
                yield
        with on.managed_span("on", "after"):
            pass

    async def consume():
        async for _ in generate_asynchronously():
            if group == "on":
                assert current_name() == "consumer"

    with on.span_cm("consumer"):
        if asynchronous:
            asyncio.run(consume())
        else:
            for _ in generate():
                if group == "on":
                    assert current_name() == "consumer"
        assert current_name() == "consumer"
    if held:  # somebody may keep the body's context
        assert group == "off" or trace.get_current_span(held[0]).name == "epoch"
    if group == "off":
        return  # a plain generator shows its spans to its consumer
    found = {span.name: span for span in exporter.get_finished_spans()}
    parents = {name: span.parent and span.parent.span_id for name, span in found.items()}
    ids = {name: span.context.span_id for name, span in found.items()}
    assert parents == {
        **{f"batch {number}": ids["epoch"] for number in range(3)},
        "epoch": ids["generator"],
        "after": ids["generator"],
        "generator": ids["consumer"],
        "consumer": None,
    }


@GROUPS
def test_a_generator_that_changes_threads(on, exporter, group):
    @on.trace_fn(group, "s")
    def generate():
        with on.managed_span("on", "inside") as inside:
            yield
            assert group == "off" or trace.get_current_span() is inside

    generator = generate()
    next(generator)
    thread = threading.Thread(target=lambda: list(generator))
    thread.start()
    thread.join()
    assert {span.name for span in exporter.get_finished_spans()} == {"inside", *(["s"] if group == "on" else [])}
    assert current_name() is None


@GROUPS
def test_a_generator_closed_early_and_elsewhere(on, exporter, group, caplog):
    closed = []

    @on.trace_fn(group, "s")
    def generate():
        try:
            yield 1
        finally:
            closed.append(current_name())

    generator = generate()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert closed == (["s"] if group == "on" else [None])
    assert current_name() is None
    assert [span.status.status_code for span in exporter.get_finished_spans()] == (
        [StatusCode.UNSET] if group == "on" else []
    )
    assert caplog.text == ""


@GROUPS
def test_a_generator_that_fails(on, exporter, group):
    @on.trace_fn(group, "s")
    def generate():
        yield 1
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        list(generate())
    assert [span.status.description for span in exporter.get_finished_spans()] == (
        ["ValueError: boom"] if group == "on" else []
    )


@GROUPS
def test_a_generator_that_ignores_its_end(on, group):
    @on.trace_fn(group, "s")
    def stubborn():
        with contextlib.suppress(GeneratorExit):
            yield
        yield

    generator = stubborn()
    next(generator)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        generator.close()


@GROUPS
def test_an_awaitable_generator_can_be_awaited(on, group):
    @on.trace_fn(group, "s")
    @types.coroutine
    def old_style():
        yield
        return current_name()

    async def main():
        return await old_style()

    assert asyncio.run(main()) == ("s" if group == "on" else None)


@GROUPS
def test_an_asynchronous_generator(on, exporter, group):
    log = []

    @on.trace_fn(group, "s")
    async def generate(n):
        log.append(current_name())
        received = yield n
        log.append(received)
        await asyncio.sleep(0)
        try:
            yield n + 1
        except ValueError:
            log.append(current_name())
        yield n + 2

    async def main():
        with on.span_cm("consumer"):
            generator = generate(1)
            assert inspect.isasyncgen(generator)
            assert await anext(generator) == 1
            assert current_name() == "consumer"
            assert await generator.asend("sent") == 2
            assert await generator.athrow(ValueError("thrown in")) == 3
            assert [item async for item in generator] == []

    asyncio.run(main())
    name = "s" if group == "on" else "consumer"
    assert log == [name, "sent", name]
    assert [span.name for span in exporter.get_finished_spans()] == (["s"] if group == "on" else []) + ["consumer"]


@GROUPS
def test_an_asynchronous_generator_closed_early(on, exporter, group, caplog):
    closed = []

    @on.trace_fn(group, "s")
    async def generate():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.append(current_name())

    async def close():
        generator = generate()
        await anext(generator)
        await generator.aclose()

    async def abandon():
        async for _ in generate():
            break
        gc.collect()
        for _ in range(10):  # the event loop closes it in its next turns
            await asyncio.sleep(0)

    async def abandon_at_the_end():
        held.append(generate())
        await anext(held[0])

    held = []
    asyncio.run(close())
    asyncio.run(abandon())
    asyncio.run(abandon_at_the_end())
    name = "s" if group == "on" else None
    assert closed == [name, name, name]
    assert len(exporter.get_finished_spans()) == (3 if group == "on" else 0)
    assert {span.status.status_code for span in exporter.get_finished_spans()} <= {StatusCode.UNSET}
    assert current_name() is None
    assert caplog.text == ""


@GROUPS
def test_an_asynchronous_generator_that_fails(on, exporter, group):
    @on.trace_fn(group, "s")
    async def generate():
        yield 1
        raise ValueError("boom")

    async def main():
        async for _ in generate():
            pass

    with pytest.raises(ValueError, match="boom"):
        asyncio.run(main())
    assert [span.status.description for span in exporter.get_finished_spans()] == (
        ["ValueError: boom"] if group == "on" else []
    )


BY_VALUE = """
import asyncio

@lensfast.trace_fn("step", "plain")
def plain(x: int = 1, *, y=2):
    return x + y

@lensfast.trace_fn("step", "coroutine")
async def coroutine(x):
    await asyncio.sleep(0)
    return x

@lensfast.trace_fn("step", "generator")
def generator(n):
    yield from range(n)

class Actor:
    @lensfast.trace_fn("step", "method")
    def method(self, x):
        return x

    @staticmethod
    @lensfast.trace_fn("step", "static")
    def static(x):
        return x
"""


def test_what_is_pickled_by_value_traces_where_it_arrives(lensfast, exporter):
    """Ray ships the classes of its actors this way, and cloudpickle the functions of a script."""
    cloudpickle = pytest.importorskip("cloudpickle")
    namespace = {"lensfast": lensfast, "__name__": "__main__"}
    exec(BY_VALUE, namespace)
    names = ("plain", "coroutine", "generator", "Actor")
    shipped = pickle.loads(cloudpickle.dumps([namespace[name] for name in names]))
    plain, coroutine, generator, actor = shipped
    assert plain is not namespace["plain"]
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(generator)
    assert str(inspect.signature(plain)) == "(x: 'int' = 1, *, y=2)"

    def run():
        exporter.clear()
        assert (plain(), plain(5, y=5)) == (3, 10)
        assert asyncio.run(coroutine(4)) == 4
        assert list(generator(2)) == [0, 1]
        assert actor().method(6) == 6
        assert actor.static(7) == 7
        return [span.name for span in exporter.get_finished_spans()]

    assert run() == []
    lensfast.set_enabled_span_groups({"step"})
    assert run() == ["plain", "plain", "coroutine", "generator", "method", "static"]
    lensfast.set_enabled_span_groups(frozenset())
    assert run() == []
