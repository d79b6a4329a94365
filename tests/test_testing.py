"""The pytest plugin, as a project uses it that depends on lensfast."""

from __future__ import annotations

import logging

import pytest
from opentelemetry import baggage, context, metrics, propagate, trace
from opentelemetry._logs import get_logger_provider, set_logger_provider
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SpanExportResult

from conftest import BACKENDS, ROOT, load_backend

pytest_plugins = "pytester"

LIBRARY = """
import logging
from lensfast import SpanRegistry, managed_span, span_attributes, trace_fn
from lensfast.instruments import MetricSpec, record_metrics, register_metric_group

SpanRegistry.register("mylib", {"step", "layer"}, {"default": {"step"}, "per_step": {"step", "layer"}})
register_metric_group("mylib", [MetricSpec("steps", "mylib.steps", "counter")])

@trace_fn("layer", "mylib.layer")
def layer():
    return 1

def step(number):
    with managed_span("step", "mylib.step", **{"mylib.number": number}):
        return layer() + layer()
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A project with the library above; runs its tests in a process of its own, where a warning is an error."""

    def run(tests, *options, backend="c", conftest='pytest_plugins = ["lensfast.testing"]', passed):
        load_backend(backend)
        monkeypatch.setenv("LENSFAST_PURE_PYTHON", str(int(backend == "python")))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        pytester.makeconftest(conftest)
        pytester.makepyfile(mylib=LIBRARY, test_mylib=tests)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error", *options)
        result.assert_outcomes(passed=passed)
        return result

    return run


CAPTURING = """
import pytest
from opentelemetry import trace
import lensfast
import mylib

def test_a_preset(capture_spans):
    with capture_spans("per_step") as spans:
        assert mylib.step(5) == 2
        assert len(spans) == 3
    step = spans.one("mylib.step")
    assert step.attributes == {"mylib.number": 5}
    assert [layer.parent.span_id for layer in spans.named("mylib.layer")] == [step.context.span_id] * 2
    assert spans.names == ["mylib.layer", "mylib.layer", "mylib.step"]
    assert spans[-1] is step and spans[:2] == spans.named("mylib.layer")
    assert "mylib.step" in repr(spans)

@pytest.mark.parametrize("groups", ["step", "Step ,", {"step"}, ["step"]])
def test_some_groups(capture_spans, groups):
    with capture_spans(groups) as spans:
        mylib.step(1)
    assert spans.names == ["mylib.step"]

@pytest.mark.parametrize("groups", ["", " ", set()])
def test_no_groups(capture_spans, groups):
    lensfast.set_enabled_span_groups({"step"})
    with capture_spans(groups) as spans:
        mylib.step(1)
    assert not spans and spans.names == []
    assert lensfast.enabled_span_groups() == {"step"}

def test_only_the_block(capture_spans, span_exporter):
    lensfast.set_enabled_span_groups({"step", "layer"})
    mylib.step(1)
    with capture_spans("layer") as first:
        mylib.step(2)
    mylib.step(3)
    with capture_spans("step") as second:
        mylib.step(4)
    assert first.names == ["mylib.layer"] * 2
    assert [span.attributes for span in second] == [{"mylib.number": 4}]
    assert len(span_exporter.get_finished_spans()) == 3 + 2 + 3 + 1
    span_exporter.clear()
    assert span_exporter.get_finished_spans() == [] and len(first) == 2

def test_groups_are_restored_after_an_exception(capture_spans):
    with pytest.raises(KeyError), capture_spans("step"):
        raise KeyError
    assert lensfast.enabled_span_groups() == frozenset()

def test_a_live_spec_is_restored(capture_spans):
    lensfast.state.set_span_group_spec("default")
    with capture_spans("layer"):
        assert lensfast.enabled_span_groups() == {"layer"}
    assert lensfast.enabled_span_groups() == {"step"}
    lensfast.SpanRegistry.register("late", {"late"}, {"default": {"late"}})
    assert lensfast.enabled_span_groups() == {"step", "late"}

def test_a_wrong_name_is_an_error(capture_spans):
    with pytest.raises(ValueError, match="'step,layr' names groups that no library has registered.*layer"):
        with capture_spans("step,layr"):
            pass
    with capture_spans({"unregistered"}) as spans, lensfast.managed_span("unregistered", "n"):
        pass
    assert spans.names == ["n"]
    lensfast.SpanRegistry.clear()
    with pytest.raises(ValueError, match="'all' names groups that no library has registered"):
        with capture_spans("all"):
            pass

def test_looking_for_one(capture_spans):
    with capture_spans("per_step") as spans:
        mylib.step(1)
    for name, number in (("mylib.layer", 2), ("nobody", 0)):
        with pytest.raises(AssertionError, match=f"{number} spans are named '{name}'.*mylib.step"):
            spans.one(name)

def test_span_attributes_apply(capture_spans):
    with capture_spans("step") as spans, mylib.span_attributes({"run": "r"}):
        mylib.step(1)
    assert spans.one("mylib.step").attributes == {"run": "r", "mylib.number": 1}

def test_spans_of_plain_opentelemetry_are_there_too(span_exporter):
    with trace.get_tracer("any").start_as_current_span("n"):
        pass
    assert [span.name for span in span_exporter.get_finished_spans()] == ["n"]
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_capturing(project, backend):
    project(f"BACKEND = {backend!r}\n" + CAPTURING + "\nassert lensfast.backend == BACKEND", backend=backend, passed=15)


LEAKING = """
import os
import pytest
from opentelemetry import baggage, context, metrics, propagate, trace
import lensfast
import mylib
from lensfast.instruments import MetricSpec, register_metric_group, registered_metric_groups, unregister_metric_group
from lensfast.testing import InMemorySpanExporter

