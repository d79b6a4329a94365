"""The training loop of `lensfast demo`: exactly which spans it makes, on both backends."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

ALL = {
    "job",
    "checkpoint",
    "evaluate",
    "model_init",
    "load_checkpoint",
    "step",
    "forward_backward",
    "optimizer",
    "microbatch",
    "layer",
    "communication",
    "activation_offload",
    "data_loading",
    "inference",
}
DEFAULT = {"job", "checkpoint", "evaluate", "inference"}
PER_STEP = ALL - {"microbatch", "layer", "activation_offload"}

SPECS = {
    "default": DEFAULT,
    "per_step": PER_STEP,
    "all": ALL,
    "default,layer": DEFAULT | {"layer"},
    " Layer ,OPTIMIZER": {"layer", "optimizer"},
    "microbatch,evaluate,load_checkpoint": {"microbatch", "evaluate", "load_checkpoint"},
    "activation_offload,data_loading,inference": {"activation_offload", "data_loading", "inference"},
    "": set(),
}

SITE_KINDS = ("managed_span", "managed_span_dict", "trace_fn", "is_span_group_enabled")

# What the loop computes itself: the tree is compared without the values, which have tests of their own.
FLOAT = "a finite float"


class Site(NamedTuple):
    name: str
    group: str
    parent: str | None
    attributes: list[dict[str, Any]]
    """Of each span that one parent has, in order."""


def sites(steps: int, microbatches: int, layers: int, model: str = "loop") -> list[Site]:
    """Megatron's span tree; siblings stand in the order in which the loop reaches them."""
    once: list[dict[str, Any]] = [{}]
    pretrain = {
        "megatron.model_type": model,
        "megatron.train_iters": steps,
        "megatron.global_batch_size": 4 * microbatches,
    }
    step = {"megatron.loss": FLOAT, "megatron.grad_norm": FLOAT}
    train, forward_backward = "megatron.train", "megatron.forward_backward"
    return [
        Site("megatron.pretrain", "job", None, [pretrain]),
        Site("megatron.model_init", "model_init", "megatron.pretrain", once),
        Site("megatron.load_checkpoint", "load_checkpoint", "megatron.pretrain", once),
        Site("megatron.load_checkpoint.io_read", "load_checkpoint", "megatron.load_checkpoint", once),
        Site(train, "job", "megatron.pretrain", [{"megatron.train_iters": steps}]),
        Site("megatron.train_step", "step", train, [{"megatron.iteration": i + 1, **step} for i in range(steps)]),
        Site(
            forward_backward,
            "forward_backward",
            "megatron.train_step",
            [{"megatron.num_microbatches": microbatches}],
        ),
        Site("megatron.p2p.recv_forward", "communication", forward_backward, once),
        Site(
            "megatron.microbatch.forward",
            "microbatch",
            forward_backward,
            [{"megatron.microbatch_id": i} for i in range(microbatches)],
        ),
        Site(
            "megatron.layer.forward",
            "layer",
            "megatron.microbatch.forward",
            [{"megatron.layer_number": i + 1} for i in range(layers)],
        ),
        Site("megatron.layer.self_attention", "layer", "megatron.layer.forward", once),
        Site("megatron.layer.mlp", "layer", "megatron.layer.forward", once),
        Site("megatron.p2p.send_forward", "communication", forward_backward, once),
        Site("megatron.p2p.recv_backward", "communication", forward_backward, once),
        Site("megatron.microbatch.backward", "microbatch", forward_backward, once * microbatches),
        Site("megatron.p2p.send_backward", "communication", forward_backward, once),
        Site("megatron.grad_sync.start", "communication", "megatron.train_step", once),
        Site("megatron.grad_sync.finish", "communication", "megatron.train_step", once),
        Site(
            "megatron.optimizer_step",
            "optimizer",
            "megatron.train_step",
            [{"megatron.grad_norm": FLOAT, "megatron.update_successful": True}],
        ),
        Site("megatron.evaluate", "evaluate", train, [{"megatron.eval_iters": 2}]),
        Site(
            "megatron.evaluate.step", "evaluate", "megatron.evaluate", [{"megatron.eval_iteration": i} for i in (0, 1)]
        ),
        Site("megatron.save_checkpoint", "checkpoint", train, [{"megatron.iteration": steps}]),
        Site("megatron.save_checkpoint.state_dict", "checkpoint", "megatron.save_checkpoint", once),
        Site("megatron.save_checkpoint.io_write", "checkpoint", "megatron.save_checkpoint", once),
    ]


