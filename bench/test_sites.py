"""Ratios of disabled sites, and of enabled ones that make the SDK's spans, each beside its reference in one process.

pytest-benchmark times the site; in the set-up of each round the reference, and the loop without a site, are timed as
well. All three are best-of-many, and the loop is subtracted. bench/table.py prints what this records.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import measuring
import pytest
import sites
from measuring import ROUNDS, measure
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from conftest import BACKENDS, load_backend

NO_SLOWER = 0.9  # the same bytecode in both: the ratio is 1 but for noise, which reached a tenth in single runs
WITH_NOOP = "with on the no-op object, over with on the floor object"
MANY_GROUPS = "eight managed_span sites with 1,000 groups, over the same with 8"
HANDLE = "if handle, over is_span_group_enabled of nemo-lens"
ENABLED_OVER = "enabled, spans of the SDK, two attributes, over "

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


def record(benchmark: Any, row: str, backend: str, measured: dict[str, float]) -> None:
    measuring.record(benchmark, row, backend, measured, TARGETS.get(row, {}).get(backend))


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


def gate_copy(backend: str, directory: Path) -> ModuleType:
    """A gate of its own, with its own table: that of the process only grows."""
    gate = load_backend(backend)["lensfast._backend"].gate
    file = shutil.copy(gate.__file__, directory)
    spec = importlib.util.spec_from_file_location(gate.__name__, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_groups(benchmark: Any, backend: str, tmp_path: Path) -> None:
    """The gate alone, which registering fills. Eight sites, so that no one name's hash decides."""
    package = load_backend(backend)["lensfast"]
    loops = {}
    for groups in (8, 1000):
        directory = tmp_path / str(groups)
        directory.mkdir()
        gate = gate_copy(backend, directory)
        handles = [gate.span_group(f"group_{i}") for i in range(groups)]
        gate.publish(frozenset(handle.name for handle in handles[9::2]))

        def managed_span(group: str, name: str, tracer: Any = None, gate: Any = gate, **attributes: Any) -> Any:
            return package.managed_span(group, name) if gate.is_span_group_enabled(group) else gate.NOOP

        statements = [f"with managed_span('group_{i}', 'megatron.layer.mlp'): pass" for i in range(8)]
        namespace = {"managed_span": gate.install(managed_span, managed_span)}
        loops[groups] = sites.loop("\n        ".join(statements), namespace)
    measured = measure(benchmark, loops[1000], loops[8], sites.loop("pass", {}))
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
        reference = sites.loop(sites.ENABLED, sites.names(nemo_lens))
    else:
        reference = sites.loop(sites.SDK_ENABLED, {"tracer": trace.get_tracer("bench")})
    measured = measure(
        benchmark,
        sites.loop(sites.ENABLED, sites.names(package)),
        reference,
        sites.loop("pass", {}),
        times=400,
        rounds=ROUNDS // 2,
        ready=lambda which: provider.force_flush(),  # so that no export runs while a span is timed
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
