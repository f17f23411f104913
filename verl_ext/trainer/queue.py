"""Calls of trainer and sampler to TransferQueue: prompts in it, ends of responses, copies and removals, the wait."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_ext.outcome import STOPS_RUN

PARTITION = "train"


def _tags() -> Mapping[str, Mapping]:
    return (tq.kv_list() or {}).get(PARTITION, {})


def prompts_in_queue() -> set[str]:
    """Return the uids of the training prompts that no batch has taken: pending, running, or ended and waiting."""
    return {key for key, tag in _tags().items() if tag.get("is_prompt")}


def real_keys(batch: KVBatchMeta) -> list[str]:
    """Return the keys without verl's padding, the outputs of a session in their order."""
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    return sorted(keys, key=lambda key: int(key.rpartition("_")[2]))


def share_cut(batch: KVBatchMeta) -> float | None:
    """Return the share of a batch's responses that were cut at the token limit, as the loop noted; None if it noted
    nothing, as another project's loop."""
    keys = real_keys(batch)
    if not keys:
        return None
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    extras = [getattr(value, "data", value) for value in data["extra_fields"]]
    cut = [float(extra["truncated"]) for extra in extras if "truncated" in extra]
    return sum(cut) / len(cut) if cut else None


def clear_leftovers() -> None:
    """Remove the rows whose prompt is gone.

    verl 0.9.1 (trainer/ppo/v1/trainer_base.py:521) saves a checkpoint before it clears the batch that the step has
    trained on, so a restored queue would hold that batch forever. Rows that stopped the run also go: the cause may have
    been fixed.
    """
    tags = _tags()
    prompts = {key for key, tag in tags.items() if tag.get("is_prompt")}
    leftovers = [key for key in tags if key not in prompts and key.split("_")[0] not in prompts]
    leftovers += [key for key, tag in tags.items() if STOPS_RUN in tag and key not in leftovers]
    if leftovers:
        tq.kv_clear(keys=leftovers, partition_id=PARTITION)


def check_while_waiting(buffer: Any, check: Callable[[], None]) -> None:
    """Have the wait for rollouts call `check`, which may raise: verl's replay_buffer.py:408 (0.9.1)."""
    poll = buffer._wait_for_next_poll

    def checked_poll(*args: Any) -> float:
        check()
        return poll(*args)

    buffer._wait_for_next_poll = checked_poll


def stop_where_a_rollout_says_so(buffer: Any) -> None:
    """Have each poll of the queue raise what a rollout found broken: verl's replay_buffer.py:159 (0.9.1).

    verl treats a prompt that raised like any other, and continues with the rest.
    """
    look = buffer._sync_metadata_from_transfer_queue

    def checked_look() -> None:
        look()
        if any(buffer.failure_keys.values()):
            for tag in (tag for partition in buffer.partitions.values() for tag in partition.values()):
                if STOPS_RUN in tag:
                    raise RuntimeError(f"{tag[STOPS_RUN]} The same command then continues from the newest checkpoint.")

    buffer._sync_metadata_from_transfer_queue = checked_look


def copy_rollouts(partition_id: str, sources: Sequence[str], snapshot: dict[str, dict]) -> list[str]:
    """Put each rollout into the queue once more, and into the sampler's snapshot of it; return the keys of the copies.

    A copy is an additional output of its session, `{uid}_{session}_{index}`, after the last one of the session.
    """
    last = dict.fromkeys((key.rpartition("_")[0] for key in sources), 0)  # session -> index of its last output
    for key in snapshot:
        session, _, index = key.rpartition("_")
        if session in last:
            last[session] = max(int(index), last[session])
    copies = []
    for key in sources:
        session = key.rpartition("_")[0]
        last[session] += 1
        copies.append(f"{session}_{last[session]}")
    data = tq.kv_batch_get(keys=sources, partition_id=partition_id)
    tags = [dict(snapshot[key]) for key in sources]
    tq.kv_batch_put(keys=copies, partition_id=partition_id, fields=data, tags=tags)
    snapshot |= dict(zip(copies, tags, strict=True))
    return copies


def remove(partition_id: str, keys: Sequence[str], snapshot: dict[str, dict]) -> None:
    """Remove rollouts from the queue and from the sampler's snapshot of it."""
    tq.kv_clear(keys=keys, partition_id=partition_id)
    for key in keys:
        del snapshot[key]
