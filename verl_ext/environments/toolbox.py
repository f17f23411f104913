"""The environment with tools: the sandbox for code, verl's tool interface for the other tools of a tool YAML."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.tool_agent_loop import AgentData
from verl.tools import schemas as verls
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import load_all_tools

from verl_ext.environments.base import REMEDY, Environment, Opening, unknown_argument
from verl_ext.environments.interpreter import Interpreter
from verl_ext.environments.notebook import Notebook
from verl_ext.environments.threads import as_exception
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable, who_is_at_fault
from verl_ext.episode import CallResult
from verl_ext.outcome import Fault
from verl_ext.protocols import tool_schemas
from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL, Call, format_output

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

TOOL_ATTEMPTS = 3  # calls of a tool whose backend does not answer, the first included
TOOL_BACKOFF_S = 0.5  # pause before the second call; doubles
RELEASE_S = 10.0  # within which a tool must release its instance


class Toolbox:
    """The tools of an agent loop, which all its episodes share; `environment` makes what each has by itself.

    Args:
        settings: `retool` of the run's YAML.
        tools: other tools. Of one called `code_interpreter` only the schema is used; code always runs in the sandbox.
    """

    def __init__(self, settings: Any, tools: Sequence[BaseTool | FunctionTool] = ()):
        self._settings, self.interpreter = settings, Interpreter(settings)
        self.timeout_s = settings.sandbox.timeout_s + settings.sandbox.queue_timeout_s  # of a call of another tool
        self.tools = {tool.name: tool for tool in tools}
        self.schemas = schemas_of(tools)

    def environment(self, *, has_state: bool = False) -> "ToolEnvironment":
        """Return the environment of one episode, with a notebook of its own if it is to have a state."""
        return ToolEnvironment(self, Notebook(self._settings) if has_state else self.interpreter)


class ToolEnvironment(Environment):
    """An episode with an interpreter, functions, and verl's `BaseTool`s, of which it has one instance each.

    Args:
        interpreter: runs the code; the episode's own if it has `close`.
    """

    def __init__(self, toolbox: Toolbox, interpreter: Any):
        super().__init__()
        self._closes = hasattr(interpreter, "close")
        self._interpreter, self._tools, self._timeout_s = interpreter, toolbox.tools, toolbox.timeout_s
        self._schemas = toolbox.schemas
        self._instances: dict[str, tuple[BaseTool, str]] = {}  # name -> the tool and its instance
        self._busy: dict[str, asyncio.Lock] = {}  # an instance runs the calls of a turn one after the other
        self._agent: AgentData | None = None
        self._setup = ""

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Begin the episode, and create the instances of its tools; see `Environment.open`."""
        info = task.get("extra_info") or {}
        names, self._setup = info.get("tool_selection"), info.get("setup_code") or ""
        await self._interpreter.check(self._setup)
        messages, settings = list(task["raw_prompt"]), task.get("tools_kwargs") or {}
        self._agent = AgentData(messages, [], [], None, None, {}, str(task.get("uid", "")), settings)
        for name, tool in self._tools.items():
            is_used = name != CODE_TOOL and (names is None or len(names) == 0 or name in names)
            if is_used and not isinstance(tool, FunctionTool):
                create_kwargs = (settings.get(name) or {}).get("create_kwargs") or {}
                try:
                    create = partial(tool.create, create_kwargs=create_kwargs)
                    instance, _ = await self._attempts(name, {}, create, attempts=1)  # the loop tries again
                except _ToldError as error:  # the model has not written anything yet
                    raise ValueError(
                        f"The tool {name!r} refused tools_kwargs.{name}.create_kwargs={create_kwargs!r:.200}: {error}. "
                        "Correct the row."
                    ) from error
                self._instances[name], self._busy[name] = (tool, instance), asyncio.Lock()
        return Opening(messages, self._schemas)

    async def call(self, call: Call) -> CallResult:
        """Run one call; tool_errors.py says whose fault an exception of a tool is.

        Raises:
            Exception: a bug of a tool, with a note that names it, or a request that the sandbox refuses as such.
        """
        if call.tool == CODE_TOOL:
            return await self._interpreter.run(call, self._setup)
        if told := unknown_argument(call, self._schemas[call.tool]):
            return told
        started, tried = time.perf_counter(), list[int]()
        try:
            async with self._busy.get(call.tool) or nullcontext():
                attempts = 1 if call.tool in self._instances else TOOL_ATTEMPTS  # an instance may have a state
                said = partial(self._say, call)
                response = await self._attempts(call.tool, call.arguments, said, tried, attempts)
        except ToolUnavailable as error:
            return CallResult("", failure=str(error), attempts=len(tried))
        except _ToldError as error:
            return CallResult(str(error), error=error.kind, run_s=time.perf_counter() - started, attempts=len(tried))
        text = format_output(response.text, "")
        return CallResult(text, run_s=time.perf_counter() - started, attempts=len(tried))

    @property
    def is_stateless(self) -> bool:
        return not self._closes and not self._instances

    async def close(self) -> None:
        """Release the instances of tools, each within RELEASE_S; one that fails to is logged."""
        instances, self._instances = self._instances, {}
        releases = [self._release(name, *each) for name, each in instances.items()]
        if self._closes:
            releases.append(self._interpreter.close())
        await asyncio.gather(*releases)

    async def _release(self, name: str, tool: BaseTool, instance: str) -> None:
        try:
            await asyncio.wait_for(tool.release(instance), RELEASE_S)
        except TimeoutError:
            logger.warning("The tool %s has not released its instance in %g s.", name, RELEASE_S)
        except Exception:  # a tool's code may raise anything; the episode has ended
            logger.exception("The tool %s could not release its instance.", name)

    async def _attempts(
        self,
        name: str,
        arguments: Mapping[str, Any],
        act: Callable[[], Awaitable[Any]],
        tried: list | None = None,
        attempts: int = TOOL_ATTEMPTS,
    ) -> Any:
        """Return what a tool gives in one of `attempts`, each in time; `tried` gets an entry for each.

        Raises:
            _ToldError: the model is at fault, and reads the message.
            ToolUnavailable: the infrastructure is.
            Exception: the tool is, with a note that names it.
        """
        for attempt in range(1, attempts + 1):
            if tried is not None:
                tried.append(attempt)
            try:
                return await self._in_time(act())
            except (Exception, SystemExit) as error:  # a tool's code may raise anything; a bug is raised again
                error = as_exception(error)
                fault = who_is_at_fault(error, arguments, is_last=attempt == attempts)
                if fault is Fault.OURS:
                    error.add_note(f"Raised by the tool {name!r} for the arguments {arguments!r:.200}. {REMEDY}")
                    raise error
                if fault is Fault.MODEL:
                    raise _ToldError(error) from error
                if isinstance(error, ToolUnavailable) or attempt == attempts:
                    raise ToolUnavailable(f"{name}: {error!r}") from error
                logger.info("%s failed and is called again: %r", name, error)
            await asyncio.sleep(TOOL_BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError  # the last attempt returns or raises

    async def _in_time(self, acting: Awaitable[Any]) -> Any:
        """Return a tool's answer in time. A tool function that hangs keeps its thread until its own time limit.

        Raises:
            TimeoutError: the tool takes longer than code may take to queue and run.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await acting
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error

    async def _say(self, call: Call) -> ToolResponse:
        """Return what the tool says.

        Raises:
            TypeError: the tool answered with None, or without text: what its backend said is lost.
            NotImplementedError: it answered with an image or a video.
        """
        tool = self._tools[call.tool]
        if isinstance(tool, FunctionTool):
            said = await tool.call(call.arguments)
            if said is None or (isinstance(said, tuple) and said[:1] == (None,)):  # verl would show the text "None"
                raise TypeError(f"The tool {call.tool!r} returned {said!r}: expected text.")
            response, *_ = normalize_function_tool_return(said)
        else:
            _, instance = self._instances[call.tool]
            response, *_ = await tool.execute(instance, call.arguments, agent_data=self._agent)
        if response.image or response.video:
            raise NotImplementedError(f"Tool {call.tool} answered with an image or a video; only text is supported.")
        if response.text is None:
            raise TypeError(f"The tool {call.tool!r} answered without text: expected text, or an empty string.")
        return response


class _ToldError(ToolError):
    """An error of a tool that the model reads."""

    def __init__(self, error: Exception):
        self.kind = "ToolError" if isinstance(error, ToolError) else type(error).__name__
        super().__init__(f"{self.kind}: {error}")


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
    dumped = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
    return {CODE_TOOL: CODE_SCHEMA} | (tool_schemas.schemas_of(dumped) if dumped else {})


def schemas_of_file(path: str | Path) -> list[dict]:
    """Return what the column `tools` of a trace has for a run with this file of functions, the interpreter included.

    Raises:
        Exception: any that the file, or a tool in it, raises.
    """
    return list(schemas_of(load_tools({"function_tool_path": Path(path).resolve()}, Path())).values())


def _keep_schemas_whole() -> None:
    """Let verl's classes of schemas keep what they do not know (`items`, `default`, ...). They would drop it without a
    word, so that a rollout would show less of a tool than the SFT data whose traces have its whole schema."""
    known = verls.OpenAIFunctionPropertySchema, verls.OpenAIFunctionParametersSchema
    for model in (*known, verls.OpenAIFunctionSchema, verls.OpenAIFunctionToolSchema):  # each holds the one before
        if model in known:
            model.model_config["extra"] = "allow"
        model.model_rebuild(force=True)


_keep_schemas_whole()  # whoever loads tools has imported this module
