"""FastAPI, aiohttp and Ray: the real libraries where they are installed, on both backends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from conftest import BACKENDS, load_backend

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"


def by_name(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


def parent_ids(span: Any) -> tuple[int, int] | None:
    return (span.parent.trace_id, span.parent.span_id) if span.parent else None


# Ray, without Ray


def test_ray_carriers_go_there_and_back(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    ray = lensfast.contrib.ray
    assert ray.inject_ray_context() == {}
    with trace.get_tracer("test").start_as_current_span("work") as span:
        carrier = ray.inject_ray_context()
        assert trace.get_current_span(ray.extract_ray_context()) is span
        assert ray.extract_ray_context({}) == {}
    assert set(carrier) == {"traceparent"}
    extracted = trace.get_current_span(ray.extract_ray_context(carrier)).get_span_context()
    assert (extracted.trace_id, extracted.span_id) == (
        span.get_span_context().trace_id,
        span.get_span_context().span_id,
    )


def test_a_remote_call_is_a_child_of_the_callers_span(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    def work(value: int, *, scale: int = 1, **options: Any) -> tuple[int, dict[str, Any], str]:
        """Doc."""
        return value * scale, options, trace.get_current_span().name

    wrapped = lensfast.contrib.ray.traced_remote_call(work)
    name = work.__qualname__
    assert wrapped(3, scale=2, other=1, _otel_carrier={"traceparent": TRACEPARENT}) == (6, {"other": 1}, name)
    (span,) = exporter.get_finished_spans()
    assert (span.name, parent_ids(span)) == (name, (TRACE_ID, SPAN_ID))
    assert span.instrumentation_scope.name == "nemo.lens.ray"
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__doc__) == ("work", name, "Doc.")


def test_without_a_carrier_the_parent_is_the_current_span(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    wrapped = lensfast.contrib.ray.traced_remote_call(lambda: None)
    with trace.get_tracer("test").start_as_current_span("current") as current:
        wrapped()
        wrapped(_otel_carrier=None)
        wrapped(_otel_carrier={})
        assert trace.get_current_span() is current
    own = current.get_span_context()
    parents = [parent_ids(span) for span in exporter.get_finished_spans()[:3]]
    assert parents == [(own.trace_id, own.span_id), (own.trace_id, own.span_id), None]


def test_an_explicit_tracer_is_used(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    lensfast.contrib.ray.traced_remote_call(lambda: None, tracer=trace.get_tracer("mine"))()
    assert exporter.get_finished_spans()[0].instrumentation_scope.name == "mine"


def test_an_exception_of_a_remote_call_is_recorded(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    def work() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        lensfast.contrib.ray.traced_remote_call(work)()
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ValueError: boom")
    assert [event.name for event in span.events] == ["exception"]


def test_a_coroutine_functions_whole_run_is_the_span(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    async def work(value: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return value, trace.get_current_span().name

    wrapped = lensfast.contrib.ray.traced_remote_call(work)
    assert inspect.iscoroutinefunction(wrapped)
    coroutine = wrapped(3, _otel_carrier={"traceparent": TRACEPARENT})
    assert exporter.get_finished_spans() == ()
    assert asyncio.run(coroutine) == (3, work.__qualname__)
    (span,) = exporter.get_finished_spans()
    assert parent_ids(span) == (TRACE_ID, SPAN_ID)


def test_a_generators_whole_run_is_the_span(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    def work(count: int) -> Iterator[str]:
        for _ in range(count):
            yield trace.get_current_span().name

    wrapped = lensfast.contrib.ray.traced_remote_call(work)
    assert inspect.isgeneratorfunction(wrapped)
    items = wrapped(2, _otel_carrier={"traceparent": TRACEPARENT})
    assert next(items) == work.__qualname__
    assert not trace.get_current_span().is_recording()
    assert exporter.get_finished_spans() == ()
    assert list(items) == [work.__qualname__]
    (span,) = exporter.get_finished_spans()
    assert parent_ids(span) == (TRACE_ID, SPAN_ID)


def test_an_asynchronous_generators_whole_run_is_the_span(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    async def work(count: int) -> AsyncIterator[str]:
        for _ in range(count):
            yield trace.get_current_span().name

    async def main() -> None:
        items = wrapped(3, _otel_carrier={"traceparent": TRACEPARENT})
        assert await anext(items) == work.__qualname__
        assert exporter.get_finished_spans() == ()
        assert await anext(items) == work.__qualname__
        await items.aclose()

    wrapped = lensfast.contrib.ray.traced_remote_call(work)
    assert inspect.isasyncgenfunction(wrapped)
    asyncio.run(main())
    (span,) = exporter.get_finished_spans()
    assert parent_ids(span) == (TRACE_ID, SPAN_ID)


class Worker:
    def train(self, value: int, /, *more: int, scale: float = 1.0, **options: str) -> float:
        return value * scale


def signature_of(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function))


def test_the_signature_has_the_carrier_also_when_unwrapped(lensfast: ModuleType) -> None:
    """Ray binds an actor method's arguments to the signature of the innermost function that unwrap() finds."""
    expected = (
        "(self, value: 'int', /, *more: 'int', scale: 'float' = 1.0, _otel_carrier=None, **options: 'str') -> 'float'"
    )
    wrap = lensfast.contrib.ray.traced_remote_call
    assert signature_of(inspect.unwrap(wrap(Worker.train))) == expected
    assert signature_of(inspect.unwrap(wrap(lensfast.trace_fn("step", "train")(Worker.train)))) == expected
    assert signature_of(wrap(Worker().train)) == expected.replace("self, ", "")


