"""Every code block of README, CONTRIBUTING and docs/ is run, or checked as far as its language allows.

What a block is, its language says:

- python: the blocks of a page are one program, or one test module if they hold tests; run on both backends.
- bash: run in a folder of the page's own, where `lensfast` and `python` are real; what a test machine has not (srun,
  kubectl, Megatron-LM, ...) has a stand-in in docs_standins.py.
- yaml: manifests of Kubernetes and configurations of a collector, checked as such.
- text: what the block before it prints. Times and numbers with a decimal point may differ; `...` stands for anything.

A block of any of these whose first two lines have a comment `# NAME.EXT` is a file: it is put into the folder, for a
bash block to use. Any other language, or none, is an error. `{directives}` of Sphinx are for the build of the site.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from docs_standins import PROGRAMS, SCRIPTS, collector_problems
from markdown_it import MarkdownIt
from otlp_receiver import Receiver

from conftest import BACKENDS, ROOT, load_backend, run_code

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = ROOT / "tests"
HOST = socket.gethostname()


class Block(NamedTuple):
    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that this block is."""
        match = re.match(r"(?:#!.*\n)?# ([\w./-]+\.\w+)\n", self.text)
        return match[1] if match else None


def blocks(page: Path) -> list[Block]:
    found = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type in {"fence", "code_block"}:
            language = token.info.split()[0] if token.info.strip() else "(none)"
            if not re.fullmatch(r"\{(?!.*code).*\}", language):
                found.append(Block(language, token.content, token.map[0] + 1))
    return found


def programs(page: Path) -> list[str]:
    """The Python blocks that are no files."""
    return [block.text for block in blocks(page) if block.language == "python" and not block.file]


def needs(page: Path) -> None:
    """Skip where something that the page's blocks are about can't be had."""
    text = "".join(block.text for block in blocks(page))
    if "import torch\n" in text:
        pytest.importorskip("torch", reason="torch is not installed here")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Python


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=name)
def test_a_page(page, backend, tmp_path, monkeypatch):
    needs(page)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    code = "\n\n".join(programs(page))
    has_tests = "\ndef test_" in code
    result = run_code(code, backend, tmp_path, *(("-m", "pytest", "-q", "-W", "error") if has_tests else ()))
    assert result.returncode == 0, result.stdout + result.stderr
    for block, before in zip(blocks(page)[1:], blocks(page), strict=False):
        if block.language == "text" and before.language == "python" and not before.file:
            check_output(page, block, result.stdout + result.stderr)


def check_output(page: Path, block: Block, output: str) -> None:
    """Each line that the page shows is there, in this order."""
    lines = iter(masked(output))
    for shown in masked(block.text):
        pattern = ".*".join(map(re.escape, shown.split("...")))
        assert any(re.fullmatch(pattern, line) for line in lines), (
            f"{name(page)}:{block.line}: {shown!r} is not, or not there, in the output:\n{output}"
        )


def masked(text: str) -> list[str]:
    """The lines that are not blank; times and numbers with a decimal point are #, and runs of blanks one."""
    lines = [
        re.sub(r"\d+\.\d+|\d+(?= (?:nsec|usec|us|ms|s)\b)", "#", " ".join(line.split())) for line in text.splitlines()
    ]
    return [line for line in lines if line]


# All other languages


