"""Which gate is chosen, that both have one interface, and what an import costs in modules."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import BACKENDS, PACKAGE, load_backend

ROOT = Path(__file__).resolve().parent.parent


def run(code, **environment):
    """What `code` prints in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip(), result.stderr


@pytest.fixture(params=BACKENDS)
def backend(request):
    load_backend(request.param)  # skips where there is no C extension
    return request.param


def test_the_environment_chooses_python():
    for word in ("1", "true", "YES", " on "):
        out, _ = run("import lensfast; print(lensfast.backend)", LENSFAST_PURE_PYTHON=word)
        assert out == "python"


def test_c_is_chosen_where_it_is_built():
    load_backend("c")
    for word in ("", "0", "no"):
        out, _ = run("import lensfast; print(lensfast.backend)", LENSFAST_PURE_PYTHON=word)
        assert out == "c"


HIDE = """
import sys
class Hide:
    def find_spec(self, name, path, target=None):
        if name == "lensfast._gate":
            raise {error}
sys.meta_path.insert(0, Hide())
import lensfast
from lensfast import _backend
print(lensfast.backend, "|", _backend.backend_reason)
"""


def test_an_extension_that_was_not_built_is_no_warning():
    out, err = run(HIDE.format(error='ModuleNotFoundError("No module named lensfast._gate", name=name)'))
    backend, reason = out.split(" | ")
    assert backend == "python"
    assert "not built" in reason
    assert "python3-dev" in reason
    assert err == ""


def test_an_extension_that_does_not_load_is_a_warning():
    out, err = run(HIDE.format(error='ImportError("undefined symbol: x")'))
    assert out == "python | the C extension could not be loaded: undefined symbol: x"
    assert "RuntimeWarning" in err
    assert "undefined symbol: x" in err


def test_importing_needs_the_api_only(backend):
    """Nor does it import torch, numpy, asyncio, the SDK or multiprocessing."""
    out, _ = run(
        "import sys, opentelemetry.trace, opentelemetry.metrics; before = set(sys.modules); import lensfast;"
        "print(*sorted({name.partition('.')[0] if not name.startswith('opentelemetry') else name"
        " for name in set(sys.modules) - before}))",
        LENSFAST_PURE_PYTHON=str(int(backend == "python")),
    )
    imported = set(out.split())
    assert "lensfast" in imported
    assert not [name for name in imported if name.startswith("opentelemetry.sdk")]
    assert not imported & {"torch", "numpy", "asyncio", "multiprocessing", "grpc", "google", "requests"}


def public_names(module):
    return {name for name in vars(module) if not name.startswith("_") and name not in HELPERS}


# Imports, which the two gates have for themselves.
HELPERS = {
    *("TYPE_CHECKING", "AbstractContextManager", "Any", "Callable", "FunctionType", "MethodType", "NoReturn", "RLock"),
    *("annotations", "inspect", "os"),
}


# How enabled sites and spans are made in C; in Python, lensfast._spans and the SDK make them.
NATIVE = {
    *("GatedSpan", "UngatedSpan", "use_managers", "keep_compiler_out"),
    *("OpenSpans", "Plan", "Sink", "SpanBase", "TracerBase", "outdate_plans"),
}


def test_both_gates_and_the_stub_have_one_interface():
    c, python = (load_backend(backend)["lensfast._backend"].gate for backend in BACKENDS)
    assert c is not python
    assert public_names(c) == public_names(python) | NATIVE
    stub = ast.parse((PACKAGE / "_gate.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    declared |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert declared == public_names(c)
    for name in ("GroupHandle", "NoopSpan"):
        methods = {
            method
            for method in dir(getattr(python, name))
            if not method.startswith("_") or method in {"__enter__", "__exit__", "__bool__", "__call__", "__copy__"}
        }
        assert methods <= set(dir(getattr(c, name)))


@pytest.mark.parametrize("kind", ["isolated", "legacy"])
def test_another_interpreter_has_the_python_gate(kind):
    """The extension's state is the process's: it refuses, and lensfast works without it, with groups of its own."""
    load_backend("c")
    module = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    kinds = (
        {"isolated": "'isolated'", "legacy": "'legacy'"}
        if sys.version_info >= (3, 13)
        else {"isolated": "", "legacy": "isolated=False"}
    )
    inner = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import lensfast\n"
        "print(lensfast.backend, [str(each.message) for each in caught if each.category is RuntimeWarning])\n"
        "lensfast.set_enabled_span_groups({'x'})\n"
        "print(lensfast.is_span_group_enabled('x'), bool(lensfast.span_group('x')))\n"
        "with lensfast.managed_span('x', 'name'): print('span')"
    )
    out, err = run(
        f"import {module} as interpreters, lensfast\n"
        f"other = interpreters.create({kinds[kind]})\n"
        f"assert not (error := interpreters.run_string(other, {inner!r})), error\n"
        "interpreters.destroy(other)\n"
        "print(lensfast.backend, lensfast.is_span_group_enabled('x'))"
    )
    assert err == ""
    first, *others = out.splitlines()
    assert first.startswith("python ['lensfast runs on its slower Python gate: the C extension could not be loaded: ")
    assert re.search("one interpreter per process|does not support loading in subinterpreters", first)
    assert others == ["True True", "span", "c False"]


def test_the_version_is_in_one_place():
    out, _ = run("import lensfast; print(lensfast.__version__)")
    namespace: dict = {}
    exec((PACKAGE / "package_info.py").read_text(), namespace)
    assert out == namespace["__version__"]
