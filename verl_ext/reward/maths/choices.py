r"""Read the letter of a choice: `C`, `(C)`, `Option C`, `C. Both A and B`, `\text{(C) Increasing}`.

One letter is chosen, and the text after it belongs to that option. A second choice (`C or D`, `C, D`, `C. 12 D. 13`), a
word that takes the letter back, or an expression (`C^2`) makes it no choice.
"""

import re

MAX_CHARS = 600
_FONTS = re.compile(
    r"\\(?:text|math)(?:bf|it|rm|sf|tt|normal|up)?(?![a-zA-Z])|\\(?:boldsymbol|bm|emph|mbox|operatorname|left|right)(?![a-zA-Z])"
    r"|(?<!\\)[{}$]|\\[()]|\*\*"
)
_SPACES = re.compile(r"\\q?quad(?![a-zA-Z])|\\[,;:! ]|~|\s+")
_NAMED = r"(?:(?:the\s+)?(?:correct\s+|right\s+|final\s+)?(?:answer|option|choice)\b(?:\s+is\b)?\s*:?\s*)"
_CHOICE = re.compile(
    rf"(?P<named>{_NAMED}{{0,3}})(?:\(\s*(?P<bracketed>[A-Za-z])\s*\)|\[\s*(?P<square>[A-Z])\s*\]|(?P<letter>[A-Z]))(?![\w'’])"
    r"(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_OPTION_TEXT = re.compile(r"\s*(?:[).:]|[-–—]{1,3}(?=\s*[a-zA-Z]{3}))\s*(?P<text>.*)", re.DOTALL)
_RIGHT = re.compile(r"is\s+(?:the\s+)?(?:correct|right|answer|true)\s*(?:answer|option|choice)?", re.IGNORECASE)
_TAKEN_BACK = re.compile(
    r"(?:or|and|nor|xor|but|wait|actually|maybe|perhaps|instead)(?![a-zA-Z])|[/|,;&+]"
    r"|.*\b(?:wrong|incorrect|correction|wait|actually|instead|rather than)\b",
    re.IGNORECASE | re.DOTALL,
)
_LETTER = re.compile(
    r"\(\s*([A-H])\s*\)|(?<![\w\\'’^_])([A-H])(?=\s*[).:]|$)|(?:^|[,;/|&]\s*|\b(?:or|and|nor|not)\s+)([A-H])(?![\w'’])"
)
_SEVERAL = r"[A-H](?:\s*,\s*[A-H])*\s*,?\s*(?:and|or|nor|&)\s+[A-H]"
_COMPOSITE = re.compile(  # options that speak of other options: Both A and B, A and B only, None of A, B or C
    rf"\s*(?:(?:both|all|none|neither|either|only|any)\b.*|{_SEVERAL}(?:\s+only|\s+(?:are|is)\s+(?:correct|true|right))?|(?:only\s+)?[A-H]\s+only)",
    re.IGNORECASE | re.DOTALL,
)
_ARTICLE = re.compile(r"(?:^|(?<=[.:;]\s)|(?<=\s))A(?=\s+[a-z])")


def read_choice(text: str, letters: str = "ABCDEFGHIJ") -> tuple[str, str] | None:
    """Return (letter, text of the option); None if the text is not a single choice.

    Args:
        text: an answer as it is written.
        letters: those that may be chosen.
    """
    if len(text) > MAX_CHARS:
        return None
    plain = re.sub(" +", " ", _SPACES.sub(" ", _FONTS.sub("", text))).strip(" .")
    match = _CHOICE.fullmatch(plain)
    if not match:
        return None
    letter = match["bracketed"] or match["square"] or match["letter"]
    rest = match["rest"].strip()
    if letter.islower() and not (match["named"] or (match["bracketed"] and rest)):
        return None
    letter = letter.upper()
    if letter not in letters:
        return None
    if not rest or _RIGHT.fullmatch(rest):
        return letter, ""
    option = _OPTION_TEXT.fullmatch(rest)
    if option is None and (match["bracketed"] or match["square"]) and match["rest"][0] == " ":
        option = re.fullmatch(r"(?P<text>[^-+*/^_=<>,;|&].*)", rest, re.DOTALL)
    if option is None:
        return None
    said = option["text"].strip()
    if _TAKEN_BACK.match(said) or _names_another(said, letter):
        return None
    return letter, said


def _names_another(said: str, letter: str) -> bool:
    """Return whether the text of an option has the letter of another one, outside an option about options."""
    if _COMPOSITE.fullmatch(said) and not re.search(r"\b[A-H]\s*[).:]", said):
        return False
    found = {"".join(letters) for letters in _LETTER.findall(_ARTICLE.sub(" ", said))}
    return bool(found - {letter}) or bool(
        re.search(r"(?<!\w)(?:option|choice|answer)s?\s+\(?[A-H]\b", said, re.IGNORECASE)
    )
