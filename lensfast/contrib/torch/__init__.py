"""lensfast for PyTorch programs. Importing this does not import torch; its functions need it (the extra `torch`)."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

from ._modules import instrument_module, uninstrument
from ._workers import WorkerTelemetry

__all__ = ["WorkerTelemetry", "cuda_timing", "instrument_module", "nvtx", "uninstrument"]

cuda_timing: bool | Collection[str] | None = False
"""Which spans get `gpu.duration_ms`: True for all, or the names of groups.

It is the device's time in milliseconds (a float), from where it was on the stream that was current at the span's start
to where the span's end was queued on that stream, idle time in between included. It is measured without
synchronisation: the span is ended, with the time at which it was left, by another thread some milliseconds after the
device has come to its end. The attribute is missing where the device could not be asked: CUDA is not initialised, the
stream is being captured, or telemetry was shut down before. Assign at any time, from any thread; spans that start then
are timed. TypeError for other values.
"""

nvtx: bool | Collection[str] | None = False
"""Which spans are NVTX ranges too, as Nsight Systems shows them: True for all, or the names of groups.

False again, after a warning, if torch was built without NVTX. Assign at any time, from any thread. TypeError for other
values.
"""


class _Settings(ModuleType):
    """This module: what is assigned to its settings takes effect at once."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("cuda_timing", "nvtx"):
            from ._device import choose

            value = choose(name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Settings
