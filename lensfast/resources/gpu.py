"""Resource attributes of the GPU that a process works on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


def detect_gpu(local_rank: int | None = None, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """nv.gpu.* attributes of this process's GPU, by NVIDIA's management library (pip install nvidia-ml-py).

    {} without that library, a driver or such a GPU; never raises. detect_resource() does not call it: pass the result
    to setup_telemetry as resource_attributes.

    Args:
        local_rank: counts the GPUs that CUDA_VISIBLE_DEVICES lists, or all of them; default: LOCAL_RANK, else
            SLURM_LOCALID, else 0.
        environ: default: os.environ.
    """
    environ = os.environ if environ is None else environ
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        index = (
            int(environ.get("LOCAL_RANK") or environ.get("SLURM_LOCALID") or 0) if local_rank is None else local_rank
        )
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            index = dict(enumerate(map(int, visible.split(","))))[index]
        pynvml.nvmlInit()
        try:
            return _attributes(pynvml, index)
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return {}


def _attributes(nvml: Any, index: int) -> dict[str, Any]:
    if index < 0:
        raise IndexError(index)
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    attributes: dict[str, Any] = {
        "nv.gpu.index": index,
        "nv.gpu.model": _text(nvml.nvmlDeviceGetName(device)),
        "nv.gpu.uuid": _text(nvml.nvmlDeviceGetUUID(device)),
    }
    optional: dict[str, Callable[[], Any]] = {
        "nv.gpu.serial": lambda: _text(nvml.nvmlDeviceGetSerial(device)),
        "nv.gpu.pci_bus_id": lambda: _text(nvml.nvmlDeviceGetPciInfo(device).busId),
        "nv.gpu.compute_capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(device)),
        "nv.gpu.memory_total": lambda: int(nvml.nvmlDeviceGetMemoryInfo(device).total),
        "nv.gpu.driver_version": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
    }
    for key, read in optional.items():
        try:
            attributes[key] = read()
        except Exception:
            continue  # consumer boards have no serial number, for example
    return attributes


def _text(value: Any) -> str:
    # Older versions of the library give bytes.
    return value.decode() if isinstance(value, bytes) else str(value)
