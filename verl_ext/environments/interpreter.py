"""The code interpreter: it runs the code of a call in the sandbox, and says what the model reads of it."""

import builtins
import re
from typing import Any

from verl_ext.environments.shared_client import shared_client
from verl_ext.environments.tool_errors import ToolUnavailable
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
        self._checked: set[str] = set()
        self.options = {  # of a run of the sandbox
            "timeout_s": settings.sandbox.timeout_s,
            "memory_limit_mb": settings.sandbox.memory_limit_mb,
            "echo_last_expression": settings.sandbox.echo_last_expression,
        }

    async def run(self, call: Call, setup: str = "") -> CallResult:
        """Run the code of one call, which fails only if the sandbox does.

        Args:
            setup: a program that runs before it.
        """
        if not isinstance(code := call.arguments.get("code"), str):  # by a schema of the user's
            return CallResult(f"ToolError: {call.tool} needs the argument 'code', a string", error="ToolError")
        result = await self._execute(code, setup)
        if result.status == "sandbox_failure":
            return CallResult("", failure=result.message, attempts=result.attempts)
        stderr = result.error_text(self.options["timeout_s"])
        if result.session_ended:  # on the last line, which may be all that the model is shown
            stderr = f"{stderr.rstrip()} {RESTARTED}".lstrip()
        return CallResult(
            output=format_output(result.stdout, stderr, traceback=self.traceback),
            error=None if result.status == "ok" and not result.session_ended else error_kind(result),
            queue_s=result.queue_s,
            run_s=result.run_s,
            attempts=result.attempts,
            stdout=result.stdout,
            stderr=stderr,
            exit_code=result.return_code,
        )

    async def check(self, setup: str) -> None:
        """Check that a program which is to run before others runs by itself; once for all episodes with it.

        Raises:
            ValueError: it fails.
            ToolUnavailable: the sandbox does.
        """
        if not setup or setup in self._checked:
            return
        result = await self.sandbox.run(setup, **self.options)
        if result.status == "sandbox_failure":
            raise ToolUnavailable(result.message)
        require_setup(result)
        self._checked.add(setup)

    async def _execute(self, code: str, setup: str) -> RunResult:
        return await self.sandbox.run(f"exec({setup!r})\n{code}" if setup else code, **self.options)


def require_setup(result: RunResult) -> None:
    """Raise ValueError unless a row's setup ended well."""
    if result.status != "ok" or result.session_ended:
        lines = [result.status, *result.stderr.strip().splitlines()[-1:]]
        raise ValueError(f"extra_info.setup_code of the row fails in the sandbox: {': '.join(lines)}. Correct the row.")


def error_kind(result: RunResult) -> str:
    """Return how a program failed: "timeout", "killed", the name of one of Python's own exceptions, or "other"."""
    if result.status == "timeout":
        return "timeout"
    if result.return_code is not None and result.return_code < 0:
        return "killed"
    lines = result.stderr.strip().splitlines()
    name = match.group() if lines and (match := _EXCEPTION.match(lines[-1])) else ""
    known = getattr(builtins, name, None)
    return name if isinstance(known, type) and issubclass(known, BaseException) else "other"
