"""What consumers' own tests and frameworks reach into, while nemo.lens is lensfast."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import driver
import pytest
from driver import Consumer
from inventory import REMOTE_CARRIER, REMOTE_SPAN, REMOTE_TRACE, rows
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode


@pytest.fixture
def nemo_lens(lensfast: ModuleType) -> Iterator[ModuleType]:
    with driver.installed(lensfast) as package:
        yield package


def names(exporter: InMemorySpanExporter) -> list[str]:
    return [span.name for span in exporter.get_finished_spans()]


def row_of(generation: str, name: str) -> Any:
    return next(row for row in rows(generation) if row.name == name)


# State


def test_assigning_the_enabled_groups_moves_the_gate(
    nemo_lens: ModuleType, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = driver.load("megatron").LENS

    @lens.trace_fn("microbatch", "forward")
    def forward() -> None:
        with lens.managed_span("microbatch", "bridge"), lens.managed_span("layer", "layer"):
            pass

    with monkeypatch.context() as patched:
        patched.setattr("nemo.lens.state._ENABLED_GROUPS", frozenset({"microbatch"}))
        assert lens.is_span_group_enabled("microbatch")
        assert not lens.is_span_group_enabled("layer")
        assert nemo_lens.enabled_span_groups() == {"microbatch"}
        forward()
    assert names(exporter) == ["bridge", "forward"]
    assert not lens.is_span_group_enabled("microbatch")
    forward()
    assert names(exporter) == ["bridge", "forward"]
    nemo_lens.set_enabled_span_groups({"layer"})
    assert nemo_lens.state._ENABLED_GROUPS == frozenset({"layer"})
    assert isinstance(nemo_lens.state._ENABLED_GROUPS, frozenset)


def test_assigning_the_carrier_is_seen(nemo_lens: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    carrier: dict[str, str] = {}
    nemo_lens.state.set_pp_trace_carrier(carrier)
    assert nemo_lens.state._PP_TRACE_CARRIER is carrier
    monkeypatch.setattr("nemo.lens.state._PP_TRACE_CARRIER", None)
    assert nemo_lens.state.get_pp_trace_carrier() is None


def test_telemetry_is_set_up_again_once_the_flag_is_reset(
    nemo_lens: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    Consumer("megatron-mimo", "all")
    assert nemo_lens.handle._INITIALIZED is True
    with pytest.raises(RuntimeError, match="already been initialised"):
        Consumer("megatron-mimo", "all")
    # As a consumer's fixture does: OpenTelemetry's globals, and the flag.
    monkeypatch.setattr("nemo.lens.handle._INITIALIZED", False)
    trace._TRACER_PROVIDER, trace._TRACER_PROVIDER_SET_ONCE = None, trace.Once()
    exporter = InMemorySpanExporter()
    config = nemo_lens.NemoLensConfig(
        enabled=True,
        export_strategy="all_ranks",
        traces_enabled=True,
        metrics_enabled=False,
        logs_enabled=False,
        span_groups="microbatch",
        _span_group_cls=driver.load("megatron").MegatronMainSpanGroup,
    )
    nemo_lens.setup_telemetry(config, 0, 1, span_exporter=exporter)
    with nemo_lens.managed_span("microbatch", "forward"):
        pass
    trace.get_tracer_provider().force_flush()
    assert names(exporter) == ["forward"]


def test_an_unknown_group_is_refused_by_the_class(nemo_lens: ModuleType) -> None:
    for generation in ("megatron-seed", "rl-v1"):
        with pytest.raises(ValueError, match=r"Unknown span group.*nonsense"):
            Consumer(generation, "default,nonsense")
    Consumer("rl-v2", "default,nonsense")
    assert nemo_lens.pending_span_groups() == {"nonsense"}


# Set-up


def test_megatron_s_configuration(nemo_lens: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own variables, then the library's, and the command line over both."""
    seen: list[Any] = []

    def record(config: Any, **others: Any) -> None:
        seen.append((config.enabled, config.service_name, config.span_groups, sorted(config.resolved_span_groups)))

    monkeypatch.setattr("nemo.lens.handle.setup_telemetry", record)
    monkeypatch.setenv("NEMO_LENS_ENABLED", "1")
    monkeypatch.setenv("NEMO_LENS_SPAN_GROUPS", "job")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    initialize = driver.load("megatron").initialize
    initialize("megatron-seed")
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "Default,microbatch")
    monkeypatch.setenv("MEGATRON_OTEL_ENABLED", "0")
    initialize("megatron-seed")
    arguments = Namespace(otel_enabled=True, otel_service_name="gpt", otel_span_groups="layer")
    initialize("megatron-seed", args=arguments)
    assert seen == [
        (True, "pretraining", "job", ["job"]),
        (
            False,
            "pretraining",
            "Default,microbatch",
            ["checkpoint", "evaluate", "inference", "job", "microbatch"],
        ),
        (True, "gpt", "layer", ["layer"]),
    ]


