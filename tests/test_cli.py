"""The lensfast command: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import os
import platform
import pty
import re
import subprocess
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_receiver import PROTOCOLS, Receiver, free_port

from conftest import clean_environment, run_command

SITES = ("managed_span", "managed_span_dict", "trace_fn", "is_span_group_enabled")
OURS = dict(zip(SITES, (10.0, 20.0, 30.0, 40.0), strict=True))
THEIRS = dict(zip(SITES, (1000.0, 300.0, 60.0, 40.0), strict=True))

# The tree of `--span-groups default,layer --steps 2 --microbatches 3 --layers 2`.
TREE = [
    (0, "megatron.pretrain", 1),
    (1, "megatron.train", 1),
    (2, "megatron.layer.forward", 12),
    (3, "megatron.layer.self_attention", 12),
    (3, "megatron.layer.mlp", 12),
    (2, "megatron.evaluate", 1),
    (3, "megatron.evaluate.step", 2),
    (2, "megatron.save_checkpoint", 1),
    (3, "megatron.save_checkpoint.state_dict", 1),
    (3, "megatron.save_checkpoint.io_write", 1),
]
SMALL = ("--steps", "2", "--microbatches", "3", "--layers", "2")
# Start-up 5; a step 9, a microbatch 2, a layer 3; evaluation 3, checkpoint 3.
SPANS_OF_SMALL = 5 + 2 * (9 + 3 * (2 + 2 * 3)) + 3 + 3


@pytest.fixture
def cli(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with costs that are known instead of measured, and without nemo-lens."""

    def site_costs(libraries: list[Any]) -> list[dict[str, float]]:
        return [OURS, THEIRS][: len(libraries)]

    monkeypatch.setattr(lensfast.cli, "site_costs", site_costs)
    monkeypatch.setitem(sys.modules, "nemo.lens", None)
    return lensfast.cli


