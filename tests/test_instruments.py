"""The fixed metric sets and the metric registry."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, NoOpMeterProvider, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from conftest import ROOT


@pytest.fixture
def reader(lensfast):
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
    return reader


@pytest.fixture
def meter(reader):
    return metrics.get_meter("test")


def exported(reader):
    """Metric name -> (unit, kind, [(value or sum, attributes)])."""
    data = reader.get_metrics_data()
    return {
        metric.name: (
            metric.unit or "",
            type(metric.data).__name__,
            [
                (point.sum if isinstance(point, HistogramDataPoint) else point.value, dict(point.attributes))
                for point in metric.data.data_points
            ],
        )
        for resource in (data.resource_metrics if data else [])
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("lensfast")
    ]


takes_boundaries = pytest.mark.skipif(
    "explicit_bucket_boundaries_advisory" not in inspect.signature(metrics.Meter.create_histogram).parameters,
    reason="this OpenTelemetry has no boundaries for histograms",
)


# The fixed sets


def test_inference(lensfast, meter, reader):
    record = lensfast.instruments.record_inference_metrics
    assert record is lensfast.instruments.inference.record_inference_metrics
    record(meter, 1.5, "gpt", 100, 50)
    record(meter, request_duration_s=2.0, model="", provider_name="vllm", operation_name="chat")
    base = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "nemo", "gen_ai.request.model": "gpt"}
    assert exported(reader) == {
        "gen_ai.server.request.duration": (
            "s",
            "Histogram",
            [(1.5, base), (2.0, {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm"})],
        ),
        "gen_ai.client.token.usage": (
            "{token}",
            "Histogram",
            [(100, {**base, "gen_ai.token.type": "input"}), (50, {**base, "gen_ai.token.type": "output"})],
        ),
    }


def test_the_model_is_made_a_str(lensfast, meter, reader):
    class Model:
        def __str__(self):
            return "a model"

    lensfast.instruments.record_inference_metrics(meter, 1, Model())
    ((_, attributes),) = exported(reader)["gen_ai.server.request.duration"][2]
    assert attributes["gen_ai.request.model"] == "a model"


def test_gym(lensfast, meter, reader):
    gym = lensfast.instruments.gym
    gym.record_gym_metrics(meter, 50.0, 75.0, 25.0, 0.95, 3)
    assert exported(reader) == {
        "gym.server.request_duration_ms": ("ms", "Histogram", [(50.0, {})]),
        "gym.rollout.duration_ms": ("ms", "Histogram", [(75.0, {})]),
        "gym.verify.duration_ms": ("ms", "Histogram", [(25.0, {})]),
        "gym.verify.success_rate": ("", "Gauge", [(0.95, {})]),
        "gym.servers.active": ("", "Gauge", [(3, {})]),
    }


@takes_boundaries
def test_gym_durations_reach_an_hour(lensfast, meter, reader):
    lensfast.instruments.gym.record_gym_metrics(meter, rollout_duration_ms=50_000)
    (point,) = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    assert point.explicit_bounds == (
        100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 120000, 300000, 600000, 1200000, 1800000, 3600000,
    )  # fmt: skip


def test_an_api_without_boundaries(lensfast):
    """Older versions of create_histogram don't know the parameter."""
    histogram = mock.Mock()

    class Meter:
        def create_histogram(self, name, unit="", description=""):
            return histogram

        def create_gauge(self, name, unit="", description=""):
            return mock.Mock()

    lensfast.instruments.gym.record_gym_metrics(Meter(), verify_duration_ms=5.0)
    histogram.record.assert_called_once_with(5.0)


# Name, kind, unit of each parameter, in the order of 0.1.0 with the three of 0.2 after it.
RL = {
    "reward_mean": ("rl.reward.mean", "Gauge", ""),
    "kl_divergence": ("rl.kl_divergence", "Gauge", ""),
    "policy_loss": ("rl.policy_loss", "Gauge", ""),
    "value_loss": ("rl.value_loss", "Gauge", ""),
    "entropy": ("rl.entropy", "Gauge", ""),
    "response_length_mean": ("rl.response_length.mean", "Gauge", ""),
    "generation_duration_ms": ("rl.generation.duration_ms", "Histogram", "ms"),
    "rollout_duration_ms": ("rl.rollout.duration_ms", "Histogram", "ms"),
    "grad_norm": ("rl.grad_norm", "Gauge", ""),
    "learning_rate": ("rl.learning_rate", "Gauge", ""),
    "throughput_tokens_per_sec": ("rl.throughput.tokens_per_sec", "Gauge", "{token}/s"),
}