def test_replacing_setup_telemetry_of_the_package(nemo_lens: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = mock.Mock()
    monkeypatch.setattr("nemo.lens.setup_telemetry", setup)
    assert Consumer("rl-v1").handle is setup.return_value
    assert setup.call_args.kwargs["world_size"] == 1


def test_metrics_are_recorded_on_exporting_ranks_only(nemo_lens: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = driver.load("megatron")
    monkeypatch.setenv("MEGATRON_OTEL_ENABLED", "1")
    off = megatron.initialize("megatron-seed", rank=0, world_size=2)
    assert not off.is_exporting
    megatron.record_training_metrics(off, lambda: pytest.fail("read from the device"), 1.0)
    megatron.record_training_metrics(None, lambda: pytest.fail("read from the device"), 1.0)
    assert len(megatron._INSTRUMENTS) == 0

    monkeypatch.setattr("nemo.lens.handle._INITIALIZED", False)
    reader = InMemoryMetricReader()
    handle = megatron.initialize(
        "megatron-seed", rank=1, world_size=2, span_exporter=InMemorySpanExporter(), metric_reader=reader
    )
    assert handle.is_exporting
    for loss in (3.0, 2.0):
        megatron.record_training_metrics(handle, lambda loss=loss: loss, 0.5)
    assert len(megatron._INSTRUMENTS) == 1
    points = nemo_lens.testing.metric_points(reader)
    assert points["megatron.train.loss"][0].value == 2.0
    assert (points["megatron.train.iteration_time"][0].count, points["megatron.train.iteration_time"][0].sum) == (
        2,
        1.0,
    )


def test_shutdown_is_bounded_with_a_dead_collector(nemo_lens: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    with socket.create_server(("127.0.0.1", 0)) as collector:  # accepts, and never answers
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        # In seconds; what an unbounded shutdown would take.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
        monkeypatch.setenv("NEMO_RL_OTEL_ENABLED", "1")
        monkeypatch.setenv("NEMO_RL_OTEL_METRICS_ENABLED", "0")
        rl = driver.load("nemo_rl_v2")
        handle = rl.initialize("rl-v2")
        with rl.managed_span("job", "rl.grpo.job", tracer=handle.tracer):
            pass
        closing = threading.Thread(target=rl.shut_down, args=(handle,), daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        trace._TRACER_PROVIDER = None  # nobody is to wait for it once more
    assert not nemo_lens.is_span_group_enabled("job")
    with rl.managed_span("job", "after") as span:
        assert span is None


# Names


def test_functions_say_that_they_are_nemo_lens_s(nemo_lens: ModuleType) -> None:
    gym = driver.load("resolved")
    assert gym.NEMO_LENS_AVAILABLE
    for function in (gym.managed_span, gym.safe_set_span_attributes, gym.span_cm, gym.trace_fn):
        assert function.__module__ == "nemo.lens.helpers"
    assert gym.is_span_group_enabled.__module__ == "nemo.lens.state"


def test_every_name_that_a_consumer_imports_is_there(nemo_lens: ModuleType) -> None:
    """Read from the syntax trees, so that what a fallback would hide is found."""
    imported = set()
    for standin in driver.STANDINS:
        for node in ast.walk(ast.parse(Path(__file__).with_name(f"{standin}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo.lens"):
                imported |= {(node.module, alias.name) for alias in node.names}
    assert ("nemo.lens.state", "is_span_group_enabled") in imported
    assert [(m, name) for m, name in sorted(imported) if not hasattr(importlib.import_module(m), name)] == []
    assert callable(importlib.import_module("nemo.lens.providers").build_providers)


@pytest.mark.parametrize("target", ["nemo.lens.helpers.trace.get_tracer", "opentelemetry.trace.get_tracer"])
def test_a_patched_get_tracer_is_asked(nemo_lens: ModuleType, exporter: InMemorySpanExporter, target: str) -> None:
    lens = driver.load("resolved")
    nemo_lens.set_enabled_span_groups({"verify"})

    @lens.trace_fn("verify", "traced")
    def traced() -> None:
        """Does nothing."""

    def spans() -> None:
        with lens.managed_span("verify", "managed"), lens.span_cm("ungated"):
            traced()

    spans()
    before = names(exporter)
    assert before == ["traced", "ungated", "managed"]
    elsewhere = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(elsewhere))
    with mock.patch(target, return_value=provider.get_tracer("patched")) as get_tracer:
        spans()
        with lens.managed_span("off", "disabled"):
            pass
    assert [call.args[0] for call in get_tracer.call_args_list] == [
        "nemo.lens.helpers",
        "nemo.lens.helpers",
        "nemo.lens",
    ]
    assert (names(elsewhere), names(exporter)) == (before, before)
    spans()
    assert names(exporter) == before * 2


# Functions that frameworks look into


class Actor:
    """Has the methods that Ray would call."""

    def plain(self, prompts: list[str], *, temperature: float = 1.0) -> str:
        return f"{len(prompts)} at {temperature}"

    async def coroutine(self, prompts: list[str]) -> trace.Span:
        await asyncio.sleep(0)
        return trace.get_current_span()


def test_traced_methods_look_like_what_they_are(nemo_lens: ModuleType, exporter: InMemorySpanExporter) -> None:
    trace_fn = driver.load("resolved").trace_fn
    undecorated = {"plain": Actor.plain, "coroutine": Actor.coroutine}

    class Traced(Actor):
        plain = trace_fn("generation", "plain")(Actor.plain)
        coroutine = trace_fn("generation", "coroutine")(Actor.coroutine)

    for enabled in (frozenset[str](), frozenset({"generation"})):
        nemo_lens.set_enabled_span_groups(enabled)
        assert dict(inspect.getmembers(Traced, inspect.isfunction)).keys() == undecorated.keys()
        for name, function in undecorated.items():
            traced, bound = getattr(Traced, name), getattr(Traced(), name)
            assert inspect.unwrap(traced) is function
            assert traced.__wrapped__ is function
            assert inspect.signature(traced) == inspect.signature(function)
            assert inspect.signature(bound) == inspect.signature(getattr(Actor(), name))
            assert (traced.__name__, traced.__qualname__, traced.__module__) == (
                function.__name__,
                function.__qualname__,
                function.__module__,
            )
            assert inspect.ismethod(bound)
        assert not inspect.iscoroutinefunction(Traced.plain)
        assert inspect.iscoroutinefunction(Traced.coroutine)
        assert Traced().plain(["a", "b"], temperature=0.5) == "2 at 0.5"
    asyncio.run(Traced().coroutine([]))
    assert names(exporter) == ["plain", "coroutine"]


def test_a_signature_may_be_put_on_a_traced_function(nemo_lens: ModuleType) -> None:
    @driver.load("resolved").trace_fn("verify", "verify")
    def verify(*args: Any, **kwargs: Any) -> None:
        """Its real parameters are told by a signature."""

    shown = inspect.Signature([inspect.Parameter("body", inspect.Parameter.KEYWORD_ONLY)])
    verify.__signature__ = shown
    assert verify.__signature__ is shown
    assert inspect.signature(verify) is shown


def test_a_traced_coroutine_runs_inside_its_span(nemo_lens: ModuleType, exporter: InMemorySpanExporter) -> None:
    nemo_lens.set_enabled_span_groups({"nvrx.ft"})

    @driver.load("nvrx_registry").trace_fn("nvrx.ft", "rendezvous")
    async def rendezvous() -> trace.Span:
        await asyncio.sleep(0)
        raise OSError("nobody came")

    with pytest.raises(OSError, match="nobody came"):
        asyncio.run(rendezvous())
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "OSError: nobody came")


def test_a_web_server_reads_parameters_through_the_wrappers(
    nemo_lens: ModuleType, exporter: InMemorySpanExporter
) -> None:
    """And its own spans come from nemo.lens.contrib.fastapi, where their group is on."""
    fastapi = pytest.importorskip("fastapi", reason="FastAPI is not installed")
    pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="its instrumentation is not installed")
    pytest.importorskip("httpx", reason="httpx, which FastAPI's test client needs, is not installed")
    from fastapi.testclient import TestClient

    gym = driver.load("nemo_gym")
    for group in ("verify", "server"):
        exporter.clear()
        app = fastapi.FastAPI()

        @app.post("/verify/{item}")
        @gym.traced_endpoint("verify", "gym.verify", lambda: {"nemo.gym.server.name": "math"})
        async def verify(item: int, strict: bool = False) -> dict[str, Any]:
            return {"item": item, "strict": strict}

        nemo_lens.set_enabled_span_groups({"verify", "http_client", group})
        gym.serve(app)
        with nemo_lens.get_tracer().start_as_current_span("HTTP POST", kind=SpanKind.CLIENT) as client:
            headers = gym.request_headers()
        response = TestClient(app).post("/verify/3?strict=1", headers=headers)
        assert response.json() == {"item": 3, "strict": True}
        spans = exporter.get_finished_spans()
        (inner,) = [span for span in spans if span.name == "gym.verify"]
        assert inner.attributes == {"nemo.gym.server.name": "math"}
        # FastAPI makes spans of its own, too, from some version on.
        servers = [s for s in spans if s.instrumentation_scope.name == "opentelemetry.instrumentation.fastapi"]
        if group == "server":
            (server,) = [span for span in servers if span.kind is SpanKind.SERVER]
            assert server.parent.span_id == client.get_span_context().span_id
            assert inner.parent.span_id == server.context.span_id
        else:
            assert servers == []


# Managers that are built, entered and left in different places


def test_a_manager_built_early_starts_when_it_is_entered(nemo_lens: ModuleType, exporter: InMemorySpanExporter) -> None:
    facade = driver.load("megatron_facade")
    nemo_lens.set_enabled_span_groups({facade.TRAIN, facade.JOB})
    manager = facade.iteration_span(facade.TRAIN, "iteration", {"nv.dl.training.step": 1})
    assert not trace.get_current_span().is_recording()
    with facade.managed_span(facade.JOB, "block") as block, manager as iteration:
        assert trace.get_current_span() is iteration
        assert iteration.parent.span_id == block.context.span_id
        assert iteration.start_time >= block.start_time
    assert names(exporter) == ["iteration", "block"]


def test_a_manager_built_here_is_entered_in_another_thread(
    nemo_lens: ModuleType, exporter: InMemorySpanExporter
) -> None:
    facade = driver.load("megatron_facade")
    nemo_lens.set_enabled_span_groups({facade.TRAIN})
    with facade.managed_span(facade.TRAIN, "here"):
        managers = [facade.managed_span(facade.TRAIN, f"thread {i}") for i in range(4)]

        def enter(manager: Any) -> bool:
            with manager as span:
                return trace.get_current_span() is span and span.parent is None

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(enter, managers)) == [True] * 4
    assert sorted(names(exporter)) == ["here", "thread 0", "thread 1", "thread 2", "thread 3"]


def test_a_phase_opened_in_one_function_is_closed_in_another(nemo_lens: ModuleType) -> None:
    consumer = Consumer("nvrx-registry")
    nvrx = consumer.standin
    cycle, phase = nvrx.ManualSpan(), nvrx.ManualSpan()

    def begin() -> None:
        cycle.open(nvrx.FT, "cycle", {"nv.nvrx.cycle.index": 0})
        phase.open(nvrx.FT, "rendezvous", {})

    def fail() -> None:
        try:
            raise RuntimeError("a worker died")
        finally:
            phase.close()

    begin()
    with pytest.raises(RuntimeError):
        fail()
    phase.open(nvrx.FT, "teardown", {})
    phase.close()
    phase.close()
    cycle.close()
    assert not trace.get_current_span().get_span_context().is_valid
    spans = {span.name: span for span in consumer.arrived()}
    assert list(spans) == ["rendezvous", "teardown", "cycle"]
    for name in ("rendezvous", "teardown"):
        assert spans[name].parent.span_id == spans["cycle"].context.span_id
        assert spans[name].status.is_unset


def test_an_exit_stack_records_what_passes_through_it(nemo_lens: ModuleType, exporter: InMemorySpanExporter) -> None:
    nemo_lens.set_enabled_span_groups({"nvrx.ft"})
    nvrx = driver.load("nvrx_registry")
    error = RuntimeError("a worker died")
    with pytest.raises(RuntimeError) as caught, ExitStack() as stack:
        assert stack.enter_context(nvrx.span(nvrx.FT, "run")) is not None
        assert stack.enter_context(nvrx.span(nvrx.CKPT, "off")) is None
        raise error
    assert caught.value is error
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.description, len(span.events)) == ("run", "a worker died", 1)


def test_one_disabled_object_is_entered_by_many_at_once(nemo_lens: ModuleType, exporter: InMemorySpanExporter) -> None:
    """As RL's shared nullcontext(None) is, by threads and by tasks, and inside itself."""
    disabled = driver.load("resolved").managed_span("data_plane", "rl.data_plane.get", **{"rl.data_plane.op": "get"})
    together = threading.Barrier(8)

    def enter(_: int) -> None:
        with disabled as outer, disabled as inner:
            together.wait(30)
            assert outer is None
            assert inner is None

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(enter, range(8))) == [None] * 8

    async def task(i: int) -> Any:
        with disabled as span:
            await asyncio.sleep(0)
            if i % 2:
                raise KeyError(i)
            return span

    async def tasks() -> list[Any]:
        return await asyncio.gather(*(task(i) for i in range(20)), return_exceptions=True)

    results = asyncio.run(tasks())
    assert [type(result) for result in results] == [type(None), KeyError] * 10
    assert exporter.get_finished_spans() == ()


