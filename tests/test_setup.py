"""Configuration, set-up, shutdown, and what each kind of trouble says, on both backends."""

from __future__ import annotations

import contextvars
import dataclasses
import json
import logging
import os
import random
import re
import socket
import threading
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import metrics, propagate, trace
from opentelemetry.metrics import _internal as metrics_internal
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.version import __version__ as sdk_version
from otlp_receiver import PROTOCOLS, Receiver, free_port, run_script

from conftest import BACKENDS, load_backend

SDK = tuple(int(part) for part in sdk_version.split(".")[:2])


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("K8S_", "KUBERNETES_", "WANDB_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "DEPLOYMENT_ENV", "ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)


def span_names(exporter: InMemorySpanExporter) -> list[str]:
    return [span.name for span in exporter.get_finished_spans()]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def flush() -> None:
    trace.get_tracer_provider().force_flush()
    metrics.get_meter_provider().force_flush()


def set_up(lensfast: ModuleType, span_exporter: Any = None, metric_reader: Any = None, /, **options: Any) -> Any:
    """setup_telemetry on an enabled job's only rank, with exporters in memory."""
    names = {field.name for field in dataclasses.fields(lensfast.NemoLensConfig)}
    config = lensfast.NemoLensConfig(**{"enabled": True, **{k: v for k, v in options.items() if k in names}})
    return lensfast.setup_telemetry(
        config,
        span_exporter=span_exporter or InMemorySpanExporter(),
        metric_reader=metric_reader or InMemoryMetricReader(),
        **{key: value for key, value in options.items() if key not in names},
    )


def assert_that_set_up_works(lensfast: ModuleType) -> None:
    exporter = InMemorySpanExporter()
    handle = set_up(lensfast, exporter)
    with lensfast.managed_span("job", "work"):
        pass
    handle.shutdown()
    assert span_names(exporter) == ["work"]


def leave_open(manager: Any) -> None:
    """Enter `manager` for good, in a context that the next test does not see."""
    contextvars.copy_context().run(manager.__enter__)


# Configuration

DEFAULTS = {
    "enabled": False,
    "service_name": "nemo",
    "export_strategy": "single_rank",
    "export_rank": -1,
    "export_sample_rate": 1.0,
    "sampler_enabled": False,
    "traces_enabled": True,
    "metrics_enabled": True,
    "logs_enabled": False,
    "span_groups": "default",
    "exporter": "otlp",
    "run_id": "",
    "user": "",
    "wandb_entity": "",
    "wandb_project": "",
    "_span_group_cls": None,
    "native_spans": True,
}


def test_config_fields_in_their_order(lensfast: ModuleType) -> None:
    config = lensfast.NemoLensConfig()
    assert list(dataclasses.asdict(config).items()) == list(DEFAULTS.items())
    assert dataclasses.asdict(lensfast.NemoLensConfig.from_env()) == DEFAULTS
    assert config == lensfast.NemoLensConfig.from_env()
    assert "_span_group_cls" not in repr(config)
    config.service_name = "changed later"
    assert config.service_name == "changed later"


@pytest.mark.parametrize(
    ("suffix", "text", "field", "value"),
    [
        ("ENABLED", "1", "enabled", True),
        ("ENABLED", " TRUE ", "enabled", True),
        ("ENABLED", "Yes", "enabled", True),
        ("ENABLED", "on", "enabled", True),
        ("TRACES_ENABLED", "0", "traces_enabled", False),
        ("TRACES_ENABLED", "False", "traces_enabled", False),
        ("METRICS_ENABLED", "NO", "metrics_enabled", False),
        ("METRICS_ENABLED", "off", "metrics_enabled", False),
        ("LOGS_ENABLED", "1", "logs_enabled", True),
        ("NATIVE_SPANS", "0", "native_spans", False),
        ("SAMPLER_ENABLED", "1", "sampler_enabled", True),
        ("EXPORT_STRATEGY", " all_ranks ", "export_strategy", "all_ranks"),
        ("EXPORT_RANK", "7", "export_rank", 7),
        ("EXPORT_RANK", "+5", "export_rank", 5),
        ("EXPORT_RANK", "1_0", "export_rank", 10),
        ("EXPORT_RANK", "-3", "export_rank", -3),
        ("EXPORT_SAMPLE_RATE", "0.25", "export_sample_rate", 0.25),
        ("EXPORT_SAMPLE_RATE", "0", "export_sample_rate", 0.0),
        ("EXPORT_SAMPLE_RATE", "1e-1", "export_sample_rate", 0.1),
        ("SPAN_GROUPS", "Default, Layer", "span_groups", "Default, Layer"),
        ("EXPORTER", "CONSOLE", "exporter", "CONSOLE"),
        ("RUN_ID", " r-1 ", "run_id", "r-1"),
        ("USER_ID", "ada", "user", "ada"),
    ],
)
def test_config_from_each_variable(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, suffix: str, text: str, field: str, value: object
) -> None:
    expected = {**DEFAULTS, field: value}
    monkeypatch.setenv(f"NEMO_LENS_{suffix}", text)
    assert dataclasses.asdict(lensfast.NemoLensConfig.from_env()) == expected
    # The prefix is the only one that is read; there is no fallback by itself.
    assert dataclasses.asdict(lensfast.NemoLensConfig.from_env("MEGATRON_OTEL")) == DEFAULTS
    assert dataclasses.asdict(lensfast.NemoLensConfig.from_env("MEGATRON_OTEL", "NEMO_LENS")) == expected


