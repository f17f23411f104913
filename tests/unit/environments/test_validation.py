"""`retool environments`: what validate finds in rows, and what reverify finds in records."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from omegaconf import OmegaConf

from verl_ext.environments.__main__ import main
from verl_ext.environments.by_name import Environments
from verl_ext.environments.validation import Validator
from verl_ext.records import store
from verl_ext.reward.verifiers import Verifiers
from verl_ext.runs import parquet
from verl_ext.settings import CONFIGS, compose_run
from verl_ext.tasks import archive, task
from verl_ext.tasks.task import BoxTask

OWN = '''
from verl_ext.environments.base import Environment, Opening, tool
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import Score

class Own(Environment):
    """Scores the share of 2 numbers that were put in; `flaky` fails every second time."""

    opened = 0

    async def open(self, task):
        self.said, self.info = 0, task["extra_info"]
        Own.opened += 1
        if self.info.get("down"):
            raise ToolUnavailable("nobody is there")
        return await super().open(task)

    @tool
    async def put(self, number: int) -> str:
        """Put a number in.

        Args:
            number: to put in.
        """
        self.said += 1
        return "ok"

    async def score(self, episode):
        if self.info.get("flaky") and Own.opened % 2:
            return Score.graded(0.0, "", "flaky")
        return Score.graded(min(1.0, self.info.get("given", 0.0) + self.said / 2), "", "share")
'''


def calls(*numbers: int) -> str:
    return json.dumps([{"name": "put", "arguments": {"number": number}} for number in numbers])


def own(**info: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "?"}]
    return {"data_source": "own", "prompt": prompt, "reward_model": {"ground_truth": "2"}, "extra_info": info}


@pytest.fixture
def check(tmp_path):
    """Check rows in the environment Own; returns what is wrong with each."""
    (tmp_path / "own.py").write_text(OWN)
    config = OmegaConf.create({"reward": {}, "retool": {"sandbox": {"timeout_s": 5, "queue_timeout_s": 5}}})
    environments = Environments(f"{tmp_path}/own.py:Own", config)

    async def run(*rows: dict, **options: Any) -> list[list[str]]:
        validator = Validator({None: environments}, Verifiers(config), **options)
        found = {
            each.where: each async for each in validator.check_all([*zip("abcdef", rows, strict=False)], at_once=2)
        }
        return [found[where].wrong for where in sorted(found)]

    return run


async def test_a_row_is_right_if_gold_scores_1_and_nothing_less(check):
    assert await check(own(gold_calls=calls(1, 2)), own(gold_calls=calls(1, 2), given=0.5), own()) == [[], [], []]


async def test_what_is_wrong_with_a_row_is_named(check):
    found = await check(
        own(gold_calls=calls(1)),
        own(gold_calls=calls(1), given=1.0),
        own(gold_calls="put(1)"),
        own(down=True),
        own(gold_calls=json.dumps([{"name": "push", "arguments": {}}])),
    )
    assert found[0] == ["the right answer scores 0.5, expected 1"]
    assert found[1] == ["the untouched state scores 1.0, expected below 1"]
    assert found[2][0].startswith("ValueError: extra_info.gold_calls is 'put(1)'; expected JSON")
    assert found[3] == ["ToolUnavailable: nobody is there"]
    assert "push" in found[4][0]


async def test_a_flaky_task_is_found_by_repetition(check):
    (wrong,) = await check(own(gold_calls=calls(1, 2), flaky=True), repeat=4)
    assert wrong == ["the right answer scores 0.0, expected 1 in 2 of 4 tries"]


# Tasks ---------------------------------------------------------------------------------------------------------------


def made(number: int, **changes: Any) -> BoxTask:
    test = f'[ "$(cat /app/n)" = {number} ] || {{ echo "expected {number}"; exit 1; }}'
    fields = {
        "tests": archive.pack({"tests/test.sh": test}),
        "solution": archive.pack({"solution/solve.sh": f"echo {number} > n"}),
        **{"kind": "files", "difficulty": "easy", "verifier_s": 10, "memory_mb": 128, "disk_mb": 8},
    }
    return BoxTask(f"write-{number}", f"Write {number} to /app/n.", **fields | changes)


def file_of(path: Path, *tasks: BoxTask | dict) -> Path:
    rows = [each if isinstance(each, dict) else task.row(each, index=i) for i, each in enumerate(tasks)]
    parquet.write(path, pa.Table.from_pylist(rows))
    return path


@pytest.fixture
def run(box_server, capsys):
    """Run the command; returns its exit code and what it printed."""

    def run(*arguments: Any) -> tuple[int, str]:
        code = main([*map(str, arguments), "--sandbox", box_server.url])
        told = capsys.readouterr()
        return code, told.out + told.err.rpartition("\r")[2]

    return run


def test_solutions_and_calls_that_solve_their_tasks_are_no_finding(run, tmp_path):
    gold = [{"name": "bash", "arguments": {"command": "echo 2 > n"}}, {"name": "submit", "arguments": {}}]
    by_calls = task.row(made(2, solution=b""), gold_calls=gold)
    code, told = run("validate", file_of(tmp_path / "a.parquet", made(1), by_calls))
    assert code == 0
    assert told.splitlines()[:3] == [
        "domain    kind   difficulty  rows  wrong  no reference",
        "terminal  files  easy        2     0      0",
        "all                          2     0      0",
    ]


def test_each_wrong_row_is_named_with_what_its_tests_said(run, tmp_path):
    unsolved, broken = made(3, solution=b""), made(4, solution=archive.pack({"solution/solve.sh": "echo 5 > n"}))
    given = made(5, tests=archive.pack({"tests/test.sh": "true"}), kind="given")
    code, told = run("validate", file_of(tmp_path / "a.parquet", unsolved, broken, given))
    assert code == 1
    assert "terminal  files  easy        2     1      1\nterminal  given  easy        1     1      0" in told
    assert "a.parquet, row 1 (write-4): the right answer scores 0.0, expected 1\n" in told and "expected 4" in told
    assert "a.parquet, row 2 (write-5): the untouched state scores 1.0, expected below 1\n" in told


def test_a_limit_takes_rows_evenly_and_a_file_without_rows_is_an_error(run, tmp_path):
    given = {"tests": archive.pack({"tests/test.sh": "true"})}
    rows = [task.row(made(i, **(given if i in (1, 3) else {})), index=i) for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, told = run("validate", tmp_path / "rows.jsonl", "--limit", 2)
    assert code == 1 and "all                          2     1" in told and "rows.jsonl, row 3 (write-3)" in told
    (tmp_path / "none.jsonl").write_text("")
    assert run("validate", tmp_path / "none.jsonl") == (1, f"error: {tmp_path / 'none.jsonl'} has no rows.\n")
    for wrong in ("--parallel", "--limit"):
        with pytest.raises(SystemExit):
            run("validate", tmp_path / "rows.jsonl", wrong, 0)


# A mixed run ---------------------------------------------------------------------------------------------------------

MIXED = [
    "retool.protocol=hermes",
    "+retool.domains.terminal={environment: terminal, max_tool_calls: 12}",
    "+retool.domains.sums={environment: python, verifier: mathematics}",
    "+retool.domains.words={environment: python, verifier: same.py:Same}",
]
SAME = """
from verl_ext.episode import Score