def test_the_gate_is_read_at_each_call(nemo_lens: ModuleType, exporter: InMemorySpanExporter) -> None:
    """RL closes it at shutdown, under functions that were decorated long before."""
    rl = driver.load("nemo_rl_v1")

    @rl.trace_fn("job", "rl.grpo.job")
    @rl.bucket_trace_fn("generation", "rl.vllm.generate")
    def train() -> None:
        """Does nothing."""

    train()
    nemo_lens.set_enabled_span_groups({"job", "generation"})
    train()
    nemo_lens.set_enabled_span_groups(frozenset())
    train()
    assert names(exporter) == ["rl.vllm.generate", "rl.grpo.job"]


def test_a_disabled_manager_is_not_a_decorator(nemo_lens: ModuleType) -> None:
    """The original's is; no consumer uses that, and one that did must not lose its spans without a word."""
    for enabled in (frozenset[str](), frozenset({"job"})):
        nemo_lens.set_enabled_span_groups(enabled)
        with pytest.raises(TypeError, match="trace_fn"):
            driver.load("resolved").managed_span("job", "name")(lambda: None)


# Contexts that cross threads, tasks and processes


def test_a_checkpoint_is_finalized_after_its_parent_has_ended(nemo_lens: ModuleType) -> None:
    consumer = Consumer("rl-v2")
    rl, release = consumer.standin, threading.Event()
    carrier: dict[str, str] = {}

    def finalize() -> None:
        release.wait(30)
        with (
            driver.load("callforms").current_in(rl.extract_context(carrier)),
            rl.managed_span("checkpoint", "rl.checkpoint.finalize"),
        ):
            pass

    background = threading.Thread(target=finalize)
    with rl.managed_span("checkpoint", "rl.grpo.checkpointing", tracer=consumer.handle.tracer):
        rl.inject_context(carrier)
        background.start()
    release.set()
    background.join(30)
    parent, child = consumer.arrived()
    assert (parent.name, child.name) == ("rl.grpo.checkpointing", "rl.checkpoint.finalize")
    assert (child.parent.span_id, child.context.trace_id) == (parent.context.span_id, parent.context.trace_id)
    assert child.start_time >= parent.end_time


