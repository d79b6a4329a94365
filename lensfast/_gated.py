"""A traced function in plain Python: what the Python gate calls, and what picklers copy and torch.compile reads."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable
from types import FunctionType, MethodType
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


def follow_method(traced: Any, method: MethodType, again: Callable[[Any], Any]) -> None:
    """Let what traces `method`, a bound one, be a method too, and be copied as that is: along with its object.

    A deep copy is `again(the copy's method)`. A pickle is the bare method, by name, since an object that keeps its own
    traced method must be readable by programs that lack lensfast.
    """
    vars(traced).update(
        __func__=method.__func__,
        __self__=method.__self__,
        __deepcopy__=lambda memo: again(copy.deepcopy(method, memo)),
        __reduce_ex__=lambda protocol: method.__reduce_ex__(protocol),
    )
