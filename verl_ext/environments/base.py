"""What an episode acts in: `Environment`, one object for one episode, used once.

The agent loop (rollout/loop.py) calls `open` first, then `call` for each call of a tool and `reply` for each turn
without one, `score` when the episode has ended, and `close` in any case. Exceptions say whose fault a failure is, see
tool_errors.py: `ToolError` is the model's, which reads it; `ToolUnavailable` marks the episode as failed by the
infrastructure; any other is ours, and raised.

To make your own, derive from `Environment` and mark its tools:

    class Stack(Environment):
        async def open(self, task):
            self.items = list(task["extra_info"]["items"])
            return await super().open(task)

        @tool
        def pop(self) -> str:
            \"\"\"Take the topmost item.\"\"\"
            if not self.items:
                raise ToolError("the stack is empty")
            return self.items.pop()

and name it in a run: `retool.environment: my_stack.py:Stack`.
"""

import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, ClassVar, TypeVar

from verl_ext.environments import threads
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable, who_is_at_fault
from verl_ext.episode import CallResult, Episode, Score
from verl_ext.outcome import Fault
from verl_ext.protocols.base import Call, format_output

Method = TypeVar("Method", bound=Callable)


@dataclass(frozen=True)
class Opening:
    """What the model sees first: the messages of the prompt, and by name the schemas of the tools that it may call."""

    messages: list[dict[str, Any]]
    tools: dict[str, dict]


def tool(method: Method) -> Method:
    """Make a method of an environment a tool. Its schema comes from its docstring, with `Args:`, and its types."""
    method.is_tool = True
    return method


class Environment:
    """The life of one episode in its world. Each method has a default, so that a small world stays short.

    Args:
        config: the run's, with `retool`. Settings of the YAML next to `name` arrive as further keyword arguments.
    Attributes:
        is_stateless: whether a call that infrastructure failed may be made again; never so with state.
        call_s: seconds that a call of a `tool` may take; None: the run's limit for programs and their queueing. A call
            that takes longer is the model's error, so a tool with a backend needs a shorter limit, after which it
            raises ToolUnavailable. A tool that is no coroutine works on in its thread, of which there are few
            (threads.py).
        writes_first: whether `open` writes the first message of a user if the row has none. Elsewhere the doctor
            refuses such a row.
    """

    is_stateless: ClassVar[bool] = False
    writes_first: ClassVar[bool] = False
    call_s: float | None = None
    config: Any = None

    def __init__(self, config: Any = None):
        self.config = config

    @classmethod
    def schemas(cls, config: Any = None, **settings: Any) -> dict[str, dict]:
        """Return, by name, the schemas of the tools that its episodes may have, in OpenAI's form.

        Raises:
            ValueError: a tool's docstring or types are incomplete.
        """
        return _schemas_of_methods(cls)

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Begin the episode. After `ToolUnavailable`, the loop tries again with a new object.

        Args:
            task: the row of the data set: `raw_prompt`, `extra_info`, `tools_kwargs`, `reward_model`, ...
        Raises:
            ValueError: the row is wrong.
            ToolUnavailable: something that the episode needs did not answer.
        """
        return Opening(list(task["raw_prompt"]), _schemas_of_methods(type(self)))

    async def call(self, call: Call) -> CallResult:
        """Run one call of a tool of the opening. The calls of a turn may run at the same time."""
        method = getattr(self, call.tool)
        if told := unknown_argument(call, _schemas_of_methods(type(self))[call.tool]):
            return told
        async with self._turn:
            started, limit = time.perf_counter(), None
            try:
                if inspect.iscoroutinefunction(method):
                    running = method(**call.arguments)
                else:
                    running = await threads.begin(method, **call.arguments)
                    started = time.perf_counter()
                async with asyncio.timeout(self._limit_s()) as limit:
                    said = await running
            except (Exception, SystemExit) as error:  # a tool's code may raise anything
                error = threads.as_exception(error)
                if limit is not None and limit.expired():  # its arguments made it work for too long
                    told = f"TimeoutError: no answer within {self._limit_s():g} s"
                    return CallResult(told, error="timeout", run_s=time.perf_counter() - started)
                fault = who_is_at_fault(error, call.arguments)
                if fault is Fault.OURS:
                    error.add_note(f"Raised by {type(self).__name__}.{call.tool} for {call.arguments!r:.200}. {REMEDY}")
                    raise error
                if fault is Fault.INFRASTRUCTURE:
                    return CallResult("", failure=f"{call.tool}: {error!r}")
                kind = "ToolError" if isinstance(error, ToolError) else type(error).__name__
                return CallResult(f"{kind}: {error}", error=kind, run_s=time.perf_counter() - started)
        run_s = time.perf_counter() - started
        if isinstance(said, CallResult):
            return replace(said, run_s=said.run_s or run_s)
        if not isinstance(said, str):
            raise TypeError(f"{type(self).__name__}.{call.tool} returned {said!r:.200}; expected text or a CallResult.")
        return CallResult(format_output(said, ""), run_s=run_s)

    async def reply(self, text: str) -> list[dict[str, Any]] | None:
        """Return the user's messages that answer a turn without a call; None: the turn ends the episode.

        Args:
            text: what the model wrote, with the end token.
        """
        return None

    async def score(self, episode: Episode) -> Score | None:
        """Score the ended episode; None: the verifier of its `data_source` does, by the row's ground truth. After
        `ToolUnavailable` the loop asks again."""
        return None

    async def solve(self, task: Mapping[str, Any]) -> bool:
        """Open the episode and do what the row's reference solution does, `extra_info.gold_calls` unless a class knows
        of another; return False, with nothing opened, if the row has none.

        Raises:
            ValueError: the calls are not in the form of `gold_calls`, or as `open`.
            ToolUnavailable: a call failed outside of the solution, or as `open`.
        """
        if not (calls := gold_calls(task)):
            return False
        await self.open(task)
        for call in calls:
            if (result := await self.call(call)).failure:
                raise ToolUnavailable(result.failure)
        return True

    async def score_again(self, task: Mapping[str, Any], evidence: bytes) -> Score | None:
        """Score an ended episode by the `evidence` of its first score, in an object that is not opened; None if
        this is impossible. Raises as `score`."""
        return None

    async def close(self) -> None:
        """Release the sessions, processes and connections of the episode. The loop may close an environment that `open`
        has not finished opening; a second close does nothing."""

    @functools.cached_property
    def _turn(self) -> asyncio.Lock:
        """Calls of a turn run one after the other."""
        return asyncio.Lock()

    def _limit_s(self) -> float | None:
        if self.call_s is not None or self.config is None:
            return self.call_s
        sandbox = self.config.retool.sandbox
        return sandbox.timeout_s + sandbox.queue_timeout_s


REMEDY = (
    "Correct it: if the arguments are at fault, it must raise verl_ext.environments.tool_errors.ToolError; if its "
    "backend is down, ToolUnavailable."
)


def gold_calls(task: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a row's `extra_info.gold_calls`, JSON text of [{"name": ..., "arguments": {...}}, ...].

    Raises:
        ValueError: it is something else.
    """
    text = (task.get("extra_info") or {}).get("gold_calls") or "[]"
    try:
        return [Call(call["name"], dict(call["arguments"]), 0) for call in json.loads(text)]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"extra_info.gold_calls is {text!r:.200}; expected JSON text of "
            '[{"name": ..., "arguments": {...}}, ...]'
        ) from error