def test_prompts_that_overlap_in_one_loop_keep_their_own_span(nemo_lens: ModuleType) -> None:
    consumer = Consumer("rl-v2", "job,per_prompt,data_plane")
    rl = consumer.standin

    async def prompt(i: int) -> None:
        with rl.managed_span("per_prompt", f"prompt {i}"), rl.per_prompt_scope():
            for _ in range(3):
                await asyncio.sleep(0)
                with rl.data_plane_span("put", **{"rl.data_plane.op": f"put {i}"}):
                    await asyncio.sleep(0)

    async def step() -> None:
        with rl.umbrella_span("job", "rl.sc.job"):
            await asyncio.gather(*(prompt(i) for i in range(10)))

    asyncio.run(step())
    spans = consumer.arrived()
    by_id = {span.context.span_id: span for span in spans}
    puts = [span for span in spans if span.name == "rl.data_plane.put"]
    assert len(puts) == 30
    for span in puts:
        prompt_span = by_id[span.parent.span_id]
        assert prompt_span.name == span.attributes["rl.data_plane.op"].replace("put", "prompt")
        assert by_id[prompt_span.parent.span_id].name == "rl.sc.job"
        assert "rl.bucket" not in span.attributes


def test_a_request_continues_the_callers_trace(nemo_lens: ModuleType) -> None:
    consumer = Consumer("megatron-2026-03", "inference")
    callforms = driver.load("callforms")
    from nemo.lens.propagation import extract_context

    row = row_of("megatron-2026-03", "text_completion llama")
    site = callforms.Site(row.name, row.group, row.values(), {}, row.forms, consumer.handle, {}, (0.0, 0.0))
    with callforms.current_in(extract_context(dict(REMOTE_CARRIER))):
        callforms.span_cm_or_nothing(consumer.standin.LENS, site)(lambda: None)
    (span,) = consumer.arrived()
    assert (span.parent.span_id, span.parent.is_remote, span.context.trace_id) == (REMOTE_SPAN, True, REMOTE_TRACE)