def test_rl(lensfast, meter, reader):
    record = lensfast.instruments.rl.record_rl_metrics
    assert list(inspect.signature(record).parameters) == ["meter", *RL]
    record(meter, *[float(number) for number in range(len(RL))])
    assert exported(reader) == {
        name: (unit, kind, [(float(number), {})]) for number, (name, kind, unit) in enumerate(RL.values())
    }


RECORDERS = {
    "inference": ("record_inference_metrics", {"request_duration_s": 1.0}),
    "gym": ("record_gym_metrics", {"active_servers": 1}),
    "rl": ("record_rl_metrics", {"reward_mean": 1.0}),
}

INSTRUMENTS = {"inference": 2, "gym": 5, "rl": 11}


def fixed_set(lensfast, name):
    module = getattr(lensfast.instruments, name)
    function, values = RECORDERS[name]
    return getattr(module, function), values, getattr(module, f"_{name.upper()}_INSTRUMENTS")


@pytest.mark.parametrize("name", RECORDERS)
def test_nothing_given_is_nothing_recorded(lensfast, meter, reader, name):
    record, _, _ = fixed_set(lensfast, name)
    record(meter)
    assert exported(reader) == {}


@pytest.mark.parametrize("name", RECORDERS)
def test_instruments_are_made_once_per_meter(lensfast, name):
    record, values, cache = fixed_set(lensfast, name)
    meters = [mock.MagicMock(), mock.MagicMock()]
    for meter in [*meters, *meters]:
        record(meter, **values)
    made = [
        [call for call in meter.mock_calls if call[0].startswith("create_") and "." not in call[0]] for meter in meters
    ]
    assert made[0] == made[1]
    assert len(made[0]) == len(cache[meters[0]]) == INSTRUMENTS[name]


@pytest.mark.parametrize("name", RECORDERS)
def test_a_meter_is_not_kept(lensfast, name):
    record, values, cache = fixed_set(lensfast, name)
    provider = MeterProvider(metric_readers=[InMemoryMetricReader()], shutdown_on_exit=False)
    before = len(cache)
    record(provider.get_meter("short-lived"), **values)
    assert len(cache) == before + 1
    provider.shutdown()
    del provider
    gc.collect()
    assert len(cache) == before


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize("meter", [None, object()])
def test_what_is_no_meter_is_one_warning(lensfast, caplog, name, meter):
    record, values, _ = fixed_set(lensfast, name)
    group = getattr(getattr(lensfast.instruments, name), f"_{name.upper()}")
    group._reported.clear()
    record(meter, **values)
    record(meter, **values)
    assert len(warnings(caplog)) == 1
    assert name in warnings(caplog)[0]


@pytest.mark.parametrize("provider", [None, NoOpMeterProvider()])
@pytest.mark.parametrize("name", RECORDERS)
def test_without_the_sdk_nothing_happens(lensfast, caplog, name, provider):
    record, values, _ = fixed_set(lensfast, name)
    if provider is not None:
        metrics.set_meter_provider(provider)
    record(lensfast.get_meter(), **values)
    assert warnings(caplog) == []


def test_a_meter_of_before_the_set_up_reports_to_it(lensfast):
    meter = lensfast.get_meter()
    lensfast.instruments.rl.record_rl_metrics(meter, reward_mean=1.0)
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
    lensfast.instruments.rl.record_rl_metrics(meter, reward_mean=2.0)
    assert exported(reader) == {"rl.reward.mean": ("", "Gauge", [(2.0, {})])}


# The registry

KINDS = ["gauge", "histogram", "counter", "up_down_counter"]
OBSERVABLE_KINDS = ["observable_gauge", "observable_counter", "observable_up_down_counter"]


def one_observation(options):
    assert isinstance(options, CallbackOptions)
    return [Observation(7, {"where": "here"})]


def test_names(lensfast):
    instruments = lensfast.instruments
    assert set(instruments.__all__) == {
        *("METRIC_KINDS", "MetricSpec", "OBSERVABLE_METRIC_KINDS", "create_metric_instruments"),
        *("record_inference_metrics", "record_metrics", "register_metric_group", "registered_metric_groups"),
        "unregister_metric_group",
    }
    for name in set(instruments.__all__) - {"record_inference_metrics"}:
        assert getattr(instruments, name) is getattr(instruments.registry, name)
    assert set(instruments.METRIC_KINDS) == {*KINDS, *OBSERVABLE_KINDS}
    assert set(instruments.OBSERVABLE_METRIC_KINDS) == set(OBSERVABLE_KINDS)


