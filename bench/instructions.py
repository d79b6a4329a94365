"""Instructions per disabled site, counted by callgrind, against a committed baseline.

A loop of N and one of 2N passes run in a process each: their difference is N passes, without start-up. The empty
loop, counted the same way, is subtracted. Unlike time, the result is the same in every run.

Usage: python bench/instructions.py [--update] [--tolerance FRACTION]

The baseline (instructions.json) holds a table per interpreter build, since most of the instructions are the
interpreter's. An interpreter without one is reported, and is not an error. Needs valgrind and setarch.
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
PASSES = 5_000
BACKENDS = ("c", "python")


def count(backend: str, site: str, passes: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        result = subprocess.run(
            [
                *("setarch", platform.machine(), "-R"),
                *("valgrind", "--tool=callgrind", f"--callgrind-out-file={directory}/out"),
                *(sys.executable, "-S", str(LOOP), backend, site, str(passes)),
            ],
            env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    collected = re.search(r"Collected : (\d+)", result.stderr)
    if result.returncode or collected is None:
        raise SystemExit(f"callgrind failed on {backend} {site}:\n{result.stderr}")
    return int(collected[1])


def per_pass(backend: str, site: str) -> float:
    return (count(backend, site, 2 * PASSES) - count(backend, site, PASSES)) / PASSES


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
        empty = per_pass(backend, "empty")
        call = per_pass(backend, "plain call")
        for site in sites.DISABLED:
            name = f"{backend}: {site}"
            counted[name] = round(per_pass(backend, site) - (call if site == "trace_fn" else empty))
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
