"""The reference pages are complete, and the README's measurements are those that the plots are drawn from."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from conftest import PACKAGE, ROOT

REFERENCE = ROOT / "docs" / "reference"
PAGES = {page.name: page.read_text() for page in sorted(REFERENCE.glob("*.md"))}

# Of these there are no functions that a program would call: the page of the command line is about them.
COMMAND = {"lensfast.cli", "lensfast.demo", "lensfast.demo_torch", "lensfast.launch"}
# What lensfast's modules have for each other.
INTERNAL = {
    "lensfast.groups": {"BuiltInGroups", "RegistrySnapshot", "resolve_with_class", "spec_tokens"},
    "lensfast.providers": {"TRUNCATED"},
    "lensfast.resources.torchrun": {"RESTART_COUNT"},
}


def documented() -> set[str]:
    """The full names that the reference pages have: by a directive of autodoc's, or in backticks or a table."""
    names = set()
    for text in PAGES.values():
        names |= set(re.findall(r"^ *\.\. (?:auto|py:)\w+:: (lensfast\.[\w.]+)", text, re.MULTILINE))
        for module, options in re.findall(r"^\.\. automodule:: (\S+)\n((?:   :.*\n)*)", text, re.MULTILINE):
            some = re.search(r":members:(.*)", options)
            if some and some[1].strip():
                names |= {f"{module}.{name.strip()}" for name in some[1].split(",")}
            elif some:
                names |= {f"{module}.{name}" for name in named_with_docstring(module)}
    return names


