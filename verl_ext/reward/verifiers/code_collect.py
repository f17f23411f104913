"""Tests that a test runner would collect: functions `test_...` and classes of unittest, called by nothing in the test.

By themselves they only define something, and pass whatever the program is.
"""

import ast

_RUN = """
import unittest as _unittest_
_result_ = _unittest_.TestResult()
_unittest_.defaultTestLoader.loadTestsFromTestCase({name}).run(_result_)
assert _result_.wasSuccessful(), (_result_.errors + _result_.failures)[0][1]
"""


def call_collected(tree: ast.Module) -> ast.Module:
    """The module with a call of each such function and a run of each such class at its end, instead of unittest's."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    calls = [
        f"{node.name}()"
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test")
        and node.name not in used
        and not _required_arguments(node)
    ]
    classes = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in node.bases)
    ]
    if classes:
        tree = _WithoutMain().visit(tree)
    source = "\n".join([*calls, *(_RUN.format(name=name) for name in classes)])
    tree.body += ast.parse(source).body
    return tree


def _required_arguments(node: ast.FunctionDef) -> bool:
    arguments = node.args
    by_position = len(arguments.posonlyargs) + len(arguments.args) > len(arguments.defaults)
    return by_position or None in arguments.kw_defaults


class _WithoutMain(ast.NodeTransformer):
    """Without calls of `unittest.main`, which would look for the classes in the program that serves the test."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        is_main = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "unittest.main"
        return ast.Pass() if is_main else node
