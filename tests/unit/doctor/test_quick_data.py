"""What the quick part says of the data before a run starts: files, columns, rows and lengths, without transformers."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.doctor.checkpoints import check_steps
from verl_ext.doctor.checks import Examination, examine
from verl_ext.doctor.data import check_files
from verl_ext.doctor.finding import Finding, Level
from verl_ext.doctor.rows import check_rows
from verl_ext.doctor.tokens import quick_tokenizer

ROOT = Path(__file__).parents[3]
LOOPS = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT}/verl_ext/rollout/agent_loops.yaml"


def problem(text: str, answer: object = "4", **changes: object) -> dict:
    row = {"data_source": "test", "prompt": [{"role": "user", "content": text}]}
    return row | {"reward_model": {"style": "rule", "ground_truth": answer}} | changes


def trace(question: str = "1+1?", code: str = "print(1+1)") -> dict:
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}
    messages = [
        {"role": "user", "content": question, "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "\\boxed{2}", "tool_calls": None},
    ]
    return {"messages": messages}


def good(number: int) -> list[dict]:
    return [problem(f"What is {i}+{i}?") for i in range(number)]


def write(path: Path, rows: list[dict] | str) -> Path:
    if isinstance(rows, str):
        path.write_text(rows, encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows) if rows else pa.table({"prompt": pa.array([], pa.string())}), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def model(tiny_tools, tokenizer, tmp_path) -> Path:
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def say(make_run, model, tmp_path):
    """Return the texts of findings other than OK, about files, steps and rows."""

    def look(train: Path | list[Path], val: Path | None = None, *overrides: str, name: str = "tiny_dapo") -> list[str]:
        files = ",".join(map(str, train)) if isinstance(train, list) else f"'{train}'"
        if name == "tiny_sft" and not val:
            overrides = ("trainer.test_freq=-1", *overrides)
        run = make_run(name, f"data.train_files=[{files}]", *([LOOPS] if "_dapo" in name else []), *overrides)
        run.config.data.val_files = str(val) if val else None
        found: list[Finding] = [*check_files(run), *check_steps(run)]
        found += check_rows(run, quick_tokenizer(str(model), tmp_path, None), is_quick=True)
        return [f"{each.level} {each.message} -> {each.advice}" for each in found if each.level != Level.OK]

    return look


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_good_data(suffix, say, tmp_path):
    train, val = (write(tmp_path / f"{name}.{suffix}", good(20)) for name in ("train", "val"))
    assert [each for each in say(train, val) if "also in" not in each] == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "What?"}, "column prompt: found 'What?'; expected list."),
        ({"prompt": [{"role": "system", "content": "?"}]}, "the last message is not the user's"),
        ({"prompt": [{"role": "user", "content": 3}]}, "expected str"),
        ({"prompt": []}, "the last message is not the user's"),
        (
            {"reward_model": {"style": "rule"}},
            "the row has no reward_model.ground_truth; it has style",
        ),
        ({"reward_model": None}, "the row has no reward_model"),
        ({"reward_model": {"ground_truth": ""}}, "column reward_model.ground_truth: it is empty"),
        ({"reward_model": {"ground_truth": "  "}}, "column reward_model.ground_truth: it is empty"),
        ({"reward_model": {"ground_truth": None}}, "found None; expected str"),
        ({"data_source": None}, "column data_source: found None; expected str."),
        ({"data_source": 7}, "column data_source: found 7; expected str."),
    ],
)
@pytest.mark.parametrize(("split", "suffix"), [("train", "parquet"), ("train", "jsonl"), ("val", "parquet")])
def test_rows_that_no_rollout_or_reward_can_use(split, bad, message, suffix, say, tmp_path):
    fine, wrong = (write(tmp_path / f"{name}.{suffix}", rows) for name, rows in (
        ("fine", good(20)),
        ("wrong", [problem("What is 1+1?") | bad for _ in range(20)]),
    ))  # fmt: skip
    texts = say(wrong, fine) if split == "train" else say(fine, wrong)
    told = [each for each in texts if each.startswith("FAIL")]
    assert len(told) == 1 and split in told[0], texts
    assert message in told[0] or (message.startswith("the row has no") and "None" in told[0]), texts


def test_a_row_without_a_users_message_is_right_where_the_environment_writes_the_first(say, tmp_path):
    bare = [problem(f"{i}", str(i)) | {"prompt": [{"role": "system", "content": "Help."}]} for i in range(20)]
    (tmp_path / "own.py").write_text(
        "from verl_ext.environments.base import Environment\nclass Own(Environment):\n    writes_first = True\n"
        "class Other(Environment):\n    pass\n"
    )
    train = write(tmp_path / "train.parquet", bare)
    user = "{name: user, base_url: 'http://127.0.0.1:9/v1'}"
    for entry in (user, f"[notebook, {user}]", "{name: openenv, url: 'http://127.0.0.1:9'}", f"{tmp_path}/own.py:Own"):
        assert [each for each in say(train, None, f"retool.environment={entry}") if "the user's" in each] == []
    told = [
        *say(train, None, f"retool.environment={tmp_path}/own.py:Other"),
        *say(train, None, "retool.environment=nowhere.py:Own"),
        *say(train, None, f"+retool.domains={{other: {{environment: {user}}}, test: {{}}}}"),
    ]
    assert len([each for each in told if "the last message is not the user's" in each]) == 3
    (train.parent / "bad").mkdir()
    ends = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    for prompt in ([], ends, [ends[1]]):
        train = write(tmp_path / "bad" / "train.parquet", [each | {"prompt": prompt} for each in bare])
        assert any(each.startswith("FAIL") for each in say(train, None, f"retool.environment={user}")), prompt


@pytest.mark.parametrize("column", ["reward_model", "data_source", "prompt"])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_column_that_is_not_there_is_one_line_with_its_name(column, suffix, say, tmp_path):
    rows = [{name: value for name, value in row.items() if name != column} for row in good(20)]
    for files in (
        (tmp_path / f"w.{suffix}", tmp_path / f"g.{suffix}"),
        (tmp_path / f"g.{suffix}", tmp_path / f"w.{suffix}"),
    ):
        write(tmp_path / f"w.{suffix}", rows), write(tmp_path / f"g.{suffix}", good(20))
        told = [each for each in say(*files) if each.startswith("FAIL")]
        assert len(told) == 1 and column in told[0], told


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", "", "a.parquet cannot be read"),
        ("a.parquet", "no parquet", "a.parquet cannot be read"),
        ("a.parquet", [], "a.parquet has no row"),
        ("a.jsonl", "", "a.jsonl has no row"),
        ("a.jsonl", "\n\n", "a.jsonl has no row"),
        ("a.jsonl", '{"prompt": 1}\n{bad\n', "a.jsonl, line 2"),
        ("a.jsonl", "[1, 2]\n", "line 1: it is not a JSON object"),
        ("a.csv", "prompt\n1\n", "expected a name that ends in .parquet or .jsonl or .json"),
        ("a[1].parquet", "", "contains [, which `datasets` reads as a pattern"),
        ("a*.parquet", "", "contains *, which"),
        ("a::b.parquet", "", "contains ::, which"),
    ],
)
def test_a_file_that_cannot_be_read(name, content, message, say, make_run, tmp_path):
    path, fine = write(tmp_path / name, content), write(tmp_path / "fine.parquet", good(20))
    for train, val in ((path, fine), (fine, path)):
        run = make_run("tiny_dapo", LOOPS)
        run.config.data.train_files, run.config.data.val_files = str(train), str(val)
        texts = [each.message for each in check_files(run) if each.level == Level.FAIL]
        assert len(texts) == 1 and message in texts[0], texts


@pytest.mark.parametrize("name", ["it's.parquet", "a?b.parquet", "a#b.parquet", "a b.parquet", "a=b,c.parquet"])
def test_a_name_that_verl_can_read_is_none(name, make_run, tmp_path):
    run = make_run("tiny_dapo", LOOPS)
    run.config.data.train_files = run.config.data.val_files = str(write(tmp_path / name, good(20)))
    assert [*check_files(run)] == []


def test_half_a_character_is_a_plain_sentence(say, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*good(20), problem("What is \ud83d?")]))
    texts = say(path)
    assert any("line 21: a text has \\ud83d, half a character (a lone surrogate)" in each for each in texts), texts


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"reward_model": {"style": "rule", "ground_truth": 4}}, "reward_model.ground_truth is int64 in"),
        ({"extra_info": {"index": "a"}}, {"extra_info": {"index": 1}}, "extra_info.index is int64 in"),
        ({"level": 1}, {"level": 1.5}, "level is double in"),
        ({}, {"prompt": "text"}, "prompt is string in"),
        ({}, {"more": 1}, None),
        ({}, {"reward_model": {"ground_truth": "4", "style": "rule", "more": 1}}, None),
        ({"level": None}, {"level": 1}, None),
        ({"level": []}, {"level": ["a"]}, None),
    ],
)
def test_two_files_whose_columns_have_other_types(first, second, message, say, tmp_path):
    """As `datasets` 5.2 joins them: tests/unit/datasets has no such test, since it is its own."""
    from datasets import concatenate_datasets, load_dataset

    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path, changes in zip(paths, (first, second), strict=True):
        write(path, [row | changes for row in good(20)])
    told = [each for each in say(paths) if "verl cannot join" in each]
    assert bool(told) == bool(message) and all(message in each for each in told), told
    files = [load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path))["train"] for path in paths]
    if message:
        with pytest.raises(ValueError, match="aligned"):
            concatenate_datasets(files)
    else:
        concatenate_datasets(files)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("at", [0, 300, 5000])
def test_a_long_prompt_is_found_wherever_it_is(at, suffix, say, tmp_path):
    rows = good(5001)
    rows[at] = problem("1 " * 200)
    path = write(tmp_path / f"a.{suffix}", rows)
    told = [each for each in say(path) if "longer than" in each]
    assert len(told) == 1 and told[0].startswith("FAIL train: 1 of ") and "(of 5,001) prompts are longer" in told[0]
    assert "The run does not start with them" in told[0] and "data.filter_overlong_prompts=true" in told[0]
    told = [each for each in say(path, None, "data.filter_overlong_prompts=true") if "longer than" in each]
    assert len(told) == 1 and told[0].startswith("WARN") and "verl drops them" in told[0]


def test_lengths_are_those_that_transformers_counts(say, tokenizer, tmp_path):
    texts = ["1 " * 200, "12 + 34 = " * 30]
    path = write(tmp_path / "a.parquet", [*good(16), *map(problem, texts)])
    longest = max(
        len(tokenizer.apply_chat_template(problem(text)["prompt"], add_generation_prompt=True, return_dict=False))
        for text in texts
    )
    assert (
        f"2 of 18 prompts are longer than data.max_prompt_length=96 (the longest has {longest} tokens" in say(path)[0]
    )


def test_too_few_rows(say, tmp_path):
    for suffix in ("parquet", "jsonl"):
        few = write(tmp_path / f"few.{suffix}", good(15))
        assert any("15 rows are fewer than a batch of 16, so no step" in each for each in say(few))
    enough = write(tmp_path / "enough.parquet", good(17))
    assert not [each for each in say(enough) if "no step" in each]
    most = say(enough, None, "data.train_max_samples=5")
    assert any("17 rows, of which data.train_max_samples=5 are used, are fewer than" in each for each in most)
    long = write(tmp_path / "long.parquet", [*good(15), problem("1 " * 200)])
    assert any(
        "15 rows are left, fewer than a batch of 16" in each
        for each in say(long, None, "data.filter_overlong_prompts=true")
    )


def test_a_validation_of_sft_that_has_no_batch(say, tmp_path):
    train = write(tmp_path / "train.parquet", [trace(f"{i}+1?") for i in range(70)])
    val = write(tmp_path / "val.parquet", [trace(f"{i}+2?") for i in range(10)])
    told = [each for each in say(train, val, name="tiny_sft") if each.startswith("FAIL")]
    assert len(told) == 1 and "10 rows of data.val_files are fewer than a batch of 64" in told[0]
    for every in (250, "after_each_epoch"):
        without = say(train, None, f"trainer.test_freq={every}", name="tiny_sft")
        assert any(f"trainer.test_freq={every} validates, but data.val_files names no" in each for each in without)
    told = say(train, name="tiny_sft")
    assert not [each for each in told if each.startswith("FAIL")], "as both messages advise"


@pytest.mark.parametrize("at", [0, 300, 3000])
def test_a_long_trace_is_found_wherever_it_is(at, say, tmp_path):
    rows = [trace(f"{i}+1?") for i in range(3001)]
    rows[at] = trace(code="1 + " * 200 + "1")
    told = [each for each in say(write(tmp_path / "a.parquet", rows), name="tiny_sft") if "longer than" in each]
    assert len(told) == 1 and "traces are longer than data.max_length=256" in told[0] and told[0].startswith("FAIL")


def test_rows_that_are_no_traces(say, tmp_path):
    bad = {"messages": trace()["messages"][:3]}
    path = write(tmp_path / "a.parquet", [*(trace(f"{i}+1?") for i in range(70)), bad])
    assert "FAIL train: 1 of 71 rows are not traces (row 70:" in say(path, name="tiny_sft")[1]
    assert say(path, None, "data.retool.bad_rows=drop", name="tiny_sft")[1].startswith("WARN train: 1 of 71 rows")
    other = write(tmp_path / "b.parquet", [{"text": "?"}] * 70)
    assert "has no column 'messages'; its columns are text" in say(other, name="tiny_sft")[0]
    lines = write(tmp_path / "c.jsonl", [trace()])
    assert "expected a name that ends in .parquet" in say(lines, name="tiny_sft")[0]


def test_rows_that_sft_takes_are_traces(say, tmp_path):
    """Messages as JSON text, and several calls in a turn, whose limit is the rollout's."""
    two = trace()["messages"]
    two[1:3] = [two[1] | {"tool_calls": 2 * two[1]["tool_calls"]}, two[2], two[2]]
    rows = [{"messages": json.dumps(trace(f"{i}+1?")["messages"])} for i in range(70)] + [{"messages": json.dumps(two)}]
    hermes = ("data.retool.protocol=hermes", "data.max_length=4000")
    told = say(write(tmp_path / "a.parquet", rows), None, *hermes, name="tiny_sft")
    assert [each for each in told if " train: " in each] == []


