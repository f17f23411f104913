"""Sampler and ledger across kills and resumes: every prompt is counted once, and either has one end or is open."""

import copy
import random
from collections import Counter

import pytest

from tests.unit.trainer.prompt_groups import MIXED, MODES, RAISED, RIGHT, SANDBOX_DOWN, WRONG, buffer_maker, info
from verl_ext.events import Drawn
from verl_ext.ledger.prompts import FILE, PromptLedger, read_tally
from verl_ext.outcome import PromptEnd

BATCH, STEPS = 3, 9
KEPT = {"keep_surplus": True, "max_off_policy_threshold": 2}


@pytest.fixture
def make(monkeypatch):
    return buffer_maker(monkeypatch)


class Run:
    """verl's training loop around the real sampler and ledger; a checkpoint is a copy of the queue, as TransferQueue's.

    A checkpoint is taken before the rows of the step's batch are removed, and in the mode `sync` holds no queue.
    """

    def __init__(self, folder, make, mode, outcomes, **options):
        self.folder, self.make, self.mode, self.options = folder, make, mode, options
        self.outcomes = outcomes  # uid -> what becomes of a prompt, so that a resumed run meets the same
        self.step, self.saved, self.told = 0, (0, None, []), []
        self.start(None)

    def start(self, checkpoint):
        from verl_ext.trainer.queue import clear_leftovers, prompts_in_queue

        self.queue, self.buffer = self.make((), batch_size=0, mode=self.mode, **self.options)
        queue, real = self.queue, self.queue.submit

        def submit(count, global_steps=None):
            first = len(queue.groups)
            queue.outcomes = iter([self.outcomes[f"uid-{first + i}"] for i in range(count)])
            before = set(queue.groups)
            real(count, global_steps=self.step)
            new = [uid for uid in queue.groups if uid not in before]
            sizes = [len(queue.groups[uid] or MIXED) for uid in new]
            self.ledger.on_drawn(Drawn(self.step, {uid: uid for uid in new}, sizes))
            return count

        self.submit = self.buffer.refill_fn = submit
        if checkpoint is not None:
            queue.tags, queue.values, queue.groups, queue.in_flight = copy.deepcopy(checkpoint)
            for uid in queue.in_flight:
                queue.tags[uid]["status"] = "pending"  # issued again
        self.ledger = PromptLedger(self.folder)
        clear_leftovers()
        self.waited = self.ledger.resume(self.step, prompts_in_queue())
        self.buffer.seen_before = self.waited

    def one_step(self):
        self.step += 1
        warm_up = BATCH if self.mode != "sync" and not self.queue.groups else 0
        self.submit(warm_up + (self.buffer.num_to_submit(BATCH) if self.mode == "sync" else BATCH))
        batch, _ = self.buffer.sample(self.step, "train", BATCH)
        ended = self.buffer.take_ended(self.step)
        self.told += ended.accs
        self.end_step(ended)
        self.checkpoint = (self.step, self._queue(), list(self.told))
        if self.mode != "sync":
            self.buffer.get_sampleable_count(self.step, "train")  # as `on_step_end` of separate_async may
        self.queue.kv_clear("train", batch.keys)
        return batch

    def end_step(self, ended):
        self.ledger.on_ended(ended)

    def _queue(self):
        state = copy.deepcopy((self.queue.tags, self.queue.values, self.queue.groups, self.queue.in_flight))
        return state if self.mode != "sync" else ({}, {}, state[2], [])

    def save(self):
        self.saved = self.checkpoint

    def kill(self):
        """End the process; another one takes the newest checkpoint."""
        self.step, checkpoint, told = self.saved
        self.told = list(told)
        self.start(checkpoint)


def outcomes(seed):
    rng = random.Random(seed)
    kinds = [MIXED] * 8 + [RIGHT] * 4 + [WRONG, SANDBOX_DOWN, RAISED]
    return {f"uid-{i}": rng.choice(kinds) for i in range(900)}


def groups_of_four(seed, void=0.25):
    """Right or wrong, some with void turns, old tokens or a broken sandbox, in a few one raised."""
    rng = random.Random(seed)

    def rollout():
        failed = rng.random() < 0.06
        end = {"sandbox_failure": 1.0, "finish_reason": "sandbox_failure"} if failed else {}
        acc, void_turns = rng.randrange(2), int(rng.random() < void)
        return info(acc, void_turns=void_turns, versions=[rng.randrange(STEPS)], **end)

    return {f"uid-{i}": RAISED if rng.random() < 0.05 else [rollout() for _ in range(4)] for i in range(900)}


