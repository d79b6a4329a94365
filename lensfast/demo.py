"""A small Megatron-shaped training loop, instrumented with lensfast: what `lensfast demo` runs, and an example to read.

It shows each way to write a call site: `with managed_span`, the same with `**{"dotted.key": value}`, `@trace_fn`, the
explicit gate before `span_cm` or before work that only telemetry needs, and a span started by hand. Spans, groups and
attributes are named as in Megatron. One process holds the whole model, so the communication calls transfer nothing,
no activation is offloaded, and no span is linked to another rank's.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import timeit
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, NamedTuple, Protocol

from opentelemetry import context, trace
from opentelemetry.trace import Tracer

from .config import NemoLensConfig
from .groups import SpanGroup
from .handle import TelemetryHandle, setup_telemetry
from .helpers import managed_span, safe_set_span_attributes, span_cm, trace_fn
from .state import is_span_group_enabled, set_enabled_span_groups

MICRO_BATCH_SIZE = 4
EVAL_ITERS = 2
SAVE_INTERVAL = 10
"""Every so many steps, and after the last one, the loop evaluates and saves a checkpoint."""


class MegatronSpanGroup(SpanGroup):
    """The eight groups of the base class and six that only Megatron has."""

    MICROBATCH = "microbatch"
    LAYER = "layer"
    COMMUNICATION = "communication"
    ACTIVATION_OFFLOAD = "activation_offload"
    DATA_LOADING = "data_loading"
    INFERENCE = "inference"

    ALL_GROUPS: ClassVar[frozenset[str]] = SpanGroup.ALL_GROUPS | {
        MICROBATCH,
        LAYER,
        COMMUNICATION,
        ACTIVATION_OFFLOAD,
        DATA_LOADING,
        INFERENCE,
    }
    _PRESETS: ClassVar[dict[str, frozenset[str]]] = {
        "default": SpanGroup._PRESETS["default"] | {INFERENCE},
        "per_step": ALL_GROUPS - {MICROBATCH, LAYER, ACTIVATION_OFFLOAD},
        "all": ALL_GROUPS,
    }


GROUP_OF_SPAN = {
    "megatron.pretrain": "job",
    "megatron.train": "job",
    "megatron.model_init": "model_init",
    "megatron.load_checkpoint": "load_checkpoint",
    "megatron.load_checkpoint.io_read": "load_checkpoint",
    "megatron.train_step": "step",
    "megatron.forward_backward": "forward_backward",
    "megatron.microbatch.forward": "microbatch",
    "megatron.microbatch.backward": "microbatch",
    "megatron.layer.forward": "layer",
    "megatron.layer.self_attention": "layer",
    "megatron.layer.mlp": "layer",
    "megatron.p2p.recv_forward": "communication",
    "megatron.p2p.send_forward": "communication",
    "megatron.p2p.recv_backward": "communication",
    "megatron.p2p.send_backward": "communication",
    "megatron.grad_sync.start": "communication",
    "megatron.grad_sync.finish": "communication",
    "megatron.optimizer_step": "optimizer",
    "megatron.save_checkpoint": "checkpoint",
    "megatron.save_checkpoint.state_dict": "checkpoint",
    "megatron.save_checkpoint.io_write": "checkpoint",
    "megatron.evaluate": "evaluate",
    "megatron.evaluate.step": "evaluate",
}
"""Spans do not carry their group; the report looks it up here."""


@dataclass(frozen=True)
class Options:
    """The size of the run; all are positive."""

    steps: int = 4
    microbatches: int = 4
    layers: int = 4
    model: str = "loop"
    """`"loop"`: arithmetic in place of layers; `"torch"`: a tiny GPT."""


class Layer(Protocol):
    def self_attention(self, hidden: Any) -> Any: ...
    def mlp(self, hidden: Any) -> Any: ...


class Model(Protocol):
    """What the loop trains."""

    @property
    def layers(self) -> Sequence[Layer]: ...
    def next_batch(self) -> Any: ...
    def embed(self, batch: Any) -> Any: ...
    def loss(self, hidden: Any, batch: Any) -> Any: ...
    def backward(self, loss: Any) -> float:
        """Add to the gradients; returns the loss as a number."""

    def optimizer_step(self) -> tuple[float, bool]:
        """(norm of the gradient, whether the parameters were changed)."""

    def evaluate(self) -> float: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


class LoopLayer:
    """Arithmetic that takes a few dozen microseconds."""

    def self_attention(self, hidden: list[float]) -> list[float]:
        mean = fmean(hidden)
        return [(value + mean) / 2 for value in hidden]

    def mlp(self, hidden: list[float]) -> list[float]:
        return [0.5 + 0.5 * math.tanh(value) for value in hidden]


class LoopLoss(NamedTuple):
    value: float
    gradient: float


class LoopModel:
    """Stands in for a network: one weight is trained, so that there is a loss and that it falls."""

    def __init__(self, layers: int) -> None:
        self.layers = [LoopLayer() for _ in range(layers)]
        self._weight = 0.0
        self._gradients: list[float] = []
        self._random = random.Random(0)

    def next_batch(self) -> list[float]:
        return [self._random.random() for _ in range(64 * MICRO_BATCH_SIZE)]

    def embed(self, batch: list[float]) -> list[float]:
        return batch

    def loss(self, hidden: list[float], batch: list[float]) -> LoopLoss:
        errors = [self._weight * value - 1 for value in hidden]
        gradient = fmean(2 * error * value for error, value in zip(errors, hidden, strict=True))
        return LoopLoss(fmean(error * error for error in errors), gradient)

    def backward(self, loss: LoopLoss) -> float:
        self._gradients.append(loss.gradient)
        return loss.value

    def optimizer_step(self) -> tuple[float, bool]:
        gradient = fmean(self._gradients)
        self._gradients.clear()
        self._weight -= 0.2 * gradient
        return abs(gradient), True

    def evaluate(self) -> float:
        hidden = self.next_batch()
        for layer in self.layers:
            hidden = layer.mlp(layer.self_attention(hidden))
        return self.loss(hidden, hidden).value

    def state_dict(self) -> dict[str, float]:
        return {"weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._weight = state["weight"]


class P2PCommunicator:
    @trace_fn("communication", "megatron.p2p.recv_forward")
    def recv_forward(self) -> None: ...

    @trace_fn("communication", "megatron.p2p.send_forward")
    def send_forward(self) -> None: ...

    @trace_fn("communication", "megatron.p2p.recv_backward")
    def recv_backward(self) -> None: ...

    @trace_fn("communication", "megatron.p2p.send_backward")
    def send_backward(self) -> None: ...


class DistributedDataParallel:
    @trace_fn("communication", "megatron.grad_sync.start")
    def start_grad_sync(self) -> None: ...

    @trace_fn("communication", "megatron.grad_sync.finish")
    def finish_grad_sync(self) -> None: ...


p2p = P2PCommunicator()
ddp = DistributedDataParallel()


def layer_forward(layer: Layer, number: int, hidden: Any) -> Any:
    with managed_span("layer", "megatron.layer.forward", **{"megatron.layer_number": number}):
        with managed_span("layer", "megatron.layer.self_attention"):
            hidden = layer.self_attention(hidden)
        with managed_span("layer", "megatron.layer.mlp"):
            return layer.mlp(hidden)


@trace_fn("microbatch", "megatron.microbatch.forward")
def forward_step(model: Model, microbatch_id: int) -> Any:
    if is_span_group_enabled("microbatch"):
        safe_set_span_attributes(trace.get_current_span(), {"megatron.microbatch_id": microbatch_id})
    batch = model.next_batch()
    hidden = model.embed(batch)
    for number, layer in enumerate(model.layers, start=1):
        hidden = layer_forward(layer, number, hidden)
    return model.loss(hidden, batch)


@trace_fn("microbatch", "megatron.microbatch.backward")
def backward_step(model: Model, loss: Any) -> float:
    return model.backward(loss)


def forward_backward(model: Model, microbatches: int) -> float:
    # All forwards, then all backwards; a real pipeline interleaves them.
    p2p.recv_forward()
    losses = [forward_step(model, microbatch_id) for microbatch_id in range(microbatches)]
    p2p.send_forward()
    p2p.recv_backward()
    values = [backward_step(model, loss) for loss in losses]
    p2p.send_backward()
    return fmean(values)


def train_step(model: Model, microbatches: int) -> tuple[float, float]:
    """(mean loss of the microbatches, norm of the gradient)."""
    # The gate first, where a site makes something that a disabled span need not pay for.
    with (
        span_cm("megatron.forward_backward", **{"megatron.num_microbatches": microbatches})  # type: ignore[arg-type]
        if is_span_group_enabled("forward_backward")
        else nullcontext()
    ):
        loss = forward_backward(model, microbatches)
    ddp.start_grad_sync()
    ddp.finish_grad_sync()
    with span_cm("megatron.optimizer_step") if is_span_group_enabled("optimizer") else nullcontext() as span:
        grad_norm, successful = model.optimizer_step()
        if span is not None:
            safe_set_span_attributes(span, {"megatron.grad_norm": grad_norm, "megatron.update_successful": successful})
    return loss, grad_norm


@trace_fn("evaluate", "megatron.evaluate")
def evaluate(model: Model) -> float:
    if is_span_group_enabled("evaluate"):
        safe_set_span_attributes(trace.get_current_span(), {"megatron.eval_iters": EVAL_ITERS})
    losses = []
    for iteration in range(EVAL_ITERS):
        with managed_span("evaluate", "megatron.evaluate.step", **{"megatron.eval_iteration": iteration}):
            losses.append(model.evaluate())
    return fmean(losses)


def save_checkpoint(model: Model, iteration: int, file: io.BytesIO) -> None:
    with managed_span("checkpoint", "megatron.save_checkpoint", **{"megatron.iteration": iteration}):
        with managed_span("checkpoint", "megatron.save_checkpoint.state_dict"):
            state = model.state_dict()
        with managed_span("checkpoint", "megatron.save_checkpoint.io_write"):
            file.seek(0)
            pickle.dump(state, file)


def load_checkpoint(model: Model, file: io.BytesIO) -> None:
    with managed_span("load_checkpoint", "megatron.load_checkpoint"):
        with managed_span("load_checkpoint", "megatron.load_checkpoint.io_read"):
            state = pickle.load(file)
        model.load_state_dict(state)


@dataclass(frozen=True)
class Losses:
    """The mean loss of each step, and the one of the last evaluation."""

    steps: list[float]
    evaluation: float


@trace_fn("job", "megatron.train")
def train(model: Model, options: Options, file: io.BytesIO) -> Losses:
    if is_span_group_enabled("job"):
        safe_set_span_attributes(trace.get_current_span(), {"megatron.train_iters": options.steps})
    losses = []
    evaluation = math.nan
    for iteration in range(1, options.steps + 1):
        with managed_span("step", "megatron.train_step", **{"megatron.iteration": iteration}) as span:
            loss, grad_norm = train_step(model, options.microbatches)
            if span is not None:
                safe_set_span_attributes(span, {"megatron.loss": loss, "megatron.grad_norm": grad_norm})
        losses.append(loss)
        if iteration % SAVE_INTERVAL == 0 or iteration == options.steps:
            evaluation = evaluate(model)
            save_checkpoint(model, iteration, file)
    return Losses(losses, evaluation)


def build_model(options: Options) -> Model:
    """The model that `options.model` names.

    Raises:
        ImportError: torch is not installed.
        ValueError: there is no such model.
    """
    if options.model == "loop":
        return LoopModel(options.layers)
    if options.model == "torch":
        from .demo_torch import TorchModel

        return TorchModel(options.layers)
    raise ValueError(f"Unknown model {options.model!r}; allowed: loop, torch")


def pretrain(options: Options, tracer: Tracer) -> Losses:
    """The whole job."""
    # By hand, as where begin and end lie in different functions; elsewhere managed_span is shorter.
    span = None
    if is_span_group_enabled("job"):
        span = tracer.start_span("megatron.pretrain")
        safe_set_span_attributes(
            span,
            {
                "megatron.model_type": options.model,
                "megatron.train_iters": options.steps,
                "megatron.global_batch_size": MICRO_BATCH_SIZE * options.microbatches,
            },
        )
        token = context.attach(trace.set_span_in_context(span))
    try:
        with managed_span("model_init", "megatron.model_init"):
            model = build_model(options)
        # A file in memory; what is in it stands for the checkpoint of an earlier run.
        file = io.BytesIO(pickle.dumps(model.state_dict()))
        load_checkpoint(model, file)
        return train(model, options, file)
    finally:
        if span is not None:
            context.detach(token)
            span.end()


def set_up(span_groups: str, exporter: str) -> tuple[TelemetryHandle, Any]:
    """What a trainer does first, plus a copy of the spans for the demo's report.

    Args:
        span_groups: a spec in the names of MegatronSpanGroup.
        exporter: `"memory"`, `"console"` or `"otlp"`.

    Returns:
        The handle, and the InMemorySpanExporter that will hold every span once the handle is shut down.

    Raises:
        ImportError: the SDK is not installed.
        ValueError: an unknown group, a bad value in the environment, or an environment that lets nothing be exported.
        RuntimeError: telemetry has already been set up in this process.
    """
    try:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError as error:
        raise ImportError(f"the demo needs the OpenTelemetry SDK: pip install 'lensfast[sdk]' ({error})") from error

    config = NemoLensConfig.from_env("MEGATRON_OTEL", fallback_prefix="NEMO_LENS", span_group_cls=MegatronSpanGroup)
    config.enabled = config.traces_enabled = True
    config.metrics_enabled = config.logs_enabled = False
    config.export_strategy = "all_ranks"
    config.service_name = os.environ.get("OTEL_SERVICE_NAME", "").strip() or "lensfast-demo"
    config.span_groups = span_groups
    memory = InMemorySpanExporter()
    if exporter == "memory":
        telemetry = setup_telemetry(config, rank=0, world_size=1, span_exporter=memory)
    else:
        config.exporter = exporter
        telemetry = setup_telemetry(config, rank=0, world_size=1)
    if not telemetry.is_exporting:
        raise ValueError("no span would be exported: OTEL_SDK_DISABLED is set, or a no-op tracer provider is installed")
    if exporter != "memory":
        provider: Any = trace.get_tracer_provider()
        provider.add_span_processor(SimpleSpanProcessor(memory))
    return telemetry, memory


def run(options: Options, telemetry: TelemetryHandle) -> Losses:
    """Train, deliver the spans, and leave every group disabled."""
    try:
        return pretrain(options, telemetry.tracer)
    finally:
        telemetry.shutdown()
        set_enabled_span_groups(frozenset())


def calls_per_step(layers: int, microbatches: int) -> dict[str, int]:
    """How often one train_step of this loop passes each kind of call site."""
    return {
        "managed_span": 2 * layers * microbatches,
        "managed_span_dict": layers * microbatches + 1,
        "trace_fn": 2 * microbatches + 6,
        "is_span_group_enabled": microbatches + 2,
    }


def enabled_calls_per_step(layers: int, microbatches: int, enabled: frozenset[str]) -> dict[str, int]:
    """How often one train_step passes each kind of site in ENABLED_SITES, of those whose group is in `enabled`."""
    by_group = {
        "step": {"managed_span_dict": 1, "set_attributes": 1},
        "forward_backward": {"span_cm": 1},
        "communication": {"trace_fn": 6},
        "microbatch": {"trace_fn": 2 * microbatches, "set_attributes": microbatches},
        "layer": {"managed_span": 2 * layers * microbatches, "managed_span_dict": layers * microbatches},
        "optimizer": {"span_cm": 1, "set_attributes": 1},
    }
    calls = dict.fromkeys(ENABLED_SITES, 0)
    for group in enabled & by_group.keys():
        for site, count in by_group[group].items():
            calls[site] += count
    return calls


ENABLED_SITES = {
    "managed_span": ("managed_span(g, name)", "with managed_span('layer', 'megatron.layer.mlp', tracer): pass", "pass"),
    "managed_span_dict": (
        "managed_span(g, name, **{k: n})",
        "with managed_span('layer', 'megatron.layer.forward', tracer, **{'megatron.layer_number': n}): pass",
        "pass",
    ),
    "trace_fn": ("@trace_fn, over a plain call", "traced()", "plain()"),
    "span_cm": (
        "span_cm(name, **{k: n})",
        "with span_cm('megatron.forward_backward', tracer, **{'megatron.num_microbatches': n}): pass",
        "pass",
    ),
    "set_attributes": (
        "safe_set_span_attributes(s, {k: n})",
        "safe_set_span_attributes(span, {'megatron.microbatch_id': n})",
        "pass",
    ),
}
"""For each kind of site: its label, what is timed, and what of that is not the site's cost."""


