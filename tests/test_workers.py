"""DataLoader workers: what they know, what they deliver, and how they end."""

from __future__ import annotations

import contextvars
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.metrics import _internal as metrics_internal
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_receiver import PROTOCOLS, ReceivedSpan, Receiver, run_script

from conftest import BACKENDS, clean_environment, load_backend

WORKER_ID = "torch.dataloader.worker.id"

# With torch's own workers

JOB = """
import json
import os
import random
import sys
import time
from pathlib import Path

import lensfast
from lensfast.contrib.torch._workers import WorkerTelemetry
from torch.utils.data import DataLoader, Dataset

prepared = None
loaded = Path(__file__).with_name("loaded")


def prepare(worker_id):
    global prepared
    prepared = worker_id
    random.seed(0)


class Data(Dataset):
    def __init__(self, deadly):
        self.deadly = deadly

    def __len__(self):
        return 8

    def __getitem__(self, index):
        random.seed(0)
        with lensfast.managed_span("step", "load", index=index, prepared=prepared, pid=os.getpid()):
            pass
        if index == 1:
            loaded.touch()
        if index == self.deadly:
            while not loaded.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        return index


def loader(deadly=None):
    persistent = sys.argv[2] == "persistent"
    telemetry = prepare
    if sys.argv[2] != "inherited":
        telemetry = WorkerTelemetry(config, then=prepare, parent="here" if persistent else "iterator")
    return DataLoader(
        Data(deadly), batch_size=None, num_workers=2, persistent_workers=persistent,
        multiprocessing_context=sys.argv[1], worker_init_fn=telemetry,
    )


def killed():
    try:
        list(loader(deadly=2))
    except RuntimeError as error:
        print(str(error))


def main():
    lensfast.setup_telemetry(config, resource_attributes={"team": "a"})
    with lensfast.managed_span("job", "train"):
        if sys.argv[2] == "killed":
            return killed()
        if sys.argv[2] == "inherited":
            return list(loader())
        global kept  # in use until the program ends, which is when persistent workers would be killed
        kept = loader()
        with lensfast.managed_span("job", "epoch", number=0):
            assert list(kept) == list(range(8))
        with lensfast.managed_span("job", "epoch", number=1):
            iterator = iter(kept)
            next(iterator)
            del iterator


if __name__ == "__main__":
    config = lensfast.NemoLensConfig.from_env()
    main()
"""


def run_job(folder: Path, backend: str, protocol: str, *arguments: str) -> tuple[str, list[ReceivedSpan]]:
    """(what it printed, what arrived) of rank 1 of a job whose loaders are used as `arguments` say."""
    pytest.importorskip("torch", reason="torch is not installed")
    load_backend(backend)  # skips where it can't be had
    script = folder / "job.py"
    script.write_text(JOB)
    with Receiver() as receiver:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            env=clean_environment(
                backend, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint(protocol),
                OTEL_EXPORTER_OTLP_PROTOCOL=protocol, NEMO_LENS_ENABLED="1", NEMO_LENS_RUN_ID="r",
                NEMO_LENS_SPAN_GROUPS="job,step", RANK="1", WORLD_SIZE="2", PYTHONWARNINGS="ignore",
            ),
            capture_output=True, text=True, timeout=150,
        )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout, receiver.spans()


