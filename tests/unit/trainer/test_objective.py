"""Our losses in verl's registry: they equal verl's if the formula is the same, and no NaN gets through."""

import math

import pytest
import torch

from tests.unit.objectives.cases import BOUNDS, RESPONSES, TOKENS, float64, random_batch

INFO = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None}


@pytest.fixture
def call(cpu_platform):
    """Call a loss of verl's registry as verl does."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    from verl_ext.trainer.objective import ObjectiveConfig

    def call(name, given, *, mode=TOKENS, unit="mini_batch", info=None, low=0.2, high=0.28, **settings):
        config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=8,
            use_dynamic_bsz=True,
            clip_ratio_low=low,
            clip_ratio_high=high,
            policy_loss=ObjectiveConfig(loss_mode=name, unit=unit),
            **settings,
        )
        config.global_batch_info.update(INFO | (info or {}))
        leaf = given.log_prob.detach().clone().requires_grad_()
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=given.old_log_prob,
            log_prob=leaf,
            advantages=given.advantages,
            response_mask=given.mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=given.weights,
        )
        return loss.item(), torch.autograd.grad(loss, leaf)[0], metrics

    return call


# ours, verl's, settings
SAME = [
    ("retool_ppo", "vanilla", BOUNDS | {"clip_ratio_c": 1.2}),
    ("retool_ppo", "vanilla", BOUNDS | {"mode": RESPONSES}),
    ("retool_olmorl", "vanilla", BOUNDS | {"clip_ratio_c": 1e9}),  # the weights are the trainer's
    ("retool_gspo", "gspo", {"low": 0.05, "high": 0.07, "mode": RESPONSES}),
    ("retool_sapo", "sapo", {"mode": RESPONSES}),
    ("retool_cispo", "cispo", {"low": 1.0, "high": 0.28}),
    ("retool_cispo", "cispo", {"low": 0.1, "high": 0.1}),
    ("retool_dppo_tv", "dppo_tv", {"low": 0.02, "high": 0.03, "clip_ratio_c": 1.2}),
    ("retool_dppo_kl", "dppo_kl", {"low": 0.005, "high": 0.01, "clip_ratio_c": 1.2}),
    ("retool_gmpo", "geo_mean", {"low": 0.1, "high": 0.2, "mode": RESPONSES}),  # in one micro-batch
]


@pytest.mark.parametrize(("ours", "verls", "settings"), SAME)
def test_loss_gradient_and_shares_are_verls_where_the_formula_is(call, ours, verls, settings):
    """verl adds 1e-8 to the length of a response, and takes a sequence mean's weights in float32."""
    given = random_batch(seed=6, weighted=ours == "retool_olmorl")
    loss, gradient, metrics = call(ours, given, **settings)
    expected, its_gradient, its_metrics = call(verls, given, **settings)
    assert loss == pytest.approx(expected, abs=1e-6) and gradient.abs().max() > 1e-3
    assert torch.allclose(gradient, its_gradient, atol=1e-7, rtol=0)

    from verl_ext.trainer.objective import make_shares

    make_shares(metrics)
    assert metrics["actor/ppo_kl"] == pytest.approx(its_metrics["actor/ppo_kl"], abs=1e-7)
    if ours != "retool_gmpo":  # verl counts tools' tokens
        clipped = its_metrics["actor/pg_clipfrac"] + its_metrics["actor/pg_clipfrac_lower"] * (
            "clip_ratio_c" in settings
        )
        assert ours in ("retool_dppo_tv", "retool_dppo_kl") or metrics["actor/pg_clipfrac"] == pytest.approx(clipped)


@pytest.mark.parametrize(("kind", "threshold"), [("token", 2.0), ("token", "0.5_2.0"), ("token", "1e-9_2.0")])
def test_the_trainers_weights_are_those_of_our_files(cpu_platform, kind, threshold):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    from verl_ext.objectives.icepop import pop
    from verl_ext.objectives.mis import masked
    from verl_ext.objectives.olmorl import truncate

    ratio = float64([[3.0, 2.0, 1.0, 0.5, 0.49, 1e-8]])
    own = {2.0: truncate(ratio, 2.0), "0.5_2.0": pop(ratio, 0.5, 2.0), "1e-9_2.0": masked(ratio, 2.0)}[threshold]
    verls, _ = compute_rollout_correction_weights(ratio.log(), torch.ones_like(ratio), kind, threshold)
    assert torch.allclose(own, verls, atol=1e-12)


