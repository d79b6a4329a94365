"""Makes programs that import nemo.lens run on lensfast: install() in its place, accelerate() beside it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from . import _backend, handle, helpers, state, strategies
from ._import_hook import Loader, MetaPathFinder, OnImport, find_after, remove_finders
from .package_info import __version__

__all__ = ["accelerate", "install", "uninstall"]

logger = logging.getLogger("lensfast")

_OURS = __package__
_THEIRS = "nemo.lens"
# Consumers check where these come from; nothing else is renamed, so that pickles stay readable without install().
_PRESENTED = (helpers, state)
_HOT = ((helpers, ("managed_span", "span_cm", "trace_fn")), (state, ("is_span_group_enabled",)))
_NOT_INSTALLED = "accelerate() has no effect: nemo-lens is not installed (install() does without it)"
_ACCELERATED_VERSIONS = frozenset({"0.1.0"})

_lock = threading.RLock()
_undo: list[Callable[[], object]] = []  # what uninstall() does, last first

if hasattr(os, "register_at_fork"):
    # A fork while another thread held it must not leave the child waiting for ever.
    os.register_at_fork(after_in_child=lambda: _lock._at_fork_reinit())  # type: ignore[attr-defined]


def install() -> None:
    """Make `nemo.lens` and its submodules be lensfast, in this process, from now on.

    `import nemo.lens.helpers` then gives lensfast's own module object, whether nemo-lens is installed or not. A
    submodule that lensfast lacks still comes from an installed nemo-lens. A `nemo` package that belongs to somebody
    else keeps its place; only its `lens` is lensfast. Modules that imported nemo.lens before have their references
    replaced, and what they had set up (enabled groups, registrations, strategies) is taken over; functions they had
    already decorated stay as they are and follow lensfast's gate.

    Functions of `nemo.lens.helpers` and `nemo.lens.state` say so in their `__module__`. One INFO record on the logger
    `lensfast` says what was done. A second call does nothing; after accelerate(), it takes its place. Processes that
    are started by `spawn` or `exec` need a call of their own, or `lensfast run`. Call it from the main thread, early.
    """
    with _lock:
        if _is_installed():
            return
        _undo_all()
        finders = _LensFinder(), _NemoFinder()
        sys.meta_path.insert(0, finders[0])
        sys.meta_path.append(finders[1])
        _undo.append(lambda: remove_finders(*finders))
        try:
            replaced = _replace_imported()
        except BaseException:
            _undo_all()
            raise
        version = _nemo_lens_version()
        other = f"nemo-lens {version}, which is installed, is not used" if version else "nemo-lens is not installed"
        logger.info(
            "nemo.lens is lensfast %s (%s gate) from now on; %s; %d earlier references to it were replaced",
            __version__, _backend.backend, other, replaced,
        )  # fmt: skip


def accelerate() -> None:
    """Keep the nemo-lens that is installed, and give it lensfast's gate.

    Only `managed_span`, `span_cm`, `trace_fn` and `is_span_group_enabled` are replaced, wherever a module holds them;
    set-up, exporters, configuration and all the rest stay nemo-lens's. The gate follows nemo.lens.state, also where its
    `_ENABLED_GROUPS` is assigned to. Done at once where nemo.lens has been imported, else when it is.

    Knows nemo-lens 0.1.0. Any other version is left alone, with a warning; so is a missing one. One INFO record on the
    logger `lensfast` says what was done. A second call, or one after install(), does nothing. uninstall() reverses it.
    """
    with _lock:
        if _undo:
            if _is_installed():
                logger.info("accelerate() changes nothing: nemo.lens is lensfast, by install()")
            return
        if sys.modules.get(_THEIRS) is not None:
            _accelerate_imported()
        else:
            from importlib import util

            if util.find_spec("nemo") is None:
                logger.warning(_NOT_INSTALLED)
            finder = OnImport(_THEIRS, _accelerate_now, missing=lambda: logger.warning(_NOT_INSTALLED))
            sys.meta_path.insert(0, finder)
            _undo.append(lambda: remove_finders(finder))


def _accelerate_now() -> None:
    with _lock:
        _undo_all()
        _accelerate_imported()


def uninstall() -> None:
    """Reverse install() or accelerate(): `nemo.lens` is again what it was, and so are references taken before.

    References taken in between keep lensfast's functions, which go on working. The groups enabled now stay so in the
    nemo.lens that was there before. Does nothing where nothing was installed.
    """
    with _lock:
        _undo_all()


def _nemo_lens_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("nemo-lens")
    except metadata.PackageNotFoundError:
        return None


def _is_installed() -> bool:
    return any(isinstance(finder, _LensFinder) for finder in sys.meta_path)


def _undo_all() -> None:
    while _undo:
        step = _undo.pop()
        try:
            step()
        except Exception:
            logger.warning("nemo.lens is not in every way what it was before", exc_info=True)


class _LensFinder(MetaPathFinder):
    """First in sys.meta_path: finds lensfast's modules under nemo.lens, and nemo-lens's own where there is none.

    Like the finders of _import_hook it imports nothing; its loader does.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_theirs(fullname):
            return None
        ours = _find_ours(fullname)
        if ours is None:
            return self.original(fullname)
        is_package = ours.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(ours), origin=ours.origin, is_package=is_package)

    def original(self, fullname: str) -> ModuleSpec | None:
        """Where `fullname` would come from without this finder."""
        parent, _, _ = fullname.rpartition(".")
        if parent == "nemo":
            search: Iterable[str] | None = getattr(sys.modules[parent], "__path__", None)
        else:
            package = self.original(parent)
            search = package.submodule_search_locations if package else None
        return None if search is None else find_after(self, fullname, list(search))


