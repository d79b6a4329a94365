"""The metadata agrees with pyproject.toml, and the build finds the version without importing the package."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from conftest import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_metadata_is_that_of_the_project(lensfast):
    info, project = lensfast.package_info, PROJECT["project"]
    assert info.__package_name__ == project["name"] == "lensfast"
    assert info.__description__ == project["description"]
    assert info.__license__ == project["license"]
    assert info.__keywords__.split(", ") == project["keywords"]
    for name in ("contact_names", "contact_emails", "homepage", "repository_url", "download_url"):
        assert isinstance(getattr(info, f"__{name}__"), str)


def test_version(lensfast):
    info = lensfast.package_info
    assert info.VERSION == (info.MAJOR, info.MINOR, info.PATCH, info.PRE_RELEASE)
    assert [type(part) for part in info.VERSION] == [int, int, int, str]
    assert info.__shortversion__ == f"{info.MAJOR}.{info.MINOR}.{info.PATCH}"
    assert info.__version__ == info.__shortversion__ + info.PRE_RELEASE
    assert lensfast.__version__ == info.__version__


@pytest.mark.parametrize(
    ("version", "parts"),
    [("0.1.0", (0, 1, 0, "")), ("1.22.333rc4", (1, 22, 333, "rc4")), ("2.0.0.dev1", (2, 0, 0, ".dev1"))],
)
def test_parts_of_other_versions(version, parts):
    source = (PACKAGE / "package_info.py").read_text()
    namespace = {}
    exec(re.sub(r'^__version__ = ".*"$', f"__version__ = {version!r}", source, flags=re.MULTILINE), namespace)
    assert namespace["VERSION"] == parts
    assert namespace["__version__"] == version


def test_the_version_is_a_literal(lensfast):
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lensfast.package_info.__version__"}
    tree = ast.parse((PACKAGE / "package_info.py").read_text())
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__version__" for target in node.targets)
    ]
    assert [ast.literal_eval(value) for value in values] == [lensfast.__version__]
