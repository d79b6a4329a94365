"""Ratios of disabled and enabled sites, each measured beside its reference in one process.

pytest-benchmark times the site; in the set-up of each round the reference, and the loop without a site, are timed as
well. All three are best-of-many, and the loop is subtracted. bench/table.py prints what this records.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import pytest
import sites
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from conftest import BACKENDS, load_backend

ROUNDS = int(os.environ.get("LENSFAST_BENCH_ROUNDS", "200"))
TIMES = 2000

NO_SLOWER = 0.95  # the same bytecode in both: the ratio is 1 but for noise
WITH_NOOP = "with on the no-op object, over with on the floor object"
MANY_GROUPS = "1,000 registered groups, over 8"
HANDLE = "if handle, over nemo-lens is_span_group_enabled"
ENABLED_OVER = "enabled, two attributes, over "

# The least ratio (reference / site) of each row, on the C and on the Python backend.
TARGETS = {
    "managed_span": {"c": 30, "python": 4},
    "two attributes": {"c": 28, "python": 4},
    "dict attribute": {"c": 8, "python": 3},
    "is_span_group_enabled": {"c": 2.5, "python": NO_SLOWER},
    "trace_fn": {"c": 9, "python": 2},
    HANDLE: {"c": 2},
    WITH_NOOP: {"c": 1 / 1.5},
    MANY_GROUPS: {"c": 1 / 1.1, "python": 1 / 1.1},
    ENABLED_OVER + "nemo-lens": {"c": 1.4, "python": 1.3},
}


@pytest.fixture(scope="session")
def nemo_lens() -> ModuleType:
    return pytest.importorskip("nemo.lens", reason="nemo-lens is not installed (it needs Python 3.13)")


def measure(
    benchmark: Any,
    site: sites.Loop,
    reference: sites.Loop,
    empty: sites.Loop,
    times: int = TIMES,
    rounds: int = ROUNDS,
    between: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """ns per pass of the site and of the reference, both without the empty loop; best of many, interleaved."""
    references: list[float] = []
    empties: list[float] = []
    for run in (site, reference, empty):
        run(times)

    def beside_then_args() -> tuple[tuple[int], dict[str, Any]]:
        between()
        references.append(sites.nanoseconds(reference, times))
        between()
        empties.append(sites.nanoseconds(empty, times))
        return (times,), {}

    benchmark.pedantic(site, setup=beside_then_args, rounds=rounds)
    own = benchmark.stats.stats.min * 1e9 / times if benchmark.stats else float("nan")
    return {"site_ns": own - min(empties), "reference_ns": min(references) - min(empties)}


def record(benchmark: Any, row: str, backend: str, measured: dict[str, float]) -> None:
    benchmark.extra_info.update(
        row=row,
        backend=backend,
        ratio=measured["reference_ns"] / measured["site_ns"],
        at_least=TARGETS.get(row, {}).get(backend),
        **measured,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "site", ["managed_span", "two attributes", "dict attribute", "is_span_group_enabled", "trace_fn"]
)
def test_disabled_site(benchmark: Any, nemo_lens: ModuleType, backend: str, site: str) -> None:
    package = load_backend(backend)["lensfast"]
    for library in (package, nemo_lens):
        library.set_enabled_span_groups(frozenset())
    measured = measure(
        benchmark,
        sites.loop(sites.DISABLED[site], sites.names(package)),
        sites.loop(sites.DISABLED[site], sites.names(nemo_lens)),
        sites.loop("plain(n)" if site == "trace_fn" else "pass", {"plain": sites.plain}),
    )
    record(benchmark, site, backend, measured)


@pytest.mark.parametrize("backend", ["c"])
def test_handle(benchmark: Any, nemo_lens: ModuleType, backend: str) -> None:
    package = load_backend(backend)["lensfast"]
    nemo_lens.set_enabled_span_groups(frozenset())
    measured = measure(
        benchmark,
        sites.loop(sites.DISABLED["if handle"], sites.names(package)),
        sites.loop(sites.DISABLED["is_span_group_enabled"], sites.names(nemo_lens)),
        sites.loop("pass", {}),
    )
    record(benchmark, HANDLE, backend, measured)


@pytest.fixture(scope="session")
def floor() -> Any:
    try:
        return sites.build_floor()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the floor object needs a C compiler: {error}")


@pytest.mark.parametrize("backend", ["c"])
@pytest.mark.parametrize(
    ("row", "statement"),
    [
        (WITH_NOOP, "with noop: pass"),
        ("managed_span, over with on the floor object", sites.DISABLED["managed_span"]),
    ],
    ids=["noop", "managed_span"],
)
def test_floor(benchmark: Any, floor: Any, backend: str, row: str, statement: str) -> None:
    package = load_backend(backend)["lensfast"]
    package.set_enabled_span_groups(frozenset())
    noop = package.managed_span("layer", "any")
    measured = measure(
        benchmark,
        sites.loop(statement, {"noop": noop, **sites.names(package)}),
        sites.loop("with floor: pass", {"floor": floor}),
        sites.loop("pass", {}),
    )
    record(benchmark, row, backend, measured)


def _registered(backend: str, groups: int, pipe: Any) -> None:
    package = load_backend(backend)["lensfast"]
    package.SpanRegistry.register("bench", ["layer", "microbatch", *(f"group_{i}" for i in range(groups - 2))])
    package.set_enabled_span_groups(frozenset(f"group_{i}" for i in range(0, groups - 2, 2)))
    run = sites.loop(sites.DISABLED["managed_span"], sites.names(package))
    empty = sites.loop("pass", {})
    run(TIMES), empty(TIMES)
    while pipe.recv():
        pipe.send((sites.nanoseconds(run, TIMES), sites.nanoseconds(empty, TIMES)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_groups(benchmark: Any, backend: str) -> None:
    """The group table only grows, so 8 and 1,000 groups need a process each; the two take turns."""
    load_backend(backend)
    context = get_context("spawn")
    pipes, workers = [], []
    for groups in (8, 1000):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_registered, args=(backend, groups, theirs), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    best = [(float("inf"), float("inf"))] * 2

    def turn() -> None:
        for i, pipe in enumerate(pipes):
            pipe.send(True)
            site, empty = pipe.recv()
            best[i] = (min(best[i][0], site), min(best[i][1], empty))

    benchmark.pedantic(turn, rounds=ROUNDS)
    for pipe in pipes:
        pipe.send(False)
    for worker in workers:
        worker.join()
    (few, few_empty), (many, many_empty) = best
    measured = {"site_ns": many - many_empty, "reference_ns": few - few_empty}
    record(benchmark, MANY_GROUPS, backend, measured)


class NullExporter(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


@pytest.fixture(scope="session")
def provider() -> TracerProvider:
    """A batch processor into nothing, global for all three libraries."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(NullExporter(), max_queue_size=1 << 16, schedule_delay_millis=1e6))
    trace.set_tracer_provider(provider)
    return provider


