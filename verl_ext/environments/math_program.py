"""The program of the environment `math_tools`, which runs in the sandbox and imports nothing of this package.

In: on standard input {"tool": name, "arguments": {...}} as JSON, with the arguments as the model wrote them. Out: what
the model reads; or one line of standard error and exit code 1 if the arguments are at fault; or exit code MISSING if
packages are missing.

An expression is data: only numbers, names, operators and brackets pass, and a name is a variable or one of NAMES. So no
text can reach Python's own functions, or change this program.
"""

import importlib
import json
import keyword
import math
import re
import sys
import warnings

MISSING = 3
MAX_CHARS = 2000  # of an expression
MAX_POWERS = 100  # of an expression; SymPy takes a minute for a tower of 900
MAX_LISTED = 12  # zeros, extrema, ...
POINTS = 4001  # of an axis

try:
    import numpy as np
    import sympy
    from sympy.parsing import sympy_parser
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(MISSING)

_TOKEN = re.compile(r"(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[^\W\d_]\w*|\*\*|[-+*/^(),!]|\s+)")
_RELATION = re.compile(r"(<=|>=|==|=|<|>)")
_SYMPY = (
    "sin cos tan asin acos atan atan2 sec csc cot sinh cosh tanh asinh acosh atanh exp log sqrt cbrt root sign floor "
    "ceiling factorial binomial gamma gcd lcm Min Max Abs re im conjugate erf Mod Piecewise pi E I oo"
).split()
NAMES = {name: getattr(sympy, name) for name in _SYMPY}
NAMES |= {
    "ln": sympy.log,
    "abs": sympy.Abs,
    "min": sympy.Min,
    "max": sympy.Max,
    "mod": sympy.Mod,
    "ceil": sympy.ceiling,
}
NAMES |= {"e": sympy.E, "π": sympy.pi, "inf": sympy.oo, "infinity": sympy.oo, "log10": lambda x: sympy.log(x, 10)}
_GLOBALS = {name: getattr(sympy, name) for name in ("Symbol", "Integer", "Float", "Rational", "Function", "factorial")}
_FORMS = {
    "simplify": sympy.simplify,
    "expand": lambda it: sympy.expand(it, trig=True),
    "factor": sympy.factor,
    "apart": sympy.apart,
    "evaluate": lambda it: sympy.N(it, 15),
}


def parse(text, variables=()):
    """Return the SymPy expression of a text; raise ValueError for anything else."""
    if not isinstance(text, str | int | float) or isinstance(text, bool):
        raise ValueError(f"expected an expression as text, got {text!r:.80}")
    text = str(text).strip()
    if not text or len(text) > MAX_CHARS:
        raise ValueError(f"an expression has 1 to {MAX_CHARS} characters, this one {len(text)}")
    if (powers := text.count("^") + text.count("**")) > MAX_POWERS:
        raise ValueError(f"an expression has at most {MAX_POWERS} powers, this one {powers}")
    rest = _TOKEN.sub("", text)
    names = re.findall(r"[^\W\d_]\w*", text)
    bad = next((name for name in names if keyword.iskeyword(name)), None) or rest[:1]
    if bad:
        raise ValueError(f"{bad!r} cannot be part of an expression; write it like 2*x**2 + sqrt(3)*sin(x)/2")
    if text.count("(") != text.count(")"):
        raise ValueError(f"the brackets of {text[:80]!r} do not match")
    for name in re.findall(r"([^\W\d_]\w+)\s*\(", text):  # one letter: a multiplication
        if name not in NAMES:
            raise ValueError(f"there is no function {name!r}; write {name}*(...) to multiply")
    symbols = {name: sympy.Symbol(name) for name in variables}
    steps = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication, sympy_parser.convert_xor)
    allowed = {"__builtins__": {}} | _GLOBALS
    parsed = sympy_parser.parse_expr(text, NAMES | symbols, transformations=steps, global_dict=allowed)
    if not isinstance(parsed, sympy.Expr):
        raise ValueError(f"{text[:80]!r} is no expression with a value")
    return parsed


def variable(name):
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"expected the name of a variable such as x, got {name!r:.80}")
    return name


def relation(text, variables=()):
    """Return an equation or inequality; an expression alone is to be 0."""
    parts = _RELATION.split(str(text))
    if len(parts) == 1:
        return sympy.Eq(parse(text, variables), 0)
    if len(parts) != 3:
        raise ValueError(f"expected one equation such as x**2 = 4, got {text!r:.80}")
    left, sign, right = parse(parts[0], variables), parts[1], parse(parts[2], variables)
    return sympy.Eq(left, right) if sign in ("=", "==") else sympy.Rel(left, right, sign)


