"""Write numbers, and prepare text that a model or its programs wrote: nothing in it can act, hide or reorder."""

import math
import re
from collections.abc import Mapping
from typing import Any

import pygments
from markupsafe import Markup
from pygments.formatters import HtmlFormatter
from pygments.lexers import JsonLexer, PythonLexer

MAX_SHOWN = 20_000  # characters of one text on a page; the rest is counted, and has a separate page
NONE = "–"  # for a value that is not there
# Controls beyond ASCII, line ends, the blank Braille pattern, annotations, and all of Unicode's property
# Default_Ignorable_Code_Point: marks that change the direction, invisible joiners, fillers, variation selectors, tags.
_HIDDEN = re.compile(
    "[\x7f-\x9f\u00ad\u034f\u061c\u115f-\u1160\u17b4-\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    "\ud800-\udfff]"
)
_CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}


def plain(text: Any) -> str:
    """Replace control characters by their pictures (ESC: U+241B), and invisible or reordering ones by their number."""
    shown = "" if text is None else str(text).replace("\r\n", "\n").translate(_CONTROL)
    return _HIDDEN.sub(lambda found: f"<U+{ord(found[0]):04X}>", shown)


def finalize(value: Any) -> Any:
    """Return what a template shows, for jinja2: text made `plain`, and our own markup as it is."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def cut(text: Any, most: int = MAX_SHOWN) -> str:
    """Return `plain` of the first `most` characters, and how many more there are."""
    text = "" if text is None else str(text)
    more = f"\n… {len(text) - most:,} more characters" if len(text) > most else ""
    return plain(text[:most]) + more


def highlight(code: Any, most: int = MAX_SHOWN) -> Markup:
    """Return `cut` text as coloured Python (the classes of static/page.css), or as JSON for a call of another tool."""
    shown = cut(code, most)
    lexer = JsonLexer if shown.lstrip().startswith("{") else PythonLexer
    # The lexer sees only the first of several blank lines: at each one it would scan all that follow.
    lines = shown.split("\n")
    is_seen = [bool(line.strip()) or not i or bool(lines[i - 1].strip()) for i, line in enumerate(lines)]
    seen = "\n".join(line for line, kept in zip(lines, is_seen, strict=True) if kept)
    coloured = iter(pygments.highlight(seen, lexer(stripnl=False), HtmlFormatter(nowrap=True)).split("\n"))
    whole = "\n".join(next(coloured) if kept else line for line, kept in zip(lines, is_seen, strict=True))
    return Markup(whole if whole.endswith("\n") else f"{whole}\n")


def number(value: Any) -> str:
    """Return a number with four digits, or with all those before the point."""
    if isinstance(value, float):
        return f"{value:.0f}" if 9999.5 <= abs(value) < 1e15 else f"{value:.4g}"
    return NONE if value is None else str(value)


def percent(share: Mapping[str, Any] | float | None, *, interval: bool = True) -> str:
    """Format a share as `31.2%`, an estimate as `31.2% [28.4, 34.1]` if an interval is wanted and can be stated."""
    if share is None:
        return NONE
    if not isinstance(share, Mapping):
        return f"{100 * share:.1f}%"
    ends = f" [{100 * share['low']:.1f}, {100 * share['high']:.1f}]" if interval and share["low"] is not None else ""
    return f"{100 * share['value']:.1f}%{ends}"


def points(estimate: Mapping[str, Any] | None) -> str:
    """Format a difference in percentage points: `+62.9 [+59.0, +66.8]`, without the interval if none can be stated."""
    if estimate is None:
        return NONE
    if estimate["low"] is None:
        return f"{100 * estimate['value']:+.1f}"
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * estimate[end] for end in ("value", "low", "high")))


def duration(*seconds: float | None) -> str:
    """Format the sum of durations: `250 ms`, `4.20 s`, `5 min 07 s`, `3 h 05 min`."""
    known = [each for each in seconds if each is not None and abs(each) < 1e12]
    if len(known) < len(seconds):
        return NONE
    whole = sum(known)
    if whole < 1:
        return f"{1000 * whole:.0f} ms"
    if whole < 60:
        return f"{whole:.2f} s"
    minutes, rest = divmod(round(whole), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def cell(value: Any) -> Any:
    """Return a value for the page's script: text made harmless, numbers as they are, non-finite numbers as text."""
    return plain(value) if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)) else value
