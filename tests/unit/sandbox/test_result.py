"""What a model reads about a program that failed."""

import pytest

from verl_ext.protocols.base import format_output
from verl_ext.sandbox.client import RunResult

TRACEBACK = "Traceback (most recent call last):\n  1 / 0\nZeroDivisionError: division by zero\n"


@pytest.mark.parametrize(
    ("status", "stderr", "return_code", "told"),
    [
        ("ok", "", 0, ""),
        ("ok", "a warning\n", 0, "a warning\n"),
        ("code_error", TRACEBACK, 1, TRACEBACK),  # as Python writes it, to the byte
        ("code_error", "a message of sys.exit\n", 1, "a message of sys.exit\n"),
        ("code_error", "", 1, "Exited with code 1"),
        ("code_error", " \n", 1, "Exited with code 1"),
        ("code_error", "", 137, "Exited with code 137"),
        ("code_error", "usage: x\nerror: y\n", 2, "usage: x\nerror: y [exited with code 2]"),
        ("code_error", "", -9, "\nKilled by signal 9 (Killed)"),
        ("code_error", "", -11, "\nKilled by signal 11 (Segmentation fault)"),
        ("code_error", "", -200, "\nKilled by signal 200 (unknown)"),
        ("code_error", "", None, ""),  # of another sandbox, or a program that was refused
        ("timeout", "x", None, "x\nTimeoutError: stopped after 5 s"),
    ],
)
def test_how_a_program_ended_is_said_where_it_did_not_say_so_itself(status, stderr, return_code, told):
    result = RunResult(status, "", stderr, return_code, 0.0, 0.0, 1, "")
    assert result.error_text(5) == told


def test_the_exit_code_does_not_hide_the_last_line_of_stderr():
    result = RunResult("code_error", "1\n", "usage: x\nerror: y\n", 2, 0.0, 0.0, 1, "")
    assert format_output("1\n", result.error_text(5), traceback="last_line") == "1\nerror: y [exited with code 2]"
