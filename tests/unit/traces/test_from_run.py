"""The command that makes traces of a finished run's records."""

import json
import os
from dataclasses import replace
from unittest import mock

import pytest

from verl_ext.episode import Reward
from verl_ext.records import store
from verl_ext.records.trajectories import problem_columns, to_record
from verl_ext.runs import jsonl, parquet
from verl_ext.traces.__main__ import main

RECORDER = {"enable": True, "token_share": 0.0, "keep_steps": 1, "max_gb": 1}
WRONG = Reward(-1.0, {"acc": 0.0, "pred": "3", "verdict": "wrong", "method": "integer"})
RIGHT = Reward(1.0, {"acc": 1.0, "pred": "2", "verdict": "correct", "method": "integer"})
PRAISED = Reward(0.5, RIGHT.info)  # right, with a penalty on its length


@pytest.fixture
def run(roll_out, tokenizer, encode, tmp_path):
    """A run of three steps, with a right and a wrong response in each, and one that was not judged in the last."""
    rewards = {1: [RIGHT, WRONG], 2: [PRAISED, WRONG], 3: [RIGHT, WRONG, None]}
    for step, each in rewards.items():
        rows = []
        for session, reward in enumerate(each):
            code = encode(f"<code>print(1+1{'+0' * session})</code>")
            turns = [code, [*encode("\\boxed{2}"), tokenizer.eos_token_id]]
            episode, *_ = roll_out(tokenizer, turns, ["2"], question=f"1+1? {step}", recorder=RECORDER)
            key = replace(episode.key, session=session)
            row = {"uid": "prompt-0", "global_steps": step, "data_source": "odd" if step % 2 else "even"}
            row |= {"raw_prompt": episode.opening["messages"], "reward_model": {"ground_truth": "2"}}
            columns = problem_columns(row, validate=False) | to_record(replace(episode, key=key, reward=reward))
            unjudged = {"end_reason": "verifier_unknown", "acc": None} if reward is None else {}
            rows.append(columns | unjudged)
        store.write(store.path_of(tmp_path / "run", "trajectories", step), "trajectories", rows)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("options", "kept", "reasons"),
    [
        ([], {"1: 0", "2: 0", "3: 0", "3: 2"}, ["wrong_answer"] * 3),
        (["--step", "2:"], {"2: 0", "3: 0", "3: 2"}, ["wrong_answer"] * 2),
        (["--step", "1"], {"1: 0"}, ["wrong_answer"]),
        (["--min-score", "0.75"], {"1: 0", "3: 0"}, []),
        (["--domain", "even"], {"2: 0"}, ["wrong_answer"]),
    ],
)
def test_a_run_gives_the_traces_that_are_right(options, kept, reasons, run, sandbox_url, tmp_path):
    """What no verifier could judge is judged now."""
    out = tmp_path / "kept.parquet"
    command = ["from-run", str(run), "--config", "tiny_dapo", "--out", str(out), "--sandbox-url", sandbox_url]
    with mock.patch.dict(os.environ):
        main([*command, *options])
    rows = parquet.read(out).to_pylist()
    found = [(json.loads(row["about"])["step"], row["id"]) for row in rows]
    assert {f"{step}: {name.split()[0].rpartition('_')[2]}" for step, name in found} == kept
    left = list(jsonl.read(out.with_name("kept.left_out.jsonl")))
    assert [line["reason"] for line in left] == reasons
    assert all(json.loads(row["messages"])[1]["content"].startswith("<code>print(1+1") for row in rows)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [([], ["wrong_answer", "not_a_trace"]), (["--min-score", "0"], []), (["--domain", "odd"], ["wrong_answer"] * 2)],
)
def test_a_response_that_is_not_wanted_is_not_left_out_whatever_it_is(options, reasons, run, sandbox_url, tmp_path):
    """Step 2, of the domain `even`, has one more that was cut off."""
    path, out = store.path_of(run, "trajectories", 2), tmp_path / "kept.parquet"
    rows = store.read(path).to_pylist()
    cut = rows[1] | {"session": 2, "end_reason": "max_tokens"}
    store.write(path, "trajectories", [*rows, cut])
    command = ["from-run", str(run), "--config", "tiny_dapo", "--out", str(out), "--sandbox-url", sandbox_url]
    with mock.patch.dict(os.environ):
        main([*command, *(options or ["--step", "2"])])
    assert [line["reason"] for line in jsonl.read(out.with_name("kept.left_out.jsonl"))] == reasons
    (counts,) = json.loads(parquet.columns_of(out).metadata[b"retool_traces"])["counts"].values()
    assert sum(count for reason, count in counts.items() if reason != "kept") == len(reasons)


@pytest.mark.parametrize("command", ["check", "from-run"])
def test_the_settings_are_those_of_the_run(command, run, sandbox_url, tmp_path):
    """Of an evaluation, too; without a sandbox no tool is there, so the calls of all traces are refused."""
    settings = {"settings": {}, "config": "tiny_dapo", "overrides": ["retool.environment=[]"]}
    (run / "settings.json").write_text(json.dumps(settings))
    out = tmp_path / "kept.parquet"
    with mock.patch.dict(os.environ), pytest.raises(SystemExit, match="No trace is kept"):
        main([command, str(run), "--out", str(out), "--sandbox-url", sandbox_url])
    left = list(jsonl.read(out.with_name("kept.left_out.jsonl")))
    assert {line["detail"] for line in left if line["reason"] == "not_a_trace"} == {
        "a call of 'code_interpreter'; the tools of the run are none"
    }


def test_a_step_that_the_run_has_not_is_said(run, tmp_path):
    for step, message in (("7", "no records of step 7. It has steps 1 to 3"), ("x", "--step is 'x': expected a step")):
        with pytest.raises(SystemExit, match=message):
            main(["from-run", str(run), "--config", "tiny_dapo", "--out", str(tmp_path / "a.parquet"), "--step", step])
