"""The Python in the documents runs: the blocks of a page are one program, or one test module if they hold tests."""

from __future__ import annotations

import re

import pytest

from conftest import BACKENDS, ROOT, run_code

PAGES = sorted((ROOT / "docs").rglob("*.md"))


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_a_page(page, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    code = "\n\n".join(python_blocks(page))
    if "import torch\n" in code:
        pytest.importorskip("torch", reason="torch is not installed here")
    has_tests = "\ndef test_" in code
    result = run_code(code, backend, tmp_path, *(("-m", "pytest", "-q", "-W", "error") if has_tests else ()))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_library_without_lensfast(backend, tmp_path):
    """The import, registration and marks of the page for library authors, where lensfast can't be imported."""
    blocks = python_blocks(ROOT / "docs" / "library-authors.md")
    needed = [
        block for block in blocks if any(word in block for word in ("class SpanRegistry", "def step", "def load"))
    ]
    registration = next(block for block in blocks if block.startswith("SpanRegistry.register("))
    assert len(needed) == 3
    code = [
        "import sys\nsys.modules['lensfast'] = None",
        needed[0],
        registration,
        *needed[1:],
        "assert step([1]) == [3] and write_checkpoint([b'w']) == 1 and load((1, 2)) == [1, 2]",
        "assert step.__name__ == 'step' and not hasattr(step, '__wrapped__')",
    ]
    result = run_code("\n\n".join(code), backend, tmp_path)
    assert result.returncode == 0, result.stderr
