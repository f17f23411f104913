"""What is found in the settings: unknown keys, keys without effect, batches, time-outs."""

import re

import pytest

from verl_ext.doctor.batch import check_batch
from verl_ext.doctor.config import check_config, check_reward, check_verifiers
from verl_ext.doctor.finding import Level
from verl_ext.doctor.sandbox import check_timeouts
from verl_ext.doctor.schema import required_keys, reward_keys
from verl_ext.memory.shape import ModelShape
from verl_ext.settings import CONFIGS, VERL, FailedSamples

RUNS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
DATA = ("data.train_files=train.parquet", "data.val_files=val.parquet")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MANY_TOKENS = [f"{ACTOR}.ppo_max_token_len_per_gpu=40000", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=40000"]


@pytest.mark.parametrize("run", RUNS)
def test_our_own_runs_are_as_they_should_be(run, make_run, only_ok):
    gpus = {"nnodes": 2, "nproc_per_node": 8} if run.endswith("_sft") and not run.startswith("tiny") else {}
    for hardware in ("", "+hardware=cpu_tiny" if "_dapo" in run else "+hardware=cpu_tiny_sft"):
        if hardware and run.startswith("tiny"):
            continue
        if hardware:
            gpus = {"nnodes": 1, "nproc_per_node": 2} if run.endswith("_sft") else {}
            overrides = [hardware, "actor_rollout_ref.model.path=tiny" if "_dapo" in run else "model.path=tiny"]
        else:
            overrides = []
        looked_at = make_run(run, *DATA, *overrides, **gpus)
        only_ok(check_config(looked_at))
        only_ok(check_batch(looked_at))
        assert all(finding.level == Level.OK for finding in check_timeouts(looked_at))


def test_what_the_launcher_sets_is_missed_though_verls_default_stands_there(make_run, told):
    run = make_run("qwen2-32b_dapo")
    assert run.get("data.train_files") == "~/data/rlhf/gsm8k/train.parquet", "`???` does not replace verl's default"
    texts = told(check_config(run), Level.FAIL)
    assert [text.split()[0] for text in texts] == ["data.train_files", "data.val_files"]


def test_a_run_that_begins_with_another_one_has_its_open_keys():
    assert required_keys("qwen2-32b_dapo_published") == required_keys("qwen2-32b_dapo") > {"data.train_files"}


@pytest.mark.parametrize(
    ("override", "level", "message"),
    [
        (
            "+trainer.savefreq=3",
            Level.FAIL,
            "verl does not know trainer.savefreq, so it would have no effect -> Did you mean ",
        ),
        ("+mine.threshold=3", Level.WARN, "not know mine.threshold, so it would have no effect -> Remove it."),
        (
            "+trainr.save_freq=3",
            Level.FAIL,
            "verl does not know trainr.save_freq, so it would have no effect -> Did you mean ",
        ),
        ("+data.temperature=1", Level.FAIL, "Did you mean actor_rollout_ref.rollout.temperature?"),
        ("+hardwar=cpu_tiny", Level.FAIL, "not know hardwar, so it would have no effect -> Did you mean hardware?"),
        ("actor_rollout_ref.model=mine", Level.FAIL, "actor_rollout_ref.model is 'mine', but it is a section"),
        ("+retool.max_calls=3", Level.FAIL, "retool.max_calls is not a setting of verl_ext"),
        ("~retool.sandbox.timeout_s", Level.FAIL, "retool.sandbox.timeout_s is missing, but verl_ext reads it"),
        ("trainer.save_freq=often", Level.WARN, "is 'often', of type str, but verl's default has type int"),
        ("trainer.experiment_name=${nothing.there}", Level.FAIL, "a reference cannot be resolved"),
        (
            "custom_reward_function.path=mine.py",
            Level.WARN,
            "custom_reward_function.path=mine.py has no effect in verl 0.9.1's v1 trainer -> Set reward.reward_",
        ),
        (f"{ROLLOUT}.multi_turn.max_user_turns=4", Level.WARN, "Set retool.max_tool_calls instead."),
    ],
)
def test_a_key_that_would_not_do_what_it_says(override, level, message, make_run, told):
    texts = told(check_config(make_run("qwen2-32b_dapo", *DATA, override)), level)
    assert any(message in text for text in texts), texts


def test_a_yaml_of_ones_own_may_lack_the_keys_that_have_a_default(make_run, only_ok):
    """Those that came after such YAMLs were written; the code that reads them says the same."""
    older = make_run("qwen2-32b_dapo", *DATA, "~retool.validation", "~retool.repeatable")
    only_ok(check_config(older))
    assert FailedSamples.from_config(older.config) == FailedSamples()


def test_sft_has_settings_of_its_own(make_run, told):
    run = make_run("qwen2-32b_sft", "data.train_files=a", "+data.retool.bad_row=drop")
    assert "Did you mean data.retool.bad_rows?" in told(check_config(run), Level.FAIL)[0]


def test_reward_settings_are_read_by_the_class_that_uses_them(make_run, told, only_ok):
    only_ok(check_reward(make_run("qwen2-32b_dapo")))
    run = make_run("qwen2-32b_dapo", "reward.reward_kwargs.length_penalty=steep")
    assert "length_penalty is 'steep'" in told(check_reward(run), Level.FAIL)[0]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tool_bonu", "tool_bonus"),
        ("penalty", "length_penalty"),
        ("overlong_buffer", "overlong_buffer_cfg"),  # a field of the class, but not a key
        ("overlong_buffer_cfg.factor", "overlong_buffer_cfg.penalty_factor"),
        ("overlong_buffer_cfg.enabled", "overlong_buffer_cfg.enable"),
    ],
)
def test_an_unknown_setting_of_the_reward_is_found_without_its_class(key, meant, make_run, told):
    run = make_run("qwen2-32b_dapo", *DATA, f"+reward.reward_kwargs.{key}=1")
    text = told(check_config(run), Level.FAIL)[0]
    assert f"reward.reward_kwargs.{key} is not a setting of verl_ext's reward manager" in text
    assert f"Did you mean reward.reward_kwargs.{meant}" in text
    run.config.reward.reward_manager.module.path = "mine.py"  # which may have other settings
    assert not any("reward_kwargs" in finding.message for finding in check_config(run))


