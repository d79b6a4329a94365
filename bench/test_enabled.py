"""Native spans, each measured beside those of nemo-lens and of the SDK in one process, as test_sites.py does it.

The exporters are the stock OTLP/HTTP ones, and their receiver is another process. The time is that of the application's
thread: queues are emptied between rounds, so what the SDK encodes in its own thread is in the row of CPU alone, while a
native span's time includes its encoding. Memory, and what a burst loses, are found in a process each.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import process_time_ns
from types import ModuleType
from typing import Any

import enabled
import measuring
import pytest
import receiver
import sites
from measuring import ROUNDS, measure
from opentelemetry import trace

from conftest import load_backend, take_modules

ENCODED = "native span, encoded as OTLP"
BATCHED = "native span into a BatchSpanProcessor"
UNSAMPLED = "span that is not sampled"
SET_ATTRIBUTE = "set_attribute on a live span"
CPU = "CPU of all threads per span, OTLP/HTTP and work between spans"
MEMORY = "memory of a queued span"
BURST = "spans lost of a burst of 100,000, default settings"

TARGETS = {
    ENCODED: {"nemo-lens": 25, "opentelemetry-sdk": 15},
    BATCHED: {"nemo-lens": 12, "opentelemetry-sdk": 8},
    UNSAMPLED: {"nemo-lens": 6, "opentelemetry-sdk": 6},
    SET_ATTRIBUTE: {"opentelemetry-sdk": 8},
    CPU: {"nemo-lens": 8, "opentelemetry-sdk": 8},
    MEMORY: {"opentelemetry-sdk": 8},
}
AGAINST = ["nemo-lens", "opentelemetry-sdk"]
SPANS = 400  # less than a batch of the SDK's: its thread does not wake while a span is timed
NATIVE_SPANS = 1900  # likewise
BURST_SPANS = MEMORY_SPANS = 100_000


def record(benchmark: Any, row: str, against: str, measured: dict[str, float], unit: str = "ns") -> None:
    measuring.record(benchmark, f"{row}, over {against}", "c", measured, TARGETS.get(row, {}).get(against), unit)


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with receiver.started() as endpoint:
        yield endpoint


@pytest.fixture
def lensfast_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package on the C backend, as in a new process."""
    modules = load_backend("c")
    for name in list(os.environ):
        if name.startswith(("OTEL_", "NEMO_LENS_")):
            monkeypatch.delenv(name)
    before = take_modules("lensfast")
    sys.modules.update(modules)
    package = modules["lensfast"]
    package.testing.reset_telemetry()
    yield package
    package.testing.reset_telemetry()
    take_modules("lensfast")
    sys.modules.update(before)


