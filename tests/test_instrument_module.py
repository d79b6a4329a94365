"""instrument_module: forward and backward spans of the modules of a model, which is otherwise as it was."""

import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import itertools
import logging
import pickle
import subprocess
import sys
import threading
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

ALL = {"layer", "linear", "all"}


@pytest.fixture
def torch(lensfast):
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    torch.manual_seed(0)
    return torch


@pytest.fixture
def modules(lensfast, torch):
    return importlib.import_module("lensfast.contrib.torch._modules")


@pytest.fixture
def instrument(lensfast, modules, exporter):
    """instrument_module with all groups on, and nothing exported yet."""
    lensfast.set_enabled_span_groups(ALL)
    return modules.instrument_module


@pytest.fixture
def nets(torch):
    """A small transformer."""

    class Block(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.norm = torch.nn.LayerNorm(size)
            self.q, self.k, self.v = (torch.nn.Linear(size, size) for _ in range(3))
            self.mlp = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(inplace=True))

        def forward(self, x, *, scale=1.0):
            h = self.norm(x)
            attention = torch.softmax(self.q(h) @ self.k(h).transpose(-1, -2), -1) @ self.v(h)
            return x + self.mlp(attention) * scale

    class Model(torch.nn.Module):
        def __init__(self, layers=2, size=4):
            super().__init__()
            self.embedding = torch.nn.Embedding(8, size)
            self.layers = torch.nn.ModuleList([Block(size) for _ in range(layers)])
            self.head = torch.nn.Linear(size, 8)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return SimpleNamespace(Block=Block, Model=Model, tokens=torch.tensor([[1, 2, 3], [4, 5, 6]]))


def module_of(torch, forward):
    """A module with this forward."""
    return type("Module", (torch.nn.Module,), {"forward": forward})()


def names(exporter):
    """Of the finished spans, in the order of their ends."""
    return [span.name for span in exporter.get_finished_spans()]


def named(exporter, name):
    (span,) = (span for span in exporter.get_finished_spans() if span.name == name)
    return span


def tree(exporter):
    """The finished spans as nested dicts, in the order of their starts."""
    spans = sorted(exporter.get_finished_spans(), key=lambda span: (span.start_time, span.context.span_id))
    inside = {span.context.span_id: {} for span in spans}
    roots = {}
    for span in spans:
        parent = inside.get(span.parent.span_id) if span.parent else None
        (roots if parent is None else parent)[span.name] = inside[span.context.span_id]
    return roots


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def attributes_of(model):
    """What each module has in its __dict__, so as to be compared."""
    return {path: dict(vars(module)) for path, module in model.named_modules()}


def instrumented(model):
    """The paths of the modules that have a forward of their own."""
    return [path for path, module in model.named_modules() if "forward" in vars(module)]


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Selecting

BLOCKS = ["layers.0", "layers.1"]
LINEARS = [f"layers.{n}.{name}" for n in (0, 1) for name in ("q", "k", "v", "mlp.0")] + ["head"]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda torch, nets: nets.Block, BLOCKS),
        (lambda torch, nets: torch.nn.Linear, LINEARS),
        (lambda torch, nets: (nets.Block, torch.nn.Embedding), ["embedding", *BLOCKS]),
        (lambda torch, nets: "layers.*", BLOCKS),
        (lambda torch, nets: "layers.1", ["layers.1"]),
        (lambda torch, nets: "layers.[!1].?", ["layers.0.q", "layers.0.k", "layers.0.v"]),
        (lambda torch, nets: "*", ["embedding", "head"]),
        (lambda torch, nets: "LAYERS.*", []),
        (lambda torch, nets: "layers", []),
        (lambda torch, nets: "", [""]),
        (lambda torch, nets: "**.q", ["layers.0.q", "layers.1.q"]),
        (
            lambda torch, nets: "layers.1.**",
            ["layers.1", *(f"layers.1.{n}" for n in ["norm", "q", "k", "v", "mlp", "mlp.0", "mlp.1"])],
        ),
        (lambda torch, nets: "layers.**.0", ["layers.0", "layers.0.mlp.0", "layers.1.mlp.0"]),
        (lambda torch, nets: 0, [""]),
        (lambda torch, nets: 1, ["embedding", "head"]),
        (lambda torch, nets: 2, BLOCKS),
        (lambda torch, nets: 9, []),
        (
            lambda torch, nets: lambda path, module: path.endswith("v") and module.in_features == 4,
            ["layers.0.v", "layers.1.v"],
        ),
        (
            lambda torch, nets: ["**.q", 0, torch.nn.Embedding, ["head"]],
            ["", "embedding", "layers.0.q", "layers.1.q", "head"],
        ),
        (lambda torch, nets: [], []),
    ],
)
def test_what_a_selector_selects(instrument, torch, nets, select, expected):
    model = nets.Model()
    assert instrument(model, {"all": select(torch, nets)}) is model
    assert sorted(instrumented(model)) == sorted(expected)


def test_the_first_group_that_names_a_module_has_it(lensfast, instrument, torch, nets, exporter):
    model = instrument(nets.Model(1), {"linear": "layers.0.q", "all": torch.nn.Linear})
    lensfast.set_enabled_span_groups({"linear"})
    model(nets.tokens)
    assert names(exporter) == ["layers.0.q.forward"]


def test_a_shared_module_has_its_first_path(instrument, torch, exporter):
    linear = torch.nn.Linear(2, 2)
    model = instrument(
        torch.nn.ModuleDict({"first": linear, "second": torch.nn.Sequential(linear)}), {"all": torch.nn.Linear}
    )
    model["second"](torch.ones(2))
    assert names(exporter) == ["first.forward"]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (["layers.*"], TypeError, "a dict from a span group's name"),
        ("layers.*", TypeError, "a dict from a span group's name"),
        ({1: "layers.*"}, TypeError, "named by a str, not 1"),
        ({"": "layers.*"}, ValueError, "not empty"),
        ({"g": None}, TypeError, "not by None"),
        ({"g": 1.5}, TypeError, "not by 1.5"),
        ({"g": True}, TypeError, "not by True"),
        ({"g": -1}, ValueError, "0 or more, not -1"),
        ({"g": ()}, TypeError, r"not by \(\)"),
        ({"g": str}, TypeError, "not by <class 'str'>"),
        ({"g": ("layers.*",)}, TypeError, "not by"),
        ({"g": {"layers.*"}}, TypeError, "not by"),
        ({"g": ["layers.*", None]}, TypeError, "not by None"),
    ],
)
def test_wrong_groups_are_errors_and_change_nothing(instrument, nets, groups, error, message):
    model = nets.Model()
    if isinstance(groups, dict):
        groups = {"all": 0, **groups}
    with pytest.raises(error, match=message):
        instrument(model, groups)
    assert instrumented(model) == []


