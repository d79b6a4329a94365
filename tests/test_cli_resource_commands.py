"""The commands for launchers: `lensfast emit-spans` and `lensfast set-slurm-resource-attrs`."""

from __future__ import annotations

import importlib
import json
import logging
import re
import shlex
import socket
import subprocess
import sys
import uuid
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_receiver import PROTOCOLS, Receiver, free_port

from conftest import clean_environment, run_command

VARIABLE = "OTEL_RESOURCE_ATTRIBUTES"


def emit(backend: str, *spans: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_command(backend, "emit-spans", "--service", "launch", *(f"--span={span}" for span in spans), **variables)


# emit-spans


def test_spans_on_the_console(lensfast: ModuleType) -> None:
    result = emit(
        lensfast.backend,
        "pull,1700000000.25,1700000010.000000001,job",  # before its parent
        "job,1700000000,1700000100.5",
        "untar, 1700000001 ,1700000002,pull",
        "other,5,5",
        NEMO_LENS_EXPORTER="console",
        NEMO_LENS_ENABLED="0",
        OTEL_SERVICE_NAME="overruled",
        OTEL_RESOURCE_ATTRIBUTES="service.name=overruled,team=speech,nv.dl.world_size=8",
        SLURM_JOB_ID="4711",
        SLURM_NNODES="4",
        TRACEPARENT="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    assert result.returncode == 0
    spans = {span["name"]: span for span in map(json.loads, result.stdout.splitlines())}
    assert set(spans) == {"pull", "job", "untar", "other"}
    assert len(result.stdout.splitlines()) == 4
    ids = {name: span["context"]["span_id"] for name, span in spans.items()}
    assert {name: span["parent_id"] for name, span in spans.items()} == {
        "job": None,
        "other": None,
        "pull": ids["job"],
        "untar": ids["pull"],
    }
    traces = {name: span["context"]["trace_id"] for name, span in spans.items()}
    assert traces["job"] == traces["pull"] == traces["untar"] != traces["other"]
    assert (spans["pull"]["start_time"], spans["pull"]["end_time"]) == (
        "2023-11-14T22:13:20.250000Z",
        "2023-11-14T22:13:30.000000Z",
    )
    resource = spans["job"]["resource"]["attributes"]
    expected = {
        "service.name": "launch",
        "team": "speech",
        "nv.dl.world_size": 8,
        "host.name": socket.gethostname(),
        "slurm.job.id": "4711",
        "slurm.nnodes": 4,
    }
    assert resource.items() >= expected.items()
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    for name, span in spans.items():
        context = span["context"]
        line = f"emitted {name}: trace {context['trace_id'][2:]}, span {context['span_id'][2:]}"
        assert line in lines


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_on_the_wire(lensfast: ModuleType, protocol: str) -> None:
    with Receiver() as receiver:
        result = emit(
            lensfast.backend,
            "child,1000.000000001,1001.5,root",
            "root,1000,1002",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint(protocol),
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        )
        received = {span.name: span for span in receiver.spans()}
        assert len(receiver.spans()) == 2
    assert (result.returncode, result.stdout) == (0, "")
    root, child = received["root"], received["child"]
    assert (child.start, child.end) == (1_000_000_000_001, 1_001_500_000_000)
    assert (root.start, root.end, root.parent_id) == (1_000_000_000_000, 1_002_000_000_000, "")
    assert (child.parent_id, child.trace_id) == (root.span_id, root.trace_id)
    assert (root.scope, root.kind, root.status) == ("nemo.lens", "INTERNAL", "UNSET")
    assert root.resource["service.name"] == "launch"


def test_more_spans_than_the_queue_of_the_sdk_holds(lensfast: ModuleType) -> None:
    names = [f"s{number}" for number in range(3000)]
    with Receiver() as receiver:
        result = emit(
            lensfast.backend,
            *(f"{name},1,2" + (f",s{number + 1}" if number < 2999 else "") for number, name in enumerate(names)),
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("grpc"),
        )
        received = receiver.spans()
    assert result.returncode == 0
    assert sorted(span.name for span in received) == sorted(names)
    assert len({span.trace_id for span in received}) == 1


def test_an_interval_that_ends_before_it_starts_is_clamped(lensfast: ModuleType) -> None:
    result = emit(lensfast.backend, "late,10,7.5", NEMO_LENS_EXPORTER="console")
    assert result.returncode == 0
    span = json.loads(result.stdout)
    assert span["start_time"] == span["end_time"] == "1970-01-01T00:00:10.000000Z"
    assert span["attributes"]["inverted.skew"] is True
    assert "clock skew" in result.stderr


@pytest.mark.parametrize(
    ("specs", "problems"),
    [
        (["good"], ["'good' is not NAME,START,END[,PARENT]"]),
        (["a,1"], ["'a,1' is not"]),
        (["a,1,2,p,x"], ["'a,1,2,p,x' is not"]),
        ([",1,2"], ["',1,2' has no printable NAME"]),
        (["  ,1,2"], ["has no printable NAME"]),
        (["line\nbreak,1,2"], ["has no printable NAME"]),
        (["a,1,2", "a,3,4"], ["another span has the name 'a'"]),
        (["a,,2"], ["START must be finite"]),
        (["a,1,"], ["END must be finite"]),
        (["a,soon,inf"], ["START must be finite", "END must be finite"]),
        (["a,nan,2"], ["START must be finite"]),
        (["a,-0.5,2", "b,1,2"], ["'a,-0.5,2': START is before 1970"]),
        (["a,1,2,gone"], ["--span a: there is no span 'gone' to be its parent"]),
        (["a,1,2,a"], ["the parents go round in a circle: a > a"]),
        (["a,1,2,b", "b,1,2,c", "c,1,2,a", "d,1,2"], ["the parents go round in a circle"]),
        (["a,1,2", "b,x,2", "c,1", "d,1,2,zz"], ["START", "'c,1'", "'zz'"]),
    ],
)
def test_invalid_spans_emit_nothing(
    lensfast: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    specs: list[str],
    problems: list[str],
) -> None:
    monkeypatch.setenv("NEMO_LENS_EXPORTER", "console")
    assert lensfast.cli.main(["emit-spans", "--service", "s", *(f"--span={spec}" for spec in specs)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    *lines, last = output.err.splitlines()
    assert last == "nothing emitted: invalid span input"
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith("lensfast emit-spans: error: ")
        assert problem in line


def test_invalid_spans_as_a_process(lensfast: ModuleType) -> None:
    result = emit(lensfast.backend, "a,1,2", "b,1,2,gone", NEMO_LENS_EXPORTER="console")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith("\nnothing emitted: invalid span input\n")


def test_an_empty_service(lensfast: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert lensfast.cli.main(["emit-spans", "--service", " ", "--span", "a,1,2"]) == 1
    assert "--service is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["emit-spans", "--span", "a,1,2"], "required: --service"),
        (["emit-spans", "--service", "s"], "required: --span"),
        (["set-slurm-resource-attrs"], "required: --stage"),
        (["set-slurm-resource-attrs", "--stage", "srun"], "invalid choice: 'srun'"),
        (["set-slurm-resource-attrs", "--stage", "sbatch", "--container-image", "x"], "--container-image"),
    ],
)
def test_wrong_options(
    lensfast: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        lensfast.cli.main(arguments)
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text in output.err


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dead_collector(lensfast: ModuleType, protocol: str) -> None:
    result = emit(
        lensfast.backend,
        "a,1,2",
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}",
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_EXPORTER_OTLP_TIMEOUT="1",
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith("lensfast emit-spans: error: the spans could not be delivered: the exporter failed\n")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in result.stderr
    assert "emitted" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_collector_that_never_answers(lensfast: ModuleType) -> None:
    code = (
        "import sys; from lensfast import cli; cli._EMIT_TIMEOUT_MS = 200; "
        "sys.exit(cli.main(['emit-spans', '--service', 's', '--span', 'a,1,2']))"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1000",
        }
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=clean_environment(lensfast.backend, **variables),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "lensfast emit-spans: error: the spans could not be delivered: not within 0.2 s\n"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NEMO_LENS_EXPORTER": "file"}, "Unknown exporter type 'file'"),
        ({"NEMO_LENS_EXPORT_RANK": "last"}, "NEMO_LENS_EXPORT_RANK must be an integer"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT must be a number of seconds"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "0"}, "OTEL_BSP_SCHEDULE_DELAY must be a positive integer"),
    ],
)
def test_a_set_up_that_fails(
    lensfast: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    text: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert lensfast.cli.main(["emit-spans", "--service", "s", "--span", "a,1,2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("lensfast emit-spans: error: ")
    assert text in line


def test_without_the_sdk(
    lensfast: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert lensfast.cli.main(["emit-spans", "--service", "s", "--span", "a,1,2"]) == 2
    assert "pip install 'lensfast[sdk]'" in capsys.readouterr().err


@pytest.mark.parametrize("variables", [{"OTEL_TRACES_SAMPLER": "always_off"}, {"OTEL_SDK_DISABLED": "true"}])
def test_spans_that_the_environment_drops_are_not_claimed(
    lensfast: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
) -> None:
    for name, value in {"NEMO_LENS_EXPORTER": "console", **variables}.items():
        monkeypatch.setenv(name, value)
    assert lensfast.cli.main(["emit-spans", "--service", "s", "--span", "b,1,2,a", "--span", "a,1,2"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    reason = "(OTEL_TRACES_SAMPLER or OTEL_SDK_DISABLED)"
    assert output.err.splitlines() == [f"not emitted: a {reason}", f"not emitted: b {reason}"]


# What is behind emit-spans


class Exporter(SpanExporter):
    def __init__(self, result: Any) -> None:
        self.result = result
        self.calls: list[str] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.calls.append("export")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self.calls.append("force_flush")
        return True


def test_span_emitter_provider(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "overruled")
    providers = importlib.import_module("lensfast.providers")
    memory = InMemorySpanExporter()
    provider, tracked = providers._build_span_emitter_provider("launch", memory)
    with provider.get_tracer("t").start_as_current_span("one"):
        pass
    assert provider.force_flush()
    [span] = memory.get_finished_spans()
    assert (span.name, span.resource.attributes["service.name"]) == ("one", "launch")
    assert not tracked.failed
    assert importlib.import_module("opentelemetry.trace").get_tracer_provider() is not provider
    provider.shutdown()


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, ValueError("broken"), None])
def test_a_failed_export_is_remembered(lensfast: ModuleType, caplog: pytest.LogCaptureFixture, result: Any) -> None:
    caplog.set_level(logging.CRITICAL)  # the SDK logs a traceback
    providers = importlib.import_module("lensfast.providers")
    exporter = Exporter(result)
    provider, tracked = providers._build_span_emitter_provider("launch", exporter)
    assert tracked.failed is False
    with provider.get_tracer("t").start_as_current_span("one"):
        pass
    provider.force_flush()
    assert tracked.failed is True
    exporter.result = SpanExportResult.SUCCESS
    with provider.get_tracer("t").start_as_current_span("two"):
        pass
    provider.shutdown()
    assert exporter.calls == ["export", "export", "shutdown"]
    assert tracked.failed is True
    assert tracked.force_flush() is True


# set-slurm-resource-attrs

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": 'it\'s $HOME `id` "x" \\ ✓',
    "SLURM_CLUSTER_NAME": "east",
    "SLURM_TOPOLOGY_ADDR": "s0.n1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node",
    "SLURMD_NODENAME": "n1",
}
DERIVED = {
    "slurm.job.id": "4711",
    "slurm.job.id.raw": "4711",
    "slurm.array.job_id": "4711",
    "slurm.array.task_id": "0",
    "slurm.array.count": "1",
    "slurm.restart_count": "0",
    "slurm.job.name": JOB["SLURM_JOB_NAME"],
    "slurm.cluster.name": "east",
    "slurm.head_node.name": "n1",
    "nv.dl.job.uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, "nemo.lens.job/east/4711")),
}
TOPOLOGY = {"slurm.topology.addr": "s0.n1", "slurm.topology.addr_pattern": "switch.node"}


def attributes(lensfast: ModuleType, text: str) -> dict[str, str]:
    parsed: dict[str, str] = lensfast.resources.attributes.parse_otel_resource_attributes(text)
    return parsed


def evaluated(lensfast: ModuleType, *arguments: str, **variables: str) -> dict[str, str]:
    """The attributes that a program sees which a shell starts after an eval of what the command prints."""
    command = f"{shlex.quote(sys.executable)} -m lensfast set-slurm-resource-attrs {shlex.join(arguments)}"
    show = f"import os; print(os.environ['{VARIABLE}'])"
    result = subprocess.run(
        ["sh", "-c", f'eval "$({command})"; {shlex.quote(sys.executable)} -c {shlex.quote(show)}'],
        env=clean_environment(lensfast.backend, **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return attributes(lensfast, result.stdout.rstrip("\n"))


def test_the_batch_script(lensfast: ModuleType) -> None:
    assert evaluated(lensfast, "--stage", "sbatch", **JOB) == DERIVED


def test_a_task(lensfast: ModuleType) -> None:
    in_step = {**JOB, "SLURM_STEP_ID": "0"}
    expected = {**DERIVED, **TOPOLOGY, "host.name": socket.gethostname()}
    del expected["slurm.head_node.name"]
    assert evaluated(lensfast, "--stage", "task", **in_step) == expected
    image = "nvcr.io/nvidia/nemo:25.09 it's"
    assert evaluated(lensfast, "--stage", "task", "--container-image", image, **in_step) == {
        **expected,
        "nv.dl.launch.container.image": image,
    }
    assert evaluated(lensfast, "--stage", "task", "--container-image", "", **in_step) == expected


def test_both_stages_of_a_job(lensfast: ModuleType) -> None:
    variables = {**JOB, VARIABLE: "team=a%20b"}
    batch = run_command(lensfast.backend, "set-slurm-resource-attrs", "--stage", "sbatch", **variables)
    [text] = shlex.split(batch.stdout.removeprefix(f"export {VARIABLE}="))
    in_step = {**JOB, "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "of the step", VARIABLE: text}
    assert evaluated(lensfast, "--stage", "task", **in_step) == {
        **DERIVED,
        **TOPOLOGY,
        "team": "a b",
        "host.name": socket.gethostname(),
    }


@pytest.mark.parametrize("stage", ["sbatch", "task"])
def test_what_is_there_stays(
    lensfast: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    existing = {"slurm.job.id": "1_2", "slurm.job.name": "", "host.name": "h", "slurm.topology.addr": "t", "x": "ä;b"}
    monkeypatch.setenv(VARIABLE, "slurm.job.id=1_2, slurm.job.name=,host.name=h,slurm.topology.addr=t,junk,x=%C3%A4;b")
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert lensfast.cli.main(["set-slurm-resource-attrs", "--stage", stage]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    match = re.fullmatch(rf"export {VARIABLE}=(.*)\n", output.out)
    [text] = shlex.split(match[1])
    derived = DERIVED if stage == "sbatch" else {**DERIVED, **TOPOLOGY}
    assert attributes(lensfast, text) == {**derived, **existing}


@pytest.mark.parametrize(("existing", "value"), [(None, "''"), ("b=2,a=1", "b=2,a=1"), ("a b=c d", "'a b=c%20d'")])
def test_outside_a_job(
    lensfast: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    existing: str | None,
    value: str,
) -> None:
    if existing is not None:
        monkeypatch.setenv(VARIABLE, existing)
    assert lensfast.cli.main(["set-slurm-resource-attrs", "--stage", "sbatch"]) == 0
    assert capsys.readouterr().out == f"export {VARIABLE}={value}\n"


def test_a_key_that_would_break_the_line(
    lensfast: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "a=1,line\nbreak=2,v=line\nbreak")
    assert lensfast.cli.main(["set-slurm-resource-attrs", "--stage", "sbatch"]) == 0
    assert capsys.readouterr().out == f"export {VARIABLE}=a=1,v=line%0Abreak\n"
