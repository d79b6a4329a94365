"""The no-ops do nothing, and have the signatures of what they stand in for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys

import pytest

from conftest import PACKAGE

NAMES = {
    *("SpanRegistry", "is_span_group_enabled", "managed_span", "safe_set_span_attributes", "span_attributes"),
    *("span_cm", "trace_fn"),
}
METHODS = {"register", "unregister", "clear", "groups", "namespaces", "presets", "resolve"}


def public(where):
    return {name for name in vars(where) if not name.startswith("_")}


def parameters(function):
    """Name, kind and default of each parameter."""
    return [
        (parameter.name, parameter.kind, "exempt" if parameter.name == "redact_keys" else parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def test_the_names(lensfast):
    assert set(lensfast.fallbacks.__all__) == NAMES
    assert public(lensfast.fallbacks.SpanRegistry) == METHODS
    assert public(lensfast.SpanRegistry) == METHODS


@pytest.mark.parametrize("name", sorted(NAMES - {"SpanRegistry"}))
def test_functions_have_the_real_parameters(lensfast, name):
    real = getattr(lensfast, name)
    assert parameters(getattr(lensfast.fallbacks, name)) == parameters(real)
    module = lensfast.state if name == "is_span_group_enabled" else lensfast.helpers
    assert getattr(module, name) is real


@pytest.mark.parametrize("name", sorted(METHODS))
def test_registry_methods_have_the_real_parameters(lensfast, name):
    assert parameters(getattr(lensfast.fallbacks.SpanRegistry, name)) == parameters(
        getattr(lensfast.SpanRegistry, name)
    )


@pytest.mark.skipif(not importlib.util.find_spec("nemo"), reason="nemo-lens is not installed here (needs Python 3.13)")
def test_the_original_has_the_same_parameters(lensfast):
    original = importlib.import_module("nemo.lens.fallbacks")
    names = {name for name in public(original) if getattr(original, name).__module__ == original.__name__}
    assert names == NAMES - {"SpanRegistry", "span_attributes"}, "those two are newer"
    for name in names:
        ours = getattr(lensfast.fallbacks, name)
        assert parameters(ours) == parameters(getattr(original, name))
    real, ours = (
        inspect.signature(original.safe_set_span_attributes),
        inspect.signature(lensfast.fallbacks.safe_set_span_attributes),
    )
    assert [p.default for p in real.parameters.values()] == [p.default for p in ours.parameters.values()]


def test_trace_fn_returns_the_function(lensfast):
    def function():
        return 1

    assert lensfast.fallbacks.trace_fn("step", "n")(function) is function
    assert lensfast.fallbacks.trace_fn(group="step", name="n", tracer=object())(function) is function


def test_context_managers_yield_none(lensfast):
    fallbacks = lensfast.fallbacks
    for manager in (
        fallbacks.managed_span("step", "n"),
        fallbacks.managed_span("step", "n", object(), a=1, **{"a.b": 2}),
        fallbacks.span_cm("n"),
        fallbacks.span_cm("n", tracer=None, record_exception=False, a=1),
        fallbacks.span_attributes({"a": 1}),
    ):
        ran = False
        with manager as span:
            ran = True
            assert span is None
        assert ran
    error = ValueError("from the body")
    with pytest.raises(ValueError, match="from the body") as raised, fallbacks.managed_span("step", "n"):
        raise error
    assert raised.value is error


def test_the_rest_does_nothing(lensfast):
    fallbacks = lensfast.fallbacks
    assert fallbacks.is_span_group_enabled("job") is False
    assert fallbacks.safe_set_span_attributes(None, {"a": 1}) is None
    assert fallbacks.safe_set_span_attributes(None, {}, frozenset({"a"})) is None


def test_the_registry_remembers_nothing_and_never_raises(lensfast):
    registry = lensfast.fallbacks.SpanRegistry
    for _ in range(2):
        assert registry.register("lib", {"step"}, {"default": {"step"}}) is None
    assert registry.register("", "all", allow_override=True) is None
    assert registry.unregister("nobody") is None
    assert registry.clear() is None
    assert registry.groups() == frozenset()
    assert registry.namespaces() == []
    assert registry.presets() == {"all": frozenset()}
    assert registry.resolve(" Default,, LAYER ,all") == (frozenset(), {"default", "layer", "all"})
    assert registry.resolve("") == (frozenset(), frozenset())


def test_the_file_imports_nothing_of_opentelemetry_or_lensfast():
    code = (
        f"import runpy, sys; runpy.run_path({str(PACKAGE / 'fallbacks.py')!r});"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'lensfast'))])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=PACKAGE.parent, env=environment, capture_output=True, text=True
    )
    assert result.stdout == "[]\n", result.stderr
