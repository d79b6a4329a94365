"""install() and accelerate(): programs that import nemo.lens run on lensfast."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from conftest import ROOT, take_modules

try:
    NEMO_LENS = importlib.metadata.version("nemo-lens")
except importlib.metadata.PackageNotFoundError:
    NEMO_LENS = ""
needs_nemo_lens = pytest.mark.skipif(
    NEMO_LENS != "0.1.0", reason="nemo-lens 0.1.0 is not installed here (it needs Python 3.13)"
)


@pytest.fixture
def nemo(lensfast: ModuleType) -> Iterator[ModuleType]:
    """lensfast, with nothing called nemo imported, and nothing installed afterwards."""
    before = take_modules("nemo")
    yield lensfast
    lensfast.uninstall()
    take_modules("nemo")
    sys.modules.update(before)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory at the front of the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(root: Path, **files: str) -> None:
    """Write modules: `nemo__lens__state="..."` is nemo/lens/state.py, a name that ends with `__` a package."""
    for name, text in files.items():
        path = root / (
            name[:-2].replace("__", "/") + "/__init__.py" if name.endswith("__") else f"{name.replace('__', '/')}.py"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_consumer(root: Path) -> None:
    write(
        root,
        consumer="""
from nemo.lens.helpers import managed_span as _otel_managed_span, trace_fn, span_cm
from nemo.lens.state import is_span_group_enabled as _otel_sg_enabled
import nemo.lens
import nemo.lens.state as lens_state
from nemo.lens import NemoLensConfig, SpanGroup

@trace_fn("step", "consumer.step")
def step(x):
    return x + 1