def listed(value):
    return value if isinstance(value, list) else [value]


def solve(equations, unknowns):
    names = [variable(name) for name in listed(unknowns)]
    relations = [relation(each, names) for each in listed(equations)]
    symbols = [sympy.Symbol(name) for name in names]
    if relations and not all(isinstance(each, sympy.Eq) or each in (True, False) for each in relations):
        return str(sympy.reduce_inequalities(relations, symbols))
    if any(each == False for each in relations):  # noqa: E712  SymPy's own false
        return "There is no solution."
    relations = [each for each in relations if each != True]  # noqa: E712
    if not relations:
        return "All values are solutions."
    found = sympy.solve(relations, symbols, dict=True)
    lines = [", ".join(f"{name} = {exact(value)}" for name, value in each.items()) for each in found]
    free = [str(symbol) for symbol in symbols if found and all(symbol not in each for each in found)]
    lines += [f"Any {', '.join(free)} will do."] if free else []
    return "\n".join(lines) or "There is no solution."


def exact(value):
    """Return a value, with its decimals if it is no fraction."""
    is_plain = value.free_symbols or value.is_Rational or value.is_Float
    return str(value) if is_plain else f"{value} (about {sympy.N(value, 8)})"


def simplify(expression, form="simplify"):
    return str(_FORMS[form](parse(expression)))


def differentiate(expression, variable_name, order=1):
    if not 1 <= order <= 20:
        raise ValueError(f"the order is 1 to 20, not {order}")
    name = variable(variable_name)
    return str(sympy.simplify(sympy.diff(parse(expression, [name]), sympy.Symbol(name), order)))


def integrate(expression, variable_name, lower=None, upper=None):
    name = variable(variable_name)
    parsed, symbol = parse(expression, [name]), sympy.Symbol(name)
    if (lower is None) != (upper is None):
        raise ValueError("give both bounds, or none for the indefinite integral")
    if lower is None:
        result = sympy.integrate(parsed, symbol)
        return str(result) if result.has(sympy.Integral) else f"{result} + C"
    result = sympy.integrate(parsed, (symbol, parse(lower), parse(upper)))
    if not result.has(sympy.Integral):
        return exact(result)
    of, ends = function(parsed, [name]), (float(sympy.N(parse(lower))), float(sympy.N(parse(upper))))
    value, error = scipy("integrate").quad(lambda x: float(of(x)), *ends, limit=200)
    if not np.isfinite(value) or error > 1e-3 * max(1.0, abs(value)):
        return "There is no closed form, and the numbers do not converge."
    return f"There is no closed form; numerically about {value:.9g}"


# Numbers -------------------------------------------------------------------------------------------------------------


def number(value):
    parsed = parse(value)
    if parsed.free_symbols or not (found := sympy.N(parsed)).is_real or not found.is_finite:
        raise ValueError(f"expected a finite number, got {str(value)[:80]!r}")
    return float(found)


def axis(lower, upper):
    low, high = number(lower), number(upper)
    if not low < high:
        raise ValueError(f"lower must be below upper, got {low:g} and {high:g}")
    return low, high


def function(parsed, names):
    """Return a function of as many arrays as there are names; what is not real is NaN."""
    if other := sorted(str(each) for each in parsed.free_symbols if str(each) not in names):
        raise ValueError(f"the expression also has {', '.join(other)}; put numbers in their place")
    compiled = sympy.lambdify([sympy.Symbol(name) for name in names], parsed, "numpy")

    def of(*values):
        with np.errstate(all="ignore"):
            found = np.asarray(compiled(*(np.asarray(value, dtype=float) for value in values)))
            found = found if found.dtype.kind in "fciu" else found.astype(complex)
            found = np.where(np.abs(np.imag(found)) <= 1e-12, np.real(found), np.nan).astype(float)
            return np.broadcast_to(found, np.shape(values[0]))

    return of