LEFT_OPEN_TOO = []
LEFT_OPEN = lensfast.span_attributes({"run": "left over"})

# Without a fixture.
def test_before():
    from opentelemetry.sdk.trace import TracerProvider
    trace.set_tracer_provider(TracerProvider())
    lensfast.set_enabled_span_groups({"step"})
    LEFT_OPEN.__enter__()

# Both tests see the same and leave everything changed.
@pytest.mark.parametrize("run", [1, 2])
def test_everything(clean_telemetry, monkeypatch, run, caplog):
    assert lensfast.SpanRegistry.namespaces() == ["mylib"]
    assert lensfast.SpanRegistry.presets()["default"] == {"step"}
    assert lensfast.enabled_span_groups() == lensfast.pending_span_groups() == frozenset()
    assert lensfast.registered_strategies() == ["all_ranks", "first_rank_per_node", "sampled", "single_rank"]
    assert list(registered_metric_groups()) == ["mylib"]
    assert lensfast.state.get_pp_trace_carrier() is None
    assert trace._TRACER_PROVIDER is None and metrics._internal._METER_PROVIDER is None
    assert not trace.get_current_span().is_recording() and baggage.get_all() == {}
    assert type(propagate.get_global_textmap()).__name__ == "CompositePropagator"
    assert "OTEL_TRACES_SAMPLER" not in os.environ and "NEMO_LENS_ENABLED" not in os.environ
    assert "MYLIB_OTEL_ENABLED" in os.environ

    config = lensfast.NemoLensConfig(enabled=True, span_groups="default,late")
    exporter = InMemorySpanExporter()
    handle = lensfast.setup_telemetry(config, span_exporter=exporter, metric_reader=reader())
    assert handle.is_exporting
    lensfast.SpanRegistry.register("late", {"late"})
    lensfast.SpanRegistry.unregister("mylib")
    assert lensfast.enabled_span_groups() == {"late", "job", "checkpoint", "evaluate"}
    with lensfast.managed_span("late", "n") as span:
        assert "run" not in span.attributes
    lensfast.register_export_strategy("mine", lambda *_: False)
    lensfast.register_export_strategy("all_ranks", lambda *_: False, allow_override=True)
    register_metric_group("late", [MetricSpec("k", "n")])
    unregister_metric_group("mylib")
    lensfast.state.set_pp_trace_carrier({"traceparent": "x"})
    propagate.set_global_textmap(None)
    context.attach(baggage.set_baggage("left", "over"))
    LEFT_OPEN_TOO.append(lensfast.span_attributes({"run": "left over"}))
    LEFT_OPEN_TOO[-1].__enter__()
    lensfast.managed_span("late", "left open").__enter__()
    handle.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["n", "left open"]

