"""The gate: which groups are enabled, group handles, and the span of a disabled site."""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
import threading
from contextlib import ExitStack

import pytest


def test_nothing_is_enabled_at_first(lensfast):
    assert lensfast.enabled_span_groups() == frozenset()
    assert lensfast.is_span_group_enabled("job") is False


def test_enabled_names_and_only_they(lensfast):
    lensfast.set_enabled_span_groups({"layer", "step"})
    assert lensfast.is_span_group_enabled("layer") is True
    assert lensfast.is_span_group_enabled("step") is True
    assert lensfast.is_span_group_enabled("Layer") is False
    assert lensfast.is_span_group_enabled("") is False
    assert lensfast.enabled_span_groups() == frozenset({"layer", "step"})
    lensfast.set_enabled_span_groups(frozenset({"step", "job"}))
    assert [lensfast.is_span_group_enabled(name) for name in ("layer", "step", "job")] == [False, True, True]


def test_a_name_built_at_run_time_is_found(lensfast):
    """Call sites have interned literals; this string is equal to one and is another object."""
    lensfast.set_enabled_span_groups({"layer"})
    assert lensfast.is_span_group_enabled("".join(["la", "yer"]))


def test_the_set_is_copied(lensfast):
    groups = {"layer"}
    lensfast.set_enabled_span_groups(groups)
    groups.add("step")
    assert not lensfast.is_span_group_enabled("step")


def test_any_number_of_groups(lensfast):
    names = [f"group_{i}" for i in range(3000)]
    lensfast.set_enabled_span_groups(names[::3])
    assert [lensfast.is_span_group_enabled(name) for name in names] == [i % 3 == 0 for i in range(3000)]
    handles = [lensfast.span_group(name) for name in names]
    assert [bool(handle) for handle in handles] == [i % 3 == 0 for i in range(3000)]
    lensfast.set_enabled_span_groups(frozenset())
    assert not any(lensfast.is_span_group_enabled(name) for name in names)
    assert not any(handles)


class Group(str, enum.Enum):
    LAYER = "layer"
    STEP = "step"


class Renamed(str):
    """Equal to its value but hashed apart from it, so it is in no set that holds the plain name."""

    def __hash__(self):
        return 0

    __eq__ = str.__eq__


@pytest.mark.parametrize("odd", [None, 0, 1.5, b"layer", ("layer",), frozenset({"layer"}), object(), {"layer"}])
def test_odd_groups_are_not_enabled(lensfast, odd):
    """As `odd in frozenset({"layer"})` says."""
    lensfast.set_enabled_span_groups({"layer"})
    assert lensfast.is_span_group_enabled(odd) is False
    assert lensfast.managed_span(odd, "name").__enter__() is None


@pytest.mark.parametrize("unhashable", [[], {}, ["layer"], bytearray(b"layer")])
def test_unhashable_groups_raise(lensfast, unhashable):
    with pytest.raises(TypeError, match="unhashable"):
        lensfast.is_span_group_enabled(unhashable)
    with pytest.raises(TypeError, match="unhashable"):
        lensfast.managed_span(unhashable, "name")


def test_members_that_are_not_names(lensfast):
    lensfast.set_enabled_span_groups({1, None, ("a",), "layer"})
    assert lensfast.is_span_group_enabled(1)
    assert lensfast.is_span_group_enabled(True)
    assert lensfast.is_span_group_enabled(None)
    assert lensfast.is_span_group_enabled(("a",))
    assert not lensfast.is_span_group_enabled(2)


def test_str_subclasses(lensfast):
    lensfast.set_enabled_span_groups({"layer"})
    assert lensfast.is_span_group_enabled(Group.LAYER)
    assert not lensfast.is_span_group_enabled(Group.STEP)
    assert not lensfast.is_span_group_enabled(Renamed("layer"))
    lensfast.set_enabled_span_groups({Group.STEP})
    assert lensfast.is_span_group_enabled("step")
    assert lensfast.span_group("step")
    assert lensfast.span_group(Group.STEP) is lensfast.span_group("step")
    assert type(lensfast.span_group(Group.STEP).name) is str


def test_huge_and_non_ascii_names(lensfast):
    names = ["x" * 1_000_000, "größe", "层", "\U0001f525", "a\0b", "\ud800"]
    lensfast.set_enabled_span_groups(names)
    for name in names:
        assert lensfast.is_span_group_enabled(name)
        assert lensfast.span_group(name).enabled
        assert not lensfast.is_span_group_enabled(name + "x")