def test_config_from_variables_without_a_prefix(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", " trainer ")
    monkeypatch.setenv("WANDB_ENTITY", " team ")
    monkeypatch.setenv("WANDB_PROJECT", "speech")
    monkeypatch.setenv("NEMO_LENS_SERVICE_NAME", "not read")
    expected = {**DEFAULTS, "service_name": "trainer", "wandb_entity": " team ", "wandb_project": "speech"}
    assert dataclasses.asdict(lensfast.NemoLensConfig.from_env()) == expected
    monkeypatch.setenv("OTEL_SERVICE_NAME", "  ")
    assert lensfast.NemoLensConfig.from_env().service_name == "nemo"


@pytest.mark.parametrize(
    ("primary", "fallback", "value"),
    [
        ("first", "second", "first"),
        (None, "second", "second"),
        ("", "second", "second"),
        (" \t", "second", "second"),
        (" ", " ", "otlp"),
        (None, None, "otlp"),
    ],
)
def test_config_prefix_and_fallback(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, primary: str | None, fallback: str | None, value: str
) -> None:
    for prefix, text in (("MEGATRON_OTEL", primary), ("NEMO_LENS", fallback)):
        if text is not None:
            monkeypatch.setenv(f"{prefix}_EXPORTER", text)
    config = lensfast.NemoLensConfig.from_env(prefix="MEGATRON_OTEL", fallback_prefix="NEMO_LENS")
    assert config.exporter == value


@pytest.mark.parametrize(
    ("suffix", "text", "allowed"),
    [
        ("ENABLED", "maybe", ["1", "true", "yes", "on", "0", "false", "no", "off"]),
        ("ENABLED", "2", ["1", "0"]),
        ("TRACES_ENABLED", "y", ["yes"]),
        ("METRICS_ENABLED", "none", ["no"]),
        ("LOGS_ENABLED", "-1", ["off"]),
        ("SAMPLER_ENABLED", "enable", ["on"]),
        ("EXPORT_RANK", "1.0", ["integer"]),
        ("EXPORT_RANK", "last", ["integer", "last rank"]),
        ("EXPORT_SAMPLE_RATE", "half", ["0.0", "1.0"]),
        # The original's text for this one has the field's name, which its users' tests match.
        ("EXPORT_SAMPLE_RATE", "1.5", ["0.0", "1.0", "export_sample_rate"]),
        ("EXPORT_SAMPLE_RATE", "-0.1", ["0.0", "1.0"]),
        ("EXPORT_SAMPLE_RATE", "nan", ["0.0", "1.0"]),
    ],
)
def test_config_bad_values(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, suffix: str, text: str, allowed: list[str]
) -> None:
    monkeypatch.setenv(f"NEMO_LENS_{suffix}", text)
    with pytest.raises(ValueError, match=rf"^NEMO_LENS_{suffix} must be .*not {re.escape(repr(text))}") as error:
        lensfast.NemoLensConfig.from_env()
    assert all(word in str(error.value) for word in allowed)
    # Read from the fallback, both names are told: the one that was asked for, and the one that is set.
    with pytest.raises(ValueError, match=rf"MEGATRON_OTEL_{suffix}.*NEMO_LENS_{suffix}"):
        lensfast.NemoLensConfig.from_env("MEGATRON_OTEL", fallback_prefix="NEMO_LENS")


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf")])
def test_config_sample_rate_is_checked_at_construction(lensfast: ModuleType, rate: float) -> None:
    with pytest.raises(ValueError, match="export_sample_rate"):
        lensfast.NemoLensConfig(export_sample_rate=rate)
    config = lensfast.NemoLensConfig(export_sample_rate=0.0)
    config.export_sample_rate = rate  # not later
    assert lensfast.NemoLensConfig(export_strategy="?", exporter="?", span_groups="?").exporter == "?"


def test_config_resolves_its_span_groups(lensfast: ModuleType) -> None:
    class Groups(lensfast.SpanGroup):  # type: ignore[name-defined, misc]
        LAYER = "layer"
        ALL_GROUPS = lensfast.SpanGroup.ALL_GROUPS | {LAYER}
        _PRESETS = {"default": frozenset({"job", "layer"})}  # noqa: RUF012

    assert lensfast.NemoLensConfig().resolved_span_groups == {"job", "checkpoint", "evaluate"}
    config = lensfast.NemoLensConfig.from_env(span_group_cls=Groups)
    assert config.resolved_span_groups == {"job", "layer"}
    config.span_groups = "wrong"
    with pytest.raises(ValueError, match="Unknown span group"):
        _ = config.resolved_span_groups


# Run ids


def test_run_id_of_the_config_is_kept(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    config = lensfast.NemoLensConfig(run_id="mine")
    lensfast.setup_telemetry(config)
    assert config.run_id == "mine" == lensfast.ensure_run_id(config)


def test_run_id_from_slurm(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    config = lensfast.NemoLensConfig()
    lensfast.setup_telemetry(config)  # also when disabled
    assert config.run_id == "4711"
    assert lensfast.ensure_run_id(lensfast.NemoLensConfig(), {"SLURM_JOB_ID": "12"}) == "12"


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": ""}])
def test_run_id_is_random_elsewhere(lensfast: ModuleType, environ: dict[str, str]) -> None:
    random.seed(0)
    configs = [lensfast.NemoLensConfig(), lensfast.NemoLensConfig()]
    ids = {lensfast.ensure_run_id(config, environ) for config in configs}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{12}", run_id) for run_id in ids)
    assert ids == {config.run_id for config in configs}


# Guard, and ranks that do not export


def test_set_up_twice_is_refused(lensfast: ModuleType) -> None:
    assert lensfast.handle._INITIALIZED is False
    set_up(lensfast)
    assert lensfast.handle._INITIALIZED is True
    with pytest.raises(RuntimeError, match="already been initialised"):
        set_up(lensfast)
    lensfast.setup_telemetry(lensfast.NemoLensConfig())  # disabled: passes
    set_up(lensfast, _allow_reinit=True)
    lensfast.handle._INITIALIZED = False  # as consumers' tests do
    set_up(lensfast)


def test_a_rank_that_does_not_export_counts_as_set_up(lensfast: ModuleType) -> None:
    assert lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True), 0, 2).is_exporting is False
    assert lensfast.handle._INITIALIZED is True
    with pytest.raises(RuntimeError, match="already been initialised"):
        lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True), 1, 2)


