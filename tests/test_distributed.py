"""Trace context across ranks, and spans that link to other ranks' spans, on both backends."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_receiver import free_port

from conftest import BACKENDS, clean_environment, load_backend

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
CARRIER = {"traceparent": f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# create_linked_span


def linked_span(lensfast: ModuleType, exporter: InMemorySpanExporter, **options: Any) -> Any:
    """The exported span that create_linked_span makes under a current span `step`."""
    tracer = trace.get_tracer("pipeline")
    with tracer.start_as_current_span("step") as step:
        span = lensfast.distributed.create_linked_span(tracer, "recv.linked", **options)
        assert trace.get_current_span() is step
        assert span.is_recording()
        span.end()
    finished = exporter.get_finished_spans()[0]
    assert finished.name == "recv.linked"
    assert finished.parent == step.get_span_context()
    return finished


def linked_ids(span: Any) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def test_a_linked_span_is_a_local_child_with_a_link(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    span = linked_span(
        lensfast, exporter, remote_carrier=CARRIER, **{"dl.microbatch_id": 3, "token": "t", "unusable": {}}
    )
    assert linked_ids(span) == [(TRACE_ID, SPAN_ID)]
    assert span.context.trace_id != TRACE_ID
    assert dict(span.attributes) == {"dl.microbatch_id": 3, "token": "[REDACTED]"}


def test_a_remote_context_wins_over_a_carrier(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    other = lensfast.propagation.extract_context({"traceparent": f"00-{5:032x}-{6:016x}-01"})
    span = linked_span(lensfast, exporter, remote_context=other, remote_carrier=CARRIER)
    assert linked_ids(span) == [(5, 6)]


@pytest.mark.parametrize("carrier", [None, {}, {"traceparent": "rubbish"}, {"traceparent": 5}])
def test_without_a_valid_remote_span_there_is_no_link(
    lensfast: ModuleType, exporter: InMemorySpanExporter, carrier: Any
) -> None:
    assert linked_span(lensfast, exporter, remote_carrier=carrier).links == ()


def test_a_linked_span_without_a_provider_records_nothing(lensfast: ModuleType) -> None:
    span = lensfast.distributed.create_linked_span(trace.get_tracer("pipeline"), "recv.linked", remote_carrier=CARRIER)
    assert not span.is_recording()
    span.end()


def test_a_broken_tracer_does_not_reach_the_program(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    def start_span(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no spans today")

    span = lensfast.distributed.create_linked_span(SimpleNamespace(start_span=start_span), "recv.linked")
    span.set_attribute("key", "value")
    span.end()
    assert not span.is_recording()
    assert len(warnings_in(caplog)) == 1


# broadcast_trace_context, with a stand-in for torch


@dataclass
class FakeTensor:
    values: list[int]
    dtype: str
    device: str

    def item(self) -> int:
        (value,) = self.values
        return value

    def tolist(self) -> list[int]:
        return self.values


@dataclass
class FakeTorch:
    """A process group that delivers `sent`, the broadcasts of a source that is somewhere else."""

    rank: int
    backends: str = "cpu:gloo,cuda:gloo"
    sent: list[list[int]] = field(default_factory=list)
    seen: list[FakeTensor] = field(default_factory=list)
    int64: str = "int64"
    uint8: str = "uint8"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", self)
        monkeypatch.setitem(sys.modules, "torch.distributed", self)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_rank(self) -> int:
        return self.rank

    def get_backend_config(self) -> str:
        return self.backends

    def tensor(self, values: list[int], dtype: str, device: str) -> FakeTensor:
        return FakeTensor(values, dtype, device)

    def zeros(self, size: int, dtype: str, device: str) -> FakeTensor:
        return FakeTensor([0] * size, dtype, device)

    def broadcast(self, tensor: FakeTensor, src: int) -> None:
        if self.rank != src:
            received = self.sent.pop(0)
            assert len(received) == len(tensor.values)
            tensor.values = received
        self.seen.append(tensor)


def as_sent(data: bytes) -> list[list[int]]:
    return [[len(data)], list(data)]


def test_without_a_process_group_there_is_nothing_to_broadcast(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert lensfast.distributed.broadcast_trace_context(0) is None
    for missing in ("is_available", "is_initialized"):
        fake = FakeTorch(rank=0)
        setattr(fake, missing, lambda: False)
        fake.install(monkeypatch)
        assert lensfast.distributed.broadcast_trace_context(0) is None
        assert fake.seen == []


def test_the_source_broadcasts_length_and_json(
    lensfast: ModuleType, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTorch(rank=1)
    fake.install(monkeypatch)
    with trace.get_tracer("test").start_as_current_span("work") as span:
        carrier = lensfast.distributed.broadcast_trace_context(1, src_rank=1)
    length, content = fake.seen
    assert (length.dtype, content.dtype) == ("int64", "uint8")
    assert length.values == [len(content.values)]
    assert json.loads(bytes(content.values)) == carrier
    assert int(carrier["traceparent"].split("-")[2], 16) == span.get_span_context().span_id


def test_another_rank_returns_what_the_source_sent(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTorch(rank=1, sent=as_sent(json.dumps(CARRIER).encode())).install(monkeypatch)
    assert lensfast.distributed.broadcast_trace_context(1) == CARRIER


@pytest.mark.parametrize("data", [b"not json", b"\xff", b"[1]", b""])
def test_what_can_not_be_decoded_counts_as_empty(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    FakeTorch(rank=1, sent=as_sent(data)).install(monkeypatch)
    assert lensfast.distributed.broadcast_trace_context(1) == {}
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),  # gloo where there is a GPU
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("xpu:xccl", "xpu"),
    ],
)
def test_tensors_are_where_the_backend_takes_them(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, backends: str, device: str
) -> None:
    for fake in (FakeTorch(0, backends), FakeTorch(1, backends, as_sent(b"{}"))):
        fake.install(monkeypatch)
        assert lensfast.distributed.broadcast_trace_context(fake.rank) == {}
        assert [tensor.device for tensor in fake.seen] == [device, device]


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda"), ("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_torch_words_its_backends_like_the_stand_in(lensfast: ModuleType, backend: str, device: str) -> None:
    """What init_process_group(backend) makes of it, also where NCCL can't run."""
    c10d = pytest.importorskip("torch.distributed.distributed_c10d", reason="torch is not installed")
    worded = str(c10d.BackendConfig(c10d.Backend(backend)))
    group = SimpleNamespace(get_backend_config=lambda: worded)
    assert lensfast.distributed._collective_device(group) == device