ENABLED = "with managed_span('layer', 'megatron.layer.mlp', iteration=n, loss=1.5): pass"
SDK_ENABLED = "with tracer.start_as_current_span('megatron.layer.mlp', attributes={'iteration': n, 'loss': 1.5}): pass"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("against", ["nemo-lens", "opentelemetry-sdk"])
def test_enabled_site(
    benchmark: Any, request: pytest.FixtureRequest, provider: TracerProvider, backend: str, against: str
) -> None:
    package = load_backend(backend)["lensfast"]
    package.set_enabled_span_groups(frozenset({"layer"}))
    if against == "nemo-lens":
        nemo_lens = request.getfixturevalue("nemo_lens")
        nemo_lens.set_enabled_span_groups(frozenset({"layer"}))
        reference = sites.loop(ENABLED, sites.names(nemo_lens))
    else:
        reference = sites.loop(SDK_ENABLED, {"tracer": trace.get_tracer("bench")})
    measured = measure(
        benchmark,
        sites.loop(ENABLED, sites.names(package)),
        reference,
        sites.loop("pass", {}),
        times=400,
        rounds=ROUNDS // 2,
        between=provider.force_flush,  # so that no export runs while a span is timed
    )
    record(benchmark, ENABLED_OVER + against, backend, measured)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_step(benchmark: Any, nemo_lens: ModuleType, backend: str) -> None:
    """ms per step spent in disabled sites: 96 layers, 64 microbatches."""
    package = load_backend(backend)["lensfast"]
    for library in (package, nemo_lens):
        library.set_enabled_span_groups(frozenset())
    measured = measure(
        benchmark,
        sites.step(sites.STEP_SITES, sites.names(package)),
        sites.step(sites.STEP_SITES, sites.names(nemo_lens)),
        sites.step(sites.BARE_STEP_SITES, sites.names(package)),
        times=1,
        rounds=ROUNDS // 4,
    )
    record(benchmark, "one training step, 96 layers, 64 microbatches", backend, measured)
