"""Instructions per site, counted by callgrind, against a committed baseline.

Disabled sites: a loop of N and one of 2N passes run in a process each, and their difference is N passes, without
start-up. Enabled sites, which make native spans and encode them: one process for all, in which callgrind counts the
loops alone. The empty loop, counted the same way, is subtracted. Unlike time, the result is the same in every run.

Usage: python bench/instructions.py [--update] [--tolerance FRACTION]

The baseline (instructions.json) holds a table per interpreter build, since most of the instructions are the
interpreter's. An interpreter without one is reported, and is not an error. Needs valgrind and setarch, and a C compiler
for the enabled sites.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sites

BASELINE = Path(__file__).with_name("instructions.json")
LOOP = Path(__file__).with_name("counted_loop.py")
SPANS = Path(__file__).with_name("counted_spans.py")
PASSES = 5_000
SPAN_PASSES = 900  # a batch of spans is 2,048, and sites may make two of them
BACKENDS = ("c", "python")


def callgrind(directory: str, *arguments: str) -> str:
    """What callgrind says; its files are called `out`."""
    result = subprocess.run(
        [
            *("setarch", platform.machine(), "-R"),
            *("valgrind", "--tool=callgrind", f"--callgrind-out-file={directory}/out"),
            *arguments,
        ],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(LOOP.parent.parent),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise SystemExit(f"callgrind failed on {' '.join(arguments)}:\n{result.stdout}{result.stderr}")
    return result.stderr


def count(backend: str, site: str, passes: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        said = callgrind(directory, sys.executable, "-S", str(LOOP), backend, site, str(passes))
    collected = re.search(r"Collected : (\d+)", said)
    if collected is None:
        raise SystemExit(f"callgrind counted nothing on {backend} {site}:\n{said}")
    return int(collected[1])


def per_pass(backend: str, site: str) -> float:
    return (count(backend, site, 2 * PASSES) - count(backend, site, PASSES)) / PASSES


def disabled(backend: str) -> dict[str, float]:
    empty = per_pass(backend, "empty")
    call = per_pass(backend, "plain call")
    return {site: per_pass(backend, site) - (call if site == "trace_fn" else empty) for site in sites.DISABLED}


def enabled() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        callgrind(directory, "--instr-atstart=no", sys.executable, str(SPANS), str(SPAN_PASSES))
        dumps = [file.read_text() for file in Path(directory).iterdir()]
    counts = {}
    for dump in dumps:
        site = re.search(r"^desc: Trigger: Client Request: (.+)$", dump, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", dump, re.MULTILINE)
        if site is not None and total is not None:
            counts[site[1]] = int(total[1]) / SPAN_PASSES
    empty = counts.pop("empty")
    return {f"enabled, {site}": counts[site] - empty for site in sites.NATIVE if site != "empty"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the baseline of this interpreter")
    parser.add_argument("--tolerance", type=float, default=0.03, help="fraction by which a count may grow")
    arguments = parser.parse_args()
    if not shutil.which("valgrind") or not shutil.which("setarch"):
        print("instructions are not counted: valgrind or setarch is not installed")
        return 0

    build = f"CPython {platform.python_version()} {platform.python_compiler()} {platform.machine()}"
    baselines = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    known = baselines.get(build, {})
    counted: dict[str, int] = {}
    grown = False
    print(build)
    for backend in BACKENDS:
        found = disabled(backend)
        if backend == "c":
            found.update(enabled())
        for site, instructions in found.items():
            name = f"{backend}: {site}"
            counted[name] = round(instructions)
            was = known.get(name)
            # A few instructions are below what two runs can tell apart.
            too_many = was is not None and counted[name] > was * (1 + arguments.tolerance) + 2
            grown |= too_many
            baseline = "" if was is None else f"  baseline {was}"
            print(f"  {name:32}{counted[name]:6}{baseline}{'  GROWN' if too_many else ''}")
    if arguments.update:
        baselines[build] = counted
        BASELINE.write_text(json.dumps(baselines, indent=1, sort_keys=True) + "\n")
    elif not known:
        print("  no baseline for this interpreter: nothing to compare with (write one with --update)")
    return 1 if grown and not arguments.update else 0


if __name__ == "__main__":
    sys.exit(main())