@pytest.mark.parametrize(
    ("enabled", "rank", "environ"),
    [(False, 0, {}), (True, 1, {}), (True, 0, {"OTEL_SDK_DISABLED": "True"})],
    ids=["disabled", "other rank", "sdk disabled"],
)
def test_nothing_is_installed_where_nothing_is_exported(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, enabled: bool, rank: int, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    started: list[str] = []
    monkeypatch.setattr(trace.ProxyTracer, "start_span", lambda self, name, *a, **k: started.append(name))
    lensfast.set_enabled_span_groups({"step"})
    propagator = propagate.get_global_textmap()
    exporter = InMemorySpanExporter()
    handle = lensfast.setup_telemetry(
        lensfast.NemoLensConfig(enabled=enabled, export_rank=0, span_groups="all"),
        rank=rank,
        world_size=2,
        span_exporter=exporter,
        metric_reader=InMemoryMetricReader(),
    )
    assert handle.is_exporting is False
    assert trace._TRACER_PROVIDER is None
    assert metrics_internal._METER_PROVIDER is None
    assert propagate.get_global_textmap() is propagator
    assert lensfast.enabled_span_groups() == frozenset()

    @lensfast.trace_fn("step", "traced")
    def traced() -> None: ...

    with lensfast.managed_span("step", "a", x=1) as span:
        traced()
    with lensfast.managed_span("step", "b") as other:
        pass
    assert span is other is None
    assert lensfast.managed_span("step", "a") is lensfast.managed_span("job", "b")  # one object for all
    assert started == []
    handle.tracer.start_as_current_span("by hand")
    handle.meter.create_counter("c").add(1)
    handle.shutdown()
    handle.shutdown()
    assert exporter.get_finished_spans() == ()


def test_disabled_first_does_not_stand_in_the_way_of_a_later_set_up(lensfast: ModuleType) -> None:
    lensfast.setup_telemetry(lensfast.NemoLensConfig())
    assert lensfast.handle._INITIALIZED is False
    assert_that_set_up_works(lensfast)


def test_a_disabled_handle_leaves_another_provider_alone(lensfast: ModuleType, exporter: InMemorySpanExporter) -> None:
    lensfast.setup_telemetry(lensfast.NemoLensConfig()).shutdown()
    with lensfast.span_cm("still recorded"):
        pass
    assert span_names(exporter) == ["still recorded"]


# Strategies


def exporting_ranks(lensfast: ModuleType, world_size: int, **options: Any) -> list[int]:
    config = lensfast.NemoLensConfig(**options)
    return [rank for rank in range(world_size) if lensfast.handle._should_export(config, rank, world_size)]


@pytest.mark.parametrize(
    ("world_size", "options", "ranks"),
    [
        (4, {}, [3]),
        (1, {}, [0]),
        (4, {"export_rank": 0}, [0]),
        (4, {"export_rank": 2}, [2]),
        (4, {"export_rank": -7}, [3]),
        (4, {"export_rank": 9}, []),
        (3, {"export_strategy": "all_ranks"}, [0, 1, 2]),
        (16, {"export_strategy": "sampled", "export_sample_rate": 0.5}, [3, 4, 5, 6, 8, 10, 11, 13]),
        (64, {"export_strategy": "sampled", "export_sample_rate": 0.1}, [3, 5, 6, 31, 55]),
        (8, {"export_strategy": "sampled", "export_sample_rate": 0.0}, []),
        (8, {"export_strategy": "sampled", "export_sample_rate": 1.0}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_strategies(lensfast: ModuleType, world_size: int, options: dict[str, Any], ranks: list[int]) -> None:
    assert exporting_ranks(lensfast, world_size, **options) == ranks


@pytest.mark.parametrize(
    ("local_rank", "exports"), [(None, True), ("0", True), ("", True), (" 0 ", True), ("3", False)]
)
def test_first_rank_per_node(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, local_rank: str | None, exports: bool
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert bool(exporting_ranks(lensfast, 1, export_strategy="first_rank_per_node")) is exports


def test_first_rank_per_node_with_a_bad_local_rank(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "zero")
    with pytest.raises(ValueError, match="LOCAL_RANK must be an integer, not 'zero'"):
        exporting_ranks(lensfast, 1, export_strategy="first_rank_per_node")


@pytest.fixture
def strategies(lensfast: ModuleType) -> Iterator[ModuleType]:
    module = lensfast.strategies
    with module._REGISTRY_LOCK:
        before = dict(module._REGISTRY)
    yield module
    with module._REGISTRY_LOCK:
        module._REGISTRY.clear()
        module._REGISTRY.update(before)


def test_strategy_registry(strategies: ModuleType) -> None:
    names = {"all_ranks", "single_rank", "sampled", "first_rank_per_node"}
    assert names == strategies.BUILTIN_STRATEGIES
    assert strategies.registered_strategies() == sorted(names)

    def even(config: object, rank: int, world_size: int) -> bool:
        return rank % 2 == 0

    strategies.register_export_strategy("even", even)
    assert strategies.get_export_strategy("even") is even
    assert strategies.registered_strategies() == sorted({*names, "even"})
    with pytest.raises(ValueError, match="'even' is already registered"):
        strategies.register_export_strategy("even", even)
    strategies.register_export_strategy("even", even, allow_override=True)
    strategies.unregister_export_strategy("even")
    with pytest.raises(ValueError, match="'even' is not registered"):
        strategies.unregister_export_strategy("even")
    with pytest.raises(ValueError, match=r"Unknown export_strategy 'even'.*all_ranks, first_rank_per_node"):
        strategies.get_export_strategy("even")
    with pytest.raises(ValueError, match="non-empty string"):
        strategies.register_export_strategy("", even)
    with pytest.raises(TypeError, match="can't be"):
        strategies.register_export_strategy("text", "even")
    strategies.register_export_strategy("all_ranks", even, allow_override=True)
    assert strategies.get_export_strategy("all_ranks") is even
    with pytest.raises(ValueError, match="built-in"):
        strategies.unregister_export_strategy("all_ranks")


def test_a_registered_strategy_decides(lensfast: ModuleType, strategies: ModuleType) -> None:
    lensfast.register_export_strategy("even", lambda config, rank, world_size: rank % 2 == 0)
    assert exporting_ranks(lensfast, 5, export_strategy="even") == [0, 2, 4]
    assert set_up(lensfast, rank=3, world_size=5, export_strategy="even").is_exporting is False


def test_a_strategy_may_be_given_to_setup(lensfast: ModuleType) -> None:
    calls: list[tuple[object, ...]] = []

    def strategy(*arguments: object) -> object:
        calls.append(arguments)
        return "yes"  # any true value

    config = lensfast.NemoLensConfig(enabled=True, export_strategy="not looked at")
    reader = InMemoryMetricReader()
    handle = lensfast.setup_telemetry(
        config, 2, 9, None, InMemorySpanExporter(), reader, strategy
    )  # all by position, as the original allows
    assert handle.is_exporting is True
    assert calls == [(config, 2, 9)]


# Validation comes before side effects


def unknown_group(lensfast: ModuleType) -> dict[str, Any]:
    return {"span_groups": "job,typo", "_span_group_cls": lensfast.SpanGroup}


TLS = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://127.0.0.1:4317"}
HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
WRONG = [
    ({}, {"export_strategy": "best"}, r"Unknown export_strategy 'best'.*single_rank"),
    ({}, unknown_group, r"Unknown span group or preset 'typo'.*checkpoint"),
    ({}, {"exporter": "CONSOLE"}, r"Unknown exporter type 'CONSOLE'; allowed: console, otlp .*_EXPORTER"),
    ({}, {"exporter": "jaeger", "traces_enabled": False}, r"Unknown exporter type 'jaeger'"),
    ({}, {"exporter": "jaeger", "metrics_enabled": False}, r"Unknown exporter type 'jaeger'"),
    ({}, {"exporter": "jaeger", "logs_enabled": True}, r"Unknown exporter type 'jaeger'"),
    *(
        ({"OTEL_METRIC_EXPORT_INTERVAL": text}, {}, rf"^OTEL_METRIC_EXPORT_INTERVAL must be .*, not '{text}'")
        for text in ("abc", "", "1.5", "0", "-5")
    ),
    *(
        ({f"{prefix}_{name}": text}, {"logs_enabled": True}, rf"^{prefix}_{name} must be .*, not {text}")
        for prefix in ("OTEL_BSP", "OTEL_BLRP")
        for name in ("SCHEDULE_DELAY", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE")
        for text in ("0", "-5")
    ),
    (
        {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "101"},
        {},
        r"_BATCH_SIZE \(101, .* larger than OTEL_BSP_MAX_QUEUE_SIZE \(100, ",
    ),
    ({"OTEL_BSP_MAX_QUEUE_SIZE": "100"}, {"exporter": "console"}, r"_BATCH_SIZE \(512, "),
    *(
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": text, **extra}, {}, rf"^OTEL_EXPORTER_OTLP_TIMEOUT must be .*, not '{text}'")
        for text in ("abc", "1s")
        for extra in ({}, HTTP)
    ),
    ({"OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "x"}, {}, r"^OTEL_EXPORTER_OTLP_METRICS_TIMEOUT must be "),
    ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zip"}, {}, r"^OTEL_EXPORTER_OTLP_COMPRESSION must be one of none, gzip, not"),
    ({"OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"}, {}, r"_COMPRESSION must be one of none, gzip, not 'deflate'"),
    ({"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "zip"}, {}, r"^OTEL_EXPORTER_OTLP_TRACES_COMPRESSION must be "),
    ({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/ca.pem", **TLS}, {}, r"^OTEL_EXPORTER_OTLP_CERTIFICATE .*'/no/ca.pem'"),
    ({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/ca.pem", **TLS, **HTTP}, {}, r"^OTEL_EXPORTER_OTLP_CERTIFICATE must be"),
    ({"OTEL_EXPORTER_OTLP_CLIENT_KEY": "/no/key", **TLS}, {}, r"^OTEL_EXPORTER_OTLP_CLIENT_KEY must be "),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "options", "message"), WRONG)
def test_an_error_leaves_the_process_as_it_was(
    lensfast: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
    options: Any,
    message: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    lensfast.set_enabled_span_groups({"before"})
    propagator = propagate.get_global_textmap()
    options = options(lensfast) if callable(options) else options
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match=message):
        lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True, **options))
    assert trace._TRACER_PROVIDER is None
    assert metrics_internal._METER_PROVIDER is None
    assert propagate.get_global_textmap() is propagator
    assert lensfast.enabled_span_groups() == {"before"}
    assert lensfast.handle._INITIALIZED is False
    assert set(threading.enumerate()) <= threads
    assert messages(caplog) == []
    # So it can be done again, right.
    for name in environ:
        monkeypatch.delenv(name)
    assert_that_set_up_works(lensfast)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_BSP_SCHEDULE_DELAY": ""}, ""),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "abc"}, ""),
        ({"OTEL_BSP_EXPORT_TIMEOUT": "0"}, ""),
        ({"OTEL_BLRP_MAX_QUEUE_SIZE": "100"}, ""),  # smaller than a batch, but there are no logs
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "0"}, "OTEL_EXPORTER_OTLP_TIMEOUT='0': nothing can be delivered in that time"),
        pytest.param(
            {"OTEL_EXPORTER_OTLP_COMPRESSION": "zip", **HTTP},
            "OTEL_EXPORTER_OTLP_COMPRESSION must be one of none, gzip, deflate, not 'zip'; nothing is compressed",
            marks=pytest.mark.skipif(SDK < (1, 45), reason="before 1.45, the exporter refuses an unknown compression"),
        ),
    ],
)
def test_what_the_sdk_puts_up_with_is_no_error(
    lensfast: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
    message: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True, metrics_enabled=False))
    assert handle.is_exporting is True
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("lensfast")]
    assert ours == ([message] if message else [])


def test_a_variable_of_what_is_not_used_is_not_looked_at(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke signals")
    assert set_up(lensfast, exporter="otlp").is_exporting is True
    assert set_up(lensfast, exporter="jaeger", _allow_reinit=True).is_exporting is True
    assert not any("abc" in message or "smoke" in message for message in messages(caplog))


def test_a_missing_certificate_does_not_matter_without_tls(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/ca.pem")
    handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True))
    assert handle.is_exporting is True


def test_an_unknown_group_without_a_class_is_a_warning(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    lensfast.SpanRegistry.register("demo", {"step"})
    set_up(lensfast, span_groups="step,typo")
    [message] = messages(caplog)
    assert "no library registered in this process provides" in message
    assert "typo" in message
    assert lensfast.enabled_span_groups() == {"step"}
    assert lensfast.pending_span_groups() == {"typo"}


# What is installed


def test_groups_and_handle_of_an_exporting_rank(lensfast: ModuleType) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    handle = set_up(lensfast, exporter, reader, span_groups="per_step")
    assert handle.is_exporting is True
    assert lensfast.enabled_span_groups() == lensfast.SpanGroup.ALL_GROUPS
    with handle.tracer.start_as_current_span("by hand"):
        pass
    handle.meter.create_counter("steps").add(3)
    [resource_metrics] = reader.get_metrics_data().resource_metrics
    [scope_metrics] = resource_metrics.scope_metrics
    assert scope_metrics.scope.name == "nemo.lens"
    assert [metric.name for metric in scope_metrics.metrics] == ["steps"]
    assert resource_metrics.resource.attributes["dl.rank"] == 0
    handle.shutdown()
    [span] = exporter.get_finished_spans()
    assert (span.name, span.instrumentation_scope.name) == ("by hand", "nemo.lens")
    # Groups stay enabled, and a site stays harmless.
    assert lensfast.is_span_group_enabled("step")
    with lensfast.managed_span("step", "late"):
        pass


@pytest.mark.parametrize(("traces", "metrics_too"), [(True, False), (False, True), (False, False)])
def test_signals_can_be_left_out(lensfast: ModuleType, traces: bool, metrics_too: bool) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    handle = set_up(lensfast, exporter, reader, traces_enabled=traces, metrics_enabled=metrics_too)
    assert (trace._TRACER_PROVIDER is not None) is traces
    assert (metrics_internal._METER_PROVIDER is not None) is metrics_too
    assert handle.is_exporting is (traces or metrics_too)
    assert lensfast.is_span_group_enabled("job")
    with lensfast.managed_span("job", "work") as span:
        assert span.is_recording() is traces


def test_the_propagator_is_w3c_whatever_the_environment_says(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propagate, "propagators", [], raising=False)
    set_up(lensfast)
    carrier: dict[str, str] = {}
    with lensfast.managed_span("job", "work") as span:
        propagate.inject(carrier)
    assert carrier["traceparent"].startswith(f"00-{span.get_span_context().trace_id:032x}-")
    assert propagate.get_global_textmap().fields == {"traceparent", "tracestate", "baggage"}


def test_metrics_are_read_every_ten_seconds_by_default(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lensfast.providers._metric_interval_ms() == 10_000
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "2500")
    assert lensfast.providers._metric_interval_ms() == 2500


def test_an_sdk_provider_that_is_there_already_is_shared(
    lensfast: ModuleType, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    ours = InMemorySpanExporter()
    theirs = trace._TRACER_PROVIDER
    handle = set_up(lensfast, ours)
    assert trace._TRACER_PROVIDER is theirs
    [message] = messages(caplog)
    assert "a TracerProvider is already installed" in message
    assert handle.is_exporting is True
    with lensfast.managed_span("job", "work"):
        pass
    leave_open(lensfast.managed_span("job", "open"))
    handle.shutdown()
    assert span_names(exporter) == ["work"]  # their processor was there first, and is shut down first
    assert span_names(ours) == ["work", "open"]


def test_a_no_op_provider_in_the_way_is_told(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    lensfast.providers.build_noop_providers()
    assert isinstance(trace._TRACER_PROVIDER, trace.NoOpTracerProvider)
    assert isinstance(metrics_internal._METER_PROVIDER, metrics.NoOpMeterProvider)
    exporter = InMemorySpanExporter()
    handle = set_up(lensfast, exporter)
    assert handle.is_exporting is False
    about_metrics, about_spans = sorted(messages(caplog))
    assert about_metrics.startswith("lensfast exports no metrics: NoOpMeterProvider is already installed")
    assert about_spans.startswith("no span can be exported: NoOpTracerProvider is already installed")
    with lensfast.managed_span("job", "work"):
        pass
    handle.shutdown()
    assert exporter.get_finished_spans() == ()


def test_a_meter_provider_that_is_there_already_stays(lensfast: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    theirs = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([theirs], shutdown_on_exit=False))
    handle = set_up(lensfast)
    [message] = messages(caplog)
    assert message.startswith("lensfast exports no metrics: MeterProvider is already installed")
    assert handle.is_exporting is True  # spans
    handle.meter.create_counter("steps").add(1)
    assert theirs.get_metrics_data().resource_metrics[0].scope_metrics[0].scope.name == "nemo.lens"


def test_scoped_attributes_reach_spans_of_any_tracer(lensfast: ModuleType) -> None:
    exporter = InMemorySpanExporter()
    handle = set_up(lensfast, exporter, span_groups="all")
    with lensfast.span_attributes({"iteration": 1, "phase": "warm", "token": "t", "odd": {}}):
        with (
            lensfast.span_attributes({"iteration": 2}),
            lensfast.managed_span("step", "inner", phase="own"),
            trace.get_tracer("app").start_as_current_span("app's own", attributes={"iteration": 7}),
        ):
            pass
        with lensfast.span_cm("outer"):
            pass
    with lensfast.managed_span("step", "outside"):
        pass
    handle.shutdown()
    assert {span.name: dict(span.attributes or {}) for span in exporter.get_finished_spans()} == {
        "inner": {"iteration": 2, "phase": "own", "token": "[REDACTED]"},
        "app's own": {"iteration": 7, "phase": "warm", "token": "[REDACTED]"},
        "outer": {"iteration": 1, "phase": "warm", "token": "[REDACTED]"},
        "outside": {},
    }


# Ids


def test_ids_do_not_follow_random_seed(lensfast: ModuleType) -> None:
    ids = set()
    for _ in range(2):
        random.seed(1234)
        generator = lensfast.providers.SeedIndependentIdGenerator()
        ids |= {generator.generate_trace_id(), generator.generate_span_id()}
    assert len(ids) == 4
    exporter = InMemorySpanExporter()
    handle = set_up(lensfast, exporter)
    for _ in range(2):
        random.seed(1234)
        with lensfast.span_cm("work"):
            pass
    handle.shutdown()
    first, second = exporter.get_finished_spans()
    assert first.context.trace_id != second.context.trace_id
    assert first.context.span_id != second.context.span_id
    # Nor do they move the program's own random numbers.
    random.seed(1234)
    expected = random.random()
    random.seed(1234)
    generator.generate_trace_id()
    assert random.random() == expected


def test_ids_fill_their_bits_and_are_never_zero(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = lensfast.providers.SeedIndependentIdGenerator()
    assert generator.is_trace_id_random() is True
    traces = [generator.generate_trace_id() for _ in range(200)]
    spans = [generator.generate_span_id() for _ in range(200)]
    # Each bit is one in some id and zero in another; by chance that fails once in 2**191 runs.
    for ids, bits in ((traces, 128), (spans, 64)):
        ones, zeros = 0, 0
        for number in ids:
            ones |= number
            zeros |= ~number
        assert ones == 2**bits - 1
        assert zeros & (2**bits - 1) == 2**bits - 1

    class Source(random.Random):
        def __init__(self) -> None:
            super().__init__()
            self.draws = [0, 0, 7]

        def getrandbits(self, k: int) -> int:
            return self.draws.pop(0)

    for generate in (generator.generate_trace_id, generator.generate_span_id):
        monkeypatch.setattr(generator, "_random", Source())
        assert generate() == 7


# Shutdown


def test_shutdown_ends_and_marks_open_spans_inner_first(lensfast: ModuleType) -> None:
    exporter = InMemorySpanExporter()
    handle = set_up(lensfast, exporter, span_groups="all")
    leave_open(lensfast.managed_span("job", "outer"))
    with lensfast.managed_span("step", "closed"):
        pass
    leave_open(lensfast.managed_span("step", "inner"))
    trace.get_tracer_provider().force_flush()
    assert span_names(exporter) == ["closed"]  # a flush ends nothing
    handle.shutdown()
    closed, inner, outer = exporter.get_finished_spans()
    assert (closed.name, inner.name, outer.name) == ("closed", "inner", "outer")
    assert dict(closed.attributes or {}) == {}
    for span in (inner, outer):
        assert dict(span.attributes or {}) == {"nemo.span.truncated": True}
        assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
            ("nemo.span.truncated", {"nemo.span.truncated.reason": "still open at telemetry shutdown"})
        ]
        assert span.status.is_unset
        assert span.end_time is not None


def test_the_closer_stands_before_the_batch_processor(lensfast: ModuleType) -> None:
    set_up(lensfast)
    provider: Any = trace.get_tracer_provider()
    scoped, closer, batch = provider._active_span_processor._span_processors
    assert [type(scoped).__name__, type(closer).__name__] == ["_ScopedSpanAttributes", "_OpenSpanCloser"]
    assert isinstance(batch, BatchSpanProcessor)


def test_the_closer_keeps_only_open_spans(lensfast: ModuleType) -> None:
    closer = lensfast.providers._OpenSpanCloser()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(closer)
    tracer = provider.get_tracer("t")
    spans = [tracer.start_span(str(number)) for number in range(3)]
    spans[1].end()
    assert [span.name for span in closer._open.values()] == ["0", "2"]
    assert set(closer._open) == {spans[0].get_span_context().span_id, spans[2].get_span_context().span_id}
    assert closer.force_flush() is True
    assert len(closer._open) == 2
    closer.shutdown()
    assert not any(span.is_recording() for span in spans)
    assert closer._open == {}
    late = tracer.start_span("late")
    assert closer._open == {}
    closer.shutdown()  # nothing
    assert late.is_recording()


def test_the_closer_goes_on_past_a_span_that_fails(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    closer = lensfast.providers._OpenSpanCloser()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(closer)
    outer, inner = provider.get_tracer("t").start_span("outer"), provider.get_tracer("t").start_span("inner")
    monkeypatch.setattr(inner, "add_event", lambda *a: 1 / 0)
    closer.shutdown()
    assert not outer.is_recording()


class FakeProvider:
    """A provider of any signal; knows what was called."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failure = failure

    def force_flush(self, **arguments: Any) -> None:
        self.calls.append(("force_flush", arguments))
        if self.failure:
            raise self.failure

    def shutdown(self, **arguments: Any) -> None:
        self.calls.append(("shutdown", arguments))
        if self.failure:
            raise self.failure


def fake_providers(monkeypatch: pytest.MonkeyPatch, spans: object, metric: object) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: spans)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: metric)


def exporting_handle(lensfast: ModuleType) -> Any:
    return lensfast.TelemetryHandle(trace.NoOpTracer(), metrics.NoOpMeter("m"), is_exporting=True)


def test_shutdown_acts_on_the_providers_that_are_global_then(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = exporting_handle(lensfast)
    spans, metric = FakeProvider(), FakeProvider()
    fake_providers(monkeypatch, spans, metric)
    handle.shutdown(timeout_ms=1234)
    assert spans.calls == metric.calls == [("force_flush", {"timeout_millis": 1234}), ("shutdown", {})]
    handle.shutdown()
    assert len(spans.calls) == len(metric.calls) == 2


def test_shutdown_does_not_raise(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = exporting_handle(lensfast)
    spans, metric = FakeProvider(OSError("disk")), FakeProvider(RuntimeError("gone"))
    fake_providers(monkeypatch, spans, metric)
    handle.shutdown()
    assert [name for name, _ in spans.calls] == [name for name, _ in metric.calls] == ["force_flush", "shutdown"]
    assert sorted(messages(caplog)) == [
        "force_flush of the provider of metrics failed",
        "force_flush of the provider of spans failed",
        "shutdown of the provider of metrics failed",
        "shutdown of the provider of spans failed",
    ]
    handle.shutdown()  # the flag was set before the failure
    assert len(spans.calls) == 2


def test_shutdown_takes_providers_without_these_methods(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = exporting_handle(lensfast)
    fake_providers(monkeypatch, object(), object())
    handle.shutdown()


def test_shutdown_returns_while_a_processor_hangs(
    lensfast: ModuleType, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    returned = threading.Event()

    class Hanging(SpanProcessor):
        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return returned.wait()  # for ever, unless shutdown returns

    provider: Any = trace.get_tracer_provider()
    provider.add_span_processor(Hanging())
    handle = exporting_handle(lensfast)
    handle.shutdown(timeout_ms=50)
    [message] = messages(caplog)
    assert message.startswith("spans could not be delivered within 50 ms and are lost: ")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in message
    assert "shutdown(timeout_ms=...)" in message
    returned.set()


def test_handle_is_what_the_original_is(lensfast: ModuleType) -> None:
    tracer, meter = lensfast.get_tracer("t"), lensfast.get_meter("m")
    handle = lensfast.TelemetryHandle(tracer, meter)
    assert (handle.tracer, handle.meter, handle.is_exporting) == (tracer, meter, False)
    handle.is_exporting = True
    with pytest.raises(AttributeError):
        handle.tracer = tracer


# Sampling


def test_rank_aware_sampler(lensfast: ModuleType) -> None:
    sampler = lensfast.sampling.RankAwareSampler
    taken = [
        rank
        for rank in range(16)
        if sampler(rank, 16, 0.5).should_sample(None, 1, "name").decision is Decision.RECORD_AND_SAMPLE
    ]
    assert taken == [3, 4, 5, 6, 8, 10, 11, 13]
    assert sampler(3, 16, 0.5).should_sample(None, 1, "name", None, {"a": 1}).attributes == {"a": 1}
    assert sampler(0, 16, 0.5).should_sample(None, 1, "name").decision is Decision.DROP
    assert sampler(0, 16).should_sample().decision is Decision.RECORD_AND_SAMPLE
    assert sampler(3, 16, 0.0).should_sample().decision is Decision.DROP
    assert sampler(2, 16, 0.25).get_description() == "RankAwareSampler(rank=2, rate=0.25)"


@pytest.mark.parametrize(("rank", "names"), [(3, ["work", "child"]), (0, [])])
def test_the_sampler_takes_a_rank_in_or_out(lensfast: ModuleType, rank: int, names: list[str]) -> None:
    exporter = InMemorySpanExporter()
    handle = set_up(
        lensfast, exporter, sampler_enabled=True, export_sample_rate=0.5, export_rank=rank, rank=rank, world_size=16
    )
    parent = trace.SpanContext(1, 2, True, trace.TraceFlags(0 if names else 1))  # its decision does not count
    with lensfast.managed_span("job", "work") as span:
        assert span.is_recording() is bool(names)
    with handle.tracer.start_as_current_span(
        "child", context=trace.set_span_in_context(trace.NonRecordingSpan(parent))
    ):
        pass
    handle.shutdown()
    assert span_names(exporter) == names


@pytest.mark.parametrize("sampler_enabled", [False, True])
def test_the_standard_sampler_variable_holds_unless_replaced(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, sampler_enabled: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = InMemorySpanExporter()
    handle = set_up(lensfast, exporter, sampler_enabled=sampler_enabled)
    with lensfast.managed_span("job", "work"):
        pass
    handle.shutdown()
    assert span_names(exporter) == (["work"] if sampler_enabled else [])


# Resources


def resource_of(lensfast: ModuleType, **options: Any) -> dict[str, Any]:
    set_up(lensfast, **options)
    provider: Any = trace.get_tracer_provider()
    sdk = ("telemetry.sdk.", "host.gpu.count", "k8s.")
    return {key: value for key, value in provider.resource.attributes.items() if not key.startswith(sdk)}


def test_resource(lensfast: ModuleType) -> None:
    assert resource_of(lensfast, run_id="r", rank=2, world_size=3) == {
        "service.name": "nemo",
        "service.version": lensfast.__version__,
        "service.instance.id": "r-rank2",
        "dl.rank": 2,
        "dl.world_size": 3,
        "nemo.run.id": "r",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }


def test_resource_precedence(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=env,dl.rank=9,only.env=yes,mine=env")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "env as well")
    resource = resource_of(
        lensfast,
        service_name="configured",
        user="ada",
        wandb_entity="team",
        wandb_project="speech",
        resource_attributes={"mine": 1, "nemo.user.id": "caller", "host.name": "caller"},
        run_id="r",
        export_strategy="all_ranks",
    )
    assert resource["service.name"] == "configured"
    assert resource["dl.rank"] == 0
    assert resource["only.env"] == "yes"
    assert resource["mine"] == 1
    assert resource["nemo.user.id"] == "caller"
    assert resource["host.name"] == socket.gethostname()
    assert (resource["wandb.entity"], resource["wandb.project"]) == ("team", "speech")
    assert resource["service.instance.id"] == "r-rank0"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"ENVIRONMENT": "staging"}, "staging"),
        ({"DEPLOYMENT_ENV": "prod", "ENVIRONMENT": "staging"}, "prod"),
        ({"DEPLOYMENT_ENV": "", "ENVIRONMENT": "staging"}, "staging"),
    ],
)
def test_resource_deployment(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert resource_of(lensfast).get("deployment.environment") == expected


def test_detect_slurm(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_NODELIST": "node[1-4]",
        "SLURM_NNODES": "4",
        "SLURM_NTASKS": "32",
        "SLURM_PARTITION": "batch",
        "SLURM_CLUSTER_NAME": "east",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert lensfast.resources.detect_slurm() == {}  # not in a job
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    expected = {
        "slurm.job.id": "4711",
        "slurm.job.name": "pretrain",
        "slurm.nodelist": "node[1-4]",
        "slurm.nnodes": "4",
        "slurm.ntasks": "32",
        "slurm.partition": "batch",
        "slurm.cluster.name": "east",
    }
    assert lensfast.resources.detect_slurm() == expected
    assert lensfast.resources.detect_resource().items() >= expected.items()
    monkeypatch.setenv("SLURM_PARTITION", "")
    del expected["slurm.partition"]
    assert lensfast.resources.detect_slurm() == expected


def test_detect_kubernetes(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.path.exists("/var/run/secrets/kubernetes.io"):
        pytest.skip("this machine is itself a Kubernetes pod")
    names = ["NAMESPACE", "POD_NAME", "POD_UID", "NODE_NAME", "CONTAINER_NAME", "JOB_NAME"]
    for name in names:
        monkeypatch.setenv(f"K8S_{name}", name.lower())
    monkeypatch.setenv("HOSTNAME", "pod-host")
    assert lensfast.resources.detect_kubernetes() == {}
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    expected = {
        "k8s.namespace.name": "namespace",
        "k8s.pod.name": "pod_name",
        "k8s.pod.uid": "pod_uid",
        "k8s.node.name": "node_name",
        "k8s.container.name": "container_name",
        "k8s.job.name": "job_name",
    }
    assert lensfast.resources.detect_kubernetes() == expected
    for name in names:
        monkeypatch.setenv(f"K8S_{name}", "")
    assert lensfast.resources.detect_kubernetes() == {"k8s.pod.name": "pod-host"}


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1,2,3", 4),
        ("2", 1),
        ("GPU-5ebe9c43,GPU-8d3f", 2),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,1,-1,2", 2),  # CUDA ignores the rest
    ],
)
def test_detect_gpus(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert lensfast.resources.detect_local() == {
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "host.gpu.count": count,
    }


# Exporters and trouble on the wire


def send_to(monkeypatch: pytest.MonkeyPatch, port: int, protocol: str, **variables: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)


@pytest.mark.parametrize(
    ("variable", "text", "warnings", "protocol"),
    [
        ("PROTOCOL", "http/protobuf", 0, "http/protobuf"),
        ("PROTOCOL", " HTTP/Protobuf ", 0, "http/protobuf"),
        ("PROTOCOL", "http/json", 0, "http/protobuf"),  # protobuf on the wire all the same
        ("PROTOCOL", "grpc", 0, "grpc"),
        ("PROTOCOL", "", 0, "grpc"),
        ("PROTOCOL", "thrift", 1, "grpc"),
        ("TRACES_PROTOCOL", "http/protobuf", 0, "http/protobuf"),
        ("TRACES_PROTOCOL", "thrift", 1, "grpc"),
    ],
)
def test_protocol(
    lensfast: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    text: str,
    warnings: int,
    protocol: str,
) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint(protocol))
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", text)
        handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True))
        with lensfast.managed_span("job", "work"):
            pass
        handle.shutdown()
        assert [span.name for span in receiver.spans()] == ["work"]
    name = f"OTEL_EXPORTER_OTLP_{variable}"
    expected = f"{name}={text!r} is not one of grpc, http/protobuf, http/json; grpc is used"
    assert messages(caplog) == [expected] * warnings


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_span_that_cannot_be_encoded_does_not_cost_its_batch(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    with Receiver() as receiver:
        send_to(monkeypatch, receiver.grpc_port if protocol == "grpc" else receiver.http_port, protocol)
        handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True))
        for name in ("first", "lone \ud800", "second", "lone \udfff", "third"):
            with lensfast.managed_span("job", name):
                pass
        flush()
        assert [span.name for span in receiver.spans()] == ["first", "second", "third"]
        [message] = messages(caplog)
        assert message.startswith("2 spans can't be encoded as OTLP and are dropped, such as 'lone \\ud800' (")
        # A batch of nothing else is not an outage.
        with lensfast.managed_span("job", "\ud800"):
            pass
        flush()
        handle.shutdown()
    assert len(receiver.spans()) == 3
    assert [message.split(" are dropped")[0] for message in messages(caplog)] == [
        "2 spans can't be encoded as OTLP and",
        "1 spans can't be encoded as OTLP and",
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_attribute_that_cannot_be_encoded_does_not_cost_its_span(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    lensfast._otlp._chatter._unencodable.clear()
    with Receiver() as receiver:
        send_to(monkeypatch, receiver.grpc_port if protocol == "grpc" else receiver.http_port, protocol)
        handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True))
        for number in range(3):
            with lensfast.managed_span("job", "work", ok=number, big=2**70 + number, **{"app.path": "a\ud800"}):
                pass
        handle.shutdown()
    assert [span.attributes for span in receiver.spans()] == [{"ok": number} for number in range(3)]
    about_big, about_path = messages(caplog)  # once for each attribute, not for each span
    assert about_big.startswith("Failed to encode key big: ")
    assert about_path.startswith("Failed to encode key app.path: ")
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_goes_and_comes_back(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    if SDK < ((1, 40) if protocol == "grpc" else (1, 35)):
        pytest.skip("this SDK takes whole seconds only, or does not connect anew within a fraction of one")
    port = free_port()
    send_to(monkeypatch, port, protocol, TIMEOUT="0.3")
    handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True))
    handle.meter.create_gauge("loss").set(0.5)
    for number in range(2):
        with lensfast.managed_span("job", f"lost {number}"):
            pass
        flush()
    [message] = messages(caplog)
    assert message.startswith(f"spans do not reach {'http://' if protocol != 'grpc' else ''}127.0.0.1:{port}")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in message
    assert "OTEL_EXPORTER_OTLP_PROTOCOL" in message
    caplog.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10")
    with Receiver(**{"grpc_port" if protocol == "grpc" else "http_port": port}) as receiver:
        for number in range(2):
            with lensfast.managed_span("job", f"kept {number}"):
                pass
            flush()
        assert [span.name for span in receiver.spans()] == ["kept 0", "kept 1"]
        [message] = messages(caplog)
        assert message.endswith(f"127.0.0.1:{port}{'/v1/traces' * (protocol != 'grpc')} again; 4 exports were lost")
    caplog.clear()
    with lensfast.managed_span("job", "lost again"):
        pass
    flush()
    [message] = messages(caplog)
    assert message.startswith("spans do not reach ")
    # The SDK's reason, though it has given it before; its exporter for HTTP used to raise instead.
    assert ("Failed to export" if SDK >= (1, 40) else "ConnectionError") in message


def test_a_collector_that_refuses(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Receiver() as receiver:
        receiver.http_status = 401
        send_to(monkeypatch, receiver.http_port, "http/protobuf")
        handle = lensfast.setup_telemetry(lensfast.NemoLensConfig(enabled=True))
        for _ in range(2):
            with lensfast.managed_span("job", "work"):
                pass
            flush()
        handle.shutdown()
    [message] = messages(caplog)
    assert f"do not reach http://127.0.0.1:{receiver.http_port}/v1/traces over OTLP http: " in message
    assert "401" in message
    assert "Unauthorized" in message or SDK < (1, 40)  # where the reason was the answer's body, here empty


JOB = """
import sys
from lensfast import NemoLensConfig, managed_span, setup_telemetry

handle = setup_telemetry(NemoLensConfig.from_env(), resource_attributes={"team": "speech"})
handle.meter.create_gauge("loss").set(0.5)
with managed_span("job", "work", note="two\\nlines"):
    pass
managed_span("job", "open").__enter__()
print("trained", file=sys.stderr)
if len(sys.argv) > 1:
    handle.shutdown(timeout_ms=int(sys.argv[1]))
"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    load_backend(request.param)  # skips, or fails, where it is not built
    return str(request.param)


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(text)
    return path


def test_the_console_exporter_writes_json_lines(tmp_path: Path, backend: str) -> None:
    process = run_script(
        script(tmp_path, JOB), backend, NEMO_LENS_ENABLED="1", NEMO_LENS_EXPORTER="console", NEMO_LENS_RUN_ID="r",
        OTEL_EXPORTER_OTLP_TIMEOUT="not looked at",
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "trained\n")
    assert process.stdout.endswith("\n")
    records = [json.loads(line) for line in process.stdout.splitlines()]
    spans = {record["name"]: record for record in records if "name" in record}
    assert set(spans) == {"work", "open"}
    assert spans["work"]["attributes"] == {"note": "two\nlines"}
    assert spans["open"]["attributes"] == {"nemo.span.truncated": True}
    assert spans["work"]["resource"]["attributes"]["team"] == "speech"
    gauges = [
        metric["name"]
        for record in records
        if "resource_metrics" in record
        for resource_metrics in record["resource_metrics"]
        for scope_metrics in resource_metrics["scope_metrics"]
        for metric in scope_metrics["metrics"]
    ]
    assert set(gauges) == {"loss"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.skipif(SDK < (1, 35), reason="before 1.35, a timeout was whole seconds and did not bound the retries")
def test_nobody_listens(tmp_path: Path, backend: str, protocol: str) -> None:
    port = free_port()
    process = run_script(
        script(tmp_path, JOB), backend, NEMO_LENS_ENABLED="1", OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_TIMEOUT="0.5",
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, "")
    trained, message = process.stderr.splitlines()  # one line for spans, metrics and shutdown together
    assert trained == "trained"
    assert re.match(rf"(spans|metrics) do not reach (http://)?127\.0\.0\.1:{port}\b", message)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in message


@pytest.mark.parametrize(("protocol", "arguments", "limit"), [("grpc", [], 5000), ("http/protobuf", ["300"], 300)])
def test_a_collector_that_never_answers(
    tmp_path: Path, backend: str, protocol: str, arguments: list[str], limit: int
) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = mute.getsockname()[1]
        # Were the exit not bounded, it would take as long as this timeout, and run_script would give up.
        process = run_script(
            script(tmp_path, JOB), backend, *arguments, NEMO_LENS_ENABLED="1", OTEL_EXPORTER_OTLP_TIMEOUT="600",
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, "")
    said = process.stderr.splitlines()
    if SDK < (1, 35):  # whose BatchSpanProcessor says this itself
        said = [line for line in said if line != "Timeout was exceeded in force_flush()."]
    assert said == [
        "trained",
        f"spans and metrics could not be delivered within {limit} ms and are lost: the collector at "
        f"OTEL_EXPORTER_OTLP_ENDPOINT (127.0.0.1:{port}) does not answer, or needs a longer shutdown(timeout_ms=...)",
    ]


WITHOUT_SDK = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name in {"opentelemetry.sdk", "opentelemetry.exporter"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())

from lensfast import NemoLensConfig, enabled_span_groups, managed_span, set_enabled_span_groups, setup_telemetry
from lensfast.sampling import RankAwareSampler

handle = setup_telemetry(NemoLensConfig())
handle.shutdown()
handle = setup_telemetry(NemoLensConfig(enabled=True), rank=0, world_size=2)  # a rank that does not export
handle.shutdown()
set_enabled_span_groups({"job"})
with managed_span("job", "work", n=1) as span:
    print(span.is_recording())
print(RankAwareSampler(3, 16, 0.5).should_sample(), RankAwareSampler(0, 16, 0.5).should_sample())
try:
    setup_telemetry(NemoLensConfig(enabled=True), _allow_reinit=True)
except ImportError as error:
    print(error)
print(sorted(enabled_span_groups()))
"""


def test_without_the_sdk(tmp_path: Path, backend: str) -> None:
    process = run_script(script(tmp_path, WITHOUT_SDK), backend)
    assert (process.returncode, process.stderr) == (0, "")
    recording, sampled, error, groups = process.stdout.splitlines()
    assert recording == "False"
    assert sampled == "True False"
    assert "pip install 'lensfast[sdk]'" in error
    assert "nemo-lens[sdk]" in error
    assert "No module named 'opentelemetry.sdk'" in error
    assert groups == "['job']"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("export_rank", "3", "NemoLensConfig.export_rank must be a number, not '3'"),
        ("span_groups", ["step"], r"NemoLensConfig.span_groups must be a str, not \['step'\]"),
        ("span_groups", None, "NemoLensConfig.span_groups must be a str, not None"),
    ],
)
def test_fields_of_the_wrong_type(lensfast, field, value, message):
    config = lensfast.NemoLensConfig(enabled=True)
    setattr(config, field, value)
    with pytest.raises(TypeError, match=message):
        lensfast.setup_telemetry(config)
    assert lensfast.handle._INITIALIZED is False
    assert trace._TRACER_PROVIDER is None


def test_a_sample_rate_of_the_wrong_type_where_it_is_used(lensfast):
    config = lensfast.NemoLensConfig(enabled=True, export_strategy="sampled")
    config.export_sample_rate = "0.5"
    with pytest.raises(TypeError, match=r"export_sample_rate must be a number, not '0\.5'"):
        lensfast.setup_telemetry(config)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, None) for field in ("run_id", "user", "wandb_entity", "wandb_project", "service_name", "exporter")),
        ("run_id", 123),
        ("export_sample_rate", None),
    ],
)
def test_fields_that_the_original_puts_up_with(lensfast, caplog, field, value, enabled):
    """A program sets what it does not know to None."""
    config = lensfast.NemoLensConfig(enabled=enabled)
    setattr(config, field, value)
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    handle = lensfast.setup_telemetry(config, span_exporter=exporter, metric_reader=reader)
    assert handle.is_exporting is enabled
    with lensfast.managed_span("job", "work"):
        pass
    handle.shutdown()
    assert span_names(exporter) == (["work"] if enabled else [])


def test_a_flag_that_is_text_counts_as_python_has_it_and_is_logged(lensfast, caplog):
    config = lensfast.NemoLensConfig(enabled="no")
    options = {"span_exporter": InMemorySpanExporter(), "metric_reader": InMemoryMetricReader()}
    assert lensfast.setup_telemetry(config, **options).is_exporting is True
    assert "NemoLensConfig.enabled is the text 'no', which counts as True" in messages(caplog)


def test_a_config_of_the_callers_own(lensfast):
    fields = dataclasses.asdict(lensfast.NemoLensConfig(enabled=True, span_groups="step"))
    del fields["_span_group_cls"]
    config = types.SimpleNamespace(**fields)
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    assert lensfast.setup_telemetry(config, span_exporter=exporter, metric_reader=reader).is_exporting is True
    assert config.run_id
    assert lensfast.enabled_span_groups() == {"step"}


def test_numbers_of_other_types(lensfast, exporter):
    """numpy's integers and small floats, as fractions, are numbers that are no int and no float."""
    config = lensfast.NemoLensConfig(enabled=True, exporter="console", export_sample_rate=Fraction(1, 2))
    config.export_rank = Fraction(2)
    reader = InMemoryMetricReader()
    options = {"world_size": 3, "span_exporter": InMemorySpanExporter(), "metric_reader": reader}
    assert lensfast.setup_telemetry(config, rank=2, **options).is_exporting is True
    # By the rule of `sampled`: 0.5 takes rank 3 and not rank 2.
    assert [lensfast.strategies.get_export_strategy("sampled")(config, rank, 4) for rank in (2, 3)] == [False, True]
    with pytest.raises(ValueError, match="export_sample_rate"):
        lensfast.NemoLensConfig(export_sample_rate=Fraction(3, 2))


@pytest.mark.parametrize("config", [{}, None, "console"])
def test_what_is_no_config(lensfast, config):
    with pytest.raises(TypeError, match="takes a NemoLensConfig"):
        lensfast.setup_telemetry(config)


def test_a_sample_rate_that_is_no_number(lensfast):
    with pytest.raises(ValueError, match="export_sample_rate must be from"):
        lensfast.NemoLensConfig(export_sample_rate="x")


def test_an_export_rank_that_no_rank_has_is_told_once(lensfast, caplog):
    config = lensfast.NemoLensConfig(enabled=True, export_rank=7)
    for rank in range(4):
        lensfast.handle._INITIALIZED = False
        assert lensfast.setup_telemetry(config, rank=rank, world_size=4).is_exporting is False
    (record,) = caplog.records
    assert "no rank exports: export_rank (<PREFIX>_EXPORT_RANK) is 7 and world_size is 4" in record.getMessage()
