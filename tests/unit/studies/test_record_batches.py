# ruff: noqa: F811 (the fixture `make`)
"""The batch that a run saves for the correction lab, by verl's own trainer on a queue in memory; and its file."""

from pathlib import Path

import pytest
import torch

from scripts.studies import record_batches
from scripts.studies.record_batches import RecordedBatch, path_of, read_batch, write_batch
from tests.unit.trainer.conftest import make  # noqa: F401
from tests.unit.trainer.prompt_groups import info
from verl_ext.episode import EpisodeKey
from verl_ext.events import Selected, Selection

COPY = str(EpisodeKey("a", 1, copy=1))
ON = f"retool.observers=[{Path(record_batches.__file__)}:BatchRecorder]"
PROMPT = 2  # tokens


@pytest.fixture
def queue(monkeypatch):
    """key -> column -> value, as verl's queue has them: rows of unequal length come as one nested tensor."""
    import transfer_queue as tq
    from tensordict import NonTensorData
    from verl.utils import tensordict_utils as tu

    stored = {}

    def get(keys, partition_id, select_fields):
        data = {name: [stored[key][name] for key in keys] for name in select_fields}
        for name in data.keys() - {"extra_fields"}:
            data[name] = torch.nested.as_nested_tensor(data[name], layout=torch.jagged)
        if "extra_fields" not in data:
            return tu.get_tensordict(data)
        return data | {"extra_fields": [NonTensorData(each) for each in data["extra_fields"]]}

    def put(keys, partition_id, fields):
        for name, values in fields.items():
            for key, value in zip(keys, values.unbind(), strict=True):
                stored[key][name] = value

    monkeypatch.setattr(tq, "kv_batch_get", get)
    monkeypatch.setattr(tq, "kv_batch_put", put)
    return stored


class Workers:
    """The actor: its log-probs of a sequence of s tokens are -1, -2, ..., -s, and 10 less after each update."""

    def __init__(self, stored):
        self.stored, self.updates, self.asked = stored, 0, []

    def compute_log_prob(self, batch):
        self.asked.append(dict(batch.extra_info))
        for key in batch.keys:
            row = self.stored[key]
            places = torch.arange(1.0, 1 + PROMPT + len(row["response_mask"]))
            row |= {"log_probs": -places - 10 * self.updates, "sum_pi_squared": places / 100}


def response(mask, log_probs, score, extra):
    return {
        "response_mask": torch.tensor(mask),
        "rollout_log_probs": torch.tensor(log_probs),
        "rm_scores": torch.tensor([0.0] * (len(mask) - 1) + [score]),
        "extra_fields": extra,
    }


@pytest.fixture
def recorded(make, queue, monkeypatch):
    """A trainer whose update is faked, a batch of two responses, a copy of the second and padding; and the actor."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    right = info(1, ok=3, errors={"timeout": 1})
    wrong = info(0, void_turns=1)
    second = ([1, 0, 1], [-0.5, 0.0, -0.25], -1.0, wrong)
    queue |= {"a_0_0": response([1, 1], [-1.5, -2.5], 1.0, right), "a_1_0": response(*second)}
    queue |= {COPY: response(*second), "pad_0_0": response([0], [0.0], 0.0, {})}
    monkeypatch.setenv("RECORD_EVERY", "2")
    trainer, _ = make(ON)
    trainer.actor_rollout_wg, trainer.local_trigger_step = Workers(queue), 0

    def update(self, batch, metrics):
        assert "calculate_sum_pi_squared" not in batch.extra_info  # what a look asks for is asked for in no update
        self.actor_rollout_wg.updates += 1
        return batch

    def train(batch):
        """Tell what `_compute_advantage` tells, then update."""
        event = Selected(trainer.global_steps, trainer.local_trigger_step, batch, Selection(), batch.keys)
        object.__setattr__(event, "advantage", dict.fromkeys(map(EpisodeKey.parse, batch.keys), 0.5))
        trainer.observers.tell(event)
        trainer._update_actor(batch, {})

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    trainer.train = train
    tags = [{"min_global_steps": 4, "max_global_steps": 5}, {}, {}, {"is_padding": True}]
    return trainer, tq.KVBatchMeta(partition_id="train", keys=[*queue], tags=tags, extra_info={"x": 1})


def test_a_step_that_is_due_is_saved_with_log_probs_before_and_after_its_updates(recorded, tmp_path):
    """Log-probs of a response begin one place before its first token, at that of the prompt's last: -2."""
    trainer, batch = recorded
    trainer.global_steps = 2
    trainer.train(batch)
    found = read_batch(tmp_path, 2)
    assert found.mask.tolist() == [[True, True, False], [True, False, True]]
    assert found.rollout_log_prob.tolist() == [[-1.5, -2.5, 0.0], [-0.5, 0.0, -0.25]]
    assert found.old_log_prob.tolist() == [[-2.0, -3.0, 0.0], [-2.0, -3.0, -4.0]]
    assert found.log_prob.tolist() == [[-12.0, -13.0, 0.0], [-12.0, -13.0, -14.0]]
    assert found.sum_pi_squared[1].tolist() == pytest.approx([0.02, 0.03, 0.04])
    assert (found.scores.tolist(), found.acc.tolist()) == ([1.0, -1.0], [1.0, 0.0])
    assert (found.void.tolist(), found.calls.tolist(), found.failed_calls.tolist()) == ([False, True], [4, 0], [1, 0])
    assert (found.groups, found.versions, found.updates) == (["a", "a"], [(4, 5), (None, None)], 2)
    assert batch.extra_info == {"x": 1} and [
        each["calculate_sum_pi_squared"] for each in trainer.actor_rollout_wg.asked
    ]