def test_a_module_is_no_selector(instrument, nets):
    model = nets.Model()
    with pytest.raises(TypeError, match="not by Linear"):
        instrument(model, {"all": model.head})


def test_what_a_selecting_function_raises_is_raised_and_nothing_is_changed(instrument, nets):
    model = nets.Model()
    with pytest.raises(ZeroDivisionError):
        instrument(model, {"layer": "layers.*", "all": lambda path, module: 1 / 0})
    assert instrumented(model) == []


def test_only_modules_are_instrumented(instrument, modules, torch):
    with pytest.raises(TypeError, match=r"instrument_module\(\) takes a torch.nn.Module, not function"):
        instrument(lambda x: x, {"all": 0})
    with pytest.raises(TypeError, match=r"instrument_module\(\) takes a torch.nn.Module, not type"):
        instrument(torch.nn.Linear, {"all": 0})
    with pytest.raises(TypeError, match=r"uninstrument\(\) takes a torch.nn.Module, not dict"):
        modules.uninstrument({})


def test_a_selector_that_matches_nothing_is_logged(instrument, nets, caplog):
    instrument(nets.Model(), {"layer": "layer.*", "all": 0})
    assert warnings_in(caplog) == [
        "instrument_module: nothing in the Model is selected by 'layer.*', for span group 'layer'"
    ]


def test_containers_are_not_called_and_not_instrumented(instrument, torch, nets, caplog):
    instrument(nets.Model(), {"all": torch.nn.ModuleList})
    assert warnings_in(caplog) == [
        f"instrument_module: nothing in the Model is selected by {torch.nn.ModuleList!r}, for span group 'all'"
    ]


# Forward spans


def test_the_forward_spans_of_a_model(instrument, torch, nets, exporter):
    model = instrument(nets.Model(), {"layer": "layers.*", "all": [0, "**.mlp", torch.nn.Embedding]})
    with torch.no_grad(), trace.get_tracer("test").start_as_current_span("step"):
        model(nets.tokens)
    assert tree(exporter) == {
        "step": {
            "Model.forward": {
                "embedding.forward": {},
                "layers.0.forward": {"layers.0.mlp.forward": {}},
                "layers.1.forward": {"layers.1.mlp.forward": {}},
            }
        }
    }
    span = named(exporter, "layers.1.mlp.forward")
    assert dict(span.attributes) == {"module.path": "layers.1.mlp", "module.class": "Sequential"}
    assert dict(named(exporter, "Model.forward").attributes) == {"module.path": "", "module.class": "Model"}
    assert span.instrumentation_scope.name == "nemo.lens.helpers"
    assert span.status.status_code is StatusCode.UNSET


def test_the_span_is_current_in_the_forward_and_gets_its_arguments(instrument, torch):
    def forward(self, x, /, y=2, *rest, scale, **more):
        return trace.get_current_span().name, self, x, y, rest, scale, more

    module = module_of(torch, forward)
    module.part = instrument(module_of(torch, forward), {"all": 0})
    instrument(module, {"all": 0})
    more = {"function": 5, "module": 6, "_module": 7}
    assert module(1, scale=3, **more) == ("Module.forward", module, 1, 2, (), 3, more)
    assert module(1, 2, 3, scale=3) == ("Module.forward", module, 1, 2, (3,), 3, {})
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_the_gate_is_read_at_each_call(lensfast, instrument, nets, exporter):
    model = instrument(nets.Model(1), {"layer": "layers.*", "linear": "head"})
    for groups, expected in (((), []), (("layer",), ["layers.0.forward"]), (("linear",), ["head.forward"]), ((), [])):
        lensfast.set_enabled_span_groups(set(groups))
        model(nets.tokens)
        assert names(exporter) == expected
        exporter.clear()


def test_an_exception_ends_the_span_and_passes(instrument, torch, exporter):
    def forward(self, x):
        raise KeyError("no such row")

    model = instrument(torch.nn.Sequential(module_of(torch, forward)), {"all": torch.nn.Module})
    with pytest.raises(KeyError, match="no such row"):
        model(torch.ones(1, requires_grad=True))
    for name in ("0.forward", "Sequential.forward"):
        span = named(exporter, name)
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "'no such row'")
        assert [event.name for event in span.events] == ["exception"]
    assert trace.get_current_span() is trace.INVALID_SPAN
    exporter.clear()
    with pytest.raises(KeyError):  # nothing is left that later spans would be taken to be inside of
        model(torch.ones(1))
    assert tree(exporter) == {"Sequential.forward": {"0.forward": {}}}


def test_two_threads_run_one_model(instrument, torch, nets, exporter):
    model = instrument(nets.Model(), {"layer": "layers.*", "all": 0})
    expected = copy.deepcopy(model)(nets.tokens)
    exporter.clear()
    start = threading.Barrier(2, timeout=20)

    def run(number):
        start.wait()
        for _ in range(10):
            with trace.get_tracer("test").start_as_current_span(f"thread {number}"):
                output = model(nets.tokens)
                output.sum().backward()
        return torch.equal(output, expected)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [True, True]
    spans = {span.context.span_id: span for span in exporter.get_finished_spans()}
    assert len(spans) == 2 * 10 * (1 + 2 * 3)
    for span in spans.values():
        if span.name.startswith("layers"):
            parent = spans[span.parent.span_id]
            assert parent.name == f"Model.{span.name.rpartition('.')[2]}"
            assert spans[parent.parent.span_id].name.startswith("thread")
            assert parent.context.trace_id == span.context.trace_id


# Backward spans


def test_the_backward_spans_of_a_model(lensfast, instrument, torch, nets, exporter):
    model = instrument(nets.Model(), {"all": torch.nn.Module})
    with lensfast.span_cm("step"):
        loss = model(nets.tokens).sum()
        exporter.clear()
        with lensfast.span_cm("backward"):
            loss.backward()
            assert trace.get_current_span().name == "backward"
    parts = ("mlp", "v", "k", "q", "norm")

    def block(number):
        inside = {f"layers.{number}.{part}.backward": {} for part in parts}
        inside[f"layers.{number}.mlp.backward"] = {f"layers.{number}.mlp.{n}.backward": {} for n in (1, 0)}
        return inside

    expected = {"head.backward": {}, **{f"layers.{n}.backward": block(n) for n in (1, 0)}, "embedding.backward": {}}
    found = tree(exporter)["step"]["backward"]
    assert found == {"Model.backward": expected}
    # In the order in which the engine comes to them.
    assert list(found["Model.backward"]) == list(expected)
    assert list(found["Model.backward"]["layers.1.backward"]) == [f"layers.1.{part}.backward" for part in parts]
    span = named(exporter, "layers.1.mlp.0.backward")
    assert dict(span.attributes) == {"module.path": "layers.1.mlp.0", "module.class": "Linear"}
    assert {span.status.status_code for span in exporter.get_finished_spans()} == {StatusCode.UNSET}