def _is_theirs(name: str) -> bool:
    return f"{name}.".startswith(f"{_THEIRS}.")


def _find_ours(theirs: str) -> ModuleSpec | None:
    """lensfast's module of that name below nemo.lens, found without importing its parents."""
    spec = sys.modules[_OURS].__spec__
    for part in theirs[len(_THEIRS) :].split(".")[1:]:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
        if spec is not None and spec.loader is None:
            return None  # a directory that is no package
    return spec


class _AliasLoader(Loader):
    """Gives lensfast's own module, under a name of nemo.lens's."""

    def __init__(self, ours: ModuleSpec) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the alias's spec there.
        module.__spec__ = self._spec
        if module.__name__ == _OURS:
            _present()

    def get_code(self, fullname: str) -> Any:
        """For python -m."""
        return getattr(self._ours.loader, "get_code")(self._ours.name)  # noqa: B009


class _NemoFinder(MetaPathFinder):
    """Last in sys.meta_path: an empty `nemo` where there is none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec("nemo", None, is_package=True) if fullname == "nemo" else None


def _their_name(module: ModuleType) -> str:
    return _THEIRS + module.__name__[len(_OURS) :]


def _present() -> None:
    """Let the functions of helpers and state say that they are nemo.lens's, where a pickler will then look for them."""
    renamed: list[tuple[Any, str]] = []
    for module in _PRESENTED:
        sys.modules.setdefault(_their_name(module), module)
        for function in map(vars(module).get, module.__all__):
            if getattr(function, "__module__", None) == module.__name__:
                renamed.append((function, module.__name__))
                function.__module__ = _their_name(module)

    def restore() -> None:
        for function, name in renamed:
            function.__module__ = name

    _undo.append(restore)


def _rebind(replacements: Iterable[tuple[object, object]], modules: Iterable[object]) -> int:
    """Replace objects wherever a global name of `modules` holds them; returns in how many places."""
    by_id = {id(old): (old, new) for old, new in replacements}
    rebound: list[tuple[dict[str, Any], str, object, object]] = []
    for module in modules:
        namespace = _namespace(module)
        for name, value in list(namespace.items()):
            if id(value) in by_id:
                old, new = by_id[id(value)]
                namespace[name] = new
                rebound.append((namespace, name, old, new))

    def restore() -> None:
        for namespace, name, old, new in rebound:
            if namespace.get(name) is new:
                namespace[name] = old

    _undo.append(restore)
    return len(rebound)


def _namespace(module: object) -> dict[str, Any]:
    """A module's globals; none of what only looks like one. Never asks the module, which might import something."""
    if not issubclass(type(module), ModuleType):
        return {}
    namespace: dict[str, Any] | None = vars(ModuleType)["__dict__"].__get__(module)
    return namespace or {}


def _imported() -> dict[str, ModuleType]:
    """nemo.lens and those of its submodules that are in sys.modules, by name. None stands for a blocked one."""
    return {name: module for name, module in list(sys.modules.items()) if _is_theirs(name)}