def test_is_span_group_enabled_signature(lensfast):
    assert str(inspect.signature(lensfast.is_span_group_enabled)).startswith("(group")
    assert lensfast.is_span_group_enabled(group="layer") is False
    assert lensfast.is_span_group_enabled.__module__ == "lensfast.state"
    for arguments, keywords in [((), {}), (("a", "b"), {}), ((), {"name": "a"}), (("a",), {"group": "a"})]:
        with pytest.raises(TypeError, match="is_span_group_enabled"):
            lensfast.is_span_group_enabled(*arguments, **keywords)


# Group handles


def test_a_handle_follows_every_change(lensfast):
    layer = lensfast.span_group("layer")
    assert (layer.name, layer.enabled, bool(layer)) == ("layer", False, False)
    lensfast.set_enabled_span_groups({"layer"})
    assert (layer.enabled, bool(layer)) == (True, True)
    assert bool(lensfast.span_group("made_later")) is False
    lensfast.set_enabled_span_groups({"made_later"})
    assert bool(layer) is False
    lensfast.SpanRegistry.register("lib", {"late"})
    late = lensfast.span_group("late")
    lensfast.state.set_span_group_spec("layer,late")
    assert (bool(layer), bool(late)) == (False, True)
    lensfast.SpanRegistry.register("other", {"layer"})
    assert (bool(layer), bool(late)) == (True, True)


def test_a_handle_taken_while_the_group_is_on(lensfast):
    lensfast.set_enabled_span_groups({"taken_while_on"})
    assert lensfast.span_group("taken_while_on").enabled


def test_one_handle_per_name(lensfast):
    handle = lensfast.span_group("layer")
    assert lensfast.span_group("".join(["lay", "er"])) is handle
    assert lensfast.state.span_group("layer") is lensfast.helpers.span_group("layer") is handle
    assert pickle.loads(pickle.dumps(handle)) is handle
    assert copy.copy(handle) is handle
    assert copy.deepcopy({"a": handle})["a"] is handle
    assert repr(handle) == "<span group 'layer': disabled>"
    lensfast.set_enabled_span_groups({"layer"})
    assert repr(handle) == "<span group 'layer': enabled>"


def test_a_handle_is_read_only(lensfast):
    handle = lensfast.span_group("layer")
    for attribute, value in [("name", "x"), ("enabled", True), ("other", 1)]:
        with pytest.raises(AttributeError):
            setattr(handle, attribute, value)
    with pytest.raises(TypeError, match="GroupHandle"):
        type(handle)()


@pytest.mark.parametrize("wrong", [None, 3, b"layer", ["layer"]])
def test_span_group_wants_a_name(lensfast, wrong):
    with pytest.raises(TypeError, match=r"span_group\(\) takes a group name \(str\), not"):
        lensfast.span_group(wrong)


def test_span_group_wants_a_non_empty_name(lensfast):
    with pytest.raises(ValueError, match="non-empty"):
        lensfast.span_group("")


# The span of a disabled site


def disabled_spans(lensfast):
    lensfast.set_enabled_span_groups({"on"})
    handle = lensfast.span_group("off")
    return [
        lensfast.managed_span("off", "name"),
        lensfast.managed_span("off", "name", None, iteration=3),
        lensfast.managed_span("off", name="name", **{"a.b": 1}),
        lensfast.managed_span(group="off", name="name", tracer=object()),
        handle.span("name"),
        handle.span("name", None, a=1, group="an attribute here"),
        handle.span(name="name", span_kind=None),
    ]


def test_disabled_spans_are_one_object(lensfast):
    spans = disabled_spans(lensfast)
    assert all(span is spans[0] for span in spans)
    assert pickle.loads(pickle.dumps(spans[0])) is spans[0]
    assert copy.deepcopy(spans[0]) is spans[0]
    assert repr(spans[0]) == "<disabled span>"


