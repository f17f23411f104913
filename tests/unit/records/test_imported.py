"""verl's dumps as records."""

import json
from pathlib import Path
from typing import Any

import pytest

from verl_ext.evaluation.samples import read_samples
from verl_ext.records import store
from verl_ext.records.__main__ import main
from verl_ext.records.imported import OF_ROLLOUTS, import_dumps, record_of
from verl_ext.runs.folder import find_run, judged_files

CODE = "Let me see. <code>\nprint(1/0)\n</code>\n<interpreter>\nZeroDivisionError: zero\n</interpreter>\nSo \\boxed{7}"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(7)"}}\n</tool_call>'
HERMES = f"I run it. {CALL}\nuser\n<tool_response>\n7\n</tool_response>\nassistant\nIt is \\boxed{{7}}"


def validated(problem: str, session: int, acc: float | None, **changes: Any) -> dict[str, Any]:
    """Return a row as verl's PPOTrainer._write_generations (0.9.1) writes it, with our reward manager's keys."""
    return {
        "input": f"user\n{problem}\nassistant\n",
        "output": CODE,
        "gts": "7",
        "score": 2.0 * (acc or 0.0) - 1,
        "step": 40,
        "reward": 2.0 * (acc or 0.0) - 1,
        "reward_base": 1.0,
        "acc": acc,
        "pred": "7.0",
        "normalised": "7",
        "verdict": "correct",
        "method": "integer",
        "data_source": "mine",
        "id": "",
        "problem": "0f3a",
        "finish_reason": "answer",
        "tool_calls": 1.0,
        "tool_errors": 1.0,
        "tool_timeouts": 0.0,
        "model_turns": 2.0,
        "response_tokens": 20.0,
        "truncated": 0.0,
        "unverified": 0.0,
        "sandbox_failure": 0.0,
        "uid": f"u-{problem}_{session}_0",
    } | changes


def trained(problem: str, session: int, score: float) -> dict[str, Any]:
    """Return a row of trainer.rollout_data_dir: no `acc`, and no sign of a failure except the reward 0."""
    row = {"input": f"user\n{problem}\nassistant\n", "output": HERMES, "gts": "7", "score": score, "step": 3}
    return row | {"uid": f"u-{problem}_{session}_0"}


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_validations_are_a_run_with_the_samples_of_the_dumps(tmp_path, capsys):
    for step in (5, 40):
        write(tmp_path / "dumps" / f"{step}.jsonl", [validated("a", i, i, step=step) for i in (0, 1)])
    out = tmp_path / "out"
    main(["import", str(tmp_path / "dumps"), str(out)])
    printed = capsys.readouterr().out
    assert f"{out}: 4 responses of 2 validations\n" in printed and "no response mask and no calls" in printed
    assert OF_ROLLOUTS not in printed and find_run(out).kind == "rl"
    assert judged_files(out) == [store.path_of(out, "trajectories", step, validate=True) for step in (5, 40)]
    wrong, right = read_samples(judged_files(out)[-1])
    assert (right.uid, right.acc, right.score, right.pred, right.normalised) == ("u-a_1_0", 1.0, 1.0, "7.0", "7")
    assert (right.prompt, right.output, right.ground_truth) == ("user\na\nassistant\n", CODE, "7")
    assert (right.data_source, right.problem, right.end_reason, right.failure) == ("mine", "0f3a", "answer", None)
    assert (right.tool_calls, right.tool_errors, right.model_turns, right.response_tokens) == (1, 1, 2, 20)
    assert wrong.acc == 0.0 and wrong.problem_key() == right.problem_key()
    row = store.read(judged_files(out)[-1]).to_pylist()[0]
    assert json.loads(row["reward_parts"])["reward_base"] == 1.0 and row["verdict"]["rule"] == "integer"


def test_rollouts_have_the_reward_only_and_what_it_does_not_tell_is_not_judged(tmp_path):
    """+1 right, +0.4 right with a length penalty, -1 and -0.6 (all of the tool bonus) wrong, 0 failed, -0.2 either."""
    scores = [1.0, 0.4, -1.0, -0.6, -0.60000002, 0.0, -0.2]
    dump = write(tmp_path / "3.jsonl", [trained("a", number, score) for number, score in enumerate(scores)])
    assert OF_ROLLOUTS in import_dumps(dump, tmp_path / "out")
    (file,) = store.files_of(tmp_path / "out")
    rows = store.read(file.path).to_pylist()
    assert [row["acc"] for row in rows] == [1.0, 1.0, 0.0, 0.0, 0.0, None, None]
    assert [row["trained_step"] for row in rows] == [3] * 7 and not file.validate and file.step == 3
    assert len({row["problem"] for row in rows}) == 1 and [row["session"] for row in rows] == [*range(7)]


def test_of_an_episode_with_several_rows_and_of_several_attempts_the_last_counts(tmp_path):
    rows = [validated("a", 0, 0.0, uid="u_0_1", pred="last"), validated("a", 0, 1.0, uid="u_0_0")]
    rows += [validated("a", 1, None, finish_reason="server_failure", uid="u_1_0"), validated("a", 1, 1.0, uid="u_1_0")]
    import_dumps(write(tmp_path / "1.jsonl", rows), tmp_path / "out")
    samples = read_samples(judged_files(tmp_path / "out")[0])
    assert [(sample.uid, sample.pred, sample.acc) for sample in samples] == [
        ("u_0_0", "last", 0.0),
        ("u_1_0", "7.0", 1.0),
    ]