@pytest.fixture(scope="module")
def programs_on_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH: this interpreter, lensfast by it, and the stand-ins."""
    folder = tmp_path_factory.mktemp("bin")
    standin = f"exec {sys.executable} {TESTS / 'docs_standins.py'}"
    for called in PROGRAMS:
        (folder / called).write_text(f'#!/bin/sh\n{standin} {called} "$@"\n')
    (folder / "lensfast").write_text(f'#!/bin/sh\nexec {sys.executable} -m lensfast "$@"\n')
    # A virtual environment that a page makes is an empty folder: all that would be in it is on PATH.
    python = 'if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" "$3/lib"; exec touch "$3/bin/activate"; fi\n'
    (folder / "python").write_text(f'#!/bin/sh\n{python}exec {sys.executable} "$@"\n')
    (folder / "...").write_text("#!/bin/sh\nexec python train.py\n")  # how README says: a program of yours
    (folder / "python3").symlink_to("python")
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


class Folder:
    """Where a page's blocks run, one after the other."""

    def __init__(self, page: Path, path: Path, programs_on_path: Path, receiver: Receiver) -> None:
        self.page = page
        self.path = path
        self.receiver = receiver
        self.output = ""
        self.files: dict[str, str] = {}
        self.unused: set[str] = set()
        """Those of the files that no bash block has used yet."""
        for script in SCRIPTS:
            (path / script).parent.mkdir(exist_ok=True)
            code = f"import sys\nsys.path.append({str(TESTS)!r})\nimport docs_standins as d\n"
            (path / script).write_text(f"{code}d.SCRIPTS[{script!r}](sys.argv[1:])\n")
        (path / ".ci").mkdir()
        # A source distribution has none.
        (path / ".ci" / "run").write_text(f"#!/bin/sh\n[ ! -e {ROOT}/.ci/run ] || exec bash -n {ROOT}/.ci/run\n")
        (path / ".ci" / "run").chmod(0o755)
        self.environment = {
            "PATH": os.pathsep.join([str(programs_on_path), "/usr/local/bin", "/usr/bin", "/bin"]),
            "PYTHONPATH": str(ROOT),
            "HOME": str(path),
        }

    def write(self, block: Block) -> None:
        (self.path / block.file).write_text(self.with_our_collector(block.text))
        self.files[block.file] = block.text
        self.unused.add(block.file)

    def with_our_collector(self, text: str) -> str:
        """What is sent to the standard ports of OTLP, of whatever host, is sent to the test's receiver."""
        for port, ours in (("4317", self.receiver.grpc_port), ("4318", self.receiver.http_port)):
            text = re.sub(rf"http://[\w.$()-]+:{port}\b", f"http://127.0.0.1:{ours}", text)
        return text

    def bash(self, block: Block) -> None:
        self.use_files(block.text)
        for module in re.findall(r"^# needs (\w+)", block.text, re.MULTILINE):
            if importlib.util.find_spec(module) is None:
                self.output = None  # what follows has nothing to compare itself with
                return
        # As in one terminal, what a block exports holds for the next.
        script = f"[ ! -f .exports ] || . ./.exports\n{self.with_our_collector(block.text)}\nexport -p > .exports"
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.path, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=60,
        )  # fmt: skip
        assert result.returncode == 0, f"{name(self.page)}:{block.line} left with {result.returncode}:\n{result.stdout}"
        self.output = result.stdout

    def use_files(self, text: str) -> None:
        """Of what `text` names, and of what that names."""
        for file in sorted(self.unused):
            if file in text and file in self.unused:
                self.unused.remove(file)
                self.use_files(self.files[file])

    def text(self, block: Block) -> None:
        if self.output is not None:
            check_output(self.page, block, self.output)

    def yaml(self, block: Block) -> None:
        for document in yaml.safe_load_all(block.text):
            check_yaml(document)

    def python(self, block: Block) -> None:
        """One that is a file; it is run by a bash block."""
        compile(block.text, block.file or "", "exec")


# One backend: nothing here depends on the gate, and these start many processes.
@pytest.mark.skipif(sys.platform != "linux", reason="the pages' commands are those of a Linux machine")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_other_blocks_of_a_page(page, tmp_path, programs_on_path):
    needs(page)
    load_backend("c")  # it is what the pages show; skips where there is none
    previous = None
    with Receiver() as receiver:
        folder = Folder(page, tmp_path, programs_on_path, receiver)
        for block in blocks(page):
            checks: dict[str, Callable[[Block], None]] = {
                "bash": folder.bash, "python": folder.python, "text": folder.text, "yaml": folder.yaml,
            }  # fmt: skip
            check = checks.get(block.language)
            where = f"{name(page)}:{block.line}"
            assert check, f"{where}: nothing runs a block of the language {block.language}; there are {list(checks)}"
            if block.file:
                folder.write(block)
            is_program = block.language == "python" and not block.file
            if block.language == "text":
                after = previous.language if previous else "(none)"
                assert after in {"bash", "python"}, f"{where}: not the output of a block"
                if after == "bash":
                    folder.text(block)
            elif not is_program and not (block.file and block.language == "bash"):
                check(block)
            previous = block
    assert not folder.unused, f"{name(page)}: no block uses {folder.unused}"
    arrived = [(span.name, {**span.resource, **span.attributes}) for span in receiver.spans()]
    for wanted, attributes in ARRIVES.get(name(page), ()):
        assert any(span == wanted and attributes.items() <= found.items() for span, found in arrived), (
            f"{name(page)}: no span {wanted!r} with {attributes} came to the collector, but {arrived}"
        )
    assert receiver.bad_requests == []


# (span, some of its attributes and of its resource's) that the page's programs send
ARRIVES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "docs/tutorial.md": [("mytrainer.step", {"service.name": "mytrainer", "mytrainer.iteration": 19})],
    "docs/howto/megatron.md": [
        ("megatron.train.iteration", {"service.name": "gpt-8b", "megatron.iteration": 1, "dl.rank": 15}),
    ],
    "docs/howto/nemo-rl.md": [("rl.grpo.step", {"service.name": "grpo-8b"})],
    "docs/howto/slurm.md": [
        # The last of 16 ranks exports.
        ("mytrainer.step", {"slurm.job.id": "4242", "slurm.restart_count": "0", "host.name": HOST, "dl.rank": 15}),
        ("mytrainer.step", {"slurm.head_node.name": "node0"}),  # known in the batch script alone
        ("launch.prepare", {"slurm.job.name": "mytrainer"}),
    ],
    "docs/howto/kubernetes.md": [
        (
            "mytrainer.step",
            {"k8s.job.name": "mytrainer", "k8s.pod.name": "mytrainer-1", "k8s.node.name": "node0", "dl.rank": 15},
        ),
    ],
    "docs/howto/pytorch.md": [("train.step", {"dl.rank": 7}), ("0.forward", {"module.class": "Linear"})],
}


