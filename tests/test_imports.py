"""What a process loads and writes when it imports lensfast: of a job, thousands do so at once from one file system."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import BACKENDS, clean_environment, load_backend

# Beside what the API of OpenTelemetry imports.
ALLOWED = {
    "dataclasses": "NemoLensConfig is one, and every rank makes one",
    "numbers": "by which NemoLensConfig takes any kind of number, numpy's too",
}

SPANS = """
@lensfast.trace_fn("on", "function")
def function(): ...
handle = lensfast.span_group("on")
for enabled in ((), ("on",)):
    lensfast.set_enabled_span_groups(enabled)
    function()
    with lensfast.managed_span("on", "span", key=1), handle.span("span"), lensfast.span_cm("span", key=1): ...
"""

# Keeps what is opened and what is written from the import of lensfast on. What that imports of others has been read.
WATCH = """
import io, os, sys
import opentelemetry.trace, dataclasses, numbers

WRITING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "tempfile.mkstemp", "tempfile.mkdtemp"}
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
opened, written = [], []

def hook(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else (flags or 0) & FLAGS
        (written if writes else opened).append(os.fsdecode(path) if not isinstance(path, int) else str(path))
    elif event in WRITING:
        written.append(f"{event} {arguments[0]}")

sys.addaudithook(hook)
import lensfast
"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    load_backend(request.param)  # skips where there is no C extension
    return request.param


@pytest.fixture
def folder(backend: str, tmp_path: Path) -> Path:
    """One with a copy of lensfast in it, as it lies where it is installed, but without bytecode."""
    (package,) = load_backend(backend)["lensfast"].__path__
    shutil.copytree(package, tmp_path / "site" / "lensfast", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


def run(code: str, backend: str, folder: Path | None = None, times: int = 1, **variables: str) -> list[str]:
    """The lines that `code` prints, the same in each of so many processes at once."""
    environment = clean_environment(backend, **variables)
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
        code += f"\nassert lensfast.__file__.startswith({str(folder)!r}), lensfast.__file__\n"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        for _ in range(times)
    ]
    results = {(*process.communicate(timeout=60), process.returncode) for process in processes}
    ((out, error, status),) = results
    assert (status, error) == (0, "")
    return out.splitlines()


def files(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    for file in sorted(folder.rglob("*")):
        yield str(file), file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b""


def test_modules(backend: str) -> None:
    code = "import sys, opentelemetry.trace; before = {*sys.modules}; import lensfast; print(*{*sys.modules} - before)"
    (line,) = run(code, backend)
    # What Cython has in place of modules is of no file.
    others = {name for name in line.split() if name.partition(".")[0] not in {"lensfast", "cython_runtime"}}
    assert {name for name in others if not name.startswith("_cython_")} <= ALLOWED.keys()


def test_the_first_spans_import_nothing(backend: str) -> None:
    code = f"import sys, lensfast; before = {{*sys.modules}}\n{SPANS}\nprint(*{{*sys.modules}} - before)"
    assert run(code, backend) == [""]


def test_files_that_are_opened(backend: str) -> None:
    """Those of modules. And none of settings, of metadata, of certificates ..."""
    (package,) = load_backend(backend)["lensfast"].__path__
    folders = tuple(map(os.path.realpath, (package, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))))
    opened = run(WATCH + SPANS + "print(*opened, sep='\\n')", backend)
    assert any(path.startswith(package) for path in opened)
    for path in opened:
        assert os.path.realpath(path).startswith(folders), path
        assert path.endswith((".py", ".pyc", ".so")), path


SET_UP = """
lensfast.setup_telemetry(lensfast.NemoLensConfig(), rank=0, world_size=2)
lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True), rank=0, world_size=2)
"""


def test_an_installed_copy_is_never_written_to(backend: str, folder: Path) -> None:
    """Its bytecode was compiled when it was installed, as pip does."""
    assert compileall.compile_dir(folder, quiet=1)
    before = list(files(folder))
    code = WATCH + SPANS + SET_UP + "print(*written, sep='\\n')"
    assert run(code, backend, folder, times=20) == [""]
    assert list(files(folder)) == before


def test_without_bytecode_each_process_writes_it(backend: str, folder: Path) -> None:
    """So the test before this one would see it."""
    written = run(WATCH + "print(*written, sep='\\n')", backend, folder)
    assert any(line.startswith(str(folder)) and ".pyc" in line for line in written)
    assert list(folder.rglob("*.pyc"))


def test_nor_is_one_without_bytecode_where_python_is_told_so(backend: str, folder: Path) -> None:
    before = list(files(folder))
    code = WATCH + SPANS + SET_UP + "print(*written, sep='\\n')"
    assert run(code, backend, folder, PYTHONDONTWRITEBYTECODE="1") == [""]
    assert list(files(folder)) == before


def test_nor_need_it_be_writable(backend: str, folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write to what is read-only")
    before = list(files(folder))
    run(f"import lensfast\n{SPANS}{SET_UP}", backend, folder)
    assert list(files(folder)) == before


SDK_AND_EXPORTERS = (
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "grpc",
    "requests",
    "google",
    "multiprocessing",
    "asyncio",
)


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ("enabled=False", ()),
        ("enabled=True, export_rank=1", ()),
        ("enabled=True, export_rank=0, exporter='console'", ("opentelemetry.sdk", "multiprocessing")),
    ],
    ids=["off", "another rank exports", "console"],
)
def test_set_up_imports_what_it_uses(backend: str, config: str, allowed: tuple[str, ...]) -> None:
    code = (
        f"import lensfast, os, sys; lensfast.setup_telemetry(lensfast.NemoLensConfig({config}), rank=0, world_size=2)\n"
        f"print(*[name for name in {SDK_AND_EXPORTERS} if name in sys.modules], flush=True); os._exit(0)"
    )
    assert run(code, backend)[0].split() == list(allowed)
