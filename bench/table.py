"""Prints the ratios that pytest-benchmark recorded, with their targets; exit status 1 if one is missed.

Usage: python bench/table.py RESULTS.json ... [--slack FRACTION] [--markdown] [--json FILE]

Several results are of as many processes: where the loader puts code and data costs some sites 10 ns in some processes.
What --json has written is one result, too: `bench/table.py --markdown docs/benchmarks.json` is the README's table.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in order; of one that several processes timed, the best of the site and the best of the reference."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for benchmark in (benchmark for result in results for benchmark in result["benchmarks"]):
        if not (row := benchmark.get("extra_info")):
            continue
        earlier = best.setdefault((row["row"], row["backend"]), row)
        if earlier is not row:
            earlier.update({which: min(earlier[which], row[which]) for which in ("site", "reference")})
            earlier["ratio"] = earlier["reference"] / earlier["site"]
    return list(best.values())


MEASURED = ("lensfast", "nemo-lens", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows alone, as one result, with the machine and the versions of what is installed here."""
    machine = results[0]["machine_info"]
    installed = {dist.name: dist.version for dist in metadata.distributions() if dist.name in MEASURED}
    return {
        "machine_info": {
            "python_version": machine["python_version"],
            "processor": machine["processor"],
            "cpu": {"brand_raw": machine["cpu"].get("brand_raw", ""), "count": machine["cpu"].get("count")},
        },
        "versions": {name: installed[name] for name in MEASURED if name in installed},
        "processes": len(results),
        "benchmarks": [{"extra_info": row} for row in rows(results)],
    }


def markdown(results: list[dict[str, Any]]) -> str:
    """The table as the README has it."""
    lines = [[*HEADER[:-1]], ["---", "---", "---:", "---:", "---:", "---:"], *(cells(row) for row in rows(results))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def quantity(value: float, unit: str) -> str:
    if unit != "ns":
        return f"{value:,.0f} {unit}"
    for larger, size in (("ms", 1e6), ("us", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {larger}"
    return f"{value:.1f} ns"


def target(row: dict[str, Any]) -> str:
    return row.get("target") or (f">= {row['at_least']:.2f}" if row["at_least"] else "")


def verdict(row: dict[str, Any], slack: float) -> str:
    if "met" not in row and not row["at_least"]:
        return ""
    met = row["met"] if "met" in row else row["ratio"] >= row["at_least"] * (1 - slack)
    return "ok" if met else "MISSED"


HEADER = ["call site", "backend", "lensfast", "reference", "ratio", "target", ""]


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, without the verdict."""
    return [
        row["row"],
        row["backend"],
        quantity(row["site"], row["unit"]),
        quantity(row["reference"], row["unit"]),
        f"{row['ratio']:.2f}" if "ratio" in row else "",
        target(row),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--slack", type=float, default=0.0, help="fraction of a target that noise may take away")
    parser.add_argument("--markdown", action="store_true", help="the table as the README has it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, for the plots and the README")
    arguments = parser.parse_args()
    results = [json.loads(file.read_text()) for file in arguments.results]
    if arguments.json:
        arguments.json.write_text(json.dumps(merged(results), indent=1) + "\n")
    verdicts = [verdict(row, arguments.slack) for row in rows(results)]
    if arguments.markdown:
        print(markdown(results))
    else:
        machine = results[0]["machine_info"]
        print(f"CPython {machine['python_version']}, {machine['cpu'].get('brand_raw', machine['processor'])}")
        print("ratio = reference / site; best of many rounds, interleaved in one process, loop subtracted; disabled")
        print(f"sites: best of {results[0].get('processes', len(results))} processes\n")
        table = [HEADER, ["-" * len(title) for title in HEADER]]
        table += [[*cells(row), word] for row, word in zip(rows(results), verdicts, strict=True)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        for line in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 1 if "MISSED" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
