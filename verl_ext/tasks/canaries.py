"""Tests that must fail: copies of a module's own tests in which one expected value is another.

The tests of a repository run in one process with the code that they test. Code that has failures reported as passes, by
whatever way, reports them for copies, too. A copy expects another value than its test, so code that passes the test
fails the copy, whatever it is. It has an ordinary name, and stands where a further test would stand.
"""

import ast
import io
import random
from collections.abc import Iterator

PLACES = ("again", "also", "basic", "cases", "extra", "more", "other", "simple", "twice", "values")
OF_UNITTEST = ("assertEqual", "assertEquals")
PLAIN = "\n\ndef {name}():\n    values = sorted([2, 3, 1])\n    assert values == [1, 3, 2]\n"


def with_canaries(source: str, rng: random.Random, count: int) -> tuple[str, list[str]]:
    """Return a test module with copies of its tests and one further test that must fail, and their names.

    Args:
        source: Python.
        count: of copies, if there are so many tests; more if more classes have tests, as there is one of each class.
    Returns:
        The module, and names such as "test_slug_more" or "TestSlug::test_empty_more".
    Raises:
        SyntaxError: it is no Python.
    """
    lines = [*io.StringIO(source, newline="")]  # as Python counts them, unlike `splitlines`
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    tests = list(_tests(ast.parse(source)))
    taken = {test.name for _, test in tests}
    copies = [(owner, test, copy) for owner, test in tests if (copy := _altered(test, lines, rng))]
    rng.shuffle(copies)
    firsts = list({each[0]: each for each in copies}.values())  # unittest's asserts are others
    names, chosen = [], firsts + [each for each in copies if each not in firsts][: max(0, count - len(firsts))]
    for owner, test, copy in sorted(chosen, key=lambda each: -each[1].lineno):  # so that line numbers stay right
        name = _new_name(test.name, taken, rng)
        start, end = _span(test)
        head = "".join([*io.StringIO(copy, newline="")][: test.lineno - 1 - start])
        copy = head + copy[len(head) :].replace(test.name, name, 1)
        lines.insert(end, f"\n{copy}" if owner else f"\n\n{copy}")
        names.append(f"{owner}::{name}" if owner else name)
    plain = _new_name("test_sorted", taken, rng)
    return "".join([*lines, PLAIN.format(name=plain)]), [*names, plain]


def _tests(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield "", node
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test"))
            yield from ((node.name, each) for each in inner)


def _span(test: ast.FunctionDef) -> tuple[int, int]:
    """Return the lines of a test, with its decorators, as the ends of a slice."""
    return min([test.lineno, *(each.lineno for each in test.decorator_list)]) - 1, test.end_lineno or test.lineno


def _altered(test: ast.FunctionDef, lines: list[str], rng: random.Random) -> str | None:
    """Return the text of a test with one expected value changed; None if it expects no plain value.

    Only statements of the function itself count, as they run whatever the code under test does.
    """
    start, end = _span(test)
    constants = [pair for node in test.body for value in _expected(node) for pair in _constants(value)]
    constants = [(each, other) for each, other in constants if each.lineno == each.end_lineno]
    if not constants or ";" in lines[end - 1]:
        return None
    constant, other = rng.choice(constants)
    changed, line = lines[start:end], lines[constant.lineno - 1].encode()
    line = line[: constant.col_offset] + repr(other).encode() + line[constant.end_col_offset :]
    changed[constant.lineno - 1 - start] = line.decode()
    return "".join(changed)


def _expected(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the plain values that a statement compares something else with."""
    pair = []
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
        pair = [node.test.left, node.test.comparators[0]] if isinstance(node.test.ops[0], ast.Eq) else []
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute) and called.attr in OF_UNITTEST and len(node.value.args) == 2:
            pair = node.value.args
    plain = [each for each in pair if _is_plain(each)]
    if len(plain) == 1:
        yield plain[0]


def _is_plain(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _constants(value: ast.expr) -> Iterator[tuple[ast.Constant, bool | int | float | str]]:
    """Yield parts of a value, with what makes it another value: not a set's or a key, of which there may be two."""
    if isinstance(value, ast.Constant) and isinstance(value.value, bool | int | float | str):
        yield value, _other(value.value)
    elif isinstance(value, ast.List | ast.Tuple):
        for each in value.elts:
            yield from _constants(each)
    elif isinstance(value, ast.Dict):
        for each in value.values:
            yield from _constants(each)


def _other(value: bool | int | float | str) -> bool | int | float | str:
    if isinstance(value, bool):
        return not value
    return value + "s" if isinstance(value, str) else value + 1


def _new_name(name: str, taken: set[str], rng: random.Random) -> str:
    places = [f"{name}_{place}" for place in PLACES if f"{name}_{place}" not in taken]
    new = rng.choice(places) if places else f"{name}_{len(taken)}"
    taken.add(new)
    return new
