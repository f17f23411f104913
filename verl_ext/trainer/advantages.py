"""The advantages of verl_ext/objectives in verl: estimators, groups that were filled, and units of the mean.

Functions that verl 0.9.1's v1 trainers call are replaced in trainer/ppo/v1/trainer_base.py.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.episode import EpisodeKey
from verl_ext.objectives.maxrl import maxrl
from verl_ext.objectives.mean import episode_factors, unit_factors
from verl_ext.objectives.tir_otb import OF_TOKENS, at_last_own, tir_otb
from verl_ext.settings.cautions import WITHOUT_GROUPS
from verl_ext.trainer.joined_rows import JoinedRows
from verl_ext.trainer.queue import partition_of, real_keys
from verl_ext.versions import VERL, Library, require_versions

ESTIMATORS = ["maxrl", "tir_otb"]  # names of algorithm.adv_estimator besides verl's; the doctor reads them here
OF_GROUPS = ("grpo", *ESTIMATORS)  # those whose groups may differ in size
# Those whose advantages stay the same if a number is added to all rewards of a group.
OF_DIFFERENCES = (
    "grpo", "grpo_vectorized", "grpo_passk", "opo", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline",
)  # fmt: skip

Noted = list[tuple[Sequence[str], Tensor, Tensor]]  # of batches: keys, advantages (float[B, T]), response mask
_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)
_batch_keys: ContextVar[Sequence[str]] = ContextVar("batch_keys", default=())


def register(algorithms: ModuleType) -> None:
    """Add our estimators to those of `verl.trainer.ppo.core_algos`."""
    algorithms.register_adv_est("maxrl")(_maxrl)
    algorithms.register_adv_est("tir_otb")(_tir_otb)


def _maxrl(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **_: Any) -> tuple[Tensor, Tensor]:
    result = maxrl(token_level_rewards.sum(-1), list(index)).unsqueeze(-1) * response_mask
    return result, result


def _tir_otb(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    mask = response_mask.bool()
    result = tir_otb(token_level_rewards, mask, list(index), old_log_probs, sum_pi_squared, rollout_is_weights)
    return result, torch.where(mask, token_level_rewards, 0).flip(-1).cumsum(-1).flip(-1)


def replace_in(trainer_base: Library) -> None:
    """trainer/ppo/v1/trainer_base.py (0.9.1) calls `group_advantages` (:1775) and `corrected` (:1771), not verl's."""
    require_versions(VERL, "verl_ext/trainer/advantages.py")
    verls = trainer_base.compute_advantage_for_multi_trajectories
    trainer_base.compute_advantage_for_multi_trajectories = functools.partial(group_advantages, verls)
    verls = trainer_base.compute_rollout_correction_and_add_to_batch
    trainer_base.compute_rollout_correction_and_add_to_batch = functools.partial(corrected, verls)


@contextmanager
def noted(batch_keys: Sequence[str]) -> Iterator[Noted]:
    """Yield a list that `group_advantages` fills in the block: fetching the same from verl's queue costs CPU time.

    Args:
        batch_keys: of the batch whose advantages verl computes in the block; `corrected` reads them.
    """
    tokens = _noted.set(notes := []), _batch_keys.set(batch_keys)
    try:
        yield notes
    finally:
        _noted.reset(tokens[0])
        _batch_keys.reset(tokens[1])


def corrected(verls: Any, data: Any, settings: Any) -> tuple[Any, dict[str, float]]:
    """Return a batch with the weights and masks of `algorithm.rollout_correction`, and verl's metrics of them.

    The product of the ratios of a response is that of a whole episode, and so is what is kept or dropped with it.
    """
    rows = JoinedRows([*map(EpisodeKey.parse, _batch_keys.get())], data.batch["response_mask"])
    if not rows.are_several:
        return verls(data, settings)
    needed = ("old_log_probs", "rollout_log_probs", "response_mask")
    whole, metrics = verls(type(data).from_dict({name: rows.join(data.batch[name]) for name in needed}), settings)
    for name in whole.batch.keys() & {"response_mask", "rollout_is_weights"}:
        data.batch[name] = rows.split(whole.batch[name])
    return data, metrics


def group_advantages(verls: Any, data: Any, batch_keys: Sequence[str], adv_estimator: str, **settings: Any) -> Any:
    """Return the advantages of a batch, and pass them to the block of `noted` around the call, if any."""
    data = _group_advantages(verls, data, batch_keys, adv_estimator, settings)
    if (notes := _noted.get()) is not None:
        notes.append((batch_keys, data.batch["advantages"], data.batch["response_mask"]))
    return data