def test_siblings_follow_one_another_and_children_end_before_their_parents(instrument, torch, nets, exporter):
    model = instrument(nets.Model(3), {"all": torch.nn.Module})
    model(nets.tokens).sum().backward()
    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.name.endswith("backward")}
    inside = {}
    for span in spans.values():
        parent = spans.get(span.parent.span_id if span.parent else None)
        inside.setdefault(parent.name if parent else None, []).append(span)
        if parent is not None:
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
    assert sorted(map(len, inside.values())) == [1, 2, 2, 2, 5, 5, 5, 5]
    for siblings in inside.values():
        siblings.sort(key=lambda span: span.start_time)
        for one, next_one in itertools.pairwise(siblings):
            assert one.end_time <= next_one.start_time


def test_a_large_module_ends_where_its_input_is(instrument, torch, exporter):
    def many(self, x):
        for _ in range(50):
            x = x + 1
        return x

    order = []
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), module_of(torch, many))
    instrument(model, {"all": "1"})
    model[0].weight.register_hook(lambda gradient: order.append(names(exporter)))
    model(torch.ones(1)).backward()
    assert order == [["1.forward", "1.backward"]]


@pytest.mark.parametrize("leaf", [True, False])
def test_a_small_module_ends_after_its_first_node(instrument, torch, exporter, leaf):
    order = []

    def note(gradient):
        order.append(names(exporter))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

        def forward(self, x):
            two = self.two(x).exp()
            two.register_hook(note)  # between the two
            return self.one(x) + two

    x = torch.ones(1, requires_grad=True)
    instrument(Model(), {"all": torch.nn.Linear})(x if leaf else x * 2).backward()
    # `one` is over although the gradient of its input is not complete.
    assert order == [["two.forward", "one.forward", "one.backward"]]
    assert names(exporter)[3:] == ["two.backward"]


def test_no_backward_spans_without_gradients_or_for_a_group_that_was_off(lensfast, instrument, torch, nets, exporter):
    model = instrument(nets.Model(), {"all": torch.nn.Module})
    with torch.no_grad():
        model(nets.tokens)
    with torch.inference_mode():
        model(nets.tokens)
    lensfast.set_enabled_span_groups(set())
    loss = model(nets.tokens).sum()
    lensfast.set_enabled_span_groups(ALL)
    loss.backward()
    assert [name for name in names(exporter) if name.endswith("backward")] == []


def test_a_group_that_is_switched_off_after_the_forward_has_backward_spans(lensfast, instrument, nets, exporter):
    loss = instrument(nets.Model(), {"all": 0})(nets.tokens).sum()
    lensfast.set_enabled_span_groups(set())
    loss.backward()
    assert names(exporter) == ["Model.forward", "Model.backward"]


def test_backward_spans_may_be_declined(instrument, torch, nets, exporter):
    instrument(nets.Model(), {"all": torch.nn.Module}, backward=False)(nets.tokens).sum().backward()
    assert names(exporter)[-1] == "Model.forward"


def test_frozen_modules_have_no_backward_span_and_others_have(instrument, torch, nets, exporter):
    model = nets.Model()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    instrument(model, {"all": torch.nn.Module})
    model(nets.tokens).sum().backward()
    assert [name for name in names(exporter) if name.endswith("backward")] == ["head.backward", "Model.backward"]


def test_each_backward_pass_has_spans_of_its_own(instrument, torch, nets, exporter):
    loss = instrument(nets.Model(), {"all": [0, "head"]})(nets.tokens).sum()
    exporter.clear()
    for number in range(3):
        with trace.get_tracer("test").start_as_current_span(f"pass {number}"):
            loss.backward(retain_graph=number < 2)
    inside = {"Model.backward": {"head.backward": {}}}
    assert tree(exporter) == {"pass 0": inside, "pass 1": inside, "pass 2": inside}