class Same:
    def __init__(self, config):
        pass

    async def verify(self, text, truth, sample):
        return Score.graded(float(text == truth), text, "same")
"""


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """The folder of a mixed run, with its YAML."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.py").write_text(SAME)
    config = compose_run("tiny_dapo", MIXED)
    (tmp_path / "run/hydra").mkdir(parents=True)
    (tmp_path / "run/hydra/config.yaml").write_text(yaml.safe_dump(OmegaConf.to_container(config, resolve=False)))
    return tmp_path / "run"


def sum_row(truth: str = "4") -> dict[str, Any]:
    prompt = [{"role": "user", "content": "2+2?"}]
    return {"data_source": "sums", "prompt": prompt, "ability": "math", "reward_model": {"ground_truth": truth}}


def test_rows_of_a_mixed_run_are_validated_by_their_domains(run, mixed, tmp_path):
    files = [file_of(tmp_path / "t.parquet", made(1)), file_of(tmp_path / "s.parquet", sum_row())]
    code, told = run("validate", *files, "--config", mixed / "hydra/config.yaml")
    assert code == 0, told
    assert [line.split()[0] for line in told.splitlines()[:4]] == ["domain", "sums", "terminal", "all"]


def test_the_prompts_of_a_mixed_run_show_the_tools_of_their_domains():
    from verl_ext.environments.by_name import shown_tools

    config = compose_run("tiny_dapo", MIXED)
    shown = {name: (protocol, sorted(tools)) for name, (protocol, tools) in shown_tools(config, ()).items()}
    assert shown["terminal"] == ("hermes", ["bash", "edit", "submit"])
    assert shown["sums"] == ("hermes", ["code_interpreter"])