def _group_advantages(verls: Any, data: Any, batch_keys: Sequence[str], adv_estimator: str, settings: dict) -> Any:
    """Give every estimator an episode's rows as one sequence, with the score of the last; `gae` stays verl's.

    verl does so only for `grpo`, with the last row alone (trainer/ppo/v1/utils.py:167). A copy that fills a group
    (`DapoReplayBuffer`) enters no baseline, and its advantages are those of the original. A group of one gets 0,
    whereas verl's estimators give it its score.

    Estimators of `OF_DIFFERENCES` get the rewards of a group less its first one. The difference of two close numbers is
    exact, but their mean is rounded: for eight rewards of -.9, verl divides the rounding error of the differences by
    that of their deviation, and gives .056 to each. So equal rewards give exactly 0, and close ones give what their
    formula says.

    A score that verl notes at the last token of a tool (`retool.run_last_code`) counts at the policy's last token:
    verl's token-level estimators (`gae`, `reinforce_plus_plus`, `remax`) would lose it.

    Args:
        verls: verl's function, which has `gae`, because that has no groups.
        data: verl's DataProto.
        batch_keys: of each row, as verl spells it.
    Raises:
        ValueError: the reward manager's score of a response is not finite; verl's own workers do not check it.
    """
    if "token_level_scores" in data.batch:
        scores = data.batch["token_level_scores"].sum(-1)
        for row in (~scores.isfinite()).nonzero().flatten().tolist():
            raise ValueError(
                f"The reward of {batch_keys[row]} (prompt, response, row) is {scores[row]}; expected a finite "
                "number. Its group would have no advantages. Correct the reward function, then resume the run."
            )
    keys = [EpisodeKey.parse(key) for key in batch_keys]
    originals = [replace(key, copy=0) if key.copy else key for key in keys]
    rows = JoinedRows(originals, data.batch["response_mask"], data.batch["token_level_rewards"])
    given = data.batch["token_level_rewards"]
    data.batch["token_level_rewards"] = _at_own_tokens(given, data.batch["response_mask"])
    if adv_estimator == "gae":
        return verls(data, batch_keys=batch_keys, adv_estimator=adv_estimator, **settings)
    if adv_estimator in OF_TOKENS:
        data.batch["sum_pi_squared"] = _sum_pi_squared(batch_keys, given.shape[-1])
    whole = _joined(data, rows, given)
    rewards, groups = whole.batch["token_level_rewards"], [keys[row].uid for row in rows.last]
    members: dict[str, list[float]] = {}  # group -> rewards of its episodes
    for group, reward in zip(groups, rewards.sum(-1).tolist(), strict=True):
        members.setdefault(group, []).append(reward)
    if adv_estimator in OF_DIFFERENCES:
        whole.batch["token_level_rewards"] = _differences(rewards, groups)
    whole = _estimate(whole, adv_estimator, settings)
    for name in ("advantages", "returns"):
        data.batch[name] = rows.split(whole.batch[name])
    is_gpg = adv_estimator == "gpg"  # it counts rewards of 0, so it cannot take differences
    without = {group for group, own in members.items() if len(own) == 1 or (is_gpg and len({*own}) == 1)}
    if without and adv_estimator not in WITHOUT_GROUPS:
        data.batch["advantages"][torch.tensor([key.uid in without for key in keys])] = 0
    return data


