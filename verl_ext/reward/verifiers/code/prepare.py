"""Compile a test so that one run lists its calls of the program, and another one checks the answers.

For example::

    assert f(1) == g(2)

becomes::

    _answer0_ = _ask_("f", 1)
    _answer1_ = _ask_("g", 2)
    if _judging_:
        assert _use_(_answer0_) == _use_(_answer1_)

A test whose calls depend on answers, or that needs more of the program than plain data, is refused.
"""

import ast
import builtins
import re
import sys
from collections import Counter, deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NoReturn

from numpy import ndarray

FORBIDDEN = set("asyncio anyio trio curio uvloop mock stdin stdout stderr redirect_stdout redirect_stderr".split())
PLAIN = (
    bytearray,
    complex,
    Counter,
    datetime,
    Decimal,
    deque,
    dict,
    float,
    Fraction,
    int,
    list,
    ndarray,
    range,
    set,
    str,
)
ATTRIBUTES = {name for kind in (*PLAIN, timedelta) for name in dir(kind)}  # of answers


class CannotJudge(Exception):
    """A test that judges no program, or a sandbox that fails; the text says why.

    Attributes:
        found_no_place: the sandbox was well, but had no worker in time.
    """

    def __init__(self, why: str, *, found_no_place: bool = False):
        super().__init__(why)
        self.found_no_place = found_no_place


@lru_cache(maxsize=4096)
def compile_test(test: str) -> str:
    """Return the source of a test as tests.py runs it.

    Raises:
        ValueError: the test is not Python.
        CannotJudge: it needs more than calls with plain data.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"The test {test[:200]!r} is no Python ({error}). Check the data row.") from error
    _call_collected(tree)
    return ast.unparse(ast.fix_missing_locations(_Compiler(tree).visit(tree)))


def _refuse(node: ast.AST, what: str) -> NoReturn:
    raise CannotJudge(f"the test {what}: {ast.unparse(node)[:80]!r} in line {getattr(node, 'lineno', 1)}")


def _call_collected(tree: ast.Module) -> None:
    """Append a call of each function that pytest would collect."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in list(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and node.name not in used:
            if len(node.args.posonlyargs + node.args.args) > len(node.args.defaults):
                _refuse(node, "needs a fixture")
            tree.body += ast.parse(f"{node.name}()").body


def _program_names(tree: ast.Module) -> set[str]:
    """Return the names that a test leaves to the program; import modules of which that is not true."""
    nodes = list(ast.walk(tree))
    bound = {"__name__", *_bound_names(nodes)}
    free = [node.id for node in nodes if isinstance(node, ast.Name) and node.id not in bound]
    dotted = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    modules = {name for name in dotted if free.count(name) == dotted.count(name)}
    modules &= sys.stdlib_module_names | {"np", "numpy"}
    for name in sorted(modules):
        tree.body.insert(0, ast.Import([ast.alias("numpy", "np") if name == "np" else ast.alias(name)]))
    names = {name for name in free if not hasattr(builtins, name)} - modules
    if names:
        return names
    for node in nodes:  # the program's function is named like a builtin: assert sum(10, 15) == 25, or check(sum)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_simple = not any(isinstance(arg, ast.Call) for arg in node.args)
            candidates = node.args if node.func.id in bound else [node.func] if is_simple else []
            for each in candidates:
                if isinstance(each, ast.Name) and each.id not in bound:
                    return {each.id}
    return set()


