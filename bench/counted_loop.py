"""The process that instructions.py counts: one loop around one site, and as little else as can be.

Usage: python -S bench/counted_loop.py BACKEND SITE PASSES
"""

from __future__ import annotations

import importlib
import os.path
import sys
import types

import sites

STATEMENTS = {**sites.DISABLED, "empty": "pass", "plain call": "plain(n)"}


def run_loop(backend: str, site: str, passes: int) -> None:
    # The gate alone: importing OpenTelemetry would be most of the work.
    package = types.ModuleType("lensfast")
    package.__path__ = [os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "lensfast")]
    sys.modules["lensfast"] = package
    gate = importlib.import_module("lensfast._gate" if backend == "c" else "lensfast._gate_py")

    def managed_span(group: str, name: str, tracer: object = None, **attributes: object) -> object:
        if gate.is_span_group_enabled(group):
            raise AssertionError("every group is disabled here")
        return gate.NOOP

    # As trace_fn does: on the Python gate, what is traced is what is shown.
    gated = importlib.import_module("lensfast._gated").gated
    shown = gated(sites.plain, "microbatch", sites.plain, gate.is_span_group_enabled)
    namespace = {
        "managed_span": gate.install(managed_span, managed_span),
        "is_span_group_enabled": gate.is_span_group_enabled,
        "traced": gate.traced(sites.plain, "microbatch", sites.plain, shown),
        "plain": sites.plain,
        "handle": gate.span_group("layer"),
    }
    sites.loop(STATEMENTS[site], namespace)(passes)


if __name__ == "__main__":
    run_loop(sys.argv[1], sys.argv[2], int(sys.argv[3]))
