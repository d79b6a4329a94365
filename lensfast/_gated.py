"""A traced function in plain Python: what the Python gate calls, and what picklers copy and torch.compile reads."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import FunctionType
from typing import Any

# Each gated function has these as globals of its own.
_group: Any
_function: Any
_runner: Any
_is_on: Any


def _call(*args: Any, **kwargs: Any) -> Any:
    if _is_on(_group):  # noqa: F821
        return _runner(*args, **kwargs)  # noqa: F821
    if kwargs:
        return _function(*args, **kwargs)  # noqa: F821
    return _function(*args)  # noqa: F821


def gated(
    function: Callable[..., Any], group: str, runner: Callable[..., Any], is_on: Callable[[str], bool]
) -> FunctionType:
    """A function that is `function` while `is_on(group)` is false and `runner` while it is true.

    `is_on` belongs to a module, so that a copy asks the gate of the process where it arrives. There is no closure:
    torch.compile looks into those only of what is a function all through, which on the C gate this only looks like.
    """
    own = {"_group": group, "_function": function, "_runner": runner, "_is_on": is_on}
    return FunctionType(_call.__code__, {"__builtins__": builtins, **own})


def _pass_on(*args: Any, **kwargs: Any) -> Any:
    return _function(*args, **kwargs) if kwargs else _function(*args)  # noqa: F821


def with_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, or, if it is torch's own, one that calls it: torch.compile compiles that, and passes over its own."""
    if not (getattr(function, "__module__", None) or "").startswith("torch."):
        return function
    # Code of its own, too: the compiler gives up on code that it had to compile eight times.
    return FunctionType(_pass_on.__code__.replace(), {"__builtins__": builtins, "_function": function})
