"""The code interpreter: it runs the code of a call in the sandbox, and says what the model reads of it."""

import builtins
import re
from typing import Any

from verl_ext.environments.shared_client import shared_client
from verl_ext.episode import CallResult
from verl_ext.protocols.base import Call, format_output
from verl_ext.sandbox.result import RunResult

# What the model reads if a session (notebook.py) ended with its call.
RESTARTED = "[the interpreter was restarted: all variables, imports and files are gone]"
_EXCEPTION = re.compile(r"\A[A-Za-z_][\w.]*")


class Interpreter:
    """The code interpreter: each call runs in a fresh process of the sandbox."""

    def __init__(self, settings: Any):
        self.sandbox, self.traceback = shared_client(settings.sandbox), settings.traceback
        self.options = {  # of a run of the sandbox
            "timeout_s": settings.sandbox.timeout_s,
            "memory_limit_mb": settings.sandbox.memory_limit_mb,
            "echo_last_expression": settings.sandbox.echo_last_expression,
        }

    async def run(self, call: Call) -> CallResult:
        """Run the code of one call, which fails only if the sandbox does."""
        if not isinstance(code := call.arguments.get("code"), str):  # by a schema of the user's
            return CallResult(f"ToolError: {call.tool} needs the argument 'code', a string", error="ToolError")
        result = await self._execute(code)
        if result.status == "sandbox_failure":
            return CallResult("", failure=result.message, attempts=result.attempts)
        stderr = result.error_text(self.options["timeout_s"])
        if result.session_ended:  # on the last line, which may be all that the model is shown
            stderr = f"{stderr.rstrip()} {RESTARTED}".lstrip()
        return CallResult(
            output=format_output(result.stdout, stderr, traceback=self.traceback),
            error=None if result.status == "ok" and not result.session_ended else error_of(result),
            queue_s=result.queue_s,
            run_s=result.run_s,
            attempts=result.attempts,
            stdout=result.stdout,
            stderr=stderr,
            exit_code=result.return_code,
        )

    async def _execute(self, code: str) -> RunResult:
        return await self.sandbox.run(code, **self.options)


def error_of(result: RunResult) -> str:
    """Return `error_kind` of a program that failed."""
    return error_kind(result.status, result.stderr, result.return_code)


def error_kind(status: str, stderr: str, return_code: int | None) -> str:
    """Return how a program failed: "timeout", "killed", the name of one of Python's own exceptions, or "other"."""
    if status == "timeout":
        return "timeout"
    if return_code is not None and return_code < 0:
        return "killed"
    lines = stderr.strip().splitlines()
    name = match.group() if lines and (match := _EXCEPTION.match(lines[-1])) else ""
    known = getattr(builtins, name, None)
    return name if isinstance(known, type) and issubclass(known, BaseException) else "other"
