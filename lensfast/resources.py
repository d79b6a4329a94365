"""What the process can tell about where it runs: resource attributes of the host, SLURM and Kubernetes."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

_SLURM = {
    "SLURM_JOB_ID": "slurm.job.id",
    "SLURM_JOB_NAME": "slurm.job.name",
    "SLURM_NODELIST": "slurm.nodelist",
    "SLURM_NNODES": "slurm.nnodes",
    "SLURM_NTASKS": "slurm.ntasks",
    "SLURM_PARTITION": "slurm.partition",
    "SLURM_CLUSTER_NAME": "slurm.cluster.name",
}
_KUBERNETES = {
    "K8S_NAMESPACE": "k8s.namespace.name",
    "K8S_POD_NAME": "k8s.pod.name",
    "K8S_POD_UID": "k8s.pod.uid",
    "K8S_NODE_NAME": "k8s.node.name",
    "K8S_CONTAINER_NAME": "k8s.container.name",
    "K8S_JOB_NAME": "k8s.job.name",
}


def detect_resource() -> dict[str, Any]:
    """All that is found, later sources winning: host, SLURM, Kubernetes."""
    return {**detect_local(), **detect_slurm(), **detect_kubernetes()}


def detect_local() -> dict[str, Any]:
    """host.name, process.pid and, where it is known, host.gpu.count."""
    attributes: dict[str, Any] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    gpus = _gpu_count()
    if gpus is not None:
        attributes["host.gpu.count"] = gpus
    return attributes


def _gpu_count() -> int | None:
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


def detect_slurm() -> dict[str, Any]:
    """slurm.* attributes as strings; nothing outside a SLURM job."""
    if not os.environ.get("SLURM_JOB_ID"):
        return {}
    return {key: os.environ[name] for name, key in _SLURM.items() if os.environ.get(name)}


def detect_kubernetes() -> dict[str, Any]:
    """k8s.* attributes that the pod's manifest put into the environment; nothing outside Kubernetes."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ and not os.path.exists("/var/run/secrets/kubernetes.io"):
        return {}
    attributes = {key: os.environ[name] for name, key in _KUBERNETES.items() if os.environ.get(name)}
    if hostname := os.environ.get("HOSTNAME"):
        attributes.setdefault("k8s.pod.name", hostname)
    return attributes