def test_the_trainers_weights_of_responses_are_those_of_our_file(cpu_platform):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    from verl_ext.objectives.mis import masked, response_ratio

    ratios, mask = float64([[1.6, 9.0, 1.2], [1.6, 9.0, 1.5]]), torch.tensor([[True, False, True]] * 2)
    verls, _ = compute_rollout_correction_weights(ratios.log(), mask.double(), "sequence", "1e-9_2.0")
    own = torch.where(mask, masked(response_ratio(ratios.log(), mask), 2.0), 0)
    assert torch.allclose(own, verls, atol=1e-12) and own[0, 0] == pytest.approx(1.92) and own[1].sum() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "field"),
    [("retool_icepop", "weights")]
    + [
        (name, field)
        for name in ("retool_ppo", "retool_icepop", "retool_glm5_async", "retool_gspo", "retool_gmpo")
        for field in ("log_prob", "old_log_prob", "advantages")
    ],
)
def test_what_is_not_a_number_is_dropped_and_stays_in_the_mean(call, name, field, bad):
    """Two responses of three tokens, one token bad: the others are as if its token were not in the response."""
    mode = RESPONSES if name in ("retool_gspo", "retool_gmpo") else TOKENS
    given = random_batch(seed=7, responses=2, width=3, weighted=name == "retool_icepop")
    given = given._replace(mask=torch.ones(2, 3, dtype=torch.bool))
    broken = given._replace(**{field: getattr(given, field).clone()})
    getattr(broken, field)[0, 1] = bad
    loss, gradient, metrics = call(name, broken, mode=mode)
    assert math.isfinite(loss) and gradient.isfinite().all() and gradient[0, 1] == 0
    assert metrics["actor/sum/not_finite"] == 1 and metrics["actor/sum/dropped"] >= 1
    if mode == TOKENS:
        whole = call(name, given, mode=mode)[1]
        whole[0, 1] = 0
        assert torch.equal(gradient, whole)


@pytest.mark.parametrize(("name", "mode"), [("retool_ppo", TOKENS), ("retool_gspo", RESPONSES)])
def test_the_mean_is_over_the_mini_batch_and_its_ranks(call, name, mode):
    """verl adds up micro-batches and takes the mean over ranks: each of two ranks has twice its share."""
    given = random_batch()
    info = {"batch_num_tokens": int(given.mask.sum()), "global_batch_size": len(given.mask)}
    whole = call(name, given, mode=mode, info=info)[1]
    for rows in (slice(0, 3), slice(3, 8)):
        part = given._replace(
            **{field: getattr(given, field)[rows] for field in ("log_prob", "old_log_prob", "advantages", "mask")}
        )
        found = call(name, part, mode=mode, info=info | {"dp_size": 2})[1]
        assert torch.allclose(found, 2 * whole[rows], atol=1e-12) and found.abs().sum() > 0


@pytest.mark.parametrize("name", ["retool_ppo", "retool_icepop", "retool_gmpo", "retool_gspo"])
def test_a_micro_batch_without_a_token_has_loss_0(call, name):
    given = random_batch(responses=2, weighted=name == "retool_icepop")
    given = given._replace(mask=torch.zeros_like(given.mask))
    mode = RESPONSES if name in ("retool_gspo", "retool_gmpo") else TOKENS
    loss, gradient, _ = call(name, given, mode=mode, info={"batch_num_tokens": 0, "global_batch_size": 2})
    assert loss == 0.0 and gradient.abs().sum() == 0