def test_the_settings_of_the_reward_are_those_of_its_class():
    from verl_ext.reward.options import RewardOptions

    with pytest.raises(ValueError, match=r"nothing\. Expected") as caught:
        RewardOptions.from_config({"reward": {"reward_kwargs": {"nothing": 1}}})
    keys, of_buffer = re.search(r"some of (.*), overlong_buffer_cfg\.{(.*)}", str(caught.value)).groups()
    nested = {f"overlong_buffer_cfg.{key}" for key in of_buffer.split(",")}
    assert reward_keys() == {*keys.split(", "), "overlong_buffer_cfg"} | nested


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("verl_ext.reward.verifiers.exact.ExactVerifer", "has no attribute 'ExactVerifer'"),
        ("nowhere.Verifier", "No module named 'nowhere'"),
        ("broken_verifier.Verifier", "name 'undefined' is not defined"),  # raised by its module
        ("{base_url: 'http://127.0.0.1:8000'}", "The verifier for 'trivia' is None"),
        ("3", "'int' object is not iterable"),
    ],
)
def test_a_verifier_that_cannot_be_imported(entry, message, make_run, told, tmp_path, monkeypatch):
    (tmp_path / "broken_verifier.py").write_text("undefined\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run("qwen2-32b_dapo", f"+reward.reward_kwargs.verifiers={{trivia: {entry}}}")
    text = told(check_verifiers(run), Level.FAIL)[0]
    assert message in text and "reward.reward_kwargs.verifiers" in text


def test_verifiers_that_can_be_imported(make_run):
    run = make_run(
        "qwen2-32b_dapo", "+reward.reward_kwargs.verifiers={trivia: verl_ext.reward.verifiers.exact.ExactVerifier}"
    )
    assert list(check_verifiers(run)) == []


@pytest.mark.parametrize(
    ("overrides", "level", "message"),
    [
        ([f"{ACTOR}.ppo_mini_batch_size=60"], Level.FAIL, "such as 64."),
        (["trainer.nnodes=1", "trainer.n_gpus_per_node=6"], Level.FAIL, "6 GPUs are not a multiple of ulysses"),
        (["trainer.nnodes=1", "trainer.n_gpus_per_node=6"], Level.FAIL, "are not a multiple of the 4 that one vLLM"),
        # 16 GPUs with Ulysses 1: 16 ranks; 2 prompts x 4 responses are 8
        (
            [
                f"{ACTOR}.ppo_mini_batch_size=2",
                f"{ROLLOUT}.n=4",
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=1",
            ],
            Level.FAIL,
            "2 prompts x 4 = 8 responses cannot be divided evenly among 16 data-parallel ranks",
        ),
        # 2,000 x 8 = 16,000 < 2,048 + 16,384 = 18,432; 18,432 / 8 = 2,304
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=2000"],
            Level.FAIL,
            "= 16000 tokens is less than the longest sequence, 18432",
        ),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=2000"], Level.FAIL, "Set it to 2304 or more."),
        (
            [f"{ACTOR}.use_dynamic_bsz=false"],
            Level.FAIL,
            "ppo_micro_batch_size_per_gpu is null, and dynamic batches are off",
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=7"],
            Level.FAIL,
            "rank are not a multiple of actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7",
        ),
        ([f"{ROLLOUT}.max_model_len=16384"], Level.FAIL, "is below prompt + response = 18432 tokens"),
        ([f"{ROLLOUT}.max_model_len=null"], Level.WARN, "refuses to start if its KV cache cannot hold a sequence"),
        (["retool.max_tool_response_tokens=16384"], Level.FAIL, "leaves no room in a response"),
        (["reward.reward_kwargs.overlong_buffer_cfg.len=20000"], Level.FAIL, "is outside (0, max_resp_len=16384]"),
        (["reward.reward_kwargs.max_resp_len=8192"], Level.WARN, "assumes reward_kwargs.max_resp_len=8192"),
        (
            ["actor_rollout_ref.model.use_remove_padding=false"],
            Level.FAIL,
            "Ulysses needs model.use_remove_padding=true",
        ),
        # 40 heads and 8 key-value heads
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=16"], Level.FAIL, "cannot be divided among ulysses"),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=16"],
            Level.FAIL,
            "40 heads cannot be divided among tensor_model_parallel",
        ),
    ],
)
def test_rl_batches_that_do_not_fit(overrides, level, message, make_run, told):
    texts = told(check_batch(make_run("qwen2-32b_dapo", *overrides)), level)
    assert any(message in text for text in texts), texts


