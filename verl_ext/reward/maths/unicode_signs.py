"""Unicode signs of mathematics as LaTeX: 3√13, ½π, x⩾2, ℝ∖{0}, and dashes and spaces that only look different.

Text in, text out, nothing is judged. normalisation.py, which only knows LaTeX, calls this first.
"""

import re
import unicodedata
from itertools import accumulate

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_VULGAR = {  # ½ -> (1, 2); not ⅟, which has no denominator
    chr(code): tuple(map(int, parts))
    for code in (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189)
    if all(parts := unicodedata.normalize("NFKC", chr(code)).split("\u2044"))
}
# A fraction sign or a fraction of raised and lowered digits, with the whole number before it: 3½, 1²⁄₃. Digits after a
# point, a comma or a power are not its whole number.
_FRACTION = re.compile(
    r"(?:(?<![\d.,^_])(?P<whole>\d{1,18})[ \u00a0\u2009\u202f\u2064]?)?"
    rf"(?:(?P<sign>[{''.join(_VULGAR)}])|(?P<top>[⁰¹²³⁴⁵⁶⁷⁸⁹]{{1,18}})[⁄∕/](?P<bottom>[₀₁₂₃₄₅₆₇₈₉]{{1,18}}))"
)
_PLAIN_SET = re.compile(r"(?:(?<=[∪⋃])|(?<=[∪⋃] ))\{([^{}\\]*)\}")  # [1,2]∪{5}: in TeX these braces would not show
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile("[√∛∜]")
_RADICAND = re.compile(
    r"\s*(?P<one>\d+(?:\.\d+)?|[^\W\d_]|\\frac\{\d+\}\{\d+\}|\\sqrt(?:\[\d\])?\{[^{}]*\}|\\[a-zA-Z]+(?=[ ]))|\s*(?=\()"
)
MAX_ROOTS = 50  # more are left as they are: each costs a look for its closing bracket

_LETTERS = {  # those that LaTeX has; the other capitals are Latin letters there
    chr(code): "\\" + (name.lower() if code >= 0x3B1 else name.capitalize()) + " "
    for code in range(0x391, 0x3CA)
    if (name := unicodedata.name(chr(code), "").split(" ")[-1].replace("LAMDA", "LAMBDA")) not in ("OMICRON", "")
    and (code >= 0x3B1 or name in "GAMMA DELTA THETA LAMBDA XI PI SIGMA UPSILON PHI PSI OMEGA".split())
}
# Each replacement, followed by the signs that it replaces; one that begins with a letter is a LaTeX command.
_SIGNS = """
- ‐‑‒–—―−﹘﹣－➖˗⁃ , \u2063、 . 。 : ∶ ' ′’ / ÷∕⁄ ( ⟨〈❨ ) ⟩〉❩ [ 【〔❲ ] 】〕❳ | ∣❘ ^n ⁿ \\$ €£¥₹
times ×✕✖ cdot ·⋅∙•∗⁎\u2062 pm ± mp ∓ ge ≥⩾≧⪖≮⋝ le ≤⩽≦⪕≯⋜ > ≰ < ≱ ne ≠ approx ≈ equiv ≡ sim ∼ infty ∞ cup ∪⋃ cap ∩⋂
setminus ∖⧵ emptyset ∅⌀ in ∈ notin ∉ subset ⊂ subseteq ⊆ angle ∠ triangle △ perp ⊥ parallel ∥ to →⟶ neg ¬ lor ∨ land ∧
sum ∑ prod ∏ int ∫ partial ∂ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉
""".split()
_LATEX = {
    (rf"\{name} " if name[0].isalpha() else name): signs for name, signs in zip(_SIGNS[::2], _SIGNS[1::2], strict=True)
}
_LATEX |= {" ": "\u2028\u2029\u2061\u2064", r"^\circ ": "°˚º", r"\text{ cents}": "¢"}
_LATEX |= {rf"\mathbb{{{unicodedata.normalize('NFKC', letter)}}} ": letter for letter in "ℝℤℕℚℂ"}
_TRANSLATION = str.maketrans({sign: latex for latex, signs in _LATEX.items() for sign in signs} | _LETTERS)


def to_latex(text: str) -> str:
    """Write Unicode's signs in `text` as LaTeX; the rest is folded as NFKC does (fullwidth digits, 𝑥).

    `3½` is a mixed number, as 3 1/2 is: `\\frac{7}{2}`. A root extends over the number, letter or bracket after it.
    """
    if text.isascii():
        return text
    text = _PLAIN_SET.sub(r"\\{\1\\}", text)
    text = _FRACTION.sub(_write_fraction, text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
    # NFKC would make ℝ the letter R: signs first. It composes some (= and a stroke is ≠): signs again.
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).translate(_TRANSLATION)
    text = _write_roots(text)
    return "".join(char for char in text if unicodedata.category(char) != "Cf")  # zero-width and soft ones


def _write_fraction(match: re.Match[str]) -> str:
    if match["sign"]:
        top, bottom = _VULGAR[match["sign"]]
    else:
        top, bottom = int(match["top"].translate(_SUPERSCRIPTS)), int(match["bottom"].translate(_SUBSCRIPTS))
    return rf"\frac{{{int(match['whole'] or 0) * bottom + top}}}{{{bottom}}}"


def _write_roots(text: str) -> str:
    """Write `√13` as `\\sqrt{13}`, from the right, so that the inner root of `√√16` is written first."""
    signs = list(_ROOT.finditer(text))
    for sign in reversed(signs[:MAX_ROOTS]):
        after = _RADICAND.match(text, sign.end())
        length = _bracket_length(text[after.end() :]) if after and not after["one"] else 0
        if after and (after["one"] or length):
            end = after.end() + length
            radicand = after["one"] or text[after.end() + 1 : end - 1]
            text = f"{text[: sign.start()]}{_ROOTS[sign[0]]}{{{radicand}}}{text[end:]}"
    return _ROOT.sub(lambda m: _ROOTS[m[0]] + " ", text)


def _bracket_length(text: str) -> int:
    """Return the number of characters up to the bracket that closes the first one; 0 if it stays open."""
    depths = accumulate((char == "(") - (char == ")") for char in text)
    return next((length for length, depth in enumerate(depths, 1) if depth == 0), 0)