@pytest.mark.parametrize(("name", "rows", "message"), [
    ("tiny_dapo", [*good(20), problem("", prompt=[{"role": "system", "content": "Add."}, *good(1)[0]["prompt"]])],
     "FAIL train: 1 of 21 prompts cannot be rendered ("),
    ("tiny_dapo", [*(problem(f"{i} " * 3000) for i in range(90)),
                   problem("", prompt=[{"role": "system", "content": "Add."}, *good(1)[0]["prompt"]])],
     "FAIL train: at least 1 of 91 prompts cannot be rendered ("),
    ("tiny_sft", [*(trace(f"{i}+1?") for i in range(70)),
                  {"messages": [{"role": "system", "content": "Add."}, *trace()["messages"]]}],
     "FAIL train: 1 of 71 rows are not traces (row 70: "),
])  # fmt: skip
def test_rows_that_the_template_refuses_are_named(name, rows, message, say, model, tmp_path):
    template = model / "chat_template.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    told = [each for each in say(write(tmp_path / "a.parquet", rows), name=name) if message in each]
    assert len(told) == 1 and "the chat template refuses messages of the roles system, user: no system" in told[0]


@pytest.mark.parametrize("is_quick", [True, False])
def test_evaluation_problems_in_an_sft_file_are_told(is_quick, make_run, model, tokenizer, tmp_path):
    first = json.loads((ROOT / "data" / "aime" / "aime_2024.jsonl").read_text().splitlines()[0])
    text = first.get("problem") or first.get("Problem")
    rows = [*(trace(f"{i}+1?") for i in range(80)), trace(text)]
    run = make_run("tiny_sft", f"data.train_files={write(tmp_path / 'a.parquet', rows)}", "data.max_length=4000")
    run.config.data.val_files = str(write(tmp_path / "v.parquet", [trace("5+1?")]))
    used = quick_tokenizer(str(model), tmp_path, None) if is_quick else tokenizer
    told = [each.message for each in check_rows(run, used, is_quick=is_quick) if "also in" in each.message]
    assert told == [
        f"train: 2 problem(s) are also in AIME 2024, AIME 2025 or data.val_files ({tmp_path}/a.parquet, row 5)"
    ]