def test_gradients_of_gradients(instrument, torch, nets, exporter):
    model, plain = nets.Model(), nets.Model()
    plain.load_state_dict(model.state_dict())
    instrument(model, {"all": torch.nn.Module})
    for each in (model, plain):
        loss = each(nets.tokens).square().sum()
        first = torch.autograd.grad(loss, list(each.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert names(exporter).count("Model.backward") == 2
    assert not any("lensfast.recompute" in span.attributes for span in exporter.get_finished_spans())


def test_only_what_the_pass_needs_runs_and_the_rest_is_ended_with_it(instrument, torch, nets, exporter):
    model = instrument(nets.Model(), {"all": torch.nn.Module})
    loss = model(nets.tokens).sum()
    exporter.clear()
    torch.autograd.grad(loss, model.head.weight)
    assert names(exporter) == ["head.backward", "Model.backward"]


def test_several_microbatches_of_one_loss(instrument, nets, exporter):
    model = instrument(nets.Model(), {"layer": "layers.*", "all": 0})
    (model(nets.tokens).sum() + model(nets.tokens).sum()).backward()
    backward = [name for name in names(exporter) if name.endswith("backward")]
    assert backward == ["layers.1.backward", "layers.0.backward", "Model.backward"] * 2


def test_a_loss_from_inside_a_module(instrument, torch, exporter):
    """As a router's: the gradient comes to the inner module first, and not through the output of the outer one."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x):
            self.loss = self.inner(x).sum()
            return x.detach()

    model = instrument(Outer(), {"all": torch.nn.Module})
    model(torch.ones(2))
    model.loss.backward()
    assert tree(exporter) == {"Outer.forward": {"inner.forward": {}}, "Outer.backward": {"inner.backward": {}}}


@dataclasses.dataclass
class Output:
    hidden: object
    more: object = None


# What wraps a tensor, and what gets it out again.
CONTAINERS = {
    "bare": (lambda x: x, lambda value: value),
    "tuple": (lambda x: (x, 3), lambda value: value[0]),
    "list": (lambda x: [None, [x]], lambda value: value[1][0]),
    "dict": (lambda x: {"hidden": {"last": x}, "n": 1}, lambda value: value["hidden"]["last"]),
    "dataclass": (lambda x: Output(1, {"x": (x,)}), lambda value: value.more["x"][0]),
    "opaque": (lambda x: SimpleNamespace(x=x), lambda value: value.x),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("argument", ["positional", "keyword"])
def test_tensors_in_containers_are_found(instrument, torch, exporter, container, argument):
    """Both in the input, where a module of many nodes ends, and in the output."""
    wrap, unwrap = CONTAINERS[container]
    found = []

    def forward(self, value):
        x = unwrap(value)
        for _ in range(50):
            x = x + 1
        return wrap(x)

    module = instrument(module_of(torch, forward), {"all": 0})
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: found.append(names(exporter)))
    value = wrap(x * 2)
    unwrap(module(value) if argument == "positional" else module(value=value)).backward()
    assert found == [["Module.forward"] if container == "opaque" else ["Module.forward", "Module.backward"]]
    assert x.grad.item() == 2


def in_place(x):
    return x.mul_(3)


def view(x):
    return x.view(-1)[1:]


def of_a_leaf(x):
    return x.add(1)


@pytest.mark.parametrize("first", [None, in_place, view, of_a_leaf, lambda x: x])
@pytest.mark.parametrize("then", [in_place, view, lambda x: x[:1].mul_(2), lambda x: x.unsqueeze(0).squeeze_()])
def test_what_is_changed_in_place_or_passed_on_keeps_its_gradients(instrument, torch, exporter, first, then):
    results = []
    for plain in (True, False):
        x = torch.arange(1.0, 5.0, requires_grad=True)
        part = torch.nn.Identity() if first is None else module_of(torch, lambda self, x: first(x))
        model = torch.nn.Sequential(
            module_of(torch, lambda self, x: x * 2), part, module_of(torch, lambda self, x: then(x))
        )
        if not plain:
            instrument(model, {"all": torch.nn.Module})
        output = model(x)
        output.square().sum().backward()
        results.append((output, x.grad))
    assert all(map(torch.equal, *results))
    assert names(exporter)[-1] == "Sequential.backward"
    assert "0.backward" in names(exporter)


def test_a_module_that_passes_its_input_on_has_no_backward_span(instrument, torch, exporter):
    x = torch.ones(1, requires_grad=True) * 2
    instrument(torch.nn.Identity(), {"all": 0})(x).backward()
    assert names(exporter) == ["Identity.forward"]


@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_the_same_to_the_last_bit(lensfast, instrument, torch, nets, training):
    model = nets.Model(3, 16).train(training)
    plain = copy.deepcopy(model)
    for path, module in model.named_modules():
        if path.endswith("mlp.1"):
            assert module.inplace
    instrument(model, {"all": torch.nn.Module})
    for _ in range(2):
        outputs = [each(nets.tokens) for each in (model, plain)]
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(*outputs)
        assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_custom_autograd_functions(instrument, torch, exporter):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    model = torch.nn.Sequential(module_of(torch, lambda self, x: Double.apply(x)), torch.nn.Linear(1, 1))
    x = torch.ones(1, requires_grad=True)
    instrument(model, {"all": torch.nn.Module})(x).backward()
    assert x.grad.item() == 2 * model[1].weight.item()
    assert names(exporter)[3:] == ["1.backward", "0.backward", "Sequential.backward"]


# Backward passes that fail


def failing(torch, exporter, instrument):
    def forward(self, x):
        y = x * 2
        y.register_hook(fail)
        return y * 3

    def fail(gradient):
        raise ValueError("bad gradient")

    return instrument(torch.nn.Sequential(torch.nn.Linear(1, 1), module_of(torch, forward)), {"all": torch.nn.Module})


def test_a_backward_pass_that_raises_leaves_no_span_open(instrument, torch, exporter):
    model = failing(torch, exporter, instrument)
    loss = model(torch.ones(1))
    exporter.clear()
    with pytest.raises(ValueError, match="bad gradient"):
        loss.backward()
    assert tree(exporter) == {"Sequential.backward": {"1.backward": {}}}
    for span in exporter.get_finished_spans():
        assert (span.status.status_code, span.status.description) == (
            StatusCode.ERROR,
            "the backward pass did not come to its end",
        )


def test_later_passes_are_not_the_worse_for_it(instrument, torch, exporter, modules):
    model = failing(torch, exporter, instrument)
    with pytest.raises(ValueError, match="bad gradient"):
        model(torch.ones(1)).backward()
    exporter.clear()
    del model[1]
    model(torch.ones(1)).backward()
    assert tree(exporter) == {
        "Sequential.forward": {"0.forward": {}},
        "Sequential.backward": {"0.backward": {}},
    }
    assert {span.status.status_code for span in exporter.get_finished_spans()} == {StatusCode.UNSET}
    assert modules._passes == {}


@pytest.mark.parametrize("name", ["_nodes", "_first_node", "_carrier_of"])
def test_telemetry_that_fails_stops_nothing(instrument, modules, torch, nets, monkeypatch, caplog, name):
    def broken(*args):
        raise RuntimeError("telemetry is broken")

    model = nets.Model()
    plain = copy.deepcopy(model)
    instrument(model, {"all": torch.nn.Module})
    monkeypatch.setattr(modules, name, broken)
    for _ in range(2):
        for each in (model, plain):
            each(nets.tokens).sum().backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert {message.partition(" ")[0] for message in warnings_in(caplog)} == {"could"}
    assert len(warnings_in(caplog)) == 1


# Threads and recomputation


def test_backward_on_another_thread_belongs_to_what_is_current_there(instrument, torch, nets, exporter):
    tracer = trace.get_tracer("test")

    def run():
        with tracer.start_as_current_span("elsewhere"):
            loss.backward()

    with tracer.start_as_current_span("step"):
        loss = instrument(nets.Model(), {"all": [0, "head"]})(nets.tokens).sum()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
        assert pool.submit(trace.get_current_span).result() is trace.INVALID_SPAN
    assert tree(exporter) == {
        "step": {"Model.forward": {"head.forward": {}}},
        "elsewhere": {"Model.backward": {"head.backward": {}}},
    }


def test_where_nothing_is_current_it_belongs_to_what_was_around_the_forward(instrument, torch, nets, exporter):
    with trace.get_tracer("test").start_as_current_span("step"):
        loss = instrument(nets.Model(), {"all": [0, "head"]})(nets.tokens).sum()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    assert tree(exporter) == {
        "step": {"Model.forward": {"head.forward": {}}, "Model.backward": {"head.backward": {}}},
    }


def deep(torch, levels, last):
    """Backward passes inside one another: so many that autograd runs the last of them on a thread of its own."""

    def hook(gradient):
        if levels:
            deep(torch, levels - 1, last)
        else:
            last()

    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True) * 2
        x.register_hook(hook)
        x.sum().backward()


def test_on_a_thread_of_autograds_own(instrument, torch, nets, exporter):
    threads = []

    def last():
        threads.append(threading.get_ident())
        with torch.enable_grad():
            model(nets.tokens).sum().backward()

    model = nets.Model()
    with trace.get_tracer("test").start_as_current_span("step"):
        loss = instrument(model, {"all": [0, "head"]})(nets.tokens).sum()
        deep(torch, 80, lambda: (threads.append(threading.get_ident()), loss.backward()))
    assert threads != [threading.get_ident()]
    assert tree(exporter) == {
        "step": {"Model.forward": {"head.forward": {}}, "Model.backward": {"head.backward": {}}},
    }


def checkpointed(torch, nets, model, use_reentrant):
    """A forward of `model` whose layers are recomputed in the backward pass."""
    x = model.embedding(nets.tokens)
    for layer in model.layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)
    return model.head(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_modules(lensfast, instrument, torch, nets, exporter, use_reentrant):
    importlib.import_module("torch.utils.checkpoint")
    model = nets.Model()
    plain = copy.deepcopy(model)
    plain(nets.tokens).sum().backward()
    instrument(model, {"layer": "layers.*", "linear": "**.q", "all": "head"})
    with lensfast.span_cm("step"):
        loss = checkpointed(torch, nets, model, use_reentrant).sum()
        exporter.clear()
        with lensfast.span_cm("backward"):
            loss.backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    recomputed = {span.name for span in exporter.get_finished_spans() if "lensfast.recompute" in span.attributes}
    assert recomputed == {f"layers.{n}{part}.forward" for n in (0, 1) for part in ("", ".q")}
    again = {f"layers.{n}.forward": {f"layers.{n}.q.forward": {}} for n in (0, 1)}
    grads = {f"layers.{n}.backward": {f"layers.{n}.q.backward": {}} for n in (0, 1)}
    if use_reentrant:
        # A layer is one node, which runs its forward and then a backward pass inside the pass.
        expected = {"head.backward": {}, **again, **grads}
    else:
        expected = {"head.backward": {}, **{name: grads[name] | again[name.replace("back", "for")] for name in grads}}
        for n in (0, 1):
            expected[f"layers.{n}.backward"] = {
                f"layers.{n}.q.backward": {},
                f"layers.{n}.forward": again[f"layers.{n}.forward"],
            }
    assert tree(exporter)["step"]["backward"] == expected


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_modules_inside_of_others(instrument, torch, nets, exporter, use_reentrant):
    importlib.import_module("torch.utils.checkpoint")

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nets.Model()

        def forward(self, tokens):
            return checkpointed(torch, nets, self.model, use_reentrant)

    instrument(Outer(), {"layer": "model.layers.*", "all": 0})(nets.tokens).sum().backward()
    backward = tree(exporter)["Outer.backward"]
    layers = [f"model.layers.{n}" for n in (1, 0)]
    assert [name for name in backward if name.endswith("backward")] == [f"{layer}.backward" for layer in layers]
    for layer in layers:
        inside = backward if use_reentrant else backward[f"{layer}.backward"]
        assert inside[f"{layer}.forward"] == {}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_on_a_thread_of_autograds_own(instrument, torch, nets, exporter, use_reentrant):
    importlib.import_module("torch.utils.checkpoint")
    model = instrument(nets.Model(), {"layer": "layers.*", "all": "head"})
    with trace.get_tracer("test").start_as_current_span("step"):
        loss = checkpointed(torch, nets, model, use_reentrant).sum()
        deep(torch, 80, loss.backward)
    assert len({span.context.trace_id for span in exporter.get_finished_spans()}) == 1
    assert list(tree(exporter)) == ["step"]


# What is kept


def test_nothing_is_kept_after_backward(instrument, torch, nets, exporter):
    gc.collect()
    gc.disable()
    try:
        model = instrument(nets.Model(), {"all": torch.nn.Module})
        activations, graph = [], []
        model.layers[0].mlp.register_forward_hook(lambda module, args, output: activations.append(weakref.ref(output)))

        class Kept:
            pass

        class Marker(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.kept = marker = Kept()
                graph.append(weakref.ref(marker))
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        model.layers[1].register_forward_hook(lambda module, args, output: Marker.apply(output))
        for _ in range(2):
            loss = model(nets.tokens).sum()
            assert graph[-1]() is not None
            loss.backward()
            del loss
        model(nets.tokens)  # without a backward pass
        assert [reference() for reference in activations] == [None] * 3
        assert [reference() for reference in graph] == [None] * 3
    finally:
        gc.enable()


def test_a_failed_forward_or_backward_keeps_nothing(instrument, torch, exporter):
    references = []

    def forward(self, x):
        y = x * 2
        references.append(weakref.ref(y))
        if self.training:
            raise ValueError("forward")
        y.register_hook(fail)
        return y * 3

    def fail(gradient):
        raise ValueError("backward")

    gc.collect()
    gc.disable()
    try:
        model = instrument(
            torch.nn.Sequential(torch.nn.Linear(1, 1), module_of(torch, forward)), {"all": torch.nn.Module}
        )
        for training in (True, False):
            model.train(training)
            with suppress(ValueError):
                model(torch.ones(1)).backward()
        assert len(references) == 2
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("own_forward", [False, True])
def test_a_dropped_model_is_freed(instrument, modules, torch, nets, own_forward):
    def make():
        model = nets.Model()
        if own_forward:
            model.head.forward = functools.partial(torch.nn.Linear.forward, model.head)
        return instrument(model, {"all": torch.nn.Module})

    model = make()
    reference = weakref.ref(model.head)
    del model
    gc.collect()
    assert reference() is None
    if not own_forward:  # which is a cycle of its own
        model = make()
        reference = weakref.ref(model.head)
        modules.uninstrument(model)
        gc.disable()
        try:
            del model
            assert reference() is None
        finally:
            gc.enable()


def test_the_pass_is_forgotten(instrument, modules, torch, nets):
    model = instrument(nets.Model(), {"all": torch.nn.Module})
    model(nets.tokens).sum().backward()
    assert modules._passes == {}


# Undoing


def test_uninstrument_leaves_no_trace(instrument, modules, torch, nets, exporter):
    model = nets.Model()
    model.head.forward = functools.partial(torch.nn.Linear.forward, model.head)
    before = attributes_of(model)
    instrument(model, {"layer": "layers.*", "all": torch.nn.Module})
    assert attributes_of(model) != before
    modules.uninstrument(model)
    assert attributes_of(model) == before
    model(nets.tokens).sum().backward()
    assert names(exporter) == []


def test_uninstrument_of_a_part_and_of_a_bare_model(instrument, modules, torch, nets):
    model = nets.Model()
    before = attributes_of(model)
    modules.uninstrument(model)
    assert attributes_of(model) == before
    instrument(model, {"all": torch.nn.Linear})
    modules.uninstrument(model.layers)
    assert instrumented(model) == ["head"]
    modules.uninstrument(model)
    modules.uninstrument(model)
    assert attributes_of(model) == before


def test_uninstrument_between_forward_and_backward(instrument, modules, nets, exporter):
    model = instrument(nets.Model(), {"all": 0})
    loss = model(nets.tokens).sum()
    modules.uninstrument(model)
    loss.backward()
    assert names(exporter) == ["Model.forward", "Model.backward"]


def test_instrumenting_again_changes_nothing(lensfast, instrument, modules, torch, nets, exporter):
    model = nets.Model()
    before = attributes_of(model)
    instrument(model, {"layer": "layers.*"})
    instrument(model, {"all": [0, "layers.*"]})
    model(nets.tokens)
    assert names(exporter) == ["layers.0.forward", "layers.1.forward", "Model.forward"]
    exporter.clear()
    lensfast.set_enabled_span_groups({"layer"})
    model(nets.tokens)
    assert names(exporter) == ["layers.0.forward", "layers.1.forward"]
    modules.uninstrument(model)
    assert attributes_of(model) == before


def test_a_model_is_instrumented_otherwise_after_uninstrument(lensfast, instrument, modules, nets, exporter):
    model = instrument(nets.Model(), {"layer": "layers.*"})
    modules.uninstrument(model)
    instrument(model, {"all": "layers.*"})
    lensfast.set_enabled_span_groups({"layer"})
    model(nets.tokens)
    assert names(exporter) == []


def test_a_forward_of_the_modules_own_is_wrapped_and_restored(instrument, modules, torch, exporter):
    """As the hooks of accelerate set it."""
    linear = torch.nn.Linear(2, 2)
    plain = linear.forward

    def forward(module, *args, **kwargs):
        return plain(*args, **kwargs) + 1

    own = linear.forward = functools.update_wrapper(functools.partial(forward, linear), plain)
    x = torch.ones(2)
    expected = linear(x)
    instrument(linear, {"all": 0})
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(input=x), expected)
    assert inspect.signature(linear.forward) == inspect.signature(own)
    assert names(exporter) == ["Linear.forward"] * 2
    modules.uninstrument(linear)
    assert linear.forward is own


def test_a_method_given_to_the_module_is_wrapped_and_restored(instrument, modules, torch, exporter):
    linear = torch.nn.Linear(2, 2)
    own = linear.forward = types.MethodType(lambda self, x: self.bias + x, linear)
    instrument(linear, {"all": 0})
    assert torch.equal(linear(torch.ones(2)), linear.bias + 1)
    modules.uninstrument(linear)
    assert linear.__dict__["forward"] is own


@pytest.mark.parametrize("kind", [staticmethod, classmethod, functools.partialmethod])
def test_a_forward_that_is_no_plain_function(instrument, modules, torch, exporter, kind):
    def forward(*args):
        return len(args), args[-1]

    module = module_of(torch, kind(forward))
    expected = module(5)
    before = dict(vars(module))
    instrument(module, {"all": 0})
    assert module(5) == expected
    assert names(exporter) == ["Module.forward"]
    modules.uninstrument(module)
    assert vars(module) == before


def test_a_forward_that_is_traced_already(lensfast, instrument, torch, exporter):
    module = module_of(torch, lensfast.trace_fn("layer", "inner")(lambda self, x: x + 1))
    instrument(module, {"all": 0})(torch.ones(1))
    assert tree(exporter) == {"Module.forward": {"inner": {}}}


def test_what_has_been_wrapped_around_a_forward_since_stays_and_makes_no_spans(instrument, modules, torch, exporter):
    linear = instrument(torch.nn.Linear(2, 2), {"all": 0})
    inner = linear.forward

    @functools.wraps(inner)
    def outer(x):
        return inner(x) + 1

    linear.forward = outer
    x = torch.ones(2)
    expected = torch.nn.Linear.forward(linear, x) + 1
    assert torch.equal(linear(x), expected)
    assert names(exporter) == ["Linear.forward"]
    exporter.clear()
    modules.uninstrument(linear)
    assert linear.forward is outer
    assert torch.equal(linear(x), expected)
    assert names(exporter) == []
    instrument(linear, {"all": 0})
    assert torch.equal(linear(x), expected)
    assert names(exporter) == ["Linear.forward"]  # by the new one only
    modules.uninstrument(linear)
    assert linear.forward is outer


def test_the_signature_and_the_names_of_forward_are_as_before(instrument, nets):
    block = nets.Block(4)
    plain = block.forward
    signature, shown = inspect.signature(plain), (plain.__name__, plain.__qualname__, plain.__doc__, plain.__module__)
    instrument(block, {"all": 0})
    assert inspect.signature(block.forward) == signature
    assert inspect.ismethod(block.forward)
    assert block.forward.__self__ is block
    assert (
        block.forward.__name__,
        block.forward.__qualname__,
        block.forward.__doc__,
        block.forward.__module__,
    ) == shown


# Copies

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replica": lambda model: model._replicate_for_data_parallel(),
    **{f"pickle {n}": lambda model, n=n: pickle.loads(pickle.dumps(model, n)) for n in range(6)},
    **{f"python pickle {n}": lambda model, n=n: pickle._loads(pickle._dumps(model, n)) for n in range(6)},
}


def bare(torch):
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Sequential(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_a_bare_module_of_its_own(instrument, torch, exporter, how):
    model = instrument(bare(torch), {"all": torch.nn.Module})
    twin = COPIES[how](model)
    assert "forward" not in vars(twin)
    assert vars(twin).keys() == vars(bare(torch)).keys() or how == "replica"
    if how != "replica":  # that has the original's children until torch replaces them
        assert how == "copy" or instrumented(twin) == []
        twin.__dict__["_modules"] = {"0": torch.nn.Identity()}
        twin.eval()
        assert torch.equal(twin(torch.ones(2)), torch.ones(2))
        assert names(exporter) == []
    assert len(instrumented(model)) == 5


def test_pickles_are_those_of_the_bare_model(instrument, torch):
    model = bare(torch)
    shared = model[0]
    model.append(shared)
    before, state = pickle.dumps(model), model.state_dict()
    instrument(model, {"all": torch.nn.Module})
    model(torch.ones(2)).sum().backward()
    model.zero_grad()
    assert pickle.dumps(model) == before
    assert list(model.state_dict()) == list(state)
    twin = pickle.loads(pickle.dumps(model))
    assert twin[0] is twin[3]


def test_a_copy_may_be_instrumented(instrument, torch, exporter):
    model = instrument(bare(torch), {"all": "0"})
    twin = instrument(copy.deepcopy(model), {"all": "0"})
    twin[0].weight.data.zero_()
    twin(torch.ones(2))
    assert names(exporter) == ["0.forward"]
    assert torch.equal(twin[0](torch.ones(2)), twin[0].bias)
    assert twin.forward.__self__ is twin


def test_a_saved_model_loads_without_lensfast(instrument, torch, tmp_path):
    model = bare(torch).eval()
    expected = model(torch.ones(2)).tolist()
    instrument(model, {"all": torch.nn.Module})
    torch.save(model, tmp_path / "model.pt")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    program = """
import pickle, sys
sys.modules["lensfast"] = None
import torch
for model in (torch.load("model.pt", weights_only=False), pickle.load(open("model.pkl", "rb"))):
    assert not [1 for module in model.modules() if {"forward", "__getstate__"} & vars(module).keys()]
    print(model(torch.ones(2)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [str(expected)] * 2 + [""]


def test_cloudpickle(instrument, torch):
    cloudpickle = pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    model = instrument(module_of(torch, lambda self, x: x + 1), {"all": 0})
    data = cloudpickle.dumps(model)
    assert b"lensfast" not in data
    assert pickle.loads(data)(1) == 2


def test_a_state_that_the_class_makes(instrument, modules, torch, exporter):
    class Net(torch.nn.Linear):
        def __getstate__(self):
            state = super().__getstate__()
            state["extra"] = 1
            return state

        def __setstate__(self, state):
            assert state.pop("extra") == 1
            super().__setstate__(state)

    model = instrument(Net(2, 2), {"all": 0})
    twin = copy.deepcopy(model)
    assert instrumented(twin) == []
    twin(torch.ones(2))
    assert names(exporter) == []


def test_a_forward_of_the_modules_own_is_copied_as_it_was(instrument, torch):
    model = bare(torch)
    model.forward = types.MethodType(torch.nn.Sequential.forward, model)
    instrument(model, {"all": 0})
    for how in (copy.deepcopy, COPIES["pickle 5"]):
        twin = how(model)
        assert vars(twin)["forward"] == types.MethodType(torch.nn.Sequential.forward, twin)


def test_a_copy_of_the_dict_is_made_right_by_uninstrument(instrument, modules, torch, exporter):
    model = instrument(torch.nn.Linear(2, 2), {"all": 0})
    twin = torch.nn.Linear.__new__(torch.nn.Linear)
    twin.__dict__ = dict(vars(model))
    modules.uninstrument(twin)
    assert vars(twin).keys() == vars(torch.nn.Linear(2, 2)).keys()
    assert instrumented(model) == [""]
    model(torch.ones(2))
    assert names(exporter) == ["Linear.forward"]


# Other things that are done to modules


def test_data_parallel(instrument, torch, nets):
    model = instrument(nets.Block(4), {"all": torch.nn.Module})
    x = torch.ones(2, 3, 4)
    assert torch.equal(torch.nn.DataParallel(model)(x), nets.Block.forward(model, x))
    replica = model._replicate_for_data_parallel()
    replica.scale = 5
    assert replica.forward.__self__ is replica


def test_hooks_of_the_user_run_outside_of_the_span(instrument, torch, exporter):
    model = torch.nn.Linear(1, 1)
    seen = []

    def note(*args):
        seen.append(trace.get_current_span())

    model.register_forward_pre_hook(note)
    model.register_forward_hook(note)
    model.register_full_backward_hook(note)
    instrument(model, {"all": 0})(torch.ones(1)).backward()
    assert seen == [trace.INVALID_SPAN] * 3
    assert names(exporter) == ["Linear.forward", "Linear.backward"]


def test_train_eval_to_and_state(instrument, torch, exporter):
    model = instrument(bare(torch), {"all": torch.nn.Module})
    model.eval().to(torch.float64).requires_grad_(False)
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.apply(lambda module: [parameter.fill_(1) for parameter in module.parameters()])
    assert model(torch.ones(2, dtype=torch.float64)).tolist() == [7, 7]
    model[0].weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    assert model(torch.ones(2, dtype=torch.float64)).tolist() == [3, 3]


def test_lazy_modules(instrument, torch, exporter):
    model = instrument(
        torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d()), {"all": torch.nn.Module}
    )
    assert model(torch.ones(2, 4)).shape == (2, 3)
    assert [type(part) for part in model] == [torch.nn.Linear, torch.nn.BatchNorm1d]
    assert names(exporter) == ["0.forward", "1.forward", "Sequential.forward"]


def test_parametrizations(instrument, modules, torch):
    parametrize = importlib.import_module("torch.nn.utils.parametrize")
    x = torch.ones(2)
    for order in ("before", "after"):
        model = torch.nn.Linear(2, 2)
        if order == "before":
            instrument(model, {"all": 0})
        torch.nn.utils.parametrizations.weight_norm(model)
        instrument(model, {"all": 0})
        expected = torch.nn.functional.linear(x, model.weight, model.bias)
        assert torch.equal(model(x), expected)
        model(x).sum().backward()
        modules.uninstrument(model)
        assert instrumented(model) == []
        parametrize.remove_parametrizations(model, "weight")
        assert torch.allclose(model(x), expected)


def test_functional_transforms(instrument, modules, torch, nets):
    model = nets.Block(4)
    plain = copy.deepcopy(model)
    instrument(model, {"all": torch.nn.Module})
    x = torch.randn(2, 3, 4)
    parameters = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}

    def results(module):
        def loss(parameters, x):
            return torch.func.functional_call(module, parameters, (x,)).square().sum()

        gradient = torch.func.grad(loss)(parameters, x)
        samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
        tangent = torch.func.jvp(module, (x,), (x,))[1]
        return [loss(parameters, x), *gradient.values(), *samples.values(), tangent, torch.func.jacrev(module)(x)]

    assert all(map(torch.equal, results(model), results(plain)))


def test_symbolic_and_other_traces(instrument, torch, nets):
    model = nets.Block(4)
    plain = copy.deepcopy(model)
    instrument(model, {"all": torch.nn.Module})
    x = torch.randn(2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit.trace is deprecated
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), plain(x))
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(x), plain(x))
    assert [node.target for node in graph.graph.nodes] == [
        node.target for node in torch.fx.symbolic_trace(plain).graph.nodes
    ]