def info(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


@pytest.mark.parametrize("arguments", [[], ["info"]])
def test_info(
    lensfast: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, "nemo.lens", None)
    assert lensfast.cli.main(arguments) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert info(output.out) == {
        "version": lensfast.__version__,
        "backend": lensfast.backend,
        "backend reason": {"c": "the C extension is present", "python": "LENSFAST_PURE_PYTHON is set"}[
            lensfast.backend
        ],
        "python": f"{platform.python_version()} (CPython)",
        "opentelemetry-api": metadata.version("opentelemetry-api"),
        "opentelemetry-sdk": metadata.version("opentelemetry-sdk"),
        "native spans": {"c": "yes", "python": "no: LENSFAST_PURE_PYTHON is set"}[lensfast.backend],
        "nemo.lens": "not installed (under `lensfast run`: lensfast)",
        "enabled groups": "none (each process enables its own, by setup_telemetry())",
        "environment": "telemetry off (NEMO_LENS_ENABLED), span groups 'default' (NEMO_LENS_SPAN_GROUPS) = "
        "checkpoint, evaluate, job",
    }


def test_info_of_enabled_groups(lensfast: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lensfast.set_enabled_span_groups({"step", "layer"})
    assert lensfast.cli.main([]) == 0
    assert info(capsys.readouterr().out)["enabled groups"] == "layer, step"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"NEMO_LENS_ENABLED": "1", "NEMO_LENS_SPAN_GROUPS": "Step, layer"},
            "telemetry on (NEMO_LENS_ENABLED), span groups 'Step, layer' (NEMO_LENS_SPAN_GROUPS) = step; "
            "unknown until a library brings them: layer",
        ),
        (
            {"NEMO_LENS_SPAN_GROUPS": "none"},
            "telemetry off (NEMO_LENS_ENABLED), span groups 'none' (NEMO_LENS_SPAN_GROUPS) = none; "
            "unknown until a library brings them: none",
        ),
        (
            {"NEMO_LENS_ENABLED": "perhaps"},
            "error: NEMO_LENS_ENABLED must be one of 1, true, yes, on, 0, false, no, off, not 'perhaps'",
        ),
        (
            {"NEMO_LENS_EXPORT_SAMPLE_RATE": "2"},
            "error: NEMO_LENS_EXPORT_SAMPLE_RATE must be a number from 0.0 to 1.0 (export_sample_rate), not '2'",
        ),
    ],
)
def test_info_of_the_environment(
    lensfast: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    text: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert lensfast.cli.main(["info"]) == 0
    assert info(capsys.readouterr().out)["environment"] == text


def test_info_without_the_sdk(
    lensfast: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = metadata.version

    def version(name: str) -> str:
        if name == "opentelemetry-sdk":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    assert lensfast.cli.main([]) == 0
    assert info(capsys.readouterr().out)["opentelemetry-sdk"] == "not installed (pip install 'lensfast[sdk]')"


def test_version(lensfast: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        lensfast.cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"lensfast {lensfast.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train"], "invalid choice: 'train'"),
        (["demo", "--steps", "0"], "--steps: must be a positive integer, not '0'"),
        (["demo", "--layers", "-1"], "--layers: must be a positive integer, not '-1'"),
        (["demo", "--microbatches", "1.5"], "--microbatches: must be a positive integer, not '1.5'"),
        (["demo", "--exporter", "file"], "--exporter: invalid choice: 'file'"),
        (["demo", "--model", "jax"], "--model: invalid choice: 'jax'"),
    ],
)
def test_wrong_options(
    lensfast: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        lensfast.cli.main(arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def fails_with_one_line(cli: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["demo", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("lensfast demo: error: ")
    return line


def test_unknown_group(cli: Any, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails_with_one_line(cli, capsys, "--span-groups", "default,layr")
    assert "'layr'" in line
    for name in ("default", "per_step", "all", "layer", "microbatch", "activation_offload", "data_loading"):
        assert re.search(rf"\b{name}\b", line.split("valid")[1])


def test_demo_without_the_sdk(cli: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    assert "pip install 'lensfast[sdk]'" in fails_with_one_line(cli, capsys)


def test_demo_without_torch(cli: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'lensfast[torch]'" in fails_with_one_line(cli, capsys, "--model", "torch")


def test_demo_in_a_bad_environment(
    cli: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_OTEL_EXPORT_RANK", "last")
    assert "MEGATRON_OTEL_EXPORT_RANK must be an integer" in fails_with_one_line(cli, capsys)


def tree_lines(text: str) -> list[tuple[int, str, int]]:
    """(depth, name, count) of each line of the plain tree."""
    found = re.findall(r"^( *)(megatron\.\S+) +([\d,]+) +[\d.]+ (?:ns|us|ms|s) +[\d.]+ (?:ns|us|ms|s)$", text, re.M)
    return [(len(indent) // 2, name, int(count.replace(",", ""))) for indent, name, count in found]


def test_report(cli: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--span-groups", "default,layer", *SMALL]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "model 'loop', 2 steps x 3 microbatches x 2 layers" in output.out
    assert "44 spans recorded in memory" in output.out
    assert tree_lines(output.out) == TREE
    groups = re.findall(r"^(job|layer|checkpoint|evaluate) +(\d+) +(\S+ \S+)$", output.out, re.M)
    assert [(name, int(count)) for name, count, _ in groups] == [
        ("job", 2), ("layer", 36), ("checkpoint", 3), ("evaluate", 3)
    ]  # fmt: skip
    # megatron.train lies inside megatron.pretrain, in the same group: its time does not count twice.
    (pretrain,) = re.findall(r"^megatron\.pretrain +1 +(\S+ \S+) ", output.out, re.M)
    assert groups[0][2] == pretrain
    assert "enabled, without a call site in this loop: inference\n" in output.out
    assert (
        "disabled: activation_offload, communication, data_loading, forward_backward, load_checkpoint, microbatch, "
        "model_init, optimizer, step\n"
    ) in output.out


def cost_rows(text: str) -> dict[str, list[str]]:
    rows = text[text.index("\ncall site") :].splitlines()
    return {cells[0]: cells[1:] for row in rows if len(cells := re.split(r"  +", row)) > 2}


def test_costs_without_nemo_lens(cli: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *SMALL]) == 0
    text = capsys.readouterr().out
    # Of 2 layers x 3 microbatches: 12 * 10 + 7 * 20 + 12 * 30 + 5 * 40 ns. Of 96 x 64: 252,440 ns.
    assert cost_rows(text) == {
        "call site": ["in 2x3", "in 96x64", "lensfast"],
        "managed_span(g, name)": ["12", "12,288", "10 ns"],
        "managed_span(g, name, **{k: n})": ["7", "6,145", "20 ns"],
        "@trace_fn, over a plain call": ["12", "134", "30 ns"],
        "is_span_group_enabled(g)": ["5", "66", "40 ns"],
        "one step, 2x3": ["36", "820 ns"],
        "one step, 96x64": ["18,633", "252 us"],
    }
    assert "nemo-lens is not installed; not compared" in text


def test_costs_beside_nemo_lens(cli: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nemo = SimpleNamespace(lens=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nemo", nemo)
    monkeypatch.setitem(sys.modules, "nemo.lens", nemo.lens)
    assert cli.main(["demo", *SMALL]) == 0
    text = capsys.readouterr().out
    # Of 2 x 3: 12 * 1000 + 7 * 300 + 12 * 60 + 5 * 40 = 15,020 ns. Of 96 x 64: 14,142,180 ns.
    assert cost_rows(text) == {
        "call site": ["in 2x3", "in 96x64", "lensfast", "nemo-lens", "ratio"],
        "managed_span(g, name)": ["12", "12,288", "10 ns", "1.00 us", "100.0x"],
        "managed_span(g, name, **{k: n})": ["7", "6,145", "20 ns", "300 ns", "15.0x"],
        "@trace_fn, over a plain call": ["12", "134", "30 ns", "60 ns", "2.0x"],
        "is_span_group_enabled(g)": ["5", "66", "40 ns", "40 ns", "1.0x"],
        "one step, 2x3": ["36", "820 ns", "15.0 us", "18.3x"],
        "one step, 96x64": ["18,633", "252 us", "14.1 ms", "56.0x"],
    }
    assert "not compared" not in text


def test_site_costs_are_measured_with_all_groups_disabled(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    lensfast.set_enabled_span_groups({"layer"})
    (costs,) = lensfast.cli.site_costs([lensfast], rounds=1, calls=20)
    assert set(costs) == set(SITES)
    assert all(cost >= 0 for cost in costs.values())
    assert exporter.get_finished_spans() == ()
    assert lensfast.enabled_span_groups() == frozenset()


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (27.4, "27 ns"),
        (999.4, "999 ns"),
        (999.6, "1.00 us"),
        (1083, "1.08 us"),
        (98_760, "98.8 us"),
        (123_456, "123 us"),
        (999_960, "1.00 ms"),
        (21_560_000, "21.6 ms"),
        (3e9, "3.00 s"),
        (1234e9, "1,234 s"),
    ],
)
def test_times(lensfast: ModuleType, nanoseconds: float, text: str) -> None:
    assert lensfast.cli._time(nanoseconds) == text


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (["--span-groups", ","], {}, "(span groups ',' enable nothing)"),
        ([], {"OTEL_TRACES_SAMPLER": "always_off"}, "(the environment asks for a sampler that drops them all)"),
    ],
)
def test_report_of_no_spans(
    cli: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variables: dict[str, str],
    reason: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["demo", *SMALL, *arguments]) == 0
    text = capsys.readouterr().out
    assert "0 spans recorded in memory" in text
    assert reason in text
    assert "one step, 96x64" in text


def test_module_runs_as_the_command(lensfast: ModuleType) -> None:
    result = run_command(lensfast.backend)
    assert (result.returncode, result.stderr) == (0, "")
    assert info(result.stdout)["backend"] == lensfast.backend


def test_a_real_run(lensfast: ModuleType) -> None:
    result = run_command(lensfast.backend, "demo", "--span-groups", "default,layer", *SMALL)
    assert (result.returncode, result.stderr) == (0, "")
    assert tree_lines(result.stdout) == TREE
    name = {"c": "C backend", "python": "Python backend"}[lensfast.backend]
    assert f"Cost of call sites whose group is disabled ({name})" in result.stdout
    assert set(cost_rows(result.stdout)) >= {"managed_span(g, name)", "one step, 2x3", "one step, 96x64"}


def test_console_prints_one_json_object_a_line_to_stdout(lensfast: ModuleType) -> None:
    result = run_command(lensfast.backend, "demo", "--exporter", "console", *SMALL)
    assert result.returncode == 0
    spans = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(spans) == SPANS_OF_SMALL
    assert f"{SPANS_OF_SMALL} spans printed to stdout\n" in result.stderr
    names = {span["context"]["span_id"]: span["name"] for span in spans}
    parents = {(span["name"], names.get(span["parent_id"])) for span in spans}
    assert ("megatron.pretrain", None) in parents
    assert ("megatron.layer.mlp", "megatron.layer.forward") in parents
    numbers = [
        span["attributes"]["megatron.layer_number"] for span in spans if span["name"] == "megatron.layer.forward"
    ]
    assert sorted(numbers) == [1] * 6 + [2] * 6
    # The report is on stderr.
    assert (3, "megatron.forward_backward", 2) in tree_lines(result.stderr)
    assert "one step, 96x64" in result.stderr


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_otlp_says_where_the_spans_went(lensfast: ModuleType, protocol: str) -> None:
    with Receiver() as receiver:
        endpoint = receiver.endpoint(protocol)
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        result = run_command(lensfast.backend, "demo", "--exporter", "otlp", *SMALL, **variables)
        received = receiver.spans()
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{SPANS_OF_SMALL} spans delivered to {endpoint} over OTLP {protocol}\n" in result.stdout
    assert len(received) == SPANS_OF_SMALL
    assert (3, "megatron.forward_backward", 2) in tree_lines(result.stdout)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_otlp_without_a_collector(lensfast: ModuleType, protocol: str) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    result = run_command(lensfast.backend, "demo", "--exporter", "otlp", *SMALL, **variables)
    assert result.returncode == 1
    assert "WARNING lensfast." in result.stderr
    assert "Traceback" not in result.stderr
    assert (
        f"{SPANS_OF_SMALL} spans made, but NOT all delivered to {endpoint} over OTLP {protocol}: see the warnings\n"
    ) in result.stdout
    assert "one step, 96x64" in result.stdout


def test_reader_that_goes_away(lensfast: ModuleType) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lensfast", "demo", *SMALL],
        env=clean_environment(lensfast.backend),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), error) == (1, "")


def test_terminal_gets_colours_and_guides(lensfast: ModuleType) -> None:
    pytest.importorskip("rich", reason="the fancy output needs rich, which is not installed")
    try:
        ours, theirs = pty.openpty()
    except OSError as error:
        pytest.skip(f"there is no pseudo-terminal here: {error}")
    process = subprocess.Popen(
        [sys.executable, "-m", "lensfast", "demo", *SMALL],
        env=clean_environment(lensfast.backend, TERM="xterm-256color", COLUMNS="80", PYTHONIOENCODING="utf-8"),
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:
        pass  # how Linux says that the other side is closed
    os.close(ours)
    assert (process.communicate()[1], process.returncode) == ("", 0)
    text = re.sub(r"\x1b\[[0-9;]*m", "", output.decode())
    assert len(text) < len(output.decode())
    assert re.search(r"^    │   │   │   └── megatron\.layer\.forward +12 ", text, re.M)
    assert max(map(len, text.splitlines())) <= 120
    assert "one step, 96x64" in text
