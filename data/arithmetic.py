"""Run small arithmetic programs that we made: assignments and `print`, on numbers. Nothing else is executed.

For traces of word problems, whose code comes from files that others wrote (equations, calculator annotations). A test
runs the same programs in the sandbox and compares the results.
"""

import ast
import operator
from collections.abc import Mapping

Number = int | float

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 10**15  # limit of numbers and results, within which a float holds every integer


def evaluate(expression: str, values: Mapping[str, Number] | None = None) -> Number:
    """Return the value that Python gives an expression of numbers, names, + - * / // % and brackets.

    Raises:
        ValueError: it has anything else, an unknown name, a division by zero, or a number above 10^15.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no expression: {expression!r} ({type(error).__name__})") from None
    return _value(tree, values or {})


def run(code: str) -> str:
    """Return what a program of assignments and `print(EXPRESSION)` prints, without the last newline.

    Raises:
        ValueError: it has any other statement, or an expression that `evaluate` refuses.
    """
    values: dict[str, Number] = {}
    printed = []
    try:
        statements = ast.parse(code).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no program: {code!r} ({type(error).__name__})") from None
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _value(value, values)
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[value], keywords=[])):
                printed.append(str(_value(value, values)))
            case _:
                raise ValueError(f"expected NAME = EXPRESSION or print(EXPRESSION), found {ast.unparse(statement)!r}")
    return "\n".join(printed)


def plain(number: Number) -> str:
    """Return a number without exponent and ".0": 51.0 -> 51, .5 -> 0.5; with at most 6 decimals, enough for these."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def _value(node: ast.expr, values: Mapping[str, Number]) -> Number:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            result = value
        case ast.Name(id=name) if name in values:
            result = values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand, values)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _value(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                result = _BINARY[type(op)](_value(left, values), _value(right, values))
            except ZeroDivisionError:
                raise ValueError(f"division by zero in {ast.unparse(node)!r}") from None
        case _:
            raise ValueError(f"expected arithmetic on numbers, found {ast.unparse(node)!r}")
    if not abs(result) <= _LARGEST:  # NaN too
        raise ValueError(f"{ast.unparse(node)!r} is above {_LARGEST:.0e}")
    return result
