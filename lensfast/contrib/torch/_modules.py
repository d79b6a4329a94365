"""Spans for the submodules of a model, without a change to its code.

An instrumented module has a `forward` of its own that asks the gate first. For the backward pass, a forward that runs
while its group is on leaves hooks at the nodes of the autograd graph where the module's part of it begins and ends;
the module's hooks and its tensors are left alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from ..._backend import gate
from ..._gated import gated, with_frame
from ..._import_hook import when_imported
from ..._spans import GatedSpan, OpenSpan, UnstartedSpan, report_failure
from ...propagation import ContextCarrier, carry_context
from ...state import _is_on

if TYPE_CHECKING:
    from torch.nn import Module

logger = logging.getLogger("lensfast.contrib.torch")

_Model = TypeVar("_Model", bound="Module")
Selector: TypeAlias = (
    "type[Module] | tuple[type[Module], ...] | str | int | Callable[[str, Module], bool] | list[Selector]"
)


def instrument_module(model: _Model, groups: Mapping[str, Selector], *, backward: bool = True) -> _Model:
    """Make each forward and backward of chosen modules of `model` a span, while its group is enabled.

    The spans are named `<path>.forward` and `<path>.backward` after the module's path in `model`, such as
    `layers.0.attention.forward`; those of `model` itself after its class. They have the attributes `module.path` and
    `module.class`. While the group is disabled, a call costs some tens of nanoseconds more than before.

    A forward span is a child of the current span, and current while the module's forward runs. A backward span starts
    when the gradient of an output is known and ends when that of an input is, or else with the span around it or with
    the backward pass, which marks it ERROR if it did not come to its end. It is a child of the backward span of the
    instrumented module around it; the outermost ones are children of the span that is current where the backward pass
    runs or, as on autograd's device threads nothing is, of the one around the forward. There is none for a forward
    without gradients or with its group disabled.

    Args:
        model: a module. It is changed in place.
        groups: a span group's name to the modules whose spans belong to it. The modules are named by

            - a class, or a tuple of classes: all instances, of subclasses too;
            - a str: a pattern for the path, as in fnmatch but segment by segment, so that `layers.*` is each layer and
              nothing inside; `**` stands for any number of segments, and `""` is the model itself;
            - an int: all at that depth, 0 being the model itself;
            - a function that is called with each path and module, and says whether;
            - a list of such.

            A module that several groups name belongs to the first. One that appears at several paths has the first.
        backward: whether there are backward spans, too.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a torch.nn.Module, or `groups` is not of the form above.
        ValueError: a group's name is empty, or a depth negative.

    A selector that matches nothing is logged as a warning: it may be right for another stage of the pipeline. A module
    that is instrumented already stays as it is; a torch.fx.GraphModule, or what else has a pickling of its own, is left
    alone with a warning. Copies of the model, made in whatever way, are not instrumented, and what pickle and
    torch.save write is what they would write of the bare model. An instrumented module is freed by Python's garbage
    collector, and only after uninstrument() with its last reference. The `forward` of its class is looked up now, not
    at each call. TorchScript can't compile an instrumented module, nor torch.export(strict=True) before torch 2.10.
    Hooks registered on a module run outside of its spans. Call this from one thread; calls of the model are
    thread-safe.
    """
    torch_module = _module_class()
    if not isinstance(model, torch_module):
        raise TypeError(f"instrument_module() takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(groups, Mapping):
        raise TypeError(
            "the groups of instrument_module() are a dict from a span group's name to what selects its modules, such "
            f"as {{'layer': 'layers.*'}}, not {groups!r}"
        )
    tests = {_group_name(group): _test(selector, torch_module) for group, selector in groups.items()}
    modules = [(path, module) for path, module in model.named_modules() if _has_forward(module, torch_module)]
    chosen: dict[str, tuple[str, Module]] = {}
    for group, test in tests.items():
        found = {path: (group, module) for path, module in modules if test(path, module)}
        if not found:
            logger.warning(
                "instrument_module: nothing in the %s is selected by %r, for span group %r",
                type(model).__name__,
                groups[group],
                group,
            )
        chosen = found | chosen
    _hook_compiler()
    for path, (group, module) in chosen.items():
        if _builds_own_pickles(type(module)):
            kind = type(module).__name__
            logger.warning("instrument_module: %r is left alone: a %s pickles in a way of its own", path, kind)
        else:
            _instrument(module, path, group, backward)
    return model


def uninstrument(model: Module) -> None:
    """Undo instrument_module() for all modules of `model`; those that are not instrumented are left alone.

    Where something else has been put around a module's `forward` since, that stays, and makes no more spans.

    Raises:
        TypeError: `model` is not a torch.nn.Module.
    """
    if not isinstance(model, _module_class()):
        raise TypeError(f"uninstrument() takes a torch.nn.Module, not {type(model).__name__}")
    for module in model.modules():
        _sites.pop(module, None)
        _strip(module.__dict__)


def _module_class() -> Any:
    import torch

    return torch.nn.Module


# Selecting


def _group_name(group: Any) -> str:
    if not isinstance(group, str):
        raise TypeError(f"a span group is named by a str, not {group!r}")
    if not group:
        raise ValueError("a span group's name is not empty")
    return group


def _test(selector: Any, torch_module: Any) -> Callable[[str, Any], bool]:
    """What tells of a path and its module whether they are selected."""
    if isinstance(selector, list):
        tests = [_test(each, torch_module) for each in selector]
        return lambda path, module: any(test(path, module) for test in tests)
    if isinstance(selector, str):
        pattern = _segments(selector)
        return lambda path, module: _matches(_segments(path), pattern)
    if isinstance(selector, int) and not isinstance(selector, bool):
        if selector < 0:
            raise ValueError(f"the depth of a module is 0 or more, not {selector}")
        return lambda path, module: len(_segments(path)) == selector
    classes = selector if isinstance(selector, tuple) else (selector,)
    if classes and all(inspect.isclass(each) and issubclass(each, torch_module) for each in classes):
        return lambda path, module: isinstance(module, classes)
    if callable(selector) and not inspect.isclass(selector) and not isinstance(selector, torch_module):
        return lambda path, module: bool(selector(path, module))
    raise TypeError(
        "modules are selected by a torch.nn.Module class or a tuple of them, a pattern (str), a depth (int), "
        f"a function of path and module, or a list of such, not by {selector!r}"
    )


def _segments(path: str) -> list[str]:
    return path.split(".") if path else []


def _matches(path: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(path[skipped:], pattern[1:]) for skipped in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


# Instrumenting: what a module gets into its __dict__


class _Site:
    """What makes the spans of one module. It must not refer to the module, which would then live for ever."""

    __slots__ = ("attributes", "backward", "carrier", "group", "key", "name")

    def __init__(self, name: str, group: str, attributes: Mapping[str, str], backward: bool, key: object) -> None:
        self.name = name
        self.group = group
        self.attributes = attributes
        self.backward = backward
        self.key = key
        self.carrier = carry_context()  # the context around the last forward that was none of a backward pass

    def span(self, direction: str) -> GatedSpan:
        return GatedSpan(
            f"{self.name}.{direction}",
            None,
            group=self.group,
            attributes=self.attributes,
            names_exception_type=False,
        )


_sites: weakref.WeakKeyDictionary[Any, _Site] = weakref.WeakKeyDictionary()
# One traced function serves all modules of a class, since torch.compile compiles again for what is another function.
_traced: weakref.WeakValueDictionary[tuple[Callable[..., Any], str], Any] = weakref.WeakValueDictionary()
# The functions of what is ours among the bound methods in modules' __dict__s. The traced ones have a key, which is
# also that of the sites they serve: what has been left inside of something else's wrapper is to stay quiet.
_ours: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()


def _has_forward(module: Any, torch_module: Any) -> bool:
    if "forward" not in module.__dict__ and _class_forward(module) is torch_module.forward:
        return False
    return callable(getattr(module, "forward", None))


def _builds_own_pickles(module_class: Any) -> bool:
    """Such as torch.fx.GraphModule: they would find us in the __dict__, and write what can't be read."""
    return module_class.__reduce__ is not object.__reduce__ or module_class.__reduce_ex__ is not object.__reduce_ex__