def reader():
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    return InMemoryMetricReader()

def test_an_overridden_strategy_is_back(clean_telemetry):
    assert lensfast.strategies.get_export_strategy("all_ranks")(None, 0, 1)

# Without a fixture, after all of that.
def test_the_library_is_still_registered():
    assert lensfast.SpanRegistry.namespaces() == ["mylib"]
    assert os.environ["OTEL_TRACES_SAMPLER"] == "always_off"

def test_the_environment_does_not_matter(capture_spans, metric_reader):
    with capture_spans("step") as spans:
        mylib.step(1)
    assert spans.names == ["mylib.step"]

@pytest.mark.parametrize("run", [1, 2])
def test_an_exporter_is_fresh(span_exporter, run):
    lensfast.set_enabled_span_groups({"step"})
    mylib.step(run)
    assert [span.attributes["mylib.number"] for span in span_exporter.get_finished_spans()] == [run]

@pytest.mark.parametrize("run", [1, 2])
def test_metrics(metric_reader, run):
    from lensfast.testing import metric_points
    assert metric_points(metric_reader) == {}
    mylib.record_metrics(lensfast.get_meter(), "mylib", steps=run, attributes={"a": "b"})
    (point,) = metric_points(metric_reader)["mylib.steps"]
    assert point.value == run and point.attributes == {"a": "b"}