def test_a_receive_without_a_carrier_has_no_link(nemo_lens: ModuleType) -> None:
    consumer = Consumer("megatron-seed", "communication")
    site = consumer.site(row_of("megatron-seed", "megatron.pp.recv_forward.linked"))
    site(lambda: None)
    (linked,) = consumer.arrived()
    assert [(link.context.trace_id, link.context.span_id) for link in linked.links] == [(REMOTE_TRACE, REMOTE_SPAN)]
    from nemo.lens.distributed import create_linked_span

    create_linked_span(consumer.handle.tracer, "alone", remote_carrier=None).end()
    (alone,) = consumer.arrived()
    assert (alone.links, alone.parent) == ((), None)


# A nemo.lens that a test fakes


@pytest.fixture
def fake(nemo_lens: ModuleType) -> Iterator[ModuleType]:
    module = ModuleType("nemo.lens")
    for name in (
        "SpanRegistry",
        "is_span_group_enabled",
        "managed_span",
        "safe_set_span_attributes",
        "span_cm",
        "trace_fn",
    ):
        setattr(module, name, mock.Mock(name=name))
    # Not the fixture's: undone too late, that would put lensfast back there after uninstall().
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nemo.lens", module)
        yield module


def test_a_faked_package_is_what_the_facade_imports(fake: ModuleType) -> None:
    facade = driver.load("megatron_facade")
    fake.SpanRegistry.register.assert_called_once_with("megatron", facade.GROUPS, facade.PRESETS)
    facade.managed_span("megatron.job", "name", **{"a.b": 1})
    fake.managed_span.assert_called_once_with("megatron.job", "name", tracer=None, **{"a.b": 1})


def test_a_missing_name_is_not_taken_for_a_missing_library(fake: ModuleType) -> None:
    del fake.trace_fn
    with pytest.raises(ImportError, match="trace_fn"):
        driver.load("megatron_facade")


def test_the_registry_is_what_the_facade_s_tests_ask(nemo_lens: ModuleType) -> None:
    facade, registry = driver.load("megatron_facade"), nemo_lens.SpanRegistry
    assert (registry.namespaces(), registry.groups()) == (["megatron"], facade.GROUPS)
    with pytest.raises(ValueError, match="already registered"):
        registry.register("megatron", facade.GROUPS, facade.PRESETS)
    registry.unregister("megatron")
    with pytest.raises(ValueError, match="is not registered"):
        registry.unregister("megatron")
    assert registry.presets() == {"all": frozenset()}
    registry.register("megatron", facade.GROUPS, facade.PRESETS)
    registry.clear()
    assert registry.namespaces() == []
