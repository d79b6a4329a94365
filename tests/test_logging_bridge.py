"""Log records through OpenTelemetry, on both backends."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import _logs
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, SimpleLogRecordProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once
from otlp_receiver import run_script

from conftest import BACKENDS, load_backend

NAME = "lensfast-test.bridge"


class MemoryExporter:
    """Keeps the log records that it is given; logs itself, one of `says` for each batch."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.says: list[str] = []

    def export(self, batch: Any) -> Any:
        if self.says:
            logging.getLogger("urllib3").warning(self.says.pop())
        self.records += [item.log_record for item in batch]

    def shutdown(self) -> None:
        """Nothing to do."""

    def bodies(self) -> list[Any]:
        return [record.body for record in self.records]


def forget_logger_provider() -> None:
    _logs._internal._LOGGER_PROVIDER = None
    _logs._internal._LOGGER_PROVIDER_SET_ONCE = Once()


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """Leaves no handler, level or provider behind."""
    loggers = [logging.getLogger(name) for name in ("", NAME)]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    forget_logger_provider()
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
    forget_logger_provider()


def install(processor: Any) -> LoggerProvider:
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(processor)
    _logs.set_logger_provider(provider)
    return provider


@pytest.fixture
def logs() -> MemoryExporter:
    """Collects the log records of a fresh global SDK provider."""
    memory = MemoryExporter()
    install(SimpleLogRecordProcessor(memory))  # type: ignore[arg-type]
    return memory


def bridge(lensfast: ModuleType, *arguments: Any, **options: Any) -> None:
    lensfast.logging_bridge.setup_logging_bridge(*arguments, **options)


def test_records_carry_the_ids_of_the_current_span(
    lensfast: ModuleType, exporter: InMemorySpanExporter, logs: MemoryExporter
) -> None:
    lensfast.set_enabled_span_groups({"step"})
    bridge(lensfast, NAME)
    logger = logging.getLogger(NAME)
    logger.warning("outside")
    with lensfast.managed_span("step", "train_step") as span:
        logger.warning("loss is %.1f", 2.5)
    outside, inside = logs.records
    own = span.get_span_context()
    assert (inside.body, inside.trace_id, inside.span_id) == ("loss is 2.5", own.trace_id, own.span_id)
    assert inside.severity_number.value == 13
    assert (outside.body, outside.trace_id or 0, outside.span_id or 0) == ("outside", 0, 0)


def test_the_root_logger_is_bridged_by_default_from_info_on(lensfast: ModuleType, logs: MemoryExporter) -> None:
    bridge(lensfast)
    logger = logging.getLogger(NAME)
    logger.info("below the logger's own level")
    logger.setLevel(logging.DEBUG)
    logger.debug("below the bridge's level")
    logger.info("exported")
    assert logs.bodies() == ["exported"]


def test_a_level_can_be_given(lensfast: ModuleType, logs: MemoryExporter) -> None:
    bridge(lensfast, NAME, level=logging.ERROR)
    logger = logging.getLogger(NAME)
    logger.warning("too little")
    logger.error("exported")
    assert logs.bodies() == ["exported"]


def test_a_second_call_adds_no_handler_and_sets_the_level(lensfast: ModuleType, logs: MemoryExporter) -> None:
    for _ in range(2):
        bridge(lensfast, NAME, logging.ERROR)
    bridge(lensfast, NAME, logging.WARNING)
    logger = logging.getLogger(NAME)
    logger.warning("once")
    assert logs.bodies() == ["once"]
    assert len(logger.handlers) == 1


def test_without_an_sdk_provider_nothing_happens(
    lensfast: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bridge(lensfast, NAME)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk._logs", None)
    bridge(lensfast, NAME)
    assert logging.getLogger(NAME).handlers == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_no_deprecation_shows(lensfast: ModuleType, logs: MemoryExporter) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge(lensfast, NAME)
    assert len(logging.getLogger(NAME).handlers) == 1


def test_a_handler_that_can_not_be_made_is_reported(
    lensfast: ModuleType, logs: MemoryExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(sys.modules["opentelemetry.sdk._logs"], "LoggingHandler")
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.logging.handler", None)
    bridge(lensfast, NAME)
    assert logging.getLogger(NAME).handlers == []
    assert "opentelemetry.instrumentation.logging" in caplog.text


def test_a_level_that_is_none_raises(lensfast: ModuleType, logs: MemoryExporter) -> None:
    with pytest.raises(ValueError, match="LOUD"):
        bridge(lensfast, NAME, "LOUD")
    assert logging.getLogger(NAME).handlers == []


def test_what_is_logged_while_exporting_is_not_exported(lensfast: ModuleType) -> None:
    memory = MemoryExporter()
    memory.says = ["connection pool is full"] * 3
    provider = install(BatchLogRecordProcessor(memory))  # type: ignore[arg-type]
    bridge(lensfast)
    logging.getLogger(NAME).warning("first")
    flusher = threading.Thread(target=provider.force_flush)
    flusher.start()
    flusher.join()
    provider.force_flush()
    assert memory.bodies() == ["first"]
    logging.getLogger("urllib3").warning("outside of an export")
    provider.force_flush()
    assert memory.bodies() == ["first", "outside of an export"]
    provider.shutdown()


def test_what_opentelemetry_says_of_itself_is_not_exported(lensfast: ModuleType, logs: MemoryExporter) -> None:
    bridge(lensfast)
    logging.getLogger("opentelemetry.sdk.trace").warning("a span was ended twice")
    logging.getLogger("opentelemetry_app").warning("the program's own")
    assert logs.bodies() == ["the program's own"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_with_logs_enabled_exports_them_and_exits_quietly(backend: str, tmp_path: Path) -> None:
    load_backend(backend)  # skips where it can't be had
    script = tmp_path / "program.py"
    script.write_text(
        "import logging, lensfast\n"
        "from lensfast.logging_bridge import setup_logging_bridge\n"
        "config = lensfast.NemoLensConfig(enabled=True, logs_enabled=True, exporter='console', metrics_enabled=False)\n"
        "lensfast.setup_telemetry(config)\n"
        "setup_logging_bridge()\n"
        "logging.getLogger('train').warning('step is slow')\n"
    )
    result = run_script(script, backend, PYTHONWARNINGS="error::DeprecationWarning")
    assert (result.returncode, result.stderr) == (0, "")
    assert '"body": "step is slow"' in result.stdout
