"""Resource attributes of a Kubernetes pod."""

from __future__ import annotations

import os
from typing import Any

_KUBERNETES = {
    "K8S_NAMESPACE": "k8s.namespace.name",
    "K8S_POD_NAME": "k8s.pod.name",
    "K8S_POD_UID": "k8s.pod.uid",
    "K8S_NODE_NAME": "k8s.node.name",
    "K8S_CONTAINER_NAME": "k8s.container.name",
    "K8S_JOB_NAME": "k8s.job.name",
}


def detect_kubernetes() -> dict[str, Any]:
    """k8s.* attributes that the pod's manifest put into the environment; nothing outside Kubernetes."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST") and not os.path.exists("/var/run/secrets/kubernetes.io"):
        return {}
    attributes = {key: os.environ[name] for name, key in _KUBERNETES.items() if os.environ.get(name)}
    if hostname := os.environ.get("HOSTNAME"):
        attributes.setdefault("k8s.pod.name", hostname)
    return attributes