""",
    )


def test_the_modules_are_lensfasts_own(nemo: ModuleType) -> None:
    nemo.install()
    lens = importlib.import_module("nemo.lens")
    assert lens is nemo
    for name in ("helpers", "state", "handle", "config", "groups", "providers", "strategies", "semconv", "contrib.ray"):
        module = importlib.import_module(f"nemo.lens.{name}")
        assert module is importlib.import_module(f"lensfast.{name}")
        assert module.__spec__ is not None
        assert module.__spec__.name == f"lensfast.{name}"
    assert importlib.import_module("nemo").lens is nemo


def test_from_import_of_a_submodule_and_of_a_name(nemo: ModuleType) -> None:
    nemo.install()
    namespace: dict[str, object] = {}
    exec("from nemo.lens import helpers, SpanRegistry\nfrom nemo.lens.state import is_span_group_enabled", namespace)
    assert namespace["helpers"] is nemo.helpers
    assert namespace["SpanRegistry"] is nemo.SpanRegistry
    assert namespace["is_span_group_enabled"] is nemo.is_span_group_enabled


@pytest.mark.parametrize(
    "statement", ["from nemo.lens import nothing", "from nemo.lens.helpers import nothing", "import nemo.lens.nothing"]
)
def test_what_does_not_exist_is_an_import_error(nemo: ModuleType, statement: str) -> None:
    nemo.install()
    with pytest.raises(ImportError):
        exec(statement)


def test_functions_say_that_they_are_nemo_lenss(nemo: ModuleType) -> None:
    nemo.install()
    importlib.import_module("nemo.lens")
    assert nemo.managed_span.__module__ == "nemo.lens.helpers"
    assert nemo.safe_set_span_attributes.__module__ == "nemo.lens.helpers"
    assert nemo.is_span_group_enabled.__module__ == "nemo.lens.state"
    assert pickle.loads(pickle.dumps(nemo.managed_span)) is nemo.managed_span
    assert nemo.NemoLensConfig.__module__ == "lensfast.config"
    nemo.uninstall()
    assert nemo.managed_span.__module__ == "lensfast.helpers"
    assert nemo.is_span_group_enabled.__module__ == "lensfast.state"


def test_it_is_idempotent_and_reversible(nemo: ModuleType) -> None:
    finders = list(sys.meta_path)
    nemo.install()
    nemo.install()
    assert len(sys.meta_path) == len(finders) + 2
    importlib.import_module("nemo.lens.helpers")
    nemo.uninstall()
    nemo.uninstall()
    assert sys.meta_path == finders
    assert not any(name == "nemo" or name.startswith("nemo.") for name in sys.modules if not NEMO_LENS)
    assert "nemo.lens" not in sys.modules
    if not NEMO_LENS:
        assert importlib.util.find_spec("nemo") is None
    nemo.install()
    assert importlib.import_module("nemo.lens") is nemo


def test_one_log_line_says_what_was_done(nemo: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lensfast"):
        nemo.install()
        nemo.install()
    (record,) = caplog.records
    assert "nemo.lens is lensfast" in record.getMessage()
    assert nemo.__version__ in record.getMessage()
    assert (f"nemo-lens {NEMO_LENS}" if NEMO_LENS else "nemo-lens is not installed") in record.getMessage()


def test_somebody_elses_nemo_package_keeps_its_place(nemo: ModuleType, site: Path) -> None:
    write(site, nemo__="__version__ = '2.9'\n", nemo__collections__="name = 'collections'\n", nemo__core="x = 5\n")
    nemo.install()
    foreign = importlib.import_module("nemo")
    assert foreign.__version__ == "2.9"
    assert foreign.__file__ == str(site / "nemo" / "__init__.py")
    assert importlib.import_module("nemo.lens.helpers") is nemo.helpers
    assert importlib.import_module("nemo.collections").name == "collections"
    nemo.uninstall()
    assert sys.modules["nemo"] is foreign
    assert not hasattr(foreign, "lens")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nemo.lens")
    assert importlib.import_module("nemo.core").x == 5


def test_a_namespace_package_nemo_keeps_its_portions(nemo: ModuleType, site: Path) -> None:
    write(site, one__nemo__run="name = 'run'\n", two__nemo__eval="name = 'eval'\n")
    sys.path[:0] = [str(site / "one"), str(site / "two")]
    if NEMO_LENS:
        pytest.skip("the nemo/__init__.py of the nemo-lens installed here hides namespace portions")
    nemo.install()
    assert importlib.import_module("nemo.lens") is nemo
    assert importlib.import_module("nemo.run").name == "run"
    assert importlib.import_module("nemo.eval").name == "eval"


def test_submodules_that_lensfast_lacks_come_from_nemo_lens(nemo: ModuleType, site: Path) -> None:
    write(
        site,
        nemo__="",
        nemo__lens__="raise RuntimeError('the original is not to be imported')\n",
        nemo__lens__helpers="raise RuntimeError('the original is not to be imported')\n",
        nemo__lens__future="from nemo.lens.helpers import managed_span\nfrom . import state\nvalue = 7\n",
        nemo__lens__contrib__="",
        nemo__lens__contrib__jax="value = 8\n",
        nemo__lens__lab__="",
        nemo__lens__lab__deep="value = 9\n",
    )
    nemo.install()
    future = importlib.import_module("nemo.lens.future")
    assert future.value == 7
    assert future.managed_span is nemo.managed_span
    assert future.state is nemo.state
    assert importlib.import_module("nemo.lens.contrib.jax").value == 8
    assert importlib.import_module("nemo.lens.lab.deep").value == 9
    assert nemo.future is future
    nemo.uninstall()
    assert not hasattr(nemo, "future")
    assert not hasattr(nemo, "lab")
    assert not hasattr(importlib.import_module("lensfast.contrib"), "jax")


def test_spans_of_an_unchanged_consumer(nemo: ModuleType, exporter: InMemorySpanExporter, site: Path) -> None:
    write_consumer(site)
    nemo.install()
    consumer = importlib.import_module("consumer")
    try:
        with consumer._otel_managed_span("step", "off") as span:
            assert span is None
        consumer.lens_state.set_enabled_span_groups(frozenset({"step"}))
        assert consumer._otel_sg_enabled("step")
        with consumer._otel_managed_span("step", "outer", **{"megatron.iteration": 3}):
            assert consumer.step(1) == 2
    finally:
        del sys.modules["consumer"]
    assert [(span.name, dict(span.attributes)) for span in exporter.get_finished_spans()] == [
        ("consumer.step", {}),
        ("outer", {"megatron.iteration": 3}),
    ]


def test_assigning_the_enabled_set_moves_the_gate(nemo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nemo.install()
    state = importlib.import_module("nemo.lens.state")
    handle = nemo.span_group("layer")
    with monkeypatch.context() as patch:
        patch.setattr("nemo.lens.state._ENABLED_GROUPS", frozenset({"layer"}))
        assert state.is_span_group_enabled("layer")
        assert handle
        assert state.enabled_span_groups() == frozenset({"layer"})
    assert not state.is_span_group_enabled("layer")
    assert not handle
    with mock.patch.object(state, "_ENABLED_GROUPS", frozenset({"step"})):
        assert state.is_span_group_enabled("step")
    assert state._ENABLED_GROUPS == frozenset()
    assert not state.is_span_group_enabled("step")
    nemo.set_enabled_span_groups({"job"})
    assert state._ENABLED_GROUPS == frozenset({"job"})
    with pytest.raises(TypeError):
        state._ENABLED_GROUPS = "job"


def test_an_assigned_set_leaves_the_spec_in_force(lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lensfast.SpanRegistry.register("mylib", {"layer", "step"})
    lensfast.state.set_span_group_spec("layer")
    with monkeypatch.context() as patch:
        patch.setattr(lensfast.state, "_ENABLED_GROUPS", frozenset({"step"}))
        assert lensfast.enabled_span_groups() == {"step"}
    assert lensfast.enabled_span_groups() == {"layer"}
    lensfast.SpanRegistry.unregister("mylib")
    assert lensfast.enabled_span_groups() == frozenset()


def test_the_providers_a_handle_sees_can_be_patched(nemo: ModuleType) -> None:
    nemo.install()
    handle_module = importlib.import_module("nemo.lens.handle")
    handle = handle_module.TelemetryHandle(trace.get_tracer("x"), None, True)
    tracer_provider, meter_provider = mock.Mock(), mock.Mock()
    with (
        mock.patch("nemo.lens.handle.trace.get_tracer_provider", return_value=tracer_provider),
        mock.patch("nemo.lens.handle.metrics.get_meter_provider", return_value=meter_provider),
    ):
        handle.shutdown(timeout_ms=1234)
    tracer_provider.force_flush.assert_called_once_with(timeout_millis=1234)
    tracer_provider.shutdown.assert_called_once_with()
    meter_provider.shutdown.assert_called_once_with()
    with mock.patch("nemo.lens.handle.metrics") as metrics:
        handle_module.TelemetryHandle(trace.get_tracer("x"), None, True).shutdown()
    metrics.get_meter_provider.return_value.shutdown.assert_called_once_with()


def test_install_after_nemo_lens_was_imported(nemo: ModuleType, exporter: InMemorySpanExporter, site: Path) -> None:
    """With a nemo.lens of the same shape as the published one."""
    write(
        site,
        nemo__="",
        nemo__lens__="""