def test_no_sequence_is_longer_than_the_model_has_positions(make_run, told, only_ok, tmp_path):
    """Qwen2.5-7B: 32,768. 2,048 + 30,720 = 32,768; 2,048 + 32,768 = 34,816, which is 2,048 more."""
    only_ok(check_batch(make_run("qwen2-7b_dapo", "data.max_response_length=30720", *MANY_TOKENS)))
    text = told(check_batch(make_run("qwen2-7b_dapo", "data.max_response_length=32768", *MANY_TOKENS)), Level.FAIL)[0]
    assert "max_model_len=34816 tokens, but the model has max_position_embeddings=32768: verl would stop" in text
    assert "-> Lower data.max_response_length by 2048, or use a model with more positions" in text
    longer = make_run("qwen2-7b_dapo", f"{ROLLOUT}.max_model_len=40000")
    assert "-> Set rollout.max_model_len=18432." in told(check_batch(longer), Level.FAIL)[0]
    null = ["data.max_response_length=32768", f"{ROLLOUT}.max_model_len=null"]
    assert "max_model_len=None" in told(check_batch(make_run("qwen2-7b_dapo", *null, *MANY_TOKENS)), Level.FAIL)[0]
    override = "+actor_rollout_ref.model.override_config={max_position_embeddings: 65536}"
    only_ok(check_batch(make_run("qwen2-7b_dapo", f"{ROLLOUT}.max_model_len=40000", override)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")  # which the memory estimate reports
    only_ok(check_batch(make_run("tiny_dapo")))


SEPARATE = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # 512 prompts, mini-batches of 64
        (
            ["trainer.v1.separate_async.parameter_sync_step=4"],
            "data.train_batch_size=512 is not trainer.v1.separate_async.parameter_sync_step=4 x ppo_mini_batch_size=64 "
            "= 256",
        ),
        ([f"{ROLLOUT}.nnodes=0"], "n_gpus_per_node = 0 GPUs for separate_async's servers, each of which takes 4"),
        ([f"{ROLLOUT}.n_gpus_per_node=6"], "n_gpus_per_node = 6 GPUs"),
    ],
)
def test_separate_async_has_batches_and_gpus_of_its_own(overrides, message, make_run, told, only_ok):
    fits = [*SEPARATE, "trainer.v1.separate_async.parameter_sync_step=8"]
    only_ok(check_batch(make_run("qwen2-32b_dapo", *fits)))
    texts = told(check_batch(make_run("qwen2-32b_dapo", *fits, *overrides)), Level.FAIL)
    assert len(texts) == 1 and message in texts[0], texts


