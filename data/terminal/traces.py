"""Run reference solutions in the environment `terminal`, call by call, and keep what was said as traces for SFT."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from omegaconf import OmegaConf

from verl_ext.datasets.rows import progress_bar
from verl_ext.environments.base import gold_calls, selected
from verl_ext.environments.terminal import Terminal
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import Episode, EpisodeKey, TokenRow, ToolUse
from verl_ext.outcome import RolloutEnd
from verl_ext.protocols.base import Call

SCHEMA = pa.schema({"messages": pa.string(), "tools": pa.string(), "id": pa.string()})  # the first two are JSON
AT_ONCE = 16


async def run_all(rows: Sequence[dict[str, Any]], url: str) -> tuple[list[dict[str, str]], list[tuple[str, str]]]:
    """Run the solutions of rows.

    Returns:
        Rows of SCHEMA for those that score 1, in the order of `rows`; and name and reason of the others.
    """
    sandbox = {"urls": [url], "max_concurrency": AT_ONCE, "queue_timeout_s": 60.0, "timeout_s": 30.0}
    config = OmegaConf.create({"retool": {"sandbox": sandbox}})
    free, bar = asyncio.Semaphore(AT_ONCE), progress_bar(total=len(rows), desc="run solutions", unit=" traces")

    async def one(row: dict[str, Any]) -> dict[str, str] | str:
        async with free:
            try:
                return await trace(row, Terminal(config))
            except ToolUnavailable as error:
                return str(error)
            finally:
                bar.update()

    with bar:
        found = await asyncio.gather(*map(one, rows))
    names = [row["extra_info"]["id"] for row in rows]
    failed = [(name, each) for name, each in zip(names, found, strict=True) if isinstance(each, str)]
    return [each for each in found if not isinstance(each, str)], failed


async def trace(row: Mapping[str, Any], environment: Terminal) -> dict[str, str] | str:
    """Return the trace of a row's solution, or why it is none.

    Raises:
        ToolUnavailable: the sandbox failed.
    """
    name = row["extra_info"]["id"]
    try:
        opening = await environment.open({**row, "raw_prompt": row["prompt"], "uid": name, "session_id": 0})
        tools = selected(opening.tools, row)
        messages = list(opening.messages)
        for call in [*gold_calls(row), Call("submit", {}, 0)]:
            function = {"name": call.tool, "arguments": call.arguments}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            )
            result = await environment.call(call)
            if result.failure:
                raise ToolUnavailable(result.failure)
            if not result.ends:
                messages.append({"role": "tool", "content": result.output})
        if not result.ends:
            return "submit did not end it"
        ended = Episode(EpisodeKey(name, 0), rows=[TokenRow()], use=ToolUse(), finish_reason=RolloutEnd.ANSWER)
        score = await environment.score(ended)
        if score.acc != 1.0:
            return f"it scores {score.acc}: {score.method}: {environment.tests_said}"
        return {"messages": json.dumps(messages), "tools": json.dumps(list(tools.values())), "id": name}
    finally:
        await environment.close()
