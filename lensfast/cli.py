"""The lensfast command and its sub-commands."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import platform
import shlex
import socket
import sys
import timeit
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from typing import Any, TextIO

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

import lensfast

from . import demo, demo_torch, launch
from ._backend import backend, backend_reason
from ._spans import PACKAGE_SCOPE
from .config import NemoLensConfig
from .groups import SpanGroup, SpanRegistry, resolve_with_class
from .handle import _Closer
from .package_info import __version__
from .providers import _build_span_emitter_provider
from .resources.attributes import OTEL_RESOURCE_ATTRIBUTES_ENV, extend_otel_resource_attributes
from .resources.slurm import derive_slurm_resource_attributes
from .span_utilities import _seconds, emit_span
from .state import enabled_span_groups

LARGE_MODEL = (96, 64)
"""Layers and microbatches of a model for which the demo works out the cost, beside its own."""

_EMIT_TIMEOUT_MS = 30_000
"""How long emit-spans waits for a collector. It is more than the exporter does by itself, 10 s."""

_BACKEND = "C backend" if backend == "c" else "Python backend"


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Args:
        argv: default: sys.argv[1:].

    Returns:
        The exit status: 0; 1: spans were lost, or nobody reads the output; 2: wrong use, or something is not installed.
        `emit-spans` returns 1 for spans that are not valid and 2 for what keeps them from being delivered.

    Raises:
        SystemExit: by argparse: with 0 after --help and --version, with 2 after a wrong option.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "demo":
            options = demo.Options(arguments.steps, arguments.microbatches, arguments.layers, arguments.model)
            status = _demo(options, arguments.span_groups, arguments.exporter)
        elif arguments.command == "emit-spans":
            status = _emit_spans(arguments.service, arguments.span)
        elif arguments.command == "set-slurm-resource-attrs":
            if arguments.stage == "sbatch" and arguments.container_image is not None:
                arguments.error("--container-image goes with --stage task")
            _set_slurm_resource_attrs(arguments.stage, arguments.container_image)
            status = 0
        elif arguments.command == "run":
            program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
            if not program:
                arguments.error("no program is given: lensfast run -- python train.py")
            status = launch.launch(program, arguments.accelerate)
        else:
            status = 0
            for name, value in _info():
                print(f"{name}: {value}")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away, as in `lensfast demo | head`; the interpreter's own flush at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lensfast", description="Group-gated OpenTelemetry spans for training code, with the gate in C."
    )
    parser.add_argument("--version", action="version", version=f"lensfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{info,demo,run,emit-spans,set-slurm-resource-attrs}")
    commands.add_parser("info", help="print versions, the backend and what the environment enables (the default)")
    demo_parser = commands.add_parser(
        "demo",
        help="train a small instrumented model and print its spans",
        description="Train a small Megatron-shaped model, print the spans it made, and then what its call sites "
        "cost: those that are enabled with the SDK's spans and with native ones, and all while their groups are "
        "disabled.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = demo.Options()
    add = demo_parser.add_argument
    add("--span-groups", default="all", metavar="SPEC", help="groups and presets, such as default,layer")
    add("--exporter", default="memory", choices=("memory", "console", "otlp"), help="where the spans go")
    add("--steps", default=defaults.steps, type=_positive, metavar="N", help="training steps")
    add("--microbatches", default=defaults.microbatches, type=_positive, metavar="N", help="microbatches in a step")
    add("--layers", default=defaults.layers, type=_positive, metavar="N", help="layers of the model")
    add("--model", default=defaults.model, choices=("loop", "torch"), help="arithmetic, or a tiny GPT on the CPU")
    run_parser = commands.add_parser(
        "run",
        help="run a program that imports nemo.lens on lensfast",
        usage="lensfast run [--accelerate] -- PROGRAM [ARGUMENT ...]",
        description="Run a program, such as `python train.py` or `torchrun ...`, so that in it and in its child "
        "processes nemo.lens is lensfast. LENSFAST_AUTO=install|accelerate|off in the environment steers it.",
    )
    run_parser.add_argument(
        "--accelerate", action="store_true", help="keep the installed nemo-lens and replace only its hot functions"
    )
    run_parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments, after --")
    emit_parser = commands.add_parser(
        "emit-spans",
        help="send spans of intervals that have already happened",
        description="Send spans, all or none, to the exporter that NEMO_LENS_EXPORTER names. Times are seconds since "
        "the epoch, such as `date +%s.%N` prints; PARENT is the name of another of these spans. Exit status: 1: the "
        "spans are not valid; 2: they could not be delivered.",
    )
    emit_parser.add_argument("--service", required=True, metavar="NAME", help="the resource's service.name")
    emit_parser.add_argument("--span", required=True, action="append", metavar="NAME,START,END[,PARENT]")
    slurm_parser = commands.add_parser(
        "set-slurm-resource-attrs",
        help="print what gives a SLURM job's processes its resource attributes",
        description="Print one line of shell, for eval, that adds to OTEL_RESOURCE_ATTRIBUTES what is known of the "
        "SLURM job. What the variable already has stays.",
    )
    add = slurm_parser.add_argument
    add("--stage", required=True, choices=("sbatch", "task"), help="in the batch script, or in each task of srun")
    add("--container-image", metavar="X", help="the image that the task runs in")
    for command_parser in (run_parser, slurm_parser):
        command_parser.set_defaults(error=command_parser.error)
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return number


def _info() -> Iterator[tuple[str, str]]:
    yield "version", __version__
    yield "backend", backend
    yield "backend reason", backend_reason
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "opentelemetry-api", metadata.version("opentelemetry-api")
    try:
        yield "opentelemetry-sdk", metadata.version("opentelemetry-sdk")
    except metadata.PackageNotFoundError:
        yield "opentelemetry-sdk", "not installed (pip install 'lensfast[sdk]')"
    else:
        from ._native import why_not

        reason = why_not()
        yield "native spans", "yes" if reason is None else f"no: {reason}"
    yield "nemo.lens", _nemo_lens()
    enabled = ", ".join(sorted(enabled_span_groups()))
    yield "enabled groups", enabled or "none (each process enables its own, by setup_telemetry())"
    yield "environment", _environment()


def _nemo_lens() -> str:
    """What a program that imports nemo.lens gets here."""
    try:
        found = importlib.import_module("nemo.lens")
    except ImportError:
        return "not installed (under `lensfast run`: lensfast)"
    if found is lensfast:
        return "lensfast"
    how = (
        "with lensfast's gate" if getattr(found, "managed_span", None) is lensfast.managed_span else "without lensfast"
    )
    return f"nemo-lens {getattr(found, '__version__', 'of unknown version')}, {how}"


def _emit_spans(service: str, specs: Sequence[str]) -> int:
    spans, problems = _parse_spans(specs)
    if not service.strip():
        problems.append("--service is empty")
    if problems:
        for problem in problems:
            print(f"lensfast emit-spans: error: {problem}", file=sys.stderr)
        print("nothing emitted: invalid span input", file=sys.stderr)
        return 1
    try:
        provider, exporter = _build_span_emitter_provider(service)
    except (ImportError, ValueError) as error:
        print(f"lensfast emit-spans: error: {error}", file=sys.stderr)
        return 2
    tracer = provider.get_tracer(PACKAGE_SCOPE)
    emitted: dict[str, Span] = {}
    for name, (start, end, parent) in spans.items():
        context = trace.set_span_in_context(emitted[parent], Context()) if parent else Context()
        emitted[name] = emit_span(tracer, name, start, end, context=context) or trace.INVALID_SPAN
    closer = _Closer()
    closer.close("spans", provider, _EMIT_TIMEOUT_MS)
    if closer.is_alive():
        closer.join(_EMIT_TIMEOUT_MS / 1000)
    if closer.is_alive() or exporter.failed:
        reason = f"not within {_EMIT_TIMEOUT_MS / 1000:g} s" if closer.is_alive() else "the exporter failed"
        print(f"lensfast emit-spans: error: the spans could not be delivered: {reason}", file=sys.stderr)
        return 2
    for name, span in emitted.items():
        ids = span.get_span_context()
        if ids.trace_flags.sampled:
            print(f"emitted {name}: trace {ids.trace_id:032x}, span {ids.span_id:016x}", file=sys.stderr)
        else:
            print(f"not emitted: {name} (OTEL_TRACES_SAMPLER or OTEL_SDK_DISABLED)", file=sys.stderr)
    return 0


def _parse_spans(specs: Sequence[str]) -> tuple[dict[str, tuple[str, str, str]], list[str]]:
    """name -> (start, end, parent or ""), parents first; and what is wrong with `specs`."""
    spans: dict[str, tuple[str, str, str]] = {}
    problems = []
    for spec in specs:
        fields = [field.strip() for field in spec.split(",")]
        if len(fields) not in {3, 4}:
            problems.append(f"--span {spec!r} is not NAME,START,END[,PARENT]")
            continue
        name, start, end, parent = (*fields, "")[:4]
        if not name or not name.isprintable():
            problems.append(f"--span {spec!r} has no printable NAME")
        if name in spans:
            problems.append(f"--span {spec!r}: another span has the name {name!r}")
        for argument, text in (("START", start), ("END", end)):
            try:
                if _seconds(text, argument) < 0:
                    problems.append(f"--span {spec!r}: {argument} is before 1970, which OTLP can't carry")
            except ValueError as error:
                problems.append(f"--span {spec!r}: {error}")
        spans[name] = start, end, parent
    for name, (*_, parent) in spans.items():
        if parent and parent not in spans:
            problems.append(f"--span {name}: there is no span {parent!r} to be its parent")
    parents = {name: {parent} if parent else set() for name, (*_, parent) in spans.items()}
    try:
        ordered = [name for name in TopologicalSorter(parents).static_order() if name in spans]
    except CycleError as error:
        problems.append(f"the parents go round in a circle: {' > '.join(error.args[1])}")
        ordered = []
    return {name: spans[name] for name in ordered}, problems


def _set_slurm_resource_attrs(stage: str, container_image: str | None) -> None:
    derived = derive_slurm_resource_attributes()
    if not derived:
        print("lensfast set-slurm-resource-attrs: this is no SLURM job: SLURM_JOB_ID is not set", file=sys.stderr)
    if stage == "sbatch":
        # The batch script runs on one node; the place of that is not the tasks' place.
        derived = {key: value for key, value in derived.items() if not key.startswith("slurm.topology.")}
    else:
        derived["host.name"] = socket.gethostname()
        if container_image:
            derived["nv.dl.launch.container.image"] = container_image
    text = extend_otel_resource_attributes(os.environ.get(OTEL_RESOURCE_ATTRIBUTES_ENV), defaults=derived)
    print(f"export {OTEL_RESOURCE_ATTRIBUTES_ENV}={shlex.quote(text)}")


def _environment() -> str:
    """What NEMO_LENS_ENABLED and NEMO_LENS_SPAN_GROUPS give a job that reads them."""
    try:
        config = NemoLensConfig.from_env()
    except ValueError as error:
        return f"error: {error}"
    snapshot = SpanRegistry._snapshot()
    groups, unknown = resolve_with_class(config.span_groups, SpanGroup, snapshot)
    text = (
        f"telemetry {'on' if config.enabled else 'off'} (NEMO_LENS_ENABLED), span groups "
        f"{config.span_groups!r} (NEMO_LENS_SPAN_GROUPS) = {', '.join(sorted(groups)) or 'none'}"
    )
    if unknown:
        text += f"; unknown until a library brings them: {', '.join(sorted(unknown))}"
    return text


class _Warnings(logging.StreamHandler[TextIO]):
    """Shows what telemetry warns of on stderr, and counts it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.name.startswith(("lensfast", "opentelemetry"))
        super().emit(record)


