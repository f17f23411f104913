"""The protocol without calls, and the instructions that its prompts have in place of those for a tool."""

import pytest

from verl_ext.protocols.base import CODE_TOOL, Call
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.instructions import PROMPTS, bare_problem, without_tool
from verl_ext.protocols.trace import rendered_trace

PROBLEM = "Tom has 12 boxes of 30 pens. How many pens?"
ANSWER = {"role": "assistant", "content": "12*30=360, so \\boxed{360}"}


@pytest.fixture
def protocol(tokenizer):
    return make_protocol("text", tokenizer, {}, max_parallel_calls=1)


@pytest.mark.parametrize("name", PROMPTS)
def test_instructions_for_a_tool_become_those_without_one(name):
    shown = without_tool(PROMPTS[name].format(problem=PROBLEM))
    assert shown == PROMPTS["text_short" if name.endswith("_short") else "text"].format(problem=PROBLEM)
    assert without_tool(shown) == shown and bare_problem(shown) == PROBLEM
    assert "code" not in shown and "\\boxed{" in shown


def test_a_prompt_without_instructions_stays_as_it_is():
    assert without_tool(f" {PROBLEM}\n") == f" {PROBLEM}\n"


def test_only_the_last_message_of_the_user_has_the_problem(protocol):
    asked = {"role": "user", "content": PROMPTS["code"].format(problem=PROBLEM)}
    messages = [{"role": "system", "content": "Be brief."}, asked, ANSWER, asked]
    shown = {"role": "user", "content": PROMPTS["text"].format(problem=PROBLEM)}
    assert protocol.prompt(messages) == [*messages[:3], shown]
    assert "<code>" in asked["content"], "the row stays as it is"


def test_whatever_the_model_writes_is_text(protocol):
    for text in ("<code>\nprint(1)\n</code>", '<tool_call>\n{"name": "code_interpreter"}\n</tool_call>', "\\boxed{1}"):
        assert protocol.parse(text, {}, ended=True) == [] and protocol.call_end(text) is None
    assert protocol.schemas({CODE_TOOL: {}}) is None


def test_a_trace_without_calls_is_one_turn_of_the_model(protocol, tokenizer):
    trace = [{"role": "user", "content": PROMPTS["code_short"].format(problem=PROBLEM)}, ANSWER]
    prompt, *response = rendered_trace(trace, None, protocol, tokenizer, {})
    assert PROMPTS["text_short"].format(problem=PROBLEM) in prompt.parts[0] and not prompt.own
    assert [(segment.parts, segment.own) for segment in response] == [
        ([ANSWER["content"]], True),
        (["<|im_end|>"], True),
    ]


def test_a_trace_with_a_call_is_refused(protocol, tokenizer):
    called = [{"role": "assistant", "content": "<code>print(1)</code>"}, {"role": "interpreter", "content": "1"}]
    with pytest.raises(ValueError, match="the protocol text makes no calls, but there is one of 'code_interpreter'"):
        rendered_trace([{"role": "user", "content": PROBLEM}, *called, ANSWER], None, protocol, tokenizer, {})
    with pytest.raises(ValueError, match="makes no calls"):
        protocol.write("", [Call(CODE_TOOL, {"code": "1"}, 0)])
