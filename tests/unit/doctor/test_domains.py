"""Domains: their rows, an episode of each, and what right and empty answers score."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from tests.unit.sandbox.boxes import need_boxes
from verl_ext.doctor import domains
from verl_ext.doctor.finding import Level
from verl_ext.sandbox import running_server
from verl_ext.settings import REPO
from verl_ext.tasks import archive, task
from verl_ext.tasks.task import BoxTask

WORLD = """
from verl_ext.environments.base import Environment, Opening
from verl_ext.environments.tool_errors import ToolUnavailable

class World(Environment):
    closed = 0

    def __init__(self, config, down=False):
        super().__init__(config)
        self.down = down

    async def open(self, task):
        if self.down:
            raise ToolUnavailable("nobody is there")
        return Opening([{"role": "user", "content": f"Welcome. {task['raw_prompt'][0]['content']}"}], {})
"""


def row(source, truth, question="1+1?", **extra):
    prompt = [{"role": "user", "content": question}]
    return {
        "data_source": source,
        "prompt": prompt,
        "reward_model": {"ground_truth": truth},
        "extra_info": {"index": 1, **extra},
    }


@pytest.fixture
def look(make_run, tokenizer, tmp_path):
    def run(rows, table=None, check=domains.check_domains, url=None):
        file = tmp_path / "train.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file)
        (tmp_path / "world.py").write_text(WORLD)
        run = make_run("tiny_dapo", f"data.train_files={file}", "data.val_files=[]")
        run.folder = REPO  # where the file of agent loops is
        OmegaConf.set_struct(run.config, False)
        run.config.retool.domains = table or {}
        if url:
            run.config.retool.sandbox.urls = [url]
        arguments = (run, tokenizer) if check is domains.check_domains else (run,)
        return [*check(*arguments)]

    return run


def test_the_first_prompt_is_shown_and_right_and_empty_answers_are_scored(look):
    first, scores = look([row("sums", "2"), row("sums", "\\frac{1}{2}")])
    assert first.level == scores.level == Level.OK
    assert "the data: an episode in python begins with\n| <|im_start|>user\n| 1+1?<|im_end|>" in first.message
    assert scores.message == "the data: the right answers of 2 rows score 1, empty ones less"


def test_each_domain_has_its_environment_and_verifier(look, tmp_path):
    table = {
        "sums": {},
        "science": {"verifier": "multiple_choice", "environment": f"{tmp_path}/world.py:World"},
        "stories": {"verifier": "ifeval"},
    }
    rows = [row("sums", "2"), row("science", "B", "Which?"), row("stories", "{}", gold_response="x")]
    found = [each.message for each in look([*rows[:2], row("sums", "3")], table)]
    assert [message.partition(":")[0] for message in found] == ["domain sums"] * 2 + ["domain science"] * 2
    assert "| Welcome. Which?" in found[2] and "the right answers of 1 rows score 1" in found[3]


def test_a_right_answer_that_scores_nothing_is_a_warning_and_a_broken_row_a_failure(look):
    (_, scores) = look([row("mine", "2", gold_response="\\boxed{3}"), row("mine", "4")])
    assert scores.level == Level.WARN and "the right answer scores 0.0, expected 1" in scores.message
    (_, scores) = look([row("a", "not a letter")], {"a": {"verifier": "multiple_choice"}})
    assert scores.level == Level.FAIL and "expected one letter" in scores.message


def test_tasks_of_a_mixed_run_are_solved_in_boxes(look):
    """Their solutions pass, and one whose tests pass without it is named."""
    tests = {"good": 'test "$(cat /app/n)" = 1', "bad": "true"}
    tasks = [
        BoxTask(
            name,
            f"Write 1 to /app/n. ({name})",
            tests=archive.pack({"tests/test.sh": test}),
            solution=archive.pack({"solution/solve.sh": "echo 1 > /app/n"}),
            **{"verifier_s": 20, "memory_mb": 128, "disk_mb": 8},
        )
        for name, test in tests.items()
    ]
    rows = [task.row(each) for each in tasks]
    table = {"terminal": {"environment": "terminal", "protocol": "hermes"}, "sums": {}}
    with running_server(workers=2, options=("--preload", "")) as url:
        need_boxes(url)
        first, scores, *of_sums = look([rows[0], row("sums", "2")], table, url=url)
        assert first.level == scores.level == Level.OK and "Write 1 to /app/n. (good)" in first.message
        assert "domain terminal: the right answers of 1 rows score 1, empty ones less" in scores.message
        assert [each.level for each in of_sums] == [Level.OK] * 2
        (_, scores, *_) = look([*rows, row("sums", "2")], table, url=url)
        assert scores.level == Level.WARN and "the untouched state scores 1.0, expected below 1" in scores.message


def test_gold_calls_of_another_form_are_named(look, tmp_path):
    table = {"a": {"environment": f"{tmp_path}/world.py:World"}}
    (_, scores) = look([row("a", "2", gold_calls="put(3)")], table)
    assert scores.level == Level.FAIL and "extra_info.gold_calls is 'put(3)'; expected JSON text" in scores.message


def test_an_environment_that_cannot_be_opened_is_named(look, tmp_path):
    table = {"a": {"environment": {"name": f"{tmp_path}/world.py:World", "down": True}}}
    (found,) = look([row("a", "2")], table)
    assert found.level == Level.FAIL and "ToolUnavailable: nobody is there" in found.message
    (found,) = look([row("a", "2")], {"a": {"environment": "nowhere.py:World"}})
    assert found.level == Level.FAIL and "nowhere.py:World" in found.message


def test_rows_that_the_table_does_not_name_are_a_failure(look):
    (found,) = look([row("a", "2"), row("b", "2")], {"a": {}}, domains.check_sources_of_rows)
    assert found.level == Level.FAIL and "does not name: 'b' (1 rows)" in found.message
    assert look([row("a", "2")], None, domains.check_sources_of_rows) == []


def test_a_domain_of_few_rows_among_many_is_found(look):
    rows = [row("many", "2")] * 3000 + [row("rare", "2")] + [row("many", "2")] * 3000
    assert look(rows, {"many": {}, "rare": {}}, domains.check_sources_of_rows) == []