"""


def test_nothing_leaks_from_test_to_test(project, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("NEMO_LENS_ENABLED", "1")
    monkeypatch.setenv("MYLIB_OTEL_ENABLED", "1")
    project(LEAKING, passed=10)


def test_imported_before_it_is_a_plugin(project):
    conftest = """
        from lensfast.testing import InMemorySpanExporter
        pytest_plugins = ["lensfast.testing"]
    """
    project("def test_it(capture_spans):\n    pass", "-p", "lensfast.testing", conftest=conftest, passed=1)
    project("def test_it(capture_spans):\n    pass", conftest=conftest, passed=1)


def test_switched_on_by_the_command_line(project):
    test = """
        import mylib
        def test_it(capture_spans):
            with capture_spans("step") as spans:
                mylib.step(1)
            assert spans.names == ["mylib.step"]
    """
    project(test, "-p", "lensfast.testing", conftest="", passed=1)


def test_without_the_plugin_there_are_no_fixtures(project):
    result = project("def test_it():\n    pass", "--fixtures", conftest="", passed=0)
    assert "capture_spans" not in result.stdout.str()


def test_with_it_nothing_is_automatic(project):
    test = """
        def test_it():
            from opentelemetry import trace
            import lensfast
            lensfast.set_enabled_span_groups({"step"})
        def test_after_it():
            import lensfast
            assert lensfast.enabled_span_groups() == {"step"}
    """
    project(test, passed=2)


def test_a_project_that_imports_nemo_lens(project):
    test = """
        import lensfast
        lensfast.install()
        from nemo.lens import SpanRegistry
        from nemo.lens.helpers import managed_span
        from nemo.lens.state import is_span_group_enabled
        from nemo.lens import handle, setup_telemetry

        SpanRegistry.register("theirs", {"job"}, {"default": {"job"}})

        def test_it(capture_spans):
            with capture_spans("default") as spans:
                assert is_span_group_enabled("job")
                with managed_span("job", "theirs.job"):
                    pass
            assert spans.names == ["theirs.job"]
            assert not is_span_group_enabled("job")
            handle._INITIALIZED = True

        def test_after_it(clean_telemetry):
            assert not handle._INITIALIZED
            assert SpanRegistry.namespaces() == ["theirs"]
    """
    project(test, passed=2)


# In this process, on both backends


def test_reset_telemetry(lensfast, exporter, caplog):
    """What fixtures of other frameworks call."""
    reset = lensfast.testing.reset_telemetry
    metrics.set_meter_provider(metrics.NoOpMeterProvider())
    lensfast.SpanRegistry.register("lib", {"step"})
    lensfast.instruments.register_metric_group("lib", [lensfast.instruments.MetricSpec("k", "n")])
    lensfast.register_export_strategy("single_rank", lambda *_: True, allow_override=True)
    lensfast.state.set_span_group_spec("step")
    lensfast.handle._INITIALIZED = True
    lensfast.state.set_pp_trace_carrier({})
    context.attach(baggage.set_baggage("a", "b"))
    propagate.set_global_textmap(None)
    with lensfast.managed_span("step", "n"):
        pass
    assert len(exporter.get_finished_spans()) == 1
    reset()
    assert exporter.export([]) is SpanExportResult.FAILURE, "the provider was shut down"
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"
    assert type(get_logger_provider()).__name__ == "ProxyLoggerProvider"
    assert context.get_current() == {}
    assert propagate.get_global_textmap() is not None
    assert lensfast.SpanRegistry.namespaces() == []
    assert lensfast.instruments.registered_metric_groups() == {}
    assert lensfast.strategies.get_export_strategy("single_rank") is lensfast.strategies._single_rank
    assert lensfast.enabled_span_groups() == lensfast.pending_span_groups() == frozenset()
    assert lensfast.handle._INITIALIZED is False
    assert lensfast.state.get_pp_trace_carrier() is None
    lensfast.SpanRegistry.register("lib", {"step"})
    assert lensfast.enabled_span_groups() == frozenset(), "the spec is forgotten"
    reset()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_provider_that_can_not_be_shut_down(lensfast):
    class Broken:
        def shutdown(self):
            raise RuntimeError

    trace._TRACER_PROVIDER = Broken()
    lensfast.state.set_pp_trace_carrier({})
    lensfast.testing.reset_telemetry()
    assert trace._TRACER_PROVIDER is None
    assert lensfast.state.get_pp_trace_carrier() is None


def test_what_is_logged_once_is_logged_again_after_a_reset(lensfast, caplog):
    for _ in range(2):
        lensfast.instruments.record_metrics(lensfast.get_meter(), "nobody", k=1)
        with lensfast.span_cm("n", tracer=5):
            pass
        assert len(caplog.records) == 2
        caplog.clear()
        lensfast.testing.reset_telemetry()


def test_meters_report_to_the_next_provider_only_if_taken_after_the_reset(lensfast):
    results = []
    for _ in range(2):
        before = lensfast.get_meter()
        old = before.create_counter("old")
        lensfast.testing.reset_telemetry()
        after = lensfast.get_meter()
        new = after.create_counter("new")
        reader = InMemoryMetricReader()
        metrics.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
        old.add(1)
        new.add(2)
        results.append({name: points[0].value for name, points in lensfast.testing.metric_points(reader).items()})
        lensfast.testing.reset_telemetry()
    assert results == [{"new": 2}] * 2


def test_bridges_of_logging_are_taken_down(lensfast):
    handlers = list(logging.root.handlers)
    for name in ("", "some.library"):
        set_logger_provider(LoggerProvider(shutdown_on_exit=False))
        other = logging.NullHandler()
        logging.getLogger(name).addHandler(other)
        lensfast.logging_bridge.setup_logging_bridge(name)
        lensfast.testing.reset_telemetry()
        assert logging.getLogger(name).handlers == [*(handlers if not name else []), other]
        logging.getLogger(name).removeHandler(other)


def test_the_exporter(lensfast):
    exporter = lensfast.testing.InMemorySpanExporter()
    assert exporter, "a falsy exporter would be ignored by setup_telemetry"
    first, second = object(), object()
    assert exporter.get_finished_spans() == []
    assert exporter.export([first]) is SpanExportResult.SUCCESS
    assert exporter.export((second,)) is SpanExportResult.SUCCESS
    assert exporter.get_finished_spans() == [first, second]
    assert exporter.force_flush() is True
    exporter.clear()
    assert exporter.get_finished_spans() == []
    exporter.shutdown()
    assert exporter.export([first]) is SpanExportResult.FAILURE
    assert exporter.get_finished_spans() == []
