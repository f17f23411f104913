"""Bring one answer to a common LaTeX spelling, so that equal answers are mostly equal strings.

Only text is handled here. What remains different is compared as numbers (rationals.py), by structure (structure.py)
or as expressions (symbolic.py).
"""

import re
from functools import lru_cache
from itertools import accumulate

from verl_ext.reward.maths.notation import write_latex
from verl_ext.reward.maths.unicode_signs import to_latex

MAX_WRAPPERS = 8  # brackets around a whole answer that are dropped

BASES = {word: number for number, word in enumerate("two three four five six seven eight nine ten".split(), 2)}

_FUNCTIONS = "sin|cos|tan|cot|sec|csc"

# Commands with another spelling.
_MACROS = {"lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "langle": "(", "rangle": ")", "div": "/"}
_MACROS |= {"lbrace": r"\{", "rbrace": r"\}", "backslash": r"\setminus ", "bigcup": r"\cup "}
_MACROS |= {"nless": r"\ge ", "ngtr": r"\le ", "nleq": ">", "ngeq": "<"}
_MACROS |= {"vee": r"\lor ", "wedge": r"\land ", "times": r"\cdot ", "ast": r"\cdot "}
_MACROS |= dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|") | dict.fromkeys(("lVert", "rVert", "Vert"), r"\|")


def _said(words: str) -> str:
    """Return a pattern of words, in `\\text` or not."""
    return rf"(?i:\\text\s*\{{\s*{words}\s*\.?\s*\}}|{words})"


_IN_TEXT = r"\\text\s*\{([^{}]*)\}\s*(\^\s*(?:\d|\{\d\}))?"
# Rules that change how an answer looks, not what it says. Each line works on the result of the lines above it.
_LAYOUT = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\{\s*:\s*\}|\\colon(?![a-zA-Z])|\\math(?:ord|bin|rel)\s*\{\s*:\s*\}", ":"),
        (r"(?<=\d)(?:\{,\}|,?\\!|\\,|\\ |~|')+\s*(?=\d{3}(?!\d))", ""),  # 12\,000  1{,}234  32,\!349  1'234
        (r"(?<!\\)\\[\[\]()]|(?<!\\)\$", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        (r"\\(?:display|text|script)style(?![a-zA-Z])|\\(?:no)?limits(?![a-zA-Z])|\\hspace\{[^{}]*\}", " "),
        (r"\\q?quad(?![a-zA-Z])|(?<!\\)\\[,;:!> ]|~|&nbsp;", " "),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])", ""),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|underline|boxed|fbox)\s*\{(\d+)\}", r"\1"),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|underline|boxed|fbox)(?![a-zA-Z])", ""),
        (r"\\(?:mbox|text(?:rm|bf|it|normal|up)|emph|operatorname\*?|mathrm)(?![a-zA-Z])", r"\\text"),
        (rf"\\frac\s*\{{\s*{_IN_TEXT}\s*\}}\s*\{{\s*{_IN_TEXT}\s*\}}", r"\\text{\1\2/\3\4}"),
        (r"(?<=[a-zA-Z])\{\s*\}", " "),  # \pi{}r
        (r"^\s*\\text\s*\{\s*(?i:(?:the )?(?:final )?answer(?: is)?)\s*[:=]?\s*\}\s*(?=\S)", ""),
        (r"^\s*\\text\s*\{\s*(-?\d[\d,.]*)\s+([a-zA-Z][^{}]*)\}\s*$", r"\1\\text{\2}"),  # \text{18 dollars}
        # numbers, units of one letter, choices
        (r"\\text\s*\{((?:[^a-zA-Z{}]|\b(?:and|or)\b)*|\s*[a-zA-Z]\s*|\s*\([a-zA-Z]\)\s*)\}", r" \1"),
        (r"\*\*", "^"),
        (r"\+/-|(?:^|(?<==))\s*\+-", r"\\pm "),
        (r"(?<=[)\]}])\s*U\s*(?=[(\[{\\])", r"\\cup "),
        (r"(?<![\\a-zA-Z])([a-zA-Z]|\([a-z, ]+\))\s+in\s+(?=[({\[\\])", r"\1\\in "),
    ]
]
# After notation.py has written arguments in braces: one spelling per symbol.
_SYMBOLS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}|(?<![a-zA-Z\\])C\((\d+),\s*(\d+)\)", r"\\binom{\1\3}{\2\4}"),
        (rf"\\({'|'.join(_MACROS)})(?![a-zA-Z])", lambda m: _MACROS[m[1]]),
        (r"\\mathbb\s*([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}"),
        (r"(\\mathbb\{[A-Z]\})\s*-\s*(?=\\\{)", r"\1\\setminus "),
        (r"\\not\s*(?:=|\\eq(?![a-zA-Z]))", r"\\ne "),
        (r"\\leq(?:slant|q)?(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geq(?:slant|q)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|(?<![\d)])!=", r"\\ne "),
        (r"\\(?:simeq|approxeq|thickapprox|doteq)(?![a-zA-Z])", r"\\approx "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\in(?![a-zA-Z])", r"\\in "),
        (r"\\var(epsilon|theta|kappa|rho|sigma|phi)(?![a-zA-Z])", r"\\\1"),
        (r"\+?\s*\\inf(?:in|ty|inity)(?![a-zA-Z])", r"\\infty "),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (rf"^\s*{_said('(?:the )?empty set')}\s*$", r"\\emptyset "),
        (rf"^\s*((?:[a-z] *\\in *)?){_said('(?:the set of )?all real(?:s| numbers)')}\s*$", r"\1\\mathbb{R}"),
        (r"\*", r"\\cdot "),
        (rf"_\s*(\{{\s*)?\\text\s*\{{\s*({'|'.join(BASES)})\s*\}}(?(1)\s*\}})", lambda m: f"_{BASES[m[2]]}"),
    ]
]
_GROUPED = r"\d{1,3}(?:,\d{3})+"
# After degrees have become part of the argument of a function.
_UNITS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # units that never change the number; other units are read in rationals.py
        (
            r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\{\s*\}\s*)?(?:\\text\s*\{\s*([CF])\s*\}|([CF])(?![a-zA-Z]))",
            r"\\text{deg\1\2}",
        ),
        (r"\\%|\\text\{\s*(?:percent|pct)\.?\s*\}|(?<=\d)\s*(?:percent(?:age)?|per cent|pct)\b", "%"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?(?![a-zA-Z])", ""),
        (r"(?:\bUS ?)?\\\$|^\s*(?:USD|EUR|GBP|Rs\.?)\s*(?=\d)", ""),
        # separators of several values
        (rf"^\s*{_GROUPED}(?:\s*(?:and|or)\s*{_GROUPED})+\s*$", lambda m: m[0].replace(",", "")),
        (
            r"(?!^)(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])|(?<=\d)or(?=\d))(?=\s*[^\s.])",
            ",",
        ),
        (r",(?:\s*,)+", ","),
        (r"\s+", " "),
    ]
]
RELATION = re.compile(r"<|>|\\(?:le|ge|ne)(?![a-zA-Z])")
_AND, _OR = (
    re.compile(
        rf"\s*,?\s*(?:\\text\s*\{{\s*,?\s*{word}\s*\}}|\\l{word}(?![a-zA-Z])|(?<![\\a-zA-Z]){word}(?![a-zA-Z]))\s*"
    )
    for word in ("and", "or")
)
_ROW_END = re.compile(r"\\\\(?:\s*\[[^\[\]]*\])?")
_SYSTEM = re.compile(  # equations or inequalities one below the other, most with a brace before them
    r"(?P<brace>(?:\\left\s*)?\\\{\s*)?\\begin\s*\{(?P<name>[dr]?cases|align(?:ed)?\*?|gathered|split|array|matrix)\}"
    r"(?:\s*\{[lcr|\s]*\})?(?P<rows>(?:(?!\\begin|\\end).)*)\\end\s*\{(?P=name)\}(?(brace)(?:\s*\\right\s*\.)?)",
    re.DOTALL,
)
_ALIGNED = re.compile(r"\s*&\s*(?==|<|>|\\[lg]e|\\ne)|(?<=[=<>])\s*&\s*")
_AMPERSAND = {False: re.compile(r"(?:\s*\\?&(?:amp;)?)+\s*"), True: re.compile(r"\s*\\&\s*")}
DEGREES_AS_RADIANS = r"\cdot\frac{\pi }{180}"
_DEGREES = re.compile(
    r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\(?:degrees?|deg)(?![a-zA-Z])"
    r"|\\text\s*\{\s*deg(?:rees?)?\.?\s*\}|(?<=[\d\s)}])degrees?(?![a-zA-Z]))"
)
_FUNCTION = re.compile(rf"\\(?:{_FUNCTIONS})(?![a-zA-Z])\s*(?:\^\s*(?:\{{[^{{}}]*\}}|\d))?\s*")
_ARGUMENT = re.compile(
    r"[-+]?(?:(?!\b(?:and|or)\b)(?:\{(?:[^{}]|\{[^{}]*\})*\}|\([^()]*\)"
    rf"|\\(?!(?:{_FUNCTIONS}|l[en]|g[et]|ne|in|cup|pm|mp|text)(?![a-zA-Z]))[a-zA-Z]+|[^-+=<>,;()\[\]{{}}\\|&]))*"
)
# ]0,1[ for (0,1): brackets that open outwards leave the end out; no LaTeX command is between them.
_OUTWARD = re.compile(r"^(?=\]|.*\[$)([\[\]])([^\[\](){}]*,[^\[\](){}]*)([\[\]])$")
_END = re.compile(r"(?:[\s,;:\\]|(?<!\.)\.(?!\.))+$")  # dots leave the rest open, and stay
# "The final answer is", "Answer:", and an equals sign without a left side.
_PREAMBLE = re.compile(
    r"^(?:(?:the )?(?:final )?answer(?: is(?! not)| ?:| ?=)[: ]*|= ?)(?=.)|^both (?=.*,)", re.IGNORECASE
)


