"""What a user's process sends, as a collector receives it: over gRPC and over HTTP, on both backends."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.version import __version__ as sdk_version
from otlp_receiver import PROTOCOLS, ReceivedSpan, Receiver, free_port, run_script

from conftest import BACKENDS, load_backend

# Older SDKs do not take a log record of the API, which is what JOB emits.
LOGS = tuple(int(part) for part in sdk_version.split(".")[:2]) >= (1, 39)

JOB = """
import sys

import lensfast
from lensfast import NemoLensConfig, get_tracer, managed_span, setup_telemetry, span_cm, span_group, trace_fn
from lensfast.span_utilities import emit_span
from opentelemetry import trace
from opentelemetry._logs import LogRecord, get_logger
from opentelemetry.trace import Link, SpanKind, Status, StatusCode


@trace_fn("step", "job.evaluate")
def evaluate():
    with managed_span("layer", "job.layer"):
        trace.get_current_span().set_attribute("inside", "evaluate")
    return 5


@trace_fn("step", "job.broken")
def broken():
    raise KeyError("missing")


def main():
    config = NemoLensConfig.from_env("MEGATRON_OTEL", fallback_prefix="NEMO_LENS")
    handle = setup_telemetry(config, rank=3, world_size=8, resource_attributes={"team": "speech"})
    handle.meter.create_gauge("job.loss").set(2.5, {"split": "train"})
    if config.logs_enabled:
        get_logger("app").emit(LogRecord(body="a line"))
    with managed_span("job", "job.train", **{"job.iterations": 4, "job.rate": 0.25}):
        with managed_span("step", "job.step") as step:
            step.set_attributes({"ok": True, "loss": -1.5, "model": "größe ✓", "shape": [1, -2, 3]})
            with span_cm("job.io", None, True, path="/data", token="secret-1", odd={}, none=None, big=2**63 - 1) as io:
                first = io.get_span_context()
            try:
                with managed_span("step", "job.bad"):
                    raise ValueError("boom")
            except ValueError:
                pass
        assert evaluate() == 5
        try:
            broken()
        except KeyError:
            pass
        with span_group("step").span("job.rpc", span_kind=SpanKind.CLIENT, **{"rpc.system": "grpc"}):
            pass
        emit_span(None, "job.loaded", "1000.500000001", "1001.25", group="step", attributes={"files": 3})
        with handle.tracer.start_as_current_span("job.serve", kind=SpanKind.SERVER, links=[Link(first)]) as serve:
            serve.set_status(Status(StatusCode.OK))
        with get_tracer("app.own").start_as_current_span("job.own"):
            pass
    managed_span("job", "job.open").__enter__()
    managed_span("job", "job.open.inner").__enter__()
    print(lensfast.backend, handle.is_exporting)
    if sys.argv[1] == "shutdown":
        handle.shutdown()


main()
"""

CHILDREN = """
import multiprocessing
import random
import sys

from lensfast import NemoLensConfig, managed_span, setup_telemetry
from opentelemetry import metrics, trace


def work(how, number):
    if how == "spawn":
        setup_telemetry(NemoLensConfig.from_env(), rank=number, world_size=2)
    random.seed(0)
    with managed_span("job", "child.work", number=number):
        with managed_span("step", "child.part"):
            pass
    managed_span("job", "child.open", number=number).__enter__()
    # A multiprocessing child leaves by os._exit().


