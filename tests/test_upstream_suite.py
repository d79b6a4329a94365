"""nemo-lens 0.1.0's own test suite, from its source distribution, on install() and accelerate(): all of it passes.

It is downloaded from PyPI; LENSFAST_NEMO_LENS_SDIST names a copy to use instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import BACKENDS, ROOT, load_backend

SHA256 = "044621a6d877739e0bc69aced2f2f2a5c565eadc3f9070b99af72bb57abd73aa"
TESTS = 192
SDIST = os.environ.get("LENSFAST_NEMO_LENS_SDIST")

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 13), reason="the tests of nemo-lens 0.1.0 need Python 3.13, as it does"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds nemo-lens's tests, and nothing of nemo-lens itself."""
    directory = tmp_path_factory.mktemp("upstream")
    archive = Path(SDIST) if SDIST else download(directory)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert digest == SHA256, f"{archive} is not the source distribution of nemo-lens 0.1.0"
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(directory, filter="data")
    shutil.move(directory / "nemo_lens-0.1.0" / "tests", directory / "tests")
    shutil.rmtree(directory / "nemo_lens-0.1.0")
    shutil.copy(ROOT / "tests" / "upstream_conftest.py", directory / "tests" / "conftest.py")
    (directory / "tests" / "__init__.py").touch()  # they import tests.conftest
    (directory / "pytest.ini").write_text("[pytest]\n")
    return directory


def download(directory: Path) -> Path:
    command = "download --quiet --no-deps --no-build-isolation --no-binary nemo-lens --retries 1 --timeout 15"
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", *command.split(), "--dest", directory, "nemo-lens==0.1.0"],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(
            f"the source distribution of nemo-lens 0.1.0 could not be downloaded: {error.stderr.strip()[-500:]}"
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the source distribution of nemo-lens 0.1.0 could not be downloaded in two minutes")
    return directory / "nemo_lens-0.1.0.tar.gz"


def run(suite: Path, report: Path, **environment: str) -> tuple[dict[str, str], str]:
    """Each test to its outcome, and what pytest printed."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "NEMO_LENS_", "SLURM_", "LENSFAST_"))
    }
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--junitxml", report, "tests"],
        cwd=suite,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    output = result.stdout + result.stderr
    assert report.exists(), output
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        bad = [part for part in ("failure", "error", "skipped") if case.find(part) is not None]
        outcomes[name] = bad[0] if bad else "passed"
    return outcomes, output


def check(outcomes: dict[str, str], output: str) -> None:
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "passed"} == {}, output
    assert len(outcomes) == TESTS, output


def test_on_nemo_lens_itself(suite, tmp_path):
    """If one fails here, our conftest is wrong, or OpenTelemetry has changed."""
    if importlib.util.find_spec("nemo") is None:
        pytest.skip("nemo-lens is not installed (pip install nemo-lens==0.1.0)")
    outcomes, output = run(suite, tmp_path / "report.xml")
    assert "nemo.lens is nemo.lens, managed_span its own" in output
    check(outcomes, output)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["install", "accelerate"])
def test_on_lensfast(suite, tmp_path, way, backend):
    if way == "accelerate" and importlib.util.find_spec("nemo") is None:
        pytest.skip("nemo-lens is not installed (pip install nemo-lens==0.1.0)")
    load_backend(backend)  # skips where there is none
    environment = {"LENSFAST_UPSTREAM": way, "LENSFAST_PURE_PYTHON": str(int(backend == "python"))}
    outcomes, output = run(suite, tmp_path / "report.xml", **environment)
    assert f"nemo.lens is {'lensfast' if way == 'install' else 'nemo.lens'}, managed_span lensfast's" in output
    check(outcomes, output)
