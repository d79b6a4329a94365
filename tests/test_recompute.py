"""Activation checkpointing runs a forward again inside the backward pass: such spans say so."""

import threading

import pytest

RECOMPUTE = "lensfast.recompute"


@pytest.fixture
def torch(lensfast):
    lensfast.set_enabled_span_groups({"layer"})
    return pytest.importorskip("torch", reason="torch is not installed here")


def spans(exporter):
    """(name, whether it says that it is a recomputation, status) of each span, in order of their end."""
    return [
        (span.name, span.attributes.get(RECOMPUTE), span.status.status_code.name)
        for span in exporter.get_finished_spans()
    ]


def layer(lensfast):
    """Spans of each kind, around what has to be kept for the backward pass, and one in a no_grad block."""
    import torch

    handle = lensfast.span_group("layer")

    @lensfast.trace_fn("layer", "traced")
    def traced(x):
        return x.sin()

    def forward(x):
        with lensfast.managed_span("layer", "managed"):
            x = x.exp()
        with lensfast.span_cm("ungated"):
            x = traced(x)
        with torch.no_grad(), handle.span("no_grad"):
            x.sum()
        return x.cos()

    return forward


NAMES = ["managed", "traced", "ungated", "no_grad"]
FIRST = [(name, None, "UNSET") for name in NAMES]
AGAIN = [(name, True, "UNSET") for name in NAMES]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_spans_of_a_recomputation_are_marked(lensfast, exporter, torch, use_reentrant):
    x = torch.ones(3, requires_grad=True)
    with lensfast.managed_span("layer", "step"):
        y = torch.utils.checkpoint.checkpoint(layer(lensfast), x, use_reentrant=use_reentrant)
        assert spans(exporter) == FIRST
        exporter.clear()
        with lensfast.managed_span("layer", "backward"):
            y.sum().backward()
    assert spans(exporter) == [*AGAIN, ("backward", None, "UNSET"), ("step", None, "UNSET")]
    backward = exporter.get_finished_spans()[-2]
    managed = next(span for span in exporter.get_finished_spans() if span.name == "managed")
    assert managed.parent.span_id == backward.context.span_id


def test_the_exception_that_ends_a_recomputation_early_is_no_error(lensfast, exporter, torch):
    """Without reentrance the forward is left by an exception as soon as all that is needed has been computed."""

    def forward(x):
        with lensfast.span_cm("outer"), lensfast.managed_span("layer", "inner"):
            y = x.exp()
            with lensfast.managed_span("layer", "never again"):
                return y + 1

    x = torch.ones(3, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    exporter.clear()
    y.sum().backward()
    assert spans(exporter) == [("inner", True, "UNSET"), ("outer", True, "UNSET")]
    assert all(span.events == () for span in exporter.get_finished_spans())


def test_a_real_error_in_a_recomputation_is_one(lensfast, exporter, torch):
    runs = []

    def forward(x):
        with lensfast.managed_span("layer", "s"):
            runs.append(1)
            if len(runs) == 2:
                raise ValueError("second run")
            return x.exp().sin()

    x = torch.ones(3, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=True)
    with pytest.raises(ValueError, match="second run"):
        y.sum().backward()
    assert spans(exporter) == [("s", None, "UNSET"), ("s", True, "ERROR")]


@pytest.mark.parametrize("create_graph", [False, True])
def test_spans_of_hooks_and_backward_functions_are_not_marked(lensfast, exporter, torch, create_graph):
    class Offload(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with lensfast.managed_span("layer", "activation.reload"):
                return gradient.clone()

    def hook(gradient):
        with lensfast.managed_span("layer", "hook"):
            return gradient

    x = torch.ones(3, requires_grad=True)
    y = Offload.apply(x)
    y.register_hook(hook)
    (y * 2).sum().backward(create_graph=create_graph)
    assert spans(exporter) == [("hook", None, "UNSET"), ("activation.reload", None, "UNSET")]
    x.grad = None  # with create_graph it holds the graph that holds x


def test_hooks_that_only_have_a_checkpoint_in_their_name(lensfast, exporter, torch):
    class CheckpointSaver:
        def hook(self, parameter):
            with lensfast.managed_span("layer", "save"):
                pass

    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(CheckpointSaver().hook)
    (x * 2).sum().backward()
    assert spans(exporter) == [("save", None, "UNSET")]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_whose_graph_is_kept(lensfast, exporter, torch, use_reentrant):
    x = torch.ones(3, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(layer(lensfast), x, use_reentrant=use_reentrant)
    exporter.clear()
    y.sum().backward(retain_graph=True)
    assert spans(exporter) == AGAIN


def test_a_checkpoint_function_of_the_trainers_own(lensfast, exporter, torch):
    """As Megatron's: an autograd function that runs the forward again with gradients enabled."""

    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, x):
            ctx.run = run
            ctx.save_for_backward(x)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run(x)
            torch.autograd.backward(y, gradient)
            return None, x.grad

    x = torch.ones(3, requires_grad=True)
    for keep in (False, True):
        y = CheckpointFunction.apply(layer(lensfast), x)
        exporter.clear()
        y.sum().backward(retain_graph=keep)
        assert spans(exporter) == AGAIN


def test_a_forward_on_another_thread_meanwhile_is_not_marked(lensfast, exporter, torch):
    def hook(gradient):
        thread = threading.Thread(target=layer(lensfast), args=(torch.ones(3, requires_grad=True),))
        thread.start()
        thread.join()

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert spans(exporter) == FIRST


def test_a_torch_that_is_being_imported_or_is_odd(lensfast, exporter, monkeypatch):
    import sys
    import types

    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    lensfast.set_enabled_span_groups({"layer"})
    with lensfast.managed_span("layer", "s"):
        pass
    assert spans(exporter) == [("s", None, "UNSET")]
