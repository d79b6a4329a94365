"""SpanRegistry, SpanGroup, and how a spec becomes a set of enabled groups."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import load_backend


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


# The registry


def test_an_empty_registry(lensfast):
    registry = lensfast.SpanRegistry
    assert registry.groups() == frozenset()
    assert registry.namespaces() == []
    assert registry.presets() == {"all": frozenset()}
    assert registry.resolve("all") == (frozenset(), frozenset())
    assert registry.resolve("") == (frozenset(), frozenset())


def test_registering(lensfast):
    registry = lensfast.SpanRegistry
    registry.register("megatron", ["step", "layer"], {"default": ["step"], "per_step": {"step", "layer"}})
    registry.register("aaa", set())
    assert registry.namespaces() == ["aaa", "megatron"]
    assert registry.groups() == {"step", "layer"}
    assert registry.presets() == {
        "default": {"step"}, "per_step": {"step", "layer"}, "all": {"step", "layer"},
    }  # fmt: skip


def test_names_are_normalised_and_namespaces_are_not(lensfast):
    registry = lensfast.SpanRegistry
    registry.register(" MyLib ", {" Step ", "LAYER"}, {" Default": {"STEP "}})
    assert registry.namespaces() == [" MyLib "]
    assert registry.groups() == {"step", "layer"}
    assert registry.presets() == {"default": {"step"}, "all": {"step", "layer"}}


def test_resolving(lensfast):
    registry = lensfast.SpanRegistry
    registry.register("lib", {"step", "layer", "both"}, {"default": {"step"}, "both": {"layer"}})
    assert registry.resolve(" Default , LAYER,,") == ({"step", "layer"}, frozenset())
    assert registry.resolve("all") == ({"step", "layer", "both"}, frozenset())
    assert registry.resolve("both") == ({"layer"}, frozenset()), "a preset shadows a group of its name"
    assert registry.resolve("step,Nobody, nothing ") == ({"step"}, {"nobody", "nothing"})
    assert registry.resolve(" , ") == (frozenset(), frozenset())
    with pytest.raises(AttributeError):
        registry.resolve(None)


def test_presets_of_one_name_unite(lensfast):
    registry = lensfast.SpanRegistry
    registry.register("megatron", {"step"}, {"default": {"step"}})
    registry.register("nemo_rl", {"rollout"}, {"default": {"rollout"}, "per_step": {"rollout"}})
    assert registry.presets()["default"] == {"step", "rollout"}
    assert registry.resolve("per_step") == ({"rollout"}, frozenset())


def test_a_member_registered_later(lensfast, caplog):
    registry = lensfast.SpanRegistry
    registry.register("nemo_rl", {"rollout"}, {"default": {"rollout", "step"}})
    assert registry.presets()["default"] == {"rollout"}
    (message,) = messages(caplog)
    assert "step" in message
    assert "nemo_rl" in message
    registry.register("megatron", {"step"})
    assert registry.presets()["default"] == {"rollout", "step"}


def test_a_shared_group(lensfast, caplog):
    registry = lensfast.SpanRegistry
    registry.register("megatron", {"step", "layer"})
    registry.register("other", {"none_of_these"})
    registry.register("nemo_rl", {"step"})
    (message,) = messages(caplog)
    assert all(word in message for word in ("step", "megatron", "nemo_rl"))
    lensfast.state.set_span_group_spec("step")
    registry.unregister("megatron")
    assert lensfast.is_span_group_enabled("step"), "the other namespace still has it"
    registry.unregister("nemo_rl")
    assert not lensfast.is_span_group_enabled("step")
    caplog.clear()
    registry.register("megatron", {"none_of_these"}, allow_override=True)
    assert [m for m in messages(caplog) if "also registered" in m] == []


def test_one_warning_per_other_namespace(lensfast, caplog):
    for name in ("a", "b"):
        lensfast.SpanRegistry.register(name, {"step"}, allow_override=True)
    lensfast.SpanRegistry.register("c", {"step"})
    assert len(messages(caplog)) == 2


def test_override_replaces_all_of_a_namespace(lensfast, caplog):
    registry = lensfast.SpanRegistry
    registry.register("lib", {"old", "kept"}, {"default": {"old"}, "old_preset": {"old"}})
    registry.register("lib", {"kept", "new"}, {"default": {"old", "new"}}, allow_override=True)
    assert registry.groups() == {"kept", "new"}
    assert registry.presets() == {"default": {"new"}, "all": {"kept", "new"}}
    (message,) = messages(caplog)
    assert "old" in message


BAD_REGISTRATIONS = [
    (("", {"a"}), {}, ValueError, "non-empty string"),
    ((None, {"a"}), {}, ValueError, "non-empty string"),
    (("  ", {"a"}), {}, ValueError, "non-empty string"),
    ((7, {"a"}), {}, TypeError, "non-empty string"),
    (("lib", {" "}), {}, ValueError, "empty group name"),
    (("lib", {""}), {}, ValueError, "empty group name"),
    (("lib", {" ALL "}), {}, ValueError, "reserved"),
    (("lib", {"a"}, {"All": {"a"}}), {}, ValueError, "reserved"),
    (("lib", {"a"}, {" ": {"a"}}), {}, ValueError, "empty group name"),
    (("lib", {"a"}, {"default": {" "}}), {}, ValueError, "empty group name"),
    (("taken", {"a"}), {}, ValueError, "already registered"),
    (("lib", "step"), {}, TypeError, "collection of names"),
    (("lib", b"step"), {}, TypeError, "collection of names"),
    (("lib", None), {}, TypeError, "collection of names"),
    (("lib", {1, "a"}), {}, TypeError, "must hold names"),
    (("lib", [None]), {}, TypeError, "must hold names"),
    (("lib", {"a"}, ["default"]), {}, TypeError, "presets must map"),
    (("lib", {"a"}, {"default": "a"}), {}, TypeError, "preset 'default'"),
    (("lib", {"a"}, {"default": [1]}), {}, TypeError, "preset 'default'"),
    (("lib", {"a"}, {3: ["a"]}), {}, TypeError, "preset names"),
    (("lib",), {}, TypeError, "groups"),
    (("lib", {"a"}, None, True), {}, TypeError, "positional"),
]


@pytest.mark.parametrize(("arguments", "keywords", "error", "message"), BAD_REGISTRATIONS)
def test_a_bad_registration_raises_and_changes_nothing(lensfast, arguments, keywords, error, message):
    registry = lensfast.SpanRegistry
    registry.register("taken", {"x"}, {"default": {"x"}})
    with pytest.raises(error, match=message):
        registry.register(*arguments, **keywords)
    assert registry.namespaces() == ["taken"]
    assert registry.groups() == {"x"}
    assert registry.presets() == {"default": {"x"}, "all": {"x"}}


def test_unregistering_what_is_not_there(lensfast):
    with pytest.raises(ValueError, match="'lib' is not registered"):
        lensfast.SpanRegistry.unregister("lib")


def test_registering_after_set_up_is_told_and_works(lensfast, caplog, monkeypatch):
    lensfast.state.set_span_group_spec("default")
    caplog.clear()
    monkeypatch.setattr(lensfast.handle, "_INITIALIZED", True)
    lensfast.SpanRegistry.register("late", {"late_group"}, {"default": {"late_group"}})
    assert lensfast.is_span_group_enabled("late_group")
    assert any("registered after setup_telemetry()" in message for message in messages(caplog))


def test_registering_from_many_threads(lensfast):
    lensfast.state.set_span_group_spec("all")
    start = threading.Barrier(8)

    def register(number):
        start.wait()
        for i in range(25):
            lensfast.SpanRegistry.register(f"lib_{number}_{i}", {f"group_{number}_{i}"})

    threads = [threading.Thread(target=register, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = {f"group_{number}_{i}" for number in range(8) for i in range(25)}
    assert lensfast.SpanRegistry.groups() == everything
    assert lensfast.enabled_span_groups() == everything


names = st.sampled_from(["a", "b", "c", "d", "e"])
registrations = st.dictionaries(
    st.sampled_from(["lib1", "lib2", "lib3"]),
    st.tuples(st.sets(names), st.dictionaries(st.sampled_from(["default", "per_step", "a"]), st.sets(names))),
)
specs = st.lists(st.sampled_from(["a", "B ", "c", "d", "e", "default", "PER_STEP", "all", "", " ", "unknown"]))


@given(registrations, specs)
def test_resolve_is_what_the_rules_say(registered, tokens):
    """Against a model written from the rules: presets first, then groups, else pending; unknown members ignored."""
    for backend in ("c", "python"):
        registry = load_backend(backend)["lensfast"].SpanRegistry
        registry.clear()
        for namespace, (groups, presets) in registered.items():
            registry.register(namespace, groups, presets, allow_override=True)
        known = set().union(*(groups for groups, _ in registered.values()))
        enabled, pending = set(), set()
        for token in (token.strip().lower() for token in tokens):
            with_preset = [presets[token] for _, presets in registered.values() if token in presets]
            if token == "all":
                enabled |= known
            elif with_preset:
                enabled |= set().union(*with_preset) & known
            elif token in known:
                enabled.add(token)
            elif token:
                pending.add(token)
        assert registry.resolve(",".join(tokens)) == (enabled, pending)
        registry.clear()


# The live spec


def test_the_spec_follows_registrations(lensfast, caplog):
    state, registry = lensfast.state, lensfast.SpanRegistry
    registry.register("lib", {"step"}, {"default": {"step"}})
    state.set_span_group_spec("default,layer")
    assert state.enabled_span_groups() == {"step"}
    assert state.pending_span_groups() == {"layer"}
    registry.register("other", {"layer", "quiet"}, {"default": {"quiet"}})
    assert state.enabled_span_groups() == {"step", "layer", "quiet"}
    assert state.pending_span_groups() == frozenset()
    registry.unregister("lib")
    assert state.enabled_span_groups() == {"layer", "quiet"}
    registry.clear()
    assert state.enabled_span_groups() == frozenset()
    assert state.pending_span_groups() == {"default", "layer"}


def test_a_pin_ends_the_spec(lensfast):
    state, registry = lensfast.state, lensfast.SpanRegistry
    registry.register("lib", {"step"})
    state.set_span_group_spec("all,unknown")
    state.set_enabled_span_groups({"pinned"})
    assert state.pending_span_groups() == frozenset()
    registry.register("other", {"layer"})
    state.refresh_enabled_span_groups()
    assert state.enabled_span_groups() == {"pinned"}
    state.set_span_group_spec("all")
    assert state.enabled_span_groups() == {"step", "layer"}


def test_an_unknown_name_is_told_once(lensfast, caplog):
    state, registry = lensfast.state, lensfast.SpanRegistry
    registry.register("lib", {"step"}, {"default": {"step"}})
    state.set_span_group_spec("step,lyaer")
    (message,) = messages(caplog)
    assert "no library registered in this process provides" in message
    assert all(word in message for word in ("lyaer", "step", "default", "lib"))
    assert caplog.records[0].name == "lensfast.state"
    registry.register("more", {"x"})
    state.refresh_enabled_span_groups()
    assert len(messages(caplog)) == 1, "the same condition is not told again"
    registry.register("typo", {"lyaer"})
    registry.unregister("typo")
    assert len(messages(caplog)) == 2, "a new one is"


@pytest.mark.parametrize("spec", ["default", "all", "step"])
def test_an_empty_registry_is_told(lensfast, caplog, spec):
    lensfast.state.set_span_group_spec(spec)
    (message,) = messages(caplog)
    assert "no library has registered any span groups" in message


def test_a_preset_without_members_is_told(lensfast, caplog):
    lensfast.SpanRegistry.register("lib", {"step"}, {"default": {"unregistered"}})
    caplog.clear()
    lensfast.state.set_span_group_spec("default")
    (message,) = messages(caplog)
    assert "resolved to no span groups" in message


@pytest.mark.parametrize("spec", ["", " ", ",", " , ,"])
def test_an_empty_spec_is_silent(lensfast, caplog, spec):
    lensfast.state.set_span_group_spec(spec)
    lensfast.SpanRegistry.register("lib", {"step"})
    assert lensfast.enabled_span_groups() == frozenset()
    assert messages(caplog) == []


@pytest.mark.parametrize("spec", [None, 3, b"default", ["default"]])
def test_a_spec_is_a_str(lensfast, spec):
    with pytest.raises(TypeError, match="spec is a str"):
        lensfast.state.set_span_group_spec(spec)


@pytest.mark.parametrize("groups", [None, 3, "layer", b"layer", "default,step"])
def test_a_pin_is_a_set(lensfast, groups):
    with pytest.raises(TypeError, match="set of group names"):
        lensfast.set_enabled_span_groups(groups)


def test_a_pin_of_unhashable_members(lensfast):
    lensfast.set_enabled_span_groups({"kept"})
    with pytest.raises(TypeError, match="unhashable"):
        lensfast.set_enabled_span_groups([["layer"]])
    assert lensfast.enabled_span_groups() == {"kept"}


def test_a_huge_spec(lensfast, caplog):
    caplog.set_level(logging.ERROR)
    lensfast.SpanRegistry.register("lib", {f"group_{i}" for i in range(5000)})
    lensfast.state.set_span_group_spec(",".join(f"group_{i}" for i in range(0, 10000, 2)))
    assert len(lensfast.enabled_span_groups()) == 2500
    assert len(lensfast.state.pending_span_groups()) == 2500


def test_the_carrier(lensfast):
    assert lensfast.state.get_pp_trace_carrier() is None
    carrier = {"traceparent": "x"}
    lensfast.state.set_pp_trace_carrier(carrier)
    assert lensfast.state.get_pp_trace_carrier() is carrier


# The older class


EIGHT = {"job", "checkpoint", "evaluate", "model_init", "load_checkpoint", "step", "forward_backward", "optimizer"}


def megatron_class(lensfast):
    """As Megatron-LM extends SpanGroup."""

    class MegatronSpanGroup(lensfast.SpanGroup):
        MICROBATCH = "microbatch"
        LAYER = "layer"
        ALL_GROUPS = frozenset(EIGHT | {"microbatch", "layer"})
        _PRESETS = {  # noqa: RUF012
            "default": frozenset({"job", "checkpoint"}),
            "all": ALL_GROUPS,
        }

    return MegatronSpanGroup


def test_the_base_class(lensfast):
    group = lensfast.SpanGroup
    assert group.ALL_GROUPS == EIGHT
    assert group._PRESETS == {"default": {"job", "checkpoint", "evaluate"}, "per_step": EIGHT, "all": EIGHT}
    assert {getattr(group, name.upper()) for name in EIGHT} == EIGHT
    assert group.resolve("default, Step") == {"job", "checkpoint", "evaluate", "step"}
    assert group.resolve(" , ") == frozenset()
    assert isinstance(group.resolve("all"), frozenset)
    with pytest.raises(ValueError, match=r"^Unknown span group or preset 'layer'.*all, checkpoint, default") as caught:
        group.resolve("step,layer")
    assert "load_checkpoint" in str(caught.value)
    with pytest.raises(AttributeError):
        group.resolve(None)


def test_a_subclass_replaces_groups_and_presets(lensfast):
    group = megatron_class(lensfast)
    assert group.resolve("default,microbatch") == {"job", "checkpoint", "microbatch"}
    assert group.resolve("all") == EIGHT | {"microbatch", "layer"}
    with pytest.raises(ValueError, match="Unknown span group or preset 'per_step'"):
        group.resolve("per_step")


# Both generations in one process


def test_setup_with_a_class(lensfast, exporter, caplog):
    config = lensfast.NemoLensConfig(enabled=True, span_groups="default,LAYER", metrics_enabled=False)
    config._span_group_cls = megatron_class(lensfast)
    assert config.resolved_span_groups == {"job", "checkpoint", "layer"}
    lensfast.setup_telemetry(config, span_exporter=exporter)
    assert lensfast.enabled_span_groups() == {"job", "checkpoint", "layer"}


def test_setup_with_a_class_that_does_not_know_a_name(lensfast, exporter):
    config = lensfast.NemoLensConfig(enabled=True, span_groups="default,nobody", metrics_enabled=False)
    config._span_group_cls = megatron_class(lensfast)
    with pytest.raises(ValueError, match="Unknown span group or preset 'nobody'"):
        lensfast.setup_telemetry(config, span_exporter=exporter)
    assert lensfast.handle._INITIALIZED is False


def test_a_class_without_all(lensfast):
    """`all` is then no name, until a library registers groups."""
    body = {"ALL_GROUPS": frozenset({"job"}), "_PRESETS": {}}
    config = lensfast.NemoLensConfig(span_groups="job,all", _span_group_cls=type("G", (lensfast.SpanGroup,), body))
    with pytest.raises(ValueError, match="Unknown span group or preset 'all'"):
        _ = config.resolved_span_groups
    lensfast.SpanRegistry.register("lib", {"layer"})
    assert config.resolved_span_groups == {"job", "layer"}


def test_a_class_and_the_registry_together(lensfast, exporter, caplog):
    lensfast.SpanRegistry.register("nvrx", {"nvrx.ft", "nvrx.job"}, {"default": {"nvrx.job"}})
    config = lensfast.NemoLensConfig(enabled=True, span_groups="default,nvrx.ft", metrics_enabled=False)
    config._span_group_cls = megatron_class(lensfast)
    expected = {"job", "checkpoint", "nvrx.job", "nvrx.ft"}
    assert config.resolved_span_groups == expected
    lensfast.setup_telemetry(config, span_exporter=exporter)
    assert lensfast.enabled_span_groups() == expected
    lensfast.SpanRegistry.register("late", {"late"}, {"default": {"late"}})
    assert lensfast.enabled_span_groups() == expected | {"late"}
    lensfast.SpanRegistry.unregister("nvrx")
    assert lensfast.enabled_span_groups() == {"job", "checkpoint", "late"}
    assert lensfast.state.pending_span_groups() == {"nvrx.ft"}


def test_setup_with_the_registry(lensfast, exporter, caplog):
    """Programs of the older generations have those of the eight groups that no library has taken over."""
    lensfast.SpanRegistry.register("lib", {"checkpoint", "layer"}, {"default": {"layer"}})
    config = lensfast.NemoLensConfig(enabled=True, span_groups="default,typo", metrics_enabled=False)
    expected = {"job", "evaluate", "layer"}
    assert config.resolved_span_groups == expected
    lensfast.setup_telemetry(config, span_exporter=exporter)
    assert lensfast.enabled_span_groups() == expected
    assert lensfast.state.pending_span_groups() == {"typo"}
    assert any("no library registered in this process provides" in message for message in messages(caplog))


def test_setup_with_neither_uses_the_eight_groups(lensfast, exporter, caplog):
    config = lensfast.NemoLensConfig(enabled=True, span_groups="default", metrics_enabled=False)
    assert config.resolved_span_groups == {"job", "checkpoint", "evaluate"}
    lensfast.setup_telemetry(config, span_exporter=exporter)
    assert lensfast.enabled_span_groups() == {"job", "checkpoint", "evaluate"}
    assert [message for message in messages(caplog) if "span group" in message] == []
    lensfast.SpanRegistry.register("late", {"late"}, {"default": {"late"}})
    assert lensfast.enabled_span_groups() == {"job", "checkpoint", "evaluate", "late"}


@pytest.mark.parametrize("said_by", ["argument", "environment"])
def test_setup_of_a_nightly_caller_has_the_registry_only(lensfast, exporter, caplog, monkeypatch, said_by):
    attributes = {"nv.dl.rank": 0} if said_by == "argument" else None
    if said_by == "environment":
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "nv.dl.rank=0")
    config = lensfast.NemoLensConfig(enabled=True, span_groups="default", metrics_enabled=False)
    lensfast.setup_telemetry(config, resource_attributes=attributes, span_exporter=exporter)
    assert lensfast.enabled_span_groups() == frozenset()
    assert any("no library has registered any span groups" in message for message in messages(caplog))
    lensfast.SpanRegistry.register("lib", {"step"}, {"default": {"step"}})
    assert lensfast.enabled_span_groups() == {"step"}


def test_a_spec_set_later_knows_the_group_class(lensfast, exporter):
    config = lensfast.NemoLensConfig(enabled=True, span_groups="job", metrics_enabled=False)
    config._span_group_cls = megatron_class(lensfast)
    lensfast.setup_telemetry(config, span_exporter=exporter)
    lensfast.state.set_span_group_spec("layer")
    assert lensfast.enabled_span_groups() == {"layer"}
    lensfast.set_enabled_span_groups(frozenset())
    lensfast.state.set_span_group_spec("all")
    assert lensfast.enabled_span_groups() == megatron_class(lensfast).ALL_GROUPS


def test_setup_with_neither_and_an_unknown_name_warns(lensfast, exporter, caplog):
    config = lensfast.NemoLensConfig(enabled=True, span_groups="step,layer", metrics_enabled=False)
    lensfast.setup_telemetry(config, span_exporter=exporter)
    assert lensfast.enabled_span_groups() == {"step"}
    assert lensfast.state.pending_span_groups() == {"layer"}
    assert any("no library registered in this process provides" in message for message in messages(caplog))
    with pytest.raises(ValueError, match="Unknown span group or preset 'layer'"):
        config.resolved_span_groups  # noqa: B018
