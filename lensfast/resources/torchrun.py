"""What torchrun, and launchers that set the same variables, say about this process's place in the job."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ..semconv.attributes import DL_LOCAL_RANK
from ..semconv.encoding import convert_attribute

logger = logging.getLogger(__name__)

RESTART_COUNT = "torchelastic.restart_count"


def detect_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """(rank, world size) by the variables RANK and WORLD_SIZE.

    None if neither is set, and, with a warning that names the variable, if they can't be worked with: one of them is
    missing, is no integer, or RANK is not from 0 to WORLD_SIZE - 1. A blank one counts as not set. Never raises.

    Args:
        environ: default: os.environ.
    """
    environ = os.environ if environ is None else environ
    missing = [name for name in ("RANK", "WORLD_SIZE") if not environ.get(name, "").strip()]
    if len(missing) == 2:
        return None
    if missing:
        problem = f"{missing[0]} is not set, where {'WORLD_SIZE' if missing == ['RANK'] else 'RANK'} is"
    else:
        try:
            rank, world_size = _integer("RANK", environ), _integer("WORLD_SIZE", environ)
        except ValueError as error:
            problem = str(error)
        else:
            if 0 <= rank < world_size:
                return rank, world_size
            problem = f"RANK is {rank}, and WORLD_SIZE {world_size}"
    logger.warning(
        "%s: telemetry takes this process for rank 0 of 1; pass rank and world_size to setup_telemetry()", problem
    )
    return None


def detect_torchrun(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """dl.local_rank and torchelastic.restart_count (int), by LOCAL_RANK and TORCHELASTIC_RESTART_COUNT where those are
    set. What is no integer is left out, with a warning.

    Args:
        environ: default: os.environ.
    """
    environ = os.environ if environ is None else environ
    found = {}
    for key, name in ((DL_LOCAL_RANK, "LOCAL_RANK"), (RESTART_COUNT, "TORCHELASTIC_RESTART_COUNT")):
        if environ.get(name, "").strip():
            try:
                found[key] = _integer(name, environ)
            except ValueError as error:
                logger.warning("%s; the resource is without %s", error, key)
    return found


def _integer(name: str, environ: Mapping[str, str]) -> int:
    """Raises ValueError, with the variable's name."""
    number: int = convert_attribute(name, environ[name], {name: int})
    return number
