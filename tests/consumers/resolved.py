"""The five functions, real or not, under one name: how NeMo Gym and the resiliency extension import them."""

try:
    from nemo.lens.helpers import managed_span, safe_set_span_attributes, span_cm, trace_fn
    from nemo.lens.state import is_span_group_enabled

    NEMO_LENS_AVAILABLE = True
except ImportError:
    from .fallbacks import is_span_group_enabled, managed_span, safe_set_span_attributes, span_cm, trace_fn

    NEMO_LENS_AVAILABLE = False

__all__ = [
    "NEMO_LENS_AVAILABLE",
    "is_span_group_enabled",
    "managed_span",
    "safe_set_span_attributes",
    "span_cm",
    "trace_fn",
]