def check_yaml(document: Any) -> None:
    if "apiVersion" in document:
        check_manifest(document)
    else:
        assert "service" in document, "neither a manifest of Kubernetes nor a collector's configuration"
        assert list(collector_problems(document)) == []


def check_manifest(manifest: dict[str, Any]) -> None:
    if importlib.util.find_spec("kubernetes_validate"):
        import kubernetes_validate

        kubernetes_validate.validate(manifest, "1.31", strict=True)
    versions = {"Job": "batch/v1", "DaemonSet": "apps/v1", "ConfigMap": "v1"}
    assert versions[manifest["kind"]] == manifest["apiVersion"]
    for file, text in manifest.get("data", {}).items():
        assert file.endswith(".yaml")
        check_yaml(yaml.safe_load(text))
    pod = manifest.get("spec", {}).get("template", {}).get("spec", {"containers": []})
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        assert container["image"]
        variables = [variable["name"] for variable in container.get("env", ())]
        assert len(variables) == len(set(variables))
        # A number or a boolean is refused by the cluster.
        assert all(isinstance(variable.get("value", ""), str) for variable in container.get("env", ()))
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
    if manifest["kind"] == "DaemonSet":
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()


# What the pages say


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_files(page):
    for target in links(page):
        if not re.match(r"\w+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name(page)}: no {target}"


def links(page: Path) -> Iterator[str]:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        for child in token.children or ():
            if child.type == "link_open":
                yield str(child.attrs["href"])


def test_a_block_that_nothing_runs_is_an_error(tmp_path, programs_on_path):
    """Of the test itself: what it finds on a page that is wrong."""
    for text, error in (
        ("```rust\nfn main() {}\n```", "language rust"),
        ("```\nls\n```", "language (none)"),
        ("Code:\n\n    ls\n", "language (none)"),
        ("```{code-block} python\n1 / 0\n```", "language {code-block}"),
        ("```bash\nfalse\n```", "left with 1"),
        ("```bash\nlensfast no-such-command\n```", "left with 2"),
        ("```bash\npip install 'lensfast[nothing]'\n```", "no such extra"),
        ("```bash\nmake nothing\n```", "has no nothing"),
        ("```bash\necho 1 of 2.5\n```\n\n```text\n1 of 3.5\n2 of 2.5\n```", "'2 of #' is not"),
        ("```text\nnothing ran\n```", "not the output"),
        ("```python\n# lost.py\n```", "no block uses {'lost.py'}"),
        ("```yaml\na: 1\n```", "neither a manifest"),
    ):
        folder = tmp_path / str(hash(text))
        folder.mkdir()
        (folder / "page.md").write_text(f"# A page\n\n{text}\n")
        with pytest.raises(AssertionError) as failure, pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys.modules[__name__], "name", lambda page: page.name)
            test_other_blocks_of_a_page(folder / "page.md", folder, programs_on_path)
        assert error in str(failure.value), text


def test_quoted_measurements_are_the_readmes():
    """Rounded, and good enough until the next measurement moves them by more than a fifth."""
    measured = times((ROOT / "README.md").read_text())
    for page in ("when-not-to-instrument.md", "howto/megatron.md"):
        tables = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("|")]
        for quoted in times("\n".join(tables)):
            assert any(0.8 * time < quoted < 1.2 * time for time in measured), f"{page}: {quoted} ns is not in README"


def times(text: str) -> list[float]:
    """In nanoseconds."""
    units = {"ns": 1, "us": 1e3, "ms": 1e6}
    return [float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) (ns|us|ms)\b", text)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_library_without_lensfast(backend, tmp_path):
    """The import, registration and marks of the page for library authors, where lensfast can't be imported."""
    written = programs(ROOT / "docs" / "library-authors.md")
    needed = [
        block for block in written if any(word in block for word in ("class SpanRegistry", "def step", "def load"))
    ]
    registration = next(block for block in written if block.startswith("SpanRegistry.register("))
    assert len(needed) == 3
    code = [
        "import sys\nsys.modules['lensfast'] = None",
        needed[0],
        registration,
        *needed[1:],
        "assert step([1]) == [3] and write_checkpoint([b'w']) == 1 and load((1, 2)) == [1, 2]",
        "assert step.__name__ == 'step' and not hasattr(step, '__wrapped__')",
    ]
    result = run_code("\n\n".join(code), backend, tmp_path)
    assert result.returncode == 0, result.stderr
