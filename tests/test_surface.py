"""Every public name of nemo.lens, of any generation, is here, and takes what the original takes."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from conftest import take_modules

# Module to names, of 0.1.0, 0.2 and the nightly together. `semconv` has a table of its own in test_semconv.py.
NAMES = {
    "": """
        __version__ __package_name__ __contact_names__ __contact_emails__ __homepage__ __repository_url__
        __download_url__ NemoLensConfig SpanGroup SpanRegistry TelemetryHandle setup_telemetry ensure_run_id span_cm
        managed_span trace_fn safe_set_span_attributes redact_value DEFAULT_REDACT_KEYS span_attributes inject_context
        extract_context get_tracer get_meter is_span_group_enabled set_enabled_span_groups enabled_span_groups
        pending_span_groups broadcast_trace_context create_linked_span ExportStrategy register_export_strategy
        unregister_export_strategy registered_strategies derive_nv_dl_run_uuid""",
    "package_info": """
        __version__ __package_name__ __contact_names__ __contact_emails__ __homepage__ __repository_url__
        __download_url__ MAJOR MINOR PATCH PRE_RELEASE VERSION __shortversion__ __description__ __license__
        __keywords__""",
    "config": "NemoLensConfig",
    "groups": "SpanGroup SpanRegistry ALL",
    "handle": "TelemetryHandle setup_telemetry ensure_run_id _INITIALIZED _should_export trace metrics",
    "helpers": """
        span_cm managed_span trace_fn safe_set_span_attributes redact_value DEFAULT_REDACT_KEYS span_attributes
        trace""",
    "propagation": "inject_context extract_context",
    "state": """
        is_span_group_enabled set_enabled_span_groups enabled_span_groups pending_span_groups set_span_group_spec
        refresh_enabled_span_groups set_pp_trace_carrier get_pp_trace_carrier _ENABLED_GROUPS _PP_TRACE_CARRIER""",
    "distributed": "broadcast_trace_context create_linked_span",
    "strategies": """
        ExportStrategy register_export_strategy unregister_export_strategy registered_strategies get_export_strategy
        BUILTIN_STRATEGIES _REGISTRY _REGISTRY_LOCK""",
    "sampling": "RankAwareSampler",
    "providers": """
        build_providers build_noop_providers SeedIndependentIdGenerator _OpenSpanCloser _compact_jsonl_formatter
        _build_log_exporter _build_span_exporter _build_metric_exporter _resolve_otlp_protocol _VALID_EXPORTERS
        _ScopedSpanAttributes _build_span_emitter_provider _ExportResultTrackingSpanExporter""",
    "logging_bridge": "setup_logging_bridge",
    "resources": "detect_resource detect_slurm detect_kubernetes detect_local",
    "resources.gpu": "detect_gpu",
    "resources.slurm": """
        detect_slurm derive_slurm_resource_attributes derive_nv_dl_job_uuid derive_nv_dl_run_uuid""",
    "resources.kubernetes": "detect_kubernetes",
    "resources.local": "detect_local",
    "resources.attributes": """
        OTEL_RESOURCE_ATTRIBUTES_ENV parse_otel_resource_attributes format_otel_resource_attributes
        get_otel_resource_attributes extend_otel_resource_attributes set_otel_resource_attributes
        publish_otel_resource_attributes check_resource_attributes duplicate_otel_resource_attribute_keys
        ResourceAttributeCheck merge_resource_attributes""",
    "semconv.encoding": "compose_attributes convert_attribute",
    "semconv.resources": """
        normalize_resource_attributes SLURM_RESOURCE_TYPES DL_RESOURCE_TYPES GPU_RESOURCE_TYPES RESOURCE_TYPES
        SLURM_RETIRED_RESOURCE_ATTRIBUTE_KEYS SLURM_RESOURCE_ATTRIBUTE_KEYS SLURM_RESOURCE_ATTRIBUTE_NORMALIZERS""",
    "instruments": """
        record_inference_metrics MetricSpec register_metric_group unregister_metric_group registered_metric_groups
        record_metrics create_metric_instruments METRIC_KINDS OBSERVABLE_METRIC_KINDS""",
    "instruments.inference": "record_inference_metrics _INFERENCE_INSTRUMENTS",
    "instruments.gym": "record_gym_metrics GYM_DURATION_BOUNDARIES_MS _GYM_INSTRUMENTS",
    "instruments.rl": "record_rl_metrics _RL_INSTRUMENTS",
    "instruments.registry": """
        MetricSpec register_metric_group unregister_metric_group registered_metric_groups record_metrics
        create_metric_instruments METRIC_KINDS OBSERVABLE_METRIC_KINDS""",
    "span_utilities": "emit_span linux_process_create_time",
    "cli": "main",
    "contrib.fastapi": "instrument_fastapi",
    "contrib.aiohttp": "instrument_aiohttp_client",
    "contrib.ray": "inject_ray_context extract_ray_context traced_remote_call ray_dispatch_with_context",
    "contrib.nccl": "serialize_context deserialize_context extract_nccl_context",
    "fallbacks": """
        trace_fn managed_span span_cm is_span_group_enabled safe_set_span_attributes span_attributes SpanRegistry""",
}

# Parameters of the newest call forms, as (name, default); those of 0.1.0 are compared with the original itself.
NEWER = {
    "setup_telemetry": "config resource_attributes=None span_exporter=None metric_reader=None _allow_reinit=False",
    "ensure_run_id": "config environ=None",
    "span_attributes": "attributes",
    "state.set_span_group_spec": "spec",
    "SpanRegistry.register": "namespace groups presets=None allow_override=False",
    "providers.build_providers": "config resource_attributes=None span_exporter=None metric_reader=None",
    "instruments.rl.record_rl_metrics": """
        meter reward_mean=None kl_divergence=None policy_loss=None value_loss=None entropy=None
        response_length_mean=None grad_norm=None learning_rate=None throughput_tokens_per_sec=None
        generation_duration_ms=None rollout_duration_ms=None""",
    "instruments.registry.MetricSpec": "key name kind='gauge' unit='' description='' callback=None",
    "instruments.registry.register_metric_group": "group specs allow_override=False",
    "instruments.registry.record_metrics": "meter group values=None attributes=None",
    "instruments.registry.create_metric_instruments": "meter group",
    "resources.detect_slurm": "environ=None",
    "resources.slurm.derive_slurm_resource_attributes": "environ=None",
    "resources.slurm.derive_nv_dl_job_uuid": "environ=None",
    "resources.slurm.derive_nv_dl_run_uuid": "environ=None run_id=None",
    "resources.gpu.detect_gpu": "local_rank=None environ=None",
    "resources.attributes.get_otel_resource_attributes": "environ=None",
    "resources.attributes.publish_otel_resource_attributes": "attributes environ=None",
    "resources.attributes.check_resource_attributes": "attrs required=() forbidden=() env_value=None",
    "resources.attributes.parse_otel_resource_attributes": "value",
    "resources.attributes.format_otel_resource_attributes": "attrs",
    "resources.attributes.extend_otel_resource_attributes": "value defaults=None overrides=None",
    "resources.attributes.set_otel_resource_attributes": "attributes environ=None",
    "semconv.resources.normalize_resource_attributes": "attrs",
    "semconv.encoding.compose_attributes": "current defaults=None overrides=None",
    "semconv.encoding.convert_attribute": "key value converters",
    "span_utilities.emit_span": """
        tracer name start_epoch_seconds end_epoch_seconds group=None context=None attributes=None""",
    "span_utilities.linux_process_create_time": """
        stat_text=None uptime_text=None read_time=None stat_path='/proc/self/stat' uptime_path='/proc/uptime'
        clock_ticks_per_second=None""",
    "cli.main": "argv=None",
}


def module(lensfast: ModuleType, name: str) -> ModuleType:
    return importlib.import_module(f"lensfast.{name}" if name else "lensfast")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(lensfast: ModuleType, name: str) -> None:
    found = module(lensfast, name)
    assert [wanted for wanted in NAMES[name].split() if not hasattr(found, wanted)] == []


@pytest.mark.parametrize("path", NEWER)
def test_parameters_of_the_newer_generations(lensfast: ModuleType, path: str) -> None:
    target: Any = lensfast
    for part in path.split("."):
        target = getattr(target, part)
    parameters = inspect.signature(target).parameters
    for wanted in NEWER[path].split():
        name, _, default = wanted.partition("=")
        found = parameters[name].default
        assert found == (eval(default) if default else inspect.Parameter.empty), name


def original_modules() -> dict[str, ModuleType]:
    """The modules of nemo-lens 0.1.0, by name below nemo.lens; they don't stay in sys.modules."""
    before = take_modules("nemo")
    try:
        package = importlib.import_module("nemo.lens")
        names = ["nemo.lens", *(found.name for found in pkgutil.walk_packages(package.__path__, "nemo.lens."))]
        modules = {name.removeprefix("nemo.lens").removeprefix("."): importlib.import_module(name) for name in names}
        return modules if importlib.metadata.version("nemo-lens") == "0.1.0" else {}
    except ImportError:
        return {}
    finally:
        take_modules("nemo")
        sys.modules.update(before)