def _at_own_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return rewards of tokens with those of a tool's tokens at the policy's last one, if it has one."""
    own = mask.bool()  # not in a response that `rollout_rs` dropped
    moved = torch.where(own, rewards, 0) + at_last_own(torch.where(own, 0, rewards).sum(-1), own)
    return torch.where(own.any(-1, keepdim=True), moved, rewards)


def _joined(data: Any, rows: JoinedRows, given: Tensor) -> Any:
    """Return the episodes of a batch, each as one row; of the scores, which all rows have, the last row's counts.

    Args:
        given: float[B, T], the rewards of tokens as verl noted them: scores, and what a KL takes from each token.
    """
    whole = data.select_idxs(rows.last)
    if not rows.are_several:
        return whole
    is_last = torch.zeros(len(given), 1, dtype=torch.bool)
    is_last[rows.last] = True
    counted = torch.where(is_last, given, given - data.batch.get("token_level_scores", given))
    for name, values in data.batch.items():
        whole.batch[name] = rows.join(values)
    whole.batch["token_level_rewards"] = _at_own_tokens(rows.join(counted), whole.batch["response_mask"])
    return whole


def _differences(rewards: Tensor, groups: Sequence[str]) -> Tensor:
    """Return float[E, T], each episode's reward less its group's first, at the first token: only sums are read."""
    first: dict[str, int] = {}  # group -> its first episode
    sums = rewards.sum(-1).to(torch.promote_types(rewards.dtype, torch.float32))  # bf16 would round their differences
    result = sums.new_zeros(rewards.shape)
    result[:, 0] = sums - sums[[first.setdefault(group, row) for row, group in enumerate(groups)]]
    return result


def _estimate(data: Any, estimator: str, settings: dict) -> Any:
    from verl.trainer.ppo.ray_trainer import compute_advantage

    if estimator not in ("tir_otb", "tir_optimal_token_baseline"):  # one formula; ours handles equal rewards
        # verl's registry also takes a name.
        return compute_advantage(data, adv_estimator=estimator, **settings)  # pyright: ignore[reportArgumentType]
    batch = data.batch  # verl passes `sum_pi_squared` only to estimators with its own names (ray_trainer.py:265)
    needed = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")
    batch["advantages"], batch["returns"] = _tir_otb(
        **{name: batch[name] for name in needed},
        index=data.non_tensor_batch["uid"],
        rollout_is_weights=batch.get("rollout_is_weights", None),
    )
    return data


def keep_sum_pi_squared(batch: KVBatchMeta) -> None:
    """Reduce `sum_pi_squared`, which the pass for old log-probs also computes for prompts, to the responses."""
    from verl.workers.utils.padding import response_from_nested

    fields = ["sum_pi_squared", "response_mask"]
    partition = partition_of(batch)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=partition, select_fields=fields)
    found = response_from_nested(data["sum_pi_squared"], data["response_mask"])
    _put(batch.keys, partition, sum_pi_squared=found.float())


def _sum_pi_squared(keys: Sequence[str], width: int) -> Tensor:
    data = tq.kv_batch_get(keys=list(keys), partition_id="train", select_fields=["sum_pi_squared"])
    return torch.nested.to_padded_tensor(data["sum_pi_squared"], 0.0, (len(keys), width))


def scale(
    batch: KVBatchMeta, mask: Tensor, *, mode: str, unit: str, updates: int, trains: Callable[[EpisodeKey], bool]
) -> dict[EpisodeKey, float]:
    """Multiply the advantages of a batch in verl's queue by the factors of `unit`, and by 0 what does not train.

    A mean over responses counts episodes (`episode_factors`); verl counts rows there: each of an episode's, and those
    of verl's padding, by which ranks and updates get equally many.

    Args:
        mask: [B, T], tokens that train.
        mode: `actor.loss_agg_mode`.
        updates: mini-batches of the batch.
        trains: whether a row is in the loss.
    Returns:
        The factor of each row whose advantages were multiplied, by its key.
    """
    keys, lengths = [EpisodeKey.parse(key) for key in batch.keys], mask.sum(-1).double()
    if unit == "mini_batch":
        real = real_keys(batch)
        episodes = [real[text].episode if text in real else None for text in batch.keys]
        factors = episode_factors(lengths, episodes, mode=mode)
    else:
        factors = unit_factors(lengths, [key.uid for key in keys], unit=unit, updates=updates)
    factors = torch.where(torch.tensor([not trains(key) for key in keys]), 0.0, factors)
    chosen = (factors != 1).nonzero().flatten().tolist()
    if not chosen:
        return {}
    keys, factors, names = [keys[i] for i in chosen], factors[chosen], [batch.keys[i] for i in chosen]
    partition = partition_of(batch)
    data = tq.kv_batch_get(keys=names, partition_id=partition, select_fields=["advantages"])
    advantages = cast(Tensor, data["advantages"])
    scaled = [row * factor for row, factor in zip(advantages.unbind(), factors.to(advantages.dtype), strict=True)]
    _put(names, partition, advantages=torch.nested.as_nested_tensor(scaled, layout=torch.jagged))
    return dict(zip(keys, factors.tolist(), strict=True))


def _put(keys: list[str], partition_id: str, **columns: Tensor) -> None:
    tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=TensorDict(columns, batch_size=len(keys)))
