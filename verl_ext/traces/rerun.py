"""Run the calls of a trace once more, in the environment that the run would have given it, and compare the outputs."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from verl_ext.environments.base import selected
from verl_ext.episode import CallResult
from verl_ext.protocols.base import CODE_TOOL, Call, format_output, strip_fence
from verl_ext.protocols.trace import TraceTurn
from verl_ext.rollout.lives import Life
from verl_ext.rollout.ways import Way
from verl_ext.traces.trace import LeftOut, Reason

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # at running a trace; a call to the sandbox is itself repeated for `retool.sandbox.queue_timeout_s`
_CUT = re.compile(r"(?:\A|\n)\[\.\.\. (\d{1,12}) characters cut \.\.\.\](?:\n|\Z)")  # of protocols.base.cut_output
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_BLANKS = re.compile(r"[ \t\r]+(?=\n|\Z)")


class NotRun(RuntimeError):
    """Sandbox or tool failed, so the outputs are not known."""


async def check_outputs(way: Way, task: Mapping[str, Any], turns: Sequence[TraceTurn]) -> None:
    """Check that the calls of a trace say what it has stored; if they do not, once more.

    Args:
        task: the row that the environment opens with.
    Raises:
        LeftOut: an output differs, or two runs differ from each other, or there is no such tool.
        NotRun: the infrastructure failed.
        ValueError: the environment refuses the row.
    """
    if not any(turn.calls for turn in turns):
        return
    stored = [output for turn in turns for output in turn.outputs]
    first = _shown(await run_calls(way, task, turns))
    if (number := _first_difference(stored, first)) is None:
        return
    second = _shown(await run_calls(way, task, turns))
    if (other := _first_difference(first, second)) is not None:
        why = f"call {other + 1} said {_short(first[other])} and then {_short(second[other])}"
        raise LeftOut(Reason.NOT_DETERMINISTIC, why)
    why = f"call {number + 1} says {_short(first[number])}, the trace has {_short(stored[number])}"
    raise LeftOut(Reason.OUTPUT_DIFFERS, why)


def is_shown(stored: str, said: str) -> bool:
    """Return whether a trace's output is what a tool said, whole or as a rollout cuts it. Blanks at the ends of lines
    and addresses of objects in memory do not count."""
    stored = format_output(stored, "")
    if _plain(stored) == _plain(said):
        return True
    head, *rest = _CUT.split(stored)
    if not rest or not said.startswith(head):
        return False
    at = len(head)
    for missing, part in zip(rest[::2], rest[1::2], strict=True):
        at += int(missing)
        if said[at : at + len(part)] != part:
            return False
        at += len(part)
    return at == len(said)


async def run_calls(way: Way, task: Mapping[str, Any], turns: Sequence[TraceTurn]) -> list[CallResult]:
    """Return what the tools say to all calls, in order, in a new environment.

    Args, Raises: as `check_outputs`.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await _run_once(way, task, turns)
        except NotRun as error:
            if attempt == ATTEMPTS:
                raise
            logger.info("a trace is run again (%d of %d): %s", attempt, ATTEMPTS, error)
    raise AssertionError  # the last attempt returns or raises


async def _run_once(way: Way, task: Mapping[str, Any], turns: Sequence[TraceTurn]) -> list[CallResult]:
    said: list[CallResult] = []
    async with Life(way).opened(task) as life:
        if life.failure:
            raise NotRun(life.failure)
        tools = selected(life.opening.tools, task)
        for turn in turns:
            if unknown := [call.tool for call in turn.calls if call.tool not in tools]:
                there = ", ".join(tools) or "none"
                raise LeftOut(Reason.NOT_A_TRACE, f"a call of {unknown[0]!r}; the tools of the run are {there}")
            for result, _ in await life.run([_as_run(call) for call in turn.calls], retries=0):
                if result.failure:
                    raise NotRun(result.failure)
                said.append(result)
    return said


def _as_run(call: Call) -> Call:
    if call.tool != CODE_TOOL or not isinstance(call.arguments.get("code"), str):
        return call
    return replace(call, arguments=call.arguments | {"code": strip_fence(call.arguments["code"])})


def _shown(results: Sequence[CallResult]) -> list[str]:
    """Return what a model would read: an episode that a call ends has no answer to it."""
    return [result.output for result in results if not result.ends]


def _first_difference(stored: Sequence[str], said: Sequence[str]) -> int | None:
    pairs = zip_longest(stored, said, fillvalue="")
    return next((number for number, pair in enumerate(pairs) if not is_shown(*pair)), None)


def _plain(text: str) -> str:
    return _ADDRESS.sub("0x", _BLANKS.sub("", text)).strip()


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:117]}...")