def test_separate_async_sends_no_adapters(make_run, told, only_ok):
    lora = ["actor_rollout_ref.model.lora_rank=32", "trainer.v1.separate_async.parameter_sync_step=8"]
    text = told(check_batch(make_run("qwen2-32b_dapo", *SEPARATE, *lora)), Level.FAIL)[0]
    assert "sends the servers no adapters, so every rollout would come from the untrained model" in text
    assert "trainer_mode=colocate_async, or actor_rollout_ref.model.lora.merge=true, which has been" in text
    only_ok(check_batch(make_run("qwen2-32b_dapo", *SEPARATE, *lora, "actor_rollout_ref.model.lora.merge=true")))
    for mode in ("colocate_async", "sync"):
        only_ok(check_batch(make_run("qwen2-32b_dapo", *lora, f"trainer.v1.trainer_mode={mode}")))


def test_verl_sends_adapters_by_the_actors_gpus_alone():
    """What the check above relies on; `_` is the adapters' description, without which vLLM takes weights."""
    sent = (VERL / "workers/engine_workers.py").read_text()
    assert "            per_tensor_param, _ = self.actor.engine.get_per_tensor_param()\n" in sent
    assert "per_tensor_param, peft_config=peft_config, base_sync_done=True" in sent
    assert 'checkpoint_engine_config.backend = "naive"' in (VERL / "trainer/ppo/v1/trainer_base.py").read_text()


@pytest.mark.timeout(120)
def test_verl_sends_weights_with_the_adapters_merged_to_every_server(one_rank):
    """With lora.merge=true, which the doctor allows. All modes send weights by this function."""
    from types import SimpleNamespace

    import peft
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    shape = ModelShape("qwen2", 2, 16, 32, 2, 1, 8, 64, False)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config()))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    layer = "model.layers.1.mlp.up_proj"
    a, b = (
        model.get_parameter(f"base_model.model.{layer}.lora_{name}.default.weight").detach().clone() for name in "AB"
    )
    for each in [*model.base_model.model.model.layers, model]:
        fully_shard(each)
    settings = {"model_config": SimpleNamespace(lora={"merge": True}), "_uses_fsdp2_cpu_offload_policy": True}
    engine = SimpleNamespace(module=model, _is_offload_param=False, **settings)
    engine._merged_lora_per_tensor_param = lambda: FSDPEngine._merged_lora_per_tensor_param(engine)
    weights, adapters = FSDPEngine.get_per_tensor_param(engine)
    sent = dict(weights)
    assert adapters is None and sent.keys() == before.keys()
    expected = before[f"{layer}.weight"] + 8 / 4 * b @ a
    torch.testing.assert_close(sent[f"{layer}.weight"].float(), expected, rtol=0.01, atol=0.01)
    assert not torch.allclose(expected, before[f"{layer}.weight"], atol=0.05)
    left = model.state_dict()[f"base_model.model.{layer}.base_layer.weight"].full_tensor()
    assert torch.equal(left, before[f"{layer}.weight"]), "training goes on with the weights alone"


