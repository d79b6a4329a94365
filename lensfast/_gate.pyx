# cython: language_level=3, binding=True, freethreading_compatible=True
"""The gate in C: which span groups are enabled, asked billions of times.

The hot functions live in csrc/; this file sets them up and holds what runs rarely.
The interface is that of lensfast._gate_py, which has the same behaviour in Python.
"""

from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF

import os
from threading import RLock


cdef extern from "noop.h":
    PyObject *lf_noop
    int lf_noop_init() except -1

cdef extern from "group.h":
    int lf_group_init() except -1
    object lf_group_intern(object name)
    list lf_group_all()
    void lf_group_set(object handle, int enabled)
    void lf_group_set_span_hook(object function)
    PyTypeObject *lf_group_type

cdef extern from "traced.h":
    int lf_traced_init() except -1
    object lf_traced_new(object function, object group, object runner, object shown)
    PyTypeObject *lf_traced_type

cdef extern from "span.h":
    ctypedef struct LfApi:
        PyObject *context_variable
        PyTypeObject *context_type
        PyObject *span_key
        PyObject *api_span
        PyObject *invalid_span
        PyTypeObject *non_recording_span
        PyTypeObject *span_context
        PyObject *default_trace_state
        PyObject *trace_flags[4]
        PyObject *kinds[5]
    LfApi lf_api
    int lf_span_init() except -1
    void lf_plans_outdate()
    void lf_ids_reseed()
    PyObject *lf_set_eval_frame
    PyTypeObject *lf_plan_type
    PyTypeObject *lf_span_type
    PyTypeObject *lf_open_spans_type
    PyTypeObject *lf_tracer_type

cdef extern from "otlp.h":
    int lf_otlp_init() except -1
    PyTypeObject *lf_sink_type

cdef extern from "manager.h":
    int lf_manager_init() except -1
    int lf_manager_set_up(dict spans, dict trace) except -1
    PyTypeObject *lf_gated_span_type
    PyTypeObject *lf_ungated_span_type

cdef extern from "gate.h":
    int lf_gate_init() except -1
    int lf_gate_set_enabled(object frozen_set) except -1
    object lf_gate_is_enabled_function(object module_name)
    object lf_gate_managed_span_function(object module_name, object in_full)


lf_noop_init()
lf_group_init()
lf_traced_init()
lf_gate_init()
lf_span_init()
lf_otlp_init()
lf_manager_init()

NOOP = <object>lf_noop
NoopSpan = type(NOOP)
GroupHandle = <object>lf_group_type
TracedFunction = <object>lf_traced_type
GatedSpan = <object>lf_gated_span_type
UngatedSpan = <object>lf_ungated_span_type
Plan = <object>lf_plan_type
SpanBase = <object>lf_span_type
TracerBase = <object>lf_tracer_type
OpenSpans = <object>lf_open_spans_type
Sink = <object>lf_sink_type

is_span_group_enabled = lf_gate_is_enabled_function("lensfast.state")

# One writer at a time, which may be called back by what it handles; readers take no lock.
_lock = RLock()
_enabled = frozenset()


def _apply(groups):
    for name in groups:
        if isinstance(name, str):
            lf_group_intern(str.__str__(name))
    # Asked first and stored then: an odd member's __eq__ may raise.
    for handle, on in [(handle, handle.name in groups) for handle in lf_group_all()]:
        lf_group_set(handle, on)


def publish(groups):
    """Make exactly `groups` (a frozenset) enabled. Each group is switched once, by one store."""
    global _enabled
    with _lock:
        _enabled = groups
        lf_gate_set_enabled(groups)
        _apply(groups)


def _after_fork():
    lf_ids_reseed()
    # Another thread may have held the lock, half way through.
    _lock._at_fork_reinit()
    _apply(_enabled)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def enabled():
    """The frozenset last published."""
    return _enabled


def span_group(name):
    """The one handle of the group `name` (str); it lives as long as the process."""
    with _lock:
        handle = lf_group_intern(str.__str__(name))
        lf_group_set(handle, handle.name in _enabled)
    return handle


def install(managed_span, group_span):
    """Put the gate in front of the Python primitives; returns the managed_span to export."""
    lf_group_set_span_hook(group_span)
    return lf_gate_managed_span_function(managed_span.__module__, managed_span)


def traced(function, group, runner, shown):
    """A callable that is `function` while `group` is off and `runner` while it is on.

    `shown` is a Python function of the same behaviour; the result has its attributes.
    """
    if type(group) is str:
        group = span_group(group)
    return lf_traced_new(function, group, runner, shown)


cdef PyObject *_hold(object thing):
    Py_INCREF(thing)  # for ever: spans may outlive this module's globals at the end of the interpreter
    return <PyObject *>thing


def use_managers(dict spans, dict trace, context_variable, context_type, span_key):
    """Let managed_span and handle.span make their managers in C.

    `spans` and `trace` are the dicts of lensfast._spans and of opentelemetry.trace; the rest is how the current span
    is kept.
    """
    lf_api.context_variable = _hold(context_variable)
    lf_api.context_type = <PyTypeObject *>_hold(context_type)
    lf_api.span_key = _hold(span_key)
    lf_api.api_span = _hold(trace["Span"])
    lf_api.invalid_span = _hold(trace["INVALID_SPAN"])
    lf_api.non_recording_span = <PyTypeObject *>_hold(trace["NonRecordingSpan"])
    lf_api.span_context = <PyTypeObject *>_hold(trace["SpanContext"])
    lf_api.default_trace_state = _hold(trace["DEFAULT_TRACE_STATE"])
    for flags in range(4):
        lf_api.trace_flags[flags] = _hold(trace["TraceFlags"](flags))
    for kind in trace["SpanKind"]:
        if 0 <= kind.value < 5:
            lf_api.kinds[kind.value] = _hold(kind)
    lf_manager_set_up(spans, trace)


def outdate_plans():
    """Every tracer is to make its plan anew before its next span."""
    lf_plans_outdate()


def keep_compiler_out(set_eval_frame):
    """Let Python code that C calls for spans run without torch.compile, whose function that is; None: no more."""
    global lf_set_eval_frame
    lf_set_eval_frame = NULL if set_eval_frame is None else _hold(set_eval_frame)
