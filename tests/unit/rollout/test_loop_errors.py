"""The real RetoolAgentLoop as in test_loop.py: what the model reads of an error if an output may have few tokens."""

import pytest

from tests.unit.rollout.test_loop import CALL
from verl_ext.protocols.base import ERROR_TOKENS, SegmentEncoder, cut_output, cut_reply
from verl_ext.sandbox.client import RunResult

ADVICE = 'write a line break as \\n, a quote as \\" and a backslash as \\\\'
LONG_CALL = '{"name": "code_interpreter", "arguments": {"code": "print("a\n")", "x": "' + "y" * 300 + '"}}'


def failed(stderr, stdout=""):
    return RunResult("code_error", stdout, stderr, 1, 0.0, 0.1, 1, "")


def reply_of(roll_out, tokenizer, text, results=(), **settings):
    """What the model reads after a turn, and the rollout."""
    turns = [tokenizer.encode(part, add_special_tokens=False) for part in (text, "\\boxed{2}<|im_end|>")]
    episode, *_ = roll_out(tokenizer, turns, results, **{"response_length": 1000, "traceback": "full"} | settings)
    (_, start), (end, _) = episode.row.model_spans
    return tokenizer.decode(episode.row.ids[start:end]), episode


@pytest.mark.parametrize("limit", [1, 9, 48])
def test_what_was_wrong_with_a_call_and_what_to_do_are_read_whatever_an_output_may_have(
    roll_out, qwen_tokenizer, limit
):
    bad = f"<tool_call>{LONG_CALL}</tool_call><|im_end|>"
    told, episode = reply_of(roll_out, qwen_tokenizer, bad, protocol="hermes", max_tool_response_tokens=limit)
    assert "FormatError: the call is not valid JSON: Expecting ',' delimiter" in told and ADVICE in told
    assert episode.use.outputs_cut == 0


@pytest.mark.parametrize("limit", [1, 9, 48])
def test_the_last_line_of_a_traceback_is_read_whatever_an_output_may_have(roll_out, qwen_tokenizer, limit):
    error = "ValueError: the divisor is 0 in round three of the loop, expected a number above it; look at how n falls"
    lines = "\n".join(f'  File "main.py", line {i}, in f' for i in range(40))
    result = failed(f"Traceback (most recent call last):\n{lines}\n{error}", "7" * 500)
    told, episode = reply_of(roll_out, qwen_tokenizer, CALL, [result], max_tool_response_tokens=limit)
    assert "characters cut ...]\n" in told and f"\n{error}\n" in told
    assert len(qwen_tokenizer.encode(told)) < 48 + len(qwen_tokenizer.encode(error)) + 40
    assert episode.use.outputs_cut == 1


@pytest.mark.parametrize("limit", [1, 48])
def test_of_an_error_without_end_both_ends_are_read(roll_out, qwen_tokenizer, limit):
    told, _ = reply_of(
        roll_out, qwen_tokenizer, CALL, [failed(f"KeyError: {'x7 ' * 5000}is no key")], max_tool_response_tokens=limit
    )
    assert "KeyError: x7" in told and "is no key" in told and len(qwen_tokenizer.encode(told)) < ERROR_TOKENS + 40


def test_a_message_of_a_tool_keeps_its_advice(roll_out, qwen_tokenizer):
    from verl.tools.function_tool import FunctionTool
    from verl.tools.schemas import OpenAIFunctionToolSchema

    from verl_ext.environments.tool_errors import ToolError

    def price_of(item):
        raise ToolError(f"there is no item {item!r} in the shop; take one of bread, cheese, butter and milk")

    parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    function = {"name": "price_of", "description": "Look up a price.", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    tools = [FunctionTool("price_of", price_of, schema)]
    call = '<tool_call>{"name": "price_of", "arguments": {"item": "gold"}}</tool_call><|im_end|>'
    told, _ = reply_of(roll_out, qwen_tokenizer, call, tools=tools, protocol="hermes", max_tool_response_tokens=5)
    assert "ToolError: there is no item 'gold' in the shop; take one of bread, cheese, butter and milk" in told


@pytest.mark.parametrize("error", ["", "ZeroDivisionError: division by zero"])
@pytest.mark.parametrize("limit", [30, 48, 200])
def test_what_programs_say_is_cut_as_before(qwen_tokenizer, limit, error):
    """For a program that ended well, and for one whose last line is in what is left."""
    encode = SegmentEncoder(qwen_tokenizer).encode_output
    text = "\n".join(["7 " * 400, error]).strip()
    shown = cut_reply(qwen_tokenizer, text, error, limit=limit, share=500, encode=encode)
    assert shown == cut_output(qwen_tokenizer, text, limit, encode) and shown.endswith(error)


@pytest.mark.parametrize("share", [0, 1, 10, 40, 127])
@pytest.mark.parametrize("size", [10, 4000])
def test_no_error_takes_more_than_its_share_of_the_room(qwen_tokenizer, share, size):
    encode = SegmentEncoder(qwen_tokenizer).encode_output
    error = "ValueError: " + "a1 " * size + "the end"
    shown = cut_reply(qwen_tokenizer, f"{'out ' * 900}\n{error}", error, limit=48, share=share, encode=encode)
    notes = 2 * len(encode("\n[... 12345 characters cut ...]\n"))
    assert len(encode(shown)) <= max(share, min(48, share)) + notes


def test_at_the_end_of_the_budget_an_error_leaves_room_for_an_answer(roll_out, tokenizer, encode, answer):
    call = encode(CALL)
    episode, server, _ = roll_out(
        tokenizer, [call, answer], [failed("ValueError: " + "7" * 500)], response_length=len(call) + 80
    )
    assert episode.finish_reason == "answer" and "ValueError" in tokenizer.decode(episode.row.ids)
    assert server.calls[1]["max_tokens"] >= len(answer)
