"""When this process began. Spans of the past are tested in test_spans.py and, as they arrive, in test_wire.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

UPTIME = "1000.50 3000.00\n"


def stat(ticks: int | str, name: str = "python3") -> str:
    """The line of Linux's proc_pid_stat(5), of which field 22 is the start, in ticks since the boot."""
    return f"4711 ({name}) R {' '.join(map(str, range(4, 22)))} {ticks} 23 24 25\n"


@pytest.mark.parametrize("name", ["python3", "a b", "(x) y)", ") R 1 2 3 (", "", "line\nbreak"])
def test_create_time(lensfast: ModuleType, name: str) -> None:
    created = lensfast.span_utilities.linux_process_create_time(
        stat_text=stat(90_050, name), uptime_text=UPTIME, read_time=1_700_000_000.0, clock_ticks_per_second=100
    )
    # The machine has been up for 1000.5 s, and the process began 900.5 s after the boot.
    assert created == 1_700_000_000.0 - 100.0
    assert type(created) is float


def test_create_time_from_files(lensfast: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "stat").write_bytes(stat(2000).encode().replace(b"python3", b"cut \xe2\x9c"))  # half a character
    (tmp_path / "uptime").write_text(UPTIME)
    files: dict[str, Any] = {"stat_path": str(tmp_path / "stat"), "uptime_path": str(tmp_path / "uptime")}
    create_time = lensfast.span_utilities.linux_process_create_time
    assert create_time(**files, read_time=5000.0, clock_ticks_per_second=1000) == 5000.0 - 998.5
    assert create_time(**files, stat_text=stat(500_500), read_time=5000.0, clock_ticks_per_second=1000) == 4500.0


@pytest.mark.parametrize("missing", ["stat_path", "uptime_path"])
def test_unreadable_files(lensfast: ModuleType, tmp_path: Path, missing: str) -> None:
    texts = {"stat_text": stat(1), "uptime_text": UPTIME}
    del texts[missing.replace("path", "text")]
    with pytest.raises(RuntimeError, match="nowhere"):
        lensfast.span_utilities.linux_process_create_time(**texts, **{missing: str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    "wrong",
    [
        {"stat_text": ""},
        {"stat_text": "4711 (python3) R 1 2 3"},
        {"stat_text": stat("soon")},
        {"stat_text": "no parentheses at all"},
        {"uptime_text": ""},
        {"uptime_text": "long"},
        {"uptime_text": "nan 1"},
        {"uptime_text": "inf 1"},
        {"clock_ticks_per_second": 0},
        {"clock_ticks_per_second": -100},
    ],
)
def test_malformed_contents(lensfast: ModuleType, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Linux|clock_ticks_per_second"):
        lensfast.span_utilities.linux_process_create_time(**{"stat_text": stat(1), "uptime_text": UPTIME, **wrong})


def test_arguments_are_keywords(lensfast: ModuleType) -> None:
    with pytest.raises(TypeError):
        lensfast.span_utilities.linux_process_create_time(stat(1), UPTIME)


@pytest.mark.skipif(not os.path.exists("/proc/uptime"), reason="there is no Linux's /proc here")
def test_create_time_of_a_real_process(lensfast: ModuleType) -> None:
    code = "from lensfast.span_utilities import linux_process_create_time as t; print(repr(t()))"
    before = time.time()
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = time.time()
    assert result.stderr == ""
    # To within what the clocks, which tick in hundredths and may be adjusted, disagree.
    assert before - 0.5 <= float(result.stdout) <= after + 0.5
