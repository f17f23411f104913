"""Tokenizer, chat template and the rows of data files, with the tiny task's tokenizer."""

import copy
from pathlib import Path

import pandas as pd
import pytest

from verl_ext.doctor.agreement import check_agreement, first_difference
from verl_ext.doctor.finding import Level
from verl_ext.doctor.rows import check_rows
from verl_ext.doctor.template import check_tokenizer, load_tools

ROOT = Path(__file__).parents[3]
RUNS = [("tiny_dapo", "code"), ("tiny_dapo", "hermes"), ("tiny_sft", "code"), ("tiny_sft", "hermes")]


@pytest.fixture
def other(tokenizer):
    """A copy of the tokenizer that a test may spoil."""
    return copy.deepcopy(tokenizer)


@pytest.fixture
def tiny_run(make_run, tiny_tools, tokenizer, tmp_path):
    """A run whose model folder exists."""
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_tools.build_model.build_model(tokenizer, seed=0).save_pretrained(tmp_path / "model")

    def make(name="tiny_dapo", *overrides):
        loops = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT}/verl_ext/rollout/agent_loops.yaml"
        return make_run(name, *([loops] if "_dapo" in name else []), *overrides)

    return make


def protocol(name, value):
    return f"{'retool' if '_dapo' in name else 'data.retool'}.protocol={value}"


@pytest.fixture
def qwen(other):
    """With the chat template of Qwen2.5-Instruct, which shows tools and calls."""
    other.chat_template = (ROOT / "tests" / "data" / "qwen2.5_chat_template.jinja").read_text()
    return other


@pytest.mark.parametrize(("name", "value"), RUNS)
def test_tokenizer_and_template_fit_both_protocols(name, value, tiny_run, qwen, only_ok):
    only_ok(check_tokenizer(tiny_run(name, protocol(name, value)), qwen))


@pytest.mark.parametrize(("name", "without"), [("tiny_dapo", "+tool=none"), ("tiny_sft", "+tool=none_sft")])
def test_text_rl_has_a_tokenizer_a_template_and_a_partner_without_a_tool(name, without, tiny_run, tokenizer, only_ok):
    run = tiny_run(name, without)
    only_ok(check_tokenizer(run, tokenizer))
    only_ok(check_agreement(run, tokenizer))


def test_a_template_without_tools_is_noticed_where_the_protocol_needs_them(tiny_run, tokenizer, told, only_ok):
    hermes = told(check_tokenizer(tiny_run("tiny_dapo", protocol("tiny_dapo", "hermes")), tokenizer), Level.WARN)[0]
    assert "the chat template leaves out the tools (code_interpreter)" in hermes
    only_ok(check_tokenizer(tiny_run("tiny_dapo"), tokenizer))


@pytest.mark.parametrize(("name", "value"), RUNS)
def test_sft_and_rollout_make_the_same_tokens(name, value, tiny_run, tokenizer, told):
    findings = list(check_agreement(tiny_run(name, protocol(name, value)), tokenizer))
    assert "SFT and rollout encode a trace with a call as the same" in told(findings, Level.OK)[0]
    if value == "hermes":  # the YAML of the other stage has code
        assert "Train the SFT model with the same value" in told(findings, Level.WARN)[0]


def test_a_tokenizer_of_no_chat_model(tiny_run, other, told):
    other.chat_template = None
    assert "has no chat template" in told(check_tokenizer(tiny_run(), other), Level.FAIL)[0]


def test_a_template_that_ends_turns_otherwise(tiny_run, other, told):
    other.chat_template = other.chat_template.replace("<|im_end|>", "</s>")
    assert "does not end the assistant's turn" in told(check_tokenizer(tiny_run(), other), Level.FAIL)[0]


def test_a_tag_that_is_a_special_token(tiny_run, other, told):
    other.add_special_tokens({"additional_special_tokens": ["</code>"]})
    texts = told(check_tokenizer(tiny_run(), other), Level.FAIL)
    assert any(text.startswith("</code>: special tokens in this tokenizer, which end a turn") for text in texts)


def test_a_tokenizer_that_lacks_what_the_protocol_writes(tiny_run, other, monkeypatch, told):
    real = type(other).decode
    monkeypatch.setattr(type(other), "decode", lambda self, ids, **kwargs: real(self, ids, **kwargs).replace("\n", " "))
    assert "does not reproduce what the protocol writes" in told(check_tokenizer(tiny_run(), other), Level.FAIL)[0]


