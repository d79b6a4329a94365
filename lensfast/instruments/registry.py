"""Metrics by name: a library registers a group of specs once and records values by key.

Instruments are made at the first use with a meter and kept as long as that meter lives. Recording never raises. All of
it is thread-safe, except that observable instruments call their callbacks from the thread that exports.
"""

from __future__ import annotations

import decimal
import functools
import logging
import numbers
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

__all__ = [
    "METRIC_KINDS",
    "OBSERVABLE_METRIC_KINDS",
    "MetricSpec",
    "create_metric_instruments",
    "record_metrics",
    "register_metric_group",
    "registered_metric_groups",
    "unregister_metric_group",
]

logger = logging.getLogger(__name__)

_METHODS = {"gauge": "set", "histogram": "record", "counter": "add", "up_down_counter": "add"}
OBSERVABLE_METRIC_KINDS = frozenset({"observable_gauge", "observable_counter", "observable_up_down_counter"})
METRIC_KINDS = OBSERVABLE_METRIC_KINDS | _METHODS.keys()


@dataclass(frozen=True)
class MetricSpec:
    """One instrument of a group.

    Raises:
        ValueError: empty key or name, unknown kind, an observable kind without a callback, a callback or bucket
            boundaries on a kind that has none.
        TypeError: the callback can't be called.
    """

    key: str
    """What record_metrics calls it."""
    name: str
    """The instrument's name, such as `"mylib.queue.length"`."""
    kind: str = "gauge"
    """One of METRIC_KINDS."""
    unit: str = ""
    """A UCUM unit, such as `"s"`, `"By"` or `"{token}"`."""
    description: str = ""
    callback: Callable[[CallbackOptions], Iterable[Observation]] | None = None
    """For the observable kinds: called at each export, returns opentelemetry.metrics.Observation objects."""
    bucket_boundaries: Sequence[float] | None = field(default=None, kw_only=True)
    """For histograms: upper bounds in the metric's unit, if OpenTelemetry is new enough. New in lensfast."""

    def __post_init__(self) -> None:
        for what, value in (("key", self.key), ("name", self.name)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"a metric's {what} must be a non-empty string, not {value!r}")
        if self.kind not in METRIC_KINDS:
            kinds = ", ".join(sorted(METRIC_KINDS))
            raise ValueError(f"metric {self.key!r}: unknown kind {self.kind!r}; the kinds are {kinds}")
        if self.kind in OBSERVABLE_METRIC_KINDS:
            if self.callback is None:
                raise ValueError(f"metric {self.key!r}: the kind {self.kind!r} needs a callback")
            if not callable(self.callback):
                raise TypeError(f"metric {self.key!r}: the callback {self.callback!r} can't be called")
        elif self.callback is not None:
            raise ValueError(f"metric {self.key!r}: the kind {self.kind!r} takes no callback")
        if self.bucket_boundaries is not None and self.kind != "histogram":
            raise ValueError(f"metric {self.key!r}: only a histogram has bucket_boundaries")


# Reentrant, since a signal handler may record. Never held while an observable is made: the SDK makes those under the
# lock under which it runs callbacks, and a callback may record.
_LOCK = threading.RLock()
_groups: dict[str, MetricGroup] = {}
_unknown_groups: set[str] = set()

if hasattr(os, "register_at_fork"):
    # A fork while another thread held it must not leave the child waiting for ever.
    os.register_at_fork(after_in_child=lambda: _LOCK._at_fork_reinit())  # type: ignore[attr-defined]


