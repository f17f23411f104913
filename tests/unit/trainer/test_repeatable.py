"""What a repeatable run removes from chance, without the run: tests/e2e/test_repeatable.py starts some.

The sampler is the real one, on a queue in which prompts end, and rollouts arrive, in an order and at a pace drawn by a
seed. Names of prompts are those that the trainer gives.
"""

import copy
import functools
import random
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from verl_ext.episode import SUMMARY, Episode, EpisodeKey, TokenRow, ToolUse, summary_of
from verl_ext.settings import compose_run


@functools.cache
def composed(run: str, *overrides: str) -> DictConfig:
    return compose_run(run, list(overrides))


def rollout(rng: random.Random) -> dict[str, Any]:
    acc = float(rng.random() < 0.3)
    failed = float(rng.random() < 0.1)
    reward = {"acc": acc, "train_acc": acc, "response_tokens": rng.randint(1, 99) + 0.1}
    reward |= {"unverified": 0.0, "sandbox_failure": failed, "finish_reason": "answer", "score": acc, "reward": acc}
    use, row = ToolUse(ok=rng.randint(0, 3), run_s=rng.random()), TokenRow(model_spans=[(0, 9)])
    episode = Episode(EpisodeKey("u", 0), [row], "sandbox_failure" if failed else "answer", use)
    return {"reward_extra_info": reward, SUMMARY: summary_of(episode)}


class Queue:
    """Stands in for TransferQueue, and for the trainer that submits prompts."""

    def __init__(self, name: Callable[[], object], arrival: int):
        self.name, self.arrival = name, random.Random(arrival)
        self.content = random.Random(0)  # the content of rollouts does not depend on their arrival
        self.tags: dict[str, dict] = {}
        self.values: dict[str, Any] = {}
        self.waiting: dict[str, list[tuple[str, dict]]] = {}
        self.submissions: list[int] = []

    def submit(self, count: int) -> int:
        self.submissions.append(count)
        for _ in range(count):
            uid = str(self.name())
            self.tags[uid] = {"is_prompt": True, "status": "pending", "global_steps": 1}
            self.waiting[uid] = [(f"{uid}_{i}_0", rollout(self.content)) for i in range(12)]
            self.arrival.shuffle(self.waiting[uid])
        return count

    def kv_list(self) -> dict[str, dict]:
        for uid in self.arrival.sample(sorted(self.waiting), min(len(self.waiting), self.arrival.randint(0, 3))):
            for key, extra in self.waiting.pop(uid):
                self.tags[key], self.values[key] = {"status": "success", "seq_len": 7}, SimpleNamespace(data=extra)
            self.tags[uid]["status"] = "finished"
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: Any = ("extra_fields",)) -> dict:
        return {"extra_fields": [self.values[key] for key in keys], "rm_scores": np.zeros((len(keys), 1))}

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: dict, tags: list[dict]) -> None:
        self.tags |= dict(zip(keys, tags, strict=True))
        self.values |= dict(zip(keys, fields["extra_fields"], strict=True))

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.tags.pop(key, None)
            self.values.pop(key, None)


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple]:
    """Return one step: what was taken, in order, what was submitted, and the metrics."""
    import transfer_queue

    from verl_ext.trainer.repeatable import CompletedRounds, CountedNames, move_measured
    from verl_ext.trainer.sampler import DapoReplayBuffer

    def sample(arrival: int, *, repeatable: bool) -> tuple:
        queue = Queue(CountedNames(lambda: 1).uuid4 if repeatable else uuid.uuid4, arrival)
        for name in ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear"):
            monkeypatch.setattr(transfer_queue, name, getattr(queue, name))
        config = composed("tiny_dapo").trainer.v1.sampler.sampler_kwargs
        buffer = DapoReplayBuffer(
            trainer_mode="sync",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.merge(config, {"poll_interval_s": 0.0}),
            refill_fn=queue.submit,
        )
        if repeatable:
            buffer.__class__ = type("Repeatable", (CompletedRounds, DapoReplayBuffer), {})
        queue.submit(8)
        batch, metrics = buffer.sample(1, "train", 8)
        move_measured(metrics)
        order = {uid: i for i, uid in enumerate(dict.fromkeys(key.split("_")[0] for key in batch.keys))}
        keys = batch.keys if repeatable else [f"{order[key.split('_')[0]]}{key[36:]}" for key in batch.keys]
        return keys, queue.submissions, metrics

    return sample


