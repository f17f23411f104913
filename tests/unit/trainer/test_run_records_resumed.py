"""Records of a run across kills and resumes: every group that ended is in them once, with the ledger's end."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.unit.trainer.prompt_groups import MODES, RAISED, buffer_maker
from tests.unit.trainer.test_sampler_ledger import KEPT, STEPS, Run, outcomes
from verl_ext.events import Finished, Saved, Started
from verl_ext.ledger.prompts import read_tally
from verl_ext.outcome import PromptEnd, rollout_end
from verl_ext.records import store
from verl_ext.records.recorder import Group, Recorder, pack
from verl_ext.rollout import recorder_actor
from verl_ext.settings import RecorderSettings

SETTINGS = RecorderSettings(token_share=0.0, keep_steps=100, max_gb=1)


@pytest.fixture
def make(monkeypatch):
    return buffer_maker(monkeypatch)


class Handle:
    """The handle of an actor that executes each call at once."""

    def __init__(self, actor):
        self.actor = actor

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.actor, name))


class RecordedRun(Run):
    """With the real RunRecords and Recorder; a killed recorder keeps what is on the disk."""

    def start(self, checkpoint):
        from verl_ext.trainer.run_records import RunRecords

        super().start(checkpoint)
        self.recorder = Recorder(self.folder, SETTINGS)
        config = OmegaConf.create({"trainer": {"default_local_dir": str(self.folder)}})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorder_actor, "start", lambda *_: Handle(self.recorder))
            self.records = RunRecords(SETTINGS, config)
        self.records.on_started(Started(self.step, self.waited, decode=str))
        self.sent = set(checkpoint[2]) - set(checkpoint[3]) if checkpoint else set()

    def end_step(self, ended):
        self.tell()
        super().end_step(ended)
        self.records.on_ended(ended)
        self.records.on_finished(Finished(self.step))

    def tell(self):
        """Record a group as the agent loops do when its last rollout has ended."""
        for uid in self.queue.groups.keys() - set(self.queue.in_flight) - self.sent:
            group = self.queue.groups[uid]
            ends = ["raised"] if group is RAISED else [str(rollout_end(each["reward_extra_info"])) for each in group]
            rows = [{"uid": uid, "session": i, "step": self.step, "end_reason": end} for i, end in enumerate(ends)]
            self.recorder.group(Group(uid, self.step, False, pack(rows)))
            self.sent.add(uid)

    def save(self):
        super().save()
        self.tell()
        self.records.on_saved(Saved(self.step))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, KEPT], ids=["plain", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_what_waited_at_a_kill_is_recorded_with_its_end(tmp_path, make, caplog, mode, options, seed):
    run = RecordedRun(tmp_path, make, mode, outcomes(seed), max_num_gen_batches=2, **options)
    rng, kills = random.Random(seed), 0
    while run.step < STEPS:
        run.one_step()
        chance = rng.random()
        if chance < 0.6:
            run.save()
        if chance < 0.4 or chance > 0.85:
            run.kill()
            kills += 1
    run.recorder.close()
    tally, rows = read_tally(tmp_path), list(store.rows(tmp_path))
    warned = [record.getMessage() for record in caplog.records if record.getMessage().startswith("recorder: ")]
    assert kills and run.recorder.lost == 0 and all("begins at step 0" in each for each in warned)
    assert max(Counter((row["uid"], row["session"]) for row in rows).values()) == 1, "a row is there twice"
    found = {row["uid"]: row["outcome"] for row in rows}
    assert found.keys() <= tally.ends.keys()
    for uid, end in tally.ends.items():
        if end is PromptEnd.OPEN or uid in tally.seen:
            assert found.get(uid, "open") == "open"
        else:
            assert found[uid] == str(end)