@lru_cache(maxsize=4096)
def normalise(answer: str) -> str:
    """Return one spelling for an answer: unicode folded, layout and fonts dropped, macros unified, final dot removed.

    It does not judge: nonsense comes back as nonsense.
    """
    text = to_latex(answer)
    if r"\begin" in text:
        text = _SYSTEM.sub(_write_system, text)
    if "&" in text:
        text = _AMPERSAND[r"\begin" in text].sub(" and ", text)
    for pattern, replacement in _LAYOUT:
        text = pattern.sub(replacement, text)
    text = write_latex(text)
    for pattern, replacement in _SYMBOLS:
        text = pattern.sub(replacement, text)
    text = _degrees_as_radians(text.strip())
    text = _write_connectives(text)
    for pattern, replacement in _UNITS:
        text = pattern.sub(replacement, text)
    text = _PREAMBLE.sub("", _END.sub("", text).lstrip(" ,:"))
    pieces = re.split(r"\s*\\cup(?![a-zA-Z])\s*", text)
    text = r"\cup ".join(
        _OUTWARD.sub(lambda m: "[("[m[1] == "]"] + m[2] + "])"[m[3] == "["], piece) for piece in pieces
    )
    groups = split_top_level(text, ";")
    if len(groups) > 1 and "," in text:  # p=5,q=2; p=7,q=2
        text = ",".join(f"({group})" for group in groups)
    return unwrap_group(text.replace(";", ","))


