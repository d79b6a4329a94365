"""The variable OTEL_RESOURCE_ATTRIBUTES, by which a launcher gives resource attributes to the processes it starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from ..semconv.encoding import compose_attributes

logger = logging.getLogger(__name__)

OTEL_RESOURCE_ATTRIBUTES_ENV = "OTEL_RESOURCE_ATTRIBUTES"


def parse_otel_resource_attributes(value: str | None) -> dict[str, str]:
    """The attributes in the text of the variable, as the OpenTelemetry SDK reads it.

    Values are percent-decoded, keys are not. Of two equal keys the last one counts. What is not `key=value` is ignored.
    """
    return dict(_pairs(value))


def _pairs(value: str | None) -> Iterator[tuple[str, str]]:
    for segment in (value or "").split(","):
        key, equals, text = segment.partition("=")
        if equals and key.strip():
            yield key.strip(), unquote(text.strip())


def duplicate_otel_resource_attribute_keys(value: str | None) -> tuple[str, ...]:
    """The keys that the text of the variable has more than once, each once, in their order."""
    keys = [key for key, _ in _pairs(value)]
    return tuple(key for key in dict.fromkeys(keys) if keys.count(key) > 1)


def format_otel_resource_attributes(attrs: Mapping[str, Any]) -> str:
    """The text of the variable: `key=value,...`, values percent-encoded.

    bool, int, float and str (and subclasses) are carried, the first three as their text. None is skipped. What can't be
    carried is left out, with a warning: a value of another type, or with half a surrogate pair; a key that is no str,
    blank, or has a comma, an `=` or an unprintable character in it.
    """
    segments = []
    for key, value in attrs.items():
        if value is None:
            continue
        if not isinstance(key, str) or not key.strip() or not key.isprintable() or set(key) & {",", "="}:
            logger.warning(
                "%s can't carry the key %r (a name without commas, '=' and unprintable characters); it is left out",
                OTEL_RESOURCE_ATTRIBUTES_ENV,
                key,
            )
            continue
        try:
            segments.append(f"{key}={quote(_text(value), safe='')}")
        except (TypeError, ValueError) as error:
            logger.warning("%s can't carry %s: %s; it is left out", OTEL_RESOURCE_ATTRIBUTES_ENV, key, error)
    return ",".join(segments)


def _text(value: Any) -> str:
    # Subclasses, such as those of enum, may have a text of their own.
    for base in (str, bool, int, float):
        if isinstance(value, base):
            return base.__str__(value) if base is str else base.__repr__(value)
    raise TypeError(f"a value must be a str, bool, int or float, not {type(value).__name__}")


def get_otel_resource_attributes(*, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the variable of `environ` (default: os.environ) holds; {} if it is not set."""
    environ = os.environ if environ is None else environ
    return parse_otel_resource_attributes(environ.get(OTEL_RESOURCE_ATTRIBUTES_ENV))


def merge_resource_attributes(
    base: Mapping[str, Any] | None, additions: Mapping[str, Any] | None, *, overwrite: bool = False
) -> dict[str, Any]:
    """A new dict with both; `overwrite` says whether `additions` beat `base`."""
    if overwrite:
        return compose_attributes(base, overrides=additions)
    return compose_attributes(base, defaults=additions)


def extend_otel_resource_attributes(
    value: str | None,
    additions: Mapping[str, Any] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> str:
    """The text `value` of the variable with more attributes: `overrides` beat it, it beats `defaults`.

    Args:
        additions, overwrite: the older call form: `additions` are more overrides if `overwrite` is true, else defaults.
    """
    current = merge_resource_attributes(parse_otel_resource_attributes(value), additions, overwrite=overwrite)
    return format_otel_resource_attributes(compose_attributes(current, defaults=defaults, overrides=overrides))


def set_otel_resource_attributes(
    attributes: Mapping[str, Any],
    *,
    environ: MutableMapping[str, str] | None = None,
    overwrite: bool | None = None,
) -> str:
    """Make the variable of `environ` (default: os.environ) hold exactly `attributes`; returns its new text.

    The older call form added to what was there, and had no sign of it but `overwrite`. Without that argument, the newer
    one wins. Not thread-safe: the environment belongs to the whole process.

    Args:
        overwrite: if given, `attributes` are added, and beat those that are there (True) or not (False).
    """
    environ = os.environ if environ is None else environ
    if overwrite is None:
        text = format_otel_resource_attributes(attributes)
    else:
        text = extend_otel_resource_attributes(
            environ.get(OTEL_RESOURCE_ATTRIBUTES_ENV), attributes, overwrite=overwrite
        )
    environ[OTEL_RESOURCE_ATTRIBUTES_ENV] = text
    return text


@contextmanager
def publish_otel_resource_attributes(
    attributes: Mapping[str, Any],
    *,
    environ: MutableMapping[str, str] | None = None,
    overwrite: bool | None = None,
) -> Iterator[str]:
    """set_otel_resource_attributes() for the time of a block, for processes that are started in it.

    Yields the text. Afterwards the variable is exactly as it was, also if it was not set. Blocks may nest in a thread;
    those of several threads must not overlap.
    """
    environ = os.environ if environ is None else environ
    before = environ.get(OTEL_RESOURCE_ATTRIBUTES_ENV)
    try:
        yield set_otel_resource_attributes(attributes, environ=environ, overwrite=overwrite)
    finally:
        if before is None:
            environ.pop(OTEL_RESOURCE_ATTRIBUTES_ENV, None)
        else:
            environ[OTEL_RESOURCE_ATTRIBUTES_ENV] = before


@dataclass(frozen=True)
class ResourceAttributeCheck:
    """What check_resource_attributes found."""

    missing: tuple[str, ...] = ()
    """Required keys that are not there."""
    empty: tuple[str, ...] = ()
    """Required keys that are there, with None or blank text."""
    forbidden: tuple[str, ...] = ()
    """Forbidden keys that are there."""
    duplicates: tuple[str, ...] = ()
    """Keys that the text of the variable has more than once."""

    @property
    def ok(self) -> bool:
        """Whether there is nothing to complain about."""
        return not (self.missing or self.empty or self.forbidden or self.duplicates)


def check_resource_attributes(
    attrs: Mapping[str, Any],
    *,
    required: Iterable[str] = (),
    forbidden: Iterable[str] = (),
    env_value: str | None = None,
) -> ResourceAttributeCheck:
    """Check that attributes are complete.

    Args:
        required, forbidden: keys.
        env_value: the text of the variable they came from, in which duplicates are looked for.
    """
    required = tuple(required)
    return ResourceAttributeCheck(
        missing=tuple(key for key in required if key not in attrs),
        empty=tuple(key for key in required if key in attrs and _is_empty(attrs[key])),
        forbidden=tuple(key for key in forbidden if key in attrs),
        duplicates=duplicate_otel_resource_attribute_keys(env_value),
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