def test_an_end_token_that_the_loop_does_not_know(tiny_run, tokenizer, tmp_path, told):
    run = tiny_run()
    number = tokenizer.convert_tokens_to_ids("7")
    (tmp_path / "model" / "generation_config.json").write_text(
        f'{{"eos_token_id": [{tokenizer.eos_token_id}, {number}]}}'
    )
    assert "vLLM stops at ['7'] (generation_config.json)" in told(check_tokenizer(run, tokenizer), Level.FAIL)[0]


def test_an_end_token_that_has_no_name(tiny_run, other, tmp_path):
    """Llama 3's <|eom_id|>: added as special, and no attribute of the tokenizer."""
    from transformers import AddedToken

    run = tiny_run()
    other.add_tokens([AddedToken("<|eom_id|>", special=True)])
    ids = [other.eos_token_id, other.convert_tokens_to_ids("<|eom_id|>")]
    (tmp_path / "model" / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    assert ids[1] not in other.all_special_ids
    assert not [each for each in check_tokenizer(run, other) if "vLLM stops at" in each.message]


def test_more_tokens_than_the_embedding_has(tiny_run, other, told):
    other.add_tokens([f"<extra_{i}>" for i in range(1000)])
    assert "the model's embedding" in told(check_tokenizer(tiny_run(), other), Level.FAIL)[0]


def test_a_template_argument_that_only_rl_has(tiny_run, other, told):
    """SFT renders without it: the two would drift apart in silence."""
    other.chat_template = "{% if loud %}LOUD{% endif %}" + other.chat_template
    run = tiny_run("tiny_dapo")
    run.config.data.apply_chat_template_kwargs = {"loud": True}
    assert (
        "data.apply_chat_template_kwargs is {'loud': True} in tiny_dapo"
        in told(check_agreement(run, other), Level.WARN)[0]
    )


def test_qwens_template_renders_the_whole_conversation_as_the_rollout_does(tiny_run, qwen, only_ok):
    run = tiny_run("tiny_sft", protocol("tiny_sft", "hermes"))
    findings = [finding for finding in check_agreement(run, qwen) if "protocol is" not in finding.message]
    only_ok(findings)


def test_sft_that_shows_the_interpreters_output_otherwise(tiny_run, tokenizer, monkeypatch, told):
    monkeypatch.setattr("verl_ext.protocols.trace.format_output", lambda stdout, stderr: f"{stdout} {stdout}")
    text = told(check_agreement(tiny_run(), tokenizer), Level.FAIL)[0]
    assert "SFT and rollout encode the same trace differently: at token" in text


def test_a_template_that_renders_past_turns_otherwise(tiny_run, other, told):
    """As templates do that remove the thinking from finished turns."""
    other.chat_template += "{% if messages | length > 3 %}{{ 'late' }}{% endif %}"
    other.chat_template = "{% if messages | length > 3 %}{{ 'early' }}{% endif %}" + other.chat_template
    run = tiny_run("tiny_sft", protocol("tiny_sft", "hermes"))
    texts = told(check_agreement(run, other), Level.WARN)
    assert any("renders the finished conversation differently, as 'early" in text for text in texts), texts


REFUSALS = {
    "no_system": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
    "alternate": "{% for m in messages %}{% if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}",
    "no_tools": "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% endfor %}",
    "always": "{{ raise_exception('of another model') }}",
    "author": "{{ messages[7].content + 1 }}",
}


@pytest.mark.parametrize(("name", "value"), RUNS)
def test_a_template_that_refuses_all_is_a_failure_and_no_bug_of_the_doctor(name, value, tiny_run, other, told):
    for refusal in ("always", "author"):
        broken = copy.deepcopy(other)
        broken.chat_template = REFUSALS[refusal] + other.chat_template
        texts = told(check_tokenizer(tiny_run(name, protocol(name, value)), broken), Level.FAIL)
        assert "the chat template refuses messages of the roles user" in texts[0]


@pytest.mark.parametrize("value", ["code", "hermes"])
def test_a_template_without_turns_of_tools_is_a_failure_only_where_the_protocol_has_them(
    value, tiny_run, other, told, only_ok
):
    other.chat_template = REFUSALS["no_tools"] + other.chat_template
    run = tiny_run("tiny_dapo", protocol("tiny_dapo", value))
    if value == "hermes":
        assert "no tools" in told(check_tokenizer(run, other), Level.FAIL)[0]
    else:
        only_ok(check_tokenizer(run, other))
        only_ok(check_agreement(run, other))


def test_a_template_without_a_generation_prompt(tiny_run, other, told):
    other.chat_template = other.chat_template.replace("add_generation_prompt", "false")
    assert "The chat template has no generation prompt" in told(check_tokenizer(tiny_run(), other), Level.FAIL)[0]


@pytest.mark.parametrize(("name", "value"), RUNS)
def test_a_template_that_opens_the_thinking_fits(name, value, tiny_run, other, told):
    other.chat_template = other.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    run = tiny_run(name, protocol(name, value))
    assert not [each for each in check_tokenizer(run, other) if each.level == Level.FAIL]
    assert "SFT and rollout encode a trace with a call as the same" in told(check_agreement(run, other), Level.OK)[0]


@pytest.mark.parametrize(("name", "value"), RUNS)
def test_a_template_that_asks_for_the_day_is_the_same_for_both(name, value, tiny_run, other, told):
    other.chat_template = "{{ strftime_now('%f %s') }}" + other.chat_template
    assert (
        "SFT and rollout encode a trace with a call as the same"
        in told(check_agreement(tiny_run(name, protocol(name, value)), other), Level.OK)[0]
    )


def test_a_difference_names_its_place(tokenizer):
    one = tokenizer.encode("1 + 2 = 3", add_special_tokens=False)
    two = tokenizer.encode("1 + 2 = 4", add_special_tokens=False)
    mask = [0] * (len(one) - 1) + [1]
    assert first_difference(tokenizer, (one, mask), (one, mask)) is None
    text = first_difference(tokenizer, (one, mask), (two, mask))
    assert text == f"at token {len(one) - 1} SFT has '3' (mask 1), the rollout '4' (mask 1)"
    assert "(mask 0)" in first_difference(tokenizer, (one, mask), (one, [0] * len(one)))
    assert first_difference(tokenizer, (one, mask), (one[:-1], mask[:-1])).startswith(
        f"at token {len(one) - 1} SFT has '3'"
    )


# Data ----------------------------------------------------------------------------------------------------------------


def problem(text, answer="4", **changes):
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 0},
    } | changes