def test_a_spec(lensfast):
    spec = lensfast.instruments.MetricSpec
    assert dataclasses.astuple(spec("k", "n"))[:6] == ("k", "n", "gauge", "", "", None)
    assert dataclasses.astuple(spec("k", "n", "counter", "By", "Bytes", None))[:5] == (
        "k", "n", "counter", "By", "Bytes",
    )  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec("k", "n").key = "other"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", "n"), "key must be a non-empty string"),
        (("k", ""), "name must be a non-empty string"),
        ((None, "n"), "non-empty string"),
        (("k", "n", "summary"), "unknown kind 'summary'"),
        *((("k", "n", kind), "needs a callback") for kind in OBSERVABLE_KINDS),
        *((("k", "n", kind, "", "", one_observation), "takes no callback") for kind in KINDS),
    ],
)
def test_a_wrong_spec(lensfast, arguments, text):
    with pytest.raises(ValueError, match=text):
        lensfast.instruments.MetricSpec(*arguments)


def test_other_wrong_specs(lensfast):
    with pytest.raises(TypeError, match="can't be called"):
        lensfast.instruments.MetricSpec("k", "n", "observable_gauge", callback=5)
    with pytest.raises(ValueError, match="only a histogram"):
        lensfast.instruments.MetricSpec("k", "n", bucket_boundaries=[1, 2])


def test_registering(lensfast):
    instruments = lensfast.instruments
    queue, bytes_read = (
        instruments.MetricSpec("queue", "lib.queue"),
        instruments.MetricSpec("read", "lib.read", "counter"),
    )
    instruments.register_metric_group("lib", [queue])
    with pytest.raises(ValueError, match="'lib' is already registered"):
        instruments.register_metric_group("lib", [bytes_read])
    assert instruments.registered_metric_groups() == {"lib": (queue,)}
    instruments.register_metric_group("lib", iter((bytes_read, queue)), allow_override=True)
    assert instruments.registered_metric_groups() == {"lib": (bytes_read, queue)}
    instruments.unregister_metric_group("lib")
    assert instruments.registered_metric_groups() == {}
    with pytest.raises(ValueError, match="'lib' is not registered"):
        instruments.unregister_metric_group("lib")


def test_wrong_registrations_change_nothing(lensfast):
    instruments = lensfast.instruments
    spec = instruments.MetricSpec("queue", "lib.queue")
    for group in ("", None):
        with pytest.raises(ValueError, match="non-empty string"):
            instruments.register_metric_group(group, [spec])
    with pytest.raises(ValueError, match="at least one"):
        instruments.register_metric_group("lib", [])
    with pytest.raises(ValueError, match="duplicate key: queue"):
        instruments.register_metric_group("lib", [spec, instruments.MetricSpec("queue", "other")])
    with pytest.raises(TypeError, match="takes MetricSpec objects"):
        instruments.register_metric_group("lib", [spec, "queue"])
    assert instruments.registered_metric_groups() == {}


@pytest.fixture
def library(lensfast):
    """A registered group with every kind."""
    spec = lensfast.instruments.MetricSpec
    lensfast.instruments.register_metric_group(
        "lib",
        [
            spec("queue", "lib.queue", unit="{item}", description="Items that wait"),
            spec("wait", "lib.wait", "histogram", "s", bucket_boundaries=(1, 10)),
            spec("read", "lib.read", "counter", "By"),
            spec("open", "lib.open", "up_down_counter"),
            *(spec(kind, f"lib.{kind}", kind, callback=one_observation) for kind in OBSERVABLE_KINDS),
        ],
    )
    return lensfast.instruments


OBSERVED = {
    "lib.observable_gauge": ("", "Gauge", [(7, {"where": "here"})]),
    "lib.observable_counter": ("", "Sum", [(7, {"where": "here"})]),
    "lib.observable_up_down_counter": ("", "Sum", [(7, {"where": "here"})]),
}


def test_recording(library, meter, reader):
    assert exported(reader) == {}
    library.record_metrics(meter, "lib", {"queue": 5, "wait": 2.5, "read": 10, "open": 1})
    library.record_metrics(meter, "lib", {"queue": 6, "wait": 4.0}, queue=3, read=5, open=-1)
    assert exported(reader) == {
        "lib.queue": ("{item}", "Gauge", [(3, {})]),
        "lib.wait": ("s", "Histogram", [(6.5, {})]),
        "lib.read": ("By", "Sum", [(15, {})]),
        "lib.open": ("", "Sum", [(0, {})]),
        **OBSERVED,
    }


@takes_boundaries
def test_boundaries_of_a_histogram(library, meter, reader):
    library.record_metrics(meter, "lib", wait=2.5)
    metrics_of_scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    (point,) = next(metric for metric in metrics_of_scope if metric.name == "lib.wait").data.data_points
    assert point.explicit_bounds == (1, 10)
    assert point.bucket_counts == (0, 1, 0)


