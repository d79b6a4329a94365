"""Starts a program whose nemo.lens, and that of its child processes, is to be lensfast: `lensfast run`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "LENSFAST_AUTO"
MODES = ("install", "accelerate", "off")
_AUTO = str(Path(__file__).with_name("_auto"))


def launch(command: Sequence[str], accelerate: bool = False) -> int:
    """Become `command`, with lensfast switched on in each Python interpreter that it starts.

    That is done by two environment variables, which children inherit: LENSFAST_AUTO says what to do, and a directory
    at the front of PYTHONPATH holds the sitecustomize that does it. Interpreters started with -E, -I or -S take no
    notice. LENSFAST_AUTO=off in the environment beats everything; any other value is the default for `accelerate`.

    Args:
        command: the program, looked up in PATH, and its arguments.
        accelerate: whether to call accelerate() in place of install().

    Returns:
        Only if the program can't be started: 127 if it is not found, else 126.
    """
    mode = os.environ.get(VARIABLE, "").strip().lower() or "install"
    environment = dict(os.environ)
    if mode not in MODES:
        print(
            f"lensfast: {VARIABLE} must be one of {', '.join(MODES)}, not {mode!r}: lensfast stays off", file=sys.stderr
        )
    elif mode != "off":
        environment[VARIABLE] = "accelerate" if accelerate else mode
        paths = environment.get("PYTHONPATH")
        others = [entry for entry in paths.split(os.pathsep) if entry != _AUTO] if paths else []
        environment["PYTHONPATH"] = os.pathsep.join([_AUTO, *others])
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ"):
        # Python ignores these, and the program would inherit that.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except (OSError, ValueError) as error:
        hint = (
            "; a script that is not executable is run as: lensfast run -- python SCRIPT"
            if os.path.isfile(command[0])
            else ""
        )
        print(f"lensfast: can't run {command[0]}: {getattr(error, 'strerror', error)}{hint}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
