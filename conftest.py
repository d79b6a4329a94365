"""Fixtures of the test suite and of the benchmarks: every behaviour test runs on both backends."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

with suppress(ImportError):
    # Where torch's compiler is the first to import it, in the middle of a long run, its distutils shim may fail.
    import setuptools  # noqa: F401

with suppress(ImportError):
    from hypothesis import settings

    # The deadline of an example would be a timing assertion: it fails under sanitizers and beside other suites.
    settings.register_profile("lensfast", deadline=None)
    settings.load_profile("lensfast")

BACKENDS = ("c", "python")
ROOT = Path(__file__).resolve().parent
# The package under test: that of the source tree, or an installed one where these tests are without it.
PACKAGE = Path(importlib.util.find_spec("lensfast").origin).parent
# Whether threads run truly at once here.
FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()
IMMORTAL_FUNCTIONS = FREE_THREADED and sys.version_info < (3, 14)
_loaded: dict[str, dict[str, ModuleType]] = {}
_missing: dict[str, str] = {}


def load_backend(backend: str) -> dict[str, ModuleType]:
    """All modules of lensfast, imported afresh on `backend`; the process holds one such set per backend."""
    if backend in _missing:  # not imported again: some hundred tests would each leave a copy of the package behind
        pytest.skip(_missing[backend])
    if backend not in _loaded:
        before = take_modules("lensfast")
        os.environ["LENSFAST_PURE_PYTHON"] = "1" if backend == "python" else "0"
        try:
            package = importlib.import_module("lensfast")
            if package.backend != backend:
                reason = importlib.import_module("lensfast._backend").backend_reason
                if os.environ.get("LENSFAST_REQUIRE_EXTENSION") == "1":
                    pytest.fail(f"the C backend is required here: {reason}")
                _missing[backend] = f"no C backend: {reason}"
                pytest.skip(_missing[backend])
            for module in pkgutil.walk_packages(package.__path__, "lensfast."):
                if module.name not in {"lensfast.__main__", "lensfast._gate"}:
                    importlib.import_module(module.name)
        finally:
            del os.environ["LENSFAST_PURE_PYTHON"]
            modules = take_modules("lensfast")
            sys.modules.update(before)
        _loaded[backend] = modules
    return _loaded[backend]


def take_modules(package: str) -> dict[str, ModuleType]:
    """Take a package and its submodules out of sys.modules; returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


def clean_environment(backend: str, **variables: str) -> dict[str, str]:
    """The variables of a process of its own on `backend`: PATH, what finds lensfast, and `variables`."""
    # What a build with sanitizers needs to be loaded.
    sanitizers = {name: os.environ[name] for name in ("LD_PRELOAD", "ASAN_OPTIONS") if name in os.environ}
    return {
        "PATH": os.environ["PATH"],
        **sanitizers,
        "PYTHONPATH": str(ROOT),
        "LENSFAST_PURE_PYTHON": "1" if backend == "python" else "0",
        **variables,
    }


def run_command(backend: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`lensfast arguments` with `variables` as its environment, on one backend."""
    return subprocess.run(
        [sys.executable, "-m", "lensfast", *arguments],
        env=clean_environment(backend, **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def run_code(code: str, backend: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a program of its own on `backend`: python [arguments] program.py, in `directory`."""
    load_backend(backend)
    (directory / "program.py").write_text(code)
    return subprocess.run(
        [sys.executable, *arguments, "program.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LENSFAST_PURE_PYTHON": str(int(backend == "python"))},
        capture_output=True,
        text=True,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of lensfast runs on both backends; what collects spans also with native ones, besides the SDK's."""
    if "lensfast" in metafunc.fixturenames:
        native = ("native",) if "exporter" in metafunc.fixturenames else ()
        metafunc.parametrize("lensfast", [*BACKENDS, *native], indirect=True)


@pytest.fixture
def lensfast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package on one backend, with nothing enabled, nothing registered and no provider."""
    modules = load_backend("c" if request.param == "native" else request.param)
    for name in list(os.environ):
        if name.startswith(("OTEL_", "NEMO_LENS_", "MEGATRON_OTEL_", "SLURM_", "LENSFAST_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = take_modules("lensfast")
    sys.modules.update(modules)
    package = modules["lensfast"]
    package.testing.reset_telemetry()
    yield package
    package.testing.reset_telemetry()
    take_modules("lensfast")
    sys.modules.update(before)


@pytest.fixture
def exporter(request: pytest.FixtureRequest, lensfast: ModuleType) -> InMemorySpanExporter:
    """Collects the spans of a fresh global provider: the SDK's, or that of native spans."""
    memory = InMemorySpanExporter()
    native = request.node.callspec.params["lensfast"] == "native"
    if native and (reason := lensfast._native.why_not()):
        pytest.skip(f"no native spans: {reason}")
    provider = (lensfast._native.TracerProvider if native else TracerProvider)(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    return memory


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """With a GIL, they take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*programs: Callable[[], object]) -> None:
    """Run each in a thread of its own, all from one moment on; what one raises, fails the test."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(programs))

    def run(program: Callable[[], object]) -> None:
        start.wait()
        try:
            program()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
