"""Resource attributes of the host and the process."""

from __future__ import annotations

import os
import re
import socket
from typing import Any


def detect_local() -> dict[str, Any]:
    """host.name, process.pid (int) and, where it is known, host.gpu.count (int)."""
    attributes: dict[str, Any] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    gpus = _detect_gpu_count()
    if gpus is not None:
        attributes["host.gpu.count"] = gpus
    return attributes


def _detect_gpu_count() -> int | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        parts = [part.strip() for part in visible.split(",")]
        # CUDA itself ignores everything from the first invalid entry on.
        count = 0
        for part in parts:
            if part in {"", "-1", "NoDevFiles"}:
                break
            count += 1
        return count
    try:
        # The driver's device files answer at once, where nvidia-smi takes seconds.
        return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name)) or None
    except OSError:
        return None
