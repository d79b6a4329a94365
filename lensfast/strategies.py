"""Export strategies: which ranks of a job export."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

ExportStrategy = Callable[[Any, int, int], bool]
"""(config, rank, world_size) -> whether that rank exports."""


def rank_is_sampled(rank: int, rate: float) -> bool:
    """Whether `rank` is among the share `rate` of ranks: the same answer in every process and every run."""
    import hashlib  # loads OpenSSL, which a job that takes no samples does without

    return int(hashlib.md5(str(rank).encode(), usedforsecurity=False).hexdigest(), 16) % 10000 / 10000 < rate


def _all_ranks(config: Any, rank: int, world_size: int) -> bool:
    return True


def _single_rank(config: Any, rank: int, world_size: int) -> bool:
    return bool(rank == (config.export_rank if config.export_rank >= 0 else world_size - 1))


def _sampled(config: Any, rank: int, world_size: int) -> bool:
    return rank_is_sampled(rank, config.export_sample_rate)


def _first_rank_per_node(config: Any, rank: int, world_size: int) -> bool:
    text = os.environ.get("LOCAL_RANK", "").strip()
    try:
        return int(text or "0") == 0
    except ValueError:
        raise ValueError(f"export_strategy first_rank_per_node: LOCAL_RANK must be an integer, not {text!r}") from None


_REGISTRY: dict[str, ExportStrategy] = {
    "all_ranks": _all_ranks,
    "single_rank": _single_rank,
    "sampled": _sampled,
    "first_rank_per_node": _first_rank_per_node,
}
_REGISTRY_LOCK = threading.Lock()
BUILTIN_STRATEGIES = frozenset(_REGISTRY)


def register_export_strategy(name: str, strategy: ExportStrategy, *, allow_override: bool = False) -> None:
    """Make `strategy` known to NemoLensConfig.export_strategy under `name`. Thread-safe.

    Raises:
        TypeError: `strategy` can't be called.
        ValueError: empty name, or a name already registered and not `allow_override`.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"an export strategy's name must be a non-empty string, not {name!r}")
    if not callable(strategy):
        raise TypeError(f"an export strategy is called as strategy(config, rank, world_size); {strategy!r} can't be")
    with _REGISTRY_LOCK:
        if name in _REGISTRY and not allow_override:
            raise ValueError(f"export strategy {name!r} is already registered; pass allow_override=True to replace it")
        _REGISTRY[name] = strategy


def unregister_export_strategy(name: str) -> None:
    """Forget a strategy.

    Raises:
        ValueError: `name` is built-in or not registered.
    """
    with _REGISTRY_LOCK:
        if name in BUILTIN_STRATEGIES:
            raise ValueError(f"export strategy {name!r} is built-in and stays")
        if name not in _REGISTRY:
            raise ValueError(f"export strategy {name!r} is not registered")
        del _REGISTRY[name]


def get_export_strategy(name: str) -> ExportStrategy:
    """The strategy called `name`.

    Raises:
        ValueError: there is none.
    """
    with _REGISTRY_LOCK:
        if name in _REGISTRY:
            return _REGISTRY[name]
        known = ", ".join(sorted(_REGISTRY))
    raise ValueError(f"Unknown export_strategy {name!r}; registered: {known}")


def registered_strategies() -> list[str]:
    """The names of all strategies, sorted."""
    with _REGISTRY_LOCK:
        return sorted(_REGISTRY)