def enabled_site_costs(rounds: int = 10, calls: int = 500) -> tuple[list[dict[str, float]], str | None]:
    """Nanoseconds that each kind of site in ENABLED_SITES takes of the thread that passes it, while it is enabled.

    The best of `rounds` runs of `calls` calls, the SDK's spans and native ones taking turns. Their providers are not
    the global one and have what setup_telemetry gives its own, but for an exporter: what it would send is discarded.
    Leaves every group disabled.

    Returns:
        The costs of the SDK's spans and, if they are possible here, of native ones; and why they are not, or None.
    """
    from ._native import why_not

    def plain() -> None: ...

    reason = why_not()
    providers = [_discarding_provider(native) for native in ((False,) if reason else (False, True))]
    timers: dict[tuple[int, str], timeit.Timer] = {}
    for index, provider in enumerate(providers):
        tracer = provider.get_tracer("nemo.lens.helpers")
        names = {
            "managed_span": managed_span,
            "span_cm": span_cm,
            "safe_set_span_attributes": safe_set_span_attributes,
            "traced": trace_fn("layer", "megatron.microbatch.forward", tracer)(plain),
            "plain": plain,
            "tracer": tracer,
            "span": tracer.start_span("megatron.microbatch.forward"),
            "n": 1,
        }
        for _, timed, baseline in ENABLED_SITES.values():
            for statement in (timed, baseline):
                timers[index, statement] = timeit.Timer(statement, globals=names)
    best = dict.fromkeys(timers, math.inf)
    try:
        set_enabled_span_groups(frozenset({"layer"}))
        for _ in range(rounds):
            for key, timer in timers.items():
                best[key] = min(best[key], timer.timeit(calls))
                providers[key[0]].force_flush()  # not while the other one is timed
    finally:
        set_enabled_span_groups(frozenset())
        for provider in providers:
            provider.shutdown()
    costs = [
        {
            site: max(0.0, best[index, timed] - best[index, baseline]) / calls * 1e9
            for site, (_, timed, baseline) in ENABLED_SITES.items()
        }
        for index in range(len(providers))
    ]
    return costs, reason


def _discarding_provider(native: bool) -> Any:
    """A provider like that of setup_telemetry, of spans that go nowhere."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from ._export import CountingSpanProcessor, EncodingSpanProcessor, can_encode
    from .providers import SeedIndependentIdGenerator, _OpenSpanCloser, _ScopedSpanAttributes

    class Discard(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    processor: Any = CountingSpanProcessor
    provider_class = TracerProvider
    if native:
        from ._native import TracerProvider as provider_class  # noqa: N813

        with suppress(ImportError):  # without the exporters for OTLP, there is no encoding either
            processor = EncodingSpanProcessor if can_encode() else processor
    ids: Any = SeedIndependentIdGenerator()
    provider = provider_class(shutdown_on_exit=False, id_generator=ids)
    parts: list[Any] = [_ScopedSpanAttributes(), _OpenSpanCloser(), processor(Discard())]
    for part in parts:
        provider.add_span_processor(part)
    return provider
