"""What the process can tell about where it runs: resource attributes of the host, SLURM and Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .kubernetes import detect_kubernetes
from .local import detect_local
from .slurm import detect_slurm

__all__ = ["detect_kubernetes", "detect_local", "detect_resource", "detect_slurm"]


def detect_resource(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All that is found, later sources winning: host, SLURM, Kubernetes.

    Args:
        environ: passed to detect_slurm, which says what the two call forms give; the others read os.environ.
    """
    return {**detect_local(), **detect_slurm(environ), **detect_kubernetes()}
