"""Make foreign text safe to show in the viewer and the report: nothing in it can hide or reorder."""

import re
from typing import Any

from markupsafe import Markup

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