@pytest.mark.parametrize("persistent", ["persistent", "started anew"])
@pytest.mark.parametrize(
    ("how", "backend", "protocol"),
    [
        *(("fork", backend, protocol) for backend, protocol in zip(BACKENDS, PROTOCOLS, strict=True)),
        ("forkserver", "python", "grpc"),
        ("spawn", "c", "http/protobuf"),
    ],
)
def test_what_workers_deliver(tmp_path: Path, how: str, backend: str, protocol: str, persistent: str) -> None:
    _, spans = run_job(tmp_path, backend, protocol, how, persistent)
    loads = [span for span in spans if span.name == "load"]
    epochs = {span.attributes["number"]: span for span in spans if span.name == "epoch"}
    # Every span of the first epoch, and of the second at least the one whose item was waited for.
    indices = [span.attributes["index"] for span in loads]
    assert set(indices) == set(range(8))
    assert 9 <= len(indices) <= 16
    assert indices.count(0) == 2
    assert len({span.span_id for span in spans}) == len(spans) == len(loads) + 3

    # The job's workers belong to the span where the loader was made, those of an epoch to the epoch.
    parents = epochs.values() if persistent == "started anew" else [span for span in spans if span.name == "train"]
    assert {span.parent_id for span in loads} == {span.span_id for span in parents}
    assert len({span.trace_id for span in spans}) == 1

    places = set()
    for span in loads:
        where = span.attributes if how == "fork" else span.resource
        assert where[WORKER_ID] == span.attributes["prepared"]
        assert (span.resource["dl.rank"], span.resource["dl.world_size"]) == (1, 2)
        assert (span.resource["nemo.run.id"], span.resource["team"]) == ("r", "a")
        places.add((where[WORKER_ID], span.attributes["pid"]))
        if how != "fork":
            assert span.resource["process.pid"] == span.attributes["pid"]
    assert {worker for worker, _ in places} == {0, 1}
    instances = {(span.resource["service.instance.id"], span.attributes["pid"]) for span in loads}
    assert persistent == "started anew" or len(places) == 2
    if how != "fork":
        assert len({instance for instance, _ in instances}) == len(places)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forked_workers_need_nothing_but_that_their_loader_ends(tmp_path: Path, backend: str) -> None:
    _, spans = run_job(tmp_path, backend, "grpc", "fork", "inherited")
    (train,) = [span for span in spans if span.name == "train"]
    loads = [span for span in spans if span.name == "load"]
    assert sorted(span.attributes["index"] for span in loads) == list(range(8))
    assert {(span.trace_id, span.parent_id) for span in loads} == {(train.trace_id, train.span_id)}
    assert len({span.span_id for span in spans}) == len(spans) == 9
    assert {span.attributes["pid"] for span in loads}.isdisjoint({train.resource["process.pid"]})


def test_forked_workers_do_not_send_their_parents_metrics_again(tmp_path: Path) -> None:
    """At each interval, for as long as they live."""
    job = """
import multiprocessing, time
import lensfast
handle = lensfast.setup_telemetry(lensfast.NemoLensConfig.from_env())
handle.meter.create_gauge("loss").set(0.5)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.5,))
child.start()
child.join()
"""
    load_backend("python")
    (tmp_path / "job.py").write_text(job)
    with Receiver() as receiver:
        process = run_script(
            tmp_path / "job.py", "python", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("grpc"),
            NEMO_LENS_ENABLED="1", NEMO_LENS_RUN_ID="r", OTEL_METRIC_EXPORT_INTERVAL="100",
        )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    # With another id, the SDK marks what a forked process sends.
    assert {resource["service.instance.id"] for *_, resource in receiver.gauges()["loss"]} == {"r-rank0"}


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_worker_that_is_killed(tmp_path: Path, how: str) -> None:
    """torch says so, the program goes on, and what the others have made arrives."""
    printed, spans = run_job(tmp_path, "c", "grpc", how, "killed")
    assert "killed by signal: Killed" in printed or "exited unexpectedly" in printed
    names = [span.name for span in spans]
    assert names.count("train") == 1
    # A limit: what the other one had not sent yet is lost.
    assert {span.attributes["prepared"] for span in spans if span.name == "load"} == {1}


# What a worker is given, with the worker in this process


