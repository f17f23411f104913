"""One scored episode of any agent loop; in a validation, what failed outside the model is tried again."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, runtime_checkable

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from verl_ext.episode import Episode, EpisodeKey, Reward
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, RolloutEnd
from verl_ext.reward.numbers import BrokenReward, checked_reward
from verl_ext.rollout.lives import RETRY_PAUSE_S
from verl_ext.rollout.rows import of_outputs, to_outputs

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


@runtime_checkable
class _GivesEpisodes(Protocol):
    """A loop of this package (base.py)."""

    async def roll_out(self, sampling_params: dict[str, Any], **kwargs: Any) -> Episode: ...


class ScoredEpisodes:
    """Makes them for an agent-loop worker.

    A validation retries what failed because of the infrastructure; the last try stands. The loop repeats a call of a
    tool, this class a verification. Only a rollout that was aborted or raised is sampled anew: drawing responses until
    one is easy to verify, or needs no sandbox, would bias the figures. In training the sampler replaces whole groups.

    Args:
        score: what scores an episode in this process; None if verl's reward workers do.
        verls_score: puts the score of verl's reward workers into an episode's outputs.
        retries: `retool.validation.retries`.
    """

    def __init__(
        self,
        score: Callable[[Episode, dict[str, Any]], Awaitable[Reward]] | None,
        verls_score: Callable[[list[AgentLoopOutput], dict[str, Any]], Awaitable[None]],
        retries: int,
    ):
        self._score, self._verls_score, self._retries = score, verls_score, retries

    async def take(
        self,
        agent_loop: AgentLoopBase,
        sampling_params: dict[str, Any],
        key: EpisodeKey,
        sample: dict[str, Any],
        *,
        validate: bool,
    ) -> Episode:
        """Return one episode of a row of the data set, scored."""
        retries = self._retries if validate else 0
        extra = {"call_retries": retries} if validate else {}
        episode: Episode | None = None
        number = 0
        while True:
            number += 1
            try:
                if episode is None:
                    episode = await _new_episode(agent_loop, sampling_params, key, sample | extra)
                await self.score(episode, sample)
            except Exception as error:  # whatever it is: the last try raises it
                if number > retries or isinstance(error, BrokenReward):
                    raise
                cause = f"raised {error!r}"
            else:
                cause = episode.end if episode.end in INFRASTRUCTURE_FAILURES else None
                if cause in (None, RolloutEnd.SANDBOX_FAILURE) or number > retries:
                    return episode
                if cause == RolloutEnd.UNVERIFIED and episode.score is None:
                    episode.reward = None
                else:
                    episode = None
            logger.warning(
                "validation: sample %s of problem %s failed (%s); trying again (%d of %d)",
                *(key.session, key.uid, cause, number, retries),
            )
            await asyncio.sleep(RETRY_PAUSE_S * number)

    async def score(self, episode: Episode, sample: dict[str, Any]) -> None:
        """Score an episode as verl/experimental/agent_loop/agent_loop.py:967 (0.9.1), without the trip to a worker.

        If the manager does not say how a rollout ended, it is added: validations would count failed ones as wrong.
        """
        started = time.perf_counter()
        reward = episode.reward  # of another project's loop that scores itself
        if reward is None and self._score is not None:
            reward = await self._score(episode, sample)
        elif reward is None or reward.score is None:
            outputs = to_outputs(episode)
            await self._verls_score(outputs, sample)
            reward = Reward(outputs[-1].reward_score, outputs[-1].extra_fields.get("reward_extra_info") or {})
        info = dict(reward.info)
        if info and episode.finish_reason:
            info.setdefault("finish_reason", str(episode.finish_reason))
        episode.reward = Reward(checked_reward(reward.score, info, sample), info)
        episode.score_s += time.perf_counter() - started


async def _new_episode(
    agent_loop: AgentLoopBase, sampling_params: dict[str, Any], key: EpisodeKey, sample: dict[str, Any]
) -> Episode:
    if isinstance(agent_loop, _GivesEpisodes):
        return await agent_loop.roll_out(sampling_params, **sample)
    output = await agent_loop.run(sampling_params, **sample)
    return of_outputs(key, output if isinstance(output, list) else [output])
