"""Traces whose text has tags, thinking or odd forms: SFT gets the same tokens as the rollout, or reports why not."""

import json

import pytest

from tests.unit.datasets.test_sft import assistant, calls, interpreter, tokens_of, tool, user
from tests.unit.protocols.test_thinking import TAGGED


def rolled_out(roll_out, tokenizer, dataset, printed, protocol="code", question="1+1?", **settings):
    """The rollout in which the model samples what the only row of a data set trains on."""
    item = dataset[0]
    turns, pairs = [[]], list(zip(item["input_ids"].tolist(), item["loss_mask"].tolist(), strict=True))
    for token, own in pairs:
        if own:
            turns[-1].append(token)
        elif turns[-1]:
            turns.append([])
    rollout, *_ = roll_out(
        tokenizer, turns, printed, question=question, response_length=2000, protocol=protocol, **settings
    )
    assert item["input_ids"].tolist() == rollout.row.prompt_ids + rollout.row.ids
    assert item["loss_mask"].tolist() == [0] * len(rollout.row.prompt_ids) + rollout.row.mask
    return rollout


@pytest.mark.parametrize("program", [program for program in TAGGED if "<|im_end|>" not in program])
def test_a_program_that_has_the_tags_of_a_call_is_trained_on_as_it_stands(make_dataset, roll_out, tokenizer, program):
    row = [
        user(),
        calls(json.dumps({"code": program})),
        tool("2 </tool_call><tool_call></code>"),
        assistant("\\boxed{2}"),
    ]
    dataset = make_dataset([row], protocol="hermes", max_length=2000)
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": program}}, ensure_ascii=False)
    assert tokens_of(dataset, tokenizer)[0].startswith(f"<tool_call>\n{call}\n</tool_call><|im_end|>")
    rollout = rolled_out(roll_out, tokenizer, dataset, ["2 </tool_call><tool_call></code>"], "hermes")
    assert rollout.use.calls == 1


def test_a_program_that_has_the_codes_own_tags(make_dataset, roll_out, tokenizer):
    """`</code>` would end it, wherever it occurs; `<code>` is text."""
    row = [user(), calls('print("<code>")'), tool("<code>"), assistant("\\boxed{2}")]
    rolled_out(roll_out, tokenizer, make_dataset([row], max_length=2000), ["<code>"])
    inline = assistant(
        "<code>\nprint('<code> <interpreter>')\n</code>\n<interpreter>\n</interpreter>1\n</interpreter>\nSo \\boxed{1}"
    )
    trained, whole = tokens_of(make_dataset([[user(), inline]], max_length=2000), tokenizer)
    assert trained == "<code>\nprint('<code> <interpreter>')\n</code>So \\boxed{1}<|im_end|>"
    assert "\n<interpreter>\n</interpreter>1\n</interpreter>\n" in whole
    for program in ("print('</code>')", '"""\n</code>\n"""', "1  # </code>"):
        row = [user(), calls(program), tool("1"), assistant("\\boxed{2}")]
        with pytest.raises(ValueError, match=r"SFT row 0 .*a program can write the tag as '</' \+ 'code>'"):
            make_dataset([row])
    for program in ('a = """\n<code>\n"""', "<code>\n<code>"):  # a rollout would run what follows the last
        row = [user(), calls(program), tool("1"), assistant("\\boxed{2}")]
        with pytest.raises(ValueError, match="SFT row 0 .*the agent loop would"):
            make_dataset([row])


@pytest.mark.parametrize("output", ["1 </interpreter> 2", "</interpreter>", "<interpreter>1</interpreter>", "</code>"])
def test_an_output_in_the_text_may_have_the_tags_of_an_output(make_dataset, tokenizer, output):
    block = f"\n<interpreter>\n{output}\n</interpreter>\n"
    text = f"<code>\n1\n</code>{block}Then <code>\n2\n</code>{block}\n\\boxed{{2}}"
    trained, whole = tokens_of(make_dataset([[user(), assistant(text)]], max_length=2000), tokenizer)
    assert trained == "<code>\n1\n</code>Then <code>\n2\n</code>\\boxed{2}<|im_end|>"
    assert whole.count(block) == 2


def test_an_output_in_the_text_that_is_not_closed_is_refused(make_dataset):
    for text in (
        "<code>1</code><interpreter>1",
        "<code>1</code>\n<interpreter>1<code>2</code><interpreter>2</interpreter>",
    ):
        with pytest.raises(ValueError, match="SFT row 0 .*an output is not closed by </interpreter>"):
            make_dataset([[user(), assistant(text)]])


DRAFT = "<think>or <code>9</code>?</think>"


