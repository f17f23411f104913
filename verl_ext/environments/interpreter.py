"""The code interpreter: it runs the code of a call in the sandbox, and says what the model reads of it."""

import builtins
import re
from typing import Any

from verl_ext.environments.shared_client import shared_client
from verl_ext.episode import CallResult
from verl_ext.protocols.base import Call, format_output

_EXCEPTION = re.compile(r"\A[A-Za-z_][\w.]*")


class Interpreter:
    """The code interpreter: each call runs in a fresh process of the sandbox."""

    def __init__(self, settings: Any):
        self.sandbox = shared_client(settings.sandbox)
        self._timeout_s = settings.sandbox.timeout_s
        self._limits = {"timeout_s": settings.sandbox.timeout_s, "memory_limit_mb": settings.sandbox.memory_limit_mb}
        self._echo, self._traceback = settings.sandbox.echo_last_expression, settings.traceback

    async def run(self, call: Call) -> CallResult:
        if not isinstance(code := call.arguments.get("code"), str):  # by a schema of the user's
            return CallResult(f"ToolError: {call.tool} needs the argument 'code', a string", error="ToolError")
        result = await self.sandbox.run(code, **self._limits, echo_last_expression=self._echo)
        if result.status == "sandbox_failure":
            return CallResult("", failure=result.message, attempts=result.attempts)
        stderr = result.error_text(self._timeout_s)
        return CallResult(
            output=format_output(result.stdout, stderr, traceback=self._traceback),
            error=None if result.status == "ok" else error_kind(result.status, result.stderr, result.return_code),
            queue_s=result.queue_s,
            run_s=result.run_s,
            attempts=result.attempts,
            stdout=result.stdout,
            stderr=stderr,
            exit_code=result.return_code,
        )


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