@pytest.mark.parametrize(("name", "mode"), [("retool_ppo", TOKENS), ("vanilla", TOKENS), ("retool_gspo", RESPONSES)])
def test_a_mini_batch_without_a_token_has_loss_0_even_with_an_entropy_term(cpu_platform, name, mode):
    """verl: 0 tokens, a mean of 0 / 0, and 0 x NaN = NaN."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils import losses

    from verl_ext.trainer.objective import ObjectiveConfig

    def rows(dtype=torch.float32):
        return torch.nested.as_nested_tensor([torch.zeros(n, dtype=dtype) for n in (2, 3)], layout=torch.jagged)

    fields = {name: rows(torch.long) for name in ("prompts", "responses", "response_mask")}
    numbers = {"dp_size": 1, "batch_num_tokens": 0, "global_batch_size": 2}
    data = tu.get_tensordict(fields | {"old_log_probs": rows(), "advantages": rows()}, numbers)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=8, use_dynamic_bsz=True, calculate_entropy=True, entropy_coeff=0.1,
        loss_agg_mode=mode, policy_loss=ObjectiveConfig(loss_mode=name),
    )  # fmt: skip
    log_prob, entropy = torch.full((10,), -1.0, requires_grad=True), torch.ones(10, requires_grad=True)
    loss, metrics = losses.ppo_loss(config, {"log_probs": log_prob, "entropy": entropy}, data)
    gradients = torch.autograd.grad(loss, [log_prob, entropy])
    assert loss.item() == 0.0 and metrics["actor/entropy_loss"].values == [0.0]
    assert all(each.abs().sum() == 0 for each in gradients) and data["batch_num_tokens"] == 0


def test_weights_that_are_missing_or_not_taken_are_refused(call):
    with pytest.raises(ValueError, match="icepop got no weights.*rollout_is=token"):
        call("retool_icepop", random_batch())
    with pytest.raises(ValueError, match="glm5_async got weights.*bypass_mode=true"):
        call("retool_glm5_async", random_batch(weighted=True))


def test_counts_are_added_up_over_micro_batches_and_ranks_before_they_become_shares(cpu_platform, monkeypatch):
    """Micro-batches of 1 and 3 tokens on each of two ranks, 1 and 0 clipped: 2 of 8. A mean of shares would be .5."""
    from types import SimpleNamespace

    from verl.utils import metric
    from verl.workers.utils import losses

    from verl_ext.trainer.objective import COUNT, make_shares
    from verl_ext.trainer.token_notes import extend_loss

    def verls(config, model_output, data, dp_group=None):
        counts = {"tokens": data["tokens"], "clipped_low": data["low"], "clipped_high": 0.0}
        return 0.0, losses.Metric.from_dict({COUNT + name: value for name, value in counts.items()}, "mean")

    module = SimpleNamespace(ppo_loss=verls, Metric=losses.Metric, AggregationType=metric.AggregationType)
    extend_loss(module)
    ranks = []
    for _ in range(2):
        own = {"dp_size": 2, "batch_num_tokens": 8}
        parts = [module.ppo_loss(None, None, own | {"tokens": n, "low": low})[1] for n, low in ((1, 1), (3, 0))]
        total = parts[0]
        for name in total:
            total[name].extend(parts[1][name])
        ranks.append(total)
    metrics = {name: losses.Metric.aggregate_dp([rank[name] for rank in ranks]) for name in ranks[0]}
    assert metrics[COUNT + "tokens"] == 8.0
    make_shares(metrics)
    assert metrics["actor/pg_clipfrac"] == 0.25 and not any(name.startswith(COUNT) for name in metrics)


def test_verls_loss_function_is_the_one_that_adds_counts_up(cpu_platform):
    from verl.workers import engine_workers
    from verl.workers.utils import losses

    assert engine_workers.ppo_loss is losses.ppo_loss and hasattr(losses.ppo_loss, "__wrapped__")


def test_the_doctor_knows_every_name_that_is_registered():
    from verl_ext.doctor.names import NAMES
    from verl_ext.trainer.advantages import ESTIMATORS
    from verl_ext.trainer.objective import LOSS_MODES, LOSSES

    modes = NAMES["actor_rollout_ref.actor.policy_loss.loss_mode"]
    assert set(LOSS_MODES) == LOSSES.keys() == {mode for mode in modes if mode.startswith("retool_")}
    assert {*ESTIMATORS} <= {*NAMES["algorithm.adv_estimator"]}


def test_without_our_objectives_metrics_stay_as_they_are():
    from verl_ext.trainer.objective import make_shares

    metrics = {"actor/pg_clipfrac": 0.1}
    make_shares(metrics)
    assert metrics == {"actor/pg_clipfrac": 0.1}


# A run's config -------------------------------------------------------------------------------------------------------

CORRECTION, ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("objective", "override", "message"),
    [
        ("icepop", f"{CORRECTION}.bypass_mode=true", "old log-probs are the trainer's.*expected false"),
        ("glm5_async", f"{CORRECTION}.bypass_mode=false", "old log-probs are the rollout's.*expected true"),
        ("icepop", f"{CORRECTION}.rollout_is=null", "expected token interval"),
        ("icepop", f"{CORRECTION}.rollout_is_threshold=2.0", "expected token interval"),
        ("olmorl", f"{CORRECTION}.rollout_is=sequence", "expected token truncation"),
        ("dapo", f"{CORRECTION}.rollout_is=token", "expected rollout_is=null"),
        ("glm5_async", f"{CORRECTION}.rollout_is=token", "rollout_is=token has no effect with bypass_mode=true"),
        ("dapo", f"{CORRECTION}=null", "rollout_correction is null; expected verl's section"),
        ("dapo", f"{CORRECTION}.rollout_rs=token_k1", "rollout_rs=token_k1, which change the formula"),
        ("icepop", f"{CORRECTION}.rollout_is_batch_normalize=true", "rollout_is_batch_normalize=True.*expected false"),
        (
            "gmpo",
            f"algorithm.adv_estimator=tir_otb {ACTOR}.calculate_sum_pi_squared=true {CORRECTION}.bypass_mode=false",
            "its own advantage; gmpo needs one",
        ),
        ("gmpo", "algorithm.adv_estimator=gae", "its own advantage; gmpo needs one"),
        (
            "gmpo",
            "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9",
            "its own advantage; gmpo needs one",
        ),
        ("gspo", f"{ACTOR}.loss_agg_mode=token-mean", "expected seq-mean-token-mean"),
        ("grpo", f"{ACTOR}.policy_loss.unit=group", "the last two with token-mean"),
        ("dapo", f"{ACTOR}.policy_loss.unit=prompt", "expected one of mini_batch, batch, group"),
        ("icepop_onpolicy", f"{ACTOR}.ppo_mini_batch_size=8", "one update.*expected equal sizes"),
        ("icepop_onpolicy", f"{ACTOR}.ppo_epochs=2", "one update"),
        ("tir_otb", f"{CORRECTION}.bypass_mode=true", "needs the actor's pass for old log-probs"),
        ("tir_otb", f"{ACTOR}.calculate_sum_pi_squared=false", "expected false and true"),
        ("dapo", "algorithm.adv_estimator=optimal_token_baseline", "needs the actor's pass for old log-probs"),
        ("dapo", f"{ACTOR}.calculate_sum_pi_squared=true {CORRECTION}.bypass_mode=true", "Set one of them to false"),
        ("tir_otb", "actor_rollout_ref.model.use_fused_kernels=true", "Set it to false"),
        ("dr_grpo", f"{ACTOR}.loss_agg_mode=token-mean", "loss_scale_factor|expected seq-mean-token-sum-norm"),
        ("dr_grpo", f"{ACTOR}.loss_scale_factor=null", "loss_scale_factor is None.*expected a number of tokens"),
        ("dr_grpo", f"{ACTOR}.loss_scale_factor=0", "loss_scale_factor is 0 .*expected a number of tokens above 0"),
        ("dapo", f"{ACTOR}.loss_scale_factor=64", "loss_scale_factor is 64.*null with others"),
        ("dapo", f"+{ACTOR}.policy_loss.unti=batch", "policy_loss.unti is not a key.*Did you mean unit"),
        (
            "dapo",
            f"{ACTOR}.policy_loss.loss_mode=vanilla {ACTOR}.policy_loss.unit=batch",
            "needs a loss of verl_ext",
        ),
    ],
)
def test_what_does_not_fit_an_objective_is_refused_at_the_start(cpu_platform, objective, override, message):
    from verl_ext.settings import compose_run
    from verl_ext.trainer.objective import check_objective

    check_objective(compose_run("tiny_dapo", [f"+objective={objective}"]))
    check_objective(compose_run("tiny_dapo", [f"{ACTOR}.policy_loss.loss_mode=vanilla", f"{CORRECTION}=null"]))
    with pytest.raises(ValueError, match=message):
        check_objective(compose_run("tiny_dapo", [f"+objective={objective}", *override.split()]))


@pytest.mark.parametrize(
    ("objective", "mode", "is_told"),
    [("dapo", "separate_async", True), ("dapo", "sync", False), ("icepop", "separate_async", False)]
    + [("glm5_async", "colocate_async", False), ("gspo", "colocate_async", True)],
)
def test_an_objective_that_does_not_see_stale_tokens_is_reported_if_there_are_some(
    cpu_platform, caplog, objective, mode, is_told
):
    from verl_ext.settings import compose_run
    from verl_ext.trainer.objective import check_objective

    check_objective(compose_run("tiny_dapo", [f"+objective={objective}", f"trainer.v1.trainer_mode={mode}"]))
    assert ("no term of the loss knows which weights wrote a token" in caplog.text) == is_told