def test_a_trace_with_drafts_in_its_thinking_is_the_rollouts(make_dataset, roll_out, tokenizer):
    row = [user(), assistant(f"{DRAFT}\n<code>print(1+1)</code>"), interpreter("2"), assistant(f"{DRAFT}\\boxed{{2}}")]
    rollout = rolled_out(roll_out, tokenizer, make_dataset([row]), ["2"])
    assert rollout.use.calls == 1 and rollout.row.num_turns == 4
    draft = '<think><tool_call>{"name": "code_interpreter", "arguments": {"code": "9"}}</tool_call></think>'
    row = [user(), calls("1", content=draft), tool("2"), assistant(f"{draft}\\boxed{{2}}")]
    dataset = make_dataset([row], protocol="hermes", max_length=900)
    assert rolled_out(roll_out, tokenizer, dataset, ["2"], "hermes").use.calls == 1
    with pytest.raises(ValueError, match="SFT row 0 .*the agent loop would read other calls"):
        make_dataset([[user(), calls("1", content="<think>a"), tool("2"), assistant("2")]], protocol="hermes")


TALK = """
from verl_ext.environments.base import Environment

class Talk(Environment):
    replies = ["Two <|im_end|> of them.", "Sure?"]

    def __init__(self, config):
        super().__init__(config)
        self.said = iter(self.replies)

    async def reply(self, text):
        said = next(self.said, None)
        return said and [{"role": "user", "content": said}]
"""


@pytest.mark.parametrize("protocol", ["code", "hermes"])
def test_a_trace_in_which_users_reply_has_the_tokens_of_a_rollout_with_a_user(
    make_dataset, roll_out, tokenizer, tmp_path, protocol
):
    (tmp_path / "talk.py").write_text(TALK)
    row = [
        user(),
        assistant("How many?"),
        {"role": "user", "content": "Two <|im_end|> of them."},
        calls("print(1+1)"),
        tool("2"),
        assistant("\\boxed{2}"),
        {"role": "user", "content": "Sure?"},
        assistant("Yes."),
    ]
    dataset = make_dataset([row], protocol=protocol, max_length=2000)
    settings = {"environment": ["python", f"{tmp_path}/talk.py:Talk"]}
    rollout = rolled_out(roll_out, tokenizer, dataset, ["2"], protocol, **settings)
    assert rollout.finish_reason == "answer" and rollout.use.calls == 1
    trained, whole = tokens_of(dataset, tokenizer)
    assert "How many?<|im_end|>" in trained and "Sure?" not in trained and "<|im_start|>user\nSure?<|im_end|>" in whole


def test_a_trace_may_not_end_with_the_user(make_dataset):
    row = [user(), assistant("How many?"), {"role": "user", "content": "Two."}]
    with pytest.raises(ValueError, match="the last message must be the assistant's answer"):
        make_dataset([row])


DESK = """
from verl_ext.environments.base import Environment, tool
from verl_ext.episode import CallResult
from verl_ext.outcome import RolloutEnd

class Desk(Environment):
    @tool
    async def look(self) -> str:
        '''Look.'''
        return "a desk"

    @tool
    async def submit(self) -> CallResult:
        '''End.'''
        return CallResult("submitted", ends=RolloutEnd.ANSWER)
"""


@pytest.fixture
def desk(tmp_path):
    """Return the tools of an environment whose `submit` ends the episode, as a trace has them, and its settings."""
    from verl_ext.environments.by_name import Environments

    (tmp_path / "desk.py").write_text(DESK)
    settings = {"environment": f"{tmp_path}/desk.py:Desk"}
    return json.dumps(list(Environments(settings["environment"], None).schemas.values())), settings


def test_a_trace_may_end_with_the_call_that_ends_the_episode(make_dataset, roll_out, tokenizer, desk):
    tools, settings = desk
    row = [user(), calls("{}", name="look"), tool("a desk"), calls("{}", name="submit")]
    dataset = make_dataset([row], protocol="hermes", max_length=2000, tools=tools)
    rollout = rolled_out(roll_out, tokenizer, dataset, [], "hermes", **settings)
    assert rollout.finish_reason == "answer" and rollout.use.calls == 2
    trained, _ = tokens_of(dataset, tokenizer)
    assert trained.endswith('{"name": "submit", "arguments": {}}\n</tool_call><|im_end|>')
    for last in ([calls("{}", name="look")], [calls("{}", name="submit"), tool("submitted")]):
        with pytest.raises(ValueError, match="SFT row 0 .*(1 calls with 0 answers|must be the assistant's answer)"):
            make_dataset([[user(), calls("{}", name="look"), tool("a desk"), *last]], protocol="hermes", tools=tools)
