"""A Ray program: a driver and a worker with traced tasks and actor methods. Prints what happened as JSON.

Run as a script it is the driver, which imports itself: Ray then ships functions and classes by their names.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lensfast
from lensfast.contrib.ray import ray_dispatch_with_context, traced_remote_call

exported = InMemorySpanExporter()


def set_up() -> None:
    config = lensfast.NemoLensConfig(enabled=True, span_groups="job,step", metrics_enabled=False)
    lensfast.setup_telemetry(config, span_exporter=exported)


def spans() -> list[dict[str, Any]]:
    trace.get_tracer_provider().force_flush()
    finished = exported.get_finished_spans()
    exported.clear()
    return [
        {
            "name": span.name,
            "trace": span.context.trace_id,
            "id": span.context.span_id,
            "parent": span.parent.span_id if span.parent else None,
        }
        for span in finished
    ]


@lensfast.trace_fn("step", "app.double")
def double(value: int) -> int:
    return 2 * value


@ray.remote
@traced_remote_call
def task(value: int, *, plus: int = 0) -> tuple[int, str, list[dict[str, Any]]]:
    return double(value) + plus, lensfast.backend, spans()


@ray.remote
class Trainer:
    @traced_remote_call
    def train(self, value: int) -> int:
        return self.step(value)

    @lensfast.trace_fn("step", "app.step")
    def step(self, value: int) -> int:
        return double(value)

    @lensfast.trace_fn("step", "app.direct")
    def direct(self, value: int, *, plus: int = 0) -> int:
        return value + plus

    @traced_remote_call
    @lensfast.trace_fn("step", "app.both")
    def both(self, value: int) -> int:
        return value

    @traced_remote_call
    def items(self, count: int) -> Iterator[int]:
        for item in range(count):
            yield double(item)

    def spans(self) -> list[dict[str, Any]]:
        return spans()


@ray.remote
class AsyncTrainer:
    @traced_remote_call
    async def train(self, value: int) -> int:
        return await self.step(value)

    @lensfast.trace_fn("step", "app.async_step")
    async def step(self, value: int) -> int:
        return double(value)

    @lensfast.trace_fn("step", "app.async_direct")
    async def direct(self, value: int) -> int:
        return value

    @traced_remote_call
    async def items(self, count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield item

    async def spans(self) -> list[dict[str, Any]]:
        return spans()


def main() -> None:
    result: dict[str, Any] = {}
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"worker_process_setup_hook": set_up},
    )
    set_up()
    with lensfast.managed_span("job", "driver"):
        result["task"] = ray.get(ray_dispatch_with_context(task, 3, plus=1))
        trainer = Trainer.options(num_cpus=0).remote()
        result["train"] = ray.get(ray_dispatch_with_context(trainer.train, 4))
        result["direct"] = ray.get(trainer.direct.remote(5, plus=1))
        result["both"] = ray.get(ray_dispatch_with_context(trainer.both, 6))
        result["items"] = [ray.get(item) for item in ray_dispatch_with_context(trainer.items, 2)]
        result["trainer_spans"] = ray.get(trainer.spans.remote())
        trainer = AsyncTrainer.options(num_cpus=0).remote()
        result["async_train"] = ray.get(ray_dispatch_with_context(trainer.train, 7))
        result["async_direct"] = ray.get(trainer.direct.remote(8))
        result["async_items"] = [ray.get(item) for item in ray_dispatch_with_context(trainer.items, 2)]
        result["async_spans"] = ray.get(trainer.spans.remote())
    result["driver_spans"] = spans()
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    import ray_app

    ray_app.main()
