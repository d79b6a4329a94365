"""Every call site of the inventory, through its consumer's stand-in: what it emits, and what it does not."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import driver
import pytest
from driver import Consumer, differences
from inventory import GENERATIONS, INVENTORY, Row, groups_of, rows
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from conftest import load_backend

CALL_FORMS = set(INVENTORY["call_forms"])
# No consumer has a site of the one, and only a test has the other: both are in test_reach_ins.
WITHOUT_SITE = {"managed_span object used as decorator", "trace_fn on async def"}
# nemo-lens 0.1.0 has no SpanRegistry.
ON_THE_ORIGINAL = [
    "megatron-seed",
    "megatron-2026-03",
    "megatron-main",
    "megatron-mimo",
    "rl-v1",
    "rl-v1.1",
    "gym",
    "nvrx-stable",
]
EACH_GENERATION = pytest.mark.parametrize("generation", GENERATIONS)


class Stop(BaseException):
    """A way to leave, as KeyboardInterrupt is: not a failure."""


# Made anew for each raise, since a traceback grows.
ERRORS = [lambda: ValueError("boom"), lambda: Stop("at once")]


@pytest.fixture
def nemo_lens(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with driver.installed(lensfast) as package:
        yield package


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """nemo-lens 0.1.0 itself: what holds for it shows that the stand-ins and their expectations are right."""
    try:
        version = importlib.metadata.version("nemo-lens")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version != "0.1.0":
        pytest.skip("nemo-lens 0.1.0 is not installed (it needs Python 3.13)")
    start_anew(monkeypatch)
    with driver.original() as package:
        yield package
    start_anew(monkeypatch)


def start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fixture `lensfast` does for a test, where there is no lensfast."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "NEMO_", "MEGATRON_", "SLURM_")):
            monkeypatch.delenv(name)
    load_backend("python")["lensfast.testing"].reset_telemetry()


def call_sites(generation: str) -> list[Row]:
    return [row for row in rows(generation) if row.forms]


def all_groups(consumer: Consumer) -> frozenset[str]:
    """Those that the consumer has on this nemo.lens."""
    older = getattr(consumer.standin, "GymSpanGroup", None)
    return frozenset(older.ALL_GROUPS if older else groups_of(consumer.generation)["groups"])


def gated(consumer: Consumer) -> list[Row]:
    known = all_groups(consumer)
    return [row for row in call_sites(consumer.generation) if row.group in known]


def check(problems: list[str]) -> None:
    assert not problems, f"{len(problems)} differences:\n" + "\n".join(problems)


def check_on_and_off(generation: str) -> None:
    consumer = Consumer(generation)
    every, problems = all_groups(consumer), []
    for row in gated(consumer):
        own = frozenset({row.group})
        for enabled in (own, frozenset[str](), every - own, every):
            consumer.enable(enabled)
            for alternative in (0, 1):
                problems += differences(consumer, row, enabled, alternative)
    check(problems)


def check_exceptions(generation: str) -> None:
    consumer = Consumer(generation)
    problems = []
    for enabled in (all_groups(consumer), frozenset[str]()):
        consumer.enable(enabled)
        for row in gated(consumer):
            for error in ERRORS:
                problems += differences(consumer, row, enabled, error=error())
    check(problems)


def check_preset(generation: str, preset: str) -> None:
    consumer = Consumer(generation, preset)
    older = getattr(consumer.standin, "GymSpanGroup", None)
    enabled = frozenset(older._PRESETS[preset] if older else preset_members(generation, preset))
    problems: list[str] = []
    for row in gated(consumer):
        problems += differences(consumer, row, enabled)
    check(problems)


def preset_members(generation: str, preset: str) -> list[str]:
    definition = groups_of(generation)
    return definition["groups"] if preset == "all" else definition["presets"][preset]


def presets_of(generation: str) -> list[str]:
    """`all` is the library's, where the consumer has none of its own."""
    presets = groups_of(generation)["presets"]
    return [*presets, *({"all"} - presets.keys())] if presets else []


def each_preset(generations: list[str]) -> list[tuple[str, str]]:
    return [(generation, preset) for generation in generations for preset in presets_of(generation)]