def test_attributes_go_on_every_point(library, meter, reader):
    library.record_metrics(meter, "lib", {"queue": 1}, read=2, attributes={"split": "train"})
    got = exported(reader)
    assert got["lib.queue"][2] == [(1, {"split": "train"})]
    assert got["lib.read"][2] == [(2, {"split": "train"})]


def test_none_is_skipped(library, meter, reader):
    library.record_metrics(meter, "lib", {"queue": None, "read": 1}, wait=None)
    assert {"lib.read"} == set(exported(reader)) - set(OBSERVED)


def test_positional_names_are_free_as_keys(lensfast, meter, reader):
    instruments = lensfast.instruments
    keys = ("meter", "group", "values")
    instruments.register_metric_group("lib", [instruments.MetricSpec(key, f"lib.{key}") for key in keys])
    instruments.record_metrics(meter, "lib", meter=1, group=2, values=3)
    assert {name: points[0][0] for name, (_, _, points) in exported(reader).items()} == {
        "lib.meter": 1, "lib.group": 2, "lib.values": 3,
    }  # fmt: skip


def test_a_key_named_attributes_is_recorded_through_values(lensfast, meter, reader):
    instruments = lensfast.instruments
    instruments.register_metric_group("lib", [instruments.MetricSpec("attributes", "lib.attributes")])
    instruments.record_metrics(meter, "lib", {"attributes": 1}, attributes={"a": "b"})
    assert exported(reader) == {"lib.attributes": ("", "Gauge", [(1, {"a": "b"})])}


def test_observables_exist_after_create_metric_instruments(library, meter, reader):
    assert library.create_metric_instruments(meter, "lib") is None
    assert exported(reader) == OBSERVED
    library.create_metric_instruments(meter, "lib")
    assert exported(reader) == OBSERVED


def test_numbers_of_other_types_are_exported_as_python_numbers(library, meter, reader):
    class Number(float):
        pass

    library.record_metrics(meter, "lib", queue=Number(2.5), open=True)
    got = exported(reader)
    assert [type(got[name][2][0][0]) for name in ("lib.queue", "lib.open")] == [float, int]
    if importlib.util.find_spec("numpy"):
        numpy = importlib.import_module("numpy")
        library.record_metrics(meter, "lib", queue=numpy.float32(0.5), read=numpy.int64(3))
        got = exported(reader)
        assert got["lib.queue"][2] == [(0.5, {})]
        assert got["lib.read"][2] == [(3, {})]
        assert [type(got[name][2][0][0]) for name in ("lib.queue", "lib.read")] == [float, int]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"nobody": 1}, "'nobody' of group 'lib': is not one of its keys"),
        ({"queue": "three"}, "'queue' of group 'lib': could not be recorded"),
        ({"queue": [1]}, "'queue' of group 'lib'"),
        ({"observable_gauge": 1}, "'observable_gauge' of group 'lib': is an observable_gauge"),
    ],
)
def test_bad_values_are_one_warning_and_spare_the_others(library, meter, reader, caplog, values, text):
    for _ in range(2):
        library.record_metrics(meter, "lib", {**values, "read": 1})
    (message,) = warnings(caplog)
    assert text in message
    assert exported(reader)["lib.read"][2] == [(2, {})]
    assert "lib.queue" not in exported(reader)


@pytest.mark.parametrize("attributes", [5, "split", ["split"]])
def test_bad_attributes_are_one_warning(library, meter, reader, caplog, attributes):
    for _ in range(2):
        library.record_metrics(meter, "lib", queue=1, attributes=attributes)
    (message,) = warnings(caplog)
    assert "'queue' of group 'lib'" in message
    assert "lib.queue" not in exported(reader)


@pytest.mark.parametrize("values", [5, "queue", [1, 2]])
def test_values_that_are_no_mapping_are_one_warning(library, meter, caplog, values):
    for _ in range(2):
        library.record_metrics(meter, "lib", values)
    assert len(warnings(caplog)) == 1


def test_an_unregistered_group_is_one_warning(lensfast, meter, caplog):
    instruments = lensfast.instruments
    for _ in range(2):
        instruments.record_metrics(meter, "lib", queue=1)
        instruments.create_metric_instruments(meter, "lib")
    (message,) = warnings(caplog)
    assert "'lib'" in message
    assert "nobody has registered it" in message
    instruments.record_metrics(meter, ["unhashable"], queue=1)
    assert len(warnings(caplog)) == 2


