"""Putting sets of attributes together, and giving their values the right types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def compose_attributes(
    current: Mapping[str, Any] | None,
    *,
    defaults: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A new dict: `overrides` beat `current`, which beats `defaults`. None and "" are values like any other."""
    return {**(defaults or {}), **(current or {}), **(overrides or {})}


def convert_attribute(key: str, value: Any, converters: Mapping[str, Callable[[Any], Any]]) -> Any:
    """`value` as `converters[key]` makes it; unchanged if there is none for `key`.

    Where the converter is the class `int`, only an integer that a span can carry (64 bits) or its text will do: ASCII
    digits with or without a sign, and space around them.

    Raises:
        ValueError: the value can't be converted.
    """
    converter = converters.get(key)
    if converter is None:
        return value
    return _integer(key, value) if converter is int else converter(value)


def _integer(key: str, value: Any) -> int:
    number: Any = value
    # Not by int() alone, which takes 1_0, True and 2.5 as well.
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,99}", value.strip()):
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool) or not -(2**63) <= number < 2**63:
        raise ValueError(f"{key} requires a base-10 integer, not {value!r}")
    return number
