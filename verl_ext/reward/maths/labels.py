r"""The left side of `x = 3`, `f(2) = 3`, `\angle ABC = 3`, `\text{Area of }ABC = 3`: a name of the wanted value.

A label is one variable or a named quantity. `x/2`, `\log x`, `|x|`, `\pi` and `\text{not }x` are not labels: whoever
writes them before `= 6` does not say that the answer is 6.
"""

import re

from verl_ext.reward.maths.normalisation import DEGREES_AS_RADIANS, RELATION, key, split_top_level, unwrap_group
from verl_ext.reward.maths.units import changes_a_number

MAX_CHARS = 120  # of a label
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi|omega|ell"
    r"|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)(?![a-zA-Z])\s*"
)
_SCRIPT = r"\s*(?:_\s*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\}|\w)\s*)?(?:'|\^\{?(?:\\prime|\\cdot|\*)\s*\}?)*\s*"
_ACCENT = r"\\(?:hat|widehat|bar|vec|tilde|mathcal|mathbb|mathscr|mathfrak)"
_LETTER = rf"(?:[a-zA-Z]\s*|{_GREEK}|{_ACCENT}\s*\{{?\s*(?:[a-zA-Z]|{_GREEK})\s*\}}?)"
_VARIABLE = rf"(?!(?:[ie]|\\pi)\s*$){_LETTER}{_SCRIPT}"  # i and e are numbers
_POINT = r"[A-Z](?:'|_\{?\w+\}?)?"
_FIGURE = (
    rf"(?:m\s*)?\\angle\s*(?:{_POINT}\s*){{1,3}}|\\(?:triangle|square|odot)\s*(?:{_POINT}\s*){{1,4}}|(?:m\s*)?\\angle\s*{_LETTER}"
    rf"|(?:{_POINT}){{2,4}}|\|\s*(?:{_POINT}){{2}}\s*\||\|\s*[A-W]\s*\||\[\s*(?:{_POINT}){{3,6}}\s*\]"
    rf"|\\(?:overline|overrightarrow|bar|widehat|hat|vec)\s*\{{\s*(?:{_POINT}){{2,3}}\s*\}}"
)
_SEGMENTS = re.compile(r"(?:[A-Z]{2}|[-+/\s]|\\cdot|\\frac|[{}:])+")
_CALL = re.compile(
    rf"(?P<name>{_LETTER}){_SCRIPT}(?:\^\s*\{{?\s*(?:-1|\(\d\)|\d)\s*\}}?)?\s*[(\[](?P<inside>[^()]*(?:\([^()]*\)[^()]*)*)[)\]]"
    rf"|\((?:{_LETTER}\s*(?:\\circ|\+|-|\\cdot)\s*)+{_LETTER}\)\s*\([^()]*\)"
)
_NOT_CALLED = {
    *"xyznkie",
    r"\pi",
    r"\Gamma",
    r"\zeta",
}  # a bracket after them is a factor, except for another letter: y(t)
_OPERATOR = re.compile(
    r"(?:\\(?:gcd|lcm|max|min|sup|inf|det|deg|dim|Pr|arg)(?![a-zA-Z])|\\text\s*\{\s*(?:Area|Vol|Var|Cov|rank|tr|area|vol|lcm)\s*\})"
    r"\s*(?:_\s*\{[^{}]*\}\s*)?(?P<of>[^\d+*/^<>]*)"
)
_OF_ANGLE = re.compile(rf"\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\(\s*)?(?:[A-Z]\s*|{_GREEK}|\\angle\s*[A-Z]{{1,3}}\s*)\)?")
_FONT_BRACES = re.compile(r"(?:^|(?<=\s))\{\s*([a-zA-Z]+'?)\s*\}")  # what is left of \mathbf{M}
_LIMIT = re.compile(r"\\lim\s*_\s*\{[^{}]*\}(?!\s*[a-z]\s*$).+")
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d\s*[a-zA-Z]\s*\}\s*\{\s*d\s*[a-zA-Z]\s*\}|d[a-zA-Z]\s*/\s*d[a-zA-Z]")
_SUM = re.compile(r"([a-zA-Z]\s*\+\s*)+[a-zA-Z]")
_NAMES = re.compile(rf"{_VARIABLE}|{_FIGURE}")
_BARE = r"(?:the|of|sum|age|max|min)\b|[a-zA-Z]{4,}"  # xy and abc are products
_WORDS = re.compile(
    rf"(?P<words>(?:\\text\s*\{{[^{{}}]*\}}|\b(?:{_BARE})(?:'s)?|[\s:,()-])+)(?P<of>{_VARIABLE}|{_FIGURE})?"
)
_CONSTANT = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|binom|frac|sqrt|lfloor|lceil)(?![a-zA-Z])"
)
# Words that name a quantity, although next to a number they change it; not before a variable, as in "sum of x".
_QUANTITIES = set(
    "sum product difference quotient remainder ratio proportion fraction percent percentage percentile answer answers "
    "digit digits integral limit derivative function exponent base power degree root roots estimate right mean time "
    "times work gradient increase decrease other another least most larger smaller greater higher lower turns".split()
)
_ORDINALS = set(
    "first third fourth fifth sixth seventh eighth ninth tenth".split()
)  # the third side, but no third of it
_SMALL_WORDS = set(
    "the of a an to in for by on at all its with from this that which we they he she it her his between after "
    "before".split()
)
_FUNCTIONS = set("sgn sign signum re im arg conj mod det tr erf".split())
_ANSWERS = set("the final answer result conclusion solution is value".split())


