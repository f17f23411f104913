import json
import subprocess
import sys

import pytest

from verl_ext.reward.grade import find_files, judge_by_math_verify, main, read_row

ROWS = [
    {"response": r"\boxed{42}", "ground_truth": "42", "id": 1},
    {"messages": [{"role": "assistant", "content": None}, {"role": "tool", "content": r"\boxed{1}"},
                  {"role": "assistant", "content": r"\boxed{2}"}], "ground_truth": "1"},
    {"input": "1/2?", "output": r"\boxed{0.5}", "gts": "1/2", "score": -1.0, "acc": 0.0, "verdict": "wrong", "step": 3},
    {"response": "no box", "ground_truth": "42"},
    {"response": r"\boxed{0.5}", "ground_truth": "1/2", "data_source": "exact"},
]  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def grade(source, output, *options):
    return main(["--input", str(source), "--output", str(output), "--workers", "1", *options])


def test_command_grades_rows_of_every_form(tmp_path):
    source, output = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "graded.jsonl"
    command = [sys.executable, "-m", "verl_ext.reward.score", "--input", str(source), "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    graded = read(output)
    assert [row["verdict"] for row in graded] == ["correct", "wrong", "correct", "no_answer", "wrong"]
    assert [row["acc"] for row in graded] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert graded[0] == ROWS[0] | {"acc": 1.0, "pred": "42", "verdict": "correct", "method": "integer"}
    assert graded[2]["recorded"] == {"score": -1.0, "acc": 0.0, "verdict": "wrong"}
    assert "5 rows, mean acc 0.4000: 2 correct, 2 wrong, 1 no_answer" in result.stdout
    assert "recorded wrong, now correct: 1" in result.stdout
    assert "5 rows graded" in result.stderr and "Warning" not in result.stderr


def test_output_that_was_broken_off_is_continued(tmp_path, capsys):
    source, output = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "graded.jsonl"
    assert grade(source, output) == 0
    whole = output.read_text()
    lines = whole.splitlines(keepends=True)
    marked = lines[0].replace('"id": 1', '"id": 1, "mark": 1')  # not graded again
    output.write_text(marked + lines[1] + lines[2][:20])
    capsys.readouterr()
    assert grade(source, output) == 0
    assert "3 rows graded" in capsys.readouterr().err
    assert output.read_text() == marked + "".join(lines[1:])
    assert grade(source, output) == 0
    assert "0 rows graded" in capsys.readouterr().err


def test_output_of_another_input_is_left_alone(tmp_path, capsys):
    output = tmp_path / "graded.jsonl"
    assert grade(write(tmp_path / "a.jsonl", ROWS[:2]), output) == 0
    before = output.read_text()
    assert grade(write(tmp_path / "b.jsonl", ROWS[2:]), output) == 1
    assert grade(write(tmp_path / "c.jsonl", ROWS[:1]), output) == 1
    assert "graded from another input" in capsys.readouterr().err
    assert output.read_text() == before


def test_broken_row_is_named_and_rows_before_it_stay(tmp_path, capsys):
    rows = [ROWS[0]] * 40 + [{"response": "x", "ground_truth": " "}]
    output = tmp_path / "graded.jsonl"
    assert grade(write(tmp_path / "rows.jsonl", rows), output) == 1
    assert "rows.jsonl:41 cannot be graded: The ground truth is empty" in capsys.readouterr().err
    assert len(read(output)) == 32  # the first chunk


@pytest.mark.parametrize("row", [{"ground_truth": "1"}, {"response": "x"}, {"response": 3, "ground_truth": "1"}])
def test_row_without_response_or_ground_truth_raises(row):
    with pytest.raises(ValueError, match="rows.jsonl:7 has the keys"):
        read_row(row, "rows.jsonl:7")


def test_disagreements_with_math_verify_are_listed(tmp_path, capsys):
    rows = [
        {"response": r"\boxed{42}", "ground_truth": "42"},
        {"response": "The answer is 42.", "ground_truth": "42"},  # it takes the last number of the prose
        {"response": r"\boxed{9^{9^9}}", "ground_truth": "42"},
    ]
    output = tmp_path / "graded.jsonl"
    assert grade(write(tmp_path / "rows.jsonl", rows), output, "--compare", "math-verify") == 0
    assert [row["math_verify"] for row in read(output)] == [True, True, None]
    printed = capsys.readouterr().out
    assert "math-verify agrees on 1 of 2; only math-verify right: 1; only ours right: 0; not shown to it: 1" in printed
    assert f"{output}:2: math-verify right, ours no_answer by no_box: '' against '42'" in printed


def test_math_verify_is_called_as_its_users_do():
    assert judge_by_math_verify(r"so \boxed{\frac{1}{2}}", "0.5", r"\frac{1}{2}") is True
    assert judge_by_math_verify(r"so \boxed{3}", "0.5", "3") is False


def test_folder_of_dumps_is_read_in_the_order_of_its_steps(tmp_path):
    for step in (10, 2, 0):
        (tmp_path / f"{step}.jsonl").touch()
    assert [path.name for path in find_files([tmp_path])] == ["0.jsonl", "2.jsonl", "10.jsonl"]
    with pytest.raises(ValueError, match="holds no .jsonl file"):
        (tmp_path / "empty").mkdir()
        find_files([tmp_path / "empty"])


def test_verifiers_of_a_runs_config_are_taken(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "reward: {reward_kwargs: {verifiers: {'own/*': verl_ext.reward.verifiers.exact.ExactVerifier}}}\n"
    )
    row = {"response": r"\boxed{0.5}", "ground_truth": "1/2", "data_source": "own/set"}
    source = write(tmp_path / "rows.jsonl", [row])
    assert grade(source, tmp_path / "a.jsonl") == grade(source, tmp_path / "b.jsonl", "--config", str(config)) == 0
    assert [read(tmp_path / name)[0]["verdict"] for name in ("a.jsonl", "b.jsonl")] == ["correct", "wrong"]
