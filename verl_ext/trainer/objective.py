"""The objectives of verl_ext/objectives in verl: the losses `actor.policy_loss.loss_mode: retool_*`, checks and counts.

verl 0.9.1 hands a loss no log-probs of the rollout engine (workers/utils/losses.py:84). An objective that needs them
gets them as old ones (`algorithm.rollout_correction.bypass_mode: true`), or as weights that the trainer has computed
once for the batch (`rollout_is`). NaN and infinite values are replaced before any arithmetic, and their tokens dropped.
"""

import difflib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from verl.workers.config import ActorConfig, PolicyLossConfig

from verl_ext.objectives.cispo import cispo
from verl_ext.objectives.dppo import dppo_kl, dppo_tv
from verl_ext.objectives.glm5_async import glm5_async
from verl_ext.objectives.gmpo import gmpo
from verl_ext.objectives.gspo import gspo
from verl_ext.objectives.icepop import icepop
from verl_ext.objectives.icepop_onpolicy import icepop_onpolicy
from verl_ext.objectives.mean import MODES, UNITS, mean_loss
from verl_ext.objectives.mis import mis
from verl_ext.objectives.olmorl import olmorl
from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.sapo import sapo
from verl_ext.objectives.terms import Terms, Tokens, log_ratio
from verl_ext.objectives.tir_otb import OF_TOKENS
from verl_ext.records.token_rows import CLIPPED_HIGH, CLIPPED_LOW, DROPPED, KEPT, MASKED, NOT_FINITE
from verl_ext.versions import Library

logger = logging.getLogger(__name__)

_noted: ContextVar[list[tuple[str, Tensor]] | None] = ContextVar("noted", default=None)
# Metrics that are added up over micro-batches and ranks, and over a step's batches by verl's MetricsAggregator, which
# looks for "sum" in a name (trainer/ppo/v1/utils.py:107, 0.9.1). At the end of a step they are turned into shares.
COUNT = "actor/sum/"
LOSS_MODES = [  # names of actor.policy_loss.loss_mode besides verl's; the doctor reads them here
    "retool_ppo",
    "retool_olmorl",
    "retool_icepop",
    "retool_icepop_onpolicy",
    "retool_glm5_async",
    "retool_mis",
    "retool_gspo",
    "retool_sapo",
    "retool_cispo",
    "retool_dppo_tv",
    "retool_dppo_kl",
    "retool_gmpo",
]


@dataclass
class ObjectiveConfig(PolicyLossConfig):
    """`actor.policy_loss` of a run with one of our objectives: verl's keys, and the unit of the mean."""

    unit: str = "mini_batch"


@dataclass(frozen=True)
class Loss:
    """One objective, and what it requires of the rest of a run's config.

    Attributes:
        objective: from tokens to terms.
        settings: arguments of `objective` -> keys of `actor`.
        weights: kinds of `rollout_correction` one of which it needs; none: it takes no weights.
        old: whose log-probs the old ones must be: "trainer", "rollout", or "" for either.
        modes: the means that its paper has, or that are exact.
        one_update: whether a batch may have only one update.
    """

    objective: Callable[..., Terms]
    settings: Mapping[str, str]
    weights: tuple[str, ...] = ()
    old: str = ""
    modes: tuple[str, ...] = MODES
    one_update: bool = False