def test_ulysses_exchanges_the_heads_of_flash_attention_alone(make_run, told):
    run = make_run("qwen2-32b_dapo", "+actor_rollout_ref.model.override_config={attn_implementation: sdpa}")
    assert any("Ulysses needs flash_attention_2" in text for text in told(check_batch(run), Level.FAIL))


def test_without_flash_attn_a_batch_is_one_sequence(make_run, only_ok):
    only_ok(check_batch(make_run("qwen2-32b_dapo", "+hardware=no_flash_attn")))
    only_ok(check_batch(make_run("qwen2-32b_sft", "+hardware=no_flash_attn_sft", nnodes=1, nproc_per_node=8)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_batch_size=30"], "data.train_batch_size=30 cannot be divided evenly among 4 data-parallel ranks"),
        (["data.micro_batch_size_per_gpu=3"], "8 sequences of each data-parallel rank are not a multiple"),
        (["data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=4000"], "= 16000 tokens is less than"),
        (["engine.ulysses_sequence_parallel_size=5"], "16 GPUs are not a multiple of ulysses_sequence_parallel_size=5"),
    ],
)
def test_sft_batches_that_do_not_fit(overrides, message, make_run, told):
    run = make_run("qwen2-32b_sft", *overrides, nnodes=2, nproc_per_node=8)
    texts = told(check_batch(run), Level.FAIL)
    assert any(message in text for text in texts), texts


@pytest.mark.parametrize(
    ("overrides", "level", "message"),
    [
        (["retool.sandbox.timeout_s=90"], Level.WARN, "queue for 60 s, less than the 90 s that one program may run"),
        # 5 / 4 + 3 + 8 and 5 + 3; equal where q / 4 + 8 = q, q = 32 / 3
        (
            ["retool.sandbox.timeout_s=3", "retool.sandbox.queue_timeout_s=5"],
            Level.WARN,
            "a request may take 12.25 s, but its call ends after 8 s",
        ),
        (["retool.sandbox.queue_timeout_s=5"], Level.WARN, "Set retool.sandbox.queue_timeout_s to 60; 10.7 is still"),
        # 60 / 4 + 30 + 8 and 60 + 30
        ([], Level.OK, "code 30 s < request 53 s < call 90 s"),
    ],
)
def test_timeouts_lie_within_each_other(overrides, level, message, make_run, told):
    assert any(message in text for text in told(check_timeouts(make_run("qwen2-32b_dapo", *overrides)), level))


@pytest.mark.parametrize(
    "override", ["~retool.sandbox.timeout_s", "retool.sandbox.timeout_s=0", "retool.sandbox.queue_timeout_s=0"]
)
def test_no_inequality_is_made_of_a_missing_or_wrong_timeout(override, make_run):
    assert list(check_timeouts(make_run("qwen2-32b_dapo", override))) == []


def test_no_inequality_is_shown_that_does_not_hold(make_run):
    run = make_run("qwen2-32b_dapo", "retool.sandbox.timeout_s=3", "retool.sandbox.queue_timeout_s=5")
    assert Level.OK not in {finding.level for finding in check_timeouts(run)}


def test_the_tool_yaml_has_the_same_time_limit(make_run, told, tmp_path):
    (tmp_path / "tool.yaml").write_text((CONFIGS / "tools" / "code_interpreter.yaml").read_text().replace(" 30", " 7"))
    run = make_run("qwen2-32b_dapo", f"{ROLLOUT}.multi_turn.tool_config_path=tool.yaml")
    assert "gives code_interpreter 7 s" in told(check_timeouts(run), Level.WARN)[0]
