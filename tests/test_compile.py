"""torch.compile: inside a compiled region all of lensfast vanishes; around it, spans are made as ever."""

import importlib
import logging

import pytest

from conftest import run_code

GROUP = "layer"
BOTH_STATES = pytest.mark.parametrize("first", ["off", "on"])


@pytest.fixture(scope="module")
def compiler_cache(tmp_path_factory):
    """Not that of the user's, which another build of torch may have filled."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def torch(lensfast, compiler_cache, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiler_cache))
    importlib.import_module("torch._dynamo.testing")
    torch._dynamo.reset()
    yield torch
    torch._dynamo.reset()
    # Compiled code finds lensfast's module here; the next backend's is another.
    for name in [name for name in globals() if name.startswith("__import_lensfast")]:
        del globals()[name]


@pytest.fixture
def switch(lensfast):
    """switch("on") and switch("off") of the group that the sites belong to."""
    return lambda state: lensfast.set_enabled_span_groups({GROUP} if state == "on" else set())


def names(exporter):
    return [span.name for span in exporter.get_finished_spans()]


def counting(torch, backend="eager"):
    return torch._dynamo.testing.CompileCounterWithBackend(backend)


def sites(lens):
    """Functions with a call site each. All of them are to give what they give with no group on."""
    handle = lens.span_group(GROUP)

    def managed_span(x):
        with lens.managed_span(GROUP, "s") as span:
            return x + 1 if span is None else x - 1

    def managed_span_with_attributes(x):
        with lens.managed_span(GROUP, "s", None, count=3, **{"megatron.layer_number": 5}) as span:
            y = x + 1
            if span is not None:
                span.set_attribute("wrong", True)
        return y * 2

    def managed_span_around_a_loss(x):
        with lens.managed_span(GROUP, "outer"), lens.managed_span(GROUP, "inner"):
            return x.sin().sum()

    def managed_span_left_by_an_exception(x):
        try:
            with lens.managed_span(GROUP, "s"):
                x = x + 1
                raise ValueError("x")
        except ValueError:
            return x * 2

    def span_cm(x):
        with lens.span_cm("s", record_exception=False, count=3) as span:
            span.set_attribute("a", 1)
            span.set_attributes({"a": 1})
            span.add_event("e", {"a": 1})
            span.update_name("other")
            lens.safe_set_span_attributes(span, {"b": 2})
            return x + 1

    def conditional(x, flag=True):
        with lens.span_cm("s") if flag else lens.managed_span(GROUP, "s"):
            return x + 1

    def is_span_group_enabled(x):
        return x - 1 if lens.is_span_group_enabled(GROUP) else x + 1

    def enabled_span_groups(x):
        return x - 1 if GROUP in lens.enabled_span_groups() else x + 1

    def handle_as_condition(x):
        return x - 1 if handle else x + 1

    def handle_attributes(x):
        return x - 1 if handle.enabled or handle.name != GROUP else x + 1

    def handle_span(x):
        with handle.span("s", span_kind=None, count=3) as span:
            return x + 1 if span is None else x - 1

    def handle_taken_inside(x):
        return x - 1 if lens.span_group(GROUP) else x + 1

    def span_attributes(x):
        with lens.span_attributes({"a": 1}):
            return x + 1

    @lens.trace_fn(GROUP, "s")
    def traced(x, *, by=1):
        return x + by

    def call_of_a_traced_function(x):
        return traced(x) + traced(x, by=2)

    @lens.span_cm("s")
    def decorated(x):
        return x + 1

    def call_of_a_function_decorated_by_span_cm(x):
        return decorated(x)

    def decorated_inside(x):
        return lens.trace_fn(GROUP, "s")(lambda x: x + 1)(x)

    @lens.trace_fn(GROUP, "s")
    def traced_generator(x):
        yield x + 1
        yield x + 2

    def call_of_a_traced_generator(x):
        return sum(traced_generator(x))

    return {
        name: value
        for name, value in locals().items()
        if name not in {"lens", "handle", "traced", "traced_generator", "decorated"}
    }


class _Anything:
    """The names of the sites, where there is no lensfast yet."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: lambda function: function