def _replace_imported() -> int:
    """Put lensfast where nemo.lens has been imported already; returns how many references were replaced."""
    originals = _imported()
    nemo_was_there = "nemo" in sys.modules
    their_state = originals.get(f"{_THEIRS}.state")

    def restore() -> None:
        imported = _imported()
        for name, module in imported.items():
            parent, _, child = name.rpartition(".")
            if _namespace(module).get("__name__") == name:
                # Of a submodule that lensfast lacks, the import system has put an attribute on lensfast's package.
                _namespace(imported.get(parent)).pop(child, None)
            del sys.modules[name]
        sys.modules.update(originals)
        nemo = sys.modules.get("nemo")
        if originals.get(_THEIRS) is not None:
            _namespace(nemo)["lens"] = originals[_THEIRS]
        elif nemo_was_there or getattr(nemo, "__path__", None):
            _namespace(nemo).pop("lens", None)
        else:
            sys.modules.pop("nemo", None)
        if their_state is not None:
            their_state.set_enabled_span_groups(state.enabled_span_groups())

    _undo.append(restore)
    pairs: list[tuple[object, object]] = []
    gates: list[tuple[object, object]] = []
    for name, original in originals.items():
        del sys.modules[name]
        ours = _find_ours(name)
        if ours is None:
            sys.modules[name] = original
        elif original is not None:
            module = importlib.import_module(ours.name)
            named = [
                (value, vars(module)[attribute])
                for attribute, value in list(_namespace(original).items())
                if not attribute.startswith("_")
                and getattr(value, "__module__", None) == name
                and attribute in vars(module)
            ]
            pairs += [(original, module), *named]
            if module in _PRESENTED:
                gates += named
            sys.modules[name] = module
    if _THEIRS not in sys.modules:
        return 0
    _present()
    # What goes on using the original, such as a function it has decorated, keeps its insides and obeys our gate.
    _rebind(gates, originals.values())
    _take_over(originals)
    return _rebind(pairs, list(sys.modules.values()))


def _take_over(originals: dict[str, ModuleType]) -> None:
    """What a program has set up in the original counts here, too."""

    def theirs(module: str, name: str) -> Any:
        return getattr(originals.get(f"{_THEIRS}.{module}"), name, None)

    state.set_enabled_span_groups(theirs("state", "_ENABLED_GROUPS") or frozenset())
    state.set_pp_trace_carrier(theirs("state", "_PP_TRACE_CARRIER"))
    handle._INITIALIZED = bool(handle._INITIALIZED or theirs("handle", "_INITIALIZED"))
    for name, strategy in (theirs("strategies", "_REGISTRY") or {}).items():
        if getattr(strategy, "__module__", None) != f"{_THEIRS}.strategies":
            strategies.register_export_strategy(name, strategy, allow_override=True)


def _accelerate_imported() -> None:
    """Accelerate the nemo.lens that is imported, or say why not. Never raises: this is part of its import."""
    version = getattr(sys.modules[_THEIRS], "__version__", "of unknown version")
    if version not in _ACCELERATED_VERSIONS:
        logger.warning(
            "nemo-lens %s is left as it is: accelerate() knows %s (install() replaces any version)",
            version, ", ".join(sorted(_ACCELERATED_VERSIONS)),
        )  # fmt: skip
        return
    try:
        replaced = _accelerate_known()
    except Exception:
        _undo_all()
        logger.warning("nemo-lens %s is left as it is: it could not be accelerated", version, exc_info=True)
        return
    logger.info(
        "nemo-lens %s runs on the gate of lensfast %s (%s): %s replaced in %d places",
        version, __version__, _backend.backend, ", ".join(name for _, names in _HOT for name in names), replaced,
    )  # fmt: skip


def _accelerate_known() -> int:
    """Returns in how many places functions were replaced."""
    their_state = importlib.import_module(f"{_THEIRS}.state")
    set_groups = their_state.set_enabled_span_groups
    pairs = [
        (getattr(importlib.import_module(_their_name(module)), name), getattr(module, name))
        for module, names in _HOT
        for name in names
    ]
    own_code, own_class = set_groups.__code__, their_state.__class__

    def restore() -> None:
        set_groups.__code__ = own_code
        their_state.__class__ = own_class
        del vars(their_state)["_lensfast_follow"]

    _follow(vars(their_state)["_ENABLED_GROUPS"])
    vars(their_state)["_lensfast_follow"] = _follow
    _undo.append(restore)
    their_state.__class__ = _FollowedState
    # The function's code rather than the function: whoever holds it has the new behaviour.
    set_groups.__code__ = _set_and_follow.__code__
    _present()
    return _rebind(pairs, list(sys.modules.values()))


class _FollowedState(ModuleType):
    """nemo.lens.state, whose enabled set tests assign to from outside."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_ENABLED_GROUPS":
            _follow(value)


def _set_and_follow(groups: Any) -> None:
    # Runs with the globals of nemo.lens.state.
    global _ENABLED_GROUPS
    with _LOCK:  # type: ignore[name-defined]  # noqa: F821
        _ENABLED_GROUPS = groups  # type: ignore[name-defined]
        _lensfast_follow(groups)  # type: ignore[name-defined]  # noqa: F821


def _follow(groups: Any) -> None:
    try:
        state.set_enabled_span_groups(groups)
    except TypeError:
        state.set_enabled_span_groups(frozenset())
        logger.warning("no span group is enabled: nemo.lens.state holds %r where a set of names should be", groups)
