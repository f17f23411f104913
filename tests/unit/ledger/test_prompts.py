"""The table of a run's prompts, on made-up records; tests/unit/trainer/test_sampler_ledger.py has the real sampler."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from verl_ext.events import Drawn, Ended, EndedCounts
from verl_ext.ledger.prompts import PromptLedger, read_tally
from verl_ext.outcome import PromptEnd


def ledger(folder: Path) -> PromptLedger:
    """Two steps: a and b trained, c equal and waiting as a filler, d surplus, e and f open; two rollouts of each."""
    made = PromptLedger(folder)
    made.on_drawn(Drawn(1, {"a": "1+1", "b": "2+2", "c": "3+3"}, [2] * 3))
    end_step(made, 1, {"a": PromptEnd.TRAINED}, {"b"}, 2, {"a": {"trained": 2}})
    made.on_drawn(Drawn(2, {"d": "1+1", "e": "5+5", "f": "6+6"}, [2] * 3))
    ends = {"b": PromptEnd.TRAINED, "c": PromptEnd.EQUAL, "d": PromptEnd.SURPLUS}
    failed = {"trained": 1, "failed/aborted": 1}
    fates = {"b": failed, "c": {"filtered/equal": 2}, "d": {"filtered/surplus": 2}}
    end_step(made, 2, ends, {"c", "d"}, 4, fates)
    return made


def end_step(made: PromptLedger, step: int, ends: dict, seen, in_queue: int, fates=(), lost=(), raised=()) -> None:
    counts = EndedCounts(lost=Counter(lost), raised=set(raised))
    made.on_ended(Ended(step, counts, ends, dict(fates), frozenset(seen), in_queue))


def command(folder: Path) -> subprocess.CompletedProcess:
    arguments = [sys.executable, "-m", "verl_ext.ledger", str(folder)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60)


def test_the_command_prints_what_became_of_every_prompt(tmp_path: Path):
    ledger(tmp_path / "rl")
    (tmp_path / "rl" / "metrics-1.jsonl").write_text("")
    shown = command(tmp_path)  # a quickstart's folder
    assert shown.returncode == 0, shown.stderr
    counts = dict(line.split() for line in shown.stdout.splitlines()[1:9])
    expected = {"open": 2, "trained": 2, "equal": 1, "void": 0, "failed": 0, "stale": 0, "surplus": 1}
    assert counts == {"drawn": "6"} | {name: str(number) for name, number in expected.items()}
    assert "problems: 4 drawn 1x, 1 drawn 2x" in shown.stdout and "The books balance" in shown.stdout


def test_rollouts_by_fate_and_requests_that_lost_their_server_are_summed(tmp_path: Path):
    made = ledger(tmp_path)
    end_step(made, 3, {"d": PromptEnd.TRAINED}, {"c", "e"}, 3, {"d": {"trained": 2}}, {"a:80": 2})
    end_step(made, 4, {"f": PromptEnd.FAILED}, {"c", "e"}, 2, {}, {"b:80": 3, "a:80": 2}, raised={"f"})
    shown = command(tmp_path)
    counts = "5 trained, 2 open, 2 filtered/equal, 2 failed/raised, 1 failed/aborted"
    summed = f"rollouts: {counts}\nrequests that lost their server: 4 a:80, 3 b:80\n"
    assert summed in shown.stdout and shown.returncode == 0, shown.stdout
    PromptLedger(tmp_path).resume(3, set("cef"))  # what came after the checkpoint is forgotten
    assert read_tally(tmp_path).retries == {"a:80": 2} and read_tally(tmp_path).rollouts()["open"] == 4


NOT_ALL = "1 prompts ended with more or fewer rollouts than were submitted: e."
UNTRUE = "1 prompts trained without a rollout, or did not train although a rollout did: e."


@pytest.mark.parametrize(
    ("end", "fates", "fault"),
    [
        ("equal", {"filtered/equal": 1}, NOT_ALL),
        ("equal", {"filtered/equal": 2, "failed/aborted": 1}, NOT_ALL),
        ("failed", {}, NOT_ALL),
        ("equal", {"trained": 2}, UNTRUE),
        ("trained", {"stale": 2}, UNTRUE),
    ],
)
def test_a_rollout_that_is_missing_or_doubled_is_reported(tmp_path: Path, end: str, fates: dict, fault: str):
    """The rollouts of `e`; as many of another prompt too many or too few would not make it sum."""
    made = ledger(tmp_path)
    made.on_drawn(Drawn(3, {"g": "7+7"}, [2]))
    end_step(made, 3, {"e": PromptEnd(end)}, {"c", "d"}, 4, {"e": fates})
    assert read_tally(tmp_path).faults() == [fault] and fault in command(tmp_path).stdout


def test_rollouts_of_prompts_whose_number_nobody_noted_are_not_compared(tmp_path: Path):
    PromptLedger(tmp_path).resume(7, {"x"})  # a checkpoint of another folder
    made = PromptLedger(tmp_path)
    end_step(made, 8, {"x": PromptEnd.EQUAL}, (), 0, {"x": {"filtered/equal": 5}})
    assert read_tally(tmp_path).faults() == []


def test_a_folder_without_a_ledger_is_named(tmp_path: Path):
    shown = command(tmp_path)
    assert shown.returncode == 1 and f"No run at {tmp_path}: it holds nothing." in shown.stderr
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "metrics-1.jsonl").write_text("")
    shown = command(tmp_path)  # the run has ended no step
    assert shown.returncode == 1 and "rl has no prompts.jsonl: expected the folder of an RL run" in shown.stderr
    (tmp_path / "prompts.jsonl").write_text('{"step": 1}\n')
    assert "line 1" in command(tmp_path).stderr


@pytest.mark.parametrize(
    ("drawn", "ends", "seen", "in_queue", "fault"),
    [
        ({"e": "5+5"}, {}, "cdef", 4, "1 prompts were drawn twice under one name: e."),
        ({}, {"a": "trained"}, "cd", 4, "1 prompts ended twice, or ended and were never drawn: a."),
        ({}, {"x": "equal"}, "cd", 4, "1 prompts ended twice, or ended and were never drawn: x."),
        ({}, {"c": "equal"}, "cd", 4, "1 prompts ended twice, or ended and were never drawn: c."),
        ({"g": "7+7"}, {}, "cd", 4, "5 prompts are open or wait with an end, but the queue held 4."),
    ],
)
def test_what_does_not_add_up_is_named(tmp_path: Path, drawn: dict, ends: dict, seen: str, in_queue: int, fault: str):
    made = ledger(tmp_path)
    assert read_tally(tmp_path).faults() == []
    made.on_drawn(Drawn(3, drawn, [2] * len(drawn)))
    end_step(made, 3, {uid: PromptEnd(end) for uid, end in ends.items()}, set(seen), in_queue)
    assert read_tally(tmp_path).faults() == [fault]
    shown = command(tmp_path)
    assert shown.returncode == 1 and fault in shown.stdout


@pytest.mark.parametrize("end", [PromptEnd.TRAINED, PromptEnd.STALE, PromptEnd.EQUAL, PromptEnd.VOID])
def test_surplus_that_was_kept_can_still_be_trained_or_age(tmp_path: Path, end: PromptEnd):
    made = ledger(tmp_path)
    end_step(made, 3, {"d": PromptEnd.SURPLUS}, {"c", "d"}, 4, {"d": {"filtered/surplus": 2}})  # again
    end_step(made, 4, {"d": end}, {"c"}, 3, {"d": {"trained" if end is PromptEnd.TRAINED else "stale": 2}})
    assert read_tally(tmp_path).faults() == [] and read_tally(tmp_path).ends["d"] is end


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path):
    ledger(tmp_path)
    assert PromptLedger(tmp_path).resume(1, {"b", "c"}) == {"b": PromptEnd.OPEN}
    tally = read_tally(tmp_path)
    assert tally.step == 1 and tally.open == {"b", "c"} and not tally.faults()


def test_a_checkpoint_whose_records_are_gone_is_a_fault(tmp_path: Path):
    """Resumed from step 1, which forgets steps 2 and 3, then from the checkpoint of step 3 that was still there."""
    made = ledger(tmp_path)
    end_step(made, 3, {}, {"c", "d"}, 4)
    PromptLedger(tmp_path).resume(1, {"b", "c"})
    again = PromptLedger(tmp_path)
    again.resume(3, {"b", "c"})
    end_step(again, 4, {"b": PromptEnd.TRAINED}, {"c"}, 1, {"b": {"trained": 2}})
    (fault,) = read_tally(tmp_path).faults()
    assert fault.startswith("There is no record of steps 2 to 3: ")


def test_a_resumed_run_learns_what_was_decided_of_surplus_that_has_left_the_queue(tmp_path: Path):
    ledger(tmp_path)
    assert PromptLedger(tmp_path).resume(2, {"c"}) == {"c": PromptEnd.EQUAL, "d": PromptEnd.SURPLUS}


def test_prompts_of_a_queue_that_the_ledger_does_not_know_count_as_drawn(tmp_path: Path):
    assert PromptLedger(tmp_path).resume(7, {"x", "y"}) == {}  # a checkpoint of another folder
    tally = read_tally(tmp_path)
    assert tally.open == {"x", "y"} and not tally.faults()
    assert PromptLedger(tmp_path / "new").resume(0, set()) == {} and not (tmp_path / "new").exists()
