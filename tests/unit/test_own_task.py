"""The example of docs/tutorials/own-task.md: data, tool, verifier and settings, each by the code that a run calls."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "own_task"
YAML = ROOT / "configs" / "task" / "shop.yaml"
PAGE = (ROOT / "docs" / "tutorials" / "own-task.md").read_text(encoding="utf-8")
CALL = '<tool_call>\n{{"name": "price_of", "arguments": {{"item": "{}"}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def config():
    """What the launcher gives to verl, except its paths."""
    verl = importlib.util.find_spec("verl").submodule_search_locations[0]
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("tiny_dapo", overrides=[f"hydra.searchpath=[file://{verl}/trainer/config]", "+task=shop"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    subprocess.run([sys.executable, FOLDER / "make_data.py", folder], check=True)
    assert {path.name for path in folder.iterdir()} == {"rl_train.parquet", "eval.parquet"}, "as the launcher wants"
    return folder


@pytest.fixture(scope="module")
def rows(data: Path) -> pd.DataFrame:
    return pd.read_parquet(data / "eval.parquet")


@pytest.fixture(scope="module")
def tools(config):
    """Load them as verl's agent-loop worker does (verl/experimental/agent_loop/agent_loop.py:525)."""
    from verl.tools.tool_registry import load_all_tools

    return load_all_tools(None, str(ROOT / config.actor_rollout_ref.rollout.multi_turn.function_tool_path))


@pytest.fixture
def verify(config, monkeypatch):
    """Score a response by the verifier that the run's settings choose for data of the shop."""
    from verl_ext.reward.verifiers import Verifiers, verify_response

    monkeypatch.chdir(ROOT)
    verifier = Verifiers({}, config.reward.reward_kwargs.verifiers).find("shop", "")
    assert type(verifier).__name__ == "BillVerifier"
    return lambda response, truth: asyncio.run(verify_response(verifier, response, truth, {}))


def test_the_example_has_at_most_40_lines():
    files = [*sorted(FOLDER.glob("*.py")), YAML]
    assert [path.name for path in files] == ["bill_verifier.py", "make_data.py", "price_tool.py", "shop.yaml"]
    assert sum(bool(line.strip()) for path in files for line in path.read_text().splitlines()) <= 40


def test_the_model_asks_for_a_price_and_the_verifier_accepts_its_bill(rows, tools, verify, roll_out, qwen_tokenizer):
    row = rows[rows.reward_model.map(lambda model: model["ground_truth"]) == "408"].iloc[0]
    turns = [CALL.format("cheese"), "34 * 12 = 408, so \\boxed{408}"]
    ids = [qwen_tokenizer.encode(turn) + [qwen_tokenizer.eos_token_id] for turn in turns]
    prompt = {"raw_prompt": list(row.prompt), "extra_info": row.extra_info}
    episode, *_ = roll_out(qwen_tokenizer, ids, tools=tools, protocol="hermes", response_length=400, prompt=prompt)
    shown = qwen_tokenizer.decode(episode.row.prompt_ids)
    assert '"name": "price_of"' in shown and "Look up what one of an item costs." in shown
    assert "code_interpreter" not in shown, "tool_selection names price_of only"
    assert "What do 34 of cheese cost?" in shown
    assert "<tool_response>\n12\n</tool_response>" in qwen_tokenizer.decode(episode.row.ids)
    assert episode.finish_reason == "answer"
    assert verify(turns[-1], row.reward_model["ground_truth"]).acc == 1.0


def test_a_wrong_argument_is_the_models_error(tools, roll_out, qwen_tokenizer):
    ids = [qwen_tokenizer.encode(turn) + [qwen_tokenizer.eos_token_id] for turn in (CALL.format("gold"), "?")]
    episode, *_ = roll_out(qwen_tokenizer, ids, tools=tools, protocol="hermes", response_length=400)
    told = qwen_tokenizer.decode(episode.row.ids)
    assert "ToolError: there is no item 'gold'; there are bread, cheese" in told
    assert episode.finish_reason == "answer" and episode.use.failed == 1


@pytest.mark.parametrize(
    ("response", "acc", "verdict"),
    [
        ("\\boxed{36}", 1.0, "correct"),
        ("\\boxed{ 36 }", 1.0, "correct"),
        ("\\boxed{35}", 0.0, "wrong"),
        ("36", 0.0, "no_answer"),
    ],
)
def test_the_verifier_compares_the_box(verify, response, acc, verdict):
    score = verify(response, "36")
    assert (score.acc, score.verdict, score.method) == (acc, verdict, "bill")


