"""`scripts/bench/chaos.py --side verl` and `--side trl`: what remains verl's own, and what dumps say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from omegaconf import OmegaConf

from verl_ext.runs import parquet

STOCK = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "stock"


@pytest.fixture(scope="module")
def stock():
    from scripts.bench import chaos_others

    return chaos_others


def row(output, score=1.0, gts="7", question="What is 3 + 4?"):
    return {
        "input": f"user\n{question}\nassistant\n",
        "output": output,
        "gts": gts,
        "score": score,
        "step": 1,
        "uid": "a",
    }


def said(code, answer):
    return f"<code>{code}</code>\n<interpreter>\n{answer}\n</interpreter>\n"


def test_a_reward_that_is_not_the_answers_is_found(stock):
    rows = [row(r"\boxed{7}"), row(r"\boxed{7}", -1.0), row(r"\boxed{8}"), row(said("print(1)", r"\boxed{7}"), -1.0)]
    assert stock.wrong_scores(rows) == [
        "1: trained with the reward -1, but its answer has 1",
        "2: trained with the reward 1, but its answer has -1",
    ]


def test_a_call_is_the_end_of_a_turn_from_its_last_code_on(stock):
    assert stock.calls_of(said("1", "2") + r"\boxed{2}") == ([("1", "2")], 2)
    assert stock.calls_of("a <code> b <code>1</code>") == ([("1", None)], 1)
    assert stock.calls_of("a <code> b <code>1</code>", from_first=True) == ([(" b <code>1", None)], 1)
    after = said("print(914)", "914") + r"\boxed{914}030-8111)</code>"  # seen in a run: its last turn has no call
    assert stock.calls_of(after) == ([("print(914)", "914")], 2)
    assert stock.calls_of("\n<interpreter>\n7\n</interpreter>\n") == ([], 2), "the model may write a reply itself"


def test_a_call_of_trl_begins_at_the_first_code_of_its_turn(stock, tmp_path):
    (tmp_path / "order.json").write_text('["a"]')
    sizes = stock.trl_sizes(tmp_path, tmp_path, {"samples": 8, "response_tokens": 96, "tool_calls": 3})
    assert sizes.from_first and sizes[1:5] == (["a"], 8, 96, 4)


def test_what_no_program_said_is_found_and_an_end_at_a_call_that_had_room(stock, monkeypatch):
    truth = {"print(7)": SimpleNamespace(stdout="7\n", stderr=""), "1/0": SimpleNamespace(stdout="", stderr="a\nZero")}
    monkeypatch.setattr(stock, "run_again", lambda programs, sandbox: {code: truth[code] for code in programs})
    tokenizer = SimpleNamespace(encode=lambda text: text)  # a character, a token
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: tokenizer)
    call, answered = "<code>print(7)</code>", said("print(7)", "7")
    rows = [
        row(answered + r"\boxed{7}"),
        row(said("1/0", "Zero")),
        row(said("print(7)", "Error executing tool 'python'")),
        row(call),  # an answer of 1 character had room
        row("x" * 200 + call),  # and none here
        row(answered * 2 + call),  # the last turn that a response may have
    ]
    assert stock.wrong_answers_of_tools(rows, "http://127.0.0.1:1", stock.Sizes("", [], 8, tokens=200, turns=3)) == [
        "2: was told \"Error executing tool 'python'\", but the program prints '7'",
        "3: ended at its call without an answer, but the program prints '7'",
    ]


def test_prompts_that_are_lost_or_doubled_are_found_by_the_order_in_which_they_are_drawn(stock):
    rows = [row("", question=question) for question in "aabbbd"]
    lost, doubled = stock.lost_and_doubled(rows, stock.Sizes("", "abcdef", 2, 99, 9))
    assert lost == ["'c' was drawn but did not train", "'d' trained with 1 rollouts of 2"]
    assert doubled == ["'b' trained with 3 rollouts, not 2"]
    assert stock.lost_and_doubled(rows[:4], stock.Sizes("", "acb", 2, 99, 9, slack=2)) == ([], []), (
        "what may be under way is not lost"
    )
    assert stock.lost_and_doubled(rows[:4], stock.Sizes("", "acbdef", 2, 99, 9, slack=4)) == ([], []), "all may be"


def test_the_order_of_an_epoch_is_drawn_by_the_seed(stock, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(9)]
    parquet.write(tmp_path / "a.parquet", pa.Table.from_pylist(rows))
    orders = []
    for seed in (3, 3, 4):
        config = OmegaConf.create({"data": {"train_files": str(tmp_path / "a.parquet"), "seed": seed, "shuffle": True}})
        orders.append(stock.drawn(config))
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == [str(i) for i in range(9)]


@pytest.mark.parametrize("overrides", [(), ("hardware=cpu_separate",)])
def test_a_stock_run_has_no_part_of_ours_but_the_cpu(stock, tmp_path, overrides):
    config = stock.stock_config(["data.seed=0", *overrides], tmp_path / "data", tmp_path / "run", tmp_path / "notes")
    text = OmegaConf.to_yaml(config.actor_rollout_ref.rollout.agent) + OmegaConf.to_yaml(config.trainer.v1)
    text += OmegaConf.to_yaml(config.actor_rollout_ref.actor) + OmegaConf.to_yaml(config.reward.custom_reward_function)
    assert "verl_ext" not in text and "retool" not in config and config.reward.reward_manager.name == "naive"
    assert config.actor_rollout_ref.rollout.n == 8 and config.data.train_batch_size == 16, "sizes are the tiny run's"
    assert config.trainer.default_local_dir == str(tmp_path / "run"), "where a disk gets full"
    assert config.trainer.rollout_data_dir.startswith(str(tmp_path / "notes")), "what the run is judged by is not there"


def test_verl_imports_the_cpu_and_the_form_of_calls_and_nothing_else_of_ours():
    program = """
import asyncio, json, sys
import verl
from verl.experimental.agent_loop.tool_parser import ToolParser
class Tokenizer:
    def decode(self, ids): return ids
parser = ToolParser.get_tool_parser("code", Tokenizer())
found = [asyncio.run(parser.extract_tool_calls(text)) for text in ("a<code>print(7)</code>", "<code>print(7)", "no")]
print(json.dumps([[text, [[call.name, json.loads(call.arguments)] for call in calls]] for text, calls in found]))
print(json.dumps(sorted(name for name in sys.modules if name.startswith("verl_ext.") and ".cpu" not in name)))
"""
    env = os.environ | {"PYTHONPATH": str(STOCK), "VERL_USE_EXTERNAL_MODULES": "stock_verl"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    *_, found, ours = done.stdout.splitlines()
    assert json.loads(found) == [
        ["a", [["python", {"code": "print(7)"}]]],
        ["<code>print(7)", []],
        ["no", []],
    ], done.stderr
    assert json.loads(ours) == ["verl_ext.versions"]
