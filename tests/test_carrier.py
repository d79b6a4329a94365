"""carry_context: the current context, in other threads and tasks."""

import asyncio
import gc
import inspect
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as context_api


@pytest.fixture
def carry_context(lensfast):
    return lensfast.propagation.carry_context


@pytest.fixture
def tracer(exporter):
    return trace.get_tracer("test")


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed here")


def current():
    return trace.get_current_span()


def in_thread(function, *args):
    """What `function` gives, or raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def parents(exporter):
    """The name of each finished span's parent."""
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent.span_id) if span.parent else None for span in spans}


# As a context manager


def test_the_context_is_current_in_the_block_and_no_longer(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()
    assert current() is trace.INVALID_SPAN
    with carrier as entered:
        assert entered is carrier
        assert current() is step
    assert current() is trace.INVALID_SPAN


def test_baggage_is_carried_too(carry_context):
    token = context_api.attach(baggage.set_baggage("job", "j7"))
    carrier = carry_context()
    context_api.detach(token)

    def read():
        with carrier:
            return baggage.get_baggage("job")

    assert baggage.get_baggage("job") is None
    assert in_thread(read) == "j7"


def test_it_is_the_context_of_the_moment_it_was_made(carry_context, tracer):
    with tracer.start_as_current_span("outer") as outer:
        carrier = carry_context()
        with tracer.start_as_current_span("inner") as inner, carrier:
            assert current() is outer
        assert inner.get_span_context().is_valid


def test_a_thread_is_left_as_it_was(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()

    def work():
        before = context_api.get_current()
        with carrier:
            seen = current()
        return seen, context_api.get_current() is before

    assert in_thread(work) == (step, True)


def test_an_exception_passes_and_the_context_is_left(carry_context, tracer):
    with tracer.start_as_current_span("step"):
        carrier = carry_context()
    with pytest.raises(KeyError), carrier:
        raise KeyError("x")
    assert current() is trace.INVALID_SPAN


def test_it_may_be_entered_again_inside_and_afterwards(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()
    with carrier:
        with tracer.start_as_current_span("own") as own:
            with carrier:
                assert current() is step
            assert current() is own
        assert current() is step
    with carrier:
        assert current() is step
    assert current() is trace.INVALID_SPAN


def test_several_threads_are_in_it_at_once(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()
    meet = threading.Barrier(4, timeout=20)

    def work(number):
        with carrier:
            meet.wait()
            with tracer.start_as_current_span(f"work {number}") as own:
                meet.wait()
                inside = current() is own
            meet.wait()
            after = current() is step
            meet.wait()
        return inside, after, current() is trace.INVALID_SPAN

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [(True, True, True)] * 4


def test_carriers_that_are_left_in_another_order_leave_nothing(carry_context, tracer):
    with tracer.start_as_current_span("a"):
        first = carry_context()
    with tracer.start_as_current_span("b"):
        second = carry_context()
    with tracer.start_as_current_span("base") as base:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert current() is base


def test_what_was_attached_inside_and_left_there_goes_with_it(carry_context, tracer):
    with tracer.start_as_current_span("step"):
        carrier = carry_context()
    with carrier:
        context_api.attach(trace.set_span_in_context(tracer.start_span("left open")))
    assert current() is trace.INVALID_SPAN


def test_leaving_what_was_entered_elsewhere_does_nothing(carry_context, tracer, caplog):
    with tracer.start_as_current_span("step"):
        carrier = carry_context()
        with tracer.start_as_current_span("here") as here:
            in_thread(carrier.__enter__)
            carrier.__exit__(None, None, None)
            assert current() is here
    with caplog.at_level(logging.WARNING):
        carrier.__exit__(None, None, None)
    assert not caplog.records


def test_a_runtime_context_that_fails_is_logged_and_not_raised(carry_context, monkeypatch, caplog):
    class Broken:
        def attach(self, context):
            raise RuntimeError("no context")

        get_current = staticmethod(context_api.get_current)

    carrier = carry_context()
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(context_api, "_RUNTIME_CONTEXT", Broken())
        for _ in range(2):
            with carrier:
                pass
    assert [record.getMessage() for record in caplog.records] == [
        "could not attach 'the carried context' (the program goes on; later failures of this kind are not logged)"
    ]


def test_a_dropped_carrier_keeps_no_span(carry_context, tracer, exporter):
    class Span(trace.NonRecordingSpan):
        pass

    span = Span(trace.INVALID_SPAN_CONTEXT)
    reference = weakref.ref(span)
    with trace.use_span(span):
        carrier = carry_context()
    with carrier:
        pass
    in_thread(carrier(lambda: None))
    del span
    assert reference() is not None
    del carrier
    gc.collect()
    assert reference() is None


# As a decorator


def test_a_wrapped_function_runs_in_the_context(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()

    @carrier
    def work(x, /, y=1, *rest, z):
        """What it does."""
        return current(), (x, y, rest, z)

    assert in_thread(lambda: work(1, 2, 3, z=4)) == (step, (1, 2, (3,), 4))
    assert current() is trace.INVALID_SPAN
    assert (work.__name__, work.__doc__) == ("work", "What it does.")
    assert str(inspect.signature(work)) == "(x, /, y=1, *rest, z)"


def test_arguments_called_self_and_function_are_passed_on(carry_context):
    assert carry_context()(dict)(self=1, function=2) == {"self": 1, "function": 2}


def test_a_wrapped_function_may_call_itself(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()

    @carrier
    def count(n):
        return [current(), *count(n - 1)] if n else []

    assert count(3) == [step] * 3
    assert current() is trace.INVALID_SPAN


def test_only_callables_are_wrapped(carry_context):
    with pytest.raises(TypeError, match="a context carrier wraps functions, not int"):
        carry_context()(3)


def test_timers_and_pools(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()
    seen = []
    timer = threading.Timer(0, carrier(lambda: seen.append(current())))
    timer.start()
    timer.join()
    with ThreadPoolExecutor(1) as pool:
        seen.append(pool.submit(carrier(current)).result())
        assert pool.submit(current).result() is trace.INVALID_SPAN
    assert seen == [step, step]


# asyncio


def test_a_task_enters_and_leaves_for_itself(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()

    async def work(entered, leave):
        with carrier:
            entered.set()
            await leave.wait()
            inside = current()
        return inside, current()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(work(entered, leave)) for _ in range(3)]
        await entered.wait()
        assert current() is trace.INVALID_SPAN
        leave.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [(step, trace.INVALID_SPAN)] * 3


def test_a_task_that_outlives_the_block_it_was_started_in(carry_context, tracer, caplog):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()
    with tracer.start_as_current_span("other") as other:
        second = carry_context()

    async def work(leave):
        await leave.wait()
        with second:
            assert current() is other
        return current()

    async def main():
        leave = asyncio.Event()
        with carrier:
            task = asyncio.create_task(work(leave))
            await asyncio.sleep(0)
        assert current() is trace.INVALID_SPAN
        leave.set()
        return await task

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(main()) is step  # a task's context is a copy of that in which it was made
    assert not caplog.records


def test_a_coroutine_function_is_wrapped_as_one(carry_context, tracer):
    with tracer.start_as_current_span("step") as step:
        carrier = carry_context()

    @carrier
    async def work():
        await asyncio.sleep(0)
        return current()

    assert inspect.iscoroutinefunction(work)

    async def main():
        return await asyncio.gather(work(), work()), current()

    assert asyncio.run(main()) == ([step, step], trace.INVALID_SPAN)


# Backward passes


def hooked(torch, hook):
    """A loss in whose backward pass `hook` is called."""
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    return y.sum()


def test_a_span_in_a_hook_belongs_to_the_step_wherever_backward_runs(lensfast, carry_context, exporter, torch):
    def hook(gradient):
        with lensfast.span_cm("hook"):
            pass

    before = in_thread(context_api.get_current)
    with ThreadPoolExecutor(1) as pool:
        with lensfast.span_cm("step"):
            loss = hooked(torch, carry_context()(hook))
            pool.submit(loss.backward).result()
        assert pool.submit(context_api.get_current).result() == before
    assert parents(exporter) == {"hook": "step", "step": None}


def test_on_a_thread_of_autograds_own(lensfast, carry_context, exporter, torch):
    threads = []

    def deep(levels):
        """Backward passes inside one another: so many that autograd takes another thread."""

        def hook(gradient):
            if levels:
                deep(levels - 1)
                return
            threads.append(threading.get_ident())
            with lensfast.span_cm("hook"):
                pass

        with torch.enable_grad():
            hooked(torch, hook if levels else carrier(hook)).backward()

    with lensfast.span_cm("step"):
        carrier = carry_context()
        deep(80)
    assert threads != [threading.get_ident()]
    assert parents(exporter) == {"hook": "step", "step": None}


def test_two_backward_passes_at_once_keep_apart(lensfast, carry_context, exporter, torch):
    meet = threading.Barrier(2, timeout=20)

    def hook(gradient):
        meet.wait()
        with lensfast.span_cm(f"hook {current().name[-1]}"):
            meet.wait()

    with ThreadPoolExecutor(2) as pool:
        passes = []
        for number in range(2):
            with lensfast.span_cm(f"step {number}"):
                loss = hooked(torch, carry_context()(hook))
                passes.append(pool.submit(loss.backward))
        for each in passes:
            each.result()
    assert parents(exporter) == {"hook 0": "step 0", "hook 1": "step 1", "step 0": None, "step 1": None}