@pytest.fixture
def nemo_lens(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    module = pytest.importorskip("nemo.lens", reason="nemo-lens is not installed (it needs Python 3.13)")
    module.set_enabled_span_groups(frozenset({"layer"}))
    return module


@dataclass
class Rivals:
    """The two providers. The one that is measured is the global one meanwhile, as managed_span asks for it."""

    native: Any
    sdk: Any

    def ready(self, which: str) -> None:
        """Nothing is queued, and the provider of the site or of the reference is global."""
        for provider in (self.native, self.sdk):
            provider.force_flush()
        trace._TRACER_PROVIDER = self.native if which == "site" else self.sdk


@pytest.fixture
def rivals(
    request: pytest.FixtureRequest, lensfast_c: ModuleType, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rivals]:
    """By the name in the test's parameter `row`."""
    row = getattr(request, "param", ENCODED)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    if row == UNSAMPLED:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    if row == BATCHED:
        native = enabled.native_provider_into(lensfast_c, enabled.roomy_batch_processor())
    else:
        native = enabled.native_provider(lensfast_c)
        assert type(enabled.native_processor()).__name__ == "EncodingSpanProcessor"
    rivals = Rivals(native, enabled.sdk_provider(enabled.roomy_batch_processor()))
    receiver.arrived(endpoint)
    yield rivals
    for provider in (rivals.native, rivals.sdk):
        provider.shutdown()
    trace._TRACER_PROVIDER = None


def reference(request: pytest.FixtureRequest, rivals: Rivals, against: str, work: str = "pass") -> sites.Loop:
    """The loop around the site of the other library."""
    if against == "nemo-lens":
        statement, namespace = sites.ENABLED, sites.names(request.getfixturevalue("nemo_lens"))
    else:
        statement, namespace = sites.SDK_ENABLED, {"tracer": rivals.sdk.get_tracer("bench")}
    return sites.loop(statement.replace("pass", work), {**namespace, "work": do_work})


def do_work() -> int:
    """What a program does between two spans: some 5 us of it."""
    return sum(range(300))


@pytest.mark.parametrize("against", AGAINST)
@pytest.mark.parametrize("rivals", [ENCODED, BATCHED, UNSAMPLED], indirect=True)
def test_span(
    benchmark: Any, request: pytest.FixtureRequest, lensfast_c: ModuleType, rivals: Rivals, against: str
) -> None:
    row = request.node.callspec.params["rivals"]
    measured = measure(
        benchmark,
        sites.loop(sites.ENABLED, sites.names(lensfast_c)),
        reference(request, rivals, against),
        sites.loop("pass", {}),
        times=SPANS,
        site_times=SPANS if row == BATCHED else NATIVE_SPANS,
        rounds=ROUNDS // 2,
        ready=rivals.ready,
    )
    record(benchmark, row, against, measured)


def test_start_as_current_span(benchmark: Any, lensfast_c: ModuleType, rivals: Rivals) -> None:
    """By the API: the context manager is the API's own, in Python."""
    loops = [
        sites.loop(sites.SDK_ENABLED, {"tracer": provider.get_tracer("bench")})
        for provider in (rivals.native, rivals.sdk)
    ]
    measured = measure(
        benchmark,
        *loops,
        sites.loop("pass", {}),
        times=SPANS,
        site_times=NATIVE_SPANS,
        rounds=ROUNDS // 2,
        ready=rivals.ready,
    )
    record(benchmark, "start_as_current_span, encoded as OTLP", "opentelemetry-sdk", measured)


def test_set_attribute(benchmark: Any, lensfast_c: ModuleType, rivals: Rivals) -> None:
    statement = "span.set_attribute('iteration', n); span.set_attribute('loss', 1.5)"
    spans = [provider.get_tracer("bench").start_span("live") for provider in (rivals.native, rivals.sdk)]
    measured = measure(
        benchmark,
        *(sites.loop(statement, {"span": span}) for span in spans),
        sites.loop("pass", {}),
    )
    for span in spans:
        span.end()
    record(benchmark, SET_ATTRIBUTE, "opentelemetry-sdk", {name: ns / 2 for name, ns in measured.items()})


@pytest.mark.parametrize("against", AGAINST)
def test_cpu(
    benchmark: Any,
    request: pytest.FixtureRequest,
    lensfast_c: ModuleType,
    rivals: Rivals,
    endpoint: str,
    against: str,
) -> None:
    """Of the whole process, from the first span to the answer to the last request, over that of the work alone."""
    loops = {
        "site": sites.loop(sites.ENABLED.replace("pass", "work()"), {**sites.names(lensfast_c), "work": do_work}),
        "reference": reference(request, rivals, against, "work()"),
        "empty": sites.loop("work()", {"work": do_work}),
    }
    spans, rounds = 8192, max(ROUNDS // 8, 5)

    def cpu_times() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {which: [] for which in loops}
        for _ in range(rounds):
            for which, run in loops.items():
                rivals.ready(which)
                gc.collect()
                before = process_time_ns()
                run(spans)
                for provider in (rivals.native, rivals.sdk):
                    provider.force_flush()
                found[which].append((process_time_ns() - before) / spans)
        return found

    found = benchmark.pedantic(cpu_times, rounds=1)
    best = {which: min(times) for which, times in found.items()}
    assert receiver.arrived(endpoint) == 2 * rounds * spans, "every span arrives"
    record(benchmark, CPU, against, {which: best[which] - best["empty"] for which in ("site", "reference")})


def in_own_processes(benchmark: Any, measured: Callable[[str], float]) -> dict[str, float]:
    return benchmark.pedantic(lambda: {"site": measured("native"), "reference": measured("sdk")}, rounds=1)


def test_memory(benchmark: Any, lensfast_c: ModuleType, endpoint: str) -> None:
    measured = in_own_processes(
        benchmark, lambda library: enabled.in_own_process("memory", library, MEMORY_SPANS, endpoint)
    )
    record(benchmark, MEMORY, "opentelemetry-sdk", measured, "B")


def test_burst(benchmark: Any, lensfast_c: ModuleType, endpoint: str) -> None:
    def lost(library: str) -> float:
        receiver.arrived(endpoint)
        enabled.in_own_process("burst", library, BURST_SPANS, endpoint)
        return BURST_SPANS - receiver.arrived(endpoint)

    measured = in_own_processes(benchmark, lost)
    benchmark.extra_info.update(
        row=f"{BURST}, and of opentelemetry-sdk",
        backend="c",
        unit="spans",
        target="0",
        met=measured["site"] == 0,
        **measured,
    )