@EACH_GENERATION
def test_each_site_emits_its_span_if_its_group_is_on_and_nothing_if_it_is_off(
    nemo_lens: ModuleType, generation: str
) -> None:
    """With its group alone, without any, with all others, with all: name, parent, attributes, scope, kind, links,
    times, and which span was current in the body."""
    check_on_and_off(generation)


@EACH_GENERATION
def test_an_exception_passes_through_each_site_and_is_recorded(nemo_lens: ModuleType, generation: str) -> None:
    check_exceptions(generation)


@pytest.mark.parametrize(("generation", "preset"), each_preset(GENERATIONS))
def test_a_preset_of_the_consumer_enables_its_groups(nemo_lens: ModuleType, generation: str, preset: str) -> None:
    check_preset(generation, preset)


@pytest.mark.parametrize("generation", ON_THE_ORIGINAL)
def test_the_original_emits_the_same_at_each_site(original: ModuleType, generation: str) -> None:
    check_on_and_off(generation)


@pytest.mark.parametrize("generation", ON_THE_ORIGINAL)
def test_the_original_treats_exceptions_alike(original: ModuleType, generation: str) -> None:
    check_exceptions(generation)


@pytest.mark.parametrize(
    ("generation", "preset"), [pair for pair in each_preset(ON_THE_ORIGINAL) if pair != ("gym", "all")]
)
def test_the_original_enables_the_same_by_preset(original: ModuleType, generation: str, preset: str) -> None:
    check_preset(generation, preset)


def test_a_span_without_a_group_is_always_emitted(nemo_lens: ModuleType) -> None:
    ungated = [row for generation in GENERATIONS for row in call_sites(generation) if row.group is None]
    assert [row.name for row in ungated] == ["megatron.my_custom_op"]
    consumer = Consumer("megatron-seed")
    for enabled in (frozenset[str](), all_groups(consumer)):
        consumer.enable(enabled)
        check(differences(consumer, ungated[0], enabled))


def test_the_inventory_is_whole() -> None:
    assert (len(INVENTORY["spans"]), len(INVENTORY["groups"]), len(CALL_FORMS)) == (358, 12, 31)
    used = {form for span in INVENTORY["spans"] for form in span["forms"]}
    assert used == CALL_FORMS - WITHOUT_SITE
    assert [span["name"] for span in INVENTORY["spans"] if not span["forms"]] == ["<FastAPI server span>"]
    for generation in GENERATIONS:
        assert {row.group for row in rows(generation)} - {None} <= set(groups_of(generation)["groups"])


ODD = {
    "password": "hunter2",
    "token": "abc",
    "user.token": "not by this name",
    "key": 5,
    "prompt": ["a list is not made unreadable"],
    "max_tokens": "a longer name",
    "odd.none": None,
    "odd.dict": {"a": 1},
    "odd.bytes": b"x",
    "odd.list_with_none": [1, None],
    "odd.tuple": (1.5, 2.5),
    "odd.empty": [],
}
ODD_ARRIVING = {
    "password": "[REDACTED]",
    "token": "[REDACTED]",
    "user.token": "not by this name",
    "key": 5,
    "prompt": ("a list is not made unreadable",),
    "max_tokens": "a longer name",
    "odd.tuple": (1.5, 2.5),
    "odd.empty": (),
}
TAKES_A_DICT = {
    "with, one-entry dict expansion",
    "with, keyword and dict expansion together",
    "with, tracer keyword and dict expansion",
    "with, tracer as third positional",
    "object built before entry",
    "conditional expression with span_cm",
    "explicit gate then with",
    "gate plus shared null context",
    "linked span",
    "manual start_span",
    "backdated span",
    "span_cm plain",
}


def check_odd_attributes(generation: str) -> None:
    consumer = Consumer(generation)
    consumer.enable(all_groups(consumer))
    # The efficiency wrapper takes none.
    sites = {row.forms[0]: row for row in gated(consumer) if TAKES_A_DICT & {*row.forms} and row.group != "efficiency"}
    for form, row in sites.items():
        consumer.site(row, **ODD)(lambda: None)
        (span,) = consumer.arrived()
        odd = {key: value for key, value in span.attributes.items() if key in ODD}
        assert odd == ODD_ARRIVING, (form, row.name)