def _bound_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names that code defines anywhere: by assignment or import, of functions, classes and arguments."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            yield node.name or ""
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _root(node: ast.AST) -> str:
    """Return `x` for `x`, `x.y`, `x[0]` and `x(1)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id.lstrip("_")[:1].isupper()


class _Compiler(ast.NodeTransformer):
    """Moves calls of the program before the statements that use their answers; refuses a test if it cannot."""

    def __init__(self, tree: ast.Module):
        self._program = _program_names(tree)
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._aliases: set[str] = set()  # parameters of the test's functions that are functions of the program
        while found := set(self._find_aliases(tree)) - self._aliases:
            self._aliases |= found
        self._answers = {"_use_"}  # names that hold answers
        self._grown: set[str] = set()  # lists and dictionaries to which answers were added
        self._given: set[str] = set()  # names that calls of the program got
        self._count = 0
        self._calls: list[ast.stmt] | None = None  # of the present statement; None where it may have none
        self._num_objects = 0  # calls in the present statement of what looks like a class
        self._is_argument = False  # within the arguments of a call

    def _find_aliases(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._functions:
                parameters = self._functions[node.func.id].args
                names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
                yield from (name for name, arg in zip(names, node.args, strict=False) if self._is_program(arg))

    def _is_program(self, node: ast.AST | None) -> bool:
        """Return whether an expression is a function of the program: `f`, `Solution().f` or a parameter."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            made = node.value
            return _is_class(made.func) and self._is_program(made.func) and not made.args and not made.keywords
        return isinstance(node, ast.Name) and node.id in self._program | self._aliases

    def _is_answer(self, node: ast.expr) -> bool:
        """Return whether an expression is an answer, or a part of one."""
        return _root(node) in self._answers

    # Statements.

    def _part(self, value: ast.expr) -> tuple[ast.expr, list[ast.stmt]]:
        """Return an expression in which answers are names, and the calls that give them."""
        self._calls, self._num_objects = [], 0
        value, calls, self._calls = self.visit(value), self._calls, None
        return value, calls

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        test, calls = self._part(node.test)
        if not _names(test) & self._answers and (given := _names(test) & self._given):
            _refuse(node, f"looks at {given.pop()!r} after the program got it")
        return [*calls, ast.If(_name("_judging_"), [ast.Assert(test)], [])]

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        if self._is_program(getattr(node.value, "func", None)):
            _refuse(node, "calls the program without looking at the answer")
        value, calls = self._part(node.value)
        if not _names(value) & self._answers:
            return [ast.Expr(value)]
        if getattr(getattr(node.value, "func", None), "attr", "") in ATTRIBUTES:  # numbers.append(f(1))
            self._answers.add(_root(node.value))
            self._grown.add(_root(node.value))
        return [*calls, ast.If(_name("_judging_"), [ast.Expr(value)], [])]

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        value, calls = self._part(node.value)
        if _names(value) & self._answers:
            self._answers |= {_root(target) for target in node.targets}
            if not self._is_program(getattr(node.value, "func", None)):
                value = ast.IfExp(_name("_judging_"), value, _name("_later_"))
        else:
            self._grown -= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return [*calls, ast.Assign([self.visit(target) for target in node.targets], value, lineno=0)]

    def visit_For(self, node: ast.For | ast.If | ast.While) -> ast.AST:
        condition = node.iter if isinstance(node, ast.For) else node.test
        if _names(condition) & self._answers:
            _refuse(condition, "does what depends on an answer")
        return self.generic_visit(node)

    visit_If = visit_While = visit_For

    def visit_With(self, node: ast.With | ast.Try | ast.ClassDef) -> ast.AST:
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and self._is_program(each.func):
                _refuse(each, "calls the program in a class, or where it may expect an error")
        return self.generic_visit(node)

    visit_Try = visit_ClassDef = visit_With

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST:
        if FORBIDDEN & set(re.findall(r"\w+", ast.unparse(node))):
            _refuse(node, "needs coroutines, or what the program prints or uses")
        return node

    visit_ImportFrom = visit_Import

    # Expressions.

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if self._is_program(node.func):
            return self._ask(node)
        is_own = isinstance(node.func, ast.Name) and node.func.id in self._functions
        node.args = [self._function(arg) if is_own and self._is_program(arg) else self.visit(arg) for arg in node.args]
        node.keywords = [self.visit(each) for each in node.keywords]
        node.func = self.visit(node.func)
        if self._is_answer(node.func) and not isinstance(node.func, ast.Attribute):
            _refuse(node, "calls what the program returned")
        return node

    def _ask(self, node: ast.Call) -> ast.expr:
        if self._calls is None:
            _refuse(node, "calls the program elsewhere than in an assert or an assignment")
        if not self._is_argument and _is_class(node.func):
            self._num_objects += 1
            if self._num_objects > 1 or not (node.args or node.keywords):
                _refuse(node, "uses objects of the program")
        outer, self._is_argument = self._is_argument, True
        args, keywords = [self.visit(arg) for arg in node.args], [self.visit(each) for each in node.keywords]
        self._is_argument = outer
        for arg in [*args, *(each.value for each in keywords)]:
            if _names(arg) & self._grown:
                _refuse(node, "gives the program what has collected answers")
            if isinstance(arg, ast.Lambda | ast.GeneratorExp) or getattr(arg, "id", None) in self._functions:
                _refuse(node, "gives the program what is no plain data")
        self._given |= {arg.id for arg in args if isinstance(arg, ast.Name)}
        answer, self._count = _name(f"_answer{self._count}_"), self._count + 1
        call = ast.Call(_name("_ask_"), [self._function(node.func), *args], keywords)
        self._calls.append(ast.Assign([answer], call, lineno=0))
        return answer if outer else ast.Call(_name("_use_"), [answer], [])

    def _function(self, node: ast.expr) -> ast.expr:
        is_alias = isinstance(node, ast.Name) and node.id in self._aliases
        return node if is_alias else ast.Constant(ast.unparse(node))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and self._is_program(node):
            _refuse(node, "uses a name of the program other than to call it")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        node.value = self.visit(node.value)
        if node.attr in FORBIDDEN:
            _refuse(node, "needs what the program prints")
        if self._is_answer(node.value) and node.attr not in ATTRIBUTES:
            _refuse(node, f"uses {node.attr!r} of what the program returned")
        return node

    def visit_Lambda(self, node: ast.expr) -> ast.expr:
        calls, self._calls = self._calls, None
        self.generic_visit(node)
        self._calls = calls
        return node

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> ast.expr:
        first = node.generators[0]
        once, first.iter = self.visit(first.iter), ast.Constant(None)
        self.visit_Lambda(node)
        first.iter = once
        return node

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp
