"""Draws what `make bench` and `make bench-train` have measured, for the documentation: for light and for dark pages.

Usage: python bench/plots.py DIRECTORY, which makes the SVGs from docs/benchmarks.json and the README. Equal numbers
give equal files.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import table
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
THEMES = {"light": ("#1f2328", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}  # text, grid
C, PYTHON, NEMO_LENS, SDK, FLOOR = (
    "lensfast, C",
    "lensfast, Python",
    "nemo-lens",
    "opentelemetry-sdk",
    "a bare C object",
)
COLOURS = {C: "#2f81f7", PYTHON: "#8ab8f5", NEMO_LENS: "#d9822b", SDK: "#8b949e", FLOOR: "#8b949e"}
BAR = 0.24  # inches, with its gap


def bars(axes: Axes, sites: dict[str, dict[str, float]], text: str) -> None:
    """One group of bars for each site, with its numbers in nanoseconds; the first on top."""
    position, ticks = 0.0, []
    for numbers in sites.values():
        ticks.append(position + (len(numbers) - 1) / 2)
        for who, number in numbers.items():
            axes.barh(position, number, 0.84, color=COLOURS[who], label=who)
            axes.annotate(
                table.quantity(number, "ns"),
                (number, position),
                (4, 0),
                textcoords="offset points",
                va="center",
                color=text,
            )
            position += 1
        position += 0.7
    axes.set_yticks(ticks, sites)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.get_figure().set_figheight(BAR * position + 1.0)
    legend(axes, text)


def legend(axes: Axes, text: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    once = {who: by_label[who] for who in COLOURS if who in by_label}
    axes.legend(
        once.values(),
        once,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        frameon=False,
        labelcolor=text,
        borderpad=0.2,
    )


class Rows:
    """The measured rows, by name."""

    def __init__(self, file: Path) -> None:
        self._rows = {(row["row"], row["backend"]): row for row in table.rows([json.loads(file.read_text())])}

    def get(self, row: str, backend: str, which: str) -> float:
        return float(self._rows[row, backend][which])

    def against_both(self, row: str, backends: tuple[str, ...] = ("c",)) -> dict[str, float]:
        """Of rows that were timed beside nemo-lens and beside the SDK: lensfast's number is the larger of its two."""
        numbers = {}
        for backend in backends:
            who = C if backend == "c" else PYTHON
            numbers[who] = max(self.get(f"{row}, over {other}", backend, "site") for other in (NEMO_LENS, SDK))
        for other in (NEMO_LENS, SDK):
            numbers[other] = self.get(f"{row}, over {other}", backends[0], "reference")
        return numbers


def disabled(axes: Axes, rows: Rows, text: str) -> None:
    sites = {}
    for name, label in (
        ("managed_span", "with managed_span(...)"),
        ("two attributes", "... with two attributes"),
        ("dict attribute", "... with **{...}"),
        ("trace_fn", "call of a @trace_fn function"),
        ("is_span_group_enabled", "is_span_group_enabled(...)"),
    ):
        sites[label] = {
            C: rows.get(name, "c", "site"),
            PYTHON: rows.get(name, "python", "site"),
            NEMO_LENS: rows.get(name, "c", "reference"),
        }
    sites["if handle"] = {C: rows.get("if handle, over is_span_group_enabled of nemo-lens", "c", "site")}
    sites["with on the floor object"] = {
        FLOOR: rows.get("managed_span, over with on the floor object", "c", "reference")
    }
    bars(axes, sites, text)
    axes.set_xscale("log")
    axes.set_xlim(4, 5000)
    axes.minorticks_off()
    axes.set_xlabel("nanoseconds, log scale")


def enabled(axes: Axes, rows: Rows, text: str) -> None:
    started = "start_as_current_span, encoded as OTLP"
    sites = {
        "native span,\nencoded as OTLP": rows.against_both("native span, encoded as OTLP"),
        "native span into a\nBatchSpanProcessor": rows.against_both("native span into a BatchSpanProcessor"),
        "span that is\nnot sampled": rows.against_both("span that is not sampled"),
        "start_as_current_span,\nnative, encoded": {
            C: rows.get(f"{started}, over {SDK}", "c", "site"),
            SDK: rows.get(f"{started}, over {SDK}", "c", "reference"),
        },
        "span of the SDK": rows.against_both("enabled, spans of the SDK, two attributes", ("c", "python")),
    }
    bars(axes, sites, text)
    microseconds(axes)


def cpu(axes: Axes, rows: Rows, text: str) -> None:
    row = "CPU of all threads per span, OTLP/HTTP and work between spans"
    bars(axes, {"CPU per\nexported span": rows.against_both(row)}, text)
    microseconds(axes)


def microseconds(axes: Axes) -> None:
    axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
    axes.set_xlabel("microseconds")


def training(axes: Axes, what: str, text: str) -> None:
    """The README's table of `make bench-train`: CPU time of a step over that of the uninstrumented program."""
    section = (ROOT / "README.md").read_text().partition("<!-- make bench-train -->")[2].partition("<!-- /")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    colours = {"lensfast (c)": C, "lensfast (python)": PYTHON, "nemo-lens": NEMO_LENS}
    labels = []
    for kind, library, groups, ratio, interval, *_ in lines:
        if kind != what or not (bounds := re.fullmatch(r"([\d.]+) - ([\d.]+)", interval)):
            continue
        low, middle, high = (100 * (float(number) - 1) for number in (bounds[1], ratio, bounds[2]))
        colour = COLOURS[colours.get(library, SDK)]
        axes.errorbar(
            middle, len(labels), xerr=[[middle - low], [high - middle]], fmt="o", color=colour, markersize=5, capsize=3
        )
        labels.append(f"{library}: {groups}" if groups else library)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.axvline(0, color=text, linewidth=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}%" if value else "0")
    axes.set_xlabel("CPU time of a step beside that of the program without call sites, with 99% interval")
    axes.get_figure().set_figheight(BAR * len(labels) + 0.9)


def draw(measured: Path, directory: Path) -> None:
    rows = Rows(measured)
    plots: dict[str, Any] = {
        "disabled": lambda axes, text: disabled(axes, rows, text),
        "enabled": lambda axes, text: enabled(axes, rows, text),
        "cpu": lambda axes, text: cpu(axes, rows, text),
        "training": lambda axes, text: training(axes, "training step", text),
        "compiled": lambda axes, text: training(axes, "compiled", text),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for theme, (text, grid) in THEMES.items():
        colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), text)
        style = {**colours, "font.size": 9, "grid.color": grid, "svg.hashsalt": "lensfast"}
        for name, plot in plots.items():
            with rc_context(style):
                figure = Figure(figsize=(7.6, 3), layout="constrained")
                axes = figure.subplots()
                axes.set_axisbelow(True)
                axes.grid(axis="x")
                axes.tick_params(length=0)
                for spine in axes.spines.values():
                    spine.set_visible(False)
                plot(axes, text)
                nothing = dict.fromkeys(("Creator", "Date"))
                figure.savefig(directory / f"{name}-{theme}.svg", transparent=True, metadata=nothing)


if __name__ == "__main__":
    draw(ROOT / "docs" / "benchmarks.json", Path(sys.argv[1]))