def play(run, seed):
    """Run to the last step, with kills; return uid -> in how many batches of the last course it was useful."""
    rng = random.Random(seed)
    trained, taken = Counter(), {}
    while run.step < STEPS:
        batch = run.one_step()
        taken[run.step] = {key.split("_")[0] for key in batch.keys} - run.buffer.selection.fillers
        chance = rng.random()
        if chance < 0.6:
            run.save()
        if chance < 0.4 or chance > 0.85:
            run.kill()
        tally = read_tally(run.folder) if (run.folder / FILE).exists() else None
        assert tally is None or tally.faults() == []
        assert len(run.told) == len(set(run.told)), "a group was counted twice"
    for step in range(1, run.step + 1):
        trained.update(taken[step])
    return trained


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_sums_whenever_a_run_is_killed(tmp_path, make, mode, options, seed):
    run = Run(tmp_path, make, mode, outcomes(seed), max_num_gen_batches=2, **options)
    trained = play(run, seed)
    tally = read_tally(tmp_path)
    assert {uid for uid, end in tally.ends.items() if end is PromptEnd.TRAINED} == trained.keys()
    assert max(trained.values()) == 1, "a prompt was trained twice"
    ends = Counter(tally.ends.values())
    assert sum(ends.values()) == len(tally.ends) and ends[PromptEnd.EQUAL] and ends[PromptEnd.FAILED]
    assert tally.step == STEPS
    for uid, fates in tally.fates.items():
        outcome, end = run.outcomes[uid], tally.ends[uid]
        if outcome is RAISED:
            assert fates == {"failed/raised": 2} and end is PromptEnd.FAILED
        elif outcome is SANDBOX_DOWN:
            assert fates == {"failed/sandbox_failure": 1, "filtered/failed": 1} and end is PromptEnd.FAILED
        elif outcome is MIXED:
            assert fates == {PromptEnd.TRAINED: {"trained": 2}, PromptEnd.STALE: {"stale": 2}}.get(
                end, {"filtered/surplus": 2}
            )
        else:
            assert fates == {"filtered/equal": 2}


FATES = {  # options -> fates that they make
    "old": ({"max_staleness": 1}, {"stale"}),
    "void": ({"void_turn_filter": True}, {"filtered/void_turn"}),
    "void, old": ({"void_turn_filter": "loss", "max_staleness": 1}, {"filtered/void_turn", "stale"}),
    "resampled": ({"resample": "code"}, {"filtered/resampling"}),
    "void, resampled": (
        {"resample": "paper", "void_turn_filter": "loss"},
        {"filtered/resampling", "filtered/void_turn"},
    ),
}


@pytest.mark.parametrize("options", FATES)
@pytest.mark.parametrize("mode", MODES)
def test_every_rollout_of_every_option_ends_once(tmp_path, make, mode, options):
    settings, expected = FATES[options]
    run = Run(tmp_path, make, mode, groups_of_four(5), max_num_gen_batches=4, **settings)
    trained = play(run, 5)
    tally = read_tally(tmp_path)
    assert {uid for uid, end in tally.ends.items() if end is PromptEnd.TRAINED} == trained.keys()
    assert tally.rollouts().keys() >= expected | {"trained", "failed/sandbox_failure", "failed/raised"}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_group_that_waited_is_judged_as_before_the_kill(tmp_path, make, mode, seed):
    """Many void turns: whether one that trains is kept depends on what resampling draws."""
    options = {"resample": "paper", "void_turn_filter": "loss"}
    run = Run(tmp_path, make, mode, groups_of_four(seed, void=0.6), max_num_gen_batches=4, **options)
    play(run, seed)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_batch_that_was_trained_is_not_in_the_queue_of_the_resumed_run(tmp_path, make, mode):
    run = Run(tmp_path, make, mode, outcomes(1))
    run.one_step()
    run.save()
    left = {key.split("_")[0] for key in run.saved[1][0]} - {key for key in run.saved[1][0] if "_" not in key}
    assert len(left) == BATCH, "the checkpoint holds the batch of its step"
    run.kill()
    assert {key.split("_")[0] for key in run.queue.tags} == {key for key in run.queue.tags if "_" not in key}


def test_a_prompt_that_the_queue_lost_is_named(tmp_path, make):
    run = Run(tmp_path, make, "colocate_async", outcomes(2))
    run.one_step()
    run.save()
    lost = sorted(read_tally(tmp_path).open)[0]
    run.saved[1][0].pop(lost)
    for key in [key for key in run.saved[1][0] if key.startswith(f"{lost}_")]:
        run.saved[1][0].pop(key)
    run.saved[1][3][:] = [uid for uid in run.saved[1][3] if uid != lost]
    run.kill()
    assert read_tally(tmp_path).faults() == [
        f"1 prompts were open at a checkpoint but not in the queue of the run that resumed from it: {lost}."
    ]