_BOUNDS = {"low": "clip_ratio_low", "high": "clip_ratio_high"}
_TRUNCATED = _BOUNDS | {"truncation": "clip_ratio_c"}
_RESPONSES = ("seq-mean-token-mean",)
LOSSES = {
    "retool_ppo": Loss(ppo, _BOUNDS | {"dual_clip": "clip_ratio_c"}),
    "retool_olmorl": Loss(olmorl, _BOUNDS, ("token truncation",), "trainer"),
    "retool_icepop": Loss(icepop, _BOUNDS, ("token interval",), "trainer"),
    "retool_icepop_onpolicy": Loss(icepop_onpolicy, _BOUNDS, old="rollout", one_update=True),
    "retool_glm5_async": Loss(glm5_async, _BOUNDS, old="rollout"),
    "retool_mis": Loss(mis, _BOUNDS, ("token interval", "sequence interval"), "trainer"),
    "retool_gspo": Loss(gspo, _BOUNDS, modes=_RESPONSES),
    "retool_sapo": Loss(sapo, {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}),
    "retool_cispo": Loss(cispo, _BOUNDS),
    "retool_dppo_tv": Loss(dppo_tv, _TRUNCATED, old="rollout"),
    "retool_dppo_kl": Loss(dppo_kl, _TRUNCATED, old="rollout"),
    "retool_gmpo": Loss(gmpo, _BOUNDS, modes=_RESPONSES),
}


# In the actor's processes ---------------------------------------------------------------------------------------------


def register(algorithms: ModuleType) -> None:
    """Add our losses to those of `verl.trainer.ppo.core_algos`."""
    for name, loss in LOSSES.items():
        algorithms.register_policy_loss(name)(functools.partial(policy_loss, loss))


