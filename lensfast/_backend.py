"""Chooses the gate, once: the compiled one where it was built, else the Python one."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

__all__ = ["TRUE_WORDS", "backend", "backend_reason", "compiled", "gate", "span_group"]

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})

if TYPE_CHECKING:
    from . import _gate_py as gate

    backend: str
    backend_reason: str
elif os.environ.get("LENSFAST_PURE_PYTHON", "").strip().lower() in TRUE_WORDS:
    from . import _gate_py as gate

    backend, backend_reason = "python", "LENSFAST_PURE_PYTHON is set"
else:
    try:
        # `from . import _gate` would raise the same ImportError for a missing module as for a broken one.
        gate = importlib.import_module(f"{__package__}._gate")
    except ModuleNotFoundError:
        from . import _gate_py as gate

        backend = "python"
        backend_reason = (
            "the C extension was not built when lensfast was installed: install a C compiler and the Python "
            "headers (Debian, Ubuntu: apt install gcc python3-dev), then reinstall lensfast, from "
            "source and not from pip's cache: pip install --force-reinstall --no-deps --no-cache-dir --no-binary "
            "lensfast lensfast (from a clone: . in place of the last word)"
        )
    except ImportError as error:
        from . import _gate_py as gate

        backend, backend_reason = "python", f"the C extension could not be loaded: {error}"
        warnings.warn(f"lensfast runs on its slower Python gate: {backend_reason}", RuntimeWarning, stacklevel=2)
    else:
        backend, backend_reason = "c", "the C extension is present"

# The compiled gate, which has more than the one in Python; None without it.
compiled: Any = gate if backend == "c" else None


def span_group(name: str) -> gate.GroupHandle:
    """The one handle of the span group `name`, for the hottest call sites.

    The handle is truthy while the group is enabled and follows every later change, so a site may keep it in a
    module constant: ``if LAYER: ...`` or ``with LAYER.span("model.layer"): ...``. The group need not be
    registered yet. A handle lives as long as the process; take one per group, not one per call.

    Args:
        name: the group's name, case-sensitive (registered names are lower-case).

    Returns:
        The GroupHandle of that name: always the same object for equal names.

    Raises:
        TypeError: `name` is not a str.
        ValueError: `name` is empty.

    Thread-safe. New in lensfast; the idea is the callsite interest of Rust's `tracing`.
    """
    if not isinstance(name, str):
        raise TypeError(f"span_group() takes a group name (str), not {type(name).__name__}")
    if not name:
        raise ValueError("span_group() takes a non-empty group name")
    return gate.span_group(name)