def _write_system(match: re.Match[str]) -> str:
    """Write the rows of a system as a list; leave a matrix, or a function that is defined piecewise."""
    if match["name"] in ("array", "matrix") and not match["brace"]:
        return match[0]
    rows = [_ALIGNED.sub("", row).strip(" &,;.\n") for row in _ROW_END.split(match["rows"])]
    rows = [cell.strip(" ,;") for row in rows if row for cell in row.split("&")]
    if any(not (RELATION.search(row) or "=" in row) or _AND.search(row) or _OR.search(row) for row in rows):
        return match[0]
    return (" and " if RELATION.search(match["rows"]) else ", ").join(rows)


def _write_connectives(text: str) -> str:
    r"""Write "and" and "or" between inequalities as `\land` and `\lor`, and these signs between equations as commas."""
    if RELATION.search(text):
        return _AND.sub(r"\\land ", _OR.sub(r"\\lor ", text))
    return re.sub(r"\\(?:land|lor)(?![a-zA-Z])", ",", text) if "=" in text else text


def _degrees_as_radians(text: str) -> str:
    """Write `\\sin 45^\\circ` as `\\sin(45\\cdot\\frac{\\pi }{180})`: degrees count in an argument, not in an angle.

    An argument is the bracket after the function, or the text up to its degree sign, or without a degree sign up to a
    sum, a relation, a comma, a word or the next function: `\\sin 30^\\circ\\cdot 4` is 2. A letter may divide it:
    `\\sin 180^\\circ/n`.
    """
    if not _DEGREES.search(text):
        return text
    written, position = [], 0
    for function in _FUNCTION.finditer(text):
        start = function.end()
        if start < position:
            continue
        bracket = closing_index(text[start:]) + 1 if text[start : start + 1] in ("(", "{", "[") else 0
        end = start + bracket if bracket > 0 else _argument_end(text, start)
        if unit := _DEGREES.match(text, end):  # \sin(45)^\circ, \sin 45 \text{ degrees}
            end = unit.end()
        radians, count = _DEGREES.subn(lambda _: DEGREES_AS_RADIANS, text[start:end].strip())
        if count:
            written += [text[position:start], "(", unwrap_group(radians), ")"]
            position = end
    return "".join([*written, text[position:]])


