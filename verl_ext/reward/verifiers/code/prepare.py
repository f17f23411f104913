"""Prepare a test for the sandbox: call what a test runner would collect, and find the parts of it that may travel.

Without a call, functions `test_...` and unittest classes only define something, and would pass whatever the program is.
"""

import ast
import builtins
import sys
from dataclasses import dataclass
from functools import lru_cache

from verl_ext.reward.verifiers.code.handles import BUILTIN_NAMES
from verl_ext.reward.verifiers.code.refusals import why_refused

_RUN = """
import unittest as _unittest_
_result_ = _unittest_.TestResult()
_unittest_.defaultTestLoader.loadTestsFromTestCase({name}).run(_result_)
assert _result_.wasSuccessful(), (_result_.errors + _result_.failures)[0][1]
"""


@dataclass(frozen=True)
class Prepared:
    """A test as the sandbox runs it; for the fields see `tests.run_test`."""

    source: str
    functions: list[tuple[int, str]]
    modules: list[str]
    classes: list[str]
    own_builtin: str
    refusal: str  # why it can judge no program, see refusals.py


@lru_cache(maxsize=4096)
def prepare(test: str) -> Prepared:
    """Prepare a test so that its asserts may fail while it guesses, and find by its syntax what of it may travel.

    Raises:
        ValueError: the test is not Python.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"The test {test[:200]!r} is no Python ({error}). Check the data row.") from error
    refusal = why_refused(tree)
    source = ast.unparse(ast.fix_missing_locations(_TolerantAsserts().visit(_call_collected(tree))))
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    functions = [
        (node.lineno, ast.unparse(node))
        for node in nodes
        if isinstance(node, ast.Lambda | ast.FunctionDef)
        and not getattr(node, "decorator_list", [])
        and _is_closed(node)
    ]
    plain = [node.id for node in nodes if isinstance(node, ast.Name)]
    dotted = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    modules = sorted(
        name
        for name in set(dotted)
        if (name in sys.stdlib_module_names or name in ("np", "numpy")) and plain.count(name) == dotted.count(name)
    )
    own_builtin = _own_builtin(tree, set(plain) - set(modules))
    return Prepared(source, functions, modules, _classes(nodes), own_builtin, refusal)


def _call_collected(tree: ast.Module) -> ast.Module:
    """Append a call of each such function and a run of each such class to the module, instead of unittest's."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    calls, runs = [], []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and node.name not in used:
            calls += [] if _required_arguments(node) else [f"{node.name}()"]
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in node.bases):
            runs.append(_RUN.format(name=node.name))
    if runs:
        tree = _WithoutMain().visit(tree)
    tree.body += ast.parse("\n".join(calls + runs)).body
    return tree


def _required_arguments(node: ast.FunctionDef) -> bool:
    arguments = node.args
    by_position = len(arguments.posonlyargs) + len(arguments.args) > len(arguments.defaults)
    return by_position or None in arguments.kw_defaults


class _WithoutMain(ast.NodeTransformer):
    """Removes calls of `unittest.main`, which would look for the classes in the program that serves the test."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        is_main = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "unittest.main"
        return ast.Pass() if is_main else node


class _TolerantAsserts(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        """Write `assert x, text` as `try: assert x`, with `except: if not _guessing_(): raise`."""
        again = ast.If(
            ast.UnaryOp(ast.Not(), ast.Call(ast.Name("_guessing_", ast.Load()), [], [])), [ast.Raise(None, None)], []
        )
        return ast.Try([ast.Assert(node.test, None)], [ast.ExceptHandler(None, None, [again])], [], [])


def _is_closed(node: ast.AST) -> bool:
    """Return whether a function needs only its own names and builtins."""
    bound = _bound_names(node)
    return all(
        inner.id in bound or hasattr(builtins, inner.id) for inner in ast.walk(node) if isinstance(inner, ast.Name)
    )


def _bound_names(tree: ast.AST) -> set[str]:
    """Return names that code defines anywhere: by assignment or import, of functions, classes and arguments."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return bound


def _classes(nodes: list[ast.AST]) -> list[str]:
    """Return names with a capital letter that the test uses as classes.

    The test reads an attribute of an instance that no number, string or container has, or compares two instances.
    """

    def makes(node: ast.AST) -> str:
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return node.func.id if is_call and node.func.id.lstrip("_")[:1].isupper() else ""

    made = {  # variable -> class
        target.id: makes(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and makes(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in BUILTIN_NAMES:
            found.add(made.get(node.value.id, "") if isinstance(node.value, ast.Name) else makes(node.value))
        elif isinstance(node, ast.Compare):
            names = [{makes(inner) for inner in ast.walk(side)} for side in (node.left, node.comparators[-1])]
            found |= names[0] & names[1]
    return sorted(found - {""})


def _own_builtin(tree: ast.Module, names: set[str]) -> str:
    """Return the builtin whose name the solution takes (`assert sum(10, 15) == 25`); "" if the test has other names.

    It is at most one name: the test uses others, such as abs, for its checks.
    """
    bound = _bound_names(tree) | {"_guessing_"}
    if any(not hasattr(builtins, name) for name in names - bound):
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in calls:  # check(sum)
        argument = call.args[0] if len(call.args) == 1 else None
        if call.func.id in bound and isinstance(argument, ast.Name) and argument.id not in bound:
            return argument.id
    for call in calls:
        if call.func.id not in bound and not any(isinstance(n, ast.Call) for arg in call.args for n in ast.walk(arg)):
            return call.func.id
    return ""