@pytest.fixture
def look(tiny_run, tokenizer, tmp_path):
    """The findings on training rows and validation rows."""

    def check(train, val=(), *overrides, name="tiny_dapo", using=None):
        given = []
        for key, rows in (("data.train_files", train), ("data.val_files", val)):
            path = tmp_path / f"{key}.parquet"
            if len(rows):
                pd.DataFrame(list(rows)).to_parquet(path)
            given.append(f"{key}={path}")
        return list(check_rows(tiny_run(name, *given, *overrides), using or tokenizer))

    return check


def test_good_problems(look, only_ok):
    only_ok(look([problem("What is 1+1?"), problem("What is 2+2?")], [problem("What is 3+3?")]))


@pytest.mark.parametrize(
    ("rows", "level", "message"),
    [
        (
            [problem("What is 1+1?"), problem("What is  1+1 ?")],
            Level.WARN,
            "2 rows have 1 different problems: 1 rows repeat",
        ),
        (
            [problem("What is 1+1?", "2"), problem("What is 1+1?", "3")],
            Level.WARN,
            "1 problem(s) have different answers",
        ),
        (
            [problem("What is 1+1?"), problem("8 9 ?")],
            Level.WARN,
            "1 problem(s) are also in AIME 2024, AIME 2025 or data.val",
        ),
        (
            [problem("1 " * 60), problem("What is 1+1?")],
            Level.FAIL,
            "1 of 2 prompts are longer than data.max_prompt_length=96",
        ),
        ([problem("What?", prompt="What?")], Level.FAIL, "row 0, column prompt: found 'What?'; expected list."),
        ([problem("What?", reward_model={"style": "rule"})], Level.FAIL, "column reward_model.ground_truth"),
        (
            [problem("What?", prompt=[{"role": "system", "content": "?"}])],
            Level.FAIL,
            "the last message is not the user's",
        ),
    ],
)
def test_rows_that_spoil_a_run(rows, level, message, look, told):
    texts = told(look(rows, [problem("8 9 ?")]), level)
    assert any(message in text for text in texts), texts


def test_an_aime_problem_in_the_training_data_is_found(look, told):
    import json

    first = json.loads((ROOT / "data" / "aime" / "aime_2024.jsonl").read_text().splitlines()[0])
    text = first.get("problem") or first.get("Problem")
    texts = told(look([problem(text.replace(" ", "  ")), problem("What is 1+1?")]), Level.WARN)
    assert any("1 problem(s) are also in AIME 2024" in each for each in texts), texts


def test_prompts_that_verl_drops_are_a_warning(look, told):
    rows = [problem("1 " * 60), problem("What is 1+1?")]
    assert "verl drops them" in told(look(rows, (), "data.filter_overlong_prompts=true"), Level.WARN)[0]