def scipy(name):
    """Return a module of SciPy, which takes a while to import."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        if "map segment" in str(error) or "allocate memory" in str(error):  # what the expression has left
            raise MemoryError(str(error)) from error
        print(error, file=sys.stderr)
        sys.exit(MISSING)


def minimum(of, low, high):
    """Return (place, value) of the least value of a function between two places."""
    found = scipy("optimize").minimize_scalar(of, bounds=(low, high), method="bounded", options={"xatol": 1e-11})
    return float(found.x), float(found.fun)


def roots(of, xs, ys):
    """Return (from, to) of each place where a function is 0: a stretch, or a point that it crosses or only touches."""
    finite = np.isfinite(ys)
    scale = np.median(np.abs(ys[finite])) if finite.any() else 0.0
    ys = np.where(np.abs(ys) <= 1e-13 * scale, 0.0, ys)
    found = runs(xs, ys == 0)
    for i in np.nonzero((ys[:-1] * ys[1:] < 0) & finite[:-1] & finite[1:])[0]:
        if jump(of, xs, ys, i) is None:
            root = scipy("optimize").brentq(lambda x: float(of(x)), xs[i], xs[i + 1], xtol=1e-13, disp=False)
            found.append((root, root))
    size = np.abs(ys)
    dips = (size[1:-1] < size[:-2]) & (size[1:-1] < size[2:]) & (size[1:-1] < 1e-3 * scale)
    for i in np.nonzero(dips & (ys[1:-1] != 0) & (ys[:-2] * ys[2:] > 0))[0] + 1:
        place, least = minimum(lambda x: abs(float(of(x))), xs[i - 1], xs[i + 1])
        if least <= 1e-9 * scale:
            found.append((rounded(place, xs), rounded(place, xs)))
    return sorted(found)


def jump(of, xs, ys, i):
    """Return (place, value before it, value behind it) if no halving ends the difference of point i to the next."""
    a, b, fa, fb = float(xs[i]), float(xs[i + 1]), float(ys[i]), float(ys[i + 1])
    while a < (middle := (a + b) / 2) < b and np.isfinite(value := float(of(middle))):
        a, b, fa, fb = (a, middle, fa, value) if abs(value - fa) > abs(fb - value) else (middle, b, value, fb)
    return (middle, fa, fb) if abs(fb - fa) > 0.5 * abs(ys[i + 1] - ys[i]) else None


def runs(xs, holds):
    """Return (from, to) of each stretch of points where `holds` is true."""
    steps = np.diff(np.concatenate([[0], holds, [0]]).astype(int))
    starts, ends = np.nonzero(steps == 1)[0], np.nonzero(steps == -1)[0] - 1
    return [(float(xs[start]), float(xs[end])) for start, end in zip(starts, ends, strict=True)]


def rounded(place, xs):
    """Return the place of an extremum without the digits that are not exact."""
    return round(place, 7 - math.ceil(math.log10(xs[-1] - xs[0])))


def stretches(pairs):
    return [shown(a) if a == b else f"{shown(a)} to {shown(b)}" for a, b in pairs]


def shown(value):
    return f"{0.0 if abs(value) < 1e-11 else value:.9g}"


def enumerated(values, none):
    more = f", and {len(values) - MAX_LISTED} more" if len(values) > MAX_LISTED else ""
    return ", ".join(values[:MAX_LISTED]) + more if values else none


def find_roots(expression, variable_name, lower, upper):
    name, (low, high) = variable(variable_name), axis(lower, upper)
    sides = [parse(part, [name]) for part in re.split("==?", str(expression))]
    if len(sides) > 2:
        raise ValueError(f"expected one equation, got {expression!r:.80}")
    of, xs = function(sides[0] - sides[1] if len(sides) == 2 else sides[0], [name]), np.linspace(low, high, POINTS)
    found = roots(of, xs, of(xs))
    return f"{name} = {enumerated(stretches(found), '')}" if found else "No root was found there."


def optimize(expression, variables, lower, upper, goal):
    names = [variable(name) for name in listed(variables)]
    lows, highs = listed(lower), listed(upper)
    if not len(names) == len(lows) == len(highs) or len(names) > 6:
        raise ValueError("expected at most 6 variables, with one lower and one upper bound for each")
    bounds = [axis(*each) for each in zip(lows, highs, strict=True)]
    sign, of = {"minimum": 1.0, "maximum": -1.0}[goal], function(parse(expression, names), names)

    def cost(values):
        value = sign * float(of(*values))
        return value if np.isfinite(value) else (np.inf if value != -np.inf else -1e300)

    best = scipy("optimize").differential_evolution(cost, bounds, seed=0, tol=1e-10, maxiter=300)
    if not np.isfinite(best.fun):
        return "The expression has no real value between these bounds."
    if abs(best.fun) >= 1e100:
        return f"It seems to have no {goal}: it grows without bound near {where(names, best.x)}."
    return f"The {goal} is {shown(best.fun * sign)} at {where(names, best.x)}."


def where(names, values):
    return ", ".join(f"{name} = {shown(value)}" for name, value in zip(names, values, strict=True))


# A plot in words -----------------------------------------------------------------------------------------------------


def breaks(of, xs, ys):
    """Return (place, value before it, value behind it) of each jump or pole."""
    steps = np.abs(np.diff(ys))
    usual = np.nanmedian(steps[np.isfinite(steps)]) if np.isfinite(steps).any() else 0.0
    around = np.concatenate([[0.0], np.nan_to_num(steps, posinf=0.0), [0.0]])
    peaks = (steps > 8 * usual + 1e-12) & (steps >= around[:-2]) & (steps >= around[2:])
    found = [jump(of, xs, ys, i) for i in np.nonzero(peaks)[0][:200]]
    return [each for each in found if each is not None]


def extrema(of, xs, ys, sign):
    """Return (place, value) of the local maxima (sign 1) or minima (-1) between the ends."""
    up, found = sign * ys, []
    for i in np.nonzero((up[1:-1] > up[:-2]) & (up[1:-1] >= up[2:]))[0] + 1:
        place, least = minimum(lambda x: -sign * float(of(x)), xs[i - 1], xs[i + 1])
        found.append((rounded(place, xs), -sign * least))
    return found


def described(name, text, of, xs):
    ys = of(xs)
    there = np.isfinite(ys)
    head = f"{text} for {name} from {shown(xs[0])} to {shown(xs[-1])}:"
    if not there.any():
        return f"{head} it has no real value there."
    torn, missing = breaks(of, xs, ys), runs(xs, ~there)
    near = 2 * (xs[1] - xs[0])
    places = [place for place, *_ in torn] + [end for gap in missing for end in gap]

    def at(points):
        return [f"{shown(v)} at {name} = {shown(x)}" for x, v in points if all(abs(x - p) > near for p in places)]

    first, last = xs[there][0], xs[there][-1]
    low, high = np.nanargmin(np.where(there, ys, np.nan)), np.nanargmax(np.where(there, ys, np.nan))
    ends = [f"{shown(float(of(x)))} at {name} = {shown(x)}" for x in (first, last)]
    most = [f"{shown(ys[i])} (at {shown(xs[i])})" for i in (low, high)]
    lines = [
        head,
        f"- from {ends[0]} to {ends[1]}; the points lie between {most[0]} and {most[1]}",
        f"- zeros: {enumerated(stretches(roots(of, xs, ys)), 'none')}",
        f"- local maxima: {enumerated(at(extrema(of, xs, ys, 1)), 'none')}",
        f"- local minima: {enumerated(at(extrema(of, xs, ys, -1)), 'none')}",
    ]
    is_pole = [max(abs(a), abs(b)) > 1e6 * np.median(np.abs(ys[there])) for _, a, b in torn]
    poles = [shown(x) for (x, _, _), pole in zip(torn, is_pole, strict=True) if pole]
    jumps = [f"{shown(x)} (from {shown(a)} to {shown(b)})" for (x, a, b), p in zip(torn, is_pole, strict=True) if not p]
    for what, found in (("poles", poles), ("jumps", jumps), ("no real value", stretches(missing))):
        lines += [f"- {what} at: {enumerated(found, '')}"] if found else []
    return "\n".join(lines)


def plot(expressions, variable_name, lower, upper):
    name, (low, high) = variable(variable_name), axis(lower, upper)
    texts = listed(expressions)
    if not 1 <= len(texts) <= 4:
        raise ValueError(f"expected 1 to 4 expressions, got {len(texts)}")
    parsed, xs = [parse(text, [name]) for text in texts], np.linspace(low, high, POINTS)
    curves = [function(each, [name]) for each in parsed]
    lines = [described(name, str(each), of, xs) for each, of in zip(parsed, curves, strict=True)]
    for i, first in enumerate(parsed):
        for j, second in enumerate(parsed[i + 1 :], i + 1):
            gap = function(first - second, [name])
            met = roots(gap, xs, gap(xs))
            found = [f"({shown(a)}, {shown(float(curves[j](a)))})" for a, b in met if a == b]
            found += [f"all from {name} = {shown(a)} to {shown(b)}" for a, b in met if a != b]
            lines.append(f"{first} and {second} cross or touch at: {enumerated(found, 'no point')}")
    return "\n".join(lines)


TOOLS = {each.__name__: each for each in (solve, simplify, differentiate, integrate, find_roots, optimize, plot)}


def main():
    warnings.simplefilter("ignore")  # the model reads standard error
    call = json.load(sys.stdin)
    try:
        print(TOOLS[call["tool"]](**call["arguments"]))
    except Exception as error:  # whatever SymPy raises is about the model's expression
        message = " ".join(str(error).split()) or "it cannot be worked out"
        print(f"{type(error).__name__}: {message[:300]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
