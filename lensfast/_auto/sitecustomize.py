"""What each interpreter under `lensfast run` runs first: turns lensfast on once nemo.lens is imported.

Interpreters that never do, such as those that compilers and loaders start, import nothing of it.
"""

import importlib
import importlib.machinery
import os
import sys


class _Trigger:
    """First in sys.meta_path until nemo.lens is imported. Also last, for where there is no `nemo`: gives an empty one.

    It only puts a loader in place. A finder must not import: it runs under the import system's global lock.
    """

    def __init__(self, mode, last=False):
        self._mode = mode
        self._last = last

    def find_spec(self, fullname, path=None, target=None):
        if fullname != ("nemo" if self._last else "nemo.lens"):
            return None
        if self._last:
            return self._nothing(fullname, None)
        for finder in list(sys.meta_path):
            # The import system, too, passes over finders of the old kind.
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    spec.loader = _Loader(self._mode, spec.loader)
                    return spec
        return self._nothing(fullname, _Loader(self._mode, None))

    def _nothing(self, fullname, loader):
        """There is no nemo.lens."""
        if self._mode == "install":
            return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
        _remove_triggers()
        _warn("LENSFAST_AUTO=accelerate has no effect: nemo-lens, which it is to accelerate, is not installed")
        return None


class _Loader:
    """Loads lensfast in place of nemo.lens, or nemo.lens and then its acceleration."""

    def __init__(self, mode, original):
        self._mode = mode
        self._loader = self._original = original

    def create_module(self, spec):
        _remove_triggers()
        if self._mode == "install":
            self._turn_on()
            from importlib import util

            # The loader of lensfast's own finder, if that is there now.
            found = util.find_spec("nemo.lens")
            self._loader = found.loader if found else None
        if self._loader is None:
            raise ModuleNotFoundError("No module named 'nemo.lens'", name="nemo.lens")
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = self._loader
        if module.__loader__ is self:
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._mode == "accelerate":
            self._turn_on()

    def _turn_on(self):
        try:
            getattr(importlib.import_module("lensfast"), self._mode)()
        except Exception as error:
            _warn(f"LENSFAST_AUTO={self._mode} has no effect in {sys.executable}: {error}")

    def __getattr__(self, name):
        return getattr(self._original, name)


def _remove_triggers():
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Trigger)]


def _warn(message):
    print(f"lensfast: {message}", file=sys.stderr)


def _activate():
    mode = os.environ.get("LENSFAST_AUTO", "").strip().lower()
    if mode in ("install", "accelerate"):
        sys.meta_path.insert(0, _Trigger(mode))
        sys.meta_path.append(_Trigger(mode, last=True))
    elif mode not in ("", "off"):
        _warn(f"LENSFAST_AUTO must be install, accelerate or off, not {mode!r}: lensfast stays off")


def _run_the_next_one(ran):
    """Run the sitecustomize that this one hides, and stay ahead of it for child processes."""
    path = [entry for entry in sys.path if os.path.abspath(entry) not in ran]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    from importlib import util

    before = os.environ.get("PYTHONPATH", "")
    module = util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    after = os.environ.get("PYTHONPATH", "")
    if after != before:
        # That of opentelemetry-instrument puts its own directory first, and would hide this one.
        others = (entry for entry in after.split(os.pathsep) if entry != _HERE)
        os.environ["PYTHONPATH"] = os.pathsep.join([_HERE, *others])


_HERE = os.path.dirname(os.path.abspath(__file__))
# Another launcher may run this one as the one that it hides; it may be the lensfast of another environment.
_ran = sys.__dict__.setdefault("_lensfast_sitecustomize", set())
if _HERE not in _ran:
    if not _ran:
        _activate()
    _ran.add(_HERE)
    _run_the_next_one(_ran)
