"""lensfast run: unmodified programs, and their children, on lensfast."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from conftest import PACKAGE

ROOT = Path(__file__).resolve().parent.parent
AUTO = str(PACKAGE / "_auto")

try:
    NEMO_LENS = importlib.metadata.version("nemo-lens")
except importlib.metadata.PackageNotFoundError:
    NEMO_LENS = ""
needs_nemo_lens = pytest.mark.skipif(not NEMO_LENS, reason="nemo-lens is not installed here (it needs Python 3.13)")
needs_no_nemo_lens = pytest.mark.skipif(bool(NEMO_LENS), reason="nemo-lens is installed here")

# As a user wrote it: knows nothing of lensfast.
PROGRAM = """
import json, multiprocessing, os, subprocess, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nemo.lens.helpers import managed_span, trace_fn
from nemo.lens.state import is_span_group_enabled, set_enabled_span_groups
import nemo.lens

@trace_fn("step", "train_step")
def train_step(n):
    with managed_span("layer", "layer.forward", **{"layer": n}):
        return n

def facts():
    import nemo.lens
    hot = sys.modules.get("lensfast")
    return {
        "home": nemo.lens.__name__ if "lensfast" in nemo.lens.__file__ else "original",
        "fast": hot is not None and nemo.lens.managed_span is hot.managed_span,
    }

def child(queue):
    queue.put(facts())

if __name__ == "__main__":
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    train_step(1)
    set_enabled_span_groups(frozenset({"step"}))
    train_step(2)
    set_enabled_span_groups(frozenset({"step", "layer"}))
    train_step(3)
    seen = {"main": facts(), "arguments": sys.argv[1:], "spans": [span.name for span in memory.get_finished_spans()]}
    for how in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(how)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        seen[how] = queue.get(timeout=60)
        process.join()
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import program; print(json.dumps(program.facts()))"
    here = os.path.dirname(os.path.abspath(__file__))
    output = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True, check=True).stdout
    seen["exec"] = json.loads(output)
    print(json.dumps(seen))
"""
SPANS = ["train_step", "layer.forward", "train_step"]
LENSFAST = {"home": "lensfast", "fast": True}
ACCELERATED = {"home": "original", "fast": True}
UNTOUCHED = {"home": "original", "fast": False}


@pytest.fixture
def run(lensfast: ModuleType, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs `lensfast run` with these arguments in a directory that holds program.py."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(
        *arguments: str, variables: Mapping[str, str] | None = None, path: Sequence[Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LENSFAST_")}
        environment["LENSFAST_PURE_PYTHON"] = "1" if lensfast.backend == "python" else "0"
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT)])
        return subprocess.run(
            [sys.executable, "-m", "lensfast", "run", *arguments],
            cwd=tmp_path,
            env={**environment, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def facts(result: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def assert_everywhere(seen: dict[str, object], expected: dict[str, object]) -> None:
    assert {where: seen[where] for where in ("main", "fork", "spawn", "forkserver", "exec")} == dict.fromkeys(
        ("main", "fork", "spawn", "forkserver", "exec"), expected
    )
    assert seen["spans"] == SPANS


@needs_no_nemo_lens
def test_where_there_is_no_nemo_lens(run) -> None:  # type: ignore[no-untyped-def]
    seen = facts(run("--", sys.executable, "program.py", "--lr", "3", "--", "-x"))
    assert_everywhere(seen, LENSFAST)
    assert seen["arguments"] == ["--lr", "3", "--", "-x"]


@needs_nemo_lens
def test_where_nemo_lens_is_installed(run) -> None:  # type: ignore[no-untyped-def]
    assert_everywhere(facts(run("--", sys.executable, "program.py")), LENSFAST)


@needs_nemo_lens
def test_accelerate(run) -> None:  # type: ignore[no-untyped-def]
    seen = facts(run("--accelerate", "--", sys.executable, "program.py", "--accelerate"))
    assert_everywhere(seen, ACCELERATED)
    assert seen["arguments"] == ["--accelerate"]


def test_with_somebody_elses_nemo_package(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    toolkit = tmp_path / "toolkit"
    (toolkit / "nemo" / "core").mkdir(parents=True)
    (toolkit / "nemo" / "__init__.py").write_text("__version__ = '2.9'\n")
    (toolkit / "nemo" / "core" / "__init__.py").write_text("name = 'core'\n")
    program = "import nemo.core, nemo.lens; print(nemo.__version__, nemo.core.name, nemo.lens.__name__)"
    result = run("--", sys.executable, "-c", program, path=[toolkit])
    assert result.stdout.split() == ["2.9", "core", "lensfast"]
    assert_everywhere(facts(run("--", sys.executable, "program.py", path=[toolkit])), LENSFAST)


@needs_nemo_lens
@pytest.mark.parametrize(
    ("arguments", "value", "expected"),
    [
        ((), "install", LENSFAST),
        ((), "accelerate", ACCELERATED),
        ((), " Accelerate ", ACCELERATED),
        ((), "", LENSFAST),
        (("--accelerate",), "install", ACCELERATED),
        ((), "off", UNTOUCHED),
        (("--accelerate",), "OFF", UNTOUCHED),
    ],
)
def test_the_variable_steers_it(run, arguments: Sequence[str], value: str, expected: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
    program = "import json, program; print(json.dumps(program.facts()))"
    result = run(*arguments, "--", sys.executable, "-c", program, variables={"LENSFAST_AUTO": value})
    assert facts(result) == expected


def nemo_lens_of_info(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())["nemo.lens"]


def test_info_says_what_a_program_gets(run) -> None:  # type: ignore[no-untyped-def]
    info = ("--", sys.executable, "-m", "lensfast", "info")
    assert nemo_lens_of_info(run(*info)) == "lensfast"
    off = "nemo-lens 0.1.0, without lensfast" if NEMO_LENS else "not installed (under `lensfast run`: lensfast)"
    assert nemo_lens_of_info(run(*info, variables={"LENSFAST_AUTO": "off"})) == off
    accelerated = run("--accelerate", *info)
    assert nemo_lens_of_info(accelerated) == ("nemo-lens 0.1.0, with lensfast's gate" if NEMO_LENS else off)


@needs_no_nemo_lens
def test_accelerate_says_that_there_is_no_nemo_lens(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    program = """
for name in ("nemo.lens", "nemo.lens.helpers"):
    try:
        __import__(name)
    except ImportError as error:
        print(error)
