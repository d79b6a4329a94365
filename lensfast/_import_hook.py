"""Finders for sys.meta_path that see a module being imported. They import nothing themselves.

Finders run under the import system's global lock, which another thread may wait for while it holds the lock of a
module that such an import would need. What there is to do is done by loaders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Loader", "MetaPathFinder", "OnImport", "find_after", "remove_finders", "when_imported"]

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # The module of these base classes takes milliseconds to import, and the import system does not ask for them.
    Loader = MetaPathFinder = object


def find_after(finder: MetaPathFinder, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """What the finders after `finder` find: those before it, another of its kind maybe, have been asked."""
    finders = list(sys.meta_path)
    for later in finders[finders.index(finder) + 1 if finder in finders else 0 :]:
        # The import system, too, passes over finders of the old kind.
        if hasattr(later, "find_spec"):
            spec = later.find_spec(fullname, path)
            if spec is not None:
                return spec
    return None


def remove_finders(*finders: MetaPathFinder) -> None:
    for finder in finders:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class OnImport(MetaPathFinder):
    """First in sys.meta_path: lets the module `name` be found as ever, and calls `then` when it has been executed."""

    def __init__(self, name: str, then: Callable[[], object], missing: Callable[[], object] = lambda: None) -> None:
        self._name = name
        self._then = then
        self._missing = missing

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = find_after(self, fullname, path)
        if spec is None:
            self._missing()
        elif spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(Loader):
    """Loads as `loader` does, and calls `then`."""

    def __init__(self, loader: Loader, then: Callable[[], object]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` once the module `name` has been imported: now if it has been, else when it is."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, OnImport(name, then))
    else:
        then()
