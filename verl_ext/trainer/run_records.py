"""Reports of the trainer to the recorder (records/recorder.py): fates, advantages, tokens of some groups, times.

The trainer never waits for an answer. It reports a step in one message, because Ray spends more on a message than on
its content. The actor's processes report what the loss does with the tokens (token_notes.py); they recognize a recorded
response by the number in its column `record`.
"""

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_ext.episode import EpisodeKey
from verl_ext.events import Ended, Finished, Observer, Saved, Selected, Started, Validated
from verl_ext.outcome import PromptEnd
from verl_ext.records.recorder import Fates, costs_nothing
from verl_ext.rollout import recorder_actor
from verl_ext.runs.folder import files_of
from verl_ext.settings import RecorderSettings
from verl_ext.trainer.queue import partition_of, real_keys, row_of

RECORD = "record"  # column: step * 2**32 + number of the response in the step; -1 if it is not recorded
STEP_BITS = 32
UNREADABLE, UTF8_BYTES = "\ufffd", 4  # what a decoder writes for part of a character; the most bytes of one
SHOWN = {  # verl's timer -> interval of the timeline
    "gen": "wait",
    "reward": "score",
    "old_log_prob": "log_probs",
    "ref": "log_probs",
    "update_actor": "update",
    "save_checkpoint": "save",
    "update_weights": "weight_sync",
    "testing": "validate",
}
_OF_TOKENS = ("rollout_log_probs", "old_log_probs", "advantages")


def check_recorder(config: DictConfig) -> None:
    """Raise if rollouts are to be recorded but nothing would report them; called when a run starts.

    Raises:
        ValueError: `retool.recorder.enable` with verl's own agent-loop manager.
    """
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    if OmegaConf.select(config, "retool.recorder.enable") and OmegaConf.select(config, manager) is None:
        raise ValueError(
            f"retool.recorder.enable is true, but {manager} is null, and verl's own workers report nothing to it. "
            "Set it to verl_ext.rollout.workers.LeanAgentLoopManager, or set retool.recorder.enable=false."
        )


class RunRecords(Observer):
    """The recorder's client in the trainer, one per run; it starts the recorder."""

    def __init__(self, settings: RecorderSettings, config: DictConfig):
        self._folder = Path(config.trainer.default_local_dir).resolve()
        self._recorder = recorder_actor.start(self._folder, settings)
        self._only_validates = config.trainer.get("val_only", False)
        self._untold: list[tuple[str, tuple]] = []  # methods of the recorder, with arguments
        self._share = settings.token_share
        self._known: set[int] = set()  # token ids whose text the recorder has
        self._parts: set[int] = set()  # those of them that are not whole characters
        self._ends: dict[str, PromptEnd] = {}  # of groups that are still in the queue
        self._begin_step()

    def _begin_step(self) -> None:
        self._taken: dict[EpisodeKey, float | None] = {}
        self._fillers: set[str] = set()
        self._left_out: dict[EpisodeKey, str] = {}
        self._number, self._cpu_s = 0, 0.0

    @costs_nothing("sent")
    def _send(self, method: str, *arguments: Any) -> None:
        """Send a call in one message with all that wait; its CPU time counts in the next step."""
        began = time.thread_time()
        self._untold.append((method, arguments))
        self._recorder.tell.remote(self._untold)
        self._untold = []
        self._cpu_s += time.thread_time() - began

    def on_started(self, event: Started) -> None:
        self._ends = {uid: end for uid, end in event.waiting.items() if end is not PromptEnd.OPEN}
        self._decode = event.decode
        self._send("resume", event.step)

    @costs_nothing("made of a batch")
    def on_selected(self, event: Selected) -> None:
        """Note what is taken with which advantage, report the tokens of a share of the groups, and mark these responses
        for the actor's processes. Its CPU seconds are an upper bound of what the records took: they are those of all
        threads of this process, because TransferQueue works in a separate thread.
        """
        batch, began = event.batch, time.process_time()
        rows = real_keys(batch)
        self._taken |= {key.original: event.advantage[key] for key in rows.values()}
        self._fillers |= event.selection.fillers
        self._left_out |= event.selection.left_out
        groups = sorted({key.uid for key in rows.values()}, key=lambda uid: hashlib.blake2b(uid.encode()).digest())
        groups = set(groups[: math.ceil(self._share * len(groups))])
        # A row is recorded once; that of a copy has the same tokens.
        found = {(key.original, key.row): text for text, key in rows.items() if key.uid in groups}
        if found:
            self._report_tokens(event.step, batch, {text: rows[text] for text in found.values()})
        self._cpu_s += time.process_time() - began

    def _report_tokens(self, step: int, batch: KVBatchMeta, chosen: Mapping[str, EpisodeKey]) -> None:
        records = {key: (step << STEP_BITS) + self._number + i for i, key in enumerate(chosen)}
        self._number += len(chosen)
        marks = torch.tensor([records.get(key, -1) for key in batch.keys])
        columns = TensorDict({RECORD: marks}, batch_size=len(marks))
        tq.kv_batch_put(keys=batch.keys, partition_id=partition_of(batch), fields=columns)
        if batch.fields is not None:  # the columns that the actor fetches; None: all
            batch.fields = [*batch.fields, RECORD]
        fields = ["responses", "response_mask", "loss_mask", "extra_fields", *_OF_TOKENS]
        data = tq.kv_batch_get(keys=[*chosen], partition_id=partition_of(batch), select_fields=fields)
        told = token_columns({chosen[text]: record for text, record in records.items()}, data)
        new = set(told["id"].tolist()) - self._known
        texts = {each: self._decode([each]) for each in new}
        self._known |= new
        self._parts |= {each for each, text in texts.items() if UNREADABLE in text}
        told["spelled"] = spelled(told["id"], told["lengths"], self._parts, self._decode)
        self._untold.append(("tokens", (step, told, texts)))

    @costs_nothing("made of a step")
    def on_ended(self, event: Ended) -> None:
        """Report what became of prompts. It may still change for groups in the queue, which a later step reports.

        Another project's sampler reports nothing: what a batch took counts as trained.
        """
        began = time.thread_time()
        self._ends = {key.uid: PromptEnd.TRAINED for key in self._taken} | self._ends | dict(event.prompts)
        gone = {uid: end for uid, end in self._ends.items() if uid not in event.seen}
        self._ends = {uid: end for uid, end in self._ends.items() if uid in event.seen}
        fates = Fates(event.step, gone, self._taken, frozenset(self._fillers), self._left_out)
        self._untold.append(("end_step", (fates, self._cpu_s + time.thread_time() - began)))
        self._begin_step()

    def on_saved(self, event: Saved) -> None:
        self._send("save", event.step)

    def on_validated(self, event: Validated) -> None:
        """Report a validation, unless this start only validates what the run that trained has a record of."""
        if not (self._only_validates and self._has_validated(event.step)):
            uids = dict.fromkeys(event.uids)
            self._send("end_step", Fates(event.step, uids, {}, validate=True, light=event.is_light), 0.0)

    def _has_validated(self, step: int) -> bool:
        files = files_of(self._folder)
        own = any(file.validate and file.step == step for file in files)
        return own and not all(file.validate for file in files)

    def on_finished(self, event: Finished) -> None:
        shown = [{**each, "what": SHOWN[each["what"]]} for each in event.intervals if each["what"] in SHOWN]
        self._send("times", event.step, shown)

    def close(self) -> None:
        """Write the last files before returning, or warn that they may not be written."""
        if self._untold:  # a step that raised
            self._recorder.tell.remote(self._untold)
        recorder_actor.close(self._recorder)


