"""verl's interface to the reward of an episode (verl_ext/reward).

In a YAML (the settings under `reward_kwargs` are those of reward/options.py):

    reward:
      reward_manager:
        {source: importlib, name: RetoolRewardManager, module: {path: pkg://verl_ext.rollout.reward_manager}}
      reward_kwargs: {max_resp_len: 16384, overlong_buffer_cfg: {enable: true, len: 4096}}

Written for verl 0.9.1.
"""

from collections.abc import Mapping
from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_ext.episode import Episode, EpisodeKey, Reward, from_row
from verl_ext.reward.rewarder import Rewarder


class RetoolRewardManager(RewardManagerBase):
    """verl's arguments, and `Rewarder`'s rewards."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ):
        """Take verl's arguments; `compute_score` and those of the reward model are not used.

        Raises:
            ValueError: `reward.reward_kwargs` has an unknown or impossible setting, or a custom reward function is
                configured, which this manager would ignore.
        """
        super().__init__(config, tokenizer, compute_score)
        custom = (config["reward"].get("custom_reward_function") or {}).get("path")
        if custom:
            raise ValueError(
                f"reward.custom_reward_function.path is {custom!r}, but RetoolRewardManager scores with "
                "the verifiers of verl_ext.reward only. Remove the path and name your verifier under "
                "reward.reward_kwargs.verifiers, or take verl's manager: reward.reward_manager.source=register and "
                "reward.reward_manager.name=naive."
            )
        self.rewarder = Rewarder(config, tokenizer)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one rollout for verl, the last one of several outputs. See `Rewarder.score_episode`.

        Raises:
            ValueError: the run has reward terms of its own, which may read turns that verl does not hand over.
        """
        item = data.slice(-1)[0]
        sample, responses, mask = item.non_tensor_batch, item.batch["responses"], item.batch["attention_mask"]
        num_tokens = int(mask[len(mask) - len(responses) :].sum())
        key = EpisodeKey(str(sample.get("uid", "")), int(sample.get("session_id", 0)))
        episode = from_row(key, sample.get("tool_extra_fields") or {})
        episode.row.ids = responses[:num_tokens].tolist()
        if self.rewarder.options.terms and not episode.turns:
            raise ValueError(
                "reward.reward_kwargs.terms is set, but verl's reward workers hand over episodes without turns, which "
                "a term may read. Remove the terms, or roll out with an agent loop of verl_ext, which scores by itself."
            )
        reward = await self.score_episode(episode, sample)
        return {"reward_score": reward.score, "reward_extra_info": dict(reward.info)}

    async def score_episode(self, episode: Episode, sample: Mapping[str, Any]) -> Reward:
        return await self.rewarder.score_episode(episode, sample)
