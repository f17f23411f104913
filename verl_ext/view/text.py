"""Prepare text that a model or its programs wrote for a page: nothing in it can act, hide or reorder."""

import math
from typing import Any

import pygments
from markupsafe import Markup
from pygments.formatters import HtmlFormatter
from pygments.lexers import JsonLexer, PythonLexer

from verl_ext.evaluation.purposes import is_json_object
from verl_ext.plots.text import plain

MAX_SHOWN = 20_000  # characters of one text on a page; the rest is counted, and has a separate page


def cut(text: Any, most: int = MAX_SHOWN) -> str:
    """Return `plain` of the first `most` characters, and how many more there are."""
    text = "" if text is None else str(text)
    more = f"\n… {len(text) - most:,} more characters" if len(text) > most else ""
    return plain(text[:most]) + more


def highlight(code: Any, most: int = MAX_SHOWN) -> Markup:
    """Return `cut` text as coloured Python (the classes of static/view.css), or as JSON for a call of another tool."""
    shown = cut(code, most)
    lexer = JsonLexer if is_json_object(shown) else PythonLexer
    # The lexer sees only the first of several blank lines: at each one it would scan all that follow.
    lines = shown.split("\n")
    is_seen = [bool(line.strip()) or not i or bool(lines[i - 1].strip()) for i, line in enumerate(lines)]
    seen = "\n".join(line for line, kept in zip(lines, is_seen, strict=True) if kept)
    coloured = iter(pygments.highlight(seen, lexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n"))
    whole = "\n".join(next(coloured) if kept else line for line, kept in zip(lines, is_seen, strict=True))
    return Markup(whole if whole.endswith("\n") else f"{whole}\n")


def number(value: Any) -> str:
    """Return a number with four digits, or with all those before the point; a dash for None."""
    if isinstance(value, float):
        return f"{value:.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:.4g}"
    return "–" if value is None else str(value)


def milliseconds(*seconds: Any) -> str:
    """Return the sum of durations; a dash if one is null or not finite."""
    known = all(each is not None and abs(each) < 1e12 for each in seconds)
    return f"{sum(seconds) * 1000:.0f} ms" if known else "–"


def cell(value: Any) -> Any:
    """Return a value for the page's script: text made harmless, numbers as they are, non-finite numbers as text."""
    return plain(value) if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)) else value
