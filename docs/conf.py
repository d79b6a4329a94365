"""The documentation site: `make docs` builds it into build/docs. Nothing is fetched while it is built."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ["LENSFAST_PURE_PYTHON"] = "1"  # the docstrings in full, and no compiler needed

import plots  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

from lensfast.package_info import __version__  # noqa: E402

project = "lensfast"
author = "lensfast maintainers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_*"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

default_role = "code"  # what docstrings have in single backticks
add_module_names = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "Returns:" begins with a sentence here, and not with a type
# Types of other projects, whose indexes would have to be fetched, and what is private. All else has to be found.
nitpick_ignore_regex = [(r"py:.*", r"(?!lensfast\b).*"), (r"py:class", r"lensfast\.(.+\.)?_\w+(\.UngatedSpan)?")]

html_theme = "furo"
html_title = f"lensfast {version}"
html_static_path: list[str] = []
html_show_copyright = False
html_copy_source = False
html_theme_options = {"footer_icons": []}


def keep_colons(app: object, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Napoleon takes what is before a colon in the first line on an attribute for its type; here that never is one."""
    if what in {"attribute", "data", "property"}:
        lines.insert(0, "")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon


# Beside the pages, in the source tree's build folder: an image of a page has to have a path from there.
plots.draw(ROOT / "docs" / "benchmarks.json", ROOT / "build" / "plots")
