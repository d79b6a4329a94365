"""The configuration of a job's telemetry, and how it is read from the environment."""

from __future__ import annotations

import logging
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ._backend import TRUE_WORDS
from .groups import BuiltInGroups, SpanRegistry, resolve_with_class
from .state import check_spec

logger = logging.getLogger(__name__)

_FALSE_WORDS = frozenset({"0", "false", "no", "off"})
_Value = TypeVar("_Value")


@dataclass
class NemoLensConfig:
    """What setup_telemetry needs to know. A plain mutable record; from_env() fills it from the environment."""

    enabled: bool = False
    """Whether to set up telemetry at all."""
    service_name: str = "nemo"
    """The resource attribute service.name."""
    export_strategy: str = "single_rank"
    """Which ranks export: single_rank, all_ranks, sampled, first_rank_per_node or a registered name."""
    export_rank: int = -1
    """The rank that single_rank chooses; negative: the last one."""
    export_sample_rate: float = 1.0
    """The share of ranks, from 0.0 to 1.0, that `sampled` and the sampler choose."""
    sampler_enabled: bool = False
    """Whether to sample by rank; otherwise OTEL_TRACES_SAMPLER rules."""
    traces_enabled: bool = True
    metrics_enabled: bool = True
    logs_enabled: bool = False
    span_groups: str = "default"
    """The spec of enabled span groups, such as `"default,layer"`."""
    exporter: str = "otlp"
    """`"otlp"` or `"console"`."""
    run_id: str = ""
    """Names the run; if it is empty, ensure_run_id fills it in, which setup_telemetry calls."""
    user: str = ""
    wandb_entity: str = ""
    wandb_project: str = ""
    _span_group_cls: Any = field(default=None, repr=False)
    native_spans: bool = field(default=True, repr=False)
    """Whether spans are implemented in C, where the extension is present and the SDK is one that it knows."""

    def __post_init__(self) -> None:
        # Real rather than float: numpy's numbers, for one, are such.
        if not isinstance(self.export_sample_rate, numbers.Real) or not 0.0 <= self.export_sample_rate <= 1.0:
            raise ValueError(f"export_sample_rate must be from 0.0 to 1.0, not {self.export_sample_rate!r}")

    def check(self) -> None:
        """Find what a caller has put into a field by mistake, before it fails half-way through a set-up.

        Raises:
            TypeError: a field that is going to be used is of a type that can't be; the text names it.
        """
        used: dict[str, type] = {"span_groups": str} if self.enabled else {}
        if self.export_strategy == "single_rank":
            used["export_rank"] = numbers.Real
        if self.export_strategy == "sampled" or self.sampler_enabled:
            used["export_sample_rate"] = numbers.Real
        for name, wanted in used.items():
            value = getattr(self, name)
            if not isinstance(value, wanted):
                what = "a str" if wanted is str else "a number"
                raise TypeError(f"NemoLensConfig.{name} must be {what}, not {value!r}")
        for name in ("enabled", "sampler_enabled", "traces_enabled", "metrics_enabled", "logs_enabled", "native_spans"):
            value = getattr(self, name, True)
            if isinstance(value, str):
                logger.warning("NemoLensConfig.%s is the text %r, which counts as %s", name, value, bool(value))

    @property
    def resolved_span_groups(self) -> frozenset[str]:
        """The groups that `span_groups` names now.

        By the group class, or SpanGroup if there is none, and the registry, together.

        Raises:
            ValueError: neither knows a name, and there is a group class or the registry is empty.
        """
        snapshot = SpanRegistry._snapshot()
        span_group_cls = self._span_group_cls or BuiltInGroups
        if self._span_group_cls is not None or not snapshot.groups:
            check_spec(self.span_groups, span_group_cls)
        return resolve_with_class(self.span_groups, span_group_cls, snapshot)[0]

    @classmethod
    def from_env(
        cls, prefix: str = "NEMO_LENS", fallback_prefix: str | None = None, span_group_cls: Any = None
    ) -> NemoLensConfig:
        """Read `<prefix>_<NAME>`, or `<fallback_prefix>_<NAME>` where the former is unset or blank.

        Args:
            prefix: such as `"MEGATRON_OTEL"`.
            fallback_prefix: such as `"NEMO_LENS"`; there is none by itself.
            span_group_cls: a SpanGroup subclass that resolves `span_groups`.

        Raises:
            ValueError: a value can't be read; the text names the variable and the allowed values.
        """

        def read(name: str, default: _Value, parse: Callable[[str], _Value], allowed: str) -> _Value:
            variables = [f"{prefix}_{name}"] + ([f"{fallback_prefix}_{name}"] if fallback_prefix else [])
            for variable in variables:
                text = os.environ.get(variable, "").strip()
                if not text:
                    continue
                try:
                    return parse(text)
                except ValueError:
                    source = "" if variable == variables[0] else f" (in whose place {variable} was read)"
                    raise ValueError(f"{variables[0]}{source} must be {allowed}, not {text!r}") from None
            return default

        def flag(name: str, default: bool) -> bool:
            return read(name, default, _parse_bool, "one of 1, true, yes, on, 0, false, no, off")

        def text(name: str, default: str) -> str:
            return read(name, default, str, "text")

        return cls(
            enabled=flag("ENABLED", False),
            service_name=os.environ.get("OTEL_SERVICE_NAME", "").strip() or "nemo",
            export_strategy=text("EXPORT_STRATEGY", "single_rank"),
            export_rank=read("EXPORT_RANK", -1, int, "an integer (negative: the last rank)"),
            export_sample_rate=read(
                "EXPORT_SAMPLE_RATE", 1.0, _parse_rate, "a number from 0.0 to 1.0 (export_sample_rate)"
            ),
            sampler_enabled=flag("SAMPLER_ENABLED", False),
            traces_enabled=flag("TRACES_ENABLED", True),
            metrics_enabled=flag("METRICS_ENABLED", True),
            logs_enabled=flag("LOGS_ENABLED", False),
            span_groups=text("SPAN_GROUPS", "default"),
            exporter=text("EXPORTER", "otlp"),
            run_id=text("RUN_ID", ""),
            user=text("USER_ID", ""),
            wandb_entity=os.environ.get("WANDB_ENTITY", ""),
            wandb_project=os.environ.get("WANDB_PROJECT", ""),
            _span_group_cls=span_group_cls,
            native_spans=flag("NATIVE_SPANS", True),
        )


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    raise ValueError(text)


def _parse_rate(text: str) -> float:
    rate = float(text)
    if not 0.0 <= rate <= 1.0:
        raise ValueError(text)
    return rate