def expected_lines(all_sites: list[Site], enabled: set[str]) -> list[str]:
    """The tree, one indented line a span; what hangs under a disabled span moves up to the nearest enabled one."""

    def below(parent: str | None, depth: int) -> Iterator[str]:
        for site in (site for site in all_sites if site.parent == parent):
            for attributes in site.attributes:
                if site.group in enabled:
                    yield line(site.name, attributes, depth)
                    yield from below(site.name, depth + 1)
                else:
                    yield from below(site.name, depth)

    return list(below(None, 0))


def line(name: str, attributes: dict[str, Any], depth: int) -> str:
    # repr() tells 1 from True and 1.0.
    return f"{'  ' * depth}{name} {sorted(attributes.items())!r}"


def recorded_lines(spans: list[ReadableSpan]) -> list[str]:
    """The tree of `spans`; a parent that is not among them makes the test fail."""
    spans = sorted(spans, key=lambda span: span.start_time)

    def below(parent_id: int | None, depth: int) -> Iterator[str]:
        for span in spans:
            if (span.parent.span_id if span.parent else None) == parent_id:
                attributes = {
                    key: FLOAT if isinstance(value, float) and math.isfinite(value) else value
                    for key, value in span.attributes.items()
                }
                yield line(span.name, attributes, depth)
                yield from below(span.context.span_id, depth + 1)

    lines = list(below(None, 0))
    assert len(lines) == len(spans), "a span has a parent that was not recorded"
    return lines


def train(package: ModuleType, span_groups: str, **options: Any) -> tuple[Any, list[ReadableSpan]]:
    telemetry, memory = package.demo.set_up(span_groups, "memory")
    losses = package.demo.run(package.demo.Options(**options), telemetry)
    return losses, list(memory.get_finished_spans())


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time)


def test_groups_are_those_of_megatron(lensfast: ModuleType) -> None:
    group_class = lensfast.demo.MegatronSpanGroup
    assert issubclass(group_class, lensfast.SpanGroup)
    assert group_class.ALL_GROUPS == ALL
    assert group_class._PRESETS == {"default": DEFAULT, "per_step": PER_STEP, "all": ALL}
    assert lensfast.demo.GROUP_OF_SPAN == {site.name: site.group for site in sites(1, 1, 1)}


@pytest.mark.parametrize("spec", SPECS)
def test_span_tree(lensfast: ModuleType, spec: str) -> None:
    _, spans = train(lensfast, spec, steps=2, microbatches=3, layers=2)
    assert recorded_lines(spans) == expected_lines(sites(2, 3, 2), SPECS[spec])


@pytest.mark.parametrize(("steps", "microbatches", "layers"), [(1, 1, 1), (3, 1, 4), (1, 5, 2)])
def test_span_tree_of_other_sizes(lensfast: ModuleType, steps: int, microbatches: int, layers: int) -> None:
    _, spans = train(lensfast, "all", steps=steps, microbatches=microbatches, layers=layers)
    assert recorded_lines(spans) == expected_lines(sites(steps, microbatches, layers), ALL)


