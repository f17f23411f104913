"""A rollout without a model: what the agent loop makes of given turns, without a sandbox, or an agent of an answer.

In: the tokens of a trace. Out: the tokens of the rollout in which the model samples the trace's own ones.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase
from verl.workers.rollout.replica import TokenOutput

from verl_ext.environments.base import Environment, Opening
from verl_ext.episode import CallResult, Episode
from verl_ext.protocols.base import Call, format_output
from verl_ext.rollout import standalone
from verl_ext.rollout.loop import RetoolAgentLoop
from verl_ext.rollout.stops import end_id

Tokens = tuple[list[int], list[int]]  # (ids, loss mask) of a trace


class _Scripted(Environment):
    """An environment with the tools of a real one, which says the same to any call."""

    def __init__(self, tools: dict[str, dict], output: str):
        super().__init__()
        self._tools, self._output = tools, output

    async def open(self, task: Mapping[str, Any]) -> Opening:
        return Opening(list(task["raw_prompt"]), self._tools)

    async def call(self, call: Call) -> CallResult:
        return CallResult(format_output(self._output, ""))


async def roll_out(
    config: DictConfig,
    question: str,
    output: str,
    trace: Tokens,
    *,
    tokenizer: PreTrainedTokenizerBase,
    protocol: str,
    model_path: str,
    tools: Sequence[Any] = (),
    data_source: str = "",
) -> Tokens:
    """Run the real agent loop between a server that samples `trace` and an environment that says `output` to any call.

    Args:
        config: an RL run's; its lengths and its recorder settings are not used.
        question: the user's.
        trace: each stretch that its mask gives to the model is sampled as one turn, then the end token.
        model_path: the model's folder, from which its type is read.
        tools: as `environments.toolbox.load_tools` gives them.
        data_source: whose environment's tools the prompt shows, if the run has a table of domains.
    """
    parts = groupby(zip(*trace, strict=True), lambda pair: pair[1])
    turns = iter([[i for i, _ in group] for own, group in parts if own])

    async def generate(**_: Any) -> TokenOutput:
        return TokenOutput(token_ids=next(turns, [end_id(tokenizer)]), stop_reason="completed")

    size = len(trace[0])
    long = {"prompt_length": size, "response_length": 2 * size}
    quiet = {"retool": {"recorder": {"enable": False}}, "actor_rollout_ref": {"rollout": long}}
    model = Path(model_path).expanduser() / "config.json"
    loop = RetoolAgentLoop(
        trainer_config=SimpleNamespace(config=OmegaConf.merge(config, quiet)),
        server_manager=SimpleNamespace(generate=generate),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=SimpleNamespace(config=config.data),
        hf_model_type=json.loads(model.read_text()).get("model_type") if model.is_file() else None,
        tools=SimpleNamespace(tools=list(tools)),
        protocol=protocol,
    )
    way = loop.ways.of({"data_source": data_source})
    way.environments.make = lambda: _Scripted(way.environments.schemas, output)
    task = {"uid": "scripted", "session_id": 0, "raw_prompt": [{"role": "user", "content": question}]}
    task["data_source"] = data_source
    row = (await loop.roll_out({"temperature": 1.0, "logprobs": False}, **task)).row
    return row.prompt_ids + row.ids, [0] * len(row.prompt_ids) + row.mask


async def play_agent(
    config: DictConfig,
    task: Mapping[str, Any],
    answer: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any],
) -> Episode:
    """Let the agent of `retool.agent.run` play one episode, in its real environment, with a model that always says
    `answer`.

    Args:
        config: an RL run's.
        task: a row of the data set, as of `EpisodeLoop.roll_out`.
    Raises:
        AgentFailed, Exception: see `AgentLoop.play`.
    """
    ids = [*tokenizer.encode(answer, add_special_tokens=False), end_id(tokenizer)]

    async def generate(**_: Any) -> TokenOutput:
        return TokenOutput(token_ids=list(ids), stop_reason="completed")

    any_length = {"rollout": {"prompt_length": sys.maxsize}}  # a long row may be filtered out later
    quiet = {"retool": {"recorder": {"enable": False}}, "actor_rollout_ref": any_length}
    merged, server = cast(DictConfig, OmegaConf.merge(config, quiet)), SimpleNamespace(generate=generate)
    loop = standalone.make_loop(merged, server, tokenizer, list(tools), hf_model_type=None)
    try:
        return await loop.roll_out({"temperature": 1.0, "logprobs": False}, **task)
    finally:
        await loop.aclose()
