"""What each interpreter under `lensfast run` runs first: turns lensfast on once nemo.lens is asked for.

Interpreters that never ask, such as those that compilers and loaders start, import nothing for it.
"""

import importlib.machinery
import importlib.util
import os
import sys


class _Trigger:
    """A finder in sys.meta_path that waits for `awaited` to be imported."""

    def __init__(self, awaited: str, mode: str) -> None:
        self._awaited = awaited
        self._mode = mode

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != self._awaited:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Trigger)]
        try:
            lensfast = importlib.import_module("lensfast")
            getattr(lensfast, self._mode)()
        except Exception as error:
            _warn(f"LENSFAST_AUTO={self._mode} has no effect in {sys.executable}: {error}")
        # The import system goes on with the list as it was; the finder that lensfast has put in may be ahead.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def _warn(message: str) -> None:
    print(f"lensfast: {message}", file=sys.stderr)


def _activate() -> None:
    mode = os.environ.get("LENSFAST_AUTO", "").strip().lower()
    if mode in ("install", "accelerate"):
        sys.meta_path.insert(0, _Trigger("nemo.lens", mode))
    elif mode not in ("", "off"):
        _warn(f"LENSFAST_AUTO must be install, accelerate or off, not {mode!r}: lensfast stays off")
    if mode == "install":
        # Last, for where there is no `nemo` at all.
        sys.meta_path.append(_Trigger("nemo", mode))


def _run_the_next_one() -> None:
    """Run the sitecustomize that this one hides, and stay ahead of it for child processes."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    before = os.environ.get("PYTHONPATH", "")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
    after = os.environ.get("PYTHONPATH", "")
    if after != before:
        # That of opentelemetry-instrument puts its own directory first, and would hide this one.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [here, *(entry for entry in after.split(os.pathsep) if entry != here)]
        )


_activate()
_run_the_next_one()
