"""The process in which answers are parsed as expressions: run by path by symbolic.py, never imported by it.

Reads one JSON request after the other from the connection whose file number is argv[1] and answers each. It limits its
own memory and, per request, its own CPU time: the kernel ends it when either is gone, and symbolic.py starts another.
Parsing is math-verify's (latex2sympy2_extended, an ANTLR grammar: answer text reaches no eval, sympify or parse_expr).
"""

import json
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection

PRECISION = 60  # digits; two closed forms that agree to 40 of them at every point are the same
AGREEMENT_DIGITS = 40
# Both signs (sqrt(x^2) is not x), no integers (sin(pi x) is not 0), nothing that an ordinary formula has a pole at.
POINTS = [("37/29", "53/41"), ("-71/43", "83/59"), ("97/31", "-101/67")]


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    limits = json.loads(connection.recv_bytes())
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process when the CPU time of a request is up
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the connection
    try:
        is_equal = load()
    except ImportError as error:
        connection.send_bytes(json.dumps({"error": f"{error}"}).encode())
        return
    connection.send_bytes(json.dumps({"ready": True}).encode())
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
        try:
            answer = {"equal": is_equal(request["pred"], request["gold"])}
        except MemoryError:
            answer = {"equal": None}
        except Exception:  # whatever sympy raises on a strange but harmless expression: not shown to be equal
            answer = {"equal": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(answer).encode())


def load():
    """Import sympy and math-verify (0.5 s) and return `is_equal(pred, gold)`."""
    import logging

    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import verify

    logging.disable(logging.CRITICAL)
    conversion = ConversionConfig(lowercase_symbols=False)

    def parse(latex: str):
        exact = re.sub(r"(\d*)\.(\d+)", lambda m: f"{{\\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}}}", latex)
        expression = latex2sympy(exact, conversion_config=conversion)
        return expression if is_series(expression) else expression.subs(sympy.Symbol("i"), sympy.I)

    def is_series(expression) -> bool:
        """Whether it runs over an index, which may be called i, and may be slow to evaluate."""
        return expression.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)

    def values(expression, symbols) -> list:
        """The expression at each of POINTS, None where it has no finite value there."""
        found = []
        for point in POINTS if symbols else POINTS[:1]:
            numbers = [sympy.Rational(point[i % 2]) + sympy.Rational(i // 2, 7) for i in range(len(symbols))]
            value = sympy.N(expression.subs(dict(zip(symbols, numbers, strict=True))), PRECISION)
            found.append(value if value.is_number and value.is_finite else None)
        return found

    def agree(first, second) -> bool:
        scale = 1 if first == 0 or second == 0 else max(abs(first), abs(second))  # relative: 1/2003! is not 1/2004!
        return abs(first - second) <= scale * sympy.Float(10) ** -AGREEMENT_DIGITS

    def same_value(pred, gold) -> bool | None:
        """Decide by value at several points; None where the expressions cannot be evaluated."""
        if pred == gold:
            return True
        symbols = sorted(pred.free_symbols | gold.free_symbols, key=str)
        pairs = list(zip(values(pred, symbols), values(gold, symbols), strict=True))
        if any((first is None) != (second is None) for first, second in pairs):
            return False
        pairs = [pair for pair in pairs if pair[0] is not None]
        return all(agree(*pair) for pair in pairs) if pairs else None

    def same_equation(pred, gold) -> bool:
        """Left minus right sides in a constant ratio: 2x + 2y = 6 is x + y = 3."""
        pred, gold = pred.lhs - pred.rhs, gold.lhs - gold.rhs
        if pred.free_symbols != gold.free_symbols or not gold.free_symbols:
            return False
        symbols = sorted(gold.free_symbols, key=str)
        pairs = zip(values(pred, symbols), values(gold, symbols), strict=True)
        ratios = [first / second for first, second in pairs if first is not None and second not in (None, 0)]
        return len(ratios) > 1 and ratios[0] != 0 and all(agree(ratios[0], ratio) for ratio in ratios[1:])

    def is_equal(pred_latex: str, gold_latex: str) -> bool:
        pred, gold = parse(pred_latex), parse(gold_latex)
        if isinstance(pred, sympy.Eq) != isinstance(gold, sympy.Eq):
            return False
        if is_series(pred) or is_series(gold):
            return verify(gold, pred, timeout_seconds=None)
        if isinstance(pred, sympy.Eq) and all(isinstance(s, sympy.Expr) for s in (*pred.args, *gold.args)):
            if same_equation(pred, gold):
                return True
        elif isinstance(pred, sympy.Expr) and isinstance(gold, sympy.Expr):
            decided = same_value(pred, gold)
            if decided is not None:
                return decided
        # Sets, inequalities, matrices, and equations that need solving.
        return verify(gold, pred, timeout_seconds=None, allow_set_relation_comp=True)

    return is_equal


if __name__ == "__main__":
    main()
