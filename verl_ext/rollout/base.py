"""What every agent loop of this package has, whoever decides what comes next: loop.py itself, or an agent (agents.py).

An episode opens its environment, is played, is scored unless infrastructure failed, and is written for training and
records.
"""

import functools
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, ToolListWrap

from verl_ext.episode import Episode
from verl_ext.outcome import RolloutEnd
from verl_ext.protocols.base import checked_kwargs, decoded
from verl_ext.protocols.by_name import make_protocol
from verl_ext.rollout.encoded_prompts import EncodedPrompts
from verl_ext.rollout.lives import Life
from verl_ext.rollout.log_probs import check_log_probs_are_sent, wants_log_probs
from verl_ext.rollout.rows import to_outputs
from verl_ext.rollout.seeds import seed_of
from verl_ext.rollout.ways import Way, Ways
from verl_ext.settings import Retool
from verl_ext.settings.checks import check

_FINAL_ONLY = "vllm.sampling_params:RequestOutputKind.FINAL_ONLY"


class _FinalOutputOnly:
    """Unpickles in vLLM's process as the enum that asks for one message per request instead of one per token.

    To use the enum itself, this process would have to import vLLM, which takes 3 s.
    """

    def __reduce__(self) -> tuple:
        return pkgutil.resolve_name, (_FINAL_ONLY,)


class EpisodeLoop(AgentLoopBase):
    """Makes the episodes of a run; what `play` does is the subclass's.

    Args:
        tools: those of `rollout.multi_turn.tool_config_path`, for the hermes protocol. Of one that is called
            `code_interpreter`, only the schema is used; code always runs by `retool.sandbox`.
        protocol: a name of by_name.py; None takes that of the row's domain, or `retool.protocol`.
    Raises:
        ValueError: a setting of `retool` is unknown, missing or out of range, an environment cannot be made, or the
            trainer needs log-probs that no server is asked for.
    """

    shared = True  # `play` keeps a sample's state in local variables, so LeanAgentLoopWorker uses one instance for all
    tokenizer: PreTrainedTokenizerBase  # verl says AutoTokenizer, which only makes them

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, protocol: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.apply_chat_template_kwargs = checked_kwargs(self.tokenizer, self.apply_chat_template_kwargs)
        self.continuous_token_builder.chat_template_kwargs = self.apply_chat_template_kwargs
        check_log_probs_are_sent(self.config)
        settings = self.config.retool
        check(settings, Retool)
        self.is_recorded = settings.recorder.enable
        make = functools.partial(
            make_protocol,
            tokenizer=self.tokenizer,
            template_kwargs=self.apply_chat_template_kwargs,
            max_parallel_calls=self.rollout_config.multi_turn.max_parallel_calls,
            repair_json=settings.repair_json,
        )
        self.ways = Ways(self.config, protocol, make, self.tokenizer, tools.tools if tools else [])
        # verl takes None for no tools, although its annotation lacks it.
        encode = cast(Callable[..., Awaitable[list[int]]], self.ct_build_initial_tokens)
        self.prompts = EncodedPrompts(lambda messages, tools: encode(messages, tools=tools))
        self._prompt_text = functools.lru_cache(maxsize=1024)(lambda ids: decoded(self.tokenizer, list(ids)))
        self._output_kind = pkgutil.resolve_name(_FINAL_ONLY) if "vllm" in sys.modules else _FinalOutputOnly()
        self._seeds = {"data": self.data_config.get("seed"), "rollout": self.rollout_config.get("seed")}
        self._is_repeatable = settings.get("repeatable", False)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        """Roll out one sample for verl's own workers; see `AgentLoopBase.run`."""
        return to_outputs(await self.roll_out(sampling_params, priority, **kwargs))

    async def roll_out(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Episode:
        """Roll out one sample.

        Args:
            kwargs: columns of the data set. The loop reads `raw_prompt`, `uid`, `session_id`, `tools_kwargs`, and
                `extra_info.tool_selection`, the names of the tools that this sample may use (none named: all). In
                validation the worker adds `call_retries` (`Life.run`).
        Raises:
            ValueError: the sample selects a tool that does not exist, or that the protocol cannot call.
            RuntimeError: the prompt is longer than `data.max_prompt_length`, with what the environment opens with.
        """
        way = self.ways.of(kwargs)
        async with Life(way).opened(kwargs) as life:
            return await self.play(life, way, sampling_params, priority, kwargs)

    async def play(
        self, life: Life, way: Way, sampling_params: dict[str, Any], priority: int, task: Mapping[str, Any]
    ) -> Episode:
        """Return the episode of an opened environment, or of one that could not be opened (`life.failure`)."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Release what outlives an episode."""

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        """Refuse a prompt of which verl would cut off the beginning, where system prompt and tools stand."""
        if len(prompt_ids) > (limit := self.rollout_config.prompt_length):
            raise RuntimeError(  # no ValueError, which is the chat template's
                f"With what the environment opens with, the prompt has {len(prompt_ids)} tokens, above data."
                f"max_prompt_length={limit}. Raise that, or shorten the row or the opening."
            )
        return prompt_ids

    def request_params(self, sampling_params: Mapping[str, Any], *names: object) -> dict[str, Any]:
        """Return the parameters of one request.

        Args:
            names: of the request, from which `retool.repeatable` makes its seed, so that neither the order of requests
                nor their batch matters.
        """
        params = {**sampling_params, "output_kind": self._output_kind}
        return params | ({"seed": seed_of(self._seeds["rollout"], *names)} if self._is_repeatable else {})

    def ended(self, episode: Episode, reason: RolloutEnd, sampling_params: Mapping[str, Any]) -> Episode:
        """Return an episode of which all rows have tokens as verl and the records want it."""
        if not wants_log_probs(sampling_params):
            for row in episode.rows:
                row.log_probs = None
        episode.finish_reason = reason
        if self.is_recorded:
            episode.prompt = self._prompt_text(tuple(episode.rows[0].prompt_ids))
            sampling = {name: sampling_params.get(name) for name in ("temperature", "top_p", "top_k")}
            episode.sampling = {"seeds": self._seeds, **sampling}
        return episode