def policy_loss(
    loss: Loss,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    loss_agg_mode: str = "token-mean",
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute a loss, with the signature of verl's losses (core_algos.py:53).

    Returns:
        The loss of this micro-batch, and counts of its tokens (`COUNT`).
    Raises:
        ValueError: weights are missing, or there are weights that the objective does not take.
    """
    if (rollout_is_weights is not None) != bool(loss.weights):
        raise ValueError(
            f"{loss.objective.__name__} got {'no ' * bool(loss.weights)}weights from the trainer: expected "
            f"algorithm.rollout_correction with rollout_is={'token or sequence' if loss.weights else 'null'} and "
            f"bypass_mode={str(not loss.weights).lower()}. objective=NAME sets both."
        )
    sampled = response_mask.bool()
    weights = [] if rollout_is_weights is None else [rollout_is_weights]
    numbers = [log_prob, old_log_prob, advantages, *weights]
    usable = functools.reduce(torch.logical_and, map(torch.isfinite, numbers), sampled)
    log_prob, old_log_prob, advantages, *weights = (torch.where(usable, each, 0) for each in numbers)
    tokens = Tokens(log_prob, old_log_prob, advantages, usable, *weights)
    terms = loss.objective(tokens, **{name: getattr(config, key) for name, key in loss.settings.items()})
    if (noted := _noted.get()) is not None:
        noted.append((loss.objective.__name__, decisions(terms, sampled, usable)))
    info = config.global_batch_info
    value = mean_loss(
        torch.where(usable, terms.objective, 0),
        sampled,  # dropped tokens stay in the mean
        mode=loss_agg_mode,
        unit=config.policy_loss.get("unit", "mini_batch"),
        ranks=info.get("dp_size") or 1,
        tokens=info.get("batch_num_tokens"),
        responses=info.get("global_batch_size"),
        scale=info.get("loss_scale_factor"),
    )
    counts = {
        "tokens": sampled,
        "clipped_low": terms.clipped_low & usable,
        "clipped_high": terms.clipped_high & usable,
        "dropped": (terms.dropped | ~usable) & sampled,
        "not_finite": sampled & ~usable,
        "ppo_kl": -log_ratio(tokens),  # 0 for unusable tokens
    }
    return value, {COUNT + name: float(each.detach().sum()) for name, each in counts.items()}


def decisions(terms: Terms, sampled: Tensor, usable: Tensor) -> Tensor:
    """Return int8[B, T], what became of each token, as a code of records/token_rows.py.

    Args:
        sampled: bool[B, T], tokens that train; `usable`: those of them whose numbers are finite.
    """
    codes = torch.where(sampled, KEPT, MASKED)
    codes = torch.where(terms.clipped_low & usable, CLIPPED_LOW, codes)
    codes = torch.where(terms.clipped_high & usable, CLIPPED_HIGH, codes)
    codes = torch.where(terms.dropped & sampled, DROPPED, codes)
    return torch.where(sampled & ~usable, NOT_FINITE, codes).to(torch.int8)


@contextmanager
def noted_decisions() -> Iterator[list[tuple[str, Tensor]]]:
    """Yield a list that gets (objective, `decisions`) of each call of `policy_loss` in the block."""
    noted: list[tuple[str, Tensor]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def sum_counts(losses: Library, metrics: dict[str, Any], data: Any) -> None:
    """Make the counts among a loss's metrics sums over micro-batches and ranks.

    verl's mean over ranks comes first (utils/metric/utils.py:152), so counts are multiplied by the number of ranks.

    Args:
        data: of the micro-batch; it has the number of ranks.
    """
    for name in [name for name in metrics if name.startswith(COUNT)]:
        total = losses.Metric(losses.AggregationType.SUM)
        total.extend([value * data["dp_size"] for value in metrics[name].values])
        metrics[name] = total


# In the trainer -------------------------------------------------------------------------------------------------------


def make_shares(metrics: dict[str, Any]) -> None:
    """Replace a step's token counts by shares, `actor/clipped_low` and so on, and by verl's `actor/pg_clipfrac`."""
    counts = {name.removeprefix(COUNT): metrics.pop(name) for name in [*metrics] if name.startswith(COUNT)}
    if not counts:
        return
    tokens = max(counts.pop("tokens"), 1)
    metrics.update({f"actor/{name}": count / tokens for name, count in counts.items()})
    metrics["actor/pg_clipfrac"] = metrics["actor/clipped_low"] + metrics["actor/clipped_high"]


def check_objective(config: DictConfig) -> None:
    """Raise if a run's objective does not fit the rest of its config; verl's own losses are not checked.

    Raises:
        ValueError: an unknown key of `policy_loss`; weights, old log-probs, a mean or sizes that the objective does not
            allow.
    """
    actor = config.actor_rollout_ref.actor
    name, section = actor.policy_loss.loss_mode, cast(dict[str, Any], OmegaConf.to_container(actor.policy_loss))
    known = {field.name for field in fields(ObjectiveConfig)} | {"_target_"}
    for key in sorted(section.keys() - known):
        near = difflib.get_close_matches(key, known, n=1)
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.{key} is not a key of an objective."
            + (f" Did you mean {near[0]}?" if near else f" Expected one of {', '.join(sorted(known))}.")
        )
    estimator, correction = config.algorithm.adv_estimator, config.algorithm.rollout_correction
    if correction is None and (name in LOSSES or estimator in OF_TOKENS or actor.calculate_sum_pi_squared):
        raise ValueError(
            "algorithm.rollout_correction is null; expected verl's section. Set its rollout_is and rollout_rs to null."
        )
    bypasses = bool(correction and correction.bypass_mode)
    if estimator in OF_TOKENS:
        if config.actor_rollout_ref.model.get("use_fused_kernels"):
            raise ValueError(
                f"algorithm.adv_estimator={estimator} needs the whole distribution of each token, which "
                "actor_rollout_ref.model.use_fused_kernels=true does not compute. Set it to false."
            )
        if bypasses or not actor.calculate_sum_pi_squared:
            raise ValueError(
                f"algorithm.adv_estimator={estimator} needs the actor's pass for old log-probs; got rollout_correction."
                f"bypass_mode={bypasses} and actor.calculate_sum_pi_squared="
                f"{actor.calculate_sum_pi_squared}; expected false and true. objective=tir_otb sets both."
            )
    elif actor.calculate_sum_pi_squared and bypasses:
        raise ValueError(
            "actor.calculate_sum_pi_squared=true needs the actor's pass for old log-probs, which algorithm."
            "rollout_correction.bypass_mode=true skips. Set one of them to false."
        )
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    sees_age = correction and (correction.bypass_mode or correction.rollout_is or correction.rollout_rs)
    if mode in ("colocate_async", "separate_async") and not sees_age:
        logger.warning(
            "trainer_mode=%s with policy_loss.loss_mode=%s: no term of the loss knows which weights wrote a token, "
            "so tokens from older weights count as the policy's own. olmorl, icepop and mis_* weight them; "
            "glm5_async, icepop_onpolicy and dppo_* compare with the log-probs of the rollout.",
            *(mode, name),
        )
    if name not in LOSSES:
        if section.get("unit", "mini_batch") != "mini_batch":
            raise ValueError(f"policy_loss.unit={section['unit']} needs a loss of verl_ext, got loss_mode={name}.")
        return
    for problem in _problems(config, LOSSES[name], section.get("unit", "mini_batch")):
        raise ValueError(f"actor.policy_loss.loss_mode={name}: {problem}. objective=NAME sets all that belongs to it.")


def _problems(config: DictConfig, loss: Loss, unit: str) -> list[str]:
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    problems, old = [], "rollout" if correction.bypass_mode else "trainer"
    has = f"{correction.rollout_is} {'interval' if '_' in str(correction.rollout_is_threshold) else 'truncation'}"
    has = has if correction.rollout_is and old == "trainer" else ""
    if loss.old not in ("", old):
        expected = str(loss.old == "rollout").lower()
        problems.append(
            f"its old log-probs are the {loss.old}'s, and algorithm.rollout_correction.bypass_mode is "
            f"{correction.bypass_mode}; expected {expected}"
        )
    elif has not in (loss.weights or ("",)):
        problems.append(
            f"algorithm.rollout_correction has rollout_is={correction.rollout_is}, rollout_is_threshold="
            f"{correction.rollout_is_threshold}; expected {' or '.join(loss.weights) or 'rollout_is=null'}"
        )
    if correction.rollout_is and old == "rollout":
        problems.append(f"rollout_is={correction.rollout_is} has no effect with bypass_mode=true; expected null")
    if correction.rollout_is_batch_normalize or correction.rollout_rs:
        problems.append(
            f"algorithm.rollout_correction has rollout_is_batch_normalize={correction.rollout_is_batch_normalize}, "
            f"rollout_rs={correction.rollout_rs}, which change the formula; expected false and null"
        )
    to_go = config.algorithm.gamma != 1 or config.algorithm.use_kl_in_reward  # rewards differ from token to token
    of_tokens = (*OF_TOKENS, "gae", *(("reinforce_plus_plus", "remax") if to_go else ()))
    if loss.objective is gmpo and config.algorithm.adv_estimator in of_tokens:
        problems.append(
            f"algorithm.adv_estimator is {config.algorithm.adv_estimator}, which gives each token its own advantage; "
            "gmpo needs one per response"
        )
    if actor.loss_agg_mode not in loss.modes:
        problems.append(f"actor.loss_agg_mode is {actor.loss_agg_mode}; expected {' or '.join(loss.modes)}")
    scale = actor.get("loss_scale_factor")
    is_by_scale = actor.loss_agg_mode == "seq-mean-token-sum-norm"
    if (scale is not None) != is_by_scale or (is_by_scale and scale <= 0):
        problems.append(
            f"actor.loss_scale_factor is {scale} with actor.loss_agg_mode={actor.loss_agg_mode}; expected a number of "
            "tokens above 0 with seq-mean-token-sum-norm, and null with others"
        )
    if unit not in UNITS or (unit != "mini_batch" and actor.loss_agg_mode != "token-mean"):
        problems.append(
            f"policy_loss.unit is {unit} with actor.loss_agg_mode={actor.loss_agg_mode}; expected one of "
            f"{', '.join(UNITS)}, the last two with token-mean"
        )
    updates = config.data.train_batch_size / actor.ppo_mini_batch_size
    if loss.one_update and (actor.ppo_epochs != 1 or updates > 1):
        problems.append(
            f"it allows one update per batch, got train_batch_size={config.data.train_batch_size}, ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size}, ppo_epochs={actor.ppo_epochs}; expected equal sizes and one epoch"
        )
    return problems