ORIGINAL = original_modules()


def original_functions() -> Iterator[tuple[str, str]]:
    """(module, name) of each public function, class and method that nemo-lens 0.1.0 defines."""
    for module_name, found in ORIGINAL.items():
        for name, value in vars(found).items():
            if name.startswith("_") or not callable(value) or not getattr(value, "__module__", "").startswith("nemo."):
                continue
            yield module_name, name
            if inspect.isclass(value):
                for attribute, _ in inspect.getmembers(value, callable):
                    if not attribute.startswith("_"):
                        yield module_name, f"{name}.{attribute}"


@pytest.mark.skipif(not ORIGINAL, reason="nemo-lens 0.1.0 is not installed here (it needs Python 3.13)")
@pytest.mark.parametrize(("module_name", "name"), sorted(original_functions()))
def test_what_the_original_takes_is_taken(lensfast: ModuleType, module_name: str, name: str) -> None:
    """Its parameters come first, in its order, of its kinds, with its defaults; more may follow, with defaults."""
    # Without ranks, the environment is asked for them, and 0 of 1 is what it says where it says nothing.
    other_defaults = {"safe_set_span_attributes": {"redact_keys"}, "setup_telemetry": {"rank", "world_size"}}

    def parameters(target: Any) -> list[inspect.Parameter]:
        for part in name.split("."):
            target = getattr(target, part)
        return list(inspect.signature(target).parameters.values())

    theirs = parameters(ORIGINAL[module_name])
    ours = parameters(module(lensfast, module_name))
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [parameter for parameter in ours if parameter.kind not in variable]
    for their, our in zip([p for p in theirs if p.kind not in variable], named, strict=False):
        assert (our.name, our.kind) == (their.name, their.kind)
        if our.name not in other_defaults.get(name, ()):
            assert our.default == their.default or repr(our.default) == repr(their.default)
    assert [p.kind for p in theirs if p.kind in variable] == [p.kind for p in ours if p.kind in variable]
    assert len(named) >= len([p for p in theirs if p.kind not in variable])
    assert all(p.default is not p.empty for p in named[len([p for p in theirs if p.kind not in variable]) :])