"""
    result = run("--accelerate", "--", sys.executable, "-c", program)
    assert result.stdout.splitlines() == ["No module named 'nemo'"] * 2
    message = "LENSFAST_AUTO=accelerate has no effect: nemo-lens, which it is to accelerate, is not installed"
    assert result.stderr == f"lensfast: {message}\n"
    (tmp_path / "toolkit" / "nemo").mkdir(parents=True)
    (tmp_path / "toolkit" / "nemo" / "__init__.py").touch()
    result = run("--accelerate", "--", sys.executable, "-c", program, path=[tmp_path / "toolkit"])
    assert result.stdout.splitlines() == ["No module named 'nemo.lens'"] * 2
    assert result.stderr == f"lensfast: {message}\n"


def test_an_unknown_value_of_the_variable_is_off_with_a_warning(run) -> None:  # type: ignore[no-untyped-def]
    result = run("--", sys.executable, "-c", "print('ran')", variables={"LENSFAST_AUTO": "instal"})
    assert (result.returncode, result.stdout) == (0, "ran\n")
    assert "LENSFAST_AUTO must be one of install, accelerate, off, not 'instal'" in result.stderr


def test_a_child_can_be_switched_off(run) -> None:  # type: ignore[no-untyped-def]
    program = (
        "import os, subprocess, sys; os.environ['LENSFAST_AUTO'] = sys.argv[1]; "
        "code = 'import sys; print(any(\"_Trigger\" in repr(finder) for finder in sys.meta_path))'; "
        "subprocess.run([sys.executable, '-c', code])"
    )
    assert run("--", sys.executable, "-c", program, "off").stdout == "False\n"
    assert run("--", sys.executable, "-c", program, "install").stdout == "True\n"
    result = run("--", sys.executable, "-c", program, "on")
    assert result.stdout == "False\n"
    assert "LENSFAST_AUTO must be install, accelerate or off, not 'on'" in result.stderr


def test_an_interpreter_that_never_asks_imports_nothing(run) -> None:  # type: ignore[no-untyped-def]
    program = "import sys; print([name for name in sys.modules if name.split('.')[0] in ('lensfast', 'opentelemetry')])"
    assert run("--", sys.executable, "-c", program).stdout == "[]\n"


def test_the_sitecustomize_that_is_hidden_runs(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nsys.seen_by_other = __file__\nvalue = 5\n")
    program = "import sys, sitecustomize, nemo.lens; print(sys.seen_by_other, sitecustomize.value, nemo.lens.__name__)"
    result = run("--", sys.executable, "-c", program, path=[other])
    assert result.stdout.split() == [str(other / "sitecustomize.py"), "5", "lensfast"]


def test_one_that_puts_itself_first_does_not_hide_it_from_children(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As the sitecustomize of opentelemetry-instrument does."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(
        "import os\nhere = os.path.dirname(__file__)\n"
        "os.environ['PYTHONPATH'] = os.pathsep.join([here, os.environ['PYTHONPATH']])\nvalue = 5\n"
    )
    program = (
        "import subprocess, sys; "
        "code = 'import sitecustomize, nemo.lens; print(sitecustomize.value, nemo.lens.__name__)'; "
        "subprocess.run([sys.executable, '-c', code])"
    )
    assert run("--", sys.executable, "-c", program, path=[other]).stdout.split() == ["5", "lensfast"]


def test_two_of_them_run_once_each(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As where `lensfast run` of one environment starts `lensfast run` of another."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(Path(AUTO) / "sitecustomize.py", other)
    last = tmp_path / "last"
    last.mkdir()
    (last / "sitecustomize.py").write_text("import sys\nsys.runs = getattr(sys, 'runs', 0) + 1\n")
    program = (
        "import sys; print(sys.runs, sum('_Trigger' in repr(finder) for finder in sys.meta_path)); "
        "import nemo.lens; print(nemo.lens.__name__)"
    )
    assert run("--", sys.executable, "-c", program, path=[other, last]).stdout.split() == ["1", "2", "lensfast"]


def test_the_program_gets_signals_as_a_shell_would_give_them(run) -> None:  # type: ignore[no-untyped-def]
    """Python ignores SIGPIPE, and without it `yes | head` would not end quietly."""
    result = run("--", "sh", "-c", "kill -PIPE $$; echo ignored")
    assert (result.returncode, result.stdout) == (-signal.SIGPIPE, "")


def test_standard_output_may_be_closed(run) -> None:  # type: ignore[no-untyped-def]
    command = f"exec {sys.executable} -m lensfast run -- sh -c 'exit 5' >&- 2>&-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["sh", "-c", command], env=environment).returncode == 5


def test_it_can_be_nested(run) -> None:  # type: ignore[no-untyped-def]
    program = "import os, nemo.lens; print(os.environ['PYTHONPATH'].split(os.pathsep).count(os.environ['AUTO']))"
    inner = [sys.executable, "-m", "lensfast", "run", "--", sys.executable, "-c", program]
    assert run("--", *inner, variables={"AUTO": AUTO}).stdout == "1\n"


def test_an_interpreter_without_lensfast_says_so_and_goes_on(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    program = (
        "import os, subprocess, sys\n"
        "environment = dict(os.environ, PYTHONPATH=os.environ['PYTHONPATH'].split(os.pathsep)[0])\n"
        'code = \'import sys; sys.modules["lensfast"] = None; sys.path.insert(0, "toolkit"); \'\n'
        "code += 'import nemo.lens as lens; print(lens.value)'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', code], env=environment).returncode)"
    )
    lens = tmp_path / "toolkit" / "nemo" / "lens"
    lens.mkdir(parents=True)
    (lens.parent / "__init__.py").touch()
    (lens / "__init__.py").write_text("value = 'the original'\n")
    result = run("--", sys.executable, "-c", program)
    assert (result.returncode, result.stdout) == (0, "the original\n")
    assert "LENSFAST_AUTO=install has no effect in" in result.stderr
    assert result.stderr.count("\n") == 1


def test_exit_status_and_signals_are_the_programs(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--", sys.executable, "-c", "import sys; sys.exit(7)").returncode == 7
    assert run("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 15)").returncode == -15


def test_a_program_that_cannot_be_run(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("--", "no-such-program")
    assert result.returncode == 127
    assert "can't run no-such-program: No such file" in result.stderr
    result = run("--", "")
    assert result.returncode == 126
    assert result.stderr.count("\n") == 1
    result = run("--", "./program.py")
    assert result.returncode == 126
    assert "lensfast run -- python" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("--",), ("--accelerate",), ("--accelerate", "--")])
def test_no_program_is_wrong_use(run, arguments: Sequence[str]) -> None:  # type: ignore[no-untyped-def]
    result = run(*arguments)
    assert result.returncode == 2
    assert "no program is given" in result.stderr


def test_torchrun(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed here")
    (tmp_path / "rank.py").write_text(
        "import os, nemo.lens\nopen('rank' + os.environ['RANK'], 'w').write(nemo.lens.__name__)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "rank.py"]
    result = run("--", *torchrun)
    assert result.returncode == 0, result.stderr
    assert {(tmp_path / f"rank{rank}").read_text() for rank in range(2)} == {"lensfast"}
