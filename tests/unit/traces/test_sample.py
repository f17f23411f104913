"""`sample` by a scripted chat endpoint and the real sandbox; then `check` reads the samples."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.chat_endpoint import PARAMETERS, ChatEndpoint, serving, solve
from verl_ext.sandbox.launch import running_server
from verl_ext.traces.__main__ import main

NO_TOOLS = tuple(name for name in PARAMETERS if name != "tools")


@pytest.fixture(scope="module")
def sandbox():
    with running_server(workers=2, options=("--preload=",)) as url:
        yield url


@pytest.fixture(scope="module")
def student(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    tokenizer.save_pretrained(folder)
    return folder


def write_problems(path: Path, count: int) -> Path:
    rows = [
        {"data_source": "sums", "prompt": [{"role": "user", "content": f"{number}+17?"}], "ability": "math"}
        | {"reward_model": {"style": "rule", "ground_truth": str(number + 17)}, "extra_info": {"index": number}}
        for number in range(count)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def arguments(endpoint: ChatEndpoint, student: Path, problems: Path, out: Path, sandbox: str) -> list[str]:
    argv = ["sample", "--chat", endpoint.url, "--tokenizer", str(student), "--config", "tiny_dapo", "--out", str(out)]
    return [*argv, "--data", str(problems), "--sandbox-url", sandbox, "--concurrency", "4"]


def test_a_teachers_samples_become_traces(student, tmp_path, sandbox, capsys):
    def say(messages: list[dict[str, Any]]) -> Any:
        text = str(solve(messages))
        return text.replace("\\boxed{19}", "\\boxed{20}")  # one is wrong

    problems, out, kept = write_problems(tmp_path / "sums.jsonl", 5), tmp_path / "samples", tmp_path / "kept.parquet"
    with serving(ChatEndpoint(say, takes=NO_TOOLS)) as endpoint:
        argv = arguments(endpoint, student, problems, out, sandbox)
        with pytest.raises(SystemExit, match="the budget is spent; the same command with a larger one continues"):
            main([*argv, "--n", "2", "--budget-requests", "8", "--concurrency", "1"])
        main([*argv, "--n", "2", "--price", "1", "2"])
    assert sum("+17?" in json.dumps(request) for request in endpoint.requests) == 20, "none is asked twice"
    printed = capsys.readouterr().out
    assert "8 of 10 samples are right; 4 of 5 problems solved" in printed
    assert "20 requests; tokens: 600 of prompts, 140 of responses; cost 0.00; 0 refusals" in printed
    main(["check", str(out), "--config", "tiny_dapo", "--out", str(kept), "--sandbox-url", sandbox])
    rows = pq.read_table(kept).to_pylist()
    assert Counter(row["problem"] for row in rows) == {f"{number}+17?": 1 for number in (0, 1, 3, 4)}, "no duplicates"
    messages = json.loads(rows[0]["messages"])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"].strip() == "17"
    left = [json.loads(line) for line in (tmp_path / "kept.left_out.jsonl").read_text().splitlines()]
    assert Counter(line["reason"] for line in left) == {"wrong_answer": 2, "duplicate": 4}


def test_what_is_missing_is_said(student, tmp_path, capsys):
    argv = ["sample", "--chat", "http://127.0.0.1:9/v1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="Give --data FILE"):
        main([*argv, "--tokenizer", str(student)])
    with pytest.raises(SystemExit):
        main(argv)
    assert "--chat needs --tokenizer DIR" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_command_that_is_killed_loses_no_problem_and_asks_none_twice_but_those_in_flight(student, tmp_path, sandbox):
    """Killed at twenty random moments, with four samples in flight."""
    asked: Counter[str] = Counter()

    def say(messages: list[dict[str, Any]]) -> Any:
        if len(messages) == 2:  # the system prompt and a problem
            asked[messages[-1]["content"]] += 1
        time.sleep(0.02)
        return solve(messages)

    problems, out, draw = write_problems(tmp_path / "sums.jsonl", 400), tmp_path / "samples", random.Random(0)
    with serving(ChatEndpoint(say, takes=NO_TOOLS)) as endpoint:
        command = [sys.executable, "-m", "verl_ext.traces"]
        command += arguments(endpoint, student, problems, out, sandbox)
        for _ in range(20):
            before, wanted = sum(asked.values()), draw.randrange(1, 25)
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                while sum(asked.values()) < before + wanted and process.poll() is None:
                    time.sleep(0.01)
                time.sleep(draw.random() / 10)
                process.send_signal(signal.SIGKILL)
        subprocess.run(command, check=True, env=os.environ)
    rows = [row for file in out.rglob("val_*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 400 == len({row["uid"] for row in rows}) and {row["acc"] for row in rows} == {1.0}
    assert len(asked) == 400 and sum(asked.values()) <= 400 + 20 * 4