@EACH_GENERATION
def test_attributes_are_filtered_and_redacted_at_each_form_of_site(nemo_lens: ModuleType, generation: str) -> None:
    check_odd_attributes(generation)


@pytest.mark.parametrize("generation", ON_THE_ORIGINAL)
def test_the_original_filters_and_redacts_the_same(original: ModuleType, generation: str) -> None:
    check_odd_attributes(generation)


@pytest.mark.parametrize(
    ("standin", "name", "definition"),
    [
        ("megatron", "MegatronSpanGroup", "megatron"),
        ("megatron", "MegatronMainSpanGroup", "megatron@main"),
        ("nemo_rl_v1", "RLSpanGroup", "nemo_rl@v1"),
    ],
)
def test_a_group_class_resolves_as_the_consumer_defines(
    nemo_lens: ModuleType, standin: str, name: str, definition: str
) -> None:
    cls, wanted = getattr(driver.load(standin), name), INVENTORY["groups"][definition]
    assert isinstance(cls.ALL_GROUPS, frozenset)
    assert cls.ALL_GROUPS == set(wanted["groups"])
    for preset, members in wanted["presets"].items():
        assert cls.resolve(preset) == frozenset(members), preset
    one, other = sorted(wanted["groups"])[:2]
    assert cls.resolve(f"{one}, {other.upper()}") == {one, other}
    assert cls.resolve(f"default,{one}") == {one, *wanted["presets"]["default"]}


@pytest.mark.parametrize(
    ("standin", "namespace", "definition"),
    [
        ("megatron_facade", "megatron", "megatron@facade"),
        ("registry_example", "mylib", "mylib"),
        ("nemo_rl_v2", "nemo_rl", "nemo_rl"),
        ("nemo_gym", "nemo_gym", "nemo_gym"),
        ("nvrx_registry", "nvrx", "nvrx"),
    ],
)
def test_a_registered_library_resolves_as_it_defines(
    nemo_lens: ModuleType, standin: str, namespace: str, definition: str
) -> None:
    wanted = INVENTORY["groups"][definition]
    driver.load(standin)
    registry = nemo_lens.SpanRegistry
    assert registry.namespaces() == [namespace]
    assert registry.groups() == set(wanted["groups"])
    presets = {name: frozenset(members) for name, members in wanted["presets"].items()}
    assert registry.presets() == presets | {"all": frozenset(wanted["groups"])}
    enabled, pending = registry.resolve("default,nobody_has_this")
    assert (enabled, pending) == (
        presets.get("default", frozenset()),
        {"nobody_has_this"} | ({"default"} - presets.keys()),
    )


def test_gym_s_first_groups_are_a_class(original: ModuleType) -> None:
    cls, wanted = driver.load("nemo_gym").GymSpanGroup, INVENTORY["groups"]["nemo_gym@v1"]
    assert cls.ALL_GROUPS == set(wanted["groups"])
    assert {preset: cls.resolve(preset) for preset in wanted["presets"]} == {
        preset: frozenset(members) for preset, members in wanted["presets"].items()
    }


