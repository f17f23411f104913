import json
import os
from datetime import datetime

import pytest

from verl_ext.runs.metrics import read_metrics, start_up, step_times, warm_step


def write(path, rows, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}) for step, data in rows]
    path.write_text("".join(line + "\n" for line in lines) + tail, encoding="utf-8")
    return path


def test_a_repeated_step_takes_the_last_value_key_by_key(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [(1, {"a": 1.0, "b": 1.0}), (2, {"a": 2.0}), (1, {"a": 5.0})])
    metrics = read_metrics([path])
    assert metrics.steps == {1: {"a": 5.0, "b": 1.0}, 2: {"a": 2.0}}
    assert metrics.curve("b") == ([1], [1.0])


def test_a_resumed_run_wins_whatever_its_file_is_called_or_dated(tmp_path):
    first = write(tmp_path / "metrics-9.jsonl", [(1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0})])
    resumed = write(tmp_path / "metrics-10.jsonl", [(3, {"a": 30.0}), (4, {"a": 40.0})])
    os.utime(resumed, (0, 0))
    assert read_metrics([resumed, first]).curve("a") == ([1, 2, 3, 4], [1.0, 2.0, 30.0, 40.0])


@pytest.mark.parametrize(("late", "early"), [("metrics-20.jsonl", "metrics-10.jsonl"), ("a.jsonl", "b.jsonl")])
def test_of_two_starts_from_the_same_step_the_later_wins(tmp_path, late, early):
    """By the time of the launcher's start in the name, else by when it was written."""
    late = write(tmp_path / late, [(1, {"a": 2.0})])
    early = write(tmp_path / early, [(1, {"a": 1.0})])
    os.utime(late if early.name == "metrics-10.jsonl" else early, (0, 0))
    assert read_metrics([late, early]).curve("a") == ([1], [2.0])


def test_a_start_that_resumes_a_checkpoint_drops_the_later_steps_of_earlier_starts(tmp_path):
    """A second start begins with the validation of its checkpoint; a third one only validates."""
    first = write(tmp_path / "metrics-10.jsonl", [timed(step, 9, 1) for step in range(1, 8)])
    resumed = [(4, {"val": 0.5}), timed(5, 7, 1)]
    second = write(tmp_path / "metrics-20.jsonl", resumed)
    third = write(tmp_path / "metrics-30.jsonl", [(2, {"val": 0.25})])
    back = write(tmp_path / "metrics-40.jsonl", [timed(3, 5, 1)])
    assert sorted(read_metrics([first, second, third, back]).steps) == [1, 2, 3]
    metrics = read_metrics([first, second, third])
    assert sorted(metrics.steps) == [1, 2, 3, 4, 5] and metrics.cold == {1, 2, 5}
    assert metrics.curve("val") == ([2, 4], [0.25, 0.5])
    assert metrics.steps[4].keys() > {"val", "timing_s/step"} and metrics.steps[5]["timing_s/gen"] == 7
    assert [tuple(start) for start in metrics.starts] == [(0, 7), (4, 5)]


def test_values_that_are_not_numbers_or_useless_are_left_out(tmp_path):
    """A mean of some 1e308 overflows, and an integer of 400 digits is no float."""
    wrong = {"a": None, "b": "x", "c": float("nan"), "e": -float("inf"), "f": 10**400, "g": -1e308}
    path = write(tmp_path / "metrics.jsonl", [(1, {**wrong, "d": 1})])
    assert read_metrics([path]).steps == {1: {"d": 1.0}}


def test_entropy_comes_from_the_update_if_nothing_else_logs_it(tmp_path):
    path = write(
        tmp_path / "metrics.jsonl",
        [
            (1, {"actor/entropy_loss": 0.5}),
            (2, {"actor/entropy": 0.3}),
            (3, {"actor/entropy": 0.2, "actor/entropy_loss": 0.1}),
        ],
    )
    assert read_metrics([path]).curve("actor/entropy") == ([1, 2, 3], [0.5, 0.3, 0.2])