def test_prompts_that_only_the_interpreters_schema_makes_too_long_are_a_failure(look, qwen, told):
    """verl's filter keeps them, and its agent loop would cut their heads off."""
    rows = [problem("1 " * 300), problem("What is 1+1?")]
    options = ("retool.protocol=hermes", "data.filter_overlong_prompts=true", "data.max_prompt_length=700")
    text = told(look(rows, (), *options, using=qwen), Level.FAIL)[0]
    assert "1 of 2 prompts are longer" in text and "verl does not drop 1 of them" in text
    named = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={ROOT}/configs/tools/code_interpreter.yaml"
    assert "verl drops them" in told(look(rows, (), *options, named, using=qwen), Level.WARN)[0]


@pytest.mark.parametrize(("refusal", "first"), [("no_system", "system"), ("alternate", "user")])
def test_rows_that_the_template_refuses_are_named(look, tiny_run, other, told, refusal, first):
    other.chat_template = REFUSALS[refusal] + other.chat_template
    bad = [{"role": first, "content": "Use code."}, {"role": "user", "content": "What is 1+1?"}]
    rows = [problem("What is 2+2?"), problem("", prompt=bad), problem("What is 3+3?")]
    text = told(look(rows, using=other), Level.FAIL)[0]
    assert "1 of 3 prompts cannot be rendered (" in text and "row 1: the chat template refuses messages of" in text
    bad = trace() | {"messages": [trace()["messages"][0] | {"role": first}, *trace()["messages"]]}
    text = told(look([trace(), bad], name="tiny_sft", using=other), Level.FAIL)[0]
    assert "1 of 2 rows are not traces (row 1: the chat template refuses messages of" in text


def test_the_functions_of_a_file_are_counted_with_the_prompt(look, tiny_run, qwen, tmp_path, told, only_ok):
    """verl's rollout also gives the chat template the schemas of `function_tool_path`."""
    (tmp_path / "tools.py").write_text(
        "from verl.tools.function_tool import function_tool\n\n\n@function_tool\ndef cost_of(item: str) -> str:\n"
        f"    '''Look up {'1 ' * 500}\n\n    Args:\n        item: its name\n    '''\n    return '7'\n"
    )
    hermes, limit = "retool.protocol=hermes", "data.max_prompt_length=1000"
    rows = [problem("What is 1+1?"), problem("What is 2+2?")]
    tools = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path}/tools.py"
    only_ok(look(rows, (), hermes, limit, using=qwen))
    text = told(look(rows, (), hermes, limit, tools, using=qwen), Level.FAIL)[0]
    assert "2 of 2 prompts are longer than data.max_prompt_length=1000" in text and "tools included" in text
    assert "as the same" in told(check_agreement(tiny_run("tiny_dapo", hermes, tools), qwen), Level.OK)[0]
    broken = tiny_run("tiny_dapo", hermes, tools.replace("tools.py", "none.py"))
    assert "the tools cannot be loaded: FileNotFoundError" in told(check_tokenizer(broken, qwen), Level.FAIL)[0]


def test_what_verl_prints_of_a_tool_is_not_in_the_report(tiny_run, capsys):
    """Its tools print their schema when they are made; `--json` would be none."""
    tools = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={ROOT}/configs/tools/code_interpreter.yaml"
    assert [tool.name for tool in load_tools(tiny_run("tiny_dapo", tools))] == ["code_interpreter"]
    said = capsys.readouterr()
    assert said.out == "" and "code_interpreter" in said.err


def trace(code="print(1+1)", **changes):
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}
    messages = [
        {"role": "user", "content": "1+1?", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "\\boxed{2}", "tool_calls": None},
    ]
    return {"messages": messages} | changes


def test_traces(look, told, only_ok):
    only_ok(look([trace(), trace("print(2)")], name="tiny_sft"))
    bad = trace() | {"messages": trace()["messages"][:3]}
    text = told(look([trace(), bad], name="tiny_sft"), Level.FAIL)[0]
    assert "1 of 2 rows are not traces (row 1:" in text
    assert (
        "1 of 2 rows are not traces"
        in told(look([trace(), bad], (), "data.retool.bad_rows=drop", name="tiny_sft"), Level.WARN)[0]
    )
    long = told(look([trace(), trace("1 " * 200)], name="tiny_sft"), Level.FAIL)[0]
    assert "1 of 2 traces are longer than data.max_length=256" in long
    assert (
        "1 of 2 traces repeat an earlier one word for word"
        in told(look([trace(), trace()], name="tiny_sft"), Level.WARN)[0]
    )