from nemo.lens.helpers import managed_span, trace_fn
from nemo.lens.state import *
from .config import NemoLensConfig
from .groups import SpanGroup
""",
        nemo__lens__state="""
_ENABLED_GROUPS = frozenset()
_PP_TRACE_CARRIER = {"traceparent": "x"}
def set_enabled_span_groups(groups):
    global _ENABLED_GROUPS
    _ENABLED_GROUPS = groups
def is_span_group_enabled(group):
    return group in _ENABLED_GROUPS
""",
        nemo__lens__helpers="""
from nemo.lens.state import is_span_group_enabled
def managed_span(group, name): raise AssertionError
def span_cm(name): raise AssertionError
def trace_fn(group, name):
    def decorate(function):
        return lambda *args: (is_span_group_enabled(group), function(*args))
    return decorate
""",
        nemo__lens__config="class NemoLensConfig: enabled = False\n",
        nemo__lens__groups="class SpanGroup: JOB = 'job'\n",
        nemo__lens__handle="_INITIALIZED = True\n",
        nemo__lens__strategies="def mine(config, rank, world_size): return rank == 3\n_REGISTRY = {'mine': mine}\n",
    )
    write_consumer(site)
    consumer = importlib.import_module("consumer")
    try:
        original = sys.modules["nemo.lens"]
        importlib.import_module("nemo.lens.handle")
        strategies = importlib.import_module("nemo.lens.strategies")
        strategies.mine.__module__ = "consumer"
        own_state = consumer.lens_state
        own_state.set_enabled_span_groups(frozenset({"step"}))
        own_managed_span = consumer._otel_managed_span

        nemo.install()
        assert consumer._otel_managed_span is nemo.managed_span
        assert consumer._otel_sg_enabled is nemo.is_span_group_enabled
        assert consumer.nemo.lens is nemo
        assert consumer.lens_state is nemo.state
        assert consumer.NemoLensConfig is nemo.NemoLensConfig
        assert consumer.SpanGroup is nemo.SpanGroup
        # What had been set up counts.
        assert nemo.enabled_span_groups() == {"step"}
        assert nemo.handle._INITIALIZED
        assert nemo.state.get_pp_trace_carrier() == {"traceparent": "x"}
        assert "mine" in nemo.registered_strategies()
        # A function decorated before obeys the gate from now on.
        assert consumer.step(1) == (True, 2)
        nemo.set_enabled_span_groups(frozenset())
        assert consumer.step(1) == (False, 2)
        nemo.set_enabled_span_groups({"job"})

        nemo.uninstall()
        assert sys.modules["nemo.lens"] is original
        assert consumer.nemo.lens is original
        assert consumer._otel_managed_span is own_managed_span
        assert consumer.lens_state is own_state
        assert own_state._ENABLED_GROUPS == {"job"}
        assert consumer.NemoLensConfig is original.NemoLensConfig
    finally:
        if "mine" in nemo.registered_strategies():
            nemo.unregister_export_strategy("mine")
        sys.modules.pop("consumer", None)


def test_modules_that_import_lazily_are_not_woken(nemo: ModuleType, site: Path) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"asked for {name}")

    sys.modules["lazy_for_test"] = Lazy("lazy_for_test")
    sys.modules["odd_for_test"] = object()  # type: ignore[assignment]
    try:
        write(
            site,
            nemo__="",
            nemo__lens__="",
            nemo__lens__state="_ENABLED_GROUPS = frozenset()\ndef set_enabled_span_groups(groups): pass\n",
        )
        importlib.import_module("nemo.lens.state")
        nemo.install()
    finally:
        del sys.modules["lazy_for_test"], sys.modules["odd_for_test"]


def test_a_config_made_before_serves_set_up(nemo: ModuleType) -> None:
    class NemoLensConfig(nemo.NemoLensConfig):  # type: ignore[misc]
        pass

    theirs = type("NemoLensConfig", (), {})()
    for name, value in vars(NemoLensConfig(enabled=True, exporter="console", metrics_enabled=False)).items():
        setattr(theirs, name, value)
    memory = InMemorySpanExporter()
    handle = nemo.setup_telemetry(theirs, span_exporter=memory)
    assert handle.is_exporting
    assert theirs.run_id
    handle.shutdown()


def test_a_star_import_brings_no_names_but_the_api(nemo: ModuleType) -> None:
    nemo.install()
    namespace: dict[str, object] = {}
    exec("from nemo.lens import *", namespace)
    assert "managed_span" in namespace
    assert not {"accelerate", "backend", "install", "uninstall"} & namespace.keys()


def test_a_finder_of_the_old_kind_is_passed_over(nemo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def find_module(self, name: str, path: object = None) -> None:
            return None

    monkeypatch.setattr(sys, "meta_path", [Old(), *sys.meta_path, Old()])
    for start in (nemo.install, nemo.accelerate):
        start()
        with pytest.raises(ImportError):
            importlib.import_module("nemo.lens.nothing")
        nemo.uninstall()
        take_modules("nemo")


def test_what_only_looks_like_a_module_is_left_alone(nemo: ModuleType, site: Path) -> None:
    class LazyDict(ModuleType):
        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            raise ImportError("a lazy member could not be imported")

    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            return ModuleType

    class Unbound:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("an unbound proxy")

    odd = {"odd_lazy": LazyDict("odd_lazy"), "odd_proxy": Proxy(), "odd_unbound": Unbound(), "odd_none": None}
    write(
        site,
        nemo__="",
        nemo__lens__="",
        nemo__lens__state="_ENABLED_GROUPS = frozenset()\ndef set_enabled_span_groups(groups): pass\n",
    )
    original = importlib.import_module("nemo.lens.state")
    sys.modules.update(odd)  # type: ignore[arg-type]
    try:
        nemo.install()
        assert sys.modules["nemo.lens.state"] is nemo.state
        nemo.uninstall()
        assert sys.modules["nemo.lens.state"] is original
    finally:
        for name in odd:
            del sys.modules[name]


def test_a_blocked_import_is_blocked_again_afterwards(nemo: ModuleType) -> None:
    """None in sys.modules makes an import fail."""
    sys.modules["nemo.lens"] = sys.modules["nemo.lens.contrib"] = None  # type: ignore[assignment]
    nemo.install()
    assert importlib.import_module("nemo.lens.contrib.ray") is importlib.import_module("lensfast.contrib.ray")
    nemo.uninstall()
    assert sys.modules["nemo.lens"] is None
    assert sys.modules["nemo.lens.contrib"] is None
    nemo.accelerate()
    nemo.uninstall()


def test_an_install_that_fails_leaves_everything_as_it_was(
    nemo: ModuleType, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(site, nemo__="", nemo__lens__="", nemo__lens__helpers="def managed_span(): pass\n")
    original = importlib.import_module("nemo.lens.helpers")
    finders = list(sys.meta_path)
    monkeypatch.setattr(nemo._install, "_take_over", mock.Mock(side_effect=OSError("no")))
    with pytest.raises(OSError, match="no"):
        nemo.install()
    assert sys.meta_path == finders
    assert sys.modules["nemo.lens.helpers"] is original
    assert nemo.managed_span.__module__ == "lensfast.helpers"


def test_picklers_that_copy_find_the_functions_by_name(nemo: ModuleType) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    nemo.install()
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(
        "from nemo.lens import managed_span, set_enabled_span_groups, is_span_group_enabled, trace_fn\n"
        "def used(): return managed_span, set_enabled_span_groups, is_span_group_enabled, trace_fn\n",
        namespace,
    )
    shipped = pickle.loads(cloudpickle.dumps(namespace["used"]))
    assert shipped() == (nemo.managed_span, nemo.set_enabled_span_groups, nemo.is_span_group_enabled, nemo.trace_fn)


@pytest.mark.parametrize("way", ["install", "accelerate", "run", "run --accelerate"])
def test_other_threads_that_import_do_not_stop_it(lensfast: ModuleType, tmp_path: Path, way: str) -> None:
    """A finder that imported anything would wait for a thread that waits for the import system's lock."""
    start = "" if way.startswith("run") else f"import lensfast; lensfast.{way}()"
    program = f"""
import sys, threading
{start}
names = ["opentelemetry.trace", "opentelemetry.sdk.trace", "opentelemetry.metrics"]
def load(name):
    try:
        __import__(name)
    except ImportError:
        pass
threads = [threading.Thread(target=load, args=(name,), daemon=True) for name in names]
for thread in threads:
    thread.start()
load("{"nemo.lens" if "accelerate" in way else "nemo.lens.providers"}")
for thread in threads:
    thread.join(30)
print(any(thread.is_alive() for thread in threads))
"""
    launcher = ["-m", "lensfast", *way.split(), "--", sys.executable] if way.startswith("run") else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LENSFAST_PURE_PYTHON": str(int(lensfast.backend != "c"))}
    for _ in range(3):
        result = subprocess.run(
            [sys.executable, *launcher, "-c", program],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr


# accelerate()


@needs_nemo_lens
@pytest.mark.parametrize("imported_before", [True, False])
def test_accelerate_replaces_the_hot_functions_everywhere(
    nemo: ModuleType,
    exporter: InMemorySpanExporter,
    site: Path,
    imported_before: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_consumer(site)
    caplog.set_level(logging.INFO, logger="lensfast")
    if not imported_before:
        nemo.accelerate()
        assert "nemo.lens" not in sys.modules
    consumer = importlib.import_module("consumer")
    try:
        if imported_before:
            own = (consumer._otel_managed_span, consumer._otel_sg_enabled)
            consumer.lens_state.set_enabled_span_groups(frozenset({"job"}))
            nemo.accelerate()
            assert nemo.is_span_group_enabled("job")
        nemo.accelerate()
        lens = sys.modules["nemo.lens"]
        assert lens is not nemo
        assert lens.__version__ == "0.1.0"
        assert lens.__spec__.loader.get_filename() == lens.__file__
        for name in ("managed_span", "span_cm", "trace_fn", "is_span_group_enabled"):
            assert getattr(lens, name) is getattr(nemo, name)
        assert lens.helpers.managed_span is nemo.managed_span
        assert lens.state.is_span_group_enabled is nemo.is_span_group_enabled
        assert consumer._otel_managed_span is nemo.managed_span
        assert consumer._otel_sg_enabled is nemo.is_span_group_enabled
        assert consumer.span_cm is nemo.span_cm
        assert consumer.trace_fn is nemo.trace_fn
        assert lens.NemoLensConfig is not nemo.NemoLensConfig
        assert nemo.managed_span.__module__ == "nemo.lens.helpers"

        lens.set_enabled_span_groups(frozenset({"step"}))
        assert nemo.enabled_span_groups() == {"step"}
        with consumer._otel_managed_span("step", "outer"):
            assert consumer.step(1) == 2
        assert [span.name for span in exporter.get_finished_spans()] == ["consumer.step", "outer"]
        lens.set_enabled_span_groups(frozenset())
        exporter.clear()
        assert consumer.step(1) == 2
        assert not exporter.get_finished_spans()
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 1
        assert "nemo-lens 0.1.0 runs on the gate of lensfast" in messages[0]

        nemo.uninstall()
        assert lens.managed_span is not nemo.managed_span
        assert lens.state.set_enabled_span_groups.__code__.co_filename == lens.state.__file__
        assert type(lens.state) is ModuleType
        if imported_before:
            assert (consumer._otel_managed_span, consumer._otel_sg_enabled) == own
        lens.set_enabled_span_groups(frozenset({"step"}))
        assert nemo.enabled_span_groups() == frozenset()
    finally:
        sys.modules.pop("consumer", None)


@needs_nemo_lens
def test_the_gate_follows_the_pinned_state_however_it_is_set(nemo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from_import = importlib.import_module("nemo.lens.state").set_enabled_span_groups
    holder = [from_import]
    nemo.accelerate()
    state = importlib.import_module("nemo.lens.state")
    holder[0](frozenset({"a"}))
    assert nemo.enabled_span_groups() == {"a"}
    assert state._ENABLED_GROUPS == {"a"}
    with monkeypatch.context() as patch:
        patch.setattr("nemo.lens.state._ENABLED_GROUPS", frozenset({"b"}))
        assert nemo.enabled_span_groups() == {"b"}
    assert nemo.enabled_span_groups() == {"a"}
    holder[0](["c", "d"])  # any collection
    assert nemo.enabled_span_groups() == {"c", "d"}


@needs_nemo_lens
def test_a_set_that_cannot_be_followed_disables_with_a_warning(
    nemo: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    nemo.accelerate()
    state = importlib.import_module("nemo.lens.state")
    state.set_enabled_span_groups(frozenset({"a"}))
    state.set_enabled_span_groups(None)
    assert nemo.enabled_span_groups() == frozenset()
    assert "no span group is enabled" in caplog.text


@needs_nemo_lens
def test_set_up_of_the_pinned_library_moves_the_gate(nemo: ModuleType) -> None:
    nemo.accelerate()
    lens = importlib.import_module("nemo.lens")
    memory = InMemorySpanExporter()
    config = lens.NemoLensConfig(enabled=True, span_groups="step", metrics_enabled=False)
    handle = lens.setup_telemetry(config, span_exporter=memory)
    try:
        assert nemo.enabled_span_groups() == {"step"}
        with lens.managed_span("step", "train", tokens=5):
            pass
        handle.shutdown()
        (span,) = memory.get_finished_spans()
        assert (span.name, dict(span.attributes)) == ("train", {"tokens": 5})
        assert span.instrumentation_scope.name == "nemo.lens.helpers"
        assert span.resource.attributes["service.version"] == "0.1.0"
    finally:
        lens.handle._INITIALIZED = False


@needs_nemo_lens
def test_install_takes_the_place_of_accelerate(nemo: ModuleType) -> None:
    lens = importlib.import_module("nemo.lens")
    nemo.accelerate()
    nemo.install()
    assert sys.modules["nemo.lens"] is nemo
    nemo.accelerate()
    nemo.uninstall()
    assert sys.modules["nemo.lens"] is lens
    assert type(sys.modules["nemo.lens.state"]) is ModuleType
    assert inspect.isfunction(lens.is_span_group_enabled)


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0.dev7", None])
def test_an_unknown_version_is_left_alone_with_a_warning(
    nemo: ModuleType, site: Path, version: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        site,
        nemo__="",
        nemo__lens__=(f"__version__ = {version!r}\n" if version else "") + "from .helpers import managed_span\n",
        nemo__lens__state="def set_enabled_span_groups(groups): pass\n",
        nemo__lens__helpers="def managed_span(group, name): pass\n",
    )
    nemo.accelerate()
    lens = importlib.import_module("nemo.lens")
    assert lens.managed_span is not nemo.managed_span
    (record,) = [record for record in caplog.records if record.name == "lensfast"]
    assert record.levelno == logging.WARNING
    assert version or "unknown version" in record.getMessage()
    assert "0.1.0" in record.getMessage()


def test_accelerate_without_nemo_lens_changes_nothing(nemo: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    if NEMO_LENS:
        pytest.skip("nemo-lens is installed here")
    nemo.accelerate()
    assert "nemo-lens is not installed" in caplog.text
    with pytest.raises(ModuleNotFoundError, match="nemo"):
        importlib.import_module("nemo.lens")


def test_a_nemo_lens_that_fails_to_import_fails_as_before(nemo: ModuleType, site: Path) -> None:
    write(site, nemo__="", nemo__lens__="raise ValueError('broken')\n")
    nemo.accelerate()
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("nemo.lens")
    assert "nemo.lens" not in sys.modules


def test_an_unknown_version_of_another_shape_is_left_alone(
    nemo: ModuleType, site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(site, nemo__="", nemo__lens__="__version__ = '0.9'\nvalue = 3\n")
    nemo.accelerate()
    assert importlib.import_module("nemo.lens").value == 3
    assert "nemo-lens 0.9 is left as it is" in caplog.text


def test_a_known_version_of_another_shape_is_left_alone(
    nemo: ModuleType, site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        site,
        nemo__="",
        nemo__lens__="__version__ = '0.1.0'\nfrom . import helpers, state\n",
        nemo__lens__state="_ENABLED_GROUPS = frozenset()\ndef set_enabled_span_groups(groups): pass\n",
        nemo__lens__helpers="def managed_span(): pass\n",
    )
    nemo.accelerate()
    lens = importlib.import_module("nemo.lens")
    assert lens.helpers.managed_span is not nemo.managed_span
    assert type(lens.state) is ModuleType
    assert "could not be accelerated" in caplog.text
