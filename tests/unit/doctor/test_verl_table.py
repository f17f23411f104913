"""Keys that are set and that no code reads: found by a method, kept in a file, reported by the doctor."""

import ast
import json

import pytest

from verl_ext.doctor.config import check_config
from verl_ext.doctor.finding import Level
from verl_ext.doctor.schema import KEYS_WITHOUT_EFFECT, unread_keys

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
DATA = ["data.train_files=a", "data.val_files=b"]


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("verl_table")


def test_the_file_is_what_the_method_finds_in_the_verl_that_is_installed(script):
    assert json.loads(script.TARGET.read_text()) == script.table(), "python scripts/verl_table.py writes it anew"


@pytest.mark.parametrize(
    "override",
    [
        "data.gen_batch_size=8",
        "algorithm.filter_groups.max_inflight_gen_batches=2",
        "data.truncation=left",
        "data.return_full_prompt=true",
        f"{ROLLOUT}.multi_turn.tool_response_truncate_side=left",
        f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=disable",
        f"{ROLLOUT}.multi_turn.use_inference_chat_template=true",
        "trainer.balance_batch=false",
        "trainer.esi_redundant_time=60",
        f"{ROLLOUT}.over_sample_rate=0.5",
        f"{ACTOR}.freeze_vision_tower=true",
        "+actor_rollout_ref.rollout.repetition_penalty=1.1",
    ],
)
def test_a_key_that_nothing_reads_is_told(override, make_run, told):
    key = override.lstrip("+").partition("=")[0]
    texts = told(check_config(make_run("qwen2-32b_dapo", *DATA, override)), Level.WARN)
    assert len(texts) == 1 and texts[0].startswith(f"{key}=") and "has no effect" in texts[0], texts


@pytest.mark.parametrize(
    "override",
    [
        "data.train_batch_size=256",
        "data.max_prompt_length=1024",
        "data.filter_overlong_prompts=false",
        "data.shuffle=false",
        "data.seed=7",
        "data.dataloader_num_workers=2",
        "data.train_max_samples=100",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.entropy_coeff=0.001",
        f"{ACTOR}.optim.weight_decay=0.02",
        f"{ACTOR}.fsdp_config.forward_prefetch=true",
        f"{ACTOR}.fsdp_config.reshard_after_forward=false",
        f"{ACTOR}.calculate_entropy=true",
        f"{ROLLOUT}.enforce_eager=true",
        f"{ROLLOUT}.max_num_seqs=64",
        f"{ROLLOUT}.enable_chunked_prefill=false",
        f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "trainer.val_before_train=false",
        "trainer.log_val_generations=4",
        "trainer.v1.sampler.max_off_policy_threshold=3",
        "reward.num_workers=2",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=4",
    ],
)
def test_a_key_that_has_an_effect_is_not_told(override, make_run):
    found = check_config(make_run("qwen2-32b_dapo", *DATA, override))
    assert [str(each) for each in found if "has no effect" in each.message] == []


def test_sft_reads_other_keys(make_run, told):
    run = make_run("qwen2-32b_sft", "data.train_files=a", "data.truncation=drop")
    assert not [each for each in check_config(run) if "has no effect" in each.message]
    assert "data.truncation" in unread_keys("ppo_trainer") - unread_keys("sft_trainer_engine")
    run = make_run("qwen2-32b_sft", "data.train_files=a", "data.balance_dp_token=true")
    assert "data.balance_dp_token=True has no effect" in told(check_config(run), Level.WARN)[0]


def test_what_the_list_by_hand_has_is_read_somewhere():
    """Otherwise the method would find it."""
    assert not {*KEYS_WITHOUT_EFFECT} & unread_keys("ppo_trainer") - {
        f"{ROLLOUT}.multi_turn.max_tool_response_length",  # has a key of ours instead
        "data.return_raw_chat",
    }


@pytest.mark.parametrize(
    ("text", "is_ours", "names"),
    [
        ("x = config.name", False, {"name"}),
        ("x = config['name']", False, {"name"}),
        ("x = config.get('name', 1)", True, {"get", "name"}),
        ("x = select(config, 'data.name')", True, {"data", "name"}),
        ("for key in ('name', 'other'): f(config[key])", False, {"name", "other"}),
        ("for key in ('name', 'other'): f(config[key])", True, set()),
        ("config.name = 1", False, set()),
        ("class C:\n    name: int = 1", False, set()),
        ("f(name=1)", False, set()),
        ("def f():\n    'name'", False, set()),
        ("raise ValueError('no name there')", False, set()),
        ("self.name = config.name", False, set()),
        ("self.name = config.get('name')", False, {"get"}),
        ("self.name = config.name\nf(self.name)", False, {"name"}),
        ("self.other = config.name", False, {"name"}),
    ],
)
def test_what_counts_as_read(text, is_ours, names, script):
    assert script.read_names(ast.parse(text), is_ours=is_ours) == names