SITES = list(sites(_Anything()))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@BOTH_STATES
def test_a_site_in_a_compiled_region(lensfast, exporter, torch, switch, site, backend, first):
    """One graph, whatever the group is when it is compiled, and the same one when that changes; no span."""
    function = sites(lensfast)[site]
    x = torch.randn(4)
    switch("off")
    expected = function(x)
    exporter.clear()
    counter = counting(torch, backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    switch(first)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x), expected)
        switch("off" if first == "on" else "on")
        assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 1
    assert names(exporter) == []


@pytest.mark.parametrize("site", SITES)
def test_no_trace_of_a_site_is_in_the_graph(lensfast, torch, switch, site):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    switch("on")
    torch.compile(sites(lensfast)[site], backend=keep, fullgraph=True)(torch.randn(4))
    (graph,) = graphs
    allowed = {"add", "iadd", "sub", "mul", "sin", "sum"}
    for node in graph.graph.nodes:
        if node.op in {"call_function", "call_method"}:
            assert getattr(node.target, "__name__", node.target) in allowed
        else:
            assert node.op in {"placeholder", "output"}
    assert len([node for node in graph.graph.nodes if node.op == "placeholder"]) == 1


def model(lens, torch):
    """A small model with a site of every kind."""
    handle = lens.span_group(GROUP)

    class Layer(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number
            self.linear = torch.nn.Linear(8, 8)

        @lens.trace_fn(GROUP, "layer")
        def forward(self, x):
            with lens.managed_span(GROUP, "layer.forward", **{"megatron.layer_number": self.number}):
                with handle.span("mlp"):
                    x = self.linear(x)
                if handle or lens.is_span_group_enabled(GROUP):
                    x = x * 0
                with lens.span_cm("activation") as span:
                    span.set_attribute("kind", "gelu")
                    return torch.nn.functional.gelu(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(number) for number in range(3))

        @lens.trace_fn(GROUP, "model")
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@BOTH_STATES
def test_a_compiled_model_trains_in_one_graph(lensfast, exporter, torch, switch, backend, first):
    """A traced forward of the compiled module itself is around the region: its span is real."""
    net, x = model(lensfast, torch), torch.randn(2, 8)
    switch("off")
    expected = net(x)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    exporter.clear()
    counter = counting(torch, backend)
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for state in (first, "off" if first == "on" else "on"):
        switch(state)
        net.zero_grad()
        with torch._dynamo.config.patch(error_on_recompile=True), lensfast.managed_span(GROUP, "step"):
            loss = compiled(x)
            loss.backward()
        torch.testing.assert_close(loss, expected)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert names(exporter) == (["model", "step"] if state == "on" else [])
        if state == "on":
            inner, outer = exporter.get_finished_spans()
            assert inner.parent.span_id == outer.context.span_id
        exporter.clear()
    assert counter.frame_count == 1


@BOTH_STATES
def test_a_model_inside_a_compiled_model(lensfast, exporter, torch, switch, first):
    net, x = torch.nn.Sequential(model(lensfast, torch)), torch.randn(2, 8)
    counter = counting(torch)
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for state in (first, "off" if first == "on" else "on"):
        switch(state)
        compiled(x)
    assert (counter.frame_count, names(exporter)) == (1, [])


def test_other_ways_to_compile_a_model(lensfast, exporter, torch, switch):
    x = torch.randn(2, 8)
    switch("on")
    for compile_it in (
        lambda net: net.compile(backend="eager", fullgraph=True),
        lambda net: setattr(net, "forward", torch.compile(net.forward, backend="eager", fullgraph=True)),
    ):
        net = model(lensfast, torch)
        compile_it(net)
        net(x)
        assert names(exporter) == ["model"]
        exporter.clear()


def test_spans_around_a_compiled_function(lensfast, exporter, torch, switch):
    """trace_fn over torch.compile and torch.compile over trace_fn are the same."""

    def function(x):
        with lensfast.managed_span(GROUP, "inside"):
            return x.sin()

    over = lensfast.trace_fn(GROUP, "traced")(torch.compile(function, backend="eager", fullgraph=True))
    under = torch.compile(lensfast.trace_fn(GROUP, "traced")(function), backend="eager", fullgraph=True)
    x = torch.randn(4)
    for compiled in (over, under):
        for state in ("off", "on", "off"):
            switch(state)
            with lensfast.span_cm("around"):
                assert torch.equal(compiled(x), x.sin())
            assert names(exporter) == (["traced", "around"] if state == "on" else ["around"])
            exporter.clear()


def test_each_of_many_traced_functions_is_compiled(lensfast, torch, switch):
    """They share code, and the compiler gives up on a code object that it had to compile eight times."""
    counter = counting(torch)
    x = torch.ones(3)
    for first in ("off", "on"):
        switch(first)
        torch._dynamo.reset()
        counter.frame_count = 0
        for number in range(20):
            namespace = {}
            exec(f"def function(x): return x * {number}", namespace)
            traced = lensfast.trace_fn(GROUP, f"s{number}")(namespace["function"])
            assert torch.equal(torch.compile(traced, backend=counter, fullgraph=True)(x), x * number)
        assert counter.frame_count == 20


def test_a_region_with_a_graph_break(lensfast, exporter, torch, switch):
    """What follows a break is another region, without spans; a span_cm that holds one keeps its function Python."""

    @lensfast.trace_fn(GROUP, "traced")
    def traced(x):
        return x.sin()

    def function(x):
        with lensfast.managed_span(GROUP, "block"):
            x = x + 1
            torch._dynamo.graph_break()
            x = x * 2
        torch._dynamo.graph_break()
        return traced(x)

    def with_span_cm(x):
        with lensfast.span_cm("block") as span:
            x = x + 1
            torch._dynamo.graph_break()
            span.set_attribute("a", 1)
            return x * 2

    x = torch.randn(4)
    counter = counting(torch)
    compiled = torch.compile(function, backend=counter)
    switch("on")
    assert torch.equal(compiled(x), ((x + 1) * 2).sin())
    graphs = counter.frame_count
    assert graphs == 3
    switch("off")
    assert torch.equal(compiled(x), ((x + 1) * 2).sin())
    assert counter.frame_count == graphs
    assert names(exporter) == []
    counter.frame_count = 0
    assert torch.equal(torch.compile(with_span_cm, backend=counter)(x), (x + 1) * 2)
    assert counter.frame_count == 0
    assert names(exporter) == ["block"]
    assert exporter.get_finished_spans()[0].attributes == {"a": 1}


def test_what_is_left_to_python(lensfast, exporter, torch, switch):
    @torch.compiler.disable
    def disabled(x):
        with lensfast.managed_span(GROUP, "inside disabled"):
            return x + 1

    @lensfast.trace_fn(GROUP, "traced, breaks")
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    def function(x):
        with lensfast.managed_span(GROUP, "block"):
            x = x * 2
        return breaks(disabled(x)) * 2

    switch("on")
    assert torch.compile(function, backend="eager")(torch.ones(1)).item() == 8.0
    assert names(exporter) == ["inside disabled", "traced, breaks"]


def test_a_wrapped_method_without_fullgraph(lensfast, exporter, torch, switch):
    class Model:
        @lensfast.trace_fn(GROUP, "method")
        def method(self, x, by=1):
            return x + by

    switch("on")
    counter = counting(torch)
    compiled = torch.compile(Model().method, backend=counter)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(compiled(torch.ones(2), by=3), torch.full((2,), 4.0))
    inside = torch.compile(lambda x: Model().method(x), backend=counter)
    exporter.clear()
    assert torch.equal(inside(torch.ones(2)), torch.full((2,), 2.0))
    assert names(exporter) == []


def test_the_machinery_of_a_span_is_not_compiled(lensfast, exporter, torch, switch):
    """A function that runs as Python under the compiler makes its spans without a graph, a warning or a limit."""
    switch("on")
    counter = counting(torch)

    def function(x):
        values = []
        for number in range(12):
            torch._dynamo.graph_break()
            with lensfast.managed_span(GROUP, f"s{number}", number=number) as span:
                values.append(span is not None)
        return values

    assert torch.compile(function, backend=counter)(torch.ones(1)) == [True] * 12
    assert names(exporter) == [f"s{number}" for number in range(12)]
    assert counter.frame_count == 0


def test_dynamic_shapes(lensfast, torch, switch):
    switch("on")
    counter = counting(torch)
    compiled = torch.compile(
        sites(lensfast)["managed_span_with_attributes"], backend=counter, fullgraph=True, dynamic=True
    )
    for length in (3, 5, 9):
        compiled(torch.ones(length))
        switch("off")
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [True, False])
@BOTH_STATES
def test_export(lensfast, exporter, torch, switch, first, strict):
    net, x = model(lensfast, torch), torch.randn(2, 8)
    expected = net(x)
    switch(first)
    if first == "on" and not strict:
        # Not traced but run: `if handle` is then what it is in Python.
        expected = net(x)
    exporter.clear()
    exported = torch.export.export(net, (x,), strict=strict)
    assert ("activation" in names(exporter)) == (not strict)
    assert not any("lensfast" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), expected)