def _demo(options: demo.Options, span_groups: str, exporter: str) -> int:
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    try:
        try:
            if options.model == "torch":
                demo_torch.import_torch()
            telemetry, memory = demo.set_up(span_groups, exporter)
        except (ImportError, ValueError) as error:
            print(f"lensfast demo: error: {error}", file=sys.stderr)
            return 2
        enabled = enabled_span_groups()
        warnings.count = 0  # from here on they are about delivery
        losses = demo.run(options, telemetry)
    finally:
        logging.getLogger().removeHandler(warnings)

    # stdout belongs to the spans where they are printed, one JSON object a line.
    out = sys.stderr if exporter == "console" else sys.stdout
    spans = memory.get_finished_spans()
    shape = f"{options.steps} steps x {options.microbatches} microbatches x {options.layers} layers"
    print(f"lensfast {__version__}, {_BACKEND}; model {options.model!r}, {shape}", file=out)
    print(f"loss {losses.steps[0]:.3f} -> {losses.steps[-1]:.3f}, {losses.evaluation:.3f} in evaluation", file=out)
    print(_outcome(exporter, len(spans), all_delivered=warnings.count == 0), file=out)
    if spans:
        tree = _tree(spans)
        _print_tree(out, tree)
        _print_groups(out, span_groups, enabled, tree)
        _print_enabled_costs(out, options, enabled)
    elif enabled:
        print("(the environment asks for a sampler that drops them all)", file=out)
    else:
        print(f"(span groups {span_groups!r} enable nothing)", file=out)
    _print_costs(out, options)
    return 0 if warnings.count == 0 else 1