def main():
    how = sys.argv[1]
    handle = setup_telemetry(NemoLensConfig.from_env(), rank=0, world_size=2)
    handle.meter.create_gauge("parent.loss").set(0.5)
    random.seed(0)
    with managed_span("job", "parent.sent"):
        pass
    trace.get_tracer_provider().force_flush()  # the connection is in use when the children inherit it
    metrics.get_meter_provider().force_flush()
    with managed_span("job", "parent.queued"):
        pass
    waiting = handle.tracer.start_span("parent.open")
    context = multiprocessing.get_context(how)
    children = [context.Process(target=work, args=(how, number)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    print([child.exitcode for child in children])


if __name__ == "__main__":
    main()
"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    load_backend(request.param)  # skips, or fails, where it is not built
    return str(request.param)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "train.py"
    script.write_text(text)
    return script


JOB_VARIABLES = {
    "MEGATRON_OTEL_ENABLED": "true",
    "MEGATRON_OTEL_SPAN_GROUPS": " ",  # blank: the fallback holds
    "NEMO_LENS_SPAN_GROUPS": "JOB, step",
    "NEMO_LENS_ENABLED": "0",  # overruled
    "NEMO_LENS_EXPORT_STRATEGY": "all_ranks",
    "MEGATRON_OTEL_RUN_ID": "run-42",
    "MEGATRON_OTEL_USER_ID": "ada",
    "OTEL_SERVICE_NAME": "pretrain",
    "OTEL_RESOURCE_ATTRIBUTES": "cluster=east,team=overruled,service.name=overruled",
}


def check_job_spans(spans: list[ReceivedSpan]) -> None:
    by_name = {span.name: span for span in spans}
    names = [
        "job.bad", "job.broken", "job.evaluate", "job.io", "job.loaded", "job.open", "job.open.inner", "job.own",
        "job.rpc", "job.serve", "job.step", "job.train",
    ]  # fmt: skip
    assert sorted(span.name for span in spans) == names

    parents = {name: by_name[name].parent_id for name in names}
    train, step, opened = by_name["job.train"], by_name["job.step"], by_name["job.open"]
    assert parents == {
        "job.train": "",
        "job.step": train.span_id,
        "job.io": step.span_id,
        "job.bad": step.span_id,
        "job.evaluate": train.span_id,
        "job.broken": train.span_id,
        "job.rpc": train.span_id,
        "job.loaded": train.span_id,
        "job.serve": train.span_id,
        "job.own": train.span_id,
        "job.open": "",
        "job.open.inner": opened.span_id,
    }
    assert len({span.span_id for span in spans}) == len(spans)
    assert all(re.fullmatch("[0-9a-f]{16}", span.span_id) for span in spans)
    assert all(re.fullmatch("[0-9a-f]{32}", span.trace_id) for span in spans)
    assert {span.trace_id for span in spans if not span.name.startswith("job.open")} == {train.trace_id}
    assert by_name["job.open.inner"].trace_id == opened.trace_id != train.trace_id

    scopes = {name: by_name[name].scope for name in names}
    helpers = ("job.train", "job.step", "job.io", "job.bad", "job.rpc", "job.open", "job.open.inner")
    package = ("job.evaluate", "job.broken", "job.loaded", "job.serve")
    assert scopes == {
        **dict.fromkeys(helpers, "nemo.lens.helpers"),
        **dict.fromkeys(package, "nemo.lens"),
        "job.own": "app.own",
    }

    assert {name: by_name[name].attributes for name in names} == {
        "job.train": {"job.iterations": 4, "job.rate": 0.25},
        "job.step": {"ok": True, "loss": -1.5, "model": "größe ✓", "shape": [1, -2, 3]},
        "job.io": {"path": "/data", "token": "[REDACTED]", "big": 2**63 - 1},
        "job.bad": {},
        "job.evaluate": {"inside": "evaluate"},
        "job.broken": {},
        "job.rpc": {"rpc.system": "grpc"},
        "job.loaded": {"files": 3},
        "job.serve": {},
        "job.own": {},
        "job.open": {"nemo.span.truncated": True},
        "job.open.inner": {"nemo.span.truncated": True},
    }

    kinds = {name: by_name[name].kind for name in names}
    assert kinds == {**dict.fromkeys(names, "INTERNAL"), "job.rpc": "CLIENT", "job.serve": "SERVER"}

    statuses = {name: (by_name[name].status, by_name[name].status_message) for name in names}
    assert statuses == {
        **dict.fromkeys(names, ("UNSET", "")),
        "job.bad": ("ERROR", "boom"),
        "job.broken": ("ERROR", "KeyError: 'missing'"),
        "job.serve": ("OK", ""),
    }

    truncated = [("nemo.span.truncated", {"nemo.span.truncated.reason": "still open at telemetry shutdown"})]
    events = {name: by_name[name].events for name in names if by_name[name].events}
    for name, kind, message in (("job.bad", "ValueError", "boom"), ("job.broken", "KeyError", "'missing'")):
        [(event, attributes)] = events.pop(name)
        assert event == "exception"
        assert attributes["exception.type"] == kind
        assert attributes["exception.message"] == message
        assert attributes["exception.stacktrace"].startswith("Traceback (most recent call last):")
    assert events == {"job.open": truncated, "job.open.inner": truncated}

    io = by_name["job.io"]
    assert {name: by_name[name].links for name in names if by_name[name].links} == {
        "job.serve": [(io.trace_id, io.span_id)]
    }

    loaded = by_name["job.loaded"]
    assert (loaded.start, loaded.end) == (1_000_500_000_001, 1_001_250_000_000)
    assert all(0 < span.start <= span.end for span in spans)
    # The outer span was started first and is ended last, also by a shutdown.
    inner = by_name["job.open.inner"]
    assert opened.start <= inner.start <= inner.end <= opened.end


def check_job_resource(resource: dict[str, Any], version: str) -> None:
    assert isinstance(resource["process.pid"], int)
    elsewhere = ("telemetry.sdk.", "process.pid", "host.gpu.count")
    assert {key: value for key, value in resource.items() if not key.startswith(elsewhere)} == {
        "service.name": "pretrain",
        "service.version": version,
        "service.instance.id": "run-42-rank3",
        "dl.rank": 3,
        "dl.world_size": 8,
        "nemo.run.id": "run-42",
        "nemo.user.id": "ada",
        "host.name": socket.gethostname(),
        "team": "speech",
        "cluster": "east",
    }


@pytest.mark.parametrize("ending", ["shutdown", "atexit"])
def test_a_job(tmp_path: Path, backend: str, protocol: str, ending: str) -> None:
    with Receiver() as receiver:
        process = run_script(
            write(tmp_path, JOB), backend, ending,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint(protocol),
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            OTEL_EXPORTER_OTLP_COMPRESSION="gzip" if ending == "atexit" else "none",
            NEMO_LENS_LOGS_ENABLED=str(int(LOGS)),
            **JOB_VARIABLES,
        )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == f"{backend} True\n"
    spans = receiver.spans()
    check_job_spans(spans)
    version = load_backend(backend)["lensfast"].__version__
    for span in spans:
        check_job_resource(span.resource, version)
    gauges = receiver.gauges()
    assert set(gauges) == {"job.loss"}
    for scope, value, attributes, resource in gauges["job.loss"]:
        assert (scope, value, attributes) == ("nemo.lens", 2.5, {"split": "train"})
        check_job_resource(resource, version)
    assert receiver.log_bodies() == [("app", "a line")] * LOGS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_export_sends_nothing(tmp_path: Path, backend: str, rank: int) -> None:
    job = """
from lensfast import NemoLensConfig, managed_span, setup_telemetry, span_cm
handle = setup_telemetry(NemoLensConfig.from_env(), rank={rank}, world_size=2)
handle.meter.create_gauge("loss").set(1.0)
with managed_span("job", "work") as span, span_cm("cold") as cold:
    print(handle.is_exporting, span is None, cold.is_recording())
"""
    with Receiver() as receiver:
        process = run_script(
            write(tmp_path, job.format(rank=rank)), backend,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("grpc"), NEMO_LENS_ENABLED="1",
        )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    if rank == 1:  # the last one, which single_rank chooses
        assert process.stdout == "True False True\n"
        assert sorted(span.name for span in receiver.spans()) == ["cold", "work"]
        assert set(receiver.gauges()) == {"loss"}
    else:
        assert process.stdout == "False True False\n"
        assert not any(receiver.requests.values())


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_of_multiprocessing(tmp_path: Path, backend: str, protocol: str, how: str) -> None:
    if how == "fork" and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    with Receiver() as receiver:
        process = run_script(
            write(tmp_path, CHILDREN), backend, how,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint(protocol),
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            NEMO_LENS_ENABLED="1",
            NEMO_LENS_EXPORT_STRATEGY="all_ranks",
            NEMO_LENS_SPAN_GROUPS="per_step",
            NEMO_LENS_RUN_ID="r",
        )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == "[0, 0]\n"
    spans = receiver.spans()
    # Each once: a child does not send its parent's spans, be they open or queued.
    assert sorted(span.name for span in spans) == [
        "child.open", "child.open", "child.part", "child.part", "child.work", "child.work",
        "parent.open", "parent.queued", "parent.sent",
    ]  # fmt: skip
    for number in range(2):
        [work] = [span for span in spans if span.name == "child.work" and span.attributes == {"number": number}]
        assert work.parent_id == ""
        [part] = [span for span in spans if span.parent_id == work.span_id]
        assert (part.name, part.trace_id) == ("child.part", work.trace_id)
        [opened] = [span for span in spans if span.name == "child.open" and span.attributes["number"] == number]
        assert opened.attributes == {"number": number, "nemo.span.truncated": True}
        if how == "spawn":
            assert (work.resource["dl.rank"], work.resource["service.instance.id"]) == (number, f"r-rank{number}")
    # A forked child has its parent's measurements, and does not count them again.
    assert {resource["service.instance.id"] for *_, resource in receiver.gauges()["parent.loss"]} == {"r-rank0"}
    # Every process began with the same random.seed(0); no two drew the same ids.
    roots = [span for span in spans if not span.parent_id]
    assert len({span.trace_id for span in roots}) == len(roots) == 7
    assert len({span.span_id for span in spans}) == len(spans) == 9


def test_many_forked_children_at_once(tmp_path: Path, backend: str, protocol: str) -> None:
    """No request is garbled: children do not write into the connection they inherit."""
    job = """
import multiprocessing
from lensfast import NemoLensConfig, managed_span, setup_telemetry
from opentelemetry import trace

def work():
    for _ in range(20):
        with managed_span("job", "work"):
            pass
        trace.get_tracer_provider().force_flush()

setup_telemetry(NemoLensConfig.from_env())
work()
children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(4)]
for child in children:
    child.start()
work()
for child in children:
    child.join()
print([child.exitcode for child in children])
"""
    with Receiver() as receiver:
        process = run_script(
            write(tmp_path, job), backend,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint(protocol),
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            NEMO_LENS_ENABLED="1",
        )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == "[0, 0, 0, 0]\n"
    assert [span.name for span in receiver.spans()] == ["work"] * 120
    assert receiver.bad_requests == []


class Rotel:
    """A collector that is not ours, and what it printed about the spans it received."""

    def __init__(self, agent: Path, output: Path) -> None:
        self.ports = {"grpc": free_port(), "http/protobuf": free_port()}
        self._output = output
        arguments = [
            agent, "start", "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed",
            "--otlp-grpc-endpoint", f"127.0.0.1:{self.ports['grpc']}",
            "--otlp-http-endpoint", f"127.0.0.1:{self.ports['http/protobuf']}",
        ]  # fmt: skip
        with output.open("wb") as file:
            self.process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT)

    def wait_until_ready(self) -> None:
        for port in self.ports.values():
            while True:
                assert self.process.poll() is None, f"rotel did not start: {self._output.read_text()}"
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                except OSError:
                    time.sleep(0.05)
                else:
                    break

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def spans(self) -> list[ReceivedSpan]:
        return parse_rotel(self._output.read_text())


def parse_rotel(text: str) -> list[ReceivedSpan]:
    spans: list[ReceivedSpan] = []
    resource: dict[str, Any] = {}
    target: dict[str, Any] = {}  # what the "-> key: value" lines belong to
    scope = ""
    for line in text.splitlines():
        label, _, rest = (part.strip() for part in line.partition(":"))
        if line.startswith("ResourceSpans #"):
            resource = target = {}
        elif line.startswith("InstrumentationScope "):
            scope = line.split()[1]
        elif re.fullmatch(r"Span #\d+", line):
            target = {}
            spans.append(ReceivedSpan("", "", "", "", "", "", "", target, [], [], 0, 0, scope, resource))
        elif re.fullmatch(r"SpanEvent #\d+", line):
            target = {}
            spans[-1].events.append(("", target))
        elif re.fullmatch(r"SpanLink #\d+", line):
            target = {}
            spans[-1].links.append(("", ""))
        elif line.startswith("     -> Name: "):
            spans[-1].events[-1] = (rest, target)
        elif line.startswith("     -> Trace ID: "):
            spans[-1].links[-1] = (rest, "")
        elif line.startswith("     -> ID: "):
            spans[-1].links[-1] = (spans[-1].links[-1][0], rest)
        elif match := re.fullmatch(r" +-> ([\w.]+): (\w+\(.*)", line):
            target[match[1]] = rotel_value(match[2])
        elif field := ROTEL_FIELDS.get(label):
            setattr(spans[-1], field, int(rest) if field in {"start", "end"} else rest)
    for span in spans:
        span.kind = span.kind.removeprefix("SPAN_KIND_")
        span.status = span.status.removeprefix("STATUS_CODE_")
    return spans


ROTEL_FIELDS = {
    "Trace ID": "trace_id",
    "Parent ID": "parent_id",
    "ID": "span_id",
    "Name": "name",
    "Kind": "kind",
    "Start time": "start",
    "End time": "end",
    "Status code": "status",
    "Status message": "status_message",
}


def rotel_value(text: str) -> Any:
    kind, _, rest = text.partition("(")
    if kind == "Slice":
        return [rotel_value(item) for item in rest.removesuffix(")").split(", ")]
    # A text of several lines, such as a stack trace, is cut after its first.
    read = {"Int": int, "Double": float, "Bool": lambda word: word == "true", "Str": str}[kind]
    return read(rest.removesuffix(")"))


@pytest.fixture(scope="module")
def rotel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rotel]:
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        pytest.skip("rotel, a collector with wheels for some versions of Python, is not installed: pip install rotel")
    collector = Rotel(Path(found.origin).with_name("rotel-agent"), tmp_path_factory.mktemp("rotel") / "output")
    try:
        collector.wait_until_ready()
        yield collector
    finally:
        collector.stop()


def test_a_collector_that_is_not_ours(tmp_path: Path, backend: str, protocol: str, rotel: Rotel) -> None:
    before = len(rotel.spans())
    process = run_script(
        write(tmp_path, JOB), backend, "atexit",
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{rotel.ports[protocol]}",
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        **JOB_VARIABLES,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    # It prints what it has acknowledged a moment later, so this waits, until the test's own time limit.
    while len(rotel.spans()) < before + 12:
        time.sleep(0.05)
    spans = rotel.spans()[before:]
    check_job_spans(spans)
    for span in spans:
        check_job_resource(span.resource, load_backend(backend)["lensfast"].__version__)
