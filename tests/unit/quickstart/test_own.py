"""The quickstart on a user's problems, traces, tools and reward; its data scripts really run."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.quickstart import pipeline
from verl_ext.quickstart.options import parse_options
from verl_ext.quickstart.own import Own, read_rewards

REWARD = (
    "def one_call(episode, row):\n    return 1.0\n\n\ndef short(episode, row):\n    return 0.0\n\n\ndef _of(x): ...\n"
)
TOOL = '''from verl.tools.function_tool import function_tool


@function_tool
def price_of(item: str) -> str:
    """Look up a price.

    Args:
        item: what it is.
    """
    return "3"
'''


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    """Sixty problems, a trace of each but the first twenty, a reward and a tool."""
    problems = [{"question": f"What is {n} apples and 17 apples?", "answer": str(n + 17)} for n in range(60)]
    traces = []
    for number, problem in enumerate(problems):
        said = [{"role": "user", "content": problem["question"]}]
        thoughts = "I add. " * (100 if number == 30 else 1)
        said += [{"role": "assistant", "content": f"{thoughts}<code>print({number}+17)</code>"}]
        said += [{"role": "interpreter", "content": f"{number + 17}"}]
        traces.append({"messages": [*said, {"role": "assistant", "content": f"\\boxed{{{number + 17}}}"}]})
    found = {name: tmp_path / name for name in ("mine.jsonl", "traces.jsonl", "reward.py", "tools.py")}
    found["mine.jsonl"].write_text("".join(f"{json.dumps(row)}\n" for row in problems))
    found["traces.jsonl"].write_text("".join(f"{json.dumps(row)}\n" for row in traces[20:]))
    found["reward.py"].write_text(REWARD)
    found["tools.py"].write_text(TOOL)
    return found


def refused(capsys, *argv: object) -> str:
    with pytest.raises(SystemExit):
        parse_options([str(word) for word in argv])
    return capsys.readouterr().err


def test_options_say_what_does_not_go_together(files, capsys):
    data = ("--data", files["mine.jsonl"])
    nothing = f"--data nothing.jsonl: there is no such file as {Path.cwd() / 'nothing.jsonl'}"
    assert nothing in refused(capsys, "--data", "nothing.jsonl")
    assert "the tiny model starts from random weights: give --traces" in refused(capsys, *data)
    assert "need --data" in refused(capsys, "--traces", files["traces.jsonl"])
    tools = ("--tools", files["tools.py"])
    assert "the small model has never called your tools" in refused(capsys, *data, *tools, "--model", "small")
    assert "expected FILE.py or FILE.py:NAME" in refused(capsys, "--reward", "reward.none")
    assert "no SFT without the tool" in refused(capsys, *data, "--model", "small", "--compare", "text")
    source = files["mine.jsonl"].parent / "run"
    source.mkdir()
    (source / "stages.json").write_text("")
    assert "--from reuses data and SFT as they are" in refused(capsys, *data, "--from", source)
    args = parse_options([*map(str, data), "--model", "owner/name", *map(str, tools)])
    assert (args.model, args.model_path, args.out.name) == ("small", "owner/name", "mine")
    assert parse_options([]).out.name == "quickstart"


def test_a_file_of_rewards_means_its_public_functions(files):
    file = files["reward.py"]
    assert read_rewards([str(file)]) == (f"{file}:one_call", f"{file}:short")
    assert read_rewards([f"{file}:short=0.5"]) == (f"{file}:short=0.5",)
    with pytest.raises(SystemExit, match="it has one_call, short, _of"):
        read_rewards([f"{file}:shorter"])
    with pytest.raises(SystemExit, match="there is another term short"):
        read_rewards([f"{file}:short=0.5", str(file)])
    with pytest.raises(SystemExit, match="its weight is 'half'; expected a number"):
        read_rewards([f"{file}:short=half"])
    files["mine.jsonl"].with_name("bad.py").write_text("def")
    with pytest.raises(SystemExit, match="bad.py is no Python file: invalid syntax"):
        read_rewards([str(file.with_name("bad.py"))])
    terms = Own(rewards=(f"{file}:short=0.5", f"{file}:one_call")).rl_overrides(Path())
    assert terms == [
        f"+reward.reward_kwargs.terms.short={{path: '{file}:short', weight: 0.5}}",
        f"+reward.reward_kwargs.terms.one_call={{path: '{file}:one_call', weight: 1.0}}",
    ]


@pytest.mark.parametrize("folder", ["it's mine, {x}", "a=b: c"])
def test_files_may_lie_in_any_folder(folder, files, tmp_path):
    from verl_ext.evaluation.settings import load_config

    (tmp_path / folder).mkdir()
    reward, tools = (files[name].rename(tmp_path / folder / name) for name in ("reward.py", "tools.py"))
    assert parse_options(["--reward", f"{reward}:short=0.5"]).reward
    config = load_config("tiny_dapo", Own(tools=tools, rewards=read_rewards([f"{reward}:short=0.5"])).parts())
    assert config.reward.reward_kwargs.terms.short == {"path": f"{reward}:short", "weight": 0.5}
    assert config.actor_rollout_ref.rollout.multi_turn.function_tool_path == str(tools)


def make(run) -> list[str]:
    """Make the data for real; return the names of the scripts."""
    pipeline.make_data(run)
    for each in run.supervisor.commands:
        subprocess.run(each.command, check=True, capture_output=True, cwd=pipeline.REPO)
    names = [f"{Path(each.command[1]).parent.name}/{Path(each.command[1]).name}" for each in run.supervisor.commands]
    run.supervisor.commands.clear()
    return names


@pytest.mark.nightly
def test_the_tiny_model_speaks_the_users_language(files, make_run, tmp_path):
    run = make_run(own=Own(files["mine.jsonl"], files["traces.jsonl"]))
    assert make(run) == ["own/prepare.py", "own/build_model.py", "own/lengths.py"]
    train, test = (pq.read_table(tmp_path / "data" / f"{name}.parquet").to_pylist() for name in ("rl_train", "eval"))
    assert (len(train), len(test), train[0]["data_source"]) == (48, 12, "mine")
    asked = {row["prompt"][0]["content"] for row in test}
    traces = pq.read_table(tmp_path / "data" / "sft_train.parquet").to_pylist()
    prompts = {json.loads(row["messages"])[0]["content"] for row in traces}
    assert prompts and not prompts & asked, "no trace of a test problem"
    assert all("write code between <code> and </code>" in prompt for prompt in prompts | asked)
    pipeline.train_sft(run)
    pipeline.train_rl(run)
    sft, rl = (command.command for command in run.supervisor.commands)
    assert {"trainer.total_training_steps=500", "trainer.save_freq=250"} <= {*sft}, "a killed SFT resumes"
    assert "trainer.total_epochs=500" in sft, "enough for more steps by --sft as well"
    batch = 2 ** (len(traces).bit_length() - 1)  # the largest power of two that the traces fill
    assert batch < 64 and f"data.train_batch_size={batch}" in sft, "64 traces would be a step"
    assert {"data.val_files=[]", "trainer.test_freq=-1"} <= {*sft}, "all of the few traces train"
    assert "data.max_prompt_length=64" in rl
    (response,) = (int(each.partition("=")[2]) for each in rl if each.startswith("data.max_response_length="))
    (whole,) = (int(each.partition("=")[2]) for each in sft if each.startswith("data.max_length="))
    assert 128 < response < whole <= response + 64, "the longest trace decides"
    assert run.settings("data")["own"].keys() == {"data", "traces"}
    files["mine.jsonl"].write_text(files["mine.jsonl"].read_text().replace("apples", "pears"))
    assert run.settings("data")["own"] != make_run().settings("data").get("own")


@pytest.mark.nightly
def test_tools_of_the_user_are_called_as_json_and_shown_in_a_line(files, make_run, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.tools.function_tool.FUNCTION_TOOL_REGISTRY", {})  # has other tests' tools of this name
    run = make_run(own=Own(files["mine.jsonl"], files["traces.jsonl"], files["tools.py"]))
    make(run)
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    assert "tools" in template
    from transformers import AutoTokenizer

    from verl_ext.environments.toolbox import load_tools
    from verl_ext.evaluation.settings import load_config

    config = load_config("tiny_dapo", run.own.parts())
    schemas = [
        each.tool_schema.model_dump(exclude_none=True)
        for each in load_tools(config.actor_rollout_ref.rollout.multi_turn, pipeline.REPO)
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tools=schemas, tokenize=False)
    assert "price_of(item: string): Look up a price." in shown
    assert len(tokenizer.encode(shown)) < 100
    pipeline.train_sft(run)
    pipeline.train_rl(run)
    sft, rl = (command.command for command in run.supervisor.commands)
    assert "data.retool.protocol=hermes" in sft and "retool.protocol=hermes" in rl
    assert f"actor_rollout_ref.rollout.multi_turn.function_tool_path='{files['tools.py']}'" in rl


def test_the_tiny_model_reads_calls_in_every_form_of_a_trace(tmp_path, tiny_tools, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    call = {"name": "python", "arguments": {"code": "print(1)"}}
    as_openai = {"type": "function", "function": call | {"arguments": json.dumps(call["arguments"])}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call, as_openai, {"function": call}]}]
    pq.write_table(pa.table({"messages": [json.dumps(messages)]}), tmp_path / "sft_train.parquet")
    pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "?"}]]}), tmp_path / "rl_train.parquet")
    texts = runpy.run_path(str(pipeline.REPO / "data" / "own" / "build_model.py"))["texts"]
    assert [*texts(tmp_path)][-6:] == [json.dumps(call), "print(1)"] * 3


@pytest.mark.nightly
def test_a_model_that_is_there_goes_straight_to_rl(files, make_run, tmp_path, tiny_tools):
    tokenizer = tiny_tools.build_model.build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "theirs")
    run = make_run(rung=pipeline.RUNGS["small"], model_path=str(tmp_path / "theirs"), own=Own(files["mine.jsonl"]))
    assert make(run) == ["own/prepare.py", "own/lengths.py"]
    assert run.skipped == ("sft", "merge_sft")
    journal = pipeline.Journal(tmp_path / "stages.json")
    journal.add(stage="data", status="done", settings=run.settings("data"), wall_s=1.0)
    pipeline.train_rl(run)
    assert run.supervisor.commands[0].env["MODEL_PATH"] == str(tmp_path / "theirs")


def test_the_untaught_small_model_keeps_its_sft_and_trains_on_the_users_problems(files, make_run, tmp_path):
    run = make_run(rung=pipeline.RUNGS["small"], own=Own(files["mine.jsonl"]))
    pipeline.make_data(run)
    scripts = [Path(each.command[1]) for each in run.supervisor.commands]
    assert [f"{path.parent.name}/{path.name}" for path in scripts] == [
        "small/prepare.py",
        "own/prepare.py",
        "small/build_model.py",
        "own/lengths.py",
    ]


def test_too_few_problems_and_traces_that_are_none_are_named(files, tmp_path):
    def run(*argv: object) -> str:
        command = [sys.executable, "data/own/prepare.py", "--out", tmp_path / "data", *argv]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=pipeline.REPO)
        assert done.returncode == 1
        return done.stderr

    few = tmp_path / "few.jsonl"
    few.write_text("".join(files["mine.jsonl"].read_text().splitlines(keepends=True)[:10]))
    assert "few.jsonl has 10 usable problems; RL and its test need at least 40" in run("--data", few)
    (tmp_path / "none.jsonl").write_text('{"messages": [{"role": "user", "content": "What?"}]}\n')
    message = run("--data", files["mine.jsonl"], "--traces", tmp_path / "none.jsonl")
    assert f"0 traces of {tmp_path / 'none.jsonl'} are left for SFT, which needs at least 2" in message
    last = files["traces.jsonl"].read_text().splitlines(keepends=True)[-1]
    (tmp_path / "none.jsonl").write_text(last)
    assert "1 traces of" in run("--data", files["mine.jsonl"], "--traces", tmp_path / "none.jsonl")


def test_rows_of_one_problem_are_in_one_part_and_count_as_one_problem(tmp_path):
    def run(problems: int) -> subprocess.CompletedProcess:
        rows = [
            {"prompt": [{"role": "user", "content": f"What is {n} and 1?"}], "reward_model": {"ground_truth": truth}}
            for truth in ("more", "odd")
            for n in range(problems)
        ]
        (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row | {'data_source': 'm'})}\n" for row in rows))
        command = [sys.executable, "data/own/prepare.py", "--data", tmp_path / "mine.jsonl", "--out", tmp_path]
        return subprocess.run(command, capture_output=True, text=True, cwd=pipeline.REPO)

    assert run(63).returncode == 0
    train, test = (pq.read_table(tmp_path / f"{part}.parquet").to_pylist() for part in ("rl_train", "eval"))
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
    assert not asked[0] & asked[1] and (len(train), len(test)) == (100, 26)
    assert "has 39 usable problems" in run(39).stderr


@pytest.mark.parametrize(("traces", "validation"), [(639, 0), (640, 64)])
def test_validation_of_sft_is_whole_batches_or_none(files, tmp_path, traces, validation):
    (trace,) = files["traces.jsonl"].read_text().splitlines(keepends=True)[:1]
    (tmp_path / "many.jsonl").write_text("".join(trace.replace("apples", f"{n} apples") for n in range(1, traces + 1)))
    command = [sys.executable, "data/own/prepare.py", "--data", files["mine.jsonl"], "--out", tmp_path / "data"]
    subprocess.run([*command, "--traces", tmp_path / "many.jsonl"], check=True, cwd=pipeline.REPO)
    rows = [pq.read_metadata(tmp_path / "data" / f"sft_{part}.parquet").num_rows for part in ("train", "val")]
    assert rows == [traces - validation, validation]


@pytest.mark.nightly
def test_a_long_sft_of_the_small_model_saves_four_times(files, tiny_tools, tokenizer, tmp_path):
    (trace,) = files["traces.jsonl"].read_text().splitlines(keepends=True)[:1]
    (tmp_path / "many.jsonl").write_text("".join(trace.replace("apples", f"{n} apples") for n in range(704)))
    tokenizer.save_pretrained(tmp_path / "model")
    own, data = Own(files["mine.jsonl"], tmp_path / "many.jsonl"), tmp_path / "data"
    lengths = own.lengths_command(data, str(tmp_path / "model"), "smollm2_dapo", "smollm2_sft")
    for command in (own.prepare_command(data), lengths):
        subprocess.run(command, check=True, capture_output=True, cwd=pipeline.REPO)
    found = {*own.sft_overrides(data)}  # 704 traces, 64 of them for validation, 16 a step: 40 steps
    assert {"trainer.total_training_steps=40", "trainer.save_freq=10", "trainer.test_freq=10"} <= found
