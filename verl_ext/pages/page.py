"""Make pages from templates: all text is escaped and visible, and a page loads only its own files, or nothing.

A template extends templates/base.html, and has `parts`, the macros of templates/parts.html.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from verl_ext.pages import curves, text
from verl_ext.pages.question import first_words, question_of
from verl_ext.pages.transcript import transcript

HERE = Path(__file__).parent
STATIC = HERE / "static"
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.min.js", "charts.js", "page.js")
_POLICY = "default-src 'none'; {}; img-src data:; base-uri 'none'; form-action {}"
SERVED_POLICY = (  # of a page that has its files from its own address
    _POLICY.format("script-src 'self'; style-src 'self'; connect-src 'self'", "'self'") + "; frame-ancestors 'none'"
)
_FILTERS = {"words": first_words, "question": question_of, "transcript": transcript} | {
    each.__name__: each for each in (text.cut, text.highlight, text.number, text.percent, text.points, text.duration)
}


@functools.cache
def source(name: str) -> Markup:
    """Return a script or style to put into a page; uPlot's comes with its licence."""
    notice = f"/*\n{(STATIC / 'uPlot.LICENSE.txt').read_text(encoding='utf-8')}\n*/\n"
    return Markup(notice * (name == SCRIPTS[0]) + (STATIC / name).read_text(encoding="utf-8"))


def file_policy() -> str:
    """Return the policy of a page that is one file: only our scripts run, and nothing is loaded from anywhere."""
    hashes = (base64.b64encode(hashlib.sha256(source(name).encode()).digest()).decode() for name in SCRIPTS)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return _POLICY.format(f"script-src {allowed}; style-src 'unsafe-inline'", "'none'")


def environment(folder: Path, **names: Any) -> jinja2.Environment:
    """Return the templates of a folder, with the filters and further `names` that they use; a missing value is an
    error."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, HERE / "templates"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=text.finalize,
    )
    found.filters |= _FILTERS | {name: each for name, each in names.items() if callable(each)}
    found.globals |= {
        "styles": STYLES,
        "scripts": SCRIPTS,
        "source": source,
        "file_policy": file_policy,
        "curves": curves,
    }
    found.globals |= names
    found.globals["parts"] = found.get_template("parts.html").module
    return found


def render(template: jinja2.Template, *, as_file: bool = True, **values: Any) -> str:
    """Return a page: a file that holds all that it needs and links to nothing, or one for a server of STATIC."""
    html = template.render(values | {"as_file": as_file})
    if as_file:
        html = re.sub(r"<(nav|form)\b.*?</\1>", "", html, flags=re.S)
        html = re.sub(r'<a\b([^>]*) href="/[^"]*"([^>]*)>(.*?)</a>', _unlinked, html, flags=re.S)
    return html


def _unlinked(link: re.Match) -> str:
    """Return a link's content without the link; a labelled dot becomes an image, or its label would not be read."""
    before, after, said = link.groups()
    role = ' role="img"' if "aria-label=" in before + after else ""
    return f"<span{role}{before}{after}>{said}</span>"
