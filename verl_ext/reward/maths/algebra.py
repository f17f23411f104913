"""Whether two expressions in LaTeX are equal, by sympy and math-verify, without any limit of time or memory.

Parsing is math-verify's (latex2sympy2_extended, an ANTLR grammar: answer text reaches no eval, sympify or parse_expr).
Only symbolic_worker.py uses this module, by path, in a process that can be killed.
"""

import random
import re
from typing import cast

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.relational import Relational

PRECISION = 150  # digits; two closed forms that agree to 100 of them at every point are the same,
AGREEMENT_DIGITS = 100  # and to more of them if one has a number or a power of more digits: 2^{1/2}+10^{-200}
MAX_DIGITS = 30_000  # beyond which two expressions are not shown to be equal
ORDINARY_POWER = 10
ORDINARY_DIGITS = 12  # of a number, a hundred of which are in AGREEMENT_DIGITS
NOISE_BITS = 8  # known of a value that is 0 except for rounding: sympy gives it a precision of 1
# Both signs (sqrt(x^2) is not x), no integers (sin(pi x) is not 0), no point where an ordinary formula has a pole.
POINTS = [("37/29", "53/41"), ("-71/43", "83/59"), ("97/31", "-101/67")]
# For floor and ceiling, which are constant in between: every remainder of small divisors, 0 and -1 of many larger ones.
INTEGERS = [*range(18), 99, 100, 719, 720, 997, 5039, 5040, 12345]
INDICES = set("ijklmnN")  # symbols that stand only for integers
SET_LIKE = (sympy.Set, Relational)
STEEP = (sympy.tanh, sympy.coth, sympy.erf, sympy.erfc)  # reach 1 exponentially
CONVERSION = ConversionConfig(lowercase_symbols=False)


def is_equal(pred_latex: str | None, gold_latex: str) -> bool:
    if pred_latex is None:
        evaluate(parse(gold_latex))
        return True
    pred, gold = parse(pred_latex), parse(gold_latex)
    if isinstance(pred, sympy.Eq) != isinstance(gold, sympy.Eq):
        return False
    if is_series(pred) or is_series(gold):
        if isinstance(pred, sympy.Expr) and isinstance(gold, sympy.Expr) and (pred - gold).is_zero is False:
            return False  # verify compares six digits
        return verify(gold, pred, timeout_seconds=None)
    sides = (*pred.args, *gold.args) if isinstance(pred, sympy.Eq) and isinstance(gold, sympy.Eq) else ()
    if sides and all(isinstance(side, sympy.Expr) for side in sides):
        return same_equation(pred, gold)
    elif isinstance(pred, sympy.Expr) and isinstance(gold, sympy.Expr):
        decided = same_value(pred, gold)
        if decided is not None:
            return decided
    elif isinstance(pred, SET_LIKE) and isinstance(gold, SET_LIKE):
        decided = same_set(pred, gold)
        if decided is not None:
            return decided
    # Other sets and inequalities, matrices.
    return verify(gold, pred, timeout_seconds=None, allow_set_relation_comp=True)


def fraction(decimal: re.Match) -> str:
    """Write a decimal exactly; in braces only as an argument: a number in braces by itself is a one-element set."""
    text = rf"\frac{{{decimal[1]}{decimal[2]}}}{{1{'0' * len(decimal[2])}}}"
    before = decimal.string[decimal.start() - 1] if decimal.start() else ""
    return f"{{{text}}}" if before in ("^", "_") or before.isalpha() else text


def parse(latex: str) -> sympy.Basic:
    latex = re.sub(r"\\gamma(?![a-zA-Z])", r"\\varrho ", latex)  # the letter, which the parser takes for a function
    expression = latex2sympy(re.sub(r"(\d*)\.(\d+)", fraction, latex), conversion_config=CONVERSION)
    expression = cast(sympy.Basic, expression)  # or a matrix, or what has no `subs`, which ends the comparison
    return expression if is_series(expression) else expression.subs(sympy.Symbol("i"), sympy.I)


def is_series(expression) -> bool:
    """Return whether an expression runs over an index, which may be called i, and may be slow to evaluate."""
    return expression.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)


def points(dimension: int) -> list[list]:
    """Return POINTS in `dimension` dimensions. Each further coordinate has a separate offset: at no point are
    differences of two coordinates equal.
    """
    found = []
    for k, point in enumerate(POINTS if dimension else POINTS[:1]):
        shifts = [sympy.Rational(random.Random(100 * k + i).randrange(1, 1009), 1009) for i in range(dimension)]
        starts = [sympy.Rational(point[i % 2]) for i in range(dimension)]
        found.append([at if i < 2 else at + sympy.sign(at) * shifts[i] for i, at in enumerate(starts)])
    return found


def places_of(first, second, symbols) -> list[list] | None:
    """Return where two expressions are compared, if not at POINTS."""
    if not symbols or not any(each.has(sympy.floor, sympy.ceiling) for each in (first, second)):
        return None
    draw, powers = random.Random(0), [power for each in (first, second) for power in each.atoms(sympy.Pow)]
    grows = any(each.has(sympy.factorial, sympy.binomial) for each in (first, second))
    grows |= any(power.exp.free_symbols for power in powers)
    known = [sympy.Integer(n) for n in INTEGERS if n < 100 or not grows]
    integers = [[n] for n in known]
    if len(symbols) > 1:
        integers = [[draw.choice(known) for _ in symbols] for _ in range(2 * len(known))]
    return integers + points(len(symbols)) * any(str(each) not in INDICES for each in symbols)


