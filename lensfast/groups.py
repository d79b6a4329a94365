"""Span groups: names and presets, and how a spec string becomes a set of names.

Two generations live here side by side. `SpanRegistry` is the newer: each library registers its groups under a
namespace. `SpanGroup` is the older: a class that a consumer subclasses and passes as `span_group_cls`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

logger = logging.getLogger(__name__)

ALL = "all"


def spec_tokens(spec: str) -> Iterator[str]:
    """The lower-cased, stripped, non-blank parts of a comma-separated spec."""
    for token in spec.split(","):
        token = token.strip().lower()
        if token:
            yield token


class SpanGroup:
    """The eight groups of a training job, and the base class of older consumers' own group classes.

    A subclass adds constants and replaces `ALL_GROUPS` and `_PRESETS` as a whole.
    """

    JOB = "job"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    MODEL_INIT = "model_init"
    LOAD_CHECKPOINT = "load_checkpoint"
    STEP = "step"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"

    ALL_GROUPS: ClassVar[frozenset[str]] = frozenset(
        {JOB, CHECKPOINT, EVALUATE, MODEL_INIT, LOAD_CHECKPOINT, STEP, FORWARD_BACKWARD, OPTIMIZER}
    )
    _PRESETS: ClassVar[dict[str, frozenset[str]]] = {
        "default": frozenset({JOB, CHECKPOINT, EVALUATE}),
        "per_step": ALL_GROUPS,
        "all": ALL_GROUPS,
    }

    @classmethod
    def resolve(cls, spec: str) -> frozenset[str]:
        """The groups that a spec such as `"default,step"` names.

        Args:
            spec: preset and group names, comma-separated, in any case; a preset shadows a group of its name.

        Raises:
            ValueError: a name is neither a preset nor a group of this class.
        """
        groups: set[str] = set()
        for token in spec_tokens(spec):
            if token in cls._PRESETS:
                groups |= cls._PRESETS[token]
            elif token in cls.ALL_GROUPS:
                groups.add(token)
            else:
                valid = ", ".join(sorted({*cls._PRESETS, *cls.ALL_GROUPS}))
                raise ValueError(f"Unknown span group or preset {token!r} in {spec!r}; valid names: {valid}")
        return frozenset(groups)


class RegistrySnapshot(NamedTuple):
    """The registry at one moment: namespace to groups, namespace to preset name to members."""

    groups: dict[str, frozenset[str]]
    presets: dict[str, dict[str, frozenset[str]]]

    def all_groups(self) -> frozenset[str]:
        return frozenset().union(*self.groups.values())

    def all_presets(self) -> dict[str, frozenset[str]]:
        """Presets of all namespaces united by name, without members that nobody has registered, and `all`."""
        known = self.all_groups()
        united: dict[str, frozenset[str]] = {}
        for presets in self.presets.values():
            for name, members in presets.items():
                united[name] = united.get(name, frozenset()) | (members & known)
        united[ALL] = known
        return united

    def resolve(self, spec: str) -> tuple[frozenset[str], frozenset[str]]:
        """(enabled, pending): the groups that `spec` names, and the names in it that nobody has registered."""
        known, presets = self.all_groups(), self.all_presets()
        enabled: set[str] = set()
        pending: set[str] = set()
        for token in spec_tokens(spec):
            if token in presets:
                enabled |= presets[token]
            elif token in known:
                enabled.add(token)
            else:
                pending.add(token)
        return frozenset(enabled), frozenset(pending)


def _names(values: Iterable[str], what: str) -> frozenset[str]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a collection of names, such as {{'step', 'layer'}}, not {values!r}")
    names = set()
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{what} must hold names (str), not {value!r}")
        name = value.strip().lower()
        if not name:
            raise ValueError(f"{what} must not hold an empty group name: {value!r}")
        names.add(name)
    return frozenset(names)


class SpanRegistry:
    """The span groups of this process, registered by each library under its namespace.

    Group names are flat: two namespaces that register one name share it. Presets of one name unite over namespaces.
    Names are stripped and lower-cased. All methods are thread-safe; each change re-resolves the live spec at once.
    """

    _LOCK = threading.RLock()
    _GROUPS: ClassVar[dict[str, frozenset[str]]] = {}
    _PRESETS: ClassVar[dict[str, dict[str, frozenset[str]]]] = {}
    # Set by lensfast.state, which imports this module: called after each change, with no lock held.
    _on_change: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @classmethod
    def register(
        cls,
        namespace: str,
        groups: Iterable[str],
        presets: Mapping[str, Iterable[str]] | None = None,
        *,
        allow_override: bool = False,
    ) -> None:
        """Add a library's groups and presets.

        Args:
            namespace: the library's name, such as `"megatron"`.
            groups: group names; may be empty. `all` is reserved.
            presets: preset name to group names; a member need not be registered yet (that is logged). `all` is
                reserved: it always means every registered group.
            allow_override: replace an earlier registration of this namespace as a whole, and share group names with
                other namespaces without a warning.

        Raises:
            TypeError: an argument is of the wrong type (a str for `groups`, a name that is not a str).
            ValueError: empty namespace or name, a reserved name, or a namespace that is already registered.
                Nothing was changed then.
        """
        if namespace and not isinstance(namespace, str):
            raise TypeError(f"namespace must be a non-empty string, not {namespace!r}")
        if not namespace or not namespace.strip():
            raise ValueError("namespace must be a non-empty string")
        group_names = _names(groups, "groups")
        if presets is not None and not isinstance(presets, Mapping):
            raise TypeError(f"presets must map a preset's name to group names, not {presets!r}")
        preset_names = {}
        for name, members in (presets or {}).items():
            (key,) = _names([name], "preset names")
            preset_names[key] = _names(members, f"preset {name!r}")
        for what, names in (("group", group_names), ("preset", preset_names)):
            if ALL in names:
                raise ValueError(f"{what} name {ALL!r} is reserved: it always means every registered group")

        with cls._LOCK:
            if namespace in cls._GROUPS and not allow_override:
                raise ValueError(
                    f"span-group namespace {namespace!r} is already registered; pass allow_override=True to replace it"
                )
            cls._GROUPS[namespace] = group_names
            cls._PRESETS[namespace] = preset_names
            snapshot = cls._snapshot()
        if not allow_override:
            for other, theirs in snapshot.groups.items():
                shared = group_names & theirs
                if other != namespace and shared:
                    logger.warning(
                        "span groups %s of namespace %r are also registered by %r: one gate serves both",
                        ", ".join(sorted(shared)), namespace, other,
                    )  # fmt: skip
        known = snapshot.all_groups()
        for name, members in preset_names.items():
            if unknown := members - known:
                logger.warning(
                    "preset %r of namespace %r names groups that no library has registered yet: %s "
                    "(ignored until one does)",
                    name, namespace, ", ".join(sorted(unknown)),
                )  # fmt: skip
        if getattr(sys.modules.get(f"{__package__}.handle"), "_INITIALIZED", False):
            logger.warning(
                "span-group namespace %r was registered after setup_telemetry(): its groups take effect now, "
                "but spans before this moment were not recorded; register when the library is imported",
                namespace,
            )
        cls._on_change()

    @classmethod
    def unregister(cls, namespace: str) -> None:
        """Remove a namespace; groups that no other namespace has are off at once.

        Raises:
            ValueError: the namespace is not registered.
        """
        with cls._LOCK:
            if namespace not in cls._GROUPS:
                raise ValueError(f"span-group namespace {namespace!r} is not registered")
            del cls._GROUPS[namespace], cls._PRESETS[namespace]
        cls._on_change()

    @classmethod
    def clear(cls) -> None:
        """Remove every namespace."""
        with cls._LOCK:
            cls._GROUPS.clear()
            cls._PRESETS.clear()
        cls._on_change()

    @classmethod
    def groups(cls) -> frozenset[str]:
        """Every registered group."""
        return cls._snapshot().all_groups()

    @classmethod
    def namespaces(cls) -> list[str]:
        """The registered namespaces, sorted."""
        return sorted(cls._snapshot().groups)

    @classmethod
    def presets(cls) -> dict[str, frozenset[str]]:
        """Preset name to its registered members, united over namespaces; always holds `all`."""
        return cls._snapshot().all_presets()

    @classmethod
    def resolve(cls, spec: str) -> tuple[frozenset[str], frozenset[str]]:
        """(enabled, pending) of a spec: the groups it names, and the names in it that nobody has registered.

        Never raises for unknown names.
        """
        return cls._snapshot().resolve(spec)

    @classmethod
    def _snapshot(cls) -> RegistrySnapshot:
        with cls._LOCK:
            return RegistrySnapshot(dict(cls._GROUPS), dict(cls._PRESETS))


class BuiltInGroups(SpanGroup):
    """SpanGroup for programs that name no class: where a library has registered a group, its presets decide on that."""

    @classmethod
    def resolve(cls, spec: str) -> frozenset[str]:
        return super().resolve(spec) - SpanRegistry.groups()


def resolve_with_class(
    spec: str, span_group_cls: Any, snapshot: RegistrySnapshot
) -> tuple[frozenset[str], frozenset[str]]:
    """(enabled, pending) where an older group class and the registry are both in use.

    A name counts if either knows it, and means what both of them say together.
    """
    from_registry, unknown = snapshot.resolve(spec)
    if not snapshot.groups:
        unknown |= {ALL}  # of an empty registry it names nothing, so the class is to say whether it is a name
    try:
        return span_group_cls.resolve(spec) | from_registry, frozenset()
    except ValueError:
        pass
    enabled = set(from_registry)
    pending = set()
    for token in spec_tokens(spec):
        try:
            enabled |= span_group_cls.resolve(token)
        except ValueError:
            if token in unknown:
                pending.add(token)
    return frozenset(enabled), frozenset(pending)