def _outcome(exporter: str, count: int, all_delivered: bool) -> str:
    """What became of the spans."""
    env = os.environ.get
    protocol = env("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    endpoint = env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env("OTEL_EXPORTER_OTLP_ENDPOINT")
    endpoint = endpoint or ("http://localhost:4317" if protocol == "grpc" else "http://localhost:4318")
    done = {
        "memory": "recorded in memory",
        "console": "printed to stdout",
        "otlp": f"delivered to {endpoint} over OTLP {protocol}",
    }[exporter]
    if all_delivered:
        return f"{count:,} spans {done}"
    return f"{count:,} spans made, but NOT all {done}: see the warnings"


@dataclass
class _Node:
    """All spans of one name under one path."""

    count: int = 0
    nanoseconds: int = 0
    children: dict[str, _Node] = field(default_factory=dict)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, str, _Node]]:
        """(depth, name, node) of everything below, parents first."""
        for name, child in self.children.items():
            yield depth, name, child
            yield from child.walk(depth + 1)


def _tree(spans: Iterable[Any]) -> _Node:
    """A nameless root with all spans below; a span whose parent is not among them hangs at the root."""
    ordered = sorted(spans, key=lambda span: span.start_time)
    by_id = {span.context.span_id: span for span in ordered}
    root = _Node()

    def node(span: Any) -> _Node:
        parent = by_id.get(span.parent.span_id) if span.parent else None
        return (node(parent) if parent else root).children.setdefault(span.name, _Node())

    for span in ordered:
        place = node(span)
        place.count += 1
        place.nanoseconds += span.end_time - span.start_time
    return root