def test_graph_modules_are_left_alone(instrument, torch, nets, caplog):
    """Their forward may be made anew, and they pickle what is in their __dict__ by code of their own."""
    graph = torch.fx.symbolic_trace(nets.Block(4))
    before = dict(vars(graph))
    instrument(graph, {"all": 0})
    assert vars(graph) == before
    assert warnings_in(caplog) == [
        f"instrument_module: '' is left alone: a {type(graph).__name__} pickles in a way of its own"
    ]


def test_scripted_modules(instrument, modules, torch, exporter):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit.script is deprecated
        model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    x = torch.ones(2)
    expected = model(x)
    before = attributes_of(model)
    instrument(model, {"all": torch.nn.Module})
    assert torch.equal(model(x), expected)
    assert names(exporter) == ["RecursiveScriptModule.forward"]  # the rest runs in C++
    modules.uninstrument(model)
    assert attributes_of(model) == before


@pytest.fixture
def process_group(torch, tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch is built without torch.distributed")
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def distributed_data_parallel(torch, model):
    return torch.nn.parallel.DistributedDataParallel(model)


def static_distributed_data_parallel(torch, model):
    return torch.nn.parallel.DistributedDataParallel(model, static_graph=True)


def fully_sharded_data_parallel(torch, model):
    fsdp = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
    return fsdp(model, device_id=torch.device("cpu"), use_orig_params=True)


def fully_sharded(torch, model):
    shard = getattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard", None)
    if shard is None:
        pytest.skip("this torch has no fully_shard for the CPU")
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
    for layer in model.layers:
        shard(layer, mesh=mesh)
    return shard(model, mesh=mesh) or model


def checkpoint_wrapped(torch, model):
    wrapper = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    for number, layer in enumerate(model.layers):
        model.layers[number] = wrapper.checkpoint_wrapper(layer)
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        distributed_data_parallel,
        static_distributed_data_parallel,
        fully_sharded_data_parallel,
        fully_sharded,
        checkpoint_wrapped,
    ],
)
@pytest.mark.parametrize("first", ["instrumented", "wrapped"])
def test_distributed_wrappers(lensfast, instrument, modules, torch, nets, exporter, process_group, wrap, first):
    model = nets.Model()
    plain = copy.deepcopy(model)
    if first == "instrumented":
        instrument(model, {"layer": nets.Block, "all": nets.Model})
    model = wrap(torch, model)
    if first == "wrapped":
        instrument(model, {"layer": nets.Block, "all": nets.Model})
    for _ in range(2):
        exporter.clear()
        for each in (model, plain):
            each(nets.tokens).square().sum().backward()
        found = [
            getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)() for gradient in gradients(model)
        ]
        assert all(map(torch.equal, found, gradients(plain)))
        kinds = [
            (span.attributes["module.class"], span.name.rpartition(".")[2]) for span in exporter.get_finished_spans()
        ]
        again = 2 if wrap is checkpoint_wrapped else 1
        for kind, forward, backward in (("Block", 2 * again, 2), ("Model", 1, 1)):
            kinds = [(kind if name.endswith(kind) else name, direction) for name, direction in kinds]
            assert (kinds.count((kind, "forward")), kinds.count((kind, "backward"))) == (forward, backward)
    modules.uninstrument(model)
    exporter.clear()
    model(nets.tokens)
    assert names(exporter) == []


