"""Loads the stand-ins on a nemo.lens, and drives call sites through them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from inventory import INVENTORY, NANOSECONDS, REMOTE_CARRIER, TIMES, Expected, Row, chain, expected
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from conftest import take_modules

STANDINS = sorted({generation["standin"] for generation in INVENTORY["generations"].values()})


def forget(*packages: str) -> dict[str, ModuleType]:
    """Take packages out of sys.modules; returns what was taken."""
    return {name: module for package in packages for name, module in take_modules(package).items()}


@contextmanager
def installed(lensfast: ModuleType) -> Iterator[ModuleType]:
    """nemo.lens is lensfast, by its public install()."""
    before = forget("nemo", "consumers")
    lensfast.install()
    try:
        yield importlib.import_module("nemo.lens")
    finally:
        lensfast.uninstall()
        forget("nemo", "consumers")
        sys.modules.update(before)


@contextmanager
def original() -> Iterator[ModuleType]:
    """nemo.lens is the published one, imported afresh. Raises ImportError where it is not installed."""
    before = forget("nemo", "consumers")
    try:
        yield importlib.import_module("nemo.lens")
    finally:
        forget("nemo", "consumers")
        sys.modules.update(before)


class _Blocked(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] == "nemo":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextmanager
def absent() -> Iterator[None]:
    """There is no nemo.lens."""
    before = forget("nemo", "consumers")
    blocked = _Blocked()
    sys.meta_path.insert(0, blocked)
    try:
        yield
    finally:
        sys.meta_path.remove(blocked)
        forget("nemo", "consumers")
        sys.modules.update(before)


def load(standin: str) -> ModuleType:
    """The stand-in, bound to what nemo.lens is now; once per such time, as a program would import it."""
    if "consumers" not in sys.modules:
        spec = importlib.util.spec_from_loader("consumers", None, is_package=True)
        spec.submodule_search_locations = [str(Path(__file__).parent)]
        sys.modules["consumers"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"consumers.{standin}")


class Consumer:
    """A consumer that has set telemetry up, and the spans that arrived from it."""

    def __init__(self, generation: str, span_groups: str = "default") -> None:
        self.generation = generation
        self.standin = load(INVENTORY["generations"][generation]["standin"])
        self.exporter = InMemorySpanExporter()
        prefix = self.standin.ENV_PREFIX
        settings = {"ENABLED": "1", "METRICS_ENABLED": "0", "SPAN_GROUPS": span_groups}
        os.environ.update({f"{prefix}_{name}": value for name, value in settings.items()})
        try:
            self.handle = self.standin.initialize(generation, span_exporter=self.exporter)
        finally:
            for name in settings:
                del os.environ[f"{prefix}_{name}"]

    def enable(self, groups: frozenset[str]) -> None:
        from nemo.lens.state import set_enabled_span_groups

        set_enabled_span_groups(groups)

    def site(self, row: Row, alternative: int = 0, **extra: Any) -> Callable[[Callable[[], Any]], Any]:
        values = row.values(alternative)
        callforms = importlib.import_module("consumers.callforms")
        return self.standin.call_site(
            callforms.Site(
                row.name,
                row.group,
                {key: value for key, value in values.items() if key not in row.late} | extra,
                {key: values[key] for key in row.late},
                row.forms,
                self.handle,
                dict(REMOTE_CARRIER),
                TIMES,
            )
        )

    def run(self, row: Row, alternative: int = 0, error: BaseException | None = None) -> tuple[Any, list[ReadableSpan]]:
        """Run the row's whole chain of sites around a body; returns what came out of it, and the spans.

        What comes out is the span that was current in the body, or the exception that left the outermost site.
        """

        def body() -> Any:
            if error is not None:
                raise error
            return trace.get_current_span().get_span_context()

        # Sites that do not call each other are nested here by calling one from the body of the other.
        for site in reversed(chain(row)):
            body = _inside(self.site(site, alternative), body)
        try:
            outcome = body()
        except BaseException as raised:
            outcome = raised
        return outcome, self.arrived()

    def arrived(self) -> list[ReadableSpan]:
        """The spans that have arrived since the last call."""
        trace.get_tracer_provider().force_flush()
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans


def _inside(site: Callable[..., Any], body: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: site(body)


def plain(span: ReadableSpan, all_spans: list[ReadableSpan]) -> Expected:
    """A span in the terms of the inventory."""
    names = {other.context.span_id: other.name for other in all_spans}
    parent = span.parent and names.get(span.parent.span_id, f"{span.parent.span_id:016x}")
    status = None if span.status.is_unset else f"{span.status.description}"
    events = [{k: v for k, v in event.attributes.items() if k != "exception.stacktrace"} for event in span.events]
    times = (span.start_time, span.end_time)
    return Expected(
        span.name,
        parent,
        dict(span.attributes or {}),
        span.instrumentation_scope.name,
        span.kind.name,
        [link.context.span_id for link in span.links],
        status,
        events,
        times if times == NANOSECONDS else None,
    )


def differences(
    consumer: Consumer,
    row: Row,
    enabled: frozenset[str],
    alternative: int = 0,
    error: BaseException | None = None,
) -> list[str]:
    """Drive one row while `enabled` is on; returns what was not as the inventory says."""
    outcome, spans = consumer.run(row, alternative, error)
    wanted = {span.name: span for span in expected(row, enabled, alternative, error)}
    found = {span.name: plain(span, spans) for span in spans}
    problems = []
    if len(found) != len(spans) or found != wanted:
        problems.append(f"{row.label} with {sorted(enabled)}: {list(found.values())}, not {list(wanted.values())}")
    if error is not None:
        if outcome is not error:
            problems.append(f"{row.label}: {outcome!r} came out of it, not the very {error!r}")
    elif isinstance(outcome, BaseException):
        problems.append(f"{row.label}: {outcome!r}")
    else:
        inside = [site for site in chain(row) if site.name in wanted and site.current]
        current = next((span.name for span in spans if span.context.span_id == outcome.span_id), None)
        if current != (inside[-1].name if inside else None):
            problems.append(f"{row.label} with {sorted(enabled)}: {current} was current in its body")
    if trace.get_current_span().get_span_context().is_valid:
        problems.append(f"{row.label}: a span is current afterwards")
    return problems
