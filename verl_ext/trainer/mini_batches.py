"""Mini-batches of a batch in which an episode has several rows: all of them are in one.

A mean over tokens divides by those of the mini-batch, so that the tokens of an episode would weigh differently in two.
verl 0.9.1 takes equally many rows for each update, in the order in which each rank has them (workers/engine_workers.py,
`train_mini_batch`).
"""

from typing import cast

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_ext.episode import EpisodeKey


def has_several_rows(batch: KVBatchMeta) -> bool:
    """Tell whether an episode of a batch has several rows."""
    return any(EpisodeKey.parse(key).row for key in batch.keys)


def check_rows(config: DictConfig, updates: int) -> None:
    """Raise if a run's settings would count an episode of several rows more than once, or split it; called when a run
    of agents starts, and for each batch that has such an episode.

    Args:
        updates: mini-batches of a batch.
    Raises:
        ValueError: a critic, rows that are shuffled over several updates, or means of entropy and KL over responses.
    """
    actor, problem = config.actor_rollout_ref.actor, None
    if config.algorithm.adv_estimator == "gae":
        problem = (
            "algorithm.adv_estimator=gae values every row by itself, with the reward of the whole. Set another "
            "estimator, such as grpo"
        )
    elif actor.shuffle and updates > 1:
        problem = (
            f"actor_rollout_ref.actor.shuffle=true spreads them over the {updates} updates of a step, in which tokens "
            "weigh differently. Set it to false"
        )
    elif actor.loss_agg_mode.startswith("seq-mean") and (actor.use_kl_loss or actor.entropy_coeff):
        problem = (
            f"with actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}, verl's terms for KL and entropy count "
            "each row as a response. Set use_kl_loss=false and entropy_coeff=0, or loss_agg_mode=token-mean"
        )
    if problem:
        raise ValueError(f"Episodes may have several rows, but {problem}. Or set retool.agent.max_rows=1.")


def lay_out(
    batch: KVBatchMeta, updates: int, multiple: int, ranks: int, eos_token_id: int
) -> tuple[KVBatchMeta, list[list[int]]]:
    """Fill up a batch with verl's padding, and divide it into mini-batches of whole episodes, equally many rows each.

    The episodes are divided in their order, equally many for each update, so that an update has episodes.

    Args:
        multiple: of rows of a mini-batch.
        ranks: data-parallel ones, among which the rows of each mini-batch are balanced by length.
    Returns:
        The batch, and the places in it of each rank's rows: mini-batch after mini-batch.
    """
    episodes: dict[EpisodeKey, list[int]] = {}
    for place, key in enumerate(batch.keys):
        episodes.setdefault(EpisodeKey.parse(key).episode, []).append(place)
    own, number = [*episodes.values()], len(episodes)
    parts = [
        [place for rows in own[number * i // updates : number * (i + 1) // updates] for place in rows]
        for i in range(updates)
    ]
    size, real = -(-max(map(len, parts)) // multiple) * multiple, len(batch)
    batch = upsample_batch_to_divisible_size(batch, size * updates, eos_token_id)
    spare = iter(range(real, size * updates))
    parts = [part + [next(spare) for _ in range(size - len(part))] for part in parts]
    work = calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags]))
    partitions: list[list[int]] = [[] for _ in range(ranks)]
    for part in parts:
        shares = get_seqlen_balanced_partitions(work[part].tolist(), k_partitions=ranks, equal_size=True)
        for partition, share in zip(partitions, cast(list[list[int]], shares), strict=True):
            partition += [part[i] for i in share]
    return batch, partitions
