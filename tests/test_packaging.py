"""What several files say about versions and Pythons agrees; workflows have few rights and pinned actions."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

from conftest import ROOT

if not (ROOT / ".github").exists():
    pytest.skip("no checkout: a source distribution has no workflows", allow_module_level=True)

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CIBUILDWHEEL = PYPROJECT["tool"]["cibuildwheel"]
WORKFLOWS = {path.name: path.read_text() for path in sorted((ROOT / ".github" / "workflows").iterdir())}
JOBS = [
    pytest.param(job, id=f"{file}-{name}")
    for file, text in WORKFLOWS.items()
    for name, job in yaml.safe_load(text)["jobs"].items()
]
# The Pythons that lensfast is for; everything else is compared with this list.
PYTHONS = [
    found[1]
    for classifier in PROJECT["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier))
]
FREE_THREADED = ["3.14t"]


def workflow(name):
    return yaml.safe_load(WORKFLOWS[name])


def read(name):
    return (ROOT / name).read_text()


def as_tag(python):
    """3.14t: cp314t."""
    return "cp" + python.replace(".", "")


# Python


def test_pythons_are_a_range_without_gaps():
    minors = [int(python.removeprefix("3.")) for python in PYTHONS]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert {python.removesuffix("t") for python in FREE_THREADED} <= set(PYTHONS)


def test_the_oldest_python():
    oldest = PYTHONS[0]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert f"Python {oldest} or newer" in read("README.md")
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in read("Makefile")
    assert f"lensfast needs Python {oldest} or newer" in read("Makefile")
    assert f"sys.version_info >= ({oldest.replace('.', ', ')})" in read("tools/wheels.py")


def test_wheels_are_built_for_them():
    assert CIBUILDWHEEL["build"] == [f"{as_tag(python)}-*" for python in [*PYTHONS, *FREE_THREADED]]


def test_the_suite_runs_on_them():
    jobs = workflow("tests.yml")["jobs"]
    assert jobs["suite"]["strategy"]["matrix"]["python"] == PYTHONS
    (free_threaded,) = [
        step["with"] for step in jobs["free-threaded"]["steps"] if "with" in step and "python-version" in step["with"]
    ]
    assert [free_threaded["python-version"]] == FREE_THREADED
    if (ROOT / ".ci" / "run").exists():
        (listed,) = re.findall(r"^for version in ([\d. ]+); do$", read(".ci/run"), re.MULTILINE)
        assert listed.split() == PYTHONS


def test_every_python_in_a_workflow_is_one_of_them():
    written = set(re.findall(r"(?:python-version: |python: \[)\"?([\w., \"]+)", "".join(WORKFLOWS.values())))
    versions = {version for text in written for version in re.findall(r"\b3\.\d+t?\b", text)}
    assert versions <= {*PYTHONS, *FREE_THREADED}


def test_documents_list_them():
    rows = re.findall(r"^\| (3\.\d+t?)\b", read("docs/compatibility.md"), re.MULTILINE)
    assert rows == [*PYTHONS, *FREE_THREADED]
    (tested,) = re.findall(r"^- Tested on Linux.*\n(?:  .*\n)*", read("README.md"), re.MULTILINE)
    assert sorted(set(re.findall(r"\b3\.\d+\b", tested))) == PYTHONS


# Machines


def test_every_machine_that_is_tested_on_builds_wheels():
    tested = workflow("tests.yml")["jobs"]["suite"]["strategy"]["matrix"]["os"]
    assert workflow("release.yml")["jobs"]["wheels"]["strategy"]["matrix"]["os"] == tested


def test_the_oldest_libc_in_documents_is_that_of_the_image():
    for arch in ("x86_64", "aarch64"):
        found = re.fullmatch(r"manylinux_(\d+)_(\d+)", CIBUILDWHEEL[f"manylinux-{arch}-image"])
        assert f"glibc {found[1]}.{found[2]} or newer" in read("docs/compatibility.md")
    found = re.fullmatch(r"musllinux_(\d+)_(\d+)", CIBUILDWHEEL["musllinux-x86_64-image"])
    assert f"musl {found[1]}.{found[2]} or newer" in read("docs/compatibility.md")


def test_tests_of_wheels_exist():
    assert CIBUILDWHEEL["environment"]["LENSFAST_REQUIRE_EXTENSION"] == "1"
    assert set(CIBUILDWHEEL["test-groups"]) <= set(PYPROJECT["dependency-groups"])
    for source in [*CIBUILDWHEEL["test-sources"], *read("tests/on_wheels.txt").split()]:
        assert (ROOT / source).exists(), source


# OpenTelemetry


def test_the_oldest_opentelemetry():
    (oldest,) = {
        found for text in PROJECT["dependencies"] for found in re.findall(r"opentelemetry-api>=([\d.]+)", text)
    }
    requirements = str([PROJECT["optional-dependencies"], PYPROJECT["dependency-groups"]])
    core = set(
        re.findall(r"opentelemetry-(?:sdk|exporter-otlp|exporter-otlp-proto-http|proto)>=([\d.]+)", requirements)
    )
    assert core == {oldest}
    (instrumentation,) = set(re.findall(r"opentelemetry-instrumentation-[\w-]+>=([\d.b]+)", requirements))
    releases = workflow("tests.yml")["jobs"]["opentelemetry"]["strategy"]["matrix"]["include"]
    assert releases[0] == {"release": f"{oldest}.0", "instrumentation": instrumentation}
    if (ROOT / ".ci" / "run").exists():
        assert [f"{one['release']} {one['instrumentation']}" for one in releases] == re.findall(
            r'"([\d.]+ [\d.b]+)"', read(".ci/run")
        )
    compatibility = read("docs/compatibility.md")
    assert f"| `opentelemetry-api` | {oldest} or newer |" in compatibility
    assert f"| {instrumentation} or newer |" in compatibility


def test_releases_with_native_spans():
    tree = ast.parse(read("lensfast/_native.py"))
    known = {
        node.targets[0].id: ".".join(map(str, ast.literal_eval(node.value)))
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in {"OLDEST_SDK", "NEWEST_SDK"}
    }
    words = f"`opentelemetry-sdk` {known['OLDEST_SDK']} to {known['NEWEST_SDK']}"
    assert words in read("docs/compatibility.md")
    assert words in read("docs/native-spans.md")


# The version


def test_the_version_is_written_once():
    if not shutil.which("git"):
        pytest.skip("there is no git here to list the files")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py", "*.toml", "*.pyx", "*.pyi", "*.cfg"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no checkout: git lists no files")
    assignments = [
        name
        for name in filter(None, listed.stdout.split("\0"))
        if re.search(r"""^(?:__version__|version|release)\s*=\s*["']\d""", read(name), re.MULTILINE)
    ]
    assert assignments == ["lensfast/package_info.py"]
    assert "version" in PROJECT["dynamic"]