def unknown_argument(call: Call, schema: Mapping[str, Any]) -> CallResult | None:
    """Return what the model reads if a call has an argument that its tool has not."""
    known = (schema["function"].get("parameters") or {}).get("properties") or {}
    if not (unknown := sorted(call.arguments.keys() - known.keys())):
        return None
    told = f"{call.tool} has no argument {unknown[0]!r}; it has {', '.join(known) or 'none'}"
    return CallResult(f"ToolError: {told}", error="ToolError")


def selected(tools: Mapping[str, dict], task: Mapping[str, Any]) -> dict[str, dict]:
    """Return the tools that a row may use: those of its `extra_info.tool_selection`, or all.

    Raises:
        ValueError: there is no tool of that name.
    """
    selection = (task.get("extra_info") or {}).get("tool_selection")
    if selection is None or len(selection) == 0:
        return dict(tools)
    if unknown := set(selection) - set(tools):
        raise ValueError(
            f"extra_info.tool_selection names {sorted(unknown)}, but the tools are {sorted(tools)}. Add them to the "
            "file of rollout.multi_turn.tool_config_path or to retool.environment; only the hermes protocol can call "
            "them."
        )
    return {name: tools[name] for name in selection}


@functools.cache
def _schemas_of_methods(cls: type[Environment]) -> dict[str, dict]:
    methods = {name: each for name, each in inspect.getmembers(cls) if getattr(each, "is_tool", False)}
    return {name: _schema(cls, name, method) for name, method in methods.items()}


def _schema(owner: type, name: str, method: Callable) -> dict:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(MethodType(method, owner))  # bound, so that `self` is no argument
        del schema["function"]["return"]
        return schema
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"The tool {name!r} of {owner.__name__} has no complete docstring or types: {error} Give it a docstring, "
            "with a line below `Args:` for each argument, and a type for each."
        ) from error