# torch.compile


@pytest.fixture
def compiler(torch):
    """compiler(backend) counts what is compiled for that."""
    testing = importlib.import_module("torch._dynamo.testing")
    torch._dynamo.reset()
    yield testing.CompileCounterWithBackend
    torch._dynamo.reset()
    # Compiled code finds lensfast's module here; the next backend's is another.
    for name in [name for name in globals() if name.startswith("__import_lensfast")]:
        del globals()[name]


def whole(model, **options):
    return torch_of(model).compile(model, **options)


def torch_of(model):
    return sys.modules["torch"]


def from_outside(model, **options):
    return torch_of(model).compile(lambda tokens: model(tokens), **options)


def in_place_compiled(model, **options):
    model.compile(**options)
    return model


def by_region(model, **options):
    for layer in model.layers:
        layer.compile(**options)
    return model


@pytest.mark.parametrize("first", ["off", "on"])
@pytest.mark.parametrize("how", [whole, from_outside, in_place_compiled, by_region])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_one_graph(lensfast, instrument, torch, nets, exporter, compiler, backend, how, first):
    layers = range(10 if how is by_region else 2)  # ten: the compiler gives up a function after the eighth time
    model = nets.Model(len(layers))
    plain = copy.deepcopy(model)
    instrument(model, {"layer": "layers.*", "linear": torch.nn.Linear, "all": 0})
    counter = compiler(backend)
    compiled = how(model, backend=counter, fullgraph=True)
    for state in (first, *("off", "on", "off", "on")):
        lensfast.set_enabled_span_groups(ALL if state == "on" else set())
        exporter.clear()
        output = compiled(nets.tokens)
        output.sum().backward()
        assert torch.equal(output, plain(nets.tokens))
        # Those around what is compiled are made, and what is inside has none.
        around = {
            whole: [""],
            from_outside: [],
            in_place_compiled: [""],
            by_region: ["", "head", *(f"layers.{n}" for n in layers)],
        }
        expected = {f"{path or 'Model'}.{direction}" for path in around[how] for direction in ("forward", "backward")}
        assert set(names(exporter)) == (expected if state == "on" else set())
    assert counter.frame_count == 1
    if how is by_region:
        assert tree(exporter)["Model.backward"].keys() == {
            "head.backward",
            *(f"layers.{n}.backward" for n in layers),
        }


