"""List the mutants of a Python source: each single change by a standard operator. `mutate.py` draws and tests them.

Not mutated: docstrings, annotations, f-strings and texts with a space (messages), the text of a `raise`, logging,
`print`, and the statements of a module and the fields of a class as statements (without them, nothing imports).
"""

import ast
import warnings
from collections import Counter
from dataclasses import dataclass

COMPARISONS = {
    **{"Lt": ["<=", ">"], "LtE": ["<", ">"], "Gt": [">=", "<"], "GtE": [">", "<"], "Eq": ["!="], "NotEq": ["=="]},
    **{"In": ["not in"], "NotIn": ["in"], "Is": ["is not"], "IsNot": ["is"]},
}
ARITHMETIC = {
    **{"Add": "-", "Sub": "+", "Mult": "/", "Div": "*", "FloorDiv": "*", "Mod": "*", "Pow": "*"},
    **{"BitAnd": "|", "BitOr": "&", "LShift": ">>", "RShift": "<<"},
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
SPOKEN = {"logger", "say", "print", "warnings"}  # their arguments are for people


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str  # qualified name, "" at a module's level
    operator: str
    text: str  # the source text that is changed
    new: str
    occurrence: int  # number among equal changes in the same function
    start: int  # bytes
    end: int
    line: int

    @property
    def name(self) -> tuple[str, ...]:
        """Return the key for the draw; it does not contain line numbers."""
        return self.file, self.function, self.operator, self.text, self.new, str(self.occurrence)

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()

    def is_python(self, source: str) -> bool:
        """Return whether the mutated source still compiles; one with `continue` outside a loop only parses."""
        try:
            with warnings.catch_warnings(action="ignore"):  # Python warns of `x is 0`
                compile(self.apply(source), self.file, "exec")
        except SyntaxError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function or 'module'}: {self.operator}"


def find_mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a source, in its order; a few may not be valid Python."""
    finder, raw = _Finder(source.encode()), source.encode()
    finder.visit(ast.parse(source))
    found, seen = [], Counter()
    for function, operator, start, end, new, line in finder.found:
        text = raw[start:end].decode()
        name = function, operator, text, new
        found.append(Mutant(file, function, operator, text, new, seen[name], start, end, line))
        seen[name] += 1
    return found


class _Finder(ast.NodeVisitor):
    """Visitor that collects (function, operator, start, end, new text, line); places are bytes in the source."""

    def __init__(self, source: bytes):
        self.source, self.found, self.scope = source, [], []
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.lines[node.lineno - 1] + node.col_offset,
            self.lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def add(self, operator: str, node: ast.AST, new: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self.span(node)
        self.found.append((".".join(self.scope), operator, start, end, new, node.lineno))

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> tuple[tuple[int, int], str]:
        """Return the text between two operands with another operator; brackets and line breaks stay."""
        start, end = self.span(left)[1], self.span(right)[0]
        return (start, end), self.source[start:end].decode().replace(old, new, 1)

    # What is not mutated, and the current scope

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.append(node.name)
        for value in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(value)
        self.visit_body(node.body)
        self.scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self.visit_body(node.body)
        self.scope.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self.visit_body(node.body)

    def visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not _is_main(statement):
                self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self.delete(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        pass

    visit_ImportFrom = visit_Import

    # Operators

    def delete(self, node: ast.stmt) -> None:
        if self.scope and self.scope[-1][:1].islower() | (self.scope[-1][:1] == "_"):  # in a function
            self.add("statement left out", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if not _is_spoken(node.value):
            self.delete(node)
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        if _is_spoken(node.value):
            return
        if not isinstance(node, ast.AugAssign) and any(isinstance(target, ast.Name) for target in node.targets):
            self.visit(node.value)  # without its local name the function raises: nothing to learn
            return
        self.delete(node)
        self.visit(node.value)

    visit_AugAssign = visit_Assign

    def visit_Call(self, node: ast.Call) -> None:
        if _is_spoken(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
            self.add(f"{node.func.id} swapped", node.func, SWAPPED[node.func.id])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            kind = type(operator).__name__
            old = {"NotIn": "not in", "In": "in", "IsNot": "is not", "Is": "is"}.get(kind) or _SIGNS[kind]
            for new in COMPARISONS[kind]:
                span, text = self.between(left, right, old, new)
                self.add(f"comparison {old} -> {new}", node, text, span)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        kind = type(node.op).__name__
        if kind in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            old = _SIGNS[kind]
            span, text = self.between(node.left, node.right, old, ARITHMETIC[kind])
            self.add(f"arithmetic {old} -> {ARITHMETIC[kind]}", node, text, span)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            span, text = self.between(left, right, old, new)
            self.add(f"boolean {old} -> {new}", node, text, span)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            start, end = self.span(node.operand)
            self.add("not or minus left out", node, f"({self.source[start:end].decode()})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value))
        elif value is None:
            self.add("constant", node, "0")
        elif isinstance(value, int | float):
            self.add("constant", node, str(value + 1))
            if value == 1:
                self.add("constant", node, "0")
        elif isinstance(value, str) and value and " " not in value:
            self.add("constant", node, '""')

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add("return None", node, "return None")
            self.visit(node.value)

    def visit_Break(self, node: ast.Break) -> None:
        self.add("break -> continue", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("continue -> break", node, "break")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            for bound in filter(None, (node.slice.lower, node.slice.upper)):
                self.add("slice bound left out", bound, "")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        for value in ("True", "False") if not isinstance(node, ast.While) else ("False",):
            self.add(f"condition {value}", node.test, value)
        self.visit(node.test)
        for part in (node.body, node.orelse):
            for child in part if isinstance(part, list) else [part]:
                self.visit(child)

    visit_IfExp = visit_While = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.add("condition True", test, "True")
        self.generic_visit(node)


_SIGNS = {
    **{"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="},
    **{"Add": "+", "Sub": "-", "Mult": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**"},
    **{"BitAnd": "&", "BitOr": "|", "LShift": "<<", "RShift": ">>"},
}


def _is_spoken(node: ast.expr) -> bool:
    """Return whether a node calls a logger or another name of SPOKEN, or makes one."""
    names = {child.id for child in ast.walk(node.func) if isinstance(child, ast.Name)} if _is_call(node) else set()
    return bool(names & SPOKEN) or (_is_call(node) and ast.unparse(node.func) == "logging.getLogger")


def _is_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