@pytest.mark.parametrize("is_quick", [True, False])
def test_traces_without_a_user_message_do_not_overlap(is_quick, make_run, model, tokenizer, tmp_path):
    rows = [{"messages": trace()["messages"][1:]}] * 3
    path = write(tmp_path / "a.parquet", rows)
    run = make_run("tiny_sft", f"data.train_files={path}", f"data.val_files={path}")
    used = quick_tokenizer(str(model), tmp_path, None) if is_quick else tokenizer
    found = [*check_rows(run, used, is_quick=is_quick)]
    assert found and not [each for each in found if "also in" in each.message]


def test_every_check_says_what_it_needs_and_the_quick_part_runs_the_cheap_ones(make_run, tmp_path, monkeypatch):
    """An expensive one is not even called."""
    from verl_ext.doctor import checks

    called = []
    fakes = tuple((need.name, need, lambda exam, need=need: called.append(need) or ()) for need in checks.Need)
    monkeypatch.setattr(checks, "CHECKS", fakes)
    run = make_run("tiny_dapo")
    assert list(examine(Examination(run, is_quick=True))) == []
    assert {*checks.Need} - {*called} == {checks.Need.VERL, checks.Need.LOAD}
    list(examine(Examination(run, is_quick=False)))
    assert {*called} == {*checks.Need}
