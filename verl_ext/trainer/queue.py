"""Calls of trainer and sampler to TransferQueue: prompts in it, ends of responses, copies and removals."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, cast

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_ext.episode import Episode, EpisodeKey, TokenRow, from_row
from verl_ext.outcome import STOPS_RUN

PARTITION = "train"


def _tags() -> Mapping[str, Mapping]:
    return (tq.kv_list() or {}).get(PARTITION, {})


def prompts_in_queue() -> set[str]:
    """Return the uids of the training prompts that no batch has taken: pending, running, or ended and waiting."""
    return {key for key, tag in _tags().items() if tag.get("is_prompt")}


def sources_in_queue() -> dict[str, str]:
    """Return the `data_source` of each of these prompts, which the asynchronous modes keep with them."""
    uids = sorted(prompts_in_queue())
    if not uids:
        return {}
    data = tq.kv_batch_get(keys=uids, partition_id=PARTITION, select_fields=["data_source"])
    sources = cast(list[Any], data["data_source"])
    return dict(zip(uids, (getattr(value, "data", value) for value in sources), strict=True))


def partition_of(batch: KVBatchMeta) -> str:
    """Return the partition of a batch; all that verl hands around have one."""
    return cast(str, batch.partition_id)


def real_keys(batch: KVBatchMeta) -> dict[str, EpisodeKey]:
    """Return verl's spelling -> key of a batch's rows without verl's padding, the rows of an episode in their order."""
    tagged = zip(batch.keys, batch.tags, strict=True)
    keys = {text: EpisodeKey.parse(text) for text, tag in tagged if not tag.get("is_padding", False)}
    return dict(sorted(keys.items(), key=lambda item: item[1].row))


def episodes_of(keys: Iterable[EpisodeKey], extra_fields: Iterable[Any]) -> list[Episode]:
    """Return the episodes that rows of the queue belong to, once each.

    Args:
        extra_fields: verl's column of that name, of each row.
    """
    last = dict(
        zip((key.episode for key in keys), extra_fields, strict=True)
    )  # all rows of an episode have its summary
    return [from_row(key, getattr(extra, "data", extra)) for key, extra in last.items()]


def row_of(key: EpisodeKey, extra_fields: Any) -> TokenRow:
    """Return the spans of a row of the queue, by its `extra_fields`; another project's loop notes only its own."""
    rows = from_row(key, getattr(extra_fields, "data", extra_fields)).rows
    return rows[key.row] if key.row < len(rows) else rows[-1]


def share_cut(batch: KVBatchMeta) -> float | None:
    """Return the share of a batch's responses that were cut at the token limit, as the loop noted; None if it noted
    nothing, as another project's loop."""
    keys = real_keys(batch)
    if not keys:
        return None
    data = tq.kv_batch_get(keys=[*keys], partition_id=partition_of(batch), select_fields=["extra_fields"])
    own = [episode for episode in episodes_of(keys.values(), data["extra_fields"]) if episode.use]
    return sum(episode.is_truncated for episode in own) / len(own) if own else None


def clear_leftovers() -> None:
    """Remove the rows whose prompt is gone.

    verl 0.9.1 (trainer/ppo/v1/trainer_base.py:521) saves a checkpoint before it clears the batch that the step has
    trained on, so a restored queue would hold that batch forever. Rows that stopped the run also go: the cause may have
    been fixed.
    """
    tags = _tags()
    prompts = {key for key, tag in tags.items() if tag.get("is_prompt")}
    leftovers = [text for text in tags.keys() - prompts if EpisodeKey.uid_of(text) not in prompts]
    leftovers += [key for key, tag in tags.items() if STOPS_RUN in tag and key not in leftovers]
    if leftovers:
        tq.kv_clear(keys=leftovers, partition_id=PARTITION)


def copy_episodes(
    partition_id: str, sources: Sequence[EpisodeKey], snapshot: dict[str, dict]
) -> dict[EpisodeKey, EpisodeKey]:
    """Put each episode into the queue once more, and into the sampler's snapshot of it; return source -> copy."""
    copies = {source: replace(source, copy=1) for source in sources}
    rows = {text: str(replace(copies[key.episode], row=key.row)) for text, key in _rows(snapshot, copies.keys())}
    if not rows:
        return {}
    data = tq.kv_batch_get(keys=[*rows], partition_id=partition_id)
    tags = [dict(snapshot[text]) for text in rows]
    tq.kv_batch_put(keys=[*rows.values()], partition_id=partition_id, fields=data, tags=tags)
    snapshot |= dict(zip(rows.values(), tags, strict=True))
    return copies


def remove(partition_id: str, episodes: Set[EpisodeKey], snapshot: dict[str, dict]) -> None:
    """Remove episodes from the queue and from the sampler's snapshot of it."""
    rows = [text for text, _ in _rows(snapshot, episodes)]
    if rows:
        tq.kv_clear(keys=rows, partition_id=partition_id)
    for text in rows:
        del snapshot[text]


def _rows(snapshot: Iterable[str], episodes: Set[EpisodeKey]) -> list[tuple[str, EpisodeKey]]:
    return [(text, key) for text in snapshot if (key := EpisodeKey.parse(text)).episode in episodes]