def test_an_instrument_that_can_not_be_made(library, caplog):
    meter = mock.MagicMock()
    meter.create_gauge.side_effect = RuntimeError("no gauges today")
    for _ in range(2):
        library.record_metrics(meter, "lib", queue=1, read=2)
    (message,) = warnings(caplog)
    assert "'queue'" in message
    assert "lib.queue" in message
    assert meter.create_counter.return_value.add.mock_calls == [mock.call(2), mock.call(2)]


def test_an_override_forgets_warnings_and_replaces_callbacks(library, meter, reader, caplog):
    library.record_metrics(meter, "lib", nobody=1)
    assert exported(reader) == OBSERVED
    seen = []

    def other(options):
        seen.append(options)
        return [Observation(8)]

    spec = library.MetricSpec
    library.register_metric_group(
        "lib",
        [
            spec("queue", "lib.queue", unit="{item}", description="Items that wait"),
            spec("observable_gauge", "lib.observable_gauge", "observable_gauge", callback=other),
        ],
        allow_override=True,
    )
    library.record_metrics(meter, "lib", queue=2, nobody=1)
    assert len(warnings(caplog)) == 2
    assert exported(reader) == {
        "lib.queue": ("{item}", "Gauge", [(2, {})]),
        "lib.observable_gauge": ("", "Gauge", [(8, {})]),
    }
    assert len(seen) == 1


def test_an_unregistered_group_observes_nothing(library, meter, reader):
    library.create_metric_instruments(meter, "lib")
    library.unregister_metric_group("lib")
    assert exported(reader) == {}


def test_a_callback_may_record(lensfast, meter, reader):
    """The SDK calls it under a lock; ours must not be waited for under it."""
    instruments = lensfast.instruments
    spec = instruments.MetricSpec
    instruments.register_metric_group("inner", [spec("calls", "inner.calls", "counter")])

    def observe(options):
        instruments.record_metrics(meter, "inner", calls=1)
        return [Observation(1)]

    instruments.register_metric_group("outer", [spec("k", "outer.k", "observable_gauge", callback=observe)])
    instruments.create_metric_instruments(meter, "outer")
    assert set(exported(reader)) == {"outer.k", "inner.calls"}


def test_observables_are_made_outside_the_lock(lensfast):
    instruments = lensfast.instruments
    instruments.register_metric_group(
        "lib", [instruments.MetricSpec("k", "lib.k", "observable_gauge", callback=one_observation)]
    )
    meter = mock.MagicMock()
    had_to_wait = []

    def create(**options):
        other = threading.Thread(target=instruments.registered_metric_groups)
        other.start()
        other.join(10)
        had_to_wait.append(other.is_alive())
        return mock.Mock()

    meter.create_observable_gauge.side_effect = create
    instruments.create_metric_instruments(meter, "lib")
    assert had_to_wait == [False]


def test_threads_share_the_instruments(library, meter, reader):
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(100):
            library.record_metrics(meter, "lib", read=1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert exported(reader)["lib.read"][2] == [(800, {})]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_fork_while_the_lock_is_held(lensfast):
    registry = lensfast.instruments.registry
    held, release = threading.Event(), threading.Event()

    def hold():
        with registry._LOCK:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        registry.register_metric_group("child", [registry.MetricSpec("k", "n")])
        os._exit(0)
    release.set()
    holder.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_importing_needs_the_api_only(lensfast):
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None;"
        "from lensfast.instruments import gym, inference, registry, rl; print('imported')"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LENSFAST_PURE_PYTHON": str(int(lensfast.backend == "python")),
    }
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout == "imported\n", result.stderr


# Side by side with the original


@pytest.mark.skipif(not importlib.util.find_spec("nemo"), reason="nemo-lens is not installed here (needs Python 3.13)")
@pytest.mark.parametrize(
    ("module", "arguments", "keywords"),
    [
        ("rl", range(1, 9), {}),
        ("rl", (), {"entropy": 0.5, "rollout_duration_ms": 12}),
        ("gym", (1, 2, 3, 0.5, 4), {}),
        ("inference", (1.5, "model", 3, 4, "provider", "operation"), {}),
        ("inference", (), {"output_tokens": 0, "model": None}),
    ],
)
def test_the_original_exports_the_same(lensfast, module, arguments, keywords):
    function = RECORDERS[module][0]
    results = []
    for package in ("lensfast", "nemo.lens"):
        reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        imported = importlib.import_module(f"{package}.instruments.{module}")
        getattr(imported, function)(provider.get_meter("test"), *arguments, **keywords)
        results.append(exported(reader))
        provider.shutdown()
    assert results[0] == results[1]
    assert results[0]