def test_the_groups_rank_decides_who_sends(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A local rank given in place of the rank must not make two ranks send messages of their own length."""
    FakeTorch(rank=8, sent=as_sent(json.dumps(CARRIER).encode())).install(monkeypatch)
    assert lensfast.distributed.broadcast_trace_context(0, src_rank=0) == CARRIER
    assert len(warnings_in(caplog)) == 1
    assert "this is rank 8" in caplog.text


def test_errors_of_the_collective_come_through(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorch(rank=1)
    fake.install(monkeypatch)

    def broadcast(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the connection was closed by the peer")

    fake.broadcast = broadcast  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="closed by the peer"):
        lensfast.distributed.broadcast_trace_context(1)


# broadcast_trace_context, in two processes over gloo


@dataclass
class Job:
    results: list[dict[str, Any]]
    spans: list[dict[str, dict[str, Any]]]
    errors: list[str]


def run_two_ranks(backend: str, strategy: str, folder: Path, torchrun: bool = False) -> Job:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    load_backend(backend)  # skips where it can't be had
    port = str(free_port())
    environment = clean_environment(backend, OMP_NUM_THREADS="1")
    script = [str(Path(__file__).with_name("two_ranks.py")), strategy, str(folder)]
    if torchrun:
        options = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        commands = [[sys.executable, "-m", "torch.distributed.run", *options, *script]]
    else:
        commands = [[sys.executable, *script, str(rank), port] for rank in range(2)]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    spans = []
    for rank in range(2):
        path = folder / f"spans.{rank}.json"
        lines = path.read_text().splitlines() if path.exists() else []
        spans.append({span["name"]: span for span in map(json.loads, lines)})
    results = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(2)]
    return Job(results, spans, errors)


def hex_ids(span: dict[str, Any]) -> tuple[str, str]:
    return span["context"]["trace_id"].removeprefix("0x"), span["context"]["span_id"].removeprefix("0x")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("torchrun", [False, True], ids=["ranks given", "torchrun"])
def test_two_ranks_share_a_context_while_one_exports(backend: str, tmp_path: Path, torchrun: bool) -> None:
    job = run_two_ranks(backend, "single_rank", tmp_path, torchrun)
    assert [result["exporting"] for result in job.results] == [True, False]
    assert (tmp_path / "spans.0.json").exists()
    assert not (tmp_path / "spans.1.json").exists()
    pretrain = job.spans[0]["pretrain"]
    for result in job.results:
        assert tuple(result["first"]["traceparent"].split("-")[1:3]) == hex_ids(pretrain)
        assert result["no_span"] == result["from_rank_1"] == result["broken"] == {}
        assert result["after"] == result["first"]
    assert "".join(job.errors).count("RuntimeError: no injection") == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_that_seed_alike_have_ids_of_their_own_and_link(backend: str, tmp_path: Path) -> None:
    job = run_two_ranks(backend, "all_ranks", tmp_path)
    names = {"pretrain", "step", "recv.linked"}
    assert [set(spans) for spans in job.spans] == [names, names]
    assert len({hex_ids(span)[1] for spans in job.spans for span in spans.values()}) == 6
    assert len({hex_ids(span)[0] for spans in job.spans for span in spans.values()}) == 2
    for rank in range(2):
        linked, step = job.spans[rank]["recv.linked"], job.spans[rank]["step"]
        (link,) = linked["links"]
        assert hex_ids(link) == hex_ids(job.spans[0]["pretrain"])
        assert linked["parent_id"] == step["context"]["span_id"]
        assert linked["attributes"] == {"dl.pipeline_parallel.rank": rank}
        source = job.results[rank]["from_rank_1"]["traceparent"].split("-")[1:3]
        assert tuple(source) == hex_ids(job.spans[1]["pretrain"])
