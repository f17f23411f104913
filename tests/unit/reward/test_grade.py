import json
import subprocess
import sys
import time

import psutil
import pytest

from tests.processes import kill_tree
from verl_ext.episode import Episode, EpisodeKey, Turn
from verl_ext.records import store
from verl_ext.records.trajectories import problem_columns, to_record
from verl_ext.reward import Score
from verl_ext.reward.grade import find_files, judge_by_math_verify, main, read_row

ROWS = [
    {"response": r"\boxed{42}", "ground_truth": "42", "id": 1},
    {"messages": [{"role": "assistant", "content": None}, {"role": "tool", "content": r"\boxed{1}"},
                  {"role": "assistant", "content": r"\boxed{2}"}], "ground_truth": "1"},
    {"prompt": "1/2?", "response": r"\boxed{0.5}", "ground_truth": "1/2", "score": -1.0, "acc": 0.0, "verdict": "no"},
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
    command = [sys.executable, "-m", "verl_ext.reward", "--input", str(source), "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    graded = read(output)
    assert [row["verdict"] for row in graded] == ["correct", "wrong", "correct", "no_answer", "wrong"]
    assert [row["acc"] for row in graded] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert graded[0] == ROWS[0] | {"acc": 1.0, "pred": "42", "verdict": "correct", "method": "integer"}
    assert graded[2]["recorded"] == {"score": -1.0, "acc": 0.0, "verdict": "no"}
    assert "5 rows, mean acc 0.4000: 2 correct, 2 wrong, 1 no_answer" in result.stdout
    assert "recorded wrong, now correct: 1" in result.stdout
    assert "5 rows graded" in result.stderr and "Warning" not in result.stderr


@pytest.mark.nightly
def test_a_command_that_is_killed_leaves_no_process(tmp_path):
    source, output = write(tmp_path / "rows.jsonl", ROWS * 4000), tmp_path / "graded.jsonl"
    command = [sys.executable, "-m", "verl_ext.reward", "--workers", "2"]
    command += ["--input", str(source), "--output", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not (output.is_file() and output.stat().st_size):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    try:
        assert not psutil.wait_procs(workers, timeout=10)[1]
    finally:
        for worker in workers:
            kill_tree(worker.pid)


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


def test_output_that_is_no_graded_file_is_left_alone(tmp_path, capsys):
    output = write(tmp_path / "notes.jsonl", [{"note": 1}])
    assert grade(write(tmp_path / "rows.jsonl", ROWS[:1]), output) == 1
    assert "notes.jsonl has the keys note: expected" in capsys.readouterr().err
    assert read(output) == [{"note": 1}]


BROKEN = [
    ('{"response": "x", "ground_truth": " "}', "cannot be graded: The ground truth is empty"),
    ('{"response": "x", "ground_truth": ["1", "2"]}', "of type list: expected text or a number"),
    ('{"response": "x", "ground_truth": {"answer": "1"}}', "of type dict: expected text or a number"),
    ('{"response": "x", "ground_truth": NaN}', "of type float: expected text or a number"),
    ('{"response": "x"}', "has the keys response: expected"),
    ('{"response": 3, "ground_truth": "1"}', "has the keys response, ground_truth: expected"),
    ('{"messages": "x", "ground_truth": "1"}', "another form than verl's"),
    ('{"messages": [3], "ground_truth": "1"}', "another form than verl's"),
    ('{"response": "x", "reward_model": "1"}', "another form than verl's"),
    ("{broken", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1). Expected a JSON object"),
    ("", "Expected a JSON object, got ''"),
    ("[1, 2]", "it is not a JSON object. Expected a JSON object, got '[1, 2]'"),
    ("null", "it is not a JSON object"),
    ("[" * 100_000, "maximum recursion depth exceeded"),
]


def test_broken_rows_are_errors_in_their_places_and_the_others_are_graded(tmp_path, capsys):
    source, output = tmp_path / "rows.jsonl", tmp_path / "graded.jsonl"
    good = json.dumps(ROWS[0])
    source.write_text("".join(f"{good}\n{good}\n{line}\n" for line, _ in BROKEN))
    assert grade(source, output) == 1
    graded = read(output)
    assert [row["verdict"] for row in graded] == ["correct", "correct", "error"] * len(BROKEN)
    for number, (row, (line, reason)) in enumerate(zip(graded[2::3], BROKEN, strict=True), 1):
        assert f"{source}:{3 * number}" in row["error"] and reason in row["error"], line[:80]
        assert (row["acc"], row["pred"]) == (None, "")
    printed = capsys.readouterr()
    assert f"error: {len(BROKEN)} rows could not be graded" in printed.err and graded[2]["error"] in printed.err
    assert "42 rows, mean acc 1.0000: 28 correct, 14 error" in printed.out


def test_bytes_that_are_no_text_and_half_a_surrogate_pair_stop_nothing(tmp_path):
    source, output = tmp_path / "rows.jsonl", tmp_path / "graded.jsonl"
    half = b'{"response": "\\\\boxed{42} \\ud800", "ground_truth": "42"}'
    source.write_bytes(b'{"response": "\xff", "ground_truth": "1"}\n' + half + b"\n")
    assert grade(source, output) == 1
    assert [row["verdict"] for row in read(output)] == ["error", "correct"]
    assert read(output)[1]["response"].endswith("\ud800")


def test_error_rows_are_tried_again_and_the_others_are_left(tmp_path, capsys):
    good = json.dumps(ROWS[0])
    source, output = tmp_path / "rows.jsonl", tmp_path / "graded.jsonl"
    source.write_text("\n".join([good, "{", good, '{"response": "x"}']) + "\n")
    assert grade(source, output) == 1
    lines = output.read_text().splitlines(keepends=True)
    output.write_text(lines[0].replace('"id": 1', '"id": 1, "mark": 1') + "".join(lines[1:]))
    capsys.readouterr()

    assert grade(source, output) == 1  # the same input: the same errors
    assert [row["verdict"] for row in read(output)] == ["correct", "error", "correct", "error"]
    source.write_text("\n".join([good, json.dumps(ROWS[3]), good, json.dumps(ROWS[0]), good]) + "\n")
    capsys.readouterr()
    assert grade(source, output) == 0
    graded = read(output)
    assert [row["verdict"] for row in graded] == ["correct", "no_answer", "correct", "correct", "correct"]
    assert graded[0]["mark"] == 1 and not any("error" in row for row in graded)
    assert "3 rows graded" in capsys.readouterr().err


class FailingVerifier:
    """A service that is gone, from the third row on."""

    def __init__(self, config):
        del config

    async def verify(self, response_text, ground_truth, sample):
        if sample["id"] == 2:
            raise ConnectionError("no server")
        return Score(1.0, "", "correct", "fake")


def test_failure_of_a_service_keeps_the_rows_before_it_and_goes_on_there(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(f"reward: {{reward_kwargs: {{verifiers: {{'own': {__name__}.FailingVerifier}}}}}}\n")
    rows = [{"response": "x", "ground_truth": "1", "data_source": "own", "id": i} for i in range(5)]
    source, output = write(tmp_path / "rows.jsonl", rows), tmp_path / "graded.jsonl"
    assert grade(source, output, "--config", str(config)) == 1
    assert "rows.jsonl:3: ConnectionError('no server')" in capsys.readouterr().err
    assert [row["id"] for row in read(output)] == [0, 1]
    write(source, [row | {"id": row["id"] + 10 if row["id"] == 2 else row["id"]} for row in rows])
    assert grade(source, output, "--config", str(config)) == 0
    assert [row["id"] for row in read(output)] == [0, 1, 12, 3, 4]


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


ODD = [
    *(
        {"recorded": each}
        for each in ("yes", 1, None, ["a"], {"acc": "1.0"}, {"acc": [1]}, {"verdict": ["x"], "acc": 1})
    ),
    *({"upstream_correct": each} for each in ("yes", 2, [True], {"a": 1}, None, 1.0)),
    *({"math_verify": each} for each in ("yes", 2, [True], {"a": 1}, None)),
    *({"acc": each} for each in ("yes", [1], None, {"a": 1}, float("nan"))),
    *({"verdict": each} for each in (["x"], {"a": 1}, 7)),
    {"error": ["x"], "line": 1},
]


def test_columns_that_are_called_as_ours_end_no_summary(tmp_path, capsys):
    row = {"response": r"\boxed{7}", "ground_truth": "7"}
    rows = [*(row | odd for odd in ODD), row | {"upstream_correct": True}, row | {"upstream_correct": False}]
    assert grade(write(tmp_path / "rows.jsonl", rows), tmp_path / "graded.jsonl") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{len(rows)} rows, mean acc 1.0000: {len(rows)} correct\n")
    assert "recorded right, now correct: 2" in printed and "recorded wrong, now correct: 2" in printed
    assert "math-verify" not in printed or "agrees on" in printed


def test_math_verify_is_called_as_its_users_do():
    assert judge_by_math_verify(r"so \boxed{\frac{1}{2}}", "0.5", r"\frac{1}{2}") is True
    assert judge_by_math_verify(r"so \boxed{3}", "0.5", "3") is False


def test_files_of_a_folder_are_read_in_the_order_of_their_numbers(tmp_path):
    for step in (10, 2, 0):
        (tmp_path / f"{step}.jsonl").touch()
    assert [path.name for path in find_files([tmp_path])] == ["0.jsonl", "2.jsonl", "10.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has neither .jsonl files nor a run"):
        find_files([tmp_path / "empty"])


def test_a_row_of_verls_dumps_is_an_error_that_says_what_reads_them(tmp_path, capsys):
    dump = write(tmp_path / "0.jsonl", [{"input": "1/2?", "output": r"\boxed{0.5}", "gts": "1/2", "score": -1.0}])
    assert grade(dump, tmp_path / "graded.jsonl") == 1
    assert "`retool records import` makes records of verl's dumps" in capsys.readouterr().err


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_run_and_the_quickstart_above_it_give_the_runs_responses(tmp_path):
    """Never its metrics, which are JSON lines in the same folder."""
    run, records = tmp_path / "quickstart/rl", "records/trajectories"
    touch(run, "metrics-1.jsonl", "global_step_2/actor/x", f"{records}/step_000002.parquet")
    assert find_files([run]) == find_files([run.parent]) == [run / records / "step_000002.parquet"]
    touch(run, f"evaluation/global_step_2/{records}/val_000002.parquet")
    evaluated = [run / "evaluation/global_step_2" / records / "val_000002.parquet"]
    assert find_files([run.parent]) == find_files([run]) == find_files(evaluated) == evaluated
    touch(run, f"{records}/val_000010.parquet", f"{records}/val_000002.parquet", f"{records}/light_000001.parquet")
    validated = [run / records / "val_000002.parquet", run / records / "val_000010.parquet"]
    assert find_files([run.parent]) == find_files([run]) == validated
    sides = [run.parent / "eval" / side / records / "val_000000.parquet" for side in ("before", "after")]
    touch(run.parent, *(str(side.relative_to(run.parent)) for side in sides))
    assert find_files([run.parent]) == sides and find_files([run]) == validated


def test_the_records_of_a_run_are_graded_without_end_tokens_and_what_the_tools_said(tmp_path):
    run, output = tmp_path / "run", tmp_path / "graded.jsonl"
    turns = [
        {"role": "model", "text": "<code>1</code>"},
        {"role": "tool", "text": r"\boxed{7}"},
        {"role": "model", "text": r"\boxed{42}<|im_end|>", "end": "<|im_end|>"},
    ]
    row = {"uid": "u", "session": 1, "step": 3, "turns": turns, "ground_truth": "42", "acc": 0.0}
    raised = {"uid": "u", "session": 0, "end_reason": "raised"}
    refused = {"uid": "u", "session": 2, "end_reason": "aborted", "turns": [], "ground_truth": "42"}
    rows = [raised, refused, row | {"verdict": {"text": "wrong"}}]
    store.write(store.path_of(run, "trajectories", 3), "trajectories", rows)
    assert grade(run, output) == 0
    (graded,) = read(output)
    assert (graded["verdict"], graded["pred"], graded["uid"], graded["session"]) == ("correct", "42", "u", 1)
    assert graded["response"] == "<code>1</code>\n\\boxed{42}"
    assert graded["recorded"]["acc"] == 0.0 and graded["recorded"]["verdict"] == "wrong"
    assert grade(store.path_of(run, "trajectories", 3), tmp_path / "file.jsonl") == 0


def test_records_are_graded_by_the_verifier_of_their_ability(tmp_path):
    sample = {"uid": "u", "data_source": "own", "ability": "multiple_choice", "raw_prompt": "Which?"}
    sample["reward_model"] = {"ground_truth": "B"}
    turn = Turn("The answer is B.", 5, 0, None, 1.0, 1.0)
    episode = Episode(EpisodeKey("u", 0), finish_reason="answer", turns=[turn], prompt="Which?")
    row = problem_columns(sample, validate=True) | to_record(episode)
    store.write(store.path_of(tmp_path / "run", "trajectories", 3), "trajectories", [row])
    assert grade(tmp_path / "run", tmp_path / "graded.jsonl") == 0
    (graded,) = read(tmp_path / "graded.jsonl")
    assert (graded["verdict"], graded["method"], graded["prompt"]) == ("correct", "choice", "Which?")


def test_run_without_responses_is_refused(tmp_path):
    touch(tmp_path, "metrics-1.jsonl")
    with pytest.raises(ValueError, match="nor a run with responses"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    ("config", "verdict"),
    [
        ("reward: {reward_kwargs: {verifiers: {'own/*': verl_ext.reward.verifiers.exact.ExactVerifier}}}", "wrong"),
        ("reward: {reward_kwargs: {verifiers: {'own/*': '${oc.env:NO_SUCH_VARIABLE,exact}'}}}", "wrong"),
        ("retool: {domains: {own/set: {verifier: '${oc.env:NO_SUCH_VARIABLE,exact}'}}}", "wrong"),
        ("retool: {domains: {other: {verifier: exact}}}", "correct"),
        ("", "correct"),
    ],
)
def test_verifiers_of_a_runs_config_are_taken(tmp_path, config, verdict):
    """As text 0.5 is not 1/2."""
    path = tmp_path / "config.yaml"
    path.write_text(config)
    row = {"response": r"\boxed{0.5}", "ground_truth": "1/2", "data_source": "own/set"}
    assert grade(write(tmp_path / "rows.jsonl", [row]), tmp_path / "graded.jsonl", "--config", str(path)) == 0
    assert read(tmp_path / "graded.jsonl")[0]["verdict"] == verdict