def _class_forward(module: Any) -> Any:
    return inspect.getattr_static(type(module), "forward", None)


def _instrument(module: Any, path: str, group: str, backward: bool) -> None:
    if module in _sites:
        return
    _strip(module.__dict__)  # what a copy of the __dict__ brought along
    replaced, forward = module.__dict__.get("forward"), _class_forward(module)
    if replaced is None and isinstance(forward, FunctionType):
        traced = _traced.get((forward, group))
        if traced is None:
            traced = _traced[forward, group] = _trace(forward, group)
    else:
        traced = _trace(_as_method(module.forward), group)
        traced.lensfast_replaced = replaced
    class_name = type(module).__name__
    attributes = {"module.path": path, "module.class": class_name}
    _sites[module] = _Site(path or class_name, group, attributes, backward, _ours[traced])
    # Not by setattr(), which classes define as they like.
    for function in (_getstate, _replicate_for_data_parallel):
        module.__dict__.setdefault(function.__name__, MethodType(function, module))
    module.__dict__["forward"] = MethodType(traced, module)


def _as_method(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a method that calls `forward`, which is bound already or knows its module otherwise."""

    def method(_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    shown: Any = functools.update_wrapper(method, forward)
    try:
        signature = inspect.signature(forward)
        module = inspect.Parameter("_module", inspect.Parameter.POSITIONAL_ONLY)
        shown.__signature__ = signature.replace(parameters=[module, *signature.parameters.values()])
    except (TypeError, ValueError):
        del shown.__wrapped__
    return method


def _trace(function: Callable[..., Any], group: str) -> Any:
    key = object()
    called = with_frame(function)
    runner = functools.update_wrapper(_runner(called, key), function)
    shown = functools.update_wrapper(gated(called, group, runner, _is_on), function)
    traced = functools.update_wrapper(gate.traced(called, group, runner, shown), function)
    _ours[traced] = key
    return traced


def _runner(function: Callable[..., Any], key: object) -> Callable[..., Any]:
    """`function`, the forward of a class, with a span around it."""

    def run(_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        span, backward, inputs = _before(key, _module, args, kwargs)
        with span:
            if backward is None:
                return function(_module, *args, **kwargs)
            token = _enclosing.set(backward)
            try:
                output = function(_module, *args, **kwargs)
            finally:
                _enclosing.reset(token)
        _after(backward, inputs, output)
        return output

    return run


def _getstate(self: Any) -> Any:
    """What copies and pickles are made from: the state without us. Found in the module's __dict__ by all protocols."""
    state = type(self).__getstate__(self)  # type: ignore[call-arg]
    if isinstance(state, dict):
        state = dict(state)
        _strip(state)
    return state


def _replicate_for_data_parallel(self: Any) -> Any:
    """For torch.nn.DataParallel, whose replicas are copies of the __dict__."""
    replica = type(self)._replicate_for_data_parallel(self)
    _strip(replica.__dict__)
    return replica


_getstate.__name__ = "__getstate__"  # where the __dict__ is pickled all the same, bound methods are by name
_ours.update({_getstate: None, _replicate_for_data_parallel: None})


def _strip(attributes: dict[str, Any]) -> None:
    """Take what is ours out of the attributes of a module or of a copy of one."""
    for name in ("forward", "__getstate__", "_replicate_for_data_parallel"):
        method = attributes.get(name)
        if type(method) is MethodType and method.__func__ in _ours:
            replaced = getattr(method.__func__, "lensfast_replaced", None)
            if replaced is None:
                del attributes[name]
            else:
                attributes[name] = replaced


# The backward pass

_MOST_NODES = 32
_LEAF = 2**63
_starts = itertools.count()


class _CarriedSpan:
    """A span that is entered in another context."""

    def __init__(self, carrier: ContextCarrier, span: GatedSpan) -> None:
        self._carrier = carrier
        self._span = span

    def __enter__(self) -> None:
        self._carrier.__enter__()
        self._span.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._span.__exit__(*exc_info)
        self._carrier.__exit__(*exc_info)


class _Backward:
    """What a forward leaves for the backward passes through it. It refers to no tensor, and to no node of the graph."""

    __slots__ = ("around", "carrier", "outer", "sequence_nr", "site", "start", "thread")

    def __init__(self, site: _Site, outer: _Backward | None, around: ContextCarrier | None, sequence_nr: int) -> None:
        self.site = site
        self.outer = outer
        self.around = around  # the context in a backward pass, if this forward is run by one
        self.sequence_nr = sequence_nr  # that of the first node which the forward can make
        self.carrier = carry_context()
        self.start = next(_starts)
        self.thread = threading.get_ident()

    def is_later_than(self, other: _Backward) -> bool:
        """Whether this forward came after `other`, or inside it."""
        return self.start > other.start and self.thread == other.thread


# The innermost forward that is running here.
_enclosing: ContextVar[_Backward | None] = ContextVar("lensfast_enclosing_forward", default=None)


def _before(key: object, module: Any, args: Any, kwargs: Any) -> tuple[Any, _Backward | None, list[Any]]:
    """Before a forward: its span; what its backward spans need, None if there can be none; and the graph nodes of its
    inputs, which it may change in place."""
    site = _sites.get(module)
    if site is None or site.key is not key:
        return gate.NOOP, None, []
    span: Any = site.span("forward")
    try:
        import torch

        carrier = None
        if torch._C._current_graph_task_id() == -1:
            site.carrier = carry_context()
        else:
            carrier = _context_in_pass(site)
            if carrier is not None:
                span = _CarriedSpan(carrier, span)
        if site.backward and torch.is_grad_enabled():
            backward = _Backward(site, _enclosing.get(), carrier, torch.autograd._get_sequence_nr())
            return span, backward, _nodes((args, kwargs))
    except Exception as failure:
        report_failure("see the inputs of module", site.name, failure)
    return span, None, []


def _context_in_pass(site: _Site) -> ContextCarrier | None:
    """The context for a forward that is run by a backward pass, unless it is to be the current one."""
    current = trace.get_current_span()
    engine_pass = _Pass.current()
    carrier = engine_pass.carrier(current) if engine_pass is not None else None
    return carrier if carrier is not None or current.get_span_context().is_valid else site.carrier


def _after(backward: _Backward, inputs: list[Any], output: Any) -> None:
    """After the forward: have the autograd engine tell when it comes to the module's part, and when it has left it.

    On each device, the engine runs the nodes in the reverse of the order in which a thread's forwards made them. So
    the part of a module is behind it after the module's first node, which is looked for in small modules, and when it
    comes to the node of an input. (An input that is a leaf has none. It is the end of the graph, too, or nearly so.)
    """
    try:
        import torch

        # What a forward passes on, or has kept from before, is no part of its own.
        outputs = [node for node in _nodes(output) if node._sequence_nr() >= backward.sequence_nr]
        for node in outputs:
            node.register_prehook(functools.partial(_on_begin, backward))
        if torch.autograd._get_sequence_nr() - backward.sequence_nr <= _MOST_NODES:
            for node in _first_node(outputs, backward.sequence_nr):
                node.register_hook(functools.partial(_on_end, backward))
        elif outputs:
            for node in inputs:
                node.register_prehook(functools.partial(_on_end, backward))
    except Exception as failure:
        report_failure("follow the backward pass of module", backward.site.name, failure)


def _first_node(outputs: list[Any], sequence_nr: int) -> list[Any]:
    """Of the nodes from `sequence_nr` on that `outputs` come from, the one that was made first, if any."""
    found = dict.fromkeys(outputs)
    waiting = list(found)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            # Those that add up the gradients of leaves have the highest number there is.
            if node is not None and node not in found and sequence_nr <= node._sequence_nr() < _LEAF:
                found[node] = None
                waiting.append(node)
    return sorted(found, key=lambda node: node._sequence_nr())[:1]


def _nodes(value: Any) -> list[Any]:
    """The graph nodes of the tensors in `value`, each once. Leaves have none.

    Those of what they are views of, too: a change in place takes the node of a view out of the graph.
    """
    nodes: dict[Any, None] = {}
    for tensor in _tensors(value):
        for each in (tensor, tensor._base):
            if each is not None and each.grad_fn is not None:
                nodes[each.grad_fn] = None
    return list(nodes)


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in dicts, lists, tuples and dataclasses."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, value))
    elif is_dataclass(value) and not inspect.isclass(value):
        yield from _tensors([getattr(value, field.name, None) for field in fields(value)])


def _on_begin(backward: _Backward, *gradients: object) -> None:
    try:
        engine_pass = _Pass.current(new=True)
        if engine_pass is not None:
            engine_pass.begin(backward)
    except Exception as failure:
        report_failure("begin the backward span of module", backward.site.name, failure)


def _on_end(backward: _Backward, *gradients: object) -> None:
    try:
        engine_pass = _Pass.current()
        if engine_pass is not None:
            engine_pass.end(backward)
    except Exception as failure:
        report_failure("end the backward span of module", backward.site.name, failure)


def _carrier_of(span: trace.Span) -> ContextCarrier:
    return ContextCarrier(trace.set_span_in_context(span))


_passes: dict[int, weakref.ref[_Pass]] = {}


class _Pass:
    """The spans of one backward pass. Only the engine keeps it: calls it at the end, or drops it if the pass fails."""

    __slots__ = ("__weakref__", "ambient", "lock", "open", "spans", "task")

    def __init__(self, task: int) -> None:
        self.task = task
        self.ambient = trace.get_current_span()
        self.lock = threading.RLock()  # each device has a thread
        self.spans: dict[_Backward, OpenSpan | UnstartedSpan] = {}
        self.open: list[_Backward] = []

    @staticmethod
    def current(new: bool = False) -> _Pass | None:
        """That of the backward pass which this thread is in; a new one if there is to be one."""
        import torch

        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        known = _passes.get(task)
        if known is None and new:
            made = _Pass(task)
            known = _passes.setdefault(task, weakref.ref(made))
            if known() is made:
                torch.autograd.Variable._execution_engine.queue_callback(made)
        return known() if known is not None else None

    def carrier(self, current: trace.Span) -> ContextCarrier | None:
        """The context of the innermost span, unless `current` is newer: what has been since before the pass is not."""
        with self.lock:
            if self.open and (current is self.ambient or not current.get_span_context().is_valid):
                return _carrier_of(self.spans[self.open[-1]].span)
        return None

    def begin(self, backward: _Backward) -> trace.Span:
        """The span of `backward` in this pass, started unless it has been."""
        with self.lock:
            opened = self.spans.get(backward)
            if opened is None:
                if backward.outer is not None:
                    carrier = _carrier_of(self.begin(backward.outer))
                elif backward.around is not None:
                    carrier = backward.around
                elif trace.get_current_span().get_span_context().is_valid:
                    carrier = carry_context()
                else:
                    carrier = backward.carrier
                self._end_later(backward)
                with carrier:
                    opened = backward.site.span("backward").start()
                self.spans[backward] = opened
                self.open.append(backward)
            return opened.span

    def end(self, backward: _Backward) -> None:
        with self.lock:
            if backward in self.open:
                self._end_later(backward)
                self.open.remove(backward)
                self.spans[backward].end(None)

    def _end_later(self, backward: _Backward) -> None:
        """End what came later than `backward`, or was inside it: the engine is past that. The inner ones go first."""
        for each in reversed(self.open):
            if each.is_later_than(backward):
                self.open.remove(each)
                self.spans[each].end(None)

    def __call__(self) -> None:
        with self.lock:
            while self.open:
                self.spans[self.open.pop()].end(None)

    def __del__(self) -> None:
        known = _passes.get(self.task)
        if known is not None and known() in (None, self):  # not that of another thread, which came first
            _passes.pop(self.task, None)
        while self.open:
            opened = self.spans[self.open.pop()]
            try:
                opened.span.set_status(Status(StatusCode.ERROR, "the backward pass did not come to its end"))
            except Exception as failure:
                report_failure("mark as failed", "a backward span", failure)
            opened.end(None)


# torch.compile


@functools.cache
def _hook_compiler() -> None:
    when_imported("torch._dynamo", _register)


def _register() -> None:
    """The compiler leaves alone what runs around an instrumented forward, and compiles that."""
    try:
        from torch._dynamo import disable, eval_frame

        eval_frame.skip_code(_runner(_before, None).__code__)
        for name in ("_before", "_after"):
            globals()[name] = disable(globals()[name])
        for name in ("__enter__", "__exit__"):
            setattr(_CarriedSpan, name, disable(getattr(_CarriedSpan, name)))
    except Exception as failure:
        report_failure("register with torch.compile", "instrument_module", failure)
