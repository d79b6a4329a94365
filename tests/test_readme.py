"""The README's quickstart does what it says."""

from __future__ import annotations

import json
import re

import pytest

from conftest import BACKENDS, ROOT, run_code


@pytest.mark.parametrize("backend", BACKENDS)
def test_quickstart(backend, tmp_path):
    section = (ROOT / "README.md").read_text().partition("## Quickstart")[2]
    result = run_code(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], backend, tmp_path)
    assert result.returncode == 0, result.stderr
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    spans = [record for record in printed if "parent_id" in record]
    assert [span["name"] for span in spans] == ["mytrainer.step"] * 3 + ["mytrainer.train"]
    assert [span["attributes"].get("mytrainer.iteration") for span in spans] == [0, 1, 2, None]
    assert [span["attributes"].get("mytrainer.loss") for span in spans] == [1.0, 1 / 2, 1 / 3, None]
    assert {span["parent_id"] for span in spans[:3]} == {spans[3]["context"]["span_id"]}
    assert result.stderr == ""