def test_the_order_and_the_pace_of_arrival_change_nothing(sample: Callable[..., tuple]) -> None:
    first, *others = [sample(arrival, repeatable=True) for arrival in range(6)]
    assert all(other == first for other in others)
    assert first[2]["failure/groups_filled"] > 0, "no rollout was drawn again: nothing was tested of it"
    plain = [sample(arrival, repeatable=False) for arrival in range(6)]
    assert any(other != plain[0] for other in plain), "an order that matters to nobody shows nothing"


def test_a_wait_for_all_rollouts_ends_if_one_can_never_come() -> None:
    """The rollout can never come because the process of its agent loop is gone."""
    from verl_ext.trainer.repeatable import CompletedRounds

    class Buffer:
        pending_keys, running_keys, poll_interval = {"train": set()}, {"train": {"a"}}, 0.0

        def _sync_metadata_from_transfer_queue(self) -> None:
            """Find nothing new."""

        def _wait_for_next_poll(self, partition_id: str, last: float) -> float:
            raise RuntimeError("a process is gone")

    buffer = type("Repeatable", (CompletedRounds, Buffer), {})()
    with pytest.raises(RuntimeError, match="a process is gone"):
        buffer._sync_metadata_from_transfer_queue()


def test_names_sort_as_they_were_given_and_a_resumed_run_gives_them_again() -> None:
    from verl_ext.trainer.repeatable import CountedNames

    step = 9
    names = CountedNames(lambda: step)
    given = [names.uuid4() for _ in range(300)]
    step = 10
    given += [names.uuid4() for _ in range(3)]
    assert sorted(map(str, given)) == [str(name) for name in given] and len(set(given)) == 303
    assert not any("_" in str(name) for name in given)  # verl splits a rollout's key there
    resumed = CountedNames(lambda: 10)
    assert [resumed.uuid4() for _ in range(3)] == given[300:]


def test_seconds_and_memory_have_names_that_a_comparison_leaves_out() -> None:
    from verl_ext.trainer.repeatable import move_measured

    metrics = {"tool/run_s": 1.0, "tool/calls": 2.0, "actor/perf/cpu_memory_used_gb": 3.0, "perf/throughput": 4.0}
    move_measured(metrics)
    assert metrics == {
        "timing_tool/run_s": 1.0,
        "tool/calls": 2.0,
        "perf/actor/cpu_memory_used_gb": 3.0,
        "perf/throughput": 4.0,
    }


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("actor_rollout_ref.rollout.max_num_seqs", 2, "max_num_seqs=2 (needed: 1)"),
        ("actor_rollout_ref.rollout.enable_prefix_caching", True, "enable_prefix_caching=True (needed: False)"),
        ("actor_rollout_ref.rollout.max_num_batched_tokens", 223, "max_num_batched_tokens=223 (needed: 224 or more)"),
        ("actor_rollout_ref.actor.fsdp_config.full_determinism", False, "full_determinism=False (needed: True)"),
        ("trainer.v1.trainer_mode", "colocate_async", "trainer_mode=colocate_async (needed: sync)"),
        ("trainer.device", "cuda", "trainer.device=cuda (needed: cpu)"),
    ],
)
def test_what_would_make_two_runs_differ_is_refused(key: str, value: Any, told: str) -> None:
    from verl_ext.trainer.repeatable import check_repeatable

    config = copy.deepcopy(composed("tiny_dapo", "+repeatable=cpu"))
    check_repeatable(config)
    OmegaConf.update(config, key, value)
    with pytest.raises(ValueError, match="Use \\+repeatable=cpu, or correct them") as raised:
        check_repeatable(config)
    assert told in str(raised.value)


@pytest.mark.parametrize("run", ["tiny_dapo", "qwen2-32b_dapo"])
def test_one_key_sets_all_that_is_needed_and_one_seed(run: str) -> None:
    config = copy.deepcopy(composed(run, *["+hardware=cpu_tiny"] * (run != "tiny_dapo"), "+repeatable=cpu"))
    assert config.retool.repeatable is True
    config.actor_rollout_ref.rollout.seed = 7
    assert config.data.seed == 7 == config.actor_rollout_ref.actor.fsdp_config.seed
    assert composed(run).retool.repeatable is False
