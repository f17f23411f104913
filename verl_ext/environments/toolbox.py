"""Run a call: the sandbox for code, verl's tool interface for the other tools of a tool YAML."""

import asyncio
import builtins
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import load_all_tools

from verl_ext.environments.tool_errors import ToolError, ToolUnavailable, who_is_at_fault
from verl_ext.outcome import Fault
from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL, Call, format_output
from verl_ext.sandbox.shared import shared_client

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

TOOL_ATTEMPTS = 3  # calls of a tool whose backend does not answer, the first included
TOOL_BACKOFF_S = 0.5  # pause before the second call; doubles
RELEASE_S = 10.0  # for a tool to let go of its instance, also after a call that took too long
_EXCEPTION = re.compile(r"\A[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class CallResult:
    """What a tool said. `failure` names the infrastructure failure that kept the tool from saying anything.

    `stdout`, `stderr` and `exit_code` are a program's; None for other tools.
    """

    output: str
    error: str | None = None  # kind of error; None if the call ended well
    failure: str | None = None
    queue_s: float = 0.0
    run_s: float = 0.0
    attempts: int = 1
    reward: float | None = None
    stdout: str | None = None
    stderr: str | None = None
    exit_code: int | None = None

    @property
    def complaint(self) -> str:
        """Return the part of `output` that says what was wrong: a tool's message, a program's last line, "" if none."""
        if self.error is None:
            return ""
        return self.output if self.stdout is None else self.output.rpartition("\n")[2]


class Toolbox:
    """The tools of an agent loop.

    Args:
        settings: `retool` of the run's YAML.
        tools: other tools. Of one called `code_interpreter` only the schema is used; code always runs in the sandbox.
    """

    def __init__(self, settings: Any, tools: Sequence[BaseTool | FunctionTool] = ()):
        sandbox = settings.sandbox
        self.sandbox = shared_client(sandbox)
        self._timeout_s = sandbox.timeout_s
        self._tool_timeout_s = sandbox.timeout_s + sandbox.queue_timeout_s
        self._limits = {"timeout_s": sandbox.timeout_s, "memory_limit_mb": sandbox.memory_limit_mb}
        self._echo = sandbox.echo_last_expression
        self._traceback = settings.traceback
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = schemas_of(tools)

    def select(self, selection: Any) -> dict[str, dict]:
        """Return, by name, the schemas of the tools that a sample may use: its `extra_info.tool_selection`, or all.

        Raises:
            ValueError: there is no tool of that name.
        """
        if selection is None or len(selection) == 0:
            return self.schemas
        if unknown := set(selection) - set(self.schemas):
            raise ValueError(
                f"extra_info.tool_selection names {sorted(unknown)}, but the tools are {sorted(self.schemas)}. Add "
                "them to the file of rollout.multi_turn.tool_config_path; only the hermes protocol can call them."
            )
        return {name: self.schemas[name] for name in selection}

    async def run(self, call: Call, tools_kwargs: Mapping[str, Any]) -> CallResult:
        """Run one call.

        Args:
            tools_kwargs: the sample's; `{tool: {"create_kwargs": ...}}`, as for verl's tools.
        Raises:
            Exception: a bug in a tool, or a request that the sandbox server refuses as such.
        """
        return await (self._run_code(call) if call.tool == CODE_TOOL else self._run_tool(call, tools_kwargs))

    async def _run_code(self, call: Call) -> CallResult:
        result = await self.sandbox.run(call.arguments["code"], **self._limits, echo_last_expression=self._echo)
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

    async def _run_tool(self, call: Call, tools_kwargs: Mapping[str, Any]) -> CallResult:
        """Run a tool of the tool YAML; tool_errors.py says whose fault an exception is.

        Raises:
            Exception: a bug of the tool, with a note that names the tool.
        """
        known = (self.schemas[call.tool]["function"].get("parameters") or {}).get("properties") or {}
        if unknown := sorted(call.arguments.keys() - known.keys()):
            told = f"{call.tool} has no argument {unknown[0]!r}; it has {', '.join(known) or 'none'}"
            return CallResult(f"ToolError: {told}", error="ToolError")
        started, attempt = time.perf_counter(), 0
        while True:
            attempt += 1
            try:
                response, reward = await self._call_in_time(call, tools_kwargs)
                break
            except Exception as error:  # a tool's code may raise anything; a bug is raised again
                fault = who_is_at_fault(error, call.arguments, is_last=attempt == TOOL_ATTEMPTS)
                if fault is Fault.OURS:
                    error.add_note(
                        f"Raised by the tool {call.tool!r} for the arguments {call.arguments!r:.200}. Correct it: "
                        "if the arguments are at fault, it must raise verl_ext.environments.tool_errors.ToolError; "
                        "if its backend is down, ToolUnavailable."
                    )
                    raise
                if fault is Fault.MODEL:
                    kind = "ToolError" if isinstance(error, ToolError) else type(error).__name__
                    seconds = time.perf_counter() - started
                    return CallResult(f"{kind}: {error}", error=kind, run_s=seconds, attempts=attempt)
                if isinstance(error, ToolUnavailable) or attempt == TOOL_ATTEMPTS:
                    return CallResult("", failure=f"{call.tool}: {error!r}", attempts=attempt)
                logger.info("%s failed and is called again: %r", call.tool, error)
            await asyncio.sleep(TOOL_BACKOFF_S * 2 ** (attempt - 1))
        text = format_output(response.text, "")
        return CallResult(text, run_s=time.perf_counter() - started, reward=reward, attempts=attempt)

    async def _call_in_time(self, call: Call, tools_kwargs: Mapping[str, Any]) -> tuple[ToolResponse, float | None]:
        """Return `_call_tool`'s result in time. A tool function that hangs keeps its thread until its own time limit.

        Raises:
            TimeoutError: the tool takes longer than code may take to queue and run.
        """
        limit = asyncio.timeout(self._tool_timeout_s)
        try:
            async with limit:
                return await self._call_tool(call, tools_kwargs)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no answer within {self._tool_timeout_s:g} s") from error

    async def _call_tool(self, call: Call, tools_kwargs: Mapping[str, Any]) -> tuple[ToolResponse, float | None]:
        """Return what the tool says, and its reward.

        Raises:
            TypeError: the tool answered with None, or without text: what its backend said is lost.
            NotImplementedError: it answered with an image or a video.
        """
        tool = self._tools[call.tool]
        if isinstance(tool, FunctionTool):
            said = await tool.call(call.arguments)
            if said is None or (isinstance(said, tuple) and said[:1] == (None,)):  # verl would show the text "None"
                raise TypeError(f"The tool {call.tool!r} returned {said!r}: expected text.")
            response, reward, _ = normalize_function_tool_return(said)
        else:
            settings = tools_kwargs.get(call.tool) or {}
            instance, _ = await tool.create(create_kwargs=settings.get("create_kwargs") or {})
            try:
                response, reward, _ = await tool.execute(instance, call.arguments)
            finally:
                try:
                    await asyncio.wait_for(tool.release(instance), RELEASE_S)
                except TimeoutError:
                    logger.warning("the tool %s has not released its instance within %g s", call.tool, RELEASE_S)
        if response.image or response.video:
            raise NotImplementedError(f"Tool {call.tool} answered with an image or a video; only text is supported.")
        if response.text is None:
            raise TypeError(f"The tool {call.tool!r} answered without text: expected text, or an empty string.")
        return response, reward


def load_tools(multi_turn: Mapping[str, Any], folder: Path) -> list[BaseTool | FunctionTool]:
    """Return the tools of a run's tool YAML and of its file of functions, as verl's rollout loads them.

    Args:
        multi_turn: `actor_rollout_ref.rollout.multi_turn` of the run.
        folder: the folder that relative paths start from.
    Raises:
        Exception: any that a file, or a tool in it, raises.
    """
    files = (multi_turn.get(name) for name in ("tool_config_path", "function_tool_path"))
    return load_all_tools(*(str(folder / file) if file else None for file in files))


def schemas_of(tools: Sequence[BaseTool | FunctionTool]) -> dict[str, dict]:
    """Return name -> schema of the tools in the prompt, the interpreter first."""
    return {CODE_TOOL: CODE_SCHEMA} | {
        tool.name: tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools
    }


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