def _print_groups(out: TextIO, spec: str, enabled: frozenset[str], tree: _Node) -> None:
    counts = dict.fromkeys(demo.GROUP_OF_SPAN.values(), 0)
    times = dict(counts)

    def add(node: _Node, outer: frozenset[str]) -> None:
        for name, child in node.children.items():
            group = demo.GROUP_OF_SPAN[name]
            counts[group] += child.count
            # A span inside one of its own group adds no time.
            times[group] += 0 if group in outer else child.nanoseconds
            add(child, outer | {group})

    add(tree, frozenset())
    rows = [(group, f"{count:,}", _time(times[group])) for group, count in counts.items() if count]
    _print_table(out, f"Span groups {spec!r}", ("group", "spans", "time"), rows)
    silent = sorted(enabled - {group for group, count in counts.items() if count})
    if silent:
        print(f"enabled, without a call site in this loop: {', '.join(silent)}", file=out)
    if disabled := sorted(demo.MegatronSpanGroup.ALL_GROUPS - enabled):
        print(f"disabled: {', '.join(disabled)}", file=out)


def _time(nanoseconds: float) -> str:
    """Three significant digits and a unit, in ASCII; whole seconds from 1000 s on."""
    if nanoseconds >= 999.5e9:
        return f"{nanoseconds / 1e9:,.0f} s"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= 0.9995 * size:
            return f"{nanoseconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{nanoseconds:.0f} ns"