def split_label(text: str, *, trusted: bool = False) -> tuple[str, str]:
    r"""Split `x = 3` into ("x", "3"), `f(x) = y = 3` into ("f(x)", "3"), `x \in S` into ("x", "S"); else ("", text).

    Values that all have one label are its list: `x=2, x=3` -> ("x", "2,3"). `3 = x` is read as `x = 3`.

    Args:
        trusted: the text is a ground truth: any left side with a letter is a label, except powers, sums and multiples.
    """
    if re.search(r"\\l(?:or|and)(?![a-zA-Z])", text):  # x=5 or x<1
        return "", text
    if common := _common_label(text, trusted):
        return common
    label, *values = split_top_level(text, "=")
    if len(values) == 1 and is_label(values[0], label) and not re.search("[a-zA-Z=]", label):
        label, values = values[0], [label]
    if not values:
        label, *values = split_top_level(text, r"\in ")
        if values and RELATION.search(text) and split_top_level(text)[1:]:  # x \in R, x \ne 2
            return "", text
    several = len(values) > 1 and len(split_top_level(text)) > 1  # x=1, y=2
    several = several or any(part.endswith(label) for part in values[:-1])  # x=1 x=2
    if not values or not values[-1] or several:
        return "", text
    if is_label(label, values[-1]) or (trusted and _may_be_label(label)):
        return label, values[-1]
    return "", text


def _common_label(text: str, trusted: bool) -> tuple[str, str] | None:
    """Read `x=2,x=3`, `x_1=2,x_2=3` and `x=2,3,x=4` as one label with its values."""
    if text.count("=") < 2 or "," not in text or RELATION.search(text):
        return None
    labels, values = [], []
    for part in split_top_level(text):
        sides = split_top_level(part, "=")
        if len(sides) > 2 or not sides[-1] or (len(sides) == 1 and not labels):
            return None
        labels += [key(side) for side in sides[:-1]]
        values.append(sides[-1])
    if len(set(labels)) > 1 or len(labels) < 2 or not (is_label(labels[0]) or (trusted and _may_be_label(labels[0]))):
        return None
    return labels[0], ",".join(values)


def split_indexed(text: str, label: str) -> tuple[str, str] | None:
    """Read `x_1=2, x_2=3` as the values of `x`, each index once; None for anything else."""
    read = [re.fullmatch(r"(.*?)\s*_\s*\{?\s*(\d)\s*\}?\s*=([^=]+)", part) for part in split_top_level(text)]
    found = [each for each in read if each]
    if len(read) < 2 or len(found) < len(read) or {key(each[1]) for each in found} != {key(label)}:
        return None
    indices = {each[2] for each in found}
    return (label, ",".join(each[3].strip() for each in found)) if len(indices) == len(found) else None


def is_label(text: str, value: str = "") -> bool:
    """Return whether a left side names the wanted quantity, whose value is on the right."""
    text = _FONT_BRACES.sub(r"\1", text.replace(DEGREES_AS_RADIANS, "")).strip()
    if len(text) > MAX_CHARS or not text:
        return False
    in_brackets = text[0] == "(" and text[-1] == ")"
    names = split_top_level(text[1:-1] if in_brackets else text)
    if len(names) > 1 and all(_NAMES.fullmatch(name) for name in names):  # of as many values: x,y=6 is none for 6
        return bool(re.search(r",|\\(?:begin|mathbb)", value))
    if in_brackets:
        return is_label(unwrap_group(text[1:-1]))
    if _NAMES.fullmatch(text) or _OF_ANGLE.fullmatch(text) or _DERIVATIVE.fullmatch(text) or _LIMIT.fullmatch(text):
        return True
    if _SUM.fullmatch(text):
        letters = re.findall("[a-zA-Z]", text)
        return len(set(letters)) == len(letters)
    if call := _CALL.fullmatch(text):
        name, inside = (call["name"] or "f").strip(), call["inside"] or ""
        letters = re.fullmatch(r"\s*[a-zA-Z]\s*", inside) and inside.strip() != name
        return name not in _NOT_CALLED or (bool(letters) and name.isalpha())
    if (operator := _OPERATOR.fullmatch(text)) and not re.fullmatch(r"\s*\(?\s*[xyzn]\s*\)?\s*", operator["of"]):
        return True
    if re.search("[A-Z]{2}", text) and _SEGMENTS.fullmatch(text):
        return True
    words = _WORDS.fullmatch(text)
    return bool(words) and _are_naming(words["words"], bool(words["of"]), value)


def is_calculation(text: str) -> bool:
    r"""Return whether a left side has no variables and is worked out on the right, as in `\sin 30^\circ = \frac12`."""
    return bool(_CONSTANT.match(text)) and not re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text))


def _are_naming(words: str, of_variable: bool, value: str) -> bool:
    said = re.findall("[a-zA-Z]+", words.replace(r"\text", " ").lower())
    if not said or not any(len(word) > 1 for word in said):
        return False
    if re.search(r"\\text|[a-zA-Z]{2}", value) and not re.search(r"\\[a-zA-Z]|\d", value.replace(r"\text", "")):
        return set(said) <= _ANSWERS  # "no = yes" is no answer in words
    if of_variable:
        return not _FUNCTIONS.intersection(said) and all(
            word in _SMALL_WORDS or not changes_a_number(word) for word in said
        )
    naming = [
        (word in _ORDINALS and following not in ("of", ""))
        or word in _SMALL_WORDS
        or word in _QUANTITIES
        or not changes_a_number(word)
        for word, following in zip(said, [*said[1:], ""], strict=True)
    ]
    return said[-1] not in _SMALL_WORDS and all(naming) and "than" not in said


def _may_be_label(text: str) -> bool:
    text = text.replace(DEGREES_AS_RADIANS, "")  # \sin 30^\circ
    return bool(re.search(r"[^\W\d_]", text)) and not re.search(r"^\s*\d|[-+^<>]|\\cdot|\\sqrt", text)
