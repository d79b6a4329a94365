"""A process's place in its job where a launcher says it, on both backends: ranks, run ids, restarts."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_receiver import ReceivedSpan, Receiver

from conftest import clean_environment, load_backend

LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
)  # fmt: skip
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "r7",
            "TORCHELASTIC_RESTART_COUNT": "2"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def launch(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


def set_up(lensfast: ModuleType, *ranks: int, resource_attributes: Any = None, **options: Any) -> tuple[Any, Any]:
    """(handle, (rank, world size) that the strategy was given) of a set-up that exports to memory."""
    asked = []

    def strategy(config: Any, rank: int, world_size: int) -> bool:
        asked.append((rank, world_size))
        return True

    given = {name: options.pop(name) for name in ("rank", "world_size") if name in options}
    config = lensfast.NemoLensConfig(**{"enabled": True, "metrics_enabled": False, "run_id": "r", **options})
    handle = lensfast.setup_telemetry(
        config, *ranks, **given, resource_attributes=resource_attributes, span_exporter=InMemorySpanExporter(),
        export_strategy=strategy,
    )  # fmt: skip
    (place,) = asked
    return handle, place


def resource(*keys: str) -> dict[str, Any]:
    """The attributes of the installed resource, or those under `keys`."""
    attributes = trace.get_tracer_provider().resource.attributes  # type: ignore[attr-defined]
    return {key: value for key, value in attributes.items() if not keys or key in keys}


PLACE = ("dl.rank", "dl.world_size", "dl.local_rank", "torchelastic.restart_count")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Rank and world size


def test_the_environment_says_the_rank_where_the_caller_does_not(lensfast: ModuleType, launched: Any) -> None:
    launched(RANK="3", WORLD_SIZE="8")
    handle, place = set_up(lensfast)
    assert (handle.is_exporting, place) == (True, (3, 8))
    assert resource(*PLACE) == {"dl.rank": 3, "dl.world_size": 8}
    assert resource("service.instance.id") == {"service.instance.id": "r-rank3"}


@pytest.mark.parametrize(("rank", "exports"), [("0", False), ("6", False), ("7", True)])
def test_the_strategy_of_the_config_goes_by_it(
    lensfast: ModuleType, launched: Any, caplog: pytest.LogCaptureFixture, rank: str, exports: bool
) -> None:
    launched(RANK=rank, WORLD_SIZE="8")
    caplog.set_level(logging.INFO, "lensfast")
    config = lensfast.NemoLensConfig(enabled=True, metrics_enabled=False)
    assert lensfast.setup_telemetry(config, span_exporter=InMemorySpanExporter()).is_exporting is exports
    assert lensfast.is_span_group_enabled("job") is exports
    # What a user finds who looks for the spans of rank 0.
    assert f"rank {rank} of 8, by RANK and WORLD_SIZE" in caplog.text


@pytest.mark.parametrize(
    ("ranks", "options", "place"),
    [
        ((1, 2), {}, (1, 2)),
        ((0, 1), {}, (0, 1)),
        ((), {"rank": 5, "world_size": 6}, (5, 6)),
        # As ever: one that is given alone is not mixed with the environment's.
        ((1,), {}, (1, 1)),
        ((0,), {}, (0, 1)),
        ((), {"world_size": 4}, (0, 4)),
        ((None, None), {}, (3, 8)),
    ],
)
@pytest.mark.parametrize("rank_in_environment", ["3", "nonsense"])
def test_arguments_win(
    lensfast: ModuleType, launched: Any, caplog: pytest.LogCaptureFixture, ranks: Any, options: Any,
    place: Any, rank_in_environment: str,
) -> None:  # fmt: skip
    launched(RANK=rank_in_environment, WORLD_SIZE="8", LOCAL_RANK="1")
    asked_the_environment = None in ranks
    expected = (0, 1) if asked_the_environment and rank_in_environment == "nonsense" else place
    assert set_up(lensfast, *ranks, **options)[1] == expected
    if not asked_the_environment:
        assert resource(*PLACE) == {"dl.rank": place[0], "dl.world_size": place[1]}
        assert warnings_in(caplog) == []


def test_without_a_launcher_nothing_is_said(
    lensfast: ModuleType, launched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    launched(LOCAL_RANK="1", TORCHELASTIC_RESTART_COUNT="1", RANK=" ", WORLD_SIZE="", TORCHELASTIC_RUN_ID="")
    assert set_up(lensfast)[1] == (0, 1)
    assert resource(*PLACE) == {"dl.rank": 0, "dl.world_size": 1}
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("rank", "world_size", "said"),
    [
        ("3", None, "WORLD_SIZE is not set, where RANK is"),
        ("3", " ", "WORLD_SIZE is not set, where RANK is"),
        (None, "8", "RANK is not set, where WORLD_SIZE is"),
        ("three", "8", "RANK requires a base-10 integer, not 'three'"),
        ("3.0", "8", "RANK requires a base-10 integer, not '3.0'"),
        ("1_0", "80", "RANK requires a base-10 integer, not '1_0'"),
        ("3", "all", "WORLD_SIZE requires a base-10 integer, not 'all'"),
        ("3", str(2**63), "WORLD_SIZE requires a base-10 integer"),  # more than an attribute carries
        ("8", "8", "RANK is 8, and WORLD_SIZE 8"),
        ("9", "8", "RANK is 9, and WORLD_SIZE 8"),
        ("-1", "8", "RANK is -1, and WORLD_SIZE 8"),
        ("0", "0", "RANK is 0, and WORLD_SIZE 0"),
        ("0", "-2", "RANK is 0, and WORLD_SIZE -2"),
    ],
)
def test_nonsense_is_one_warning_and_rank_0_of_1(
    lensfast: ModuleType, launched: Any, caplog: pytest.LogCaptureFixture, rank: Any, world_size: Any, said: str
) -> None:
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    launched(**{name: value for name, value in given.items() if value is not None})
    handle, place = set_up(lensfast)
    assert (handle.is_exporting, place) == (True, (0, 1))
    assert resource(*PLACE) == {"dl.rank": 0, "dl.world_size": 1}
    (warning,) = warnings_in(caplog)
    assert said in warning
    assert "rank 0 of 1" in warning


def test_space_around_a_number_is_none_of_it(lensfast: ModuleType, launched: Any) -> None:
    launched(RANK=" 3 ", WORLD_SIZE="8\n")
    assert set_up(lensfast)[1] == (3, 8)


def test_telemetry_that_is_off_does_not_complain(
    lensfast: ModuleType, launched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    launched(RANK="three", WORLD_SIZE="8")
    assert set_up(lensfast, enabled=False)[1] == (0, 1)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("said_by", ["argument", "environment"])
@pytest.mark.parametrize("rank", ["3", "three"])
def test_callers_of_the_nightly_generation_have_no_ranks(
    lensfast: ModuleType, launched: Any, caplog: pytest.LogCaptureFixture, said_by: str, rank: str
) -> None:
    launched(**{**TORCHRUN, "RANK": rank})
    attributes = {"nv.dl.rank": 3, "nv.dl.world_size": 8}
    if said_by == "environment":
        launched(OTEL_RESOURCE_ATTRIBUTES="nv.dl.rank=3,nv.dl.world_size=8")
    # single_rank, so the last one; a group without a library that registers it would be a warning of its own.
    config = lensfast.NemoLensConfig(enabled=True, metrics_enabled=False, span_groups="", run_id="r")
    handle = lensfast.setup_telemetry(
        config,
        resource_attributes=attributes if said_by == "argument" else None,
        span_exporter=InMemorySpanExporter(),
    )
    assert handle.is_exporting
    assert resource(*PLACE) == {}
    assert resource("nv.dl.rank", "nv.dl.world_size", "nv.dl.local_rank", "service.instance.id") == {
        **attributes,
        "service.instance.id": "r-rank3",
    }
    assert warnings_in(caplog) == []


def test_build_providers_goes_by_its_arguments(lensfast: ModuleType, launched: Any) -> None:
    launched(**TORCHRUN)
    config = lensfast.NemoLensConfig(enabled=True, metrics_enabled=False)
    assert lensfast.providers.build_providers(config, span_exporter=InMemorySpanExporter())
    assert resource(*PLACE) == {"dl.rank": 0, "dl.world_size": 1}


# What else torchrun says


@pytest.mark.parametrize(
    ("variables", "ranks", "expected"),
    [
        (TORCHRUN, (), (3, 8, 1, 2)),
        (TORCHRUN, (5, 6), (5, 6, 1, 2)),  # a rank that counts otherwise is still in this local place
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, (5, 6), (5, 6, 1, 2)),  # without --rdzv-id
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (), (3, 8, 1, None)),  # another launcher
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 6), (5, 6, None, None)),
        ({**TORCHRUN, "LOCAL_RANK": " ", "TORCHELASTIC_RESTART_COUNT": ""}, (), (3, 8, None, None)),
    ],
)
def test_local_rank_and_restarts(
    lensfast: ModuleType, launched: Any, variables: dict[str, str], ranks: Any, expected: Any
) -> None:
    launched(**variables)
    set_up(lensfast, *ranks)
    found = resource(*PLACE)
    assert tuple(found.get(key) for key in PLACE) == expected
    assert all(type(value) is int for value in found.values())


def test_a_local_rank_that_is_no_number_is_left_out(
    lensfast: ModuleType, launched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    launched(**{**TORCHRUN, "LOCAL_RANK": "first", "TORCHELASTIC_RESTART_COUNT": "1.5"})
    set_up(lensfast)
    assert resource(*PLACE) == {"dl.rank": 3, "dl.world_size": 8}
    assert ["LOCAL_RANK" in text for text in warnings_in(caplog)] == [True, False]
    assert ["TORCHELASTIC_RESTART_COUNT" in text for text in warnings_in(caplog)] == [False, True]


def test_the_callers_attributes_win(lensfast: ModuleType, launched: Any) -> None:
    launched(**TORCHRUN)
    set_up(lensfast, resource_attributes={"dl.local_rank": 7, "dl.rank": 9, "team": "a"})
    assert resource(*PLACE, "team") == {
        "dl.rank": 9, "dl.world_size": 8, "dl.local_rank": 7, "torchelastic.restart_count": 2, "team": "a",
    }  # fmt: skip


@pytest.mark.parametrize(("local_rank", "exports"), [("0", True), ("1", False)])
def test_the_first_rank_of_a_node(lensfast: ModuleType, launched: Any, local_rank: str, exports: bool) -> None:
    launched(**{**TORCHRUN, "LOCAL_RANK": local_rank})
    config = lensfast.NemoLensConfig(enabled=True, export_strategy="first_rank_per_node", metrics_enabled=False)
    assert lensfast.setup_telemetry(config, span_exporter=InMemorySpanExporter()).is_exporting is exports


@pytest.mark.parametrize(
    ("run_id", "variables", "expected"),
    [
        ("mine", {"SLURM_JOB_ID": "42", "TORCHELASTIC_RUN_ID": "e7"}, "mine"),
        ("", {"SLURM_JOB_ID": "42", "TORCHELASTIC_RUN_ID": "e7"}, "42"),
        ("", {"TORCHELASTIC_RUN_ID": "e7"}, "e7"),
        ("", {"SLURM_JOB_ID": "", "TORCHELASTIC_RUN_ID": " e7 "}, "e7"),
        ("", {"TORCHELASTIC_RUN_ID": "none"}, None),
        ("", {"TORCHELASTIC_RUN_ID": ""}, None),
        ("", {}, None),
    ],
)
def test_run_id(
    lensfast: ModuleType, launched: Any, run_id: str, variables: dict[str, str], expected: str | None
) -> None:
    configs = [lensfast.NemoLensConfig(run_id=run_id) for _ in range(3)]
    given = [lensfast.ensure_run_id(config, variables) for config in configs[:2]]
    launched(**variables)
    given.append(lensfast.ensure_run_id(configs[2]))
    assert given == [config.run_id for config in configs]
    if expected is not None:
        assert given == [expected] * 3
    else:  # a random one each time
        assert len(set(given)) == 3
        assert all(len(found) == 12 and int(found, 16) >= 0 for found in given)


# Elastic restart, with torchrun itself


ELASTIC = """
import importlib
import os
import signal
import sys
import time
from pathlib import Path