class MetricGroup:
    """Some specs, and their instruments for each meter that was used."""

    def __init__(self, name: str, specs: Iterable[MetricSpec]) -> None:
        self.name = name
        self.specs = {spec.key: spec for spec in specs}
        self.instruments: WeakKeyDictionary[Meter, dict[str, Any]] = WeakKeyDictionary()
        self._reported: set[str] = set()

    def create(self, meter: Meter) -> dict[str, Any]:
        """The instruments on `meter`, by key; one that could not be made is logged and missing."""
        instruments = self.instruments.get(meter)
        if instruments is not None:
            return instruments
        with _LOCK:
            instruments = self.instruments.get(meter)
            if instruments is not None:
                return instruments
            instruments = {}
            self._create(meter, instruments, observable=False)
            self.instruments[meter] = instruments
        self._create(meter, instruments, observable=True)
        return instruments

    def _create(self, meter: Meter, instruments: dict[str, Any], observable: bool) -> None:
        for spec in self.specs.values():
            if (spec.kind in OBSERVABLE_METRIC_KINDS) is not observable:
                continue
            options: dict[str, Any] = {"name": spec.name, "description": spec.description}
            if spec.unit:
                options["unit"] = spec.unit
            if observable:
                options["callbacks"] = [functools.partial(_observe, self.name, spec.key)]
            try:
                create = getattr(meter, f"create_{spec.kind}")
                try:
                    if spec.bucket_boundaries is None:
                        instruments[spec.key] = create(**options)
                    else:
                        instruments[spec.key] = create(
                            **options, explicit_bucket_boundaries_advisory=list(spec.bucket_boundaries)
                        )
                except TypeError:
                    if spec.bucket_boundaries is None:
                        raise
                    instruments[spec.key] = create(**options)  # an API that does not know the parameter
            except Exception as failure:
                self._report(spec.key, f"could not make the instrument {spec.name!r}", failure)

    def record(self, meter: Meter, values: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> None:
        """Record `values` by key. Never raises."""
        try:
            instruments = self.create(meter)
        except Exception as failure:
            self._report("", f"could not make instruments on {meter!r}", failure)
            return
        for key, value in values.items():
            if value is None:
                continue
            spec = self.specs.get(key)
            if spec is None:
                self._report(key, f"is not one of its keys ({', '.join(self.specs)})")
            elif spec.kind in OBSERVABLE_METRIC_KINDS:
                self._report(key, f"is an {spec.kind}, whose callback gives its values")
            elif key in instruments:
                try:
                    if attributes is not None and not isinstance(attributes, Mapping):
                        raise TypeError(f"attributes must be a mapping, not {attributes!r}")
                    if not isinstance(value, (numbers.Real, decimal.Decimal)):
                        raise TypeError(f"not a number: {value!r} (a tensor or array: by .item())")
                    # Exporters can't write numpy's scalars.
                    number = int(value) if isinstance(value, numbers.Integral) else float(value)
                    emit = getattr(instruments[key], _METHODS[spec.kind])
                    if attributes is None:
                        emit(number)
                    else:
                        emit(number, attributes=attributes)
                except Exception as failure:
                    self._report(key, "could not be recorded", failure)

    def _report(self, key: str, message: str, failure: Exception | None = None) -> None:
        _warn_once(self._reported, key, f"metric {key!r} of group {self.name!r}: {message}", failure)


def _warn_once(reported: set[str], key: str, message: str, failure: Exception | None = None) -> None:
    if key not in reported:
        reported.add(key)
        logger.warning("%s (the program goes on; later failures of it are not logged)", message, exc_info=failure)


def _observe(group: str, key: str, options: CallbackOptions) -> Iterable[Observation]:
    """The callback of an observable: an instrument can't be removed from a meter, but its spec can be replaced."""
    found = _groups.get(group)
    spec = found.specs.get(key) if found else None
    return () if spec is None or spec.callback is None else spec.callback(options)


def register_metric_group(group: str, specs: Iterable[MetricSpec], *, allow_override: bool = False) -> None:
    """Make the metrics of a library known under the name `group`.

    Args:
        group: such as `"mylib"` or `"mylib.loader"`.
        specs: MetricSpec objects with different keys.
        allow_override: replace an earlier registration as a whole; what was logged about it may be logged again.

    Raises:
        TypeError: something in `specs` is not a MetricSpec.
        ValueError: empty group, no specs, a key twice, or a group already registered and not `allow_override`.
            Nothing was changed then.
    """
    if not isinstance(group, str) or not group:
        raise ValueError(f"a metric group's name must be a non-empty string, not {group!r}")
    listed = tuple(specs)
    if not listed:
        raise ValueError(f"metric group {group!r} needs at least one MetricSpec")
    for spec in listed:
        if not isinstance(spec, MetricSpec):
            raise TypeError(f"metric group {group!r} takes MetricSpec objects, not {spec!r}")
    found = MetricGroup(group, listed)
    if len(found.specs) < len(listed):
        keys = [spec.key for spec in listed]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"metric group {group!r} has a duplicate key: {', '.join(twice)}")
    with _LOCK:
        if group in _groups and not allow_override:
            raise ValueError(f"metric group {group!r} is already registered; pass allow_override=True to replace it")
        _groups[group] = found
        _unknown_groups.discard(group)


def unregister_metric_group(group: str) -> None:
    """Forget a group: from now on its metrics are not recorded, and its observables yield nothing.

    Raises:
        ValueError: it is not registered.
    """
    with _LOCK:
        if group not in _groups:
            raise ValueError(f"metric group {group!r} is not registered")
        del _groups[group]


def registered_metric_groups() -> dict[str, tuple[MetricSpec, ...]]:
    """Group name to specs."""
    with _LOCK:
        return {name: tuple(group.specs.values()) for name, group in _groups.items()}


def create_metric_instruments(meter: Meter, group: str) -> None:
    """Make the instruments of `group` on `meter` now, so that its observables are exported before anything is recorded.

    Never raises: an unregistered group or an instrument that can't be made is logged once.
    """
    record_metrics(meter, group)


def record_metrics(
    meter: Meter,
    group: str,
    values: Mapping[str, Any] | None = None,
    /,
    *,
    attributes: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Record values of a group's metrics: a gauge is set, a histogram records, counters add.

    Never raises: an unregistered group is logged once, and so is, for each key, one that the group lacks, one that is
    observable, a value that is not a number and whatever OpenTelemetry raises.

    Args:
        meter: such as TelemetryHandle.meter. Record only where TelemetryHandle.is_exporting.
        group: a registered group.
        values: key to number; None is skipped.
        attributes: go on every point. A metric whose key is `attributes` is recorded through `values`.
        **kwargs: more values, which win over `values`.
    """
    try:
        found = _groups.get(group)
        if found is not None:
            found.record(meter, {**(values or {}), **kwargs}, attributes)
            return
        failure = None
    except Exception as error:
        failure = error
    problem = "nobody has registered it" if failure is None else "nothing was recorded"
    _warn_once(_unknown_groups, str(group), f"metric group {group!r}: {problem}", failure)
