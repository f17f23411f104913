"""Values that no run is meant to have."""

import pytest

from verl_ext.doctor.finding import Level
from verl_ext.doctor.values import check_values, settings_of_loss
from verl_ext.settings import CONFIGS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize("hardware", ["", "+hardware=cpu_tiny"])
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_our_own_runs_have_such_as_a_run_can_mean(name, hardware, make_run, only_ok):
    hardware = f"{hardware}{'_sft' * name.endswith('_sft')}" if hardware and not name.startswith("tiny") else ""
    only_ok(check_values(make_run(name, *[hardware] * bool(hardware))))


@pytest.mark.parametrize(
    ("override", "level", "message"),
    [
        (f"{ROLLOUT}.temperature=0", Level.FAIL, "is 0, expected in (0, inf): all samples of a prompt would be equal"),
        (f"{ROLLOUT}.temperature=0.0", Level.FAIL, "without exploration -> Set it to 1.0."),
        (f"{ROLLOUT}.temperature=-1", Level.FAIL, "temperature is -1"),
        (f"{ROLLOUT}.temperature=2", Level.WARN, "expected in [0.1, 1.5]"),
        (f"{ROLLOUT}.temperature=hot", Level.FAIL, "is 'hot', expected in (0, inf): it is not a number"),
        (f"{ROLLOUT}.val_kwargs.temperature=0", Level.WARN, "expected above 0 with val_kwargs.n=30"),
        (f"{ROLLOUT}.val_kwargs.temperature=-1", Level.FAIL, "val_kwargs.temperature is -1, expected in [0, inf)"),
        (f"{ROLLOUT}.val_kwargs.temperature=3", Level.WARN, "expected in [0, 1.5]"),
        ("retool.sandbox.timeout_s=0", Level.FAIL, "retool.sandbox.timeout_s is 0, expected a number in (0, 86400]"),
        ("retool.sandbox.queue_timeout_s=0", Level.FAIL, "queue_timeout_s is 0, expected a number in (0, inf)"),
        (f"{ROLLOUT}.top_k=-5", Level.FAIL, "top_k is -5, expected in [-1, inf)"),
        (f"{ROLLOUT}.top_p=0", Level.FAIL, "top_p is 0, expected in (0, 1]"),
        (f"{ROLLOUT}.val_kwargs.top_p=60", Level.FAIL, "val_kwargs.top_p is 60"),
        (f"{ROLLOUT}.gpu_memory_utilization=.99", Level.FAIL, "is 0.99, expected in (0, 0.98]: vLLM starts only if"),
        (f"{ROLLOUT}.gpu_memory_utilization=.96", Level.WARN, "is 0.96, expected in [0.05, 0.95]"),
        (f"{ROLLOUT}.gpu_memory_utilization=90", Level.FAIL, "is 90, expected"),
        (f"{ROLLOUT}.gpu_memory_utilization=0", Level.FAIL, "is 0, expected"),
        ("retool.fleet.weight_update=drain", Level.FAIL, "-> Set trainer.v1.trainer_mode=separate_async, or retool."),
        ("retool.fleet.health.enable=true", Level.FAIL, "or retool.fleet.health.enable=false"),
        (f"{ROLLOUT}.n=1", Level.FAIL, "a group of one has advantage 0"),
        (f"{ROLLOUT}.n=0", Level.FAIL, "is 0, expected a whole number of at least 1"),
        (f"{ROLLOUT}.n=8.5", Level.FAIL, "is 8.5, expected a whole number"),
        (f"{ACTOR}.optim.lr=1", Level.FAIL, "optim.lr is 1, expected in (0, 0.1]: Adam moves every weight"),
        (f"{ACTOR}.optim.lr=0", Level.FAIL, "optim.lr is 0"),
        (f"{ACTOR}.optim.lr=-0.5", Level.FAIL, "optim.lr is -0.5"),
        (f"{ACTOR}.optim.lr=0.05", Level.WARN, "optim.lr is 0.05, expected in (0, 0.01]"),
        (f"{ACTOR}.optim.lr=0.001", Level.WARN, "is 0.001, expected at most 0.0001 for 32.76 billion parameters"),
        (f"{ACTOR}.optim.clip_grad=0", Level.FAIL, "every gradient would be scaled to zero"),
        (f"{ACTOR}.optim.lr_warmup_steps=400", Level.WARN, "expected less than trainer.total_training_steps=400"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=10", Level.FAIL, "it is a share of all steps"),
        (f"{ACTOR}.optim.lr=.nan", Level.FAIL, "optim.lr is nan, expected in (0, 0.1]: it is not a number"),
        (f"{ACTOR}.entropy_coeff=.nan", Level.FAIL, "entropy_coeff is nan, expected in [0, 0.1]: it is not a number"),
        (f"{ACTOR}.optim.weight_decay=1", Level.WARN, "weight_decay is 1"),
        (f"{ACTOR}.clip_ratio_low=-0.2", Level.FAIL, "clip_ratio_low is -0.2"),
        (f"{ACTOR}.clip_ratio_low=0.3", Level.WARN, "is 0.3, expected at most clip_ratio_high=0.28"),
        (f"{ACTOR}.clip_ratio_high=28", Level.WARN, "clip_ratio_high is 28, expected in (0, 1]"),
        (f"{ACTOR}.clip_ratio_c=1", Level.FAIL, "clip_ratio_c is 1, expected in (1, inf)"),
        (f"{ACTOR}.entropy_coeff=-0.1", Level.WARN, "entropy_coeff is -0.1"),
        (f"{ACTOR}.kl_loss_coef=-1", Level.FAIL, "driven away from the reference"),
        ("actor_rollout_ref.nccl_timeout=0", Level.FAIL, "is 0, expected in (0, inf): it is how many seconds"),
        ("actor_rollout_ref.nccl_timeout=-1", Level.FAIL, "nccl_timeout is -1, expected in (0, inf)"),
        ("actor_rollout_ref.nccl_timeout=null", Level.WARN, "nccl_timeout is null, expected a number of seconds"),
        ("actor_rollout_ref.nccl_timeout=1h", Level.FAIL, "is '1h', expected in (0, inf): it is not a number"),
        ("algorithm.filter_groups.metric=null", Level.FAIL, "no group would be filtered"),
        ("algorithm.gamma=1.5", Level.FAIL, "it is a discount"),
        ("data.train_batch_size=0", Level.FAIL, "data.train_batch_size is 0"),
        ("data.max_response_length=-1", Level.FAIL, "data.max_response_length is -1"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=0", Level.FAIL, "gpu is 0, expected a whole number of at least 1"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=0", Level.FAIL, "expected a whole number of at least 1"),
        ("retool.max_tool_calls=-1", Level.FAIL, "it is a number of calls"),
    ],
)
def test_a_value_that_is_not_meant(override, level, message, make_run, told):
    texts = told(check_values(make_run("qwen2-32b_dapo", override)), level)
    assert len(texts) == 1 and message in texts[0], texts


def test_sft(make_run, told):
    assert "optim.lr is 1, expected" in told(check_values(make_run("qwen2-32b_sft", "optim.lr=1")), Level.FAIL)[0]
    assert "32.76 billion" in told(check_values(make_run("qwen2-32b_sft", "optim.lr=0.003")), Level.WARN)[0]
    assert "divides by it" in told(check_values(make_run("qwen2-32b_sft", "trainer.save_freq=0")), Level.FAIL)[0]
    (text,) = told(check_values(make_run("qwen2-32b_sft", "data.micro_batch_size_per_gpu=0")), Level.FAIL)
    assert "data.micro_batch_size_per_gpu is 0, expected a whole number of at least 1" in text


NO_LENGTH = "reward.reward_kwargs.overlong_buffer_cfg.enable=false"


def test_what_is_unusual_and_meant(make_run, only_ok, told):
    lora = "actor_rollout_ref.model.lora_rank=32"
    only_ok(check_values(make_run("qwen2-32b_dapo", f"{ACTOR}.optim.lr=0.0003", lora)))
    greedy = [f"{ROLLOUT}.val_kwargs.temperature=0", f"{ROLLOUT}.val_kwargs.n=1"]
    only_ok(check_values(make_run("qwen2-32b_dapo", *greedy)))
    alone = ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.filter_groups.enable=false", f"{ROLLOUT}.n=1"]
    only_ok(check_values(make_run("qwen2-32b_dapo", *alone)))
    text = told(check_values(make_run("qwen2-32b_dapo", "algorithm.filter_groups.enable=false")), Level.WARN)[0]
    assert text.startswith("Dynamic sampling is off while the reward counts length")


def test_the_numbers_of_an_objective_are_there(make_run, told, only_ok):
    only_ok(check_values(make_run("tiny_dapo", "+objective=icepop", NO_LENGTH)))
    (text,) = told(check_values(make_run("tiny_dapo", "+objective=dapo", f"{ACTOR}.clip_ratio_c=null")), Level.FAIL)
    assert "clip_ratio_c is None, expected a number above 0" in text
    (text,) = told(check_values(make_run("tiny_dapo", "+objective=sapo", f"{ACTOR}.tau_neg=0")), Level.FAIL)
    assert "tau_neg is 0, expected a number above 0" in text
    only_ok(check_values(make_run("tiny_dapo", "+objective=sapo", f"{ACTOR}.clip_ratio_c=null", NO_LENGTH)))
    for threshold in ("null", "-1", "a_b", "2.0_0.5", "0.0_2.0"):
        own = f"algorithm.rollout_correction.rollout_is_threshold={threshold}"
        (text,) = told(check_values(make_run("tiny_dapo", "+objective=icepop", own)), Level.FAIL)
        assert "rollout_is_threshold is " in text and "an interval such as 0.5_2.0" in text


def test_the_numbers_that_a_loss_needs_are_those_that_it_is_given():
    from verl_ext.trainer.objective import LOSSES

    for name, loss in LOSSES.items():
        assert set(settings_of_loss(name)) == set(loss.settings.values()), name
    assert settings_of_loss("vanilla") == settings_of_loss("None") == ()


def test_a_reference_model_for_nothing(make_run, told):
    for switch, coefficient in (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
    ):
        run = make_run("qwen2-32b_dapo", f"{switch}=true", f"{coefficient}=0")
        assert "a reference model would run for nothing" in told(check_values(run), Level.WARN)[0]


def test_a_ring_that_has_nothing_to_route(make_run, told, only_ok):
    ring = ["retool.fleet.routing=ring", f"{ROLLOUT}.router_config_path=null"]
    only_ok(check_values(make_run("qwen2-32b_dapo", *ring)))
    (text,) = told(check_values(make_run("qwen2-32b_dapo", *ring, f"{ROLLOUT}.full_determinism=true")), Level.FAIL)
    assert "no two runs would be equal" in text


def test_log_probs_of_a_mixed_cache_are_not_computed_again(make_run, only_ok):
    keep = ["retool.fleet.weight_update=keep", "trainer.v1.trainer_mode=separate_async"]
    keep += ["actor_rollout_ref.hybrid_engine=false", "algorithm.rollout_correction.bypass_mode=false"]
    (finding,) = [each for each in check_values(make_run("tiny_dapo", *keep)) if each.level == Level.FAIL]
    assert "bypass_mode=false and rollout_is=null" in finding.message and "objective=glm5_async" in finding.advice
    for takes_them in ("bypass_mode=true", "rollout_is=token"):
        only_ok(check_values(make_run("tiny_dapo", *keep, f"algorithm.rollout_correction.{takes_them}")))


def test_requests_with_images_do_not_cross_an_update(make_run, tmp_path, only_ok):
    own = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=false"]
    own += [f"actor_rollout_ref.model.path={tmp_path}"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5", "vision_config": {}, "text_config": {}}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    for mode in ("drain", "keep"):
        found = check_values(make_run("tiny_dapo", *own, f"retool.fleet.weight_update={mode}"))
        (finding,) = [each for each in found if each.level == Level.FAIL]
        assert f"weight_update is {mode}, but {tmp_path} reads images" in finding.message
        assert finding.advice == "Set retool.fleet.weight_update=abort."
    only_ok(check_values(make_run("tiny_dapo", *own)))


@pytest.mark.parametrize(
    ("name", "hardware", "section"),
    [("smollm2_dapo", "cpu_small", "actor_rollout_ref.model"), ("smollm2_sft", "cpu_small_sft", "model")],
)
def test_prompts_are_shared_by_models_that_the_backend_knows(name, hardware, section, make_run, tmp_path, only_ok):
    def failures(*overrides: str) -> list[str]:
        found = check_values(make_run(name, f"+hardware={hardware}", *overrides))
        return [f"{each.message} -> {each.advice}" for each in found if each.level == Level.FAIL]

    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "config.json"
    config.write_text('{"model_type": "gemma3_text"}')
    (text,) = failures()
    assert (
        f"{section}.fused_kernel_options.impl_backend is shared_prompt, but the model is of type 'gemma3_text'" in text
    )
    assert text.endswith(f"Set {section}.use_fused_kernels=false.")
    assert not failures(f"{section}.use_fused_kernels=false")
    config.write_text('{"model_type": "llama"}')
    assert not failures()
    (text,) = failures(f"{section}.use_remove_padding=false")
    assert "it needs attention flash_attention_2, use_remove_padding=true" in text