@pytest.mark.parametrize(("step", "number"), [(1, 0), (2, 1)])
def test_other_steps_and_later_batches_of_a_step_cost_nothing(recorded, tmp_path, step, number):
    trainer, batch = recorded
    trainer.global_steps, trainer.local_trigger_step = step, number
    trainer.train(batch)
    assert trainer.actor_rollout_wg.asked == [] and not (tmp_path / "recorded_batches").exists()


def test_of_several_rows_of_an_episode_the_last_is_recorded_in_whatever_order_the_batch_has_them(
    recorded, queue, tmp_path
):
    """Session 1 has three rows. The batch has the last of them before the others, and a copy of it after them."""
    trainer, batch = recorded
    for row in (1, 2):
        queue[f"a_1_{row}"] = queue["a_1_0"] | {"rm_scores": torch.tensor([0.0, 0.0, row / 2])}
    last, old = {"min_global_steps": 8, "max_global_steps": 9}, {"min_global_steps": 0, "max_global_steps": 0}
    batch.keys = ["a_1_2", "a_1_0", *batch.keys[:1], "a_1_1", str(EpisodeKey("a", 1, 1, row=2)), batch.keys[-1]]
    batch.tags = [last, old, batch.tags[0], old, last, batch.tags[-1]]
    queue[batch.keys[4]] = queue["a_1_2"]
    trainer.global_steps = 2
    trainer.train(batch)
    found = read_batch(tmp_path, 2)
    assert sorted(zip(found.scores.tolist(), found.calls.tolist(), found.versions, strict=True)) == [
        (1.0, 0, (8, 9)),
        (1.0, 4, (4, 5)),
    ]


@pytest.mark.parametrize("override", ["rollout.calculate_log_probs=false", "model.use_fused_kernels=true"])
def test_a_run_that_cannot_record_does_not_start(make, override):
    with pytest.raises(ValueError, match="Recording batches needs"):
        make(ON, f"actor_rollout_ref.{override}")


MASK = torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
NUMBERS = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]])
BATCH = RecordedBatch(
    *(MASK, NUMBERS, NUMBERS - 1, NUMBERS - 2, NUMBERS / 9),
    *(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]), torch.tensor([False, True])),
    *(torch.tensor([2, 1]), torch.tensor([0, 1]), ["a", "a"], [(1, 2), (None, None)], 2),
)


def test_a_batch_is_read_as_it_was_written_and_padding_is_not_stored(tmp_path):
    write_batch(path_of(tmp_path, 7), BATCH, torch.tensor([3, 1]))
    stored = torch.load(tmp_path / "recorded_batches" / "step_7.pt")
    assert stored["rollout_log_prob"].tolist() == [-1.0, -2.0, -3.0, -4.0]  # the second response has one token
    found = read_batch(tmp_path, 7)
    assert found.log_prob[1].tolist() == [-6.0, 0.0, 0.0]
    for name in ("mask", "rollout_log_prob", "scores", "void", "calls"):
        assert torch.equal(getattr(found, name), getattr(BATCH, name)), name
    assert (found.groups, found.versions, found.updates) == (BATCH.groups, BATCH.versions, 2)
    assert [path.name for path in (tmp_path / "recorded_batches").iterdir()] == ["step_7.pt"]


def test_a_step_that_was_not_recorded_is_reported_with_those_that_were(tmp_path):
    for step in (10, 9):
        write_batch(path_of(tmp_path, step), BATCH, torch.tensor([3, 1]))
    with pytest.raises(FileNotFoundError, match="Recorded steps: 9, 10. .*record_batches.py:BatchRecorder"):
        read_batch(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="Recorded steps: none"):
        read_batch(tmp_path / "other", 3)


def test_a_file_of_something_else_is_reported(tmp_path):
    path_of(tmp_path, 1).parent.mkdir()
    torch.save({"lengths": torch.tensor([1])}, path_of(tmp_path, 1))
    with pytest.raises(ValueError, match="step_1.pt is not a recorded batch"):
        read_batch(tmp_path, 1)
