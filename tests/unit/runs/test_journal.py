import pytest

from verl_ext.runs.journal import StepJournal


def test_a_resumed_run_forgets_what_came_after_its_step(tmp_path):
    journal = StepJournal(tmp_path / "run" / "journal.jsonl")
    assert journal.resume(0) == []
    for step in (2, 4, 6):
        journal.append(step, value=step / 10)
    assert journal.resume(4) == [{"step": 2, "value": 0.2}, {"step": 4, "value": 0.4}]
    journal.append(6, value=0.9)
    assert StepJournal(journal.path).resume(100)[-1] == {"step": 6, "value": 0.9}
    assert StepJournal(journal.path).resume(0) == [] and journal.path.read_text() == ""


def test_a_line_that_a_kill_cut_short_is_dropped_and_what_follows_stays_readable(tmp_path):
    journal = StepJournal(tmp_path / "journal.jsonl")
    journal.append(1, value=1)
    with open(journal.path, "a") as file:
        file.write('{"step": 2, "val')
    assert journal.resume(5) == [{"step": 1, "value": 1}]
    journal.append(2, value=2)
    assert len(journal.resume(5)) == 2


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"journal.jsonl, line 2: .* Expected an object with `step`.* got '\[2\]'"):
        StepJournal(path).resume(5)
