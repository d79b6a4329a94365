"""One rank of a job of two over torch.distributed: python two_ranks.py STRATEGY FOLDER [RANK PORT].

Without RANK and PORT, the launcher's environment says them, to torch and to lensfast.

Writes spans.RANK.json (what the rank's span exporter was given) and result.RANK.json (what the broadcasts returned).
"""

from __future__ import annotations

import datetime
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import lensfast
from lensfast.distributed import broadcast_trace_context, create_linked_span

strategy, folder = sys.argv[1], Path(sys.argv[2])
by_environment = len(sys.argv) == 3
if not by_environment:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
ranks: dict[str, int] = {} if by_environment else {"rank": int(sys.argv[3]), "world_size": 2}
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30), **ranks)
rank = dist.get_rank()


class FileExporter(SpanExporter):
    """Appends each span as a line of JSON."""

    def export(self, spans: Any) -> SpanExportResult:
        with (folder / f"spans.{rank}.json").open("a") as file:
            file.writelines(span.to_json(indent=None) + "\n" for span in spans)
        return SpanExportResult.SUCCESS


class BrokenPropagator:
    def inject(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no injection")


random.seed(1234)
config = lensfast.NemoLensConfig(
    enabled=True, export_strategy=strategy, export_rank=0, span_groups="job,step", metrics_enabled=False
)
handle = lensfast.setup_telemetry(config, span_exporter=FileExporter(), **ranks)

result: dict[str, Any] = {"exporting": handle.is_exporting, "no_span": broadcast_trace_context(rank)}
with lensfast.managed_span("job", "pretrain"):
    result["first"] = carrier = broadcast_trace_context(rank, src_rank=0)
    result["from_rank_1"] = broadcast_trace_context(rank, src_rank=1)
    with lensfast.managed_span("step", "step"):
        span = create_linked_span(
            trace.get_tracer("pipeline"), "recv.linked", remote_carrier=carrier, **{"dl.pipeline_parallel.rank": rank}
        )
        span.end()
    working = propagate.get_global_textmap()
    if rank == 0:
        propagate.set_global_textmap(BrokenPropagator())
    result["broken"] = broadcast_trace_context(rank)
    propagate.set_global_textmap(working)
    result["after"] = broadcast_trace_context(rank)
handle.shutdown()
(folder / f"result.{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