lens = importlib.import_module(sys.argv[1])
ending, ready = sys.argv[2], Path(sys.argv[3])
if ending == "handles SIGTERM":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
handle = lens.setup_telemetry(lens.NemoLensConfig.from_env())
with lens.managed_span("job", "train"):
    with lens.managed_span("step", "step"):
        pass
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        lens.managed_span("step", "open").__enter__()
        if os.environ["RANK"] == "1":
            ready.touch()
            time.sleep(100)
        while not ready.exists():
            time.sleep(0.01)
        raise RuntimeError("rank 0 fails once")
"""


@pytest.mark.parametrize(
    ("launcher", "backend", "ending"),
    [
        ("torchrun", "c", "is killed"),
        ("torchrun", "python", "handles SIGTERM"),
        ("lensfast run", "c", "handles SIGTERM"),
    ],
)
def test_elastic_restart(tmp_path: Path, launcher: str, backend: str, ending: str) -> None:
    """Rank 0 fails while rank 1 works; torchrun ends that one with SIGTERM, and starts both again."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    load_backend(backend)  # skips where it can't be had
    (tmp_path / "job.py").write_text(ELASTIC)
    options = "--nproc-per-node 2 --max-restarts 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --rdzv-id elastic"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), "--local-addr", "127.0.0.1", "job.py"]
    if launcher == "lensfast run":
        command = [sys.executable, "-m", "lensfast", "run", "--", *command, "nemo.lens"]
    else:
        command.append("lensfast")
    with Receiver() as receiver:
        environment = clean_environment(
            backend, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("grpc"), NEMO_LENS_ENABLED="1",
            NEMO_LENS_EXPORT_STRATEGY="all_ranks", NEMO_LENS_SPAN_GROUPS="job,step", OMP_NUM_THREADS="1",
        )  # fmt: skip
        process = subprocess.run(
            [*command, ending, str(tmp_path / "ready")],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150,
        )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "rank 0 fails once" in process.stderr

    spans: dict[tuple[int, int], list[ReceivedSpan]] = {}
    for span in receiver.spans():
        place = span.resource["torchelastic.restart_count"], span.resource["dl.rank"]
        spans.setdefault(place, []).append(span)
        assert span.resource["nemo.run.id"] == "elastic"
        assert span.resource["dl.local_rank"] == span.resource["dl.rank"]
        assert span.resource["dl.world_size"] == 2
    names = {place: sorted(span.name for span in found) for place, found in spans.items()}
    everything = ["open", "step", "train"]
    # A limit: what a process has not sent when a signal kills it is lost.
    assert names.pop((0, 1), []) == ([] if ending == "is killed" else everything)
    assert names == {(0, 0): everything, (1, 0): ["step", "train"], (1, 1): ["step", "train"]}

    failed = {span.name: span for span in spans[0, 0]}
    assert (failed["train"].status, failed["train"].status_message) == ("ERROR", "rank 0 fails once")
    assert failed["open"].attributes == {"nemo.span.truncated": True}
    received = [span for found in spans.values() for span in found]
    assert len({span.span_id for span in received}) == len(received)
    assert len({span.trace_id for span in received}) == len(spans)