def test_a_half_written_last_line_is_dropped_and_one_in_the_middle_is_an_error(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [(1, {"a": 1.0})], tail='{"step": 2, "da')
    assert read_metrics([path]).steps == {1: {"a": 1.0}}
    path.write_text('{"step": 1, "da\n{"step": 2, "data": {}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="metrics.jsonl, line 1"):
        read_metrics([path])


@pytest.mark.parametrize("line", ['{"step": 1, "acc": 0.5}', '{"data": {}}', "[1]", "7"])
def test_a_line_that_is_not_of_the_file_logger_is_named(tmp_path, line):
    path = write(tmp_path / "metrics.jsonl", [(1, {"a": 1.0})], tail=f"{line}\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: .* Expected a line of verl's file logger"):
        read_metrics([path])


def timed(step, gen, update, other=0.5, adv=0.001):
    parts = {"timing_s/gen": gen, "timing_s/update_actor": update, "timing_s/adv": adv}
    return step, parts | {"timing_s/step": gen + update + adv + other, "timing_s/testing": 99.0}


def test_step_time_is_split_into_parts_that_add_up(tmp_path):
    rl = read_metrics([write(tmp_path / "m.jsonl", [timed(1, 4.0, 2.0), timed(2, 1.0, 2.0)])])
    steps, parts = step_times(rl)
    assert steps == [1, 2]
    assert list(parts) == ["gen", "update_actor", "other"]  # adv is below 1%, testing is outside the step
    assert parts["gen"] == [4.0, 1.0]
    assert parts["other"] == pytest.approx([0.501, 0.501])


def test_warm_steps_leave_out_the_first_two_of_every_process(tmp_path):
    first = write(tmp_path / "m1.jsonl", [timed(1, 90, 1), timed(2, 80, 1), timed(3, 1, 1), timed(4, 2, 1)])
    resumed = write(tmp_path / "m2.jsonl", [timed(4, 70, 1), timed(5, 60, 1), timed(6, 3, 1), timed(7, 5, 1)])
    warm = warm_step(read_metrics([first, resumed]))
    assert warm["num_steps"] == 3  # steps 3, 6, 7
    assert warm["split_s"]["gen"] == 3
    assert warm["median_s"] == pytest.approx(3 + 1 + 0.5 + 0.001)


def test_two_steps_are_too_few_for_a_warm_one(tmp_path):
    assert warm_step(read_metrics([write(tmp_path / "m.jsonl", [timed(1, 4, 1), timed(2, 4, 1)])])) is None


def test_start_up_is_split_by_what_the_log_says_of_the_latest_start(tmp_path):
    def logged(second: float, text: str) -> str:
        return f"(TaskRunnerV1 pid=7) INFO:{datetime.fromtimestamp(second):%Y-%m-%d %H:%M:%S},500:{text}\n"

    lines = []
    for start in (1_700_000_000, 1_700_001_000):  # the second one resumed
        write(tmp_path / f"metrics-{start}.jsonl", [timed(1, 4, 1), timed(2, 3, 1)])
        for i, text in enumerate(
            ["Started a local Ray instance.", "Total training steps: 30", "actor and ref model engine initialized"]
        ):
            lines.append(logged(start + (10, 12, 15)[i], text))
        lines += ["no time of day: ready to fit\n", logged(start + 23, "all initialize finished, ready to fit")]
        lines += [logged(start + 24, "update_weights done"), logged(start + 40, "update_weights done")]
    (tmp_path / "log.txt").write_text("".join(lines))

    phases = start_up(tmp_path)
    assert list(phases.values()) == pytest.approx([10.5, 2, 3, 8, 1, 5.501])
    assert list(phases)[-1] == "first step"

    (tmp_path / "log.txt").write_text("".join(lines[:4]))  # interrupted
    assert start_up(tmp_path) is None
    assert start_up(tmp_path / "nowhere") is None