def token_columns(records: Mapping[EpisodeKey, int], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of `TokenParts.batches` for some rows of verl's queue; a column that it lacks is NaN.

    Args:
        records: key -> record, in the order of the rows.
    """
    lengths = np.array([len(row) for row in data["responses"].unbind()])
    total = int(lengths.sum())

    def flat(name: str) -> np.ndarray:
        if data.get(name) is None:
            return np.full(total, np.nan, np.float32)
        return torch.cat([row.float() for row in data[name].unbind()]).numpy()

    turns, versions = [], np.full(total, -1)
    rows = (row_of(key, extra_fields) for key, extra_fields in zip(records, data["extra_fields"], strict=True))
    for length, end, row in zip(lengths.tolist(), np.cumsum(lengths).tolist(), rows, strict=True):
        turns.append(_turns(length, row.model_spans))
        for start, stop, version in row.version_spans:
            versions[end - length + start : end - length + stop] = -1 if version is None else version
    return {
        "record": np.array(list(records.values())),
        "lengths": lengths,
        "uid": [key.uid for key in records],
        "session": [key.session for key in records],
        "row": [key.row for key in records],
        "id": torch.cat(list(data["responses"].unbind())).numpy(),
        "mask": flat("response_mask") > 0,
        "sampled": flat("loss_mask") > 0,
        "turn": np.concatenate(turns),
        "version": versions,
        **dict(zip(("rollout_log_prob", "old_log_prob", "advantage"), map(flat, _OF_TOKENS), strict=True)),
    }


def spelled(
    ids: np.ndarray, lengths: np.ndarray, parts: Collection[int], decode: Callable[[list[int]], str]
) -> dict[int, str]:
    """Return place -> text for tokens that only together make characters: the text is at the place of the last one.

    Args:
        ids: int64[all tokens] of responses, one after the other; `lengths` are theirs.
        parts: ids whose own text is no whole character.
    """
    texts: dict[int, str] = {}
    waiting: list[int] = []
    response = np.repeat(np.arange(len(lengths)), lengths)
    for place in np.flatnonzero(np.isin(ids, [*parts])).tolist():
        if waiting and (place != waiting[-1] + 1 or response[place] != response[waiting[-1]]):
            waiting = []
        waiting = [*waiting[1 - UTF8_BYTES :], place]
        # Tokens that are no character may precede the first one.
        for own in (waiting[start:] for start in range(len(waiting) - 1)):
            if UNREADABLE not in (text := decode(ids[own].tolist())):
                texts |= dict.fromkeys(own, "") | {place: text}
                waiting = []
                break
    return texts


def _turns(length: int, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return int[length], the index into the turns of a row of a trajectory; each tool output is a turn."""
    turns, turn, at = np.zeros(length, np.int64), -1, 0
    for start, end in spans:
        turn += start > at
        turns[at:start] = turn
        turn += 1
        turns[start:end], at = turn, end
    turns[at:] = turn + 1
    return turns