def test_inductor(lensfast, instrument, torch, nets, exporter, compiler):
    model = nets.Model()
    plain = copy.deepcopy(model)
    counter = compiler("inductor")
    compiled = torch.compile(instrument(model, {"all": torch.nn.Module}), backend=counter, fullgraph=True)
    for each in (compiled, plain):
        each(nets.tokens).sum().backward()
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert names(exporter) == ["Model.forward", "Model.backward"]
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("state", ["off", "on"])
def test_export(lensfast, instrument, torch, nets, compiler, strict, state):
    if strict and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        pytest.skip("this torch can't export a module that has any forward in its __dict__")
    model = nets.Block(4)
    plain = copy.deepcopy(model)
    instrument(model, {"all": torch.nn.Module})
    lensfast.set_enabled_span_groups(ALL if state == "on" else set())
    x = torch.randn(2, 3, 4)
    exported = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(exported.module()(x), plain(x))
    assert str(exported.graph) == str(torch.export.export(plain, (x,), strict=strict).graph)


def test_a_model_that_is_compiled_already(instrument, modules, torch, nets, exporter, compiler):
    counter = compiler("eager")
    model = nets.Model()
    compiled = torch.compile(model, backend=counter)
    instrument(compiled, {"layer": "_orig_mod.layers.*", "all": "_orig_mod"})
    compiled(nets.tokens)
    assert names(exporter) == ["_orig_mod.forward"]
    modules.uninstrument(compiled)
    assert instrumented(model) == []
