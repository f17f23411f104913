"""The reward manager as verl loads it."""

import pytest


class CharTokenizer:
    """Stands in for the tokenizer: one token per character, 0 is a special token."""

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join("<eos>" if t == 0 and not skip_special_tokens else chr(t) if t else "" for t in token_ids)


@pytest.fixture
def make_manager():
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import load_reward_manager

    def make(max_response_length=160, custom_path=None, domains=None, **reward_kwargs):
        """Load the manager as verl does, from the keys that our YAMLs use."""
        manager = {"source": "importlib", "name": "RetoolRewardManager"}
        config = {
            "data": {"max_response_length": max_response_length},
            "reward": {
                "custom_reward_function": {"path": custom_path, "name": "compute_score"},
                "reward_manager": manager | {"module": {"path": "pkg://verl_ext.rollout.reward_manager"}},
                "reward_kwargs": reward_kwargs,
            },
            "retool": {"domains": domains or {}},
        }
        return load_reward_manager(
            OmegaConf.create(config), CharTokenizer(), reward_router_address=None, reward_model_tokenizer=None
        )

    return make
