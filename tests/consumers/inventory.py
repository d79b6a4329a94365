"""The inventory of call sites, and what each of them must emit."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

INVENTORY: dict[str, Any] = json.loads(Path(__file__).with_name("callsites.json").read_text())
GENERATIONS = list(INVENTORY["generations"])

# Generations that share one program, so that a span may have its parent in an earlier one of them.
FAMILIES = (("megatron-seed", "megatron-2026-03"), ("megatron-main", "megatron-mimo"), ("rl-v1", "rl-v1.1"))

# The computed parts of names, as the stand-ins compute them.
PARTS = {
    "<METHOD>": "POST",
    "<algo>": "grpo",
    "<model>": "llama",
    "<operation>": "prepare",
    "<stage>": "imports",
    "(any)": "mylib.op",
}
BUCKETS = {
    **dict.fromkeys(("generation", "reward", "policy_update"), "productive"),
    **dict.fromkeys(("data_processing", "data_plane", "checkpoint", "logprob", "advantage"), "overhead"),
    "efficiency": "idle",
}
REDACTED_KEYS = {"prompt", "input_text", "output_text", "text", "password", "token", "secret", "key"}

# What a site's first form does with an exception that leaves the body: the status says its message, or type and message
# too, or the span takes no notice of it, or there is no span then.
ON_EXCEPTION = {
    "span_cm plain": "type",
    "conditional expression with span_cm": "type",
    "decorator trace_fn on module function": "type",
    "decorator trace_fn on method": "type",
    "ExitStack.enter_context": "unnoticed",
    "linked span": "unnoticed",
    "manual start_span": "unnoticed",
    "backdated span": "no span",
}
# Forms that go to OpenTelemetry with the handle's tracer, or whose default tracer has that name.
PACKAGE_SCOPE_FORMS = ON_EXCEPTION.keys() - {"ExitStack.enter_context"}

# The other side of every link and carrier.
REMOTE_TRACE, REMOTE_SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
REMOTE_CARRIER = {"traceparent": f"00-{REMOTE_TRACE:032x}-{REMOTE_SPAN:016x}-01"}
TIMES = (1_700_000_000.25, 1_700_000_001.5)
NANOSECONDS = (1_700_000_000_250_000_000, 1_700_000_001_500_000_000)


@dataclass(frozen=True)
class Row:
    """One span of the inventory, with one of its groups where the group is computed."""

    name: str
    group: str | None
    parent: str | None
    attributes: dict[str, str]
    forms: tuple[str, ...]
    """None of them: the span is not made at a call site of the consumer's."""
    generation: str
    late: tuple[str, ...] = ()
    current: bool = True

    @property
    def label(self) -> str:
        return f"{self.name} [{self.group}]"

    def values(self, alternative: int = 0) -> dict[str, Any]:
        """What the site passes, of the `alternative`-th type where a value has several (`str|null`)."""
        values = {}
        for key, types in self.attributes.items():
            kinds = types.split("|")
            values[key] = value_of(kinds[min(alternative, len(kinds) - 1)], key)
        if "rl.efficiency.category" in values:
            values["rl.efficiency.category"] = self.name.rpartition(".")[2]
        if "rl.bucket" in values:
            values["rl.bucket"] = BUCKETS.get(self.group or "")
        return values


@cache
def rows(generation: str) -> list[Row]:
    """The spans of a generation: one Row for each group that a span may be in."""
    found = []
    for span in INVENTORY["spans"]:
        if span["generation"] == generation:
            for group in [None] if span["group"] is None else span["group"].split("|"):
                attributes = dict(span["attributes"])
                if group == "per_prompt":
                    attributes.pop("rl.bucket", None)
                found.append(
                    Row(
                        render(span["name"]),
                        group,
                        span["parent"] and render(span["parent"]),
                        attributes,
                        tuple(span["forms"]),
                        generation,
                        tuple(span.get("late", ())),
                        span.get("current", True),
                    )
                )
    return found


def value_of(kind: str, key: str) -> Any:
    """A value of that type which no other key has."""
    return {
        "int": len(key),
        "float": len(key) + 0.5,
        "str": f"of {key}",
        "bool": len(key) % 2 == 0,
        "list[int]": [1, len(key)],
        "any": {"a type": "that no span carries"},
        "null": None,
    }[kind]


def render(name: str) -> str:
    return re.sub(r"<\w+>|\(any\)", lambda part: PARTS.get(part[0], part[0]), name)


def chain(row: Row) -> list[Row]:
    """The span's enclosing spans, outermost first, and itself."""
    if row.parent is None:
        return [row]
    family = next((family for family in FAMILIES if row.generation in family), ())
    for generation in (row.generation, *reversed(family)):
        for candidate in rows(generation):
            if candidate.name == row.parent:
                return [*chain(candidate), row]
    raise LookupError(f"{row.label} has a parent that the inventory lacks: {row.parent}")


def groups_of(generation: str) -> dict[str, Any]:
    """The definition of the groups that a generation's spans are in."""
    return INVENTORY["groups"][INVENTORY["generations"][generation]["groups"]]


@dataclass
class Expected:
    """What one span must look like when it arrives."""

    name: str
    parent: str | None
    attributes: dict[str, Any]
    scope: str
    kind: str = "INTERNAL"
    links: list[int] = field(default_factory=list)
    status: str | None = None
    """None: unset; else the description of an ERROR."""
    events: list[dict[str, str]] = field(default_factory=list)
    times: tuple[int, int] | None = None
    """In nanoseconds, of spans that are made afterwards."""


def expected(
    row: Row, enabled: frozenset[str], alternative: int = 0, error: BaseException | None = None
) -> list[Expected]:
    """The spans of the row's whole chain, outermost first, while the groups `enabled` are on."""
    spans: list[Expected] = []
    for site in chain(row):
        on_exception = ON_EXCEPTION.get(site.forms[0], "message")
        off = site.group is not None and site.group not in enabled
        if off or (error is not None and on_exception == "no span"):
            continue
        kind = type(error).__name__
        described = {"message": str(error), "type": f"{kind}: {error}"}
        recorded = isinstance(error, Exception) and on_exception in described
        event = {"exception.type": kind, "exception.message": str(error), "exception.escaped": "False"}
        spans.append(
            Expected(
                site.name,
                spans[-1].name if spans and site.parent else None,
                kept(site.values(alternative)),
                scope(site),
                "CLIENT" if site.name.startswith("HTTP") else "INTERNAL",
                [REMOTE_SPAN] if "linked span" in site.forms else [],
                described[on_exception] if recorded else None,
                [event] if recorded else [],
                NANOSECONDS if site.forms[0] == "backdated span" else None,
            )
        )
    return spans


def kept(attributes: dict[str, Any]) -> dict[str, Any]:
    """What of `attributes` arrives: scalars and flat lists of them, texts under a secret's name made unreadable."""
    arriving = {}
    for key, value in attributes.items():
        if isinstance(value, str) and key in REDACTED_KEYS:
            arriving[key] = "[REDACTED]"
        elif isinstance(value, (bool, int, float, str)):
            arriving[key] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float, str)) for item in value):
            arriving[key] = tuple(value)
    return arriving


def scope(row: Row) -> str:
    # The facade always forwards a tracer, but the sites behind it have none to give.
    passes_tracer = any("tracer" in form for form in row.forms) and row.generation != "megatron-facade"
    return "nemo.lens" if passes_tracer or row.forms[0] in PACKAGE_SCOPE_FORMS else "nemo.lens.helpers"
