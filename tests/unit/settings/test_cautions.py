"""Warnings about settings that work but are hardly intended: in the doctor, and when a run starts."""

import pytest
from omegaconf import OmegaConf

from verl_ext.settings import CONFIGS, compose_run
from verl_ext.settings.cautions import cautions

OBJECTIVES = sorted(path.stem for path in (CONFIGS / "objective").glob("*.yaml"))
RL = sorted(path.stem for path in CONFIGS.glob("*_dapo*.yaml"))
OFF = {"reward.reward_kwargs.overlong_buffer_cfg.enable": False}


@pytest.fixture(scope="module")
def run():
    return compose_run("tiny_dapo")


def warned(config, **changes) -> list[str]:
    copy = config.copy()
    for key, value in changes.items():
        OmegaConf.update(copy, key, value, force_add=True)

    def get(key, default=None):
        value = OmegaConf.select(copy, key)
        return default if value is None else value

    return list(cautions(get))


@pytest.mark.parametrize("name", RL)
def test_the_runs_of_configs_need_no_warning(name):
    assert warned(compose_run(name)) == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_preset_without_dynamic_sampling_is_warned_of_while_length_counts(name):
    config = compose_run("tiny_dapo", [f"objective={name}"])
    is_on = config.algorithm.filter_groups.enable
    texts = warned(config)
    assert bool(texts) == (not is_on)
    if not is_on:
        assert texts[0].startswith("Dynamic sampling is off while the reward counts length")
        assert "trains on length only -> Set algorithm.filter_groups.enable=true" in texts[0]
        assert warned(config, **{"algorithm.filter_groups.enable": True}) == []
        assert warned(config, **OFF) == []
        assert "length_penalty=null" in warned(config, **OFF, **{"reward.reward_kwargs.length_penalty": "piecewise"})[0]


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_an_estimator_without_groups_needs_no_dynamic_sampling(estimator, run):
    assert warned(run, **{"algorithm.filter_groups.enable": False})
    assert warned(run, **{"algorithm.filter_groups.enable": False, "algorithm.adv_estimator": estimator}) == []


def test_fifteen_presets_switch_dynamic_sampling_off():
    texts = [(CONFIGS / "objective" / f"{name}.yaml").read_text() for name in OBJECTIVES]
    assert sum("filter_groups" not in text for text in texts) == 15
    assert "filter_groups: {enable: false}" in (CONFIGS / "neutral" / "objective.yaml").read_text()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"top_p": 0.95}, "top_p=0.95"),
        ({"top_k": 20}, "top_k=20"),
        ({"top_p": 0.9, "top_k": 50}, "top_p=0.9 and top_k=50"),
        ({"top_p": 1.0, "top_k": -1}, ""),
        ({"top_p": 1, "top_k": 0}, ""),  # vLLM's other word for all
        ({"val_kwargs.top_p": 0.6, "val_kwargs.top_k": 20}, ""),  # nothing is trained on validation
        ({"top_p": "many"}, ""),  # of which the doctor's bounds speak
    ],
)
def test_sampling_from_a_part_of_the_distribution_biases_importance_weights(changes, told, run):
    texts = warned(run, **{f"actor_rollout_ref.rollout.{key}": value for key, value in changes.items()})
    assert bool(texts) == bool(told)
    assert all(f"samples with {told} from a part of the distribution" in text for text in texts)
    assert all("importance weights of every objective are biased" in text for text in texts)


def test_void_turns_of_an_own_agent_are_not_found(run):
    agent = {"retool.agent.run": "agent.py:solve"}
    assert warned(run, **agent) == [], "the defaults are no reason to warn"
    (text,) = warned(run, **agent, **{"trainer.v1.sampler.sampler_kwargs.void_turn_filter": "loss"})
    assert "void_turn_filter finds nothing" in text
