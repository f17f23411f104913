"""Text that a model or its programs wrote, for a page: nothing in it can act, hide or reorder."""

import math
from typing import Any

import pygments
from markupsafe import Markup
from pygments.formatters import HtmlFormatter
from pygments.lexers import JsonLexer, PythonLexer

from verl_ext.evaluation.purposes import is_json_object
from verl_ext.plots.text import plain

MAX_SHOWN = 20_000  # characters of one text on a page; the rest is counted, and has a page of its own


def cut(text: Any, most: int = MAX_SHOWN) -> str:
    """`plain`, of the first `most` characters, and how many more there are."""
    text = "" if text is None else str(text)
    more = f"\n… {len(text) - most:,} more characters" if len(text) > most else ""
    return plain(text[:most]) + more


def highlight(code: Any, most: int = MAX_SHOWN) -> Markup:
    """`cut`, as Python in colours (the classes of static/view.css); a call of another tool is JSON."""
    shown = cut(code, most)
    lexer = JsonLexer if is_json_object(shown) else PythonLexer
    # Of blank lines in a row the lexer sees the first: at each it would look through all that follow.
    lines = shown.split("\n")
    is_seen = [bool(line.strip()) or not i or bool(lines[i - 1].strip()) for i, line in enumerate(lines)]
    seen = "\n".join(line for line, kept in zip(lines, is_seen, strict=True) if kept)
    coloured = iter(pygments.highlight(seen, lexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n"))
    whole = "\n".join(next(coloured) if kept else line for line, kept in zip(lines, is_seen, strict=True))
    return Markup(whole if whole.endswith("\n") else f"{whole}\n")


def number(value: Any) -> str:
    """A number to four digits, or to all before the point; a dash where there is none."""
    if isinstance(value, float):
        return f"{value:.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:.4g}"
    return "–" if value is None else str(value)


def milliseconds(*seconds: Any) -> str:
    """The sum of durations; a dash where one is null or no finite number."""
    known = all(each is not None and abs(each) < 1e12 for each in seconds)
    return f"{sum(seconds) * 1000:.0f} ms" if known else "–"


def cell(value: Any) -> Any:
    """A value for the page's script: text without teeth, numbers as they are, what is no number as text."""
    return plain(value) if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)) else value