def test_a_preset_may_name_what_another_library_registers_later(
    nemo_lens: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    rl, megatron = (INVENTORY["groups"][f"{name}@registry_doc"] for name in ("nemo_rl", "megatron"))
    registry, state = nemo_lens.SpanRegistry, nemo_lens.state
    registry.register("nemo_rl", rl["groups"], rl["presets"])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    state.set_span_group_spec("default")
    assert state.enabled_span_groups() == {"rollout"}
    registry.register("megatron", groups=megatron["groups"], presets=megatron["presets"])
    assert state.enabled_span_groups() == {"rollout", "step", "inference"}


def test_the_libraries_of_one_job_share_its_spec(nemo_lens: ModuleType) -> None:
    """RL trains with Megatron under the resiliency extension; the presets of one name unite."""
    driver.load("megatron_facade")
    driver.load("nvrx_registry")
    consumer = Consumer("rl-v2", "per_step")
    wanted = {
        group
        for definition in ("megatron@facade", "nvrx", "nemo_rl")
        for group in INVENTORY["groups"][definition]["presets"]["per_step"]
    }
    assert nemo_lens.enabled_span_groups() == wanted
    assert not nemo_lens.is_span_group_enabled("per_prompt")
    driver.load("nemo_gym")
    assert nemo_lens.enabled_span_groups() == wanted
    consumer.standin.shut_down(consumer.handle)
    assert nemo_lens.enabled_span_groups() == frozenset()


def test_the_checkpoint_worker_takes_its_groups_as_resolved(nemo_lens: ModuleType) -> None:
    launcher = Consumer("nvrx-stable", "job,checkpoint")
    given = pickle.loads(pickle.dumps(launcher.standin.bootstrap("job,checkpoint")))
    assert given == {"span_groups": "job,checkpoint", "resolved": ["job", "checkpoint"]}
    nemo_lens.testing.reset_telemetry()
    given["resolved"] = ["checkpoint"]
    launcher.exporter = InMemorySpanExporter()
    launcher.handle = launcher.standin.initialize_worker(given, span_exporter=launcher.exporter)
    problems = []
    for row in call_sites("nvrx-stable"):
        problems += differences(launcher, row, frozenset({"checkpoint"}))
    check(problems)


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """No nemo.lens, and somebody else's provider, which is to see nothing."""
    start_anew(monkeypatch)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with driver.absent():
        yield exporter
    start_anew(monkeypatch)


@pytest.mark.parametrize("generation", [g for g in GENERATIONS if g not in {"rl-v2", "registry-example"}])
def test_without_nemo_lens_the_fallbacks_act(nothing: InMemorySpanExporter, generation: str) -> None:
    consumer = Consumer(generation)
    lens = getattr(consumer.standin, "LENS", None) or driver.load("resolved")
    assert lens.is_span_group_enabled("job") is False

    def function() -> None:
        """Traced."""

    assert lens.trace_fn("job", "name")(function) is function
    with lens.managed_span("job", "name", **{"a.b": 1}) as span, lens.span_cm("name", record_exception=False) as other:
        assert span is None
        assert other is None
    lens.safe_set_span_attributes(None, {"a": 1})
    assert consumer.handle is None or not consumer.handle.is_exporting
    for row in call_sites(generation):
        outcome, _ = consumer.run(row)
        assert not outcome.is_valid, row.label
        for error in (make() for make in ERRORS):
            outcome, _ = consumer.run(row, error=error)
            assert outcome is error, row.label
    assert nothing.get_finished_spans() == ()


@pytest.mark.parametrize("standin", ["nemo_rl_v2", "registry_example"])
def test_a_hard_dependency_says_what_is_missing(nothing: InMemorySpanExporter, standin: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="nemo"):
        driver.load(standin)


def test_without_nemo_lens_megatron_s_groups_say_what_to_install(nothing: InMemorySpanExporter) -> None:
    with pytest.raises(RuntimeError, match="nemo-lens"):
        driver.load("megatron").MegatronSpanGroup.resolve("default")


@pytest.mark.parametrize("theirs", ["lensfast", "its fallbacks"])
def test_the_consumers_no_ops_have_the_signatures(nemo_lens: ModuleType, theirs: str) -> None:
    stubs = driver.load("fallbacks")
    from nemo.lens import fallbacks

    real: dict[str, Any] = vars(nemo_lens) if theirs == "lensfast" else vars(fallbacks)
    names = [name for name, value in vars(stubs).items() if getattr(value, "__module__", None) == stubs.__name__]
    assert len(names) == 5
    for name in names:
        wanted = inspect.signature(getattr(stubs, name)).parameters.values()
        found = inspect.signature(real[name]).parameters.values()
        assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in wanted], name
        defaults = [(p.default, q.default) for p, q in zip(found, wanted, strict=True) if p.name != "redact_keys"]
        assert all(a is b for a, b in defaults), name
