"""What the quick part reads of the data: first prompts and traces against the protocol, and the agent loops named."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from verl_ext.datasets.text import PROMPTS
from verl_ext.doctor.data import FIRST_ROWS, check_agent_names, check_code_tests, check_protocol
from verl_ext.doctor.finding import Level

ROOT = Path(__file__).parents[3]
LOOPS = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT}/verl_ext/rollout/agent_loops.yaml"
PLAIN = "What is 1+1?"
HERMES = 'Call tools as <tool_call>{"name": ...}</tool_call>. What is 1+1?'
CODE = PROMPTS["code"].format(problem=PLAIN)
TRACE = {
    "code": [{"role": "assistant", "content": "<code>\nprint(1+1)\n</code>"}, {"role": "interpreter", "content": "2"}],
    "hermes": [
        {"role": "assistant", "content": '<tool_call>{"name": "f"}</tool_call>'},
        {"role": "tool", "content": "2"},
    ],
    "objects": [{"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "tool", "content": "2"}],
}


@pytest.fixture(params=["parquet", "jsonl"])
def rl(request, make_run, tmp_path):
    """An RL run on prompts, with a protocol; an agent loop for each."""

    def make(prompts, protocol="code", agents=None, *overrides, columns=None):
        rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
        for row, agent in zip(rows, agents or [], strict=False):
            row["agent_name"] = agent
        for name, values in (columns or {}).items():
            for row, value in zip(rows, values, strict=True):
                row[name] = value if isinstance(value, str) else json.dumps(value)
        for row in rows if columns else ():
            row["reward_model"] = {"ground_truth": row["reward_model"]}
        path = tmp_path / f"data.{request.param}"
        if request.param == "parquet":
            pd.DataFrame(rows).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = [f"data.train_files={path}", "data.val_files=[]", f"retool.protocol={protocol}", LOOPS]
        return make_run("qwen2-32b_dapo", *settings, *overrides)

    return make


@pytest.mark.parametrize(
    ("prompts", "protocol", "message"),
    [
        ([CODE] * 3, "hermes", "train: 3 of the first 3 prompts of data"),
        (
            [CODE] * 3,
            "hermes",
            "contain <code>, the tag of the protocol code, but not the tag of retool.protocol=hermes -> Set ",
        ),
        (
            [HERMES] * 3,
            "code",
            "contain <tool_call>, the tag of the protocol hermes, but not the tag of retool.protocol=code",
        ),
        ([CODE, CODE, PLAIN], "hermes", "2 of the first 3 prompts"),
        (["Use <code> and </code>. " + PLAIN] * 3, "text", "but with retool.protocol=text the model has no tool"),
        ([CODE] * 2 * FIRST_ROWS, "hermes", f"{FIRST_ROWS} of the first {FIRST_ROWS} prompts"),
    ],
)
def test_prompts_for_another_protocol(prompts, protocol, message, rl, told):
    texts = told(check_protocol(rl(prompts, protocol)), Level.FAIL)
    assert len(texts) == 1 and message in texts[0], texts


@pytest.mark.parametrize(
    ("prompts", "protocol"),
    [
        ([CODE] * 3, "code"),
        ([HERMES] * 3, "hermes"),
        ([CODE] * 3, "text"),  # the instruction of a known data set is replaced
        (["What does <code> mean in HTML?", PLAIN, PLAIN], "text"),
        ([PLAIN] * 3, "hermes"),  # the system prompt's schema says how to call
        ([PLAIN] * 3, "code"),
        ([CODE + HERMES] * 3, "hermes"),
        (["What does <code> mean in HTML?", PLAIN, PLAIN], "hermes"),
    ],
)
def test_prompts_that_fit(prompts, protocol, rl):
    assert list(check_protocol(rl(prompts, protocol))) == []


def test_the_agent_loop_of_a_row_or_of_the_run_has_its_own_protocol(rl, told):
    assert list(check_protocol(rl([CODE] * 2, "hermes", ["retool_code"] * 2))) == []
    assert told(check_protocol(rl([CODE] * 2, "code", ["retool_hermes"] * 2)), Level.FAIL)
    default = "actor_rollout_ref.rollout.agent.default_agent_loop"
    assert list(check_protocol(rl([CODE] * 2, "hermes", None, f"{default}=retool_code"))) == []
    assert list(check_protocol(rl([CODE] * 2, "hermes", None, f"{default}=single_turn_agent"))) == []


def test_an_agent_loop_that_is_not_registered(rl, told):
    agents = ["retool", "retol", "single_turn_agent", None]
    texts = told(check_agent_names(rl([PLAIN] * 4, "code", agents)), Level.FAIL)
    assert len(texts) == 1 and "agent_name is 'retol' in 1 rows of data" in texts[0]
    names = "retool, retool_code, retool_hermes, single_turn_agent, tool_agent"
    assert f"Did you mean retool? Choose one of {names}." in texts[0]
    assert list(check_agent_names(rl([PLAIN] * 4))) == []


def test_files_that_are_none_are_left_to_the_other_checks(make_run, tmp_path):
    (tmp_path / "data.parquet").write_text("no parquet")
    (tmp_path / "data.jsonl").write_text("no json\n")
    run = make_run("qwen2-32b_dapo", "data.train_files=[data.parquet,data.jsonl,gone.parquet]", "data.val_files=[]")
    assert [*check_protocol(run), *check_agent_names(run)] == []


@pytest.mark.parametrize(
    ("prompt", "trace", "protocol", "level"),
    [
        (CODE, "code", "hermes", Level.FAIL),  # asks for one protocol, and is trained on the other
        (CODE, "objects", "hermes", Level.FAIL),
        (HERMES, "objects", "code", Level.FAIL),
        (PLAIN, "code", "hermes", Level.WARN),
        (PLAIN, "hermes", "code", Level.WARN),
        (PLAIN, "objects", "code", None),
        (PLAIN, "objects", "hermes", None),
        (CODE, "code", "code", None),
    ],
)
def test_traces_for_another_protocol(prompt, trace, protocol, level, make_run, tmp_path):
    answer = {"role": "assistant", "content": "\\boxed{2}"}
    rows = [{"messages": [{"role": "user", "content": prompt}, *TRACE[trace], answer]}] * 3
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(
        "qwen2-32b_sft", "data.train_files=data.jsonl", "data.val_files=null", f"data.retool.protocol={protocol}"
    )
    found = list(check_protocol(run))
    assert {finding.level for finding in found} >= ({level} if level else set()) and bool(found) == bool(level), found
    assert all("data.retool.protocol" in finding.advice for finding in found)


def test_the_tiny_tasks_data_fit(make_run, tiny_tools, tmp_path):
    import subprocess
    import sys

    command = [sys.executable, str(ROOT / "data" / "tiny_tools" / "prepare.py"), "--out", str(tmp_path)]
    sizes = ["--sft=40", "--rl=64", "--test=8", "--ood=4"]
    subprocess.run([*command, *sizes], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    for name, train, loops in (("tiny_sft", "sft_train", []), ("tiny_dapo", "rl_train", [LOOPS])):
        run = make_run(
            name, f"data.train_files={tmp_path}/{train}.parquet", f"data.val_files={tmp_path}/eval.parquet", *loops
        )
        assert run.files("train")[0].is_file()
        assert [*check_protocol(run), *check_agent_names(run)] == []


@pytest.mark.parametrize("is_quick", [True, False])
def test_rows_whose_tests_can_judge_no_program_are_refused_with_their_number(is_quick, rl, told):
    send = "g = f()\nnext(g)\nassert g.send(1) == 1"
    truths = ["assert f() == 1", send, {"tests": ["assert f() == 1", send]}, send]
    sources = ["code", "code", "code", "maths"]
    run = rl([PLAIN] * 4, columns={"data_source": sources, "reward_model": truths})
    text = told(check_code_tests(run, is_quick=is_quick), Level.FAIL)[0]
    assert f"train: 2 of 3 rows {'in a sample ' * is_quick}of data" in text
    assert ": the test uses 'send' of what the program returned" in text and (is_quick or "(row 1: " in text)
    assert "refused_tests gives a reason" in text


def test_the_quick_part_reads_few_of_many_tests(make_run, told, tmp_path):
    truths = ["assert f() == 1", "g = f()\nnext(g)\nassert g.send(1) == 1"] * 2500
    rows = [{"prompt": [], "data_source": "code", "reward_model": {"ground_truth": each}} for each in truths]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run("qwen2-32b_dapo", "data.train_files=data.jsonl", "data.val_files=data.jsonl")
    texts = told(check_code_tests(run), Level.FAIL)
    assert len(texts) == 2 and "train: 2500 of 5000 rows of data.jsonl" in texts[0]
    texts = told(check_code_tests(run, is_quick=True), Level.FAIL)
    refused, looked_at = map(int, re.match(r"train: (\d+) of (\d+) rows in a sample of data.jsonl", texts[0]).groups())
    assert len(texts) == 2 and 0 < refused < looked_at < 600  # the sample has 784 rows


def test_a_row_of_another_form_is_left_to_the_check_of_rows(make_run, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"data_source": "maths", "reward_model": "4"}\n{"reward_model": null}\n')
    run = make_run("qwen2-32b_dapo", "data.train_files=[data.jsonl,missing.parquet,missing.jsonl]", "data.val_files=[]")
    for is_quick in (True, False):
        assert list(check_code_tests(run, is_quick=is_quick)) == []


def test_a_prompt_that_is_a_list_of_texts_hides_no_finding_about_the_others(make_run, told, tmp_path):
    prompts = [["hi"], *[[{"role": "user", "content": CODE}]] * 2]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    files = ["data.train_files=data.jsonl", "data.val_files=[]"]
    texts = told(check_protocol(make_run("qwen2-32b_dapo", *files, "retool.protocol=hermes", LOOPS)), Level.FAIL)
    assert len(texts) == 1 and "train: 2 of the first 3 prompts of data.jsonl contain <code>" in texts[0]


def test_another_reward_manager_has_other_verifiers(rl):
    run = rl([PLAIN], columns={"data_source": ["code"], "reward_model": ["assert f() =="]})
    run.config.reward.reward_manager.module.path = "mine.py"
    assert list(check_code_tests(run)) == []


def test_rows_with_broken_tests_are_refused(rl, told):
    run = rl([PLAIN] * 2, columns={"data_source": ["my_code"] * 2, "reward_model": ["assert f() ==", "assert f()"]})
    assert list(check_code_tests(run)) == []  # no verifier of code applies: they are mathematics
    verifiers = "reward.reward_kwargs.verifiers={my_code: verl_ext.reward.verifiers.code.CodeVerifier}"
    columns = {"data_source": ["my_code"] * 2, "reward_model": ["assert f() ==", "assert f()"]}
    text = told(check_code_tests(rl([PLAIN] * 2, "code", None, verifiers, columns=columns)), Level.FAIL)[0]
    assert "1 of 2 rows" in text and "row 0" in text and "is no Python" in text


def test_rows_with_tests_of_code_are_counted(rl, told):
    run = rl([PLAIN] * 2, columns={"data_source": ["code"] * 2, "reward_model": ["assert f()", "assert g()"]})
    assert "the tests of 2 rows of data" in told(check_code_tests(run), Level.OK)[0]