def test_a_disabled_span_in_every_way_of_entering(lensfast):
    span = lensfast.managed_span("off", "name")
    with span as entered:
        assert entered is None
        with span as again, span:
            assert again is None
    with ExitStack() as stack:
        assert stack.enter_context(span) is None
        stack.push(span)
    kind = type(span)
    assert kind.__enter__(span) is None
    assert kind.__exit__(span, None, None, None) is None
    assert span.__enter__() is None
    assert span.__exit__(None, None, None) is None


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), StopIteration(3), GeneratorExit()])
def test_a_disabled_span_lets_exceptions_pass(lensfast, error):
    with pytest.raises(type(error)) as caught, lensfast.managed_span("off", "name"):
        raise error
    assert caught.value is error


def test_a_disabled_span_looks_at_no_attribute(lensfast):
    class Untouchable:
        def __getattribute__(self, name):
            raise AssertionError(name)

    with lensfast.managed_span("off", "name", value=Untouchable()):
        pass


def test_a_managed_span_refuses_to_decorate(lensfast):
    for groups in (frozenset(), {"layer"}):
        lensfast.set_enabled_span_groups(groups)
        for manager in (lensfast.managed_span("layer", "name"), lensfast.span_group("layer").span("name")):
            with pytest.raises(TypeError, match=r"trace_fn\(group, name\)"):
                manager(lambda: None)


def wrong_calls(lensfast):
    span = lensfast.span_group("layer").span
    managed_span = lensfast.managed_span
    return [
        (lambda: managed_span(), "missing"),
        (lambda: managed_span("layer"), "missing 1 required positional argument: 'name'"),
        (lambda: managed_span(name="n"), "missing 1 required positional argument: 'group'"),
        (lambda: managed_span("layer", "n", None, "too many"), "positional argument"),
        (lambda: managed_span("layer", "n", group="g"), "multiple values for argument 'group'"),
        (lambda: managed_span("layer", "n", name="m"), "multiple values for argument 'name'"),
        (lambda: managed_span("layer", "n", None, tracer=None), "multiple values for argument 'tracer'"),
        (lambda: managed_span("layer", "n", **{"".join(["na", "me"]): 1}), "multiple values for argument 'name'"),
        (lambda: span(), "missing 1 required positional argument: 'name'"),
        (lambda: span("n", None, 3), "positional argument"),
        (lambda: span("n", name="m"), "multiple values for argument 'name'"),
        (lambda: span("n", None, tracer=None), "multiple values for argument 'tracer'"),
    ]


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("groups", [frozenset(), frozenset({"layer"})], ids=["off", "on"])
def test_wrong_calls_raise_whether_on_or_off(lensfast, groups, number):
    lensfast.set_enabled_span_groups(groups)
    call, message = wrong_calls(lensfast)[number]
    with pytest.raises(TypeError, match=message):
        call()


def test_managed_span_signature_and_pickle(lensfast):
    signature = inspect.signature(lensfast.managed_span)
    assert list(signature.parameters) == ["group", "name", "tracer", "attributes"]
    assert signature.parameters["tracer"].default is None
    assert signature.parameters["attributes"].kind is inspect.Parameter.VAR_KEYWORD
    assert lensfast.managed_span.__module__ == "lensfast.helpers"
    assert lensfast.managed_span.__name__ == lensfast.managed_span.__qualname__ == "managed_span"
    assert lensfast.managed_span.__doc__
    assert pickle.loads(pickle.dumps(lensfast.managed_span)) is lensfast.managed_span
    assert copy.deepcopy(lensfast.managed_span) is lensfast.managed_span


# Threads


def test_switching_while_other_threads_read(lensfast):
    """A group that is in both sets is never seen as off; one that is in neither, never as on."""
    wrong = []
    stop = threading.Event()
    always, never = lensfast.span_group("always"), lensfast.span_group("never")

    def read():
        while not stop.is_set():
            if not always or not lensfast.is_span_group_enabled("always"):
                wrong.append("always")
            if never or lensfast.is_span_group_enabled("never"):
                wrong.append("never")

    lensfast.set_enabled_span_groups({"always"})
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(300):
        lensfast.set_enabled_span_groups({"always", f"switched_{i}"})
        lensfast.set_enabled_span_groups({"always"})
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_handles_made_by_many_threads_are_one(lensfast):
    names = [f"raced_{i}" for i in range(200)]
    start = threading.Barrier(4)
    found = [[] for _ in range(4)]

    def take(into):
        start.wait()
        into.extend(lensfast.span_group(name) for name in names)

    threads = [threading.Thread(target=take, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handles in zip(*found, strict=True):
        assert len({id(handle) for handle in handles}) == 1