def _argument_end(text: str, start: int) -> int:
    """Return where an argument without a bracket ends; a degree sign inside braces or a bracket does not end it."""
    longest = argument.end() if (argument := _ARGUMENT.match(text, start)) else start
    for unit in _DEGREES.finditer(text, start, longest):
        before = text[start : unit.start()]
        if before.count("{") == before.count("}") and before.count("(") == before.count(")"):
            divided = re.match(r"\s*/\s*[a-zA-Z](?![a-zA-Z])", text[unit.end() : longest])
            return unit.end() + (divided.end() if divided else 0)
    return longest


def unwrap_group(text: str) -> str:
    """Drop braces and parentheses around a whole single value: `{x}` and `(x)` are x. `(1,2)` and `{1,2}` stay."""
    text = text.strip()
    for _ in range(MAX_WRAPPERS):
        if text[:1] not in ("{", "(") or closing_index(text) != len(text) - 1 or split_top_level(text[1:-1])[1:]:
            break
        text = text[1:-1].strip()
    return text


def closing_index(text: str) -> int:
    """Return the index of the bracket that closes the first one; -1 if it stays open. `(`, `[` and `{` all count."""
    depths = accumulate((char in "([{") - (char in ")]}") for char in text)
    return next((index for index, depth in enumerate(depths) if depth == 0), -1)


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """Split `text` at separators outside every bracket, and strip the parts. `[0,1)` counts as a pair."""
    if separator not in text:
        return [text.strip()]
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if depth == 0 and index >= start and text.startswith(separator, index):
            parts.append(text[start:index].strip())
            start = index + len(separator)
        elif index >= start:
            depth = max(0, depth + (char in "([{") - (char in ")]}"))
    return [*parts, text[start:].strip()]


def key(text: str) -> str:
    """Return `text` as compared: without spaces (but "1 2" is not 12), with `x^2` for `x^{2}`, and unwrapped."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"([_^])\s*\{\s*([a-zA-Z0-9])\s*\}", r"\1\2", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