# For each kind of call site: its label, what is timed, and what of that is not the site's cost.
_SITES = {
    "managed_span": ("managed_span(g, name)", "with managed_span('layer', 'megatron.layer.mlp'): pass", "pass"),
    "managed_span_dict": (
        "managed_span(g, name, **{k: n})",
        "with managed_span('layer', 'megatron.layer.forward', **{'megatron.layer_number': n}): pass",
        "pass",
    ),
    "trace_fn": ("@trace_fn, over a plain call", "traced()", "plain()"),
    "is_span_group_enabled": ("is_span_group_enabled(g)", "is_span_group_enabled('layer')", "pass"),
}


def site_costs(libraries: Sequence[Any], rounds: int = 20, calls: int = 5000) -> list[dict[str, float]]:
    """Nanoseconds of each kind of disabled call site, for each of `libraries`, which have the same API.

    The best of `rounds` runs of `calls` calls, the libraries taking turns, without the cost of the loop. Disables all
    groups.
    """
    timers: dict[tuple[int, str], timeit.Timer] = {}
    for index, library in enumerate(libraries):
        library.set_enabled_span_groups(frozenset())

        def plain() -> None: ...

        names = {
            "managed_span": library.managed_span,
            "is_span_group_enabled": library.is_span_group_enabled,
            "traced": library.trace_fn("layer", "megatron.layer.forward")(plain),
            "plain": plain,
            "n": 1,
        }
        for _, timed, baseline in _SITES.values():
            for statement in (timed, baseline):
                timers[index, statement] = timeit.Timer(statement, globals=names)
    best = dict.fromkeys(timers, math.inf)
    for _ in range(rounds):
        for key, timer in timers.items():
            best[key] = min(best[key], timer.timeit(calls))
    return [
        {
            site: max(0.0, best[index, timed] - best[index, baseline]) / calls * 1e9
            for site, (_, timed, baseline) in _SITES.items()
        }
        for index in range(len(libraries))
    ]


def _print_costs(out: TextIO, options: demo.Options) -> None:
    libraries: list[Any] = [lensfast]
    columns = ["lensfast"]
    try:
        libraries.append(importlib.import_module("nemo.lens"))
        columns += ["nemo-lens", "ratio"]
        note = ""
    except ImportError:
        note = "nemo-lens is not installed; not compared"
    costs = site_costs(libraries)
    shapes = {
        f"{layers}x{microbatches}": demo.calls_per_step(layers, microbatches)
        for layers, microbatches in dict.fromkeys([(options.layers, options.microbatches), LARGE_MODEL])
    }

    def times(nanoseconds: list[float]) -> list[str]:
        ratios = [f"{other / nanoseconds[0]:.1f}x" if nanoseconds[0] else "-" for other in nanoseconds[1:]]
        return [*map(_time, nanoseconds), *ratios]

    rows = [
        [label, *(f"{calls[site]:,}" for calls in shapes.values()), *times([cost[site] for cost in costs])]
        for site, (label, *_) in _SITES.items()
    ]
    for shape, calls in shapes.items():
        total = [f"{sum(calls.values()):,}" if other == shape else "" for other in shapes]
        step = times([sum(calls[site] * cost[site] for site in _SITES) for cost in costs])
        rows.append([f"one step, {shape}", *total, *step])
    columns = ["call site", *(f"in {shape}" for shape in shapes), *columns]
    _print_table(out, f"Cost of call sites whose group is disabled ({_BACKEND})", columns, rows)
    print(f"{', '.join(shapes)}: calls in a training step of so many layers x microbatches", file=out)
    if note:
        print(note, file=out)