def test_a_function_without_a_signature_takes_anything(lensfast: ModuleType) -> None:
    wrapped = lensfast.contrib.ray.traced_remote_call(max)
    assert wrapped(1, 2, _otel_carrier={}) == 2
    assert "_otel_carrier" in inspect.signature(wrapped).parameters


def test_what_is_no_function_can_not_be_wrapped(lensfast: ModuleType) -> None:
    with pytest.raises(TypeError, match="wraps a function, not property"):
        lensfast.contrib.ray.traced_remote_call(property())


def test_a_broken_tracer_does_not_reach_the_remote_call(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    def start_span(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no spans today")

    wrapped = lensfast.contrib.ray.traced_remote_call(lambda: 5, tracer=SimpleNamespace(start_span=start_span))
    assert wrapped(_otel_carrier={"traceparent": TRACEPARENT}) == 5
    assert "no spans today" in caplog.text


def test_dispatch_sends_the_current_context_or_the_given_one(
    lensfast: ModuleType, exporter: InMemorySpanExporter
) -> None:
    calls = []
    remote = SimpleNamespace(remote=lambda *args, **kwargs: calls.append((args, kwargs)) or "reference")
    dispatch = lensfast.contrib.ray.ray_dispatch_with_context
    with trace.get_tracer("test").start_as_current_span("work") as span:
        assert dispatch(remote, 1, key="value") == "reference"
    assert dispatch(remote, _carrier={}) == "reference"
    (args, kwargs), second = calls
    carrier = kwargs.pop("_otel_carrier")
    assert (args, kwargs) == ((1,), {"key": "value"})
    assert int(carrier["traceparent"].split("-")[2], 16) == span.get_span_context().span_id
    assert second == ((), {"_otel_carrier": {}})


# Ray


@pytest.mark.parametrize("backend", BACKENDS)
def test_ray_tasks_and_actors_share_the_drivers_trace(backend: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    load_backend(backend)  # skips where it can't be had
    folder = Path(__file__).parent
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": f"{folder.parent}{os.pathsep}{folder}",
        "LENSFAST_PURE_PYTHON": "1" if backend == "python" else "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # A session of its own, so that Ray's processes can be ended too if the driver hangs.
    driver = subprocess.Popen(
        [sys.executable, str(folder / "ray_app.py")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = driver.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert driver.returncode == 0, errors
    result = json.loads(output.splitlines()[-1])

    (root,) = result["driver_spans"]
    assert (root["name"], root["parent"]) == ("driver", None)

    # A task: its own span is still open when it reports.
    value, worker_backend, (double,) = result["task"]
    assert (value, worker_backend) == (7, backend)
    assert (double["name"], double["trace"]) == ("app.double", root["trace"])
    assert double["parent"] not in (None, root["id"])

    assert [result[name] for name in ("train", "direct", "both", "items")] == [8, 6, 6, [0, 2]]
    names = [span["name"] for span in result["trainer_spans"]]
    assert names == [
        *("app.double", "app.step", "Trainer.train"),
        "app.direct",
        *("app.both", "Trainer.both"),
        *("app.double", "app.double", "Trainer.items"),
    ]
    double, step, train, direct, both, outer, first, second, items = result["trainer_spans"]
    assert [span["parent"] for span in (train, outer, items)] == [root["id"]] * 3
    assert [double["parent"], step["parent"]] == [step["id"], train["id"]]
    assert both["parent"] == outer["id"]
    assert [first["parent"], second["parent"]] == [items["id"], items["id"]]
    assert direct["parent"] is None
    assert {span["trace"] for span in result["trainer_spans"] if span is not direct} == {root["trace"]}

    assert [result[name] for name in ("async_train", "async_direct", "async_items")] == [14, 8, [0, 1]]
    double, step, train, direct, items = result["async_spans"]
    names = ["app.double", "app.async_step", "AsyncTrainer.train", "app.async_direct", "AsyncTrainer.items"]
    assert [span["name"] for span in result["async_spans"]] == names
    assert [double["parent"], step["parent"], train["parent"]] == [step["id"], train["id"], root["id"]]
    assert [direct["parent"], items["parent"]] == [None, root["id"]]
    assert train["trace"] == items["trace"] == root["trace"]


# FastAPI


def test_fastapi_serves_traced_endpoints(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")
    pytest.importorskip("httpx", reason="httpx is not installed")
    pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="its instrumentation is not installed")
    from fastapi.testclient import TestClient

    lensfast.set_enabled_span_groups({"step"})
    app = fastapi.FastAPI()

    @app.get("/items/{item_id}")
    @lensfast.trace_fn("step", "get_item")
    async def get_item(item_id: int, scale: float = 1.5) -> dict[str, float]:
        await asyncio.sleep(0)
        with lensfast.managed_span("step", "inner"):
            return {"value": item_id * scale}

    @app.get("/sync/{item_id}")
    @lensfast.trace_fn("step", "get_sync")
    def get_sync(item_id: int) -> dict[str, Any]:
        return {"value": item_id, "type": type(item_id).__name__}

    lensfast.contrib.fastapi.instrument_fastapi(app, service_name="ignored")
    with TestClient(app) as client:
        answer = client.get("/items/4", params={"scale": 2}, headers={"traceparent": TRACEPARENT})
        assert (answer.status_code, answer.json()) == (200, {"value": 8.0})
        spans = by_name(exporter)
        exporter.clear()
        assert client.get("/items/4").json() == {"value": 6.0}
        assert client.get("/items/four").status_code == 422
        exporter.clear()
        assert client.get("/sync/5").json() == {"value": 5, "type": "int"}
        sync_spans = by_name(exporter)
        parameters = client.get("/openapi.json").json()["paths"]["/items/{item_id}"]["get"]["parameters"]
    server = spans["GET /items/{item_id}"]
    assert (server.kind, parent_ids(server)) == (SpanKind.SERVER, (TRACE_ID, SPAN_ID))
    assert parent_ids(spans["get_item"]) == (TRACE_ID, server.context.span_id)
    assert parent_ids(spans["inner"]) == (TRACE_ID, spans["get_item"].context.span_id)
    assert sync_spans["get_sync"].parent.span_id == sync_spans["GET /sync/{item_id}"].context.span_id
    assert [(each["name"], each["schema"]["type"]) for each in parameters] == [
        ("item_id", "integer"),
        ("scale", "number"),
    ]


def test_the_fastapi_instrumentor_gets_the_application_and_nothing_else(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    instrumentor = SimpleNamespace(instrument_app=lambda *args, **kwargs: calls.append((args, kwargs)))
    module = SimpleNamespace(FastAPIInstrumentor=instrumentor)
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.fastapi", module)
    app = object()
    lensfast.contrib.fastapi.instrument_fastapi(app)
    lensfast.contrib.fastapi.instrument_fastapi(app, service_name="gym")
    assert calls == [((app,), {})] * 2


def test_missing_instrumentation_says_what_to_install(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.fastapi", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.aiohttp_client", None)
    for extra, call in (
        ("fastapi", lambda: lensfast.contrib.fastapi.instrument_fastapi(object())),
        ("aiohttp", lensfast.contrib.aiohttp.instrument_aiohttp_client),
    ):
        with pytest.raises(ImportError) as raised:
            call()
        assert f"lensfast[{extra}]" in str(raised.value)
        assert f"nemo-lens[{extra}]" in str(raised.value)


# aiohttp


def test_aiohttp_requests_carry_the_trace_context(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    reason = "its instrumentation is not installed"
    instrumentation = pytest.importorskip("opentelemetry.instrumentation.aiohttp_client", reason=reason)
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    arrived: list[dict[str, str]] = []

    async def answer(request: Any) -> Any:
        arrived.append(dict(request.headers))
        return web.json_response({"fine": True})

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            with lensfast.managed_span("step", "work"):
                async with session.get(server.make_url("/")) as response:
                    assert await response.json() == {"fine": True}

    lensfast.set_enabled_span_groups({"step"})
    lensfast.contrib.aiohttp.instrument_aiohttp_client()
    try:
        asyncio.run(main())
    finally:
        instrumentation.AioHttpClientInstrumentor().uninstrument()
    work, client = by_name(exporter)["work"], by_name(exporter)["GET"]
    assert client.kind is SpanKind.CLIENT
    assert parent_ids(client) == (work.context.trace_id, work.context.span_id)
    (headers,) = arrived
    trace_id, span_id = headers["traceparent"].split("-")[1:3]
    assert (int(trace_id, 16), int(span_id, 16)) == (client.context.trace_id, client.context.span_id)