def test_children_of_a_disabled_span_hang_under_the_nearest_enabled_one(lensfast: ModuleType) -> None:
    _, spans = train(lensfast, "default,layer", steps=2, microbatches=3, layers=2)
    (train_span,) = named(spans, "megatron.train")
    layers = named(spans, "megatron.layer.forward")
    assert [span.attributes["megatron.layer_number"] for span in layers] == [1, 2] * 6
    assert {span.parent.span_id for span in layers} == {train_span.context.span_id}


def test_a_run_is_one_trace_without_errors(lensfast: ModuleType) -> None:
    _, spans = train(lensfast, "all", steps=2, microbatches=2, layers=2)
    assert len({span.context.trace_id for span in spans}) == 1
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert {span.resource.attributes["service.name"] for span in spans} == {"lensfast-demo"}
    assert not any(span.events or span.links for span in spans)


def test_evaluates_and_saves_every_ten_steps_and_at_the_end(lensfast: ModuleType) -> None:
    losses, spans = train(lensfast, "default", steps=21, microbatches=1, layers=1)
    saves = named(spans, "megatron.save_checkpoint")
    assert [span.attributes["megatron.iteration"] for span in saves] == [10, 20, 21]
    assert len(named(spans, "megatron.evaluate")) == 3
    assert len(losses.steps) == 21


def test_measured_values_on_the_spans(lensfast: ModuleType) -> None:
    losses, spans = train(lensfast, "all", steps=4, microbatches=2, layers=2)
    steps, optimizers = named(spans, "megatron.train_step"), named(spans, "megatron.optimizer_step")
    assert [span.attributes["megatron.loss"] for span in steps] == losses.steps
    norms = [span.attributes["megatron.grad_norm"] for span in steps]
    assert norms == [span.attributes["megatron.grad_norm"] for span in optimizers]
    assert all(norm > 0 for norm in norms)
    # The weight starts at 0 and the target is 1; from there on it is gradient descent on a parabola.
    assert losses.steps[0] == 1.0
    assert losses.steps == sorted(losses.steps, reverse=True)
    assert losses.evaluation < losses.steps[-1]