def named_with_docstring(module: str) -> Iterator[str]:
    """What autodoc's `:members:` shows: functions, classes and constants that are described."""
    body = ast.parse(source(module).read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and described:
            yield from assigned(node)


def assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def source(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_modules(package: ModuleType) -> list[str]:
    names = [package.__name__, *(found.name for found in pkgutil.walk_packages(package.__path__, "lensfast."))]
    return [name for name in names if not re.search(r"\._", name)]


def public_names(name: str) -> Iterator[str]:
    """`__all__`; of a module without one, its own functions, classes and constants."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        yield from module.__all__
        return
    for node in ast.parse(source(name).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = [target for target in assigned(node) if target.isupper()]
        else:
            continue
        yield from (found for found in names if not found.startswith("_"))


def test_every_public_name_is_in_the_reference(lensfast):
    by_directive = documented()
    missing = []
    for module in public_modules(lensfast):
        if module in COMMAND:
            continue
        included = any(f"{{literalinclude}} ../../{module.replace('.', '/')}.py" in text for text in PAGES.values())
        for name in set(public_names(module)) - INTERNAL.get(module, set()):
            value = getattr(importlib.import_module(module), name)
            # One object may be in several modules: its entry is that of one of them.
            elsewhere = any(entry.endswith(f".{name}") and found(entry) is value for entry in by_directive)
            mentioned = not callable(value) and any(f"`{name}`" in text for text in PAGES.values())
            if not (f"{module}.{name}" in by_directive or elsewhere or mentioned or included):
                missing.append(f"{module}.{name}")
    assert missing == [], " ".join(missing)


def found(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_the_reference_has_nothing_that_is_not_there(lensfast):
    for name in documented():
        found(name)


# Environment variables

# Text in capitals that is no variable's name: names of Python objects, signals, words of messages and of system calls.
NOT_VARIABLES = {
    "ALL_GROUPS", "DEFAULT_REDACT_KEYS", "METRIC_KINDS", "NOOP", "OBSERVABLE_METRIC_KINDS", "TRUE_WORDS",
    "SC_CLK_TCK", "SIGPIPE", "SIGXFSZ", "SIGXFZ", "SPEC", "START", "SUCCESS",
}  # fmt: skip


def capitals() -> set[str]:
    """All text in the sources that could be the name of a variable, or what an f-string makes one of."""
    texts = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts |= {node.value} & set(re.findall(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*_?", node.value))
    return {text for text in texts - NOT_VARIABLES if len(text) > 3}


def variables() -> set[str]:
    """The first column of the table."""
    rows = [line.split("|")[1] for line in PAGES["environment.md"].splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([^`]+)`", " ".join(rows)))


def test_every_variable_in_the_sources_is_in_the_table():
    table = variables()
    assert len(table) > 60
    unknown = {
        text
        for text in capitals()
        # Whole; or `<PREFIX>_` goes before it, or the name of one signal into it.
        if text not in table and not any(name.endswith(f"_{text}") or name.startswith(f"{text}_") for name in table)
        if not any(name.startswith(text) for name in table if text.endswith("_"))
    }
    # Prefixes that programs choose.
    assert unknown - {"NEMO_LENS", "NEMO_LENS_", "MEGATRON_OTEL"} == set()


def test_every_variable_of_the_table_is_in_the_sources():
    sources = "\n".join(file.read_text() for file in [*PACKAGE.rglob("*.py"), ROOT / "setup.py"])
    for name in variables():
        # Some are put together, of a prefix and a setting.
        together = re.fullmatch(r"(<PREFIX>|OTEL_EXPORTER_OTLP(?:_TRACES)?|OTEL_BLRP)_(\w+)", name)
        assert f'"{together[2] if together else name}"' in sources, name


def test_what_from_env_reads_is_in_the_table(lensfast, monkeypatch):
    read = set()

    class Recording(dict):
        def get(self, name, default=None):
            read.add(name)
            return default

    monkeypatch.setattr(os, "environ", Recording())
    config = lensfast.NemoLensConfig.from_env("PREFIX")
    assert read == {name.replace("<PREFIX>", "PREFIX") for name in variables() if name in read or "<PREFIX>" in name}
    # And so are the defaults.
    defaults = dict(re.findall(r"^\| `<PREFIX>_(\w+)` \| `([^`]+)` \|", PAGES["environment.md"], re.MULTILINE))
    assert len(defaults) == 11
    for name, default in defaults.items():
        assert str(getattr(config, name.lower())).lower() == default


# The command line


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {
        option: action
        for action in parser._actions
        for option in action.option_strings
        if option not in {"-h", "--help"}
    }


def test_the_options_of_every_command(lensfast):
    parser = importlib.import_module("lensfast.cli")._parser()
    head, *sections = re.split(r"^## lensfast ", PAGES["command-line.md"], flags=re.MULTILINE)
    pages = {section.partition("\n")[0]: section for section in sections}
    commands = subparsers(parser)
    assert pages.keys() == commands.keys()
    assert set(re.findall(r"^\| .*`(--[\w-]+)", head, re.MULTILINE)) == {"--help", *options(parser)}
    for name, command in commands.items():
        rows = dict(re.findall(r"^\| `(--[\w-]+).*?` \|(.*)", pages[name], re.MULTILINE))
        assert rows.keys() == options(command).keys(), name
        for option, action in options(command).items():
            if action.default is not None and action.nargs != 0:
                assert rows[option].split("|")[0].strip() == f"`{action.default}`", option
            for choice in action.choices or ():
                assert f"`{choice}`" in rows[option], option
            assert ("required" in rows[option]) == action.required, option


# What has been measured


def test_the_table_of_the_readme_is_the_plots():
    printed = subprocess.run(
        [sys.executable, ROOT / "bench" / "table.py", "--markdown", ROOT / "docs" / "benchmarks.json"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    readme = (ROOT / "README.md").read_text()
    assert readme.partition("<!-- make bench -->\n")[2].partition("<!-- /make bench -->")[0] == printed


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("table")


def test_merged_results_are_a_result(table, tmp_path, monkeypatch, capsys):
    def result(site, reference):
        row = {"row": "a", "backend": "c", "unit": "ns", "at_least": 2, "site": site, "reference": reference}
        machine = {"python_version": "3.13.0", "processor": "", "cpu": {"brand_raw": "X", "flags": ["many"]}}
        return {"machine_info": machine, "benchmarks": [{"extra_info": {**row, "ratio": reference / site}}]}

    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for file, numbers in zip(files, [(10.0, 35.0), (12.0, 30.0)], strict=True):
        file.write_text(json.dumps(result(*numbers)))
    outputs = []
    for arguments in ([*files, "--json", tmp_path / "merged.json"], [tmp_path / "merged.json"]):
        monkeypatch.setattr(sys, "argv", ["table.py", *map(str, arguments)])
        assert table.main() == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    # The best of the site and the best of the reference.
    (row,) = table.rows([json.loads((tmp_path / "merged.json").read_text())])
    assert (row["site"], row["reference"], row["ratio"]) == (10, 30, 3)
    assert "best of 2 processes" in outputs[1]


def test_the_plots_show_what_was_measured(table, tmp_path):
    """That they are drawn, from these rows, and the same each time; the build of the site is what needs them."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here: `make docs` draws the plots")
    plots = importlib.import_module("plots")
    drawn = []
    for folder in ("one", "two"):
        plots.draw(ROOT / "docs" / "benchmarks.json", tmp_path / folder)
        drawn.append({file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()})
    assert drawn[0] == drawn[1]
    shown = re.findall(r"build/plots/([\w-]+\.svg)", (ROOT / "docs" / "benchmarks.md").read_text())
    assert sorted(shown) == sorted(drawn[0])


def test_pictures_have_a_description():
    for page in (ROOT / "docs").rglob("*.md"):
        for options in re.findall(r"```\{image\} .*\n((?::.*\n)*)", page.read_text()):
            assert re.search(r"^:alt: .{20}", options, re.MULTILINE), page
