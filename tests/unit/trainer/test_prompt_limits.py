"""A run whose prompts a rollout would cut does not start, even if the doctor was skipped."""

import copy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def load(make, tokenizer, qwen_tokenizer, tmp_path, monkeypatch):
    """Let the real trainer load real files of prompts; an entry is a text, or (text, agent_name, tools it selects)."""
    monkeypatch.chdir(ROOT)  # from which the YAML of the agent loops is named

    def start(train, val=("1+1?",), *overrides, used=tokenizer):
        for name, prompts in (("train", train), ("val", val)):
            rows = []
            for prompt in prompts:
                text, agent, tools = prompt if isinstance(prompt, tuple) else (prompt, None, None)
                row = {"prompt": [{"role": "user", "content": text}], "agent_name": agent, "data_source": "x"}
                rows.append(row | {"extra_info": {"index": 0, "tool_selection": tools}})
            schema = pa.schema(
                {
                    "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
                    "agent_name": pa.string(),
                    "data_source": pa.string(),
                    "extra_info": pa.struct({"index": pa.int64(), "tool_selection": pa.list_(pa.string())}),
                }
            )
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / f"{name}.parquet")
        files = [f"data.{name}_files={tmp_path}/{name}.parquet" for name in ("train", "val")]
        trainer, _ = make(*files, "data.train_batch_size=1", *overrides)
        trainer.tokenizer, trainer.processor = used, None
        trainer._init_dataloader()
        return trainer

    return start


LONG = "1 " * 200


def test_prompts_within_the_limit_start(load):
    assert len(load(["1+1?", "2+2?"]).train_dataset) == 2


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_longer_prompt_stops_the_run_before_its_workers(split, load):
    files = (["1+1?", LONG], ["1+1?"]) if split == "train" else (["1+1?"], ["1+1?", LONG])
    message = f"data.{split}_files: 1 of 2 prompts are longer than data.max_prompt_length=96 .the longest has "
    with pytest.raises(ValueError, match=message):
        load(*files)


def test_verls_filter_leaves_it_out(load):
    assert len(load(["1+1?", LONG], ["1+1?"], "data.filter_overlong_prompts=true").train_dataset) == 1


def test_a_prompt_that_the_template_refuses_stops_the_run_and_is_named(load, tokenizer):
    strict = copy.deepcopy(tokenizer)
    refusal = "{% if '9' in messages[0].content %}{{ raise_exception('no nines') }}{% endif %}"
    strict.chat_template = refusal + tokenizer.chat_template
    with pytest.raises(ValueError, match="data.train_files: row 1 of the 2 .* cannot be rendered: .*no nines"):
        load(["1+1?", "9 " * 60], used=strict)


HERMES = ["retool.protocol=hermes", "data.filter_overlong_prompts=true"]


def test_the_interpreters_schema_counts_which_verls_filter_does_not_see(load, qwen_tokenizer):
    def longest(limit, *overrides, prompts=("1+1?",)):
        return load(list(prompts), ["1+1?"], f"data.max_prompt_length={limit}", *overrides, used=qwen_tokenizer)

    with pytest.raises(ValueError, match="prompts are longer than data.max_prompt_length=100 .*tool_config_path"):
        longest(100, *HERMES)
    longest(100, "retool.protocol=code")
    with pytest.raises(ValueError, match="1 of 2 prompts are longer"):  # the row's loop has its own protocol
        longest(100, "retool.protocol=code", prompts=("1+1?", ("1+1?", "retool_hermes", None)))
    longest(100, "retool.protocol=code", prompts=("1+1?", ("1+1?", "single_turn_agent", None)))


def test_a_row_that_selects_tools_shows_only_these(load, qwen_tokenizer, tmp_path):
    tool = (ROOT / "configs" / "tools" / "code_interpreter.yaml").read_text()
    long = tool.replace("name: code_interpreter", "name: other").replace(
        "description: ", "description: " + "1 " * 300, 1
    )
    (tmp_path / "tools.yaml").write_text(long)
    options = [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml", "retool.protocol=hermes"]
    options += ["data.max_prompt_length=600"]
    with pytest.raises(ValueError, match="1 of 1 prompts are longer"):
        load(["1+1?"], [("1+1?", None, ["code_interpreter"])], *options, used=qwen_tokenizer)
    load([("1+1?", None, ["code_interpreter"])], [("1+1?", None, ["code_interpreter"])], *options, used=qwen_tokenizer)