def test_a_run_leaves_groups_disabled_and_no_span_current(lensfast: ModuleType) -> None:
    train(lensfast, "all", steps=1)
    assert lensfast.enabled_span_groups() == frozenset()
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_an_error_in_the_loop_comes_out_and_its_spans_are_kept(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(model: object, loss: object) -> float:
        raise FloatingPointError("loss is not finite")

    monkeypatch.setattr(lensfast.demo.LoopModel, "backward", backward)
    telemetry, memory = lensfast.demo.set_up("all", "memory")
    with pytest.raises(FloatingPointError, match="loss is not finite"):
        lensfast.demo.run(lensfast.demo.Options(), telemetry)
    spans = list(memory.get_finished_spans())
    (step,) = named(spans, "megatron.train_step")
    assert step.status.status_code is StatusCode.ERROR
    assert step.attributes == {"megatron.iteration": 1}
    (pretrain,) = named(spans, "megatron.pretrain")
    assert "nemo.span.truncated" not in pretrain.attributes
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert lensfast.enabled_span_groups() == frozenset()


def test_unknown_group(lensfast: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"'layr'.*activation_offload.*per_step"):
        lensfast.demo.set_up("default,layr", "memory")
    assert trace._TRACER_PROVIDER is None


def test_unknown_model(lensfast: ModuleType) -> None:
    with pytest.raises(ValueError, match="'jax'; allowed: loop, torch"):
        lensfast.demo.build_model(lensfast.demo.Options(model="jax"))


def test_environment_is_read_as_a_trainer_reads_it(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the command line decides wins: the demo always exports, and only spans.
    monkeypatch.setenv("MEGATRON_OTEL_ENABLED", "0")
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "all")
    monkeypatch.setenv("NEMO_LENS_EXPORT_RANK", "7")
    monkeypatch.setenv("NEMO_LENS_TRACES_ENABLED", "0")
    monkeypatch.setenv("NEMO_LENS_EXPORTER", "nowhere")
    monkeypatch.setenv("NEMO_LENS_RUN_ID", "run-5")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-trainer")
    _, spans = train(lensfast, "step", steps=3)
    assert [span.name for span in spans] == ["megatron.train_step"] * 3
    assert spans[0].resource.attributes["service.name"] == "my-trainer"
    assert spans[0].resource.attributes["nemo.run.id"] == "run-5"


def test_environment_with_a_bad_value(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LENS_EXPORT_RANK", "last")
    with pytest.raises(ValueError, match=r"NEMO_LENS_EXPORT_RANK.*'last'"):
        lensfast.demo.set_up("all", "memory")


def test_environment_that_switches_the_sdk_off(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(ValueError, match="OTEL_SDK_DISABLED"):
        lensfast.demo.set_up("all", "memory")


@pytest.mark.parametrize(("layers", "microbatches"), [(1, 1), (2, 3), (5, 2)])
def test_calls_per_step(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, layers: int, microbatches: int) -> None:
    demo = lensfast.demo
    calls = {"managed_span": 0, "managed_span_dict": 0, "trace_fn": 0, "is_span_group_enabled": 0}

    def managed_span(group: str, name: str, **attributes: Any) -> Any:
        calls["managed_span_dict" if attributes else "managed_span"] += 1
        return lensfast.managed_span(group, name, **attributes)

    def is_span_group_enabled(group: str) -> bool:
        calls["is_span_group_enabled"] += 1
        return lensfast.is_span_group_enabled(group)

    def train_steps(steps: int) -> int:
        """Runs a job; returns its number of spans in the groups where every call site is a trace_fn."""
        telemetry, memory = demo.set_up("microbatch,communication", "memory")
        demo.pretrain(demo.Options(steps, microbatches, layers), telemetry.tracer)
        trace.get_tracer_provider().force_flush()
        return len(memory.get_finished_spans())

    monkeypatch.setattr(demo, "managed_span", managed_span)
    monkeypatch.setattr(demo, "is_span_group_enabled", is_span_group_enabled)
    calls["trace_fn"] = train_steps(1)
    assert calls["trace_fn"] == 2 * microbatches + 6
    # Outside its step a job enters model_init, load_checkpoint and the three parts of input and output without
    # attributes, save_checkpoint and two evaluation steps with one; pretrain, train and evaluate ask the gate.
    outside = {"managed_span": 5, "managed_span_dict": 3, "trace_fn": 0, "is_span_group_enabled": 3}
    assert demo.calls_per_step(layers, microbatches) == {site: calls[site] - outside[site] for site in calls}


def test_calls_per_step_of_a_large_model(lensfast: ModuleType) -> None:
    calls = lensfast.demo.calls_per_step(96, 64)
    # 6,144 each of layer.forward, self_attention and mlp, and the step itself.
    assert calls["managed_span"] == 12_288
    assert calls["managed_span_dict"] == 6_144 + 1
    assert calls["trace_fn"] == 128 + 6


@pytest.mark.parametrize("spec", ["all", "per_step", "layer", "microbatch,optimizer", "default"])
def test_enabled_calls_per_step(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    demo = lensfast.demo
    layers, microbatches = 2, 3
    set_in: list[str] = []

    def safe_set_span_attributes(span: Any, attributes: Any) -> None:
        set_in.append(span.name)
        lensfast.safe_set_span_attributes(span, attributes)

    monkeypatch.setattr(demo, "safe_set_span_attributes", safe_set_span_attributes)
    _, spans = train(lensfast, spec, steps=1, microbatches=microbatches, layers=layers)
    calls = demo.enabled_calls_per_step(layers, microbatches, frozenset(SPECS.get(spec, set(spec.split(",")))))
    assert calls.keys() == demo.ENABLED_SITES.keys()
    kinds = {
        "managed_span": {"megatron.layer.self_attention", "megatron.layer.mlp"},
        "managed_span_dict": {"megatron.train_step", "megatron.layer.forward"},
        "trace_fn": {name for name in demo.GROUP_OF_SPAN if name.startswith(("megatron.p2p", "megatron.grad_sync"))}
        | {"megatron.microbatch.forward", "megatron.microbatch.backward"},
        "span_cm": {"megatron.forward_backward", "megatron.optimizer_step"},
    }
    for kind, names in kinds.items():
        assert calls[kind] == sum(span.name in names for span in spans), kind
    outside = {"megatron.pretrain", "megatron.train", "megatron.evaluate"}
    assert calls["set_attributes"] == sum(name not in outside for name in set_in)


def test_enabled_sites_are_measured_apart_from_the_demos_own_spans(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Native(lensfast._native.TracerProvider):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(type(self.get_tracer("any").start_span("any")).__module__)

    monkeypatch.setattr(lensfast._native, "TracerProvider", Native)
    telemetry, memory = lensfast.demo.set_up("all", "memory")
    lensfast.demo.run(lensfast.demo.Options(steps=1), telemetry)
    spans = memory.get_finished_spans()
    made.clear()
    provider = trace.get_tracer_provider()
    costs, reason = lensfast.demo.enabled_site_costs(rounds=1, calls=2)
    assert trace.get_tracer_provider() is provider
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert memory.get_finished_spans() == spans
    assert lensfast.enabled_span_groups() == frozenset()
    assert all(cost.keys() == lensfast.demo.ENABLED_SITES.keys() for cost in costs)
    assert all(nanoseconds >= 0 for cost in costs for nanoseconds in cost.values())
    if lensfast.backend == "c":
        assert (len(costs), reason) == (2, None)
        assert set(made) == {"lensfast._native"}
    else:
        assert (len(costs), reason) == (1, lensfast._backend.backend_reason)
        assert made == []


def test_enabled_sites_without_the_exporters(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.common.trace_encoder", None)
    costs, _ = lensfast.demo.enabled_site_costs(rounds=1, calls=1)
    assert len(costs) == 1 + (lensfast.backend == "c")


def enabled_rows(text: str) -> dict[str, list[str]]:
    table = text.partition("Cost of enabled sites, to the thread that passes them\n")[2].partition("\n\n")[0]
    return {cells[0]: cells[1:] for line in table.splitlines() if len(cells := re.split(r"  +", line)) > 1}


def fake_costs(monkeypatch: pytest.MonkeyPatch, demo: ModuleType, reason: str | None) -> None:
    sdk = dict(zip(demo.ENABLED_SITES, (10_000.0, 20_000.0, 8_000.0, 5_000.0, 1_000.0), strict=True))
    native = dict(zip(demo.ENABLED_SITES, (500.0, 1_000.0, 400.0, 0.0, 500.0), strict=True))
    monkeypatch.setattr(demo, "enabled_site_costs", lambda: ([sdk] if reason else [sdk, native], reason))


def test_report_of_enabled_sites(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_costs(monkeypatch, lensfast.demo, None)
    monkeypatch.setattr(lensfast.cli, "site_costs", lambda libraries: [dict.fromkeys(SITE_KINDS, 1.0)] * len(libraries))
    assert lensfast.cli.main(["demo", "--steps", "1", "--layers", "2", "--microbatches", "3"]) == 0
    # Of 2 layers x 3 microbatches: 12 * 10 + 7 * 20 + 12 * 8 + 2 * 5 + 5 * 1 us, and 12 * 500 + ... ns.
    assert enabled_rows(capsys.readouterr().out) == {
        "site": ["in 2x3", "in 96x64", "SDK spans", "native spans", "ratio"],
        "managed_span(g, name)": ["12", "12,288", "10.0 us", "500 ns", "20.0x"],
        "managed_span(g, name, **{k: n})": ["7", "6,145", "20.0 us", "1.00 us", "20.0x"],
        "@trace_fn, over a plain call": ["12", "134", "8.00 us", "400 ns", "20.0x"],
        "span_cm(name, **{k: n})": ["2", "2", "5.00 us", "0 ns", "-"],
        "safe_set_span_attributes(s, {k: n})": ["5", "66", "1.00 us", "500 ns", "2.0x"],
        "one step, 2x3": ["38", "371 us", "20.3 us", "18.3x"],
        "one step, 96x64": ["18,635", "247 ms", "12.4 ms", "20.0x"],
    }


def test_report_of_enabled_sites_says_why_there_are_no_native_spans(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_costs(monkeypatch, lensfast.demo, "the moon is full")
    monkeypatch.setattr(lensfast.cli, "site_costs", lambda libraries: [dict.fromkeys(SITE_KINDS, 1.0)] * len(libraries))
    assert lensfast.cli.main(["demo", "--steps", "1", "--span-groups", "step"]) == 0
    text = capsys.readouterr().out
    assert enabled_rows(text) == {
        "site": ["in 4x4", "in 96x64", "SDK spans"],
        "managed_span(g, name, **{k: n})": ["1", "1", "20.0 us"],
        "safe_set_span_attributes(s, {k: n})": ["1", "1", "1.00 us"],
        "one step, 4x4": ["2", "21.0 us"],
        "one step, 96x64": ["2", "21.0 us"],
    }
    assert "no native spans here: the moon is full\n" in text


def test_no_report_of_enabled_sites_without_one_in_the_step(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lensfast.demo, "enabled_site_costs", lambda: pytest.fail("there is nothing to measure"))
    monkeypatch.setattr(lensfast.cli, "site_costs", lambda libraries: [dict.fromkeys(SITE_KINDS, 1.0)] * len(libraries))
    assert lensfast.cli.main(["demo", "--steps", "1", "--span-groups", "default"]) == 0
    assert "Cost of enabled sites" not in capsys.readouterr().out


@pytest.fixture
def _torch(lensfast: ModuleType) -> None:
    try:
        lensfast.demo_torch.import_torch()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("_torch")
def test_torch_model_learns(lensfast: ModuleType) -> None:
    losses, spans = train(lensfast, "all", steps=12, microbatches=2, layers=2, model="torch")
    # Guessing among 64 tokens costs log(64) = 4.16; every token follows from the one before.
    assert losses.steps[0] == pytest.approx(math.log(64), abs=0.5)
    assert losses.steps[-1] < losses.steps[0] / 2
    assert losses.evaluation < losses.steps[0] / 2
    assert [span.attributes["megatron.loss"] for span in named(spans, "megatron.train_step")] == losses.steps
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}


@pytest.mark.usefixtures("_torch")
@pytest.mark.parametrize("spec", ["all", "default,layer"])
def test_torch_model_has_the_same_span_tree(lensfast: ModuleType, spec: str) -> None:
    _, spans = train(lensfast, spec, steps=2, microbatches=2, layers=3, model="torch")
    assert recorded_lines(spans) == expected_lines(sites(2, 2, 3, "torch"), SPECS[spec])


@pytest.mark.usefixtures("_torch")
def test_torch_checkpoint_restores_the_model(lensfast: ModuleType) -> None:
    model, other = lensfast.demo_torch.TorchModel(1), lensfast.demo_torch.TorchModel(1)
    batch = model.next_batch()

    def loss(of: Any) -> Any:
        return of.loss(of.embed(batch), batch)

    model.backward(loss(model))
    assert model.optimizer_step()[1] is True
    assert loss(model).item() != loss(other).item()
    other.load_state_dict(model.state_dict())
    assert loss(model).item() == loss(other).item()


def test_torch_is_not_installed(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'lensfast\[torch\]'"):
        lensfast.demo.build_model(lensfast.demo.Options(model="torch"))
