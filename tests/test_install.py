"""Installing with and without a C compiler, as pip does it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADERS = Path(sysconfig.get_path("include")) / "Python.h"
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "lensfast", "csrc")

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("Cython", "setuptools", "pip")),
    reason="building needs Cython, setuptools and pip in this environment",
)


def build(directory, path, **environment):
    """pip's result, and the wheel if there is one."""
    source = directory / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LENSFAST_") and k != "CC"}
    result = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", directory, source],
        env={**inherited, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )
    return result, next(directory.glob("*.whl"), None)


def info(wheel, directory):
    """What `python -m lensfast info` prints from the unpacked wheel."""
    zipfile.ZipFile(wheel).extractall(directory / "installed")
    path = os.pathsep.join([str(directory / "installed"), sysconfig.get_path("purelib")])
    result = subprocess.run(
        # -S: an editable install in this environment would offer its own extension.
        [sys.executable, "-S", "-m", "lensfast", "info"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, "LENSFAST_PURE_PYTHON": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


def pip_shows_build_warnings():
    return hasattr(importlib.import_module("pip._vendor.pyproject_hooks"), "BuildBackendWarning")


def test_without_a_compiler(tmp_path):
    result, wheel = build(tmp_path, path=str(tmp_path / "nothing"))
    assert result.returncode == 0, result.stderr
    if pip_shows_build_warnings():
        output = result.stdout + result.stderr
        assert "the C gate of lensfast was not built" in output
        assert "apt install gcc python3-dev" in output
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    printed = info(wheel, tmp_path)
    assert printed["backend"] == "python"
    assert "not built" in printed["backend reason"]


def test_without_a_compiler_where_the_extension_is_required(tmp_path):
    result, wheel = build(tmp_path, path=str(tmp_path / "nothing"), LENSFAST_REQUIRE_EXTENSION="1")
    assert result.returncode != 0
    assert wheel is None


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler here")
def test_with_a_compiler(tmp_path):
    result, wheel = build(tmp_path, path=os.environ["PATH"])
    assert result.returncode == 0, result.stderr
    names = zipfile.ZipFile(wheel).namelist()
    if not HEADERS.exists():
        pytest.skip("the Python headers are not installed")
    assert any(name.endswith(".so") for name in names), result.stdout
    assert "lensfast/py.typed" in names
    assert "lensfast/_gate.pyi" in names
    assert info(wheel, tmp_path)["backend"] == "c"


def test_a_pure_build_on_request(tmp_path):
    result, wheel = build(tmp_path, path=os.environ["PATH"], LENSFAST_BUILD_PURE="1")
    assert result.returncode == 0, result.stderr
    assert wheel.name.endswith("-py3-none-any.whl")
