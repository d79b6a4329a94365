"""What torch.compile makes of lensfast's functions: inside a compiled region no group is on, and no span is made.

All of it is constant to the compiler: no graph break, nothing in the compiled code, no guard on what is enabled, and so
nothing to compile again when groups are switched. Where lensfast's code runs as Python all the same (around a compiled
region, or in what the compiler leaves to Python), the compiler keeps out of it, so that its spans are real and what
they enclose is compiled.

register() does it for the torch that is imported; hook() does it whenever that happens.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from types import CodeType
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanContext

from . import _gated, _spans, helpers, state
from ._backend import backend, compiled, gate, span_group
from ._import_hook import when_imported

logger = logging.getLogger("lensfast")

_noted = False


class ElidedSpan(Span):
    """What a region that is being compiled has in place of a span: takes everything, does nothing."""

    def end(self, end_time: int | None = None) -> None: ...
    def get_span_context(self) -> SpanContext:
        return trace.INVALID_SPAN_CONTEXT

    def set_attributes(self, attributes: Any) -> None: ...
    def set_attribute(self, key: str, value: Any) -> None: ...
    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None: ...
    def add_link(self, context: SpanContext, attributes: Any = None) -> None: ...
    def update_name(self, name: str) -> None: ...
    def is_recording(self) -> bool:
        return False

    def set_status(self, status: Any, description: str | None = None) -> None: ...
    def record_exception(
        self, exception: BaseException, attributes: Any = None, timestamp: int | None = None, escaped: bool = False
    ) -> None: ...


class ElidedSpanManager:
    """Gives an ElidedSpan. Not a nullcontext with it: torch 2.13 fails where a graph breaks inside such a one."""

    def __enter__(self) -> Span:
        return ELIDED_SPAN

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None: ...


ELIDED_SPAN = ElidedSpan()


def _note() -> None:
    """Says once that spans are left out. Runs while the region is compiled, never in it."""
    global _noted
    if not _noted:
        _noted = True
        logger.debug(
            "torch.compile: span groups are off inside compiled regions, and spans there are left out; spans around "
            "the call of a compiled function or module are made as ever"
        )


_note._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result sets


def _managed_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> Any:
    _note()
    return nullcontext()


def _span_cm(name: str, tracer: Any = None, record_exception: bool = True, **attributes: Any) -> Any:
    _note()
    return ElidedSpanManager()


def _span_attributes(attributes: Any) -> Any:
    return nullcontext()


def _is_span_group_enabled(group: str) -> bool:
    _note()
    return False


def _enabled_span_groups() -> frozenset[str]:
    return frozenset()


def _trace_fn(group: str, name: str, tracer: Any = None) -> Any:
    return lambda function: function


def _again(manager: Any) -> Any:
    _note()
    return ElidedSpanManager()


# Methods of a group handle.


def _handle_bool(handle: Any) -> bool:
    _note()
    return False


def _handle_span(handle: Any, name: str, tracer: Any = None, *, span_kind: Any = None, **attributes: Any) -> Any:
    _note()
    return nullcontext()


_IN_GRAPH = {
    helpers.managed_span: _managed_span,
    helpers.span_cm: _span_cm,
    helpers.span_attributes: _span_attributes,
    state.is_span_group_enabled: _is_span_group_enabled,
    state.enabled_span_groups: _enabled_span_groups,
    state._is_on: _is_span_group_enabled,
    helpers.trace_fn: _trace_fn,
    _spans.again: _again,
}

# Run as Python with all they call; the compiler is not to look into them.
_OPAQUE: tuple[Any, ...] = (
    helpers._managed_span,
    helpers._group_span,
    helpers.span_cm,
    helpers._span_if_enabled,
    _spans.again,
    _spans.SpanManager.__init__,
    _spans.SpanManager.start,
    _spans.SpanManager.__enter__,
    _spans.SpanManager.__exit__,
    _spans.OpenSpan.__exit__,
)


def hook() -> None:
    """Have register() called once torch._dynamo is imported: at once if it is."""
    when_imported("torch._dynamo", register)


def register() -> None:
    """Tell torch.compile about lensfast's functions. Never raises; a torch that knows no way is logged."""
    try:
        _register()
    except Exception:
        logger.warning(
            "this torch can't be told about lensfast's spans: inside torch.compile they will break graphs",
            exc_info=True,
        )


def _register() -> None:
    from torch._dynamo import config, eval_frame
    from torch._dynamo.decorators import assume_constant_result, substitute_in_graph
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, UserDefinedObjectVariable, UserMethodVariable
    from torch._dynamo.variables.builder import VariableBuilder

    for function, stand_in in _IN_GRAPH.items():
        with suppress(ValueError):  # it is known already: a module was reloaded
            substitute_in_graph(function, skip_signature_check=True)(stand_in)

    class HandleVariable(UserDefinedObjectVariable):  # type: ignore[misc]
        """A group handle: the real one, should it leave the region, that is off as long as it is inside."""

        def var_getattr(self, tx: Any, name: str) -> Any:
            if name in {"__bool__", "span"}:
                return UserMethodVariable(_handle_bool if name == "__bool__" else _handle_span, self)
            if name == "enabled":
                return ConstantVariable.create(False)
            if name == "name":
                return VariableBuilder(tx, AttrSource(self.source, name))(self.value.name)
            return super().var_getattr(tx, name)

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in {"__bool__", "span"}:
                return self.var_getattr(tx, name).call_function(tx, args, kwargs)
            return super().call_method(tx, name, args, kwargs)

    def build_handle(builder: Any, handle: Any) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return HandleVariable(handle, source=builder.source)

    for trace_numpy in (True, False):
        with config.patch(trace_numpy=trace_numpy):
            VariableBuilder._type_dispatch()[gate.GroupHandle] = build_handle

    if compiled is not None:
        from torch._C._dynamo.eval_frame import set_eval_frame

        compiled.keep_compiler_out(set_eval_frame)

    assume_constant_result(span_group)  # so that a handle may be taken there, too

    # Not to be compiled, but what they call may be.
    calling = [_gated._call.__code__, *_codes_in(_spans.in_span)]
    if backend == "python":
        calling.append(gate.TracedFunction.__call__.__code__)
    for code in calling:
        eval_frame.skip_code(code)
    for opaque in _OPAQUE:
        _leave_alone(opaque.__code__)


def _codes_in(function: Any) -> list[CodeType]:
    """The code of the functions defined inside `function`."""
    return [constant for constant in function.__code__.co_consts if isinstance(constant, CodeType)]


def _leave_alone(code: CodeType) -> None:
    """Keep the compiler out of the function of that code, and of all it calls."""
    from torch._dynamo import eval_frame, types

    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = types.FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, types.FrameExecStrategy(skip, skip))
    else:  # an older torch: what the function calls may be compiled, for nothing
        eval_frame.skip_code(code)
