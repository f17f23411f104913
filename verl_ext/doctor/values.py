"""Values that no run should have, though verl accepts them: temperature 0, a learning rate of 1."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from verl_ext.doctor.finding import Finding, all_well, fail, warn
from verl_ext.doctor.run import ACTOR, FLASH_ATTN, ROLLOUT, ULYSSES, Run
from verl_ext.doctor.schema import TABLE
from verl_ext.fleet import balancer, health, weight_update
from verl_ext.memory.shape import DENSE, has_images, read_model_type
from verl_ext.memory.words import count
from verl_ext.settings.cautions import cautions
from verl_ext.settings.checks import is_in

LARGE = 1e9  # parameters
LARGE_LR = 1e-4  # a hundred times the recipes' learning rate of RL, ten times that of SFT
SHARED_PROMPT = "shared_prompt"  # BACKEND of verl_ext/trainer/shared_prompt.py, which imports torch
CORRECTION = "algorithm.rollout_correction"
NCCL_TIMEOUT = "actor_rollout_ref.nccl_timeout"  # verl_ext/trainer/limits.py obeys it
RECIPES = "1e-6 for RL or 1e-5 for SFT, as in the recipes; for the tiny model to 3e-4 or 3e-3"

# Whole numbers of at least 1.
COUNTS = (
    *(f"data.{key}" for key in ("train_batch_size", "max_prompt_length", "max_response_length", "max_length")),
    *(f"{key}micro_batch_size_per_gpu" for key in ("data.", f"{ACTOR}.ppo_", f"{ROLLOUT}.log_prob_")),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    *(f"trainer.{key}" for key in ("nnodes", "n_gpus_per_node", "total_epochs", "total_training_steps")),
    *(f"{section}.ulysses_sequence_parallel_size" for section in ("engine", f"{ACTOR}.fsdp_config")),
    *(f"{ACTOR}.{key}" for key in ("ppo_mini_batch_size", "ppo_epochs")),
    *(f"{ROLLOUT}.{key}" for key in ("n", "tensor_model_parallel_size", "agent.num_workers", "val_kwargs.n")),
)

# (key, level, interval that it must lie in, why, what to set). The first row of a key that does not hold is reported.
BOUNDS = (
    ("optim.lr", fail, "(0, 0.1]", "Adam moves every weight by about this much in a step", RECIPES),
    ("optim.lr", warn, "(0, 0.01]", "Adam moves every weight by about this much in a step", RECIPES),
    ("optim.clip_grad", fail, "(0, inf)", "every gradient would be scaled to zero", "1"),
    ("optim.lr_warmup_steps_ratio", fail, "[0, 1)", "it is a share of all steps", "0.1, or to 0 for none"),
    ("optim.weight_decay", warn, "[0, 1)", "AdamW shrinks every weight by lr times this in a step", "0.01"),
    (f"{ROLLOUT}.temperature", fail, "(0, inf)", "all samples of a prompt would be equal, without exploration", "1.0"),
    (f"{ROLLOUT}.temperature", warn, "[0.1, 1.5]", "below it samples of a prompt are equal, above it noise", "1.0"),
    (f"{ROLLOUT}.val_kwargs.temperature", fail, "[0, inf)", "vLLM refuses it", "1.0, or to 0 for greedy"),
    (f"{ROLLOUT}.val_kwargs.temperature", warn, "[0, 1.5]", "it would measure noise", "1.0, or to 0 for greedy"),
    (f"{ROLLOUT}.top_p", fail, "(0, 1]", "it is a share of the probability", "1.0 for all tokens"),
    (f"{ROLLOUT}.val_kwargs.top_p", fail, "(0, 1]", "it is a share of the probability", "1.0 for all tokens"),
    (f"{ROLLOUT}.top_k", fail, "[-1, inf)", "vLLM refuses it", "-1 for all tokens"),
    (f"{ROLLOUT}.val_kwargs.top_k", fail, "[-1, inf)", "vLLM refuses it", "-1 for all tokens"),
    (f"{ROLLOUT}.gpu_memory_utilization", fail, "(0, 0.98]", "vLLM starts only if this share is free", "0.9"),
    (f"{ROLLOUT}.gpu_memory_utilization", warn, "[0.05, 0.95]", "contexts and the actor need the rest", "0.9"),
    (f"{ACTOR}.clip_ratio_low", fail, "(0, 1]", "new over old probability may fall to 1 minus this", "0.2"),
    (f"{ACTOR}.clip_ratio_high", fail, "(0, inf)", "new over old probability may rise to 1 plus this", "0.28"),
    (f"{ACTOR}.clip_ratio_high", warn, "(0, 1]", "new over old probability may rise to 1 plus this", "0.28"),
    (f"{ACTOR}.clip_ratio_c", fail, "(1, inf)", "verl accepts only this for the dual clip", "10"),
    (f"{ACTOR}.entropy_coeff", warn, "[0, 0.1]", "below it less entropy is rewarded, above it nothing else", "0"),
    (f"{ACTOR}.kl_loss_coef", fail, "[0, inf)", "the policy would be driven away from the reference", "0.001"),
    ("algorithm.kl_ctrl.kl_coef", fail, "[0, inf)", "the policy would be driven away from the reference", "0.001"),
    (NCCL_TIMEOUT, fail, "(0, inf)", "it is how many seconds ranks wait for each other", "3600"),
    ("algorithm.gamma", fail, "[0, 1]", "it is a discount", "1.0"),
    ("algorithm.lam", fail, "[0, 1]", "it is a discount", "1.0"),
)


def check_values(run: Run) -> Iterator[Finding]:
    checks = [_check_numbers, _check_optimizer, _check_backend, _check_images, *[_check_algorithm] * run.is_rl]
    yield from all_well(
        chain.from_iterable(check(run) for check in checks),
        "learning rate, sampling, clipping and sizes have plausible values",
    )


def _check_numbers(run: Run) -> Iterator[Finding]:
    for problem in run.own_problems("value"):
        yield fail(
            f"{problem.message} -> Correct it; configs/shared/ has the usual values (retool.yaml; for SFT sft.yaml)."
        )
    for key in COUNTS:
        value = run.get(key)
        if value is not None and (type(value) is not int or value < 1):
            yield fail(f"{key} is {value!r}, expected a whole number of at least 1 -> Correct it.")
    for key in ("trainer.save_freq", "trainer.test_freq"):
        if not run.is_rl and run.get(key) == 0:
            yield fail(f"{key} is 0, expected a number of steps, or -1 for never: SFT divides by it -> Set it to -1.")
    told: set[str] = set()
    for key, say, interval, why, advice in BOUNDS:
        key = f"{run.optim}{key.removeprefix('optim')}" if key.startswith("optim.") else key
        value, number = run.get(key), _number(run, key)
        if value is None or key in told or (number is not None and is_in(number, interval)):
            continue
        told.add(key)
        say, why = (fail, "it is not a number") if number is None or number != number else (say, why)
        yield say(f"{key} is {value!r}, expected in {interval}: {why} -> Set it to {advice}.")


def _check_optimizer(run: Run) -> Iterator[Finding]:
    lr, warmup = _number(run, f"{run.optim}.lr"), _number(run, f"{run.optim}.lr_warmup_steps")
    steps = _number(run, "trainer.total_training_steps")
    parameters = run.shape.parameters if run.shape else 0
    is_whole = not (run.lora_rank or run.get(f"{run.model}.lora_adapter_path"))
    if parameters >= LARGE and is_whole and lr is not None and LARGE_LR < lr <= 0.01:
        yield warn(f"""{run.optim}.lr is {lr:g}, expected at most {LARGE_LR:g} for {count(parameters)} parameters: so
            large a model would forget what it knows -> Set it to {RECIPES}.""")
    if steps and warmup and warmup >= steps:
        yield warn(f"""{run.optim}.lr_warmup_steps is {warmup:g}, expected less than
            trainer.total_training_steps={steps:g}: the full learning rate would never be reached -> Lower it.""")


def _check_backend(run: Run) -> Iterator[Finding]:
    """Refuse what verl_ext/trainer/shared_prompt.py would refuse once the run's processes have loaded the model."""
    backend = f"{run.model}.fused_kernel_options.impl_backend"
    if not run.get(f"{run.model}.use_fused_kernels") or run.get(backend) != SHARED_PROMPT:
        return
    try:
        kind = read_model_type(run.model_path or "")
    except ValueError:  # not JSON: `Run.shape_or_why` reports it
        kind = None
    wrong = f"the model is of type {kind!r}, expected {', '.join(DENSE)}" if kind and kind not in DENSE else ""
    if run.attention != FLASH_ATTN or not run.is_packed or run.ulysses > 1:
        wrong = f"it needs attention {FLASH_ATTN}, use_remove_padding=true and {ULYSSES}=1"
    if wrong:
        yield fail(f"{backend} is {SHARED_PROMPT}, but {wrong} -> Set {run.model}.use_fused_kernels=false.")