@pytest.fixture
def workers(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch", reason="torch is not installed")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    module: ModuleType = lensfast.contrib.torch._workers
    return module


@pytest.fixture
def exported(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What is sent by way of a config, as workers send it."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(lensfast.providers, "_build_span_exporter", lambda config: memory)
    return memory


@pytest.fixture
def in_context() -> Callable[..., Any]:
    """Calls a function so that what it attaches stays in there."""
    return contextvars.copy_context().run


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def set_up(lensfast: ModuleType, config: Any, *ranks: int, **options: Any) -> Any:
    return lensfast.setup_telemetry(
        config, *ranks, span_exporter=InMemorySpanExporter(), metric_reader=InMemoryMetricReader(), **options
    )


def as_in_a_new_process(lensfast: ModuleType, telemetry: Any) -> Any:
    """`telemetry` as a worker gets it that is not forked, with nothing set up around it."""
    data = pickle.dumps(telemetry)
    lensfast.testing.reset_telemetry()
    return pickle.loads(data)


def resource() -> dict[str, Any]:
    return dict(trace.get_tracer_provider().resource.attributes)  # type: ignore[attr-defined]


def span_named(exported: InMemorySpanExporter, name: str) -> Any:
    trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]
    (span,) = [span for span in exported.get_finished_spans() if span.name == name]
    return span


def test_a_worker_repeats_the_set_up(
    lensfast: ModuleType, workers: ModuleType, exported: InMemorySpanExporter, in_context: Any
) -> None:
    class Groups(lensfast.SpanGroup):  # type: ignore[misc]  # in a function: pickle can't find it
        LOADING = "loading"
        ALL_GROUPS = lensfast.SpanGroup.ALL_GROUPS | {"loading"}

    lensfast.register_export_strategy("mine", lambda *_: True)  # nothing registers it in the worker
    config = lensfast.NemoLensConfig(
        enabled=True, export_strategy="mine", span_groups="loading", service_name="trainer", _span_group_cls=Groups
    )
    set_up(lensfast, config, 3, 8, resource_attributes={"team": "a", "service.instance.id": "mine", "odd": object()})
    lensfast.set_enabled_span_groups({"loading", "switched on later"})
    telemetry = as_in_a_new_process(lensfast, workers.WorkerTelemetry(config))
    assert not lensfast.is_span_group_enabled("loading")
    in_context(telemetry, 5)

    assert lensfast.enabled_span_groups() == {"loading", "switched on later"}
    found = resource()
    assert (found["dl.rank"], found["dl.world_size"], found[WORKER_ID]) == (3, 8, 5)
    assert (found["service.name"], found["nemo.run.id"], found["team"]) == ("trainer", config.run_id, "a")
    assert found["service.instance.id"] != "mine"
    assert metrics_internal._METER_PROVIDER is None  # a worker that is forked delivers none, either
    with lensfast.managed_span("loading", "load"):
        pass
    assert span_named(exported, "load").parent is None


def test_a_config_of_its_own(lensfast: ModuleType, workers: ModuleType, exported: Any, in_context: Any) -> None:
    """For a parent whose exporter is an object: the config says where workers send to; the run is the same."""
    set_up(lensfast, lensfast.NemoLensConfig(enabled=True, run_id="r"), 0, 1)
    config = lensfast.NemoLensConfig(enabled=True, service_name="loader", span_groups="no such group")
    in_context(as_in_a_new_process(lensfast, workers.WorkerTelemetry(config)), 0)
    assert (resource()["service.name"], resource()["nemo.run.id"]) == ("loader", "r")
    assert lensfast.is_span_group_enabled("job")


def test_workers_of_the_nightly_generation(
    lensfast: ModuleType, workers: ModuleType, exported: Any, in_context: Any
) -> None:
    config = lensfast.NemoLensConfig(enabled=True, span_groups="", run_id="r")
    set_up(lensfast, config, resource_attributes={"nv.dl.rank": 3, "nv.dl.world_size": 8})
    in_context(as_in_a_new_process(lensfast, workers.WorkerTelemetry(config)), 1)
    found = resource()
    assert (found["nv.dl.rank"], found["nv.dl.world_size"], found[WORKER_ID]) == (3, 8, 1)
    assert "dl.rank" not in found


def test_workers_of_a_rank_that_does_not_export(
    lensfast: ModuleType, workers: ModuleType, exported: Any, in_context: Any
) -> None:
    config = lensfast.NemoLensConfig(enabled=True)
    assert not set_up(lensfast, config, 0, 2).is_exporting
    called = []
    telemetry = workers.WorkerTelemetry(config, then=called.append)
    telemetry._then = None  # a list's method is not picklable
    worker = as_in_a_new_process(lensfast, telemetry)
    worker._then = called.append
    in_context(worker, 1)
    assert called == [1]
    assert lensfast.enabled_span_groups() == frozenset()
    assert trace._TRACER_PROVIDER is None


@pytest.mark.parametrize("pickled", [True, False])
def test_a_parent_without_telemetry(
    lensfast: ModuleType, workers: ModuleType, exported: Any, in_context: Any, monkeypatch: Any, pickled: bool
) -> None:
    """Its workers, forked or not, go by the config and the environment."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = lensfast.NemoLensConfig(enabled=True, span_groups="step")
    telemetry = workers.WorkerTelemetry(config)
    if pickled:  # twice: a launcher may start the process that starts the workers
        telemetry = as_in_a_new_process(lensfast, as_in_a_new_process(lensfast, telemetry))
    in_context(telemetry, 4)
    assert lensfast.enabled_span_groups() == {"step"}
    found = resource()
    assert (found["dl.rank"], found["dl.world_size"], found[WORKER_ID]) == (1, 2, 4)
    assert found["nemo.run.id"] == config.run_id  # the same in each


def test_a_set_up_in_between_counts(lensfast: ModuleType, workers: ModuleType, exported: Any, in_context: Any) -> None:
    """A launcher hands the loader to a process that sets telemetry up and starts the workers."""
    config = lensfast.NemoLensConfig(enabled=True)
    telemetry = as_in_a_new_process(lensfast, workers.WorkerTelemetry(config))
    set_up(lensfast, lensfast.NemoLensConfig(enabled=True, run_id="r"), 7, 8)
    in_context(as_in_a_new_process(lensfast, telemetry), 0)
    assert (resource()["dl.rank"], resource()["nemo.run.id"]) == (7, "r")


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize(
    ("parent", "made_in", "expected"),
    [("here", "train", "train"), ("here", None, "epoch"), ("iterator", "train", "epoch"), ("iterator", None, "epoch")],
)
def test_the_span_that_workers_belong_to(
    lensfast: ModuleType, workers: ModuleType, exported: Any, in_context: Any, parent: str, made_in: str | None,
    expected: str, forked: bool,
) -> None:  # fmt: skip
    config = lensfast.NemoLensConfig(enabled=True, span_groups="job,step", run_id="r")
    lensfast.setup_telemetry(
        config, span_exporter=exported if forked else InMemorySpanExporter(), metric_reader=InMemoryMetricReader()
    )
    ids = {}

    def work(worker: Any) -> None:
        worker(2)
        with lensfast.managed_span("step", "load"):
            pass

    with lensfast.managed_span("job", "train") as train:
        ids["train"] = train.get_span_context()
        if made_in:
            telemetry = workers.WorkerTelemetry(config, parent=parent)
    if not made_in:
        telemetry = workers.WorkerTelemetry(config, parent=parent)
    with lensfast.managed_span("job", "epoch") as epoch:
        ids["epoch"] = epoch.get_span_context()
        worker = telemetry if forked else pickle.loads(pickle.dumps(telemetry))
        if forked:  # all that is here, in a context that is a copy
            in_context = contextvars.copy_context().run
            in_context(work, worker)
    if not forked:
        lensfast.testing.reset_telemetry()
        in_context(work, worker)
    load = span_named(exported, "load")
    assert (load.parent.trace_id, load.parent.span_id) == (ids[expected].trace_id, ids[expected].span_id)
    assert load.attributes.get(WORKER_ID) == (2 if forked else None)
    assert load.resource.attributes.get(WORKER_ID) == (None if forked else 2)


def test_telemetry_that_fails_does_not_keep_a_worker_from_working(
    lensfast: ModuleType, workers: ModuleType, in_context: Any, caplog: Any, monkeypatch: Any
) -> None:
    called = []
    config = lensfast.NemoLensConfig(enabled=True, exporter="no such exporter")
    in_context(workers.WorkerTelemetry(config, then=called.append), 3)
    assert called == [3]
    (warning,) = warnings_in(caplog)
    assert "DataLoader worker 3" in warning
    assert "Unknown exporter type 'no such exporter'" in caplog.text


def test_telemetry_that_fails_does_not_keep_a_worker_from_starting(
    lensfast: ModuleType, workers: ModuleType, in_context: Any, caplog: Any
) -> None:
    config = lensfast.NemoLensConfig(enabled=True)
    set_up(lensfast, config, 0, 1)
    telemetry = workers.WorkerTelemetry(config)
    config.export_sample_rate = 7.0
    worker = as_in_a_new_process(lensfast, telemetry)
    assert "export_sample_rate must be from 0.0 to 1.0" in caplog.text
    in_context(worker, 0)
    assert trace._TRACER_PROVIDER is None


def test_errors_of_the_programs_own_function_come_through(
    lensfast: ModuleType, workers: ModuleType, exported: Any, in_context: Any
) -> None:
    def then(worker_id: int) -> None:
        raise KeyError(worker_id)

    with pytest.raises(KeyError):
        in_context(workers.WorkerTelemetry(lensfast.NemoLensConfig(), then), 1)


@pytest.mark.parametrize("set_up_here", [True, False])
def test_telemetry_that_is_off(
    lensfast: ModuleType, workers: ModuleType, in_context: Any, caplog: Any, set_up_here: bool
) -> None:
    config = lensfast.NemoLensConfig(enabled=False, span_groups="no such group")
    if set_up_here:
        lensfast.setup_telemetry(config)
    in_context(as_in_a_new_process(lensfast, workers.WorkerTelemetry(config)), 0)
    assert trace._TRACER_PROVIDER is None
    assert warnings_in(caplog) == []


def test_wrong_arguments(lensfast: ModuleType, workers: ModuleType) -> None:
    config = lensfast.NemoLensConfig()
    with pytest.raises(TypeError, match="takes a NemoLensConfig, not function"):
        workers.WorkerTelemetry(lambda worker_id: None)
    with pytest.raises(TypeError, match=r"NemoLensConfig\.span_groups must be a str"):
        workers.WorkerTelemetry(lensfast.NemoLensConfig(enabled=True, span_groups=3))
    with pytest.raises(TypeError, match="'seed_worker' can't be"):
        workers.WorkerTelemetry(config, "seed_worker")
    with pytest.raises(ValueError, match="must be 'here' or 'iterator', not 'there'"):
        workers.WorkerTelemetry(config, parent="there")
