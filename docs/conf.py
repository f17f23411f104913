"""Build the documentation as a site: `python -m sphinx -W -b html docs outputs/site`; scripts/test.sh unit does it.

Markdown by MyST, theme Furo, reference of the library parts by autoapi, which reads the source and imports none of it.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "verl-retool"
author = "verl-retool contributors"
copyright = f"2026, {author}"  # Sphinx's name
html_title = project

extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon", "sphinx_llms_txt"]
suppress_warnings = ["autoapi.python_import_resolution"]  # modules that are not shown
napoleon_use_ivar = True
default_role = "code"  # docstrings have single back quotes, as Markdown does
root_doc = "index"
exclude_patterns = ["own_task", "upstream"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}

# Parts that are useful as a library; the rest of the package is for its commands.
autoapi_dirs = ["../verl_ext"]
autoapi_root = "reference/api"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_options = ["members", "undoc-members", "show-module-summary"]
SECTION_BODY = re.compile(r"^\s+\*{0,2}\w+(?: \([^)]*\))?: ")  # an argument, whose text continues below it
PUBLIC = (
    "verl_ext.objectives",
    "verl_ext.sandbox.client",
    "verl_ext.reward.score",
    "verl_ext.reward.verifiers",
    "verl_ext.environments.tool_errors",
    "verl_ext.evaluation.estimators",
    "verl_ext.evaluation.figures",
)


PACKAGE = Path(__file__).resolve().parents[1] / "verl_ext"


def is_shown(name: str) -> bool:
    """Return whether a module is one of the public parts, or a package above one."""
    return any(name == part or name.startswith(f"{part}.") or part.startswith(f"{name}.") for part in PUBLIC)


def module_name(path: Path) -> str:
    return ".".join(("verl_ext", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


# Reading a file takes a second or two, so only those that are shown are read.
autoapi_ignore = [str(path) for path in PACKAGE.rglob("*.py") if not is_shown(module_name(path))]


def skip(app: Sphinx, what: str, name: str, obj: object, skipped: bool, options: list[str]) -> bool:
    """Leave out names that begin with an underscore."""
    return skipped or name.rpartition(".")[2].startswith("_")


def as_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Escape what reStructuredText would read as markup: docstrings are plain text with back quotes."""
    written: list[str] = []
    for line in lines:
        parts = line.split("`")
        parts[::2] = [re.sub(r"[|*]|_(?![a-zA-Z0-9])", r"\\\g<0>", part) for part in parts[::2]]
        indent = len(line) - len(line.lstrip())
        before = written[-1] if written else ""
        is_deeper = before.strip() and indent > len(before) - len(before.lstrip()) and not before.rstrip().endswith(":")
        is_item = before.strip() and line.lstrip().startswith("- ") and not before.lstrip().startswith("- ")
        written += [""] if (is_deeper and indent >= 4 and not SECTION_BODY.search(before)) or is_item else []
        written.append("`".join(parts))
    lines[:] = written


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", as_rst, priority=100)  # before napoleon's
    app.connect("autoapi-skip-member", skip)
