"""The file of a recorded batch."""

import pytest
import torch

from verl_ext.runs.batch_file import RecordedBatch, path_of, read_batch, write_batch

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
    with pytest.raises(FileNotFoundError, match="Recorded steps: 9, 10. .*retool.record_batches.enable=true"):
        read_batch(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="Recorded steps: none"):
        read_batch(tmp_path / "other", 3)


def test_a_file_of_something_else_is_reported(tmp_path):
    path_of(tmp_path, 1).parent.mkdir()
    torch.save({"lengths": torch.tensor([1])}, path_of(tmp_path, 1))
    with pytest.raises(ValueError, match="step_1.pt is not a recorded batch"):
        read_batch(tmp_path, 1)
