"""Which key is suggested in place of a wrong one: the nearest in meaning, then in spelling, or none."""

import pytest

from verl_ext.doctor.schema import own_keys, schema
from verl_ext.doctor.suggest import ENDS, OTHER_WORDS, did_you_mean
from verl_ext.evaluation.store import flatten
from verl_ext.settings import Retool
from verl_ext.settings.checks import known_keys

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RL = [*flatten(schema("ppo_trainer")), *known_keys(Retool, "retool")]
SFT = [*flatten(schema("sft_trainer_engine")), *own_keys("tiny_sft")]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning_rate", f"{ACTOR}.optim.lr"),
        ("trainer.learning_rate", f"{ACTOR}.optim.lr"),
        (f"{ACTOR}.optim.learning_rate", f"{ACTOR}.optim.lr"),
        ("critic.optim.learning_rate", "critic.optim.lr"),
        ("data.batch_size", "data.train_batch_size"),
        (f"{ROLLOUT}.max_new_tokens", "data.max_response_length"),
        ("max_tokens", "data.max_response_length"),
        ("trainer.num_train_epochs", "trainer.total_epochs"),
        ("trainer.epochs", "trainer.total_epochs"),
        ("trainer.max_steps", "trainer.total_training_steps"),
        ("optim.warmup_ratio", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
        ("trainer.seed", "data.seed"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("algorithm.kl_coeff", f"{ACTOR}.kl_loss_coef"),
        (f"{ACTOR}.clip_range", f"{ACTOR}.clip_ratio_low"),
        (f"{ROLLOUT}.num_generations", f"{ROLLOUT}.n"),
        ("gradient_accumulation_steps", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        ("trainer.eval_steps", "trainer.test_freq"),
        ("trainer.save-steps", "trainer.save_freq"),
        ("trainer.output_dir", "trainer.default_local_dir"),
        ("model_name_or_path", "actor_rollout_ref.model.path"),
        (f"{ROLLOUT}.tp_size", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("trainer.save_total_limit", "retool.checkpoints.keep_last"),
        ("retool.sandbox_url", "retool.sandbox.urls"),
        (f"{ACTOR}.entropy_coef", f"{ACTOR}.entropy_coeff"),
        # by letters
        (f"{ACTOR}.optim.lrr", f"{ACTOR}.optim.lr"),
        ("rollout.temprature", f"{ROLLOUT}.temperature"),
        ("trainer.savefreq", "trainer.save_freq"),
        ("trainr.save_freq", "trainer.save_freq"),
        ("data.temperature", f"{ROLLOUT}.temperature"),
        ("retool.max_calls", "retool.max_tool_calls"),
        ("retool.sandbx.timeout_s", "retool.sandbox.timeout_s"),
        # by a part, in the key's own section
        ("trainer.steps", "trainer.total_training_steps"),
        ("trainer.save", "trainer.save_freq"),
        ("data.max_len", "data.max_prompt_length"),
        # nothing is near
        ("mine.threshold", ""),
        ("trainer.flux_capacitor", ""),
        ("xyz", ""),
    ],
)
def test_of_rl(word, key):
    assert did_you_mean(word, RL) == (f"Did you mean {key}?" if key else "")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("learning_rate", "optim.lr"),
        ("data.max_tokens", "data.max_length"),
        ("max_seq_length", "data.max_length"),
        ("data.max_len", "data.max_length"),
        ("per_device_train_batch_size", "data.micro_batch_size_per_gpu"),
        ("model_path", "model.path"),
        ("sp_size", "engine.ulysses_sequence_parallel_size"),
        ("num_epochs", "trainer.total_epochs"),
    ],
)
def test_of_sft(word, key):
    assert did_you_mean(word, SFT) == f"Did you mean {key}?"


def test_every_word_leads_to_a_key_that_is_there_and_is_none_itself():
    assert len(ENDS) == sum(len(words.split()) for words in OTHER_WORDS.values()), "a word stands twice"
    for word, ends in ENDS.items():
        assert did_you_mean(word, [*RL, *SFT]), word
        assert all(any(f".{key}".endswith(f".{end}") for key in [*RL, *SFT]) for end in ends), ends
        assert not any(f".{key}".endswith(f".{end}") for key in (word,) for end in ends)


def test_names_that_are_no_keys():
    assert did_you_mean("gropo", ["grpo", "gae"]) == "Did you mean grpo?"
    assert did_you_mean("anything", []) == ""
    assert did_you_mean("mine.threshold", RL, "Remove it.") == "Remove it."