# Records -------------------------------------------------------------------------------------------------------------


def said(text: str, row: int) -> dict[str, Any]:
    """Return a turn of an agent in one of its rows."""
    return {"role": "model", "text": f"{text}<|im_end|>", "end": "<|im_end|>", "tokens": 1, "start": 0, "row": row}


def record(row: dict[str, Any], acc: float | None, evidence: bytes = b"", text: str = "", **changes: Any) -> dict:
    fields = {
        **{"uid": "u", "session": 1, "step": 3, "validate": False, "turns": [said(text, 0)], "acc": acc},
        "id": (row.get("extra_info") or {}).get("id"),
        "domain": row["data_source"],
        "ability": row["ability"],
        "task": json.dumps({"extra_info": row.get("extra_info")}),
        "ground_truth": row["reward_model"]["ground_truth"],
        "evidence": base64.b64encode(evidence).decode() if evidence else None,
    }
    return fields | changes


def test_stored_episodes_are_scored_again_by_evidence_or_by_text(run, mixed):
    right, wrong = (archive.pack({"app/n": text}) for text in ("1\n", "2\n"))
    of = task.row(made(1))
    rows = [
        record(of, 1.0, right),
        record(of, 0.0, wrong),
        record(of, 1.0, wrong, session=7),
        record(of, 1.0),
        record(of, None, right),
        record(sum_row(), 1.0, text="so \\boxed{4}"),
        record(sum_row(), 1.0, text="so \\boxed{5}", id="two-and-two"),
        record(sum_row("yes") | {"data_source": "words"}, 1.0, turns=[said("I ask another.", 0), said("yes", 1)]),
        record(sum_row("yes") | {"data_source": "words"}, 1.0, text="yes"),
    ]
    store.write(store.path_of(mixed, "trajectories", 3), "trajectories", rows)
    store.write(store.path_of(mixed, "trajectories", 4), "trajectories", [record(of, 1.0, right, step=4)])
    code, told = run("reverify", mixed)
    assert code == 1
    assert told.splitlines()[:4] == [
        "domain    equal  changed  not possible",
        "sums      1      1        0",
        "terminal  3      1        1",
        "words     2      0        0",
    ]
    assert "changed: step 3, write-1, response 7: 1 -> 0 (tests: exit code 1)\n" in told
    assert "changed: step 3, two-and-two, response 1: 1 -> 0 (" in told
    assert "not possible: 1 episodes: it has no evidence" in told
    assert run("reverify", mixed, "--step", 4, "--domain", "terminal")[0] == 0
    assert "no judged episodes of this step and domain" in run("reverify", mixed, "--step", 5)[1]


def test_a_config_that_does_not_exist_is_an_error(run, tmp_path):
    file = file_of(tmp_path / "a.parquet", made(1))
    assert run("validate", file, "--config", "nowhere") == (
        1,
        f"error: {CONFIGS / 'nowhere.yaml'} does not exist. Name a YAML of configs/ or the path of one (--config).\n",
    )
