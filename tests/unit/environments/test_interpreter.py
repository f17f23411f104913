"""How the code of a call failed, in one word."""

import builtins

import pytest

from verl_ext.environments.interpreter import error_kind
from verl_ext.sandbox.result import RunResult


@pytest.mark.parametrize(
    ("status", "stderr", "return_code", "kind"),
    [
        ("code_error", "Traceback:\n  line 1\nNameError: name 'x' is not defined", 1, "NameError"),
        ("code_error", "KeyboardInterrupt\n", 1, "KeyboardInterrupt"),
        ("code_error", "sympy.core.sympify.SympifyError: no", 1, "other"),
        ("code_error", "MyOwnError: of the model's making", 1, "other"),
        ("code_error", "print: not found", 1, "other"),  # a builtin, but no exception
        ("code_error", "", 3, "other"),
        ("code_error", "NameError: x", -9, "killed"),
        ("timeout", "NameError: x", None, "timeout"),
    ],
)
def test_error_kinds_are_few_and_known(status, stderr, return_code, kind):
    assert error_kind(RunResult(status, "", stderr, return_code, 0.0, 0.0, 1, "")) == kind
    assert kind in ("other", "killed", "timeout") or issubclass(getattr(builtins, kind), BaseException)
