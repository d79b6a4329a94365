"""What `import lensfast` adds to `import opentelemetry.trace`, and its size; exit status 1 if a target is missed.

Usage: python bench/startup.py [--rounds N] [--slack FRACTION] [--wheel FILE] [--markdown]

Measures an installed copy: the wheel, by default one built from this tree, in a virtual environment of its own. Each
import is a fresh process; the programs take turns, and the best of the rounds counts, since noise only adds. Nothing
else should be running.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"c": "0", "python": "1"}
AT_MOST = 1.30  # of what `import opentelemetry.trace` takes
WHEEL_KILOBYTES_BELOW = 300
NOTHING, API, LENSFAST = "pass", "import opentelemetry.trace", "import lensfast"


class Installed:
    """An environment with the wheel in it, on one backend."""

    def __init__(self, python: Path, backend: str) -> None:
        self._python = str(python)
        self._environment = {**os.environ, "LENSFAST_PURE_PYTHON": BACKENDS[backend]}

    def run(self, code: str, *options: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [*before, self._python, "-I", *options, "-c", code]
        return subprocess.run(command, env=self._environment, cwd="/", capture_output=True, text=True, check=True)

    def milliseconds(self, code: str) -> tuple[float, float]:
        """Of a whole process: the time that passes, and the CPU's."""
        passed, used = time.perf_counter(), children_cpu()
        self.run(code)
        return (time.perf_counter() - passed) * 1e3, (children_cpu() - used) * 1e3

    def import_times(self) -> tuple[float, float]:
        """Milliseconds of -X importtime: of the API with all that it imports, and of what lensfast then adds."""
        both = self._own_times(f"{API}; {LENSFAST}")
        empty = self._own_times(NOTHING)
        mine = {name: own for name, own in both.items() if name not in empty}
        names = list(mine)
        last = names.index("opentelemetry.trace") + 1
        return sum(mine[name] for name in names[:last]) / 1e3, sum(mine[name] for name in names[last:]) / 1e3

    def _own_times(self, code: str) -> dict[str, int]:
        lines = self.run(code, "-X", "importtime").stderr.splitlines()[1:]
        fields = (line.removeprefix("import time:").split("|") for line in lines)
        return {name.strip(): int(own) for own, _, name in fields}

    def file_calls(self, code: str) -> tuple[int, int]:
        """(files opened, system calls that name a file): what a shared file system may have to answer."""
        log = self.run(code, before=("strace", "-f", "-q", "-e", "trace=%file", "-o", "/dev/stderr")).stderr
        named = [line for line in log.splitlines() if '"' in line and '""' not in line]  # "": of a file that is open
        return sum("open" in line.split("(")[0] and "= -1" not in line for line in named), len(named)


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build_wheel(folder: Path) -> Path:
    """From a copy, which has none of the extensions and folders that other builds leave in the tree."""
    ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", "build", "dist", ".*")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    environment = {**os.environ, "LENSFAST_REQUIRE_EXTENSION": "1"}
    subprocess.run([*pip, "--wheel-dir", folder, folder / "source"], env=environment, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the wheel."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", wheel], check=True)
    return python


class Row(NamedTuple):
    what: str
    backend: str
    api: str
    lensfast: str
    ratio: str = ""
    target: str = ""
    verdict: str = ""


def row(what: str, backend: str, api: float, ours: float, unit: str, at_most: float | None = None) -> Row:
    quantities = (f"{value:.1f} {unit}" if unit else f"{value:.0f}" for value in (api, ours))
    verdict = "" if at_most is None else "ok" if ours / api <= at_most else "MISSED"
    return Row(what, backend, *quantities, f"{ours / api:.2f}", f"<= {at_most:.2f}" if at_most else "", verdict)


def measure(installed: Installed, backend: str, rounds: int, at_most: float) -> Iterator[Row]:
    programs = (NOTHING, API, LENSFAST)
    took: dict[str, list[tuple[float, float]]] = {code: [] for code in programs}
    for code in programs:
        installed.run(code)  # so that the files are in memory
    imports = []
    for _ in range(rounds):
        for code in programs:
            took[code].append(installed.milliseconds(code))
        imports.append(installed.import_times())
    for which, (what, target) in enumerate((("time", at_most), ("CPU time", None))):
        empty, api, ours = (min(each[which] for each in took[code]) for code in programs)
        yield row(f"{what} of a process less an empty one's", backend, api - empty, ours - empty, "ms", target)
    api, more = map(min, zip(*imports, strict=True))
    yield row("-X importtime", backend, api, api + more, "ms", at_most)
    if shutil.which("strace"):
        empty_calls, api_calls, our_calls = (installed.file_calls(code) for code in programs)
        for i, what in enumerate(("files opened", "system calls that name a file")):
            yield row(what, backend, api_calls[i] - empty_calls[i], our_calls[i] - empty_calls[i], "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--slack", type=float, default=0.0, help="fraction of a target that noise may add")
    parser.add_argument("--wheel", type=Path, help="measure this one, in place of one built here")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    table = [Row("", "backend", API, LENSFAST, "ratio", "target")]
    with tempfile.TemporaryDirectory() as name:
        wheel = arguments.wheel or build_wheel(Path(name))
        python = install(wheel, Path(name, "environment"))
        for backend in BACKENDS:
            table += measure(Installed(python, backend), backend, arguments.rounds, AT_MOST * (1 + arguments.slack))
        (package,) = Path(name).glob("environment/lib/python*/site-packages/lensfast")
        kilobytes = wheel.stat().st_size / 1000
        installed = sum(file.stat().st_size for file in package.rglob("*") if file.is_file()) / 1000
    verdict = "ok" if kilobytes < WHEEL_KILOBYTES_BELOW else "MISSED"
    table.append(Row("wheel", "", "", f"{kilobytes:.0f} kB", "", f"< {WHEEL_KILOBYTES_BELOW} kB", verdict))
    table.append(Row("installed, with bytecode", "", "", f"{installed:.0f} kB"))
    print(f"CPython {platform.python_version()}, {platform.machine()}; best of {arguments.rounds} rounds\n")
    if arguments.markdown:
        lines = [line[:-1] for line in table]
        lines.insert(1, ("---", "---", "---:", "---:", "---:", "---:"))
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    else:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 1 if any(line.verdict == "MISSED" for line in table) else 0


if __name__ == "__main__":
    sys.exit(main())