def digits_of(*expressions) -> int:
    """Return how many decimal places further than usual a difference of these expressions may be.

    Numbers of many digits, powers and exponential functions make terms that are small compared with others.
    """
    digits, nodes = 0.0, set().union(*(sympy.preorder_traversal(each) for each in expressions))
    for node in nodes:
        if isinstance(node, sympy.Rational):
            length = max(node.p.bit_length(), node.q.bit_length()) / 3.3
            digits += 2 * length * (length > ORDINARY_DIGITS)
        elif isinstance(node, (sympy.Pow, sympy.exp, *STEEP)) and node.args[-1].is_number:
            plain = not isinstance(node, sympy.Pow) or node.base.is_Rational or node.base.free_symbols
            exponent = node.args[-1]
            if plain and isinstance(exponent, sympy.Rational) and abs(exponent) <= ORDINARY_POWER:
                continue
            size = abs(sympy.N(exponent, 5))
            base = abs(sympy.N(node.base, 5)) if isinstance(node, sympy.Pow) and node.base.is_number else 3
            power = size * max(abs(sympy.log(base, 10).evalf(5)), 0.1) if base else sympy.Integer(0)
            digits += 2 * float(power) if power.is_finite and power > ORDINARY_POWER else 0.0
    return int(digits)


def values(expression, symbols, places=None, further=0):
    """Yield the expression's value at each of the places, None if it has no finite value there."""
    # A rational number to a rational power is slow to write in lowest terms, and quick to evaluate.
    in_exponent = places is None and any(power.exp.free_symbols for power in expression.atoms(sympy.Pow))
    for numbers in points(len(symbols)) if places is None else places:
        at = dict(zip(symbols, numbers, strict=True))
        if in_exponent:
            value = expression.evalf(PRECISION + further, subs=at)
        else:
            value = sympy.N(expression.subs(at), PRECISION + further)
        yield value if value.is_number and value.is_finite else None


def is_zero(value, further: int) -> bool:
    """Return whether a value is only known to be small: of e^{-999} all digits are known."""
    parts = [part for part in value.as_real_imag() if part != 0]
    return all(
        abs(part) <= sympy.Float(10) ** -(AGREEMENT_DIGITS + further) and part.is_Float and part._prec <= NOISE_BITS
        for part in parts
    )


def agree(first, second, further: int) -> bool:
    if first == 0 or second == 0:
        return is_zero(first, further) and is_zero(second, further)
    scale = max(abs(first), abs(second))  # relative: 1/2003! is not 1/2004!
    return abs(first - second) <= scale * sympy.Float(10) ** -(AGREEMENT_DIGITS + further)


def same_value(pred, gold) -> bool | None:
    """Decide by value at several points; None if the expressions cannot be evaluated."""
    if pred == gold:
        return True
    symbols = sorted(pred.free_symbols | gold.free_symbols, key=str)
    places = places_of(pred, gold, symbols)
    compared, further = 0, digits_of(pred, gold)
    if further > MAX_DIGITS:
        return False
    sides = (values(side, symbols, places, further) for side in (pred, gold))
    for first, second in zip(*sides, strict=True):
        if first is not None and second is not None:
            if not agree(first, second, further):
                return False
            compared += 1
        elif places is None and (first is None) != (second is None):
            return False  # integers, of `places`, may be poles
    return True if compared > 3 * (places is not None) else None


def same_equation(pred, gold) -> bool:
    """Return whether left minus right sides have a constant ratio: 2x + 2y = 6 is x + y = 3."""
    pred, gold = pred.lhs - pred.rhs, gold.lhs - gold.rhs
    if pred.free_symbols != gold.free_symbols or not gold.free_symbols:
        return False
    symbols = sorted(gold.free_symbols, key=str)
    places, further = places_of(pred, gold, symbols), digits_of(pred, gold)
    if further > MAX_DIGITS:
        return False
    pairs = zip(*(values(side, symbols, places, further) for side in (pred, gold)), strict=True)
    ratios = [first / second for first, second in pairs if first is not None and second not in (None, 0)]
    return len(ratios) > 1 and ratios[0] != 0 and all(agree(ratios[0], ratio, further) for ratio in ratios[1:])


def pieces_of(expression) -> list | None:
    """Return (end, is it out, other end, is it out) of a set or an inequality, in order; None without this form."""
    if isinstance(expression, Relational):
        expression = expression.as_set() if len(expression.free_symbols) == 1 else None
    found = []
    for part in expression.args if isinstance(expression, sympy.Union) else [expression]:
        if isinstance(part, sympy.FiniteSet):
            found += [(point, False, point, False) for point in part]
        elif isinstance(part, sympy.Interval):
            found.append((part.start, part.left_open, part.end, part.right_open))
        else:
            return None
    if any(end.free_symbols or not end.is_extended_real for low, _, high, _ in found for end in (low, high)):
        return None
    return sorted(found, key=lambda piece: sympy.N(piece[0], 50))


def same_set(pred, gold) -> bool | None:
    """Compare the ends of sets of reals exactly; None if they have none."""
    pred, gold = pieces_of(pred), pieces_of(gold)
    if pred is None or gold is None:
        return None
    return len(pred) == len(gold) and all(
        (one == other) if isinstance(one, bool) or one.is_infinite or other.is_infinite else same_value(one, other)
        for first, second in zip(pred, gold, strict=True)
        for one, other in zip(first, second, strict=True)
    )


def evaluate(gold) -> None:
    """Do to a gold by itself what takes time in a comparison: add it up, solve it, evaluate its parts."""
    if is_series(gold):
        verify(gold, sympy.Integer(7919), timeout_seconds=None)
    elif isinstance(gold, Relational) and not isinstance(gold, sympy.Eq):
        gold.as_set()
    else:
        for part in [gold] if isinstance(gold, sympy.Expr) else gold.args:
            if isinstance(part, sympy.Expr):
                symbols = sorted(part.free_symbols, key=str)
                list(values(part, symbols, places_of(part, part, symbols)))