def _check_images(run: Run) -> Iterator[Finding]:
    """Refuse what the servers of verl_ext/fleet/server.py would refuse once they have loaded the model."""
    mode = run.get(weight_update.KEY, "abort")
    try:
        seen = mode != "abort" and has_images(run.model_path or "")
    except ValueError:  # not JSON: `Run.shape_or_why` reports it
        return
    if seen:
        yield fail(f"""{weight_update.KEY} is {mode}, but {run.model_path} reads images (vision_config of its
            config.json), which vLLM caches for any version of the weights -> Set {weight_update.KEY}=abort.""")


def _check_algorithm(run: Run) -> Iterator[Finding]:
    """Check settings against each other."""
    low, high = _number(run, f"{ACTOR}.clip_ratio_low"), _number(run, f"{ACTOR}.clip_ratio_high")
    if low is not None and high is not None and high < low < 1:  # at 1 there is no lower bound, as in CISPO
        yield warn(f"""{ACTOR}.clip_ratio_low is {low:g}, expected at most clip_ratio_high={high:g}: DAPO's clip-higher
            is the other way round -> Swap them: 0.2 and 0.28.""")
    if run.get(NCCL_TIMEOUT) is None:
        yield warn(f"""{NCCL_TIMEOUT} is null, expected a number of seconds: ranks would wait for each other 30 minutes,
            torch's default, but rank 0 may read weights for longer -> Set it to 3600.""")
    yield from map(fail, weight_update.refusals(run.get))
    yield from map(fail, health.refusals(run.get))
    yield from map(fail, balancer.refusals(run.get))
    yield from map(warn, cautions(run.get))
    for key in settings_of_loss(str(run.get(f"{ACTOR}.policy_loss.loss_mode"))):
        if not (_number(run, f"{ACTOR}.{key}") or 0) > 0:
            yield fail(f"""{ACTOR}.{key} is {run.get(f"{ACTOR}.{key}")!r}, expected a number above 0: the objective
                has no default -> Set it as the preset in configs/objective/ does.""")
    threshold = run.get(f"{CORRECTION}.rollout_is_threshold")
    if run.get(f"{CORRECTION}.rollout_is") and not _is_threshold(threshold):
        yield fail(f"""{CORRECTION}.rollout_is_threshold is {threshold!r}, expected a number above 0, by which weights
            are truncated, or an interval such as 0.5_2.0 -> Set it as the preset in configs/objective/ does.""")
    if run.get("algorithm.filter_groups.enable") and run.get("algorithm.filter_groups.metric") is None:
        yield fail("""algorithm.filter_groups.metric is null, expected a name that the reward manager reports: without
            one no group would be filtered -> Set it to acc.""")
    estimator = run.get("algorithm.adv_estimator")
    compares = estimator in TABLE["of_groups"] or run.get("algorithm.filter_groups.enable")
    if compares and run.n == 1:
        yield fail(f"""{ROLLOUT}.n is 1, expected 2 or more: {estimator} or dynamic sampling compares the samples of a
            prompt, and a group of one has advantage 0 -> Set it to 8 or 16.""")
    samples = run.get(f"{ROLLOUT}.val_kwargs.n", 1)
    if samples != 1 and run.get(f"{ROLLOUT}.val_kwargs.temperature") == 0:
        yield warn(f"""{ROLLOUT}.val_kwargs.temperature is 0, expected above 0 with val_kwargs.n={samples}: all
            responses to a problem would be equal -> Set val_kwargs.n=1, or the temperature to 1.0.""")
    for switch, key in (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
    ):
        if run.get(switch) and run.get(key) == 0:
            yield warn(f"""{switch} is true, expected false with {key}=0: a reference model would run for nothing
                -> Switch it off, or set {key}=0.001.""")


def settings_of_loss(mode: str) -> tuple[str, ...]:
    """Return the keys of the actor without which an objective cannot be computed; none for verl's own losses.

    LOSSES of verl_ext/trainer/objective.py, which imports torch, also has them; a test compares both.
    """
    if mode == "retool_sapo":
        return ("tau_pos", "tau_neg")
    bounds = ("clip_ratio_low", "clip_ratio_high") if mode.startswith("retool_") else ()
    return (*bounds, "clip_ratio_c") if mode in ("retool_ppo", "retool_dppo_tv", "retool_dppo_kl") else bounds


def _is_threshold(value: Any) -> bool:
    """Tell whether a threshold is valid, read as verl does (0.9.1, trainer/ppo/rollout_corr_helper.py:93)."""
    try:
        bounds = [float(each) for each in str(value).split("_", 1)]
    except ValueError:
        return False
    return 0 < bounds[0] <= bounds[-1]


def _number(run: Run, key: str) -> float | None:
    value = run.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