def test_the_changelog_has_the_version():
    """Under Unreleased until it is released; the newest first, each with a date, headings as the format has them."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', read("lensfast/package_info.py"), re.MULTILINE)
    titles = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+\S*)\] - \d{4}-\d\d-\d\d", title)[1] for title in titles[1:]]
    numbers = [tuple(map(int, re.findall(r"\d+", one)[:3])) for one in released]
    assert numbers == sorted(set(numbers), reverse=True)
    assert not released or tuple(map(int, re.findall(r"\d+", version)[:3])) >= numbers[0]
    headings = set(re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# Workflows


@pytest.mark.parametrize("text", WORKFLOWS.values(), ids=WORKFLOWS)
def test_actions_are_pinned_by_commit(text):
    lines = [line.strip() for line in text.splitlines() if re.search(r"\buses:", line)]
    assert lines
    for line in lines:
        assert re.fullmatch(r"(?:- )?uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_one_commit_per_action():
    used = set(re.findall(r"uses: (\S+)@(\S+ # \S+)", "".join(WORKFLOWS.values())))
    assert len(used) == len({action for action, _ in used})


@pytest.mark.parametrize("text", WORKFLOWS.values(), ids=WORKFLOWS)
def test_workflows_begin_with_no_rights(text):
    assert yaml.safe_load(text)["permissions"] == {}
    assert "pull_request_target" not in text
    assert "secrets." not in text


@pytest.mark.parametrize("job", JOBS)
def test_jobs_have_few_rights_and_an_end(job):
    assert 0 < job["timeout-minutes"] <= 90
    publishes = any("pypi-publish" in step.get("uses", "") for step in job["steps"])
    # What publishes runs no code of its own, and waits for the environment.
    assert job["permissions"] in ([{"id-token": "write"}] if publishes else [{}, {"contents": "read"}])
    assert ("environment" in job) == publishes
    if publishes:
        assert not [step for step in job["steps"] if "run" in step]
    for step in job["steps"]:
        if "actions/checkout@" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


def test_what_is_published_has_been_checked_and_tested():
    jobs = workflow("release.yml")["jobs"]
    assert jobs["publish"]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    # PyYAML reads the key `on` as true.
    assert workflow("release.yml")[True]["push"] == {"tags": ["v*"]}