def test_the_tool_and_the_data_have_the_same_prices(rows, tools):
    """Each price is written twice: the data are made without the tool, which verl loads by itself."""
    prices = {tool.name: tool for tool in tools}["price_of"].fn
    for row in rows.itertuples():
        number, item = re.search(r"What do (\d+) of (\w+) cost", row.prompt[0]["content"]).groups()
        assert int(row.reward_model["ground_truth"]) == int(number) * int(prices(item))


@pytest.mark.nightly
def test_the_doctor_knows_every_setting_and_warns_of_a_template_that_ignores_tools(data, tiny_tools, tmp_path):
    """The command of the page, with the tiny model's own template; nothing runs at the sandbox's port."""
    tokenizer = tiny_tools.build_model.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_tools.build_model.build_model(tokenizer, seed=0).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "verl_ext.doctor", "--json", "--config-name", "tiny_dapo", "+task=shop"]
    command += [f"data.{which}_files={data}/{file}.parquet" for which, file in (("train", "rl_train"), ("val", "eval"))]
    command += [f"actor_rollout_ref.model.path={tmp_path}", "retool.sandbox.urls=[http://127.0.0.1:9]"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    findings = json.loads(result.stdout)["findings"]
    assert {finding["topic"] for finding in findings if finding["level"] == "FAIL"} == {"sandbox"}
    quoted = "the chat template leaves out the tools"
    assert f"WARN template {quoted}" in PAGE
    assert [finding["level"] for finding in findings if finding["message"].startswith(quoted)] == ["WARN"]
    assert any("prompts: all within 768 tokens" in finding["message"] for finding in findings)


def test_the_page_names_the_files_of_the_example():
    for path in (*FOLDER.glob("*.py"), YAML):
        assert f"`{path.relative_to(ROOT)}`" in PAGE


# The stateful example ------------------------------------------------------------------------------------------------

STATEFUL = FOLDER / "stateful"
PUT = '<tool_call>\n{{"name": "put", "arguments": {{"item": "{}", "count": {}}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def baskets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baskets")
    subprocess.run([sys.executable, STATEFUL / "make_data.py", folder], check=True)
    return folder


@pytest.mark.parametrize(
    ("calls", "acc"),
    [
        ([("cheese", 9), ("bread", 10)], 1.0),
        ([("cheese", 4), ("gold", 1), ("bread", 10), ("cheese", 5)], 1.0),
        ([("cheese", 9)], 0.0),
        ([], 0.0),
    ],
)
def test_the_baskets_content_is_the_score(baskets, roll_out, qwen_tokenizer, calls, acc):
    row = pd.read_parquet(baskets / "eval.parquet").iloc[1]
    turns = [*(PUT.format(*call) for call in calls), "Done."]
    ids = [qwen_tokenizer.encode(turn) + [qwen_tokenizer.eos_token_id] for turn in turns]
    prompt = {"raw_prompt": list(row.prompt), "reward_model": row.reward_model, "data_source": "basket"}
    settings = {"environment": f"{STATEFUL}/basket.py:Basket", "protocol": "hermes", "max_tool_calls": 9}
    episode, *_ = roll_out(qwen_tokenizer, ids, prompt=prompt, response_length=900, **settings)
    told = qwen_tokenizer.decode(episode.row.ids)
    assert (episode.score.acc, episode.finish_reason) == (acc, "answer")
    assert ("ToolError: there is no item 'gold'" in told) == (("gold", 1) in calls)
    assert ("the basket costs 66" in told) == (acc == 1.0)


def test_the_stateful_example_has_at_most_30_lines_and_is_on_the_page():
    code = (STATEFUL / "basket.py").read_text()
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 30
    assert all(name in PAGE for name in ("docs/own_task/stateful/basket.py", "+task=basket"))


def test_the_doctor_plays_the_example(baskets, tiny_tools, tmp_path):
    from verl_ext.doctor.domains import check_domains
    from verl_ext.doctor.run import Run
    from verl_ext.settings import compose_run

    files = [
        f"data.{key}=[{baskets}/{name}.parquet]" for key, name in (("train_files", "rl_train"), ("val_files", "eval"))
    ]
    run = Run(
        "tiny_dapo", compose_run("tiny_dapo", ["+task=basket", *files, "actor_rollout_ref.model.path=x"]), folder=ROOT
    )
    opened, scored = check_domains(run, tiny_tools.build_model.build_tokenizer())
    assert "Fill the basket: 1 cheese, 1 bread." in opened.message
    assert scored.message == "the data: the right answers of 20 rows score 1, empty ones less"
