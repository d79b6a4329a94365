"""The types of resource attributes: OTEL_RESOURCE_ATTRIBUTES carries text, and these say which of it is a number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from . import attributes as names
from .encoding import convert_attribute

logger = logging.getLogger(__name__)

_Types = Mapping[str, Callable[[Any], Any]]

SLURM_RESOURCE_TYPES: _Types = {
    names.SLURM_JOB_ID: str,
    names.SLURM_JOB_ID_RAW: str,
    names.SLURM_JOB_NAME: str,
    names.SLURM_JOB_USER: str,
    names.SLURM_JOB_ACCOUNT: str,
    names.SLURM_JOB_QOS: str,
    names.SLURM_JOB_RESERVATION: str,
    names.SLURM_ARRAY_JOB_ID: str,
    names.SLURM_ARRAY_TASK_ID: str,
    names.SLURM_ARRAY_COUNT: int,
    names.SLURM_ARRAY_SLUID: str,
    names.SLURM_SLUID: str,
    names.SLURM_NNODES: int,
    names.SLURM_NTASKS: int,
    names.SLURM_PARTITION: str,
    names.SLURM_CLUSTER_NAME: str,
    names.SLURM_HEAD_NODE_NAME: str,
    names.SLURM_RESTART_COUNT: int,
    names.SLURM_SEGMENT: str,
    names.SLURM_TOPOLOGY_ADDR: str,
    names.SLURM_TOPOLOGY_ADDR_PATTERN: str,
}
"""What the nightly generation detects of SLURM."""

SLURM_RESOURCE_ATTRIBUTE_KEYS = frozenset(SLURM_RESOURCE_TYPES)
SLURM_RESOURCE_ATTRIBUTE_NORMALIZERS = SLURM_RESOURCE_TYPES

SLURM_RETIRED_RESOURCE_ATTRIBUTE_KEYS = frozenset(
    {names.SLURM_NODELIST, names.SLURM_CLUSTER, names.SLURM_TORCHELASTIC_RESTART_COUNT}
)
"""What it no longer emits."""

DL_RESOURCE_TYPES: _Types = {
    names.NV_DL_RANK: int,
    names.NV_DL_WORLD_SIZE: int,
    names.NV_DL_LOCAL_RANK: int,
    names.NV_DL_ROLE: str,
    names.NV_DL_PROVIDER_NAME: str,
    names.NV_DL_JOB_UUID: str,
    names.NV_DL_RUN_UUID: str,
    names.NV_DL_TOPOLOGY_SIZE_TP: int,
    names.NV_DL_TOPOLOGY_SIZE_PP: int,
    names.NV_DL_TOPOLOGY_SIZE_DP: int,
    names.NV_DL_TRAINING_CONFIG_GLOBAL_BATCH_SIZE: int,
    names.NV_DL_TRAINING_CONFIG_MICRO_BATCH_SIZE: int,
    names.NV_DL_TRAINING_CONFIG_SEQUENCE_LENGTH: int,
    names.NV_DL_TRAINING_CONFIG_OPTIMIZER: str,
    names.NV_DL_TRAINING_CONFIG_RECOMPUTE_GRANULARITY: str,
    names.NV_DL_TRAINING_TARGET_TRAIN_ITERS: int,
    names.NV_DL_TRAINING_TARGET_TRAIN_SAMPLES: int,
    names.NV_DL_TRAINING_TARGET_TRAIN_TOKENS: int,
    names.NV_DL_SOFTWARE_TORCH: str,
    names.NV_DL_SOFTWARE_CUDA: str,
    names.NV_DL_SOFTWARE_NCCL: str,
    names.NV_DL_SOFTWARE_TRANSFORMER_ENGINE: str,
    names.NV_DL_LAUNCH_CONTAINER_IMAGE: str,
}

GPU_RESOURCE_TYPES: _Types = {
    names.NV_GPU_UUID: str,
    names.NV_GPU_INDEX: int,
    names.NV_GPU_PCI_BUS_ID: str,
    names.NV_GPU_SERIAL: str,
    names.NV_GPU_MODEL: str,
    names.NV_GPU_COMPUTE_CAPABILITY: str,
    names.NV_GPU_MEMORY_TOTAL: int,
    names.NV_GPU_DRIVER_VERSION: str,
}

RESOURCE_TYPES: _Types = {**SLURM_RESOURCE_TYPES, **DL_RESOURCE_TYPES, **GPU_RESOURCE_TYPES}

_INTEGERS: _Types = {
    key: converter for key, converter in RESOURCE_TYPES.items() if converter is int and key not in SLURM_RESOURCE_TYPES
}


def normalize_resource_attributes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """A new dict, in which the text of a number has become an int where the key is known to hold one.

    What is no integer is kept, with a warning. slurm.* keys are left alone: detect_slurm knows about them.
    """
    normalized = {}
    for key, value in attrs.items():
        try:
            normalized[key] = convert_attribute(key, value, _INTEGERS)
        except ValueError as error:
            normalized[key] = value
            logger.warning("resource attribute %s; it is kept as it is", error)
    return normalized