def test_symbolic_trace_and_jit_trace(lensfast, torch, switch):
    switch("off")
    net, x = model(lensfast, torch), torch.randn(2, 8)
    torch.testing.assert_close(torch.fx.symbolic_trace(net)(x), net(x))
    torch.testing.assert_close(torch.jit.trace(net, x)(x), net(x))


@BOTH_STATES
def test_a_traced_forward_of_one_instance(lensfast, exporter, torch, switch, first):
    """Around the region if it is that of the compiled module, also where that is of a class that the compiler skips."""

    class Own(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight, self.bias)

    x = torch.randn(2, 4)
    for compiled_class, span in ((Own, ["instance"]), (torch.nn.Linear, ["instance"]), (torch.nn.Sequential, [])):
        layer = (Own if compiled_class is torch.nn.Sequential else compiled_class)(4, 4)
        layer.forward = lensfast.trace_fn(GROUP, "instance")(layer.forward)
        torch._dynamo.reset()
        exporter.clear()
        counter = counting(torch)
        net = torch.nn.Sequential(layer) if compiled_class is torch.nn.Sequential else layer
        compiled = torch.compile(net, backend=counter, fullgraph=True)
        for state in (first, "off" if first == "on" else "on"):
            switch(state)
            assert torch.equal(compiled(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        assert (counter.frame_count, names(exporter)) == (1, span)


@BOTH_STATES
@pytest.mark.parametrize("site", ["traced method", "handle"])
def test_layers_that_are_compiled_one_by_one_share_their_code(lensfast, torch, switch, first, site):
    """As they do without a site. Each has a traced method, or a handle, of its own."""

    class Layer(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.handle = lensfast.span_group(f"layer{number}" if site == "handle" else GROUP)
            if site == "traced method":
                self.inner.forward = lensfast.trace_fn(GROUP, f"inner{number}")(self.inner.forward)

        def forward(self, x):
            with self.handle.span("s"):
                return self.inner(x) * 0 if self.handle else self.inner(x)

    switch(first)
    counter = counting(torch)
    x = torch.ones(2, 4)
    for number in range(12):
        layer = Layer(number)
        layer.compile(backend=counter, fullgraph=True)
        layer(x)
    assert counter.frame_count == 1


def test_a_handle_that_leaves_the_region_is_the_real_one(lensfast, exporter, torch, switch):
    handle = lensfast.span_group(GROUP)

    class Keeper(torch.nn.Module):
        kept = other = None

        def forward(self, x):
            if self.kept is None:
                self.kept = lensfast.span_group(GROUP)
            self.other = handle
            return x + 1, handle

    keeper = Keeper()
    switch("on")
    _, returned = torch.compile(keeper, backend="eager", fullgraph=True)(torch.ones(3))
    for found in (keeper.kept, keeper.other, returned):
        assert found is handle
        with found.span("s"):
            pass
    assert names(exporter) == ["s"] * 3


def test_a_handle_after_a_graph_break(lensfast, exporter, torch, switch):
    handle = lensfast.span_group(GROUP)

    def function(x):
        own = handle
        x = x + 1
        torch._dynamo.graph_break()
        return x.sin(), torch.compiler.disable(lambda: bool(own))()

    switch("on")
    assert torch.compile(function, backend="eager")(torch.ones(3))[1]


def test_methods_that_torch_takes_apart_stay_traced(lensfast, exporter, torch, switch):
    """Learning-rate schedulers replace an optimizer's step by a function that calls its __func__."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step = lensfast.trace_fn(GROUP, "optimizer.step")(optimizer.step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    switch("on")
    optimizer.step()
    assert names(exporter) == ["optimizer.step"]


def test_torchs_own_marks_on_a_traced_function(lensfast, torch, switch):
    runs = []

    @torch.compiler.assume_constant_result
    @lensfast.trace_fn(GROUP, "s")
    def constant():
        runs.append(1)
        return 3

    @torch.compiler.disable
    @lensfast.trace_fn(GROUP, "s")
    def disabled(x):
        runs.append(1)
        return x

    for state in ("off", "on"):
        torch._dynamo.reset()
        runs.clear()
        switch(state)
        compiled = torch.compile(lambda x: x + constant(), backend="eager", fullgraph=True)
        assert [compiled(torch.ones(1)).item() for _ in range(3)] == [4.0] * 3
        assert runs == [1]
        compiled = torch.compile(lambda x: disabled(x + 1) + 1, backend="eager")
        assert [compiled(torch.ones(1)).item() for _ in range(3)] == [3.0] * 3
        assert len(runs) == 4


def test_registering_again_changes_nothing(lensfast, torch, caplog):
    """As when a module is reloaded."""
    lensfast._compile.register()
    assert caplog.records == []
    torch.compile(sites(lensfast)["managed_span"], backend="eager", fullgraph=True)(torch.ones(3))


def test_one_debug_record_says_that_spans_are_left_out(lensfast, torch, caplog, monkeypatch):
    monkeypatch.setattr(lensfast._compile, "_noted", False)
    with caplog.at_level(logging.DEBUG, logger="lensfast"):
        for name in ("managed_span", "handle_span", "span_cm"):
            torch.compile(sites(lensfast)[name], backend="eager", fullgraph=True)(torch.ones(3))
    (record,) = [record for record in caplog.records if record.name == "lensfast"]
    assert record.levelno == logging.DEBUG
    assert "spans there are left out" in record.message


def test_a_torch_that_knows_no_way_is_reported(lensfast, torch, caplog, monkeypatch):
    def refuse(*args, **kwargs):
        raise TypeError("no such thing")

    for where, name in (
        (torch._dynamo.decorators, "substitute_in_graph"),
        (torch._dynamo.variables.builder.VariableBuilder, "_type_dispatch"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, refuse)
            lensfast._compile.register()
    (record, again) = caplog.records
    assert record.message == again.message
    assert record.levelno == logging.WARNING
    assert "inside torch.compile they will break graphs" in record.message


PROGRAM = """
import sys
{imports}
from torch._dynamo.testing import CompileCounterWithBackend

handle = lensfast.span_group("layer")

def function(x):
    with managed_span("layer", "s"), handle.span("t"):
        return x + 1

counter = CompileCounterWithBackend("eager")
compiled = torch.compile(function, backend=counter, fullgraph=True)
for groups in ((), ("layer",), ()):
    lensfast.set_enabled_span_groups(groups)
    compiled(torch.ones(3))
print("graphs:", counter.frame_count, "finder left:", any("lensfast" in type(f).__module__ for f in sys.meta_path))
"""
ORDERS = {
    "lensfast first": "import lensfast; assert 'torch' not in sys.modules; import torch",
    "torch first": "import torch; assert 'torch._dynamo' not in sys.modules; import lensfast",
    "the compiler first": "import torch._dynamo, torch; import lensfast",
}
FROM = {
    "lensfast": "from lensfast import managed_span",
    "install": "lensfast.install(); from nemo.lens import managed_span",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", FROM)
@pytest.mark.parametrize("backend", ["c", "python"])
def test_whichever_is_imported_first(backend, order, source, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed here")
    result = run_code(PROGRAM.format(imports=f"{ORDERS[order]}\n{FROM[source]}"), backend, tmp_path, "-W", "ignore")
    assert result.stdout.startswith("graphs: 1 "), result.stderr
