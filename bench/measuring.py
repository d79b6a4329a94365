"""How a site is timed beside its reference, and what is kept of it for table.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import sites

ROUNDS = int(os.environ.get("LENSFAST_BENCH_ROUNDS", "200"))


def passes(run: sites.Loop) -> int:
    """How many passes take about 2 ms: enough that what the caches lost to the other loops does not count."""
    times = 100
    while times * sites.nanoseconds(run, times) < 2e6:
        times *= 2
    return times


def measure(
    benchmark: Any,
    site: sites.Loop,
    reference: sites.Loop,
    empty: sites.Loop,
    times: int | None = None,
    rounds: int = ROUNDS,
    ready: Callable[[str], object] = lambda which: None,
    site_times: int | None = None,
) -> dict[str, float]:
    """ns per pass of the site and of the reference, both without the empty loop; best of many, interleaved.

    `ready` is called before each of the three is timed, with its name: "site", "reference" or "empty".
    """
    references: list[float] = []
    empties: list[float] = []
    gc.collect()
    gc.disable()  # --benchmark-disable-gc is for the site alone
    try:
        ready("reference")
        reference_times = times or passes(reference)
        ready("empty")
        empty_times = times or passes(empty)
        ready("site")
        site_times = site_times or times or passes(site)

        def beside_then_args() -> tuple[tuple[int], dict[str, Any]]:
            ready("reference")
            references.append(sites.nanoseconds(reference, reference_times))
            ready("empty")
            empties.append(sites.nanoseconds(empty, empty_times))
            ready("site")
            return (site_times,), {}

        benchmark.pedantic(site, setup=beside_then_args, rounds=rounds)
    finally:
        gc.enable()
    own = benchmark.stats.stats.min * 1e9 / site_times
    return {"site": own - min(empties), "reference": min(references) - min(empties)}


def record(
    benchmark: Any,
    row: str,
    backend: str,
    measured: dict[str, float],
    at_least: float | None = None,
    unit: str = "ns",
) -> None:
    """`at_least` is the target of reference / site."""
    ratio = measured["reference"] / measured["site"]
    benchmark.extra_info.update(row=row, backend=backend, unit=unit, ratio=ratio, at_least=at_least, **measured)
