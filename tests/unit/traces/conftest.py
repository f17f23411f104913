"""Traces of the tiny task with their golds, and the command that checks files of traces."""

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def make_rows(tiny_tools: Any) -> Any:
    """Rows of traces in the form of the tiny task, with gold: `make_rows(count, kinds)`."""
    task = tiny_tools.task

    def make(count: int, kinds: tuple[str, ...] = ("tool", "repair", "give_up", "mental"), seed: int = 0) -> list[dict]:
        rng = random.Random(seed)
        rows = []
        for number in range(count):
            problem = task.make_problem(rng, split="train")
            messages = task.make_trace(problem, kinds[number % len(kinds)], rng)
            row = {"id": f"t{number}", "messages": messages, "data_source": "tiny_tools", "ability": "math"}
            rows.append(row | {"reward_model": {"ground_truth": problem.answer}})
        return rows

    return make


@pytest.fixture(scope="module")  # a server that lived on would be among the processes that other tests count
def sandbox_url() -> Any:
    from verl_ext.sandbox.launch import running_server

    with running_server(workers=2) as url:
        yield url


@pytest.fixture
def check(tmp_path: Path, sandbox_url: str, capsys: pytest.CaptureFixture) -> Any:
    """Check rows by the command; returns the kept rows, the lines of the others, and what was printed."""
    from verl_ext.runs import jsonl, parquet
    from verl_ext.traces.__main__ import main

    def run(rows: list[dict] | Path, *options: str, name: str = "check", config: str = "tiny_dapo") -> tuple[Any, ...]:
        source = rows
        if isinstance(rows, list):
            source = tmp_path / f"{name}.jsonl"
            source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        out = tmp_path / "out" / "kept.parquet"
        command = ["check", str(source), "--config", config, "--out", str(out), "--sandbox-url", sandbox_url]
        with mock.patch.dict(os.environ):
            main([*command, *options])
        kept = parquet.read(out).to_pylist()
        return kept, list(jsonl.read(out.with_name("kept.left_out.jsonl"))), capsys.readouterr().out

    return run
