"""lensfast: group-gated OpenTelemetry spans for training code, with the gate in C.

The API is that of nemo.lens, all generations of it. See README.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import trace as _trace

from ._backend import backend as backend  # these four not in __all__: programs say `from nemo.lens import *`
from ._backend import span_group
from ._compile import hook as _hook_compiler
from ._install import accelerate as accelerate
from ._install import install as install
from ._install import uninstall as uninstall
from .config import NemoLensConfig
from .distributed import broadcast_trace_context, create_linked_span
from .groups import SpanGroup, SpanRegistry
from .handle import TelemetryHandle, ensure_run_id, setup_telemetry
from .helpers import (
    DEFAULT_REDACT_KEYS,
    managed_span,
    redact_value,
    safe_set_span_attributes,
    span_attributes,
    span_cm,
    trace_fn,
)
from .package_info import (
    __contact_emails__,
    __contact_names__,
    __download_url__,
    __homepage__,
    __package_name__,
    __repository_url__,
    __version__,
)
from .propagation import carry_context, extract_context, inject_context
from .state import (
    enabled_span_groups,
    is_span_group_enabled,
    pending_span_groups,
    set_enabled_span_groups,
)
from .strategies import (
    ExportStrategy,
    register_export_strategy,
    registered_strategies,
    unregister_export_strategy,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

__all__ = [
    "DEFAULT_REDACT_KEYS",
    "ExportStrategy",
    "NemoLensConfig",
    "SpanGroup",
    "SpanRegistry",
    "TelemetryHandle",
    "__contact_emails__",
    "__contact_names__",
    "__download_url__",
    "__homepage__",
    "__package_name__",
    "__repository_url__",
    "__version__",
    "broadcast_trace_context",
    "carry_context",
    "create_linked_span",
    "enabled_span_groups",
    "ensure_run_id",
    "extract_context",
    "get_meter",
    "get_tracer",
    "inject_context",
    "is_span_group_enabled",
    "managed_span",
    "pending_span_groups",
    "redact_value",
    "register_export_strategy",
    "registered_strategies",
    "safe_set_span_attributes",
    "set_enabled_span_groups",
    "setup_telemetry",
    "span_attributes",
    "span_cm",
    "span_group",
    "trace_fn",
    "unregister_export_strategy",
]


_hook_compiler()


def __getattr__(name: str) -> Any:
    # Recent consumers import it from here; few need the module.
    if name == "derive_nv_dl_run_uuid":
        from .resources.slurm import derive_nv_dl_run_uuid

        return derive_nv_dl_run_uuid
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_tracer(name: str = "nemo.lens") -> Tracer:
    """The tracer called `name` of the provider that is global now."""
    return _trace.get_tracer(name)


def get_meter(name: str = "nemo.lens") -> Meter:
    """The meter called `name` of the provider that is global now."""
    from opentelemetry import metrics

    return metrics.get_meter(name)
