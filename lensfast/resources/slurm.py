"""Resource attributes of a SLURM job, and the ids that its processes can work out, each for itself."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from ..semconv.encoding import convert_attribute
from ..semconv.resources import DL_RESOURCE_TYPES, SLURM_RESOURCE_TYPES
from .attributes import get_otel_resource_attributes

_SLURM = {
    "SLURM_JOB_ID": "slurm.job.id",
    "SLURM_JOB_NAME": "slurm.job.name",
    "SLURM_NODELIST": "slurm.nodelist",
    "SLURM_NNODES": "slurm.nnodes",
    "SLURM_NTASKS": "slurm.ntasks",
    "SLURM_PARTITION": "slurm.partition",
    "SLURM_CLUSTER_NAME": "slurm.cluster.name",
}

# The nightly generation: the first of these variables that is not empty.
_NIGHTLY = {
    "slurm.sluid": ("LENS_SLURM_SLUID", "NV_LAUNCH_SLUID"),
    "slurm.array.sluid": ("LENS_SLURM_ARRAY_SLUID", "NV_LAUNCH_ARRAY_SLUID"),
    "slurm.array.count": ("SLURM_ARRAY_TASK_COUNT",),
    "slurm.job.name": ("SLURM_JOB_NAME",),
    "slurm.cluster.name": ("SLURM_CLUSTER_NAME",),
    "slurm.partition": ("SLURM_JOB_PARTITION", "SLURM_PARTITION"),
    "slurm.nnodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "slurm.ntasks": ("SLURM_NTASKS",),
    "slurm.restart_count": ("SLURM_RESTART_COUNT",),
    "slurm.job.user": ("SLURM_JOB_USER",),
    "slurm.job.account": ("SLURM_JOB_ACCOUNT",),
    "slurm.job.qos": ("SLURM_JOB_QOS",),
    "slurm.job.reservation": ("SLURM_JOB_RESERVATION",),
    "slurm.segment": ("SLURM_SEGMENT",),
    "slurm.topology.addr": ("SLURM_TOPOLOGY_ADDR",),
    "slurm.topology.addr_pattern": ("SLURM_TOPOLOGY_ADDR_PATTERN",),
}
_DETECTED = {**SLURM_RESOURCE_TYPES, "nv.dl.job.uuid": DL_RESOURCE_TYPES["nv.dl.job.uuid"]}


def detect_slurm(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """slurm.* attributes. What a launcher put into OTEL_RESOURCE_ATTRIBUTES beats what is found here.

    Args:
        environ: None: as generations 0.1.0 and 0.2 have it, seven attributes, all of them text, read from os.environ,
            and nothing outside a SLURM job. A mapping, such as os.environ, which only the nightly generation takes:
            as that has it, the attributes of derive_slurm_resource_attributes(), and of those that are inherited only
            non-empty ones, with numbers as int, where they are numbers.
    """
    inherited = get_otel_resource_attributes(environ=environ)
    if environ is None:
        if not os.environ.get("SLURM_JOB_ID"):
            return {}
        found = {key: inherited.get(key) or os.environ.get(name) for name, key in _SLURM.items()}
        return {key: value for key, value in found.items() if value}
    return {**derive_slurm_resource_attributes(environ), **_typed({key: inherited.get(key) for key in _DETECTED})}


def _typed(values: Mapping[str, str | None]) -> dict[str, Any]:
    """`values` in the types of their keys, without those that are empty or don't fit."""
    typed = {}
    for key, value in values.items():
        try:
            if value:
                typed[key] = convert_attribute(key, value, _DETECTED)
        except ValueError:
            continue  # a variable of SLURM's that is none of ours to complain about
    return typed


def derive_slurm_resource_attributes(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The attributes of the SLURM job that `environ` (default: os.environ) tells of; {} outside a job.

    Values are text, counts are int. A task of an array has the id `<job id of the array>_<task id>`;
    `slurm.job.id.raw` is SLURM's own.
    """
    environ = os.environ if environ is None else environ
    raw_id = environ.get("SLURM_JOB_ID")
    if not raw_id:
        return {}
    values = {
        key: next((environ[name] for name in names if environ.get(name)), None) for key, names in _NIGHTLY.items()
    }
    in_step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    return {
        "slurm.job.id": _job_id(environ),
        "slurm.job.id.raw": raw_id,
        "slurm.array.job_id": environ.get("SLURM_ARRAY_JOB_ID") or raw_id,
        "slurm.array.task_id": environ.get("SLURM_ARRAY_TASK_ID") or "0",
        "slurm.array.count": 1,
        "slurm.restart_count": 0,
        **_typed(values),
        **_typed({"slurm.head_node.name": None if in_step else environ.get("SLURMD_NODENAME")}),
        "nv.dl.job.uuid": derive_nv_dl_job_uuid(environ),
    }


def _array_task(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """(job id of the array, task id) if this is a task of an array."""
    job, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return (job, task) if job and task else None


def _job_id(environ: Mapping[str, str]) -> str | None:
    task = _array_task(environ)
    return "_".join(task) if task else environ.get("SLURM_JOB_ID")


def _uuid(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name))


def derive_nv_dl_job_uuid(environ: Mapping[str, str] | None = None) -> str:
    """An id that all processes of a SLURM job, or of all tasks of an array, work out alike.

    Args:
        environ: default: os.environ.
    """
    environ = os.environ if environ is None else environ
    task = _array_task(environ)
    job = task[0] if task else environ.get("SLURM_JOB_ID") or "nojob"
    return _uuid(f"nemo.lens.job/{environ.get('SLURM_CLUSTER_NAME') or 'nocluster'}/{job}")


def derive_nv_dl_run_uuid(environ: Mapping[str, str] | None = None, *, run_id: str | None = None) -> str | None:
    """An id that all processes of one attempt at a job work out alike; a restart has another.

    Args:
        environ: default: os.environ.
        run_id: stands for the job outside SLURM; default: TORCHELASTIC_RUN_ID. Without either there is no id: None.
    """
    environ = os.environ if environ is None else environ
    elastic_restarts = environ.get("TORCHELASTIC_RESTART_COUNT")
    job = _job_id(environ)
    if not job:
        run_id = run_id or environ.get("TORCHELASTIC_RUN_ID")
        return _uuid(f"nemo.lens.run/local/{run_id}/te{elastic_restarts or 0}") if run_id else None
    name = f"nemo.lens.run/{environ.get('SLURM_CLUSTER_NAME') or 'nocluster'}/{job}"
    if not _array_task(environ):
        name += f"/sr{environ.get('SLURM_RESTART_COUNT') or 0}"
    if elastic_restarts:
        name += f"/te{elastic_restarts}"
    return _uuid(name)
