"""An own agent: that it is there, and that it plays an episode with a scripted model."""

import copy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.doctor import agent
from verl_ext.doctor.finding import Level
from verl_ext.doctor.names import check_names
from verl_ext.settings import REPO

AGENT = "tests/unit/rollout/own_agents.py"
ROW = {
    "data_source": "tiny_tools",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"index": 1},
}


@pytest.fixture
def run(make_run, tmp_path):
    """A run with this agent."""
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([ROW]), file)

    def make(agent, *overrides):
        made = make_run("tiny_dapo", f"data.train_files={file}", f"retool.agent.run={agent}", *overrides)
        made.folder = REPO  # where the file of agent loops is
        return made

    return make


def test_the_quick_part_reads_whether_function_and_command_exist(run, told, tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)

    def failures(agent):
        return told(check_names(run(agent)), Level.FAIL)

    assert failures("no_file.py:solve") == [
        "retool.agent.run is solve of no_file.py, but there is no such module -> Correct the path."
    ]
    (text,) = failures(f"{AGENT}:onc")
    assert "retool.agent.run is 'onc', expected a name that" in text and "Did you mean once?" in text
    assert not [each for each in check_names(run(f"{AGENT}:once")) if each.level == Level.FAIL]
    (text,) = told(agent.check_start(run("[no-such-command, x]")), Level.FAIL)
    assert "there is no command 'no-such-command' on PATH" in text
    assert [*agent.check_start(run("[ls]"))] == [] == [*agent.check_start(run("null"))]


def test_an_agents_file_that_is_no_python_is_named_beside_what_else_is_wrong(run, told, tmp_path):
    (tmp_path / "broken.py").write_text("async def solve(task, endpoint:\n")
    texts = told(check_names(run(f"{tmp_path}/broken.py:solve", "algorithm.adv_estimator=grop")), Level.FAIL)
    (estimator,) = [each for each in texts if "algorithm.adv_estimator is 'grop'" in each]
    (broken,) = [each for each in texts if each != estimator]
    assert broken.startswith(f"retool.agent.run is solve of {tmp_path}/broken.py, which cannot be read as Python: ")
    assert "was never closed" in broken and broken.endswith("-> Correct the file.")


def test_an_agent_in_the_users_own_folder_is_found(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "agent.py").write_text("async def run(task, endpoint):\n    pass\n")
    assert not [each for each in check_names(run("~/agent.py:run")) if each.level == Level.FAIL]


def test_agents_from_other_machines_need_a_token(run, told):
    outside = run("outside", "retool.agent.host=10.0.0.7")
    (text,) = told(agent.check_start(outside, {}), Level.FAIL)
    assert "has no RETOOL_AGENT_TOKEN -> Set it to a long random text" in text
    assert [*agent.check_start(outside, {"RETOOL_AGENT_TOKEN": "x"})] == []
    assert [*agent.check_start(run("outside"), {})] == []


@pytest.mark.parametrize(
    ("name", "level", "text"),
    [
        ("twice", Level.OK, "it ended as answer after 2 answer(s), with 1 row(s)"),
        ("never_stops", Level.OK, "it ended as max_turns after 4 answer(s), with 1 row(s)"),
        ("rewrites", Level.WARN, "with 2 row(s) to train on, because it changed what was said before (1 by history)"),
        ("crashes_later", Level.WARN, "KeyError: 'what the model wrote'"),
        ("crashes_at_once", Level.FAIL, "crashed before the model had answered"),
        ("asks_nothing", Level.FAIL, "had asked the model nothing"),
        ("one_argument", Level.FAIL, "is no function of two arguments, (task, endpoint)"),
    ],
)
def test_the_full_part_plays_an_episode(run, told, tokenizer, monkeypatch, name, level, text):
    monkeypatch.chdir(REPO)
    (found,) = told(agent.check_play(run(f"{AGENT}:{name}"), tokenizer), level)
    assert text in found


def test_the_examples_play_and_a_template_without_tools_is_named(run, told, tokenizer, monkeypatch):
    monkeypatch.chdir(REPO)
    (found,) = told(agent.check_play(run("docs/own_agent/code_agent.py:solve"), tokenizer), Level.OK)
    assert "ended as answer after 1 answer(s)" in found
    (found,) = told(agent.check_play(run("docs/own_agent/tools_agent.py:solve"), tokenizer), Level.FAIL)
    assert "gives the model the tools code_interpreter, but the chat template shows no code_interpreter" in found


def test_a_template_that_hides_what_an_agent_says_or_shows_turns_differently_is_named(
    run, told, tokenizer, qwen_tokenizer
):
    outside = run("outside", "retool.protocol=hermes")
    (found,) = told(agent.check_play(outside, tokenizer), Level.WARN)
    assert "does not show the model what an agent may say (calls, " in found and "retool gateway audit" in found
    qwen_tokenizer = copy.deepcopy(qwen_tokenizer)
    assert [*agent.check_play(outside, qwen_tokenizer)] == []
    template = qwen_tokenizer.chat_template
    qwen_tokenizer.chat_template = template.replace("message.content +", "(message.content | upper) +")
    assert qwen_tokenizer.chat_template != template
    found = told(agent.check_play(outside, qwen_tokenizer), Level.WARN)[-1]
    assert "each such turn begins a row (answers, " in found


def test_a_run_without_an_own_agent_has_no_finding(run, tokenizer):
    assert [*agent.check_play(run("null"), tokenizer)] == []