def _print_enabled_costs(out: TextIO, options: demo.Options, enabled: frozenset[str]) -> None:
    shapes = {
        f"{layers}x{microbatches}": demo.enabled_calls_per_step(layers, microbatches, enabled)
        for layers, microbatches in dict.fromkeys([(options.layers, options.microbatches), LARGE_MODEL])
    }
    passed = [site for site in demo.ENABLED_SITES if any(calls[site] for calls in shapes.values())]
    if not passed:
        return
    costs, reason = demo.enabled_site_costs()

    def times(nanoseconds: list[float]) -> list[str]:
        ratios = [f"{nanoseconds[0] / native:.1f}x" if native else "-" for native in nanoseconds[1:]]
        return [*map(_time, nanoseconds), *ratios]

    rows = [
        [
            demo.ENABLED_SITES[site][0],
            *(f"{calls[site]:,}" for calls in shapes.values()),
            *times([cost[site] for cost in costs]),
        ]
        for site in passed
    ]
    for shape, calls in shapes.items():
        total = [f"{sum(calls.values()):,}" if other == shape else "" for other in shapes]
        rows.append(
            [f"one step, {shape}", *total, *times([sum(calls[site] * cost[site] for site in passed) for cost in costs])]
        )
    columns = [
        "site",
        *(f"in {shape}" for shape in shapes),
        "SDK spans",
        *([] if reason else ["native spans", "ratio"]),
    ]
    _print_table(out, "Cost of enabled sites, to the thread that passes them", columns, rows)
    if reason:
        print(f"no native spans here: {reason}", file=out)


def _rich_console(out: TextIO) -> Any:
    """A rich Console where `out` is a terminal and rich is installed, else None."""
    if not out.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=out, highlight=False)
    console.width = max(console.width, 120)  # in a narrower terminal, wrapped lines rather than cut ones
    return console


def _print_tree(out: TextIO, root: _Node) -> None:
    console = _rich_console(out)
    indent = 4 if console else 2
    width = max(depth * indent + len(name) for depth, name, _ in root.walk())
    header = f"\n{'span':{width}} {'count':>6}  {'total':>8}  {'mean':>8}"

    def numbers(node: _Node) -> str:
        return f"{node.count:>6,}  {_time(node.nanoseconds):>8}  {_time(node.nanoseconds / node.count):>8}"

    if console is None:
        print(header, file=out)
        for depth, name, node in root.walk():
            print(f"{'  ' * depth + name:{width}} {numbers(node)}", file=out)
        return

    from rich.text import Text
    from rich.tree import Tree

    branches = [Tree("", hide_root=True, guide_style="dim")]
    for depth, name, node in root.walk():
        label = Text.assemble((f"{name:{width - depth * indent}}", "cyan"), " ", numbers(node))
        branches[depth + 1 :] = [branches[depth].add(label)]
    console.print(header, style="bold", soft_wrap=True)
    console.print(branches[0], soft_wrap=True)


def _print_table(out: TextIO, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console = _rich_console(out)
    if console is None:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        print(f"\n{title}", file=out)
        for first, *rest in (columns, *rows):
            cells = [first.ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            print("  ".join(cells).rstrip(), file=out)
        return

    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", style="" if index else "cyan", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(f"\n{title}", style="bold")
    console.print(table)