def test_rows_without_uids_are_grouped_by_their_problem(tmp_path):
    """As older releases of verl wrote them."""
    rows = [{k: v for k, v in trained(name, 0, 1.0).items() if k not in ("uid", "step")} for name in "aab"]
    import_dumps(write(tmp_path / "12.jsonl", rows), tmp_path / "out")
    found = [(row["uid"], row["session"], row["step"]) for row in store.rows(tmp_path / "out")]
    assert [(session, step) for _, session, step in found] == [(0, 12), (1, 12), (0, 12)]
    assert found[0][0] == found[1][0] != found[2][0]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ({"sandbox_failure": 1.0, "finish_reason": "sandbox_failure"}, "sandbox_failure"),
        ({"unverified": 1.0}, "unverified"),
        ({"acc": None}, "unverified"),
        ({"acc": None, "finish_reason": "server_failure"}, "server_failure"),
        ({"finish_reason": "aborted"}, "server_failure"),
        ({"sandbox_failure": 1.0, "unverified": 1.0}, "sandbox_failure"),
    ],
)
def test_a_sample_that_infrastructure_failed_has_no_score_and_is_named(tmp_path, failure, kind):
    import_dumps(write(tmp_path / "1.jsonl", [validated("a", 0, 0.0) | failure]), tmp_path / "out")
    (sample,) = read_samples(judged_files(tmp_path / "out")[0])
    (row,) = store.rows(tmp_path / "out")
    assert (sample.failure, row["acc"], row["score"], row["fault"]) == (kind, None, None, "infrastructure")


@pytest.mark.parametrize(
    ("output", "turns", "calls"),
    [
        (CODE, "model tool model", [("print(1/0)", "error", "ZeroDivisionError: zero")]),
        (HERMES, "model tool model", [("print(7)", "ok", "7")]),
        (f"{CALL}\n{CALL}\nuser\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nassistant\nx",
         "model tool tool model", [("print(7)", "ok", "1"), ("print(7)", "ok", "2")]),
        ("<code>\nprint(7)\n</code>\n<interpreter>\n7\n</interpreter>\n", "model tool model",  # its end token alone
         [("print(7)", "ok", "7")]),
        ("<code>\nprint(1)", "model", [("print(1)", "not_run", None)]),
        ("<interpreter>forged", "tool", []),
        ("<tool_call>{", "model", [("{", "not_run", None)]),
        ("<code>print('<interpreter>')</code><interpreter>\n<code>\n</interpreter>", "model tool",
         [("print('<interpreter>')", "ok", "<code>")]),
        ("<code>print}\nuser\n<interpreter>\nFormatError: no </code>\n</interpreter>\nassistant\nx", "model tool model",
         [("print}", "error", "FormatError: no </code>")]),
        ("", "model", []),  # its end token alone
        ("\t", "model", []),
    ],
)  # fmt: skip
def test_turns_and_calls_are_what_stands_between_the_tags(output: str, turns: str, calls: list) -> None:
    record = record_of(trained("a", 0, 1.0) | {"output": output})
    assert " ".join(turn["role"] for turn in record["turns"]) == turns
    assert [(call["code"], call["status"], call.get("stdout")) for call in record["calls"]] == calls
    assert all(call["turn"] == 0 for call in record["calls"])


@pytest.mark.parametrize(
    ("counts", "statuses"),
    [
        ((1, 1, 0), [("error", "model")]),
        ((1, 1, 1), [("timeout", "model")]),
        ((1, 0, 0), [("ok", None)]),  # the program printed what looks like an error
        ((0, 0, 0), [("not_run", None)]),  # the model wrote the reply itself
        ((3, 2, 0), [("error", "model"), ("error", "model"), ("ok", None)]),
    ],
)
def test_as_many_calls_ran_and_failed_as_the_reward_manager_counted(counts, statuses) -> None:
    numbers = dict(zip(("tool_calls", "tool_errors", "tool_timeouts"), map(float, counts), strict=True))
    calls = record_of(validated("a", 0, 0.0, **numbers))["calls"]
    assert [(call["status"], call["fault"]) for call in calls] == statuses


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({key: value for key, value in trained("a", 0, 1.0).items() if key != "output"}, "no key 'output'"),
        (validated("a", 0, 1.5), "acc is 1.5, not a number from 0 to 1 or null"),
        (trained("a", 0, 1.0) | {"input": None}, "input is None, not a string"),
        (trained("a", 0, 1.0) | {"score": None}, "float"),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line(tmp_path, broken, message):
    path = write(tmp_path / "40.jsonl", [trained("a", 0, 1.0), broken])
    with pytest.raises(SystemExit, match=f"40.jsonl, line 2: {message}.*Expected a row of verl's dumps"):
        main(["import", str(path), str(tmp_path / "out")])


def test_nothing_is_written_over(tmp_path):
    dump = write(tmp_path / "1.jsonl", [validated("a", 0, 1.0, step=1)])
    import_dumps(dump, tmp_path / "out")
    with pytest.raises(SystemExit, match="val_000001.parquet exists. Import into another folder"):
        main(["import", str(dump), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="No dumps at .*nowhere"):
        main(["import", str(tmp_path / "nowhere"), str(tmp_path / "out")])


def test_half_a_character_that_a_model_wrote_is_spelled_out(tmp_path):
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(\'\\ud83d\')"}}</tool_call>'
    import_dumps(
        write(tmp_path / "1.jsonl", [validated("a", 0, 1.0, output=f"\ud800 {call}", pred="\ud800")]), tmp_path
    )
    (row,) = store.rows(tmp_path)
    assert "\\ud800" in row["turns"][0]["text"] and "\\ud83d" in row["calls"][0]["code"]
    assert row["verdict"]["extracted"] == "\\ud800"
