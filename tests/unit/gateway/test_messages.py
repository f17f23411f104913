"""When two messages are one, what the template gets of a message, and what a client is told of a turn."""

import json

import pytest

from verl_ext.gateway.messages import Refused, chain, normal, told
from verl_ext.protocols.hermes import HermesProtocol

CALL = {"type": "function", "function": {"name": "calc", "arguments": {"a": 1, "b": [2]}}}


def key(*messages):
    return chain([*map(normal, messages)])[-1]


def assistant(content="", *calls, **more):
    return {"role": "assistant", "content": content, "tool_calls": [*calls]} | more


def call(arguments, **more):
    return {"id": "1", "type": "function", "function": {"name": "calc", "arguments": arguments}} | more


SAME = [
    ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}, "a developer is the system"),
    (assistant("x"), {"role": "assistant", "content": "x"}, "no calls, or an empty list"),
    (assistant(None, CALL), assistant("", CALL), "content null"),
    (assistant(" x\n"), assistant("x"), "white space around the model's text"),
    (assistant("x", reasoning_content="hm"), assistant("x"), "reasoning in a separate field"),
    (assistant("x", name=None, refusal=None), assistant("x"), "empty fields"),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "ab"},
        "parts of text",
    ),
    (assistant("", call('{"b": [2], "a": 1}')), assistant("", CALL), "order of keys, JSON as text"),
    (assistant("", call('{\n "a": 1,\n "b": [\n2]}', id="2")), assistant("", CALL), "spacing, id of the call"),
    (assistant("", call("")), assistant("", call({})), "no arguments"),
    (
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "tool", "content": "2"},
        "id of the answered call",
    ),
]
OTHER = [
    ({"role": "user", "content": " x"}, {"role": "user", "content": "x"}, "white space of a user"),
    ({"role": "tool", "content": "x\n"}, {"role": "tool", "content": "x"}, "white space of a tool"),
    (assistant("a b"), assistant("a  b"), "white space within the model's text"),
    (assistant("x"), {"role": "user", "content": "x"}, "another role"),
    (assistant("", CALL), assistant("", CALL, CALL), "another call"),
    (assistant("", call({"a": 1})), assistant("", call({"a": "1"})), "another type of argument"),
]


@pytest.mark.parametrize(("one", "other", "why"), SAME, ids=[why for *_, why in SAME])
def test_what_a_client_writes_in_another_form_is_the_same_message(one, other, why):
    assert key(one) == key(other), why


@pytest.mark.parametrize(("one", "other", "why"), OTHER, ids=[why for *_, why in OTHER])
def test_what_says_something_else_is_another_message(one, other, why):
    assert key(one) != key(other), why


def test_a_chain_has_a_digest_of_each_beginning_and_depends_on_all_before():
    user, turn = {"role": "user", "content": "a"}, normal(assistant("b"))
    digests = chain([user, turn, user])
    assert digests[:2] == chain([user]) and len({*digests}) == 4
    assert chain([user], start=digests[2]) == digests[2:], "a chain may continue another"
    assert chain([turn, user])[-1] != chain([user, turn])[-1]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("hi", "expected objects with a role of system, user, assistant, tool; got 'hi'"),
        ({"role": "function", "content": "x"}, "role of system, user, assistant, tool; got {'role': 'function'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "reads text only, but a message has the part"),
        ({"role": "user", "content": [{"type": "text"}]}, "reads text only"),
        ({"role": "user", "content": ["x"]}, "reads text only"),
        ({"role": "user", "content": 1}, "expected a text, a list of text parts or null; got 1"),
        (assistant("", {"id": "x"}), "expected objects with a function that has a name"),
        (assistant("", "x"), "expected objects with a function that has a name"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_with_a_sentence(message, sentence):
    with pytest.raises(Refused, match=sentence) as refused:
        normal(message)
    assert refused.value.status == 400


def test_the_template_gets_parsed_arguments_and_no_empty_field():
    found = normal(assistant(None, call('{"a": 1}'), name=None, reasoning_content="hm", refusal=None))
    assert found == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "1", "function": {"name": "calc", "arguments": {"a": 1}}}],
        "reasoning_content": "hm",
    }
    assert normal(assistant("", call("{not JSON")))["tool_calls"][0]["function"]["arguments"] == "{not JSON"
    assert "reasoning_content" not in normal(assistant("<think>hm</think>x", reasoning="hm")), "it is said once"


# What a client is told ------------------------------------------------------------------------------------------------

NO_NAME = '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'  # an answer's JSON cannot have it
ONE = '<tool_call>\n{"name": "calc", "arguments": {"e": "1"}}\n</tool_call>'


@pytest.fixture(scope="module")
def parser(qwen_tokenizer):
    return HermesProtocol(qwen_tokenizer, max_parallel_calls=10**9)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("fine", "fine", []),
        ("  fine\n", "  fine\n", []),
        (ONE, None, [{"e": "1"}]),
        (f"so\n{ONE}\n{ONE}", "so", [{"e": "1"}] * 2),
        (f"so {ONE} then {ONE} bye", "so\nthen\nbye", [{"e": "1"}] * 2),
        (f"<think>\n{ONE}\n</think>\n\n{ONE}", f"<think>\n{ONE}\n</think>", [{"e": "1"}]),
        (f"<think>\n{ONE}", f"<think>\n{ONE}", []),
        ('<tool_call>{"arguments": {}, "name": "no such tool"}</tool_call>', None, [{}]),
        (
            '<tool_call>{"name": "run", "arguments": {"code": "```py\\nx\\n```"}}</tool_call>',
            None,
            [{"code": "```py\nx\n```"}],
        ),
        (f'{ONE}<tool_call>{{"name": "calc"}}</tool_call>', f'{ONE}<tool_call>{{"name": "calc"}}</tool_call>', []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        (NO_NAME, NO_NAME, []),
        (ONE[:-12], ONE[:-12], []),
        ("use <tool_call> tags", "use <tool_call> tags", []),
    ],
)
def test_a_turn_is_told_as_text_and_calls(parser, text, content, arguments):
    found, calls = told(text, [CALL], ended=True, parser=parser)
    assert (found, [json.loads(each["function"]["arguments"]) for each in calls]) == (content, arguments)
    assert len({each["id"] for each in calls}) == len(calls)


def test_nothing_is_a_call_without_tools_or_in_a_turn_that_was_cut_or_within_thinking(parser):
    assert told(ONE, None, ended=True, parser=parser) == (ONE, [])
    assert told(ONE, [CALL], ended=False, parser=parser) == (ONE, [])
    assert told(ONE, [CALL], ended=True, parser=parser, thinking=True) == (ONE, [])
    content, calls = told(f"hm</think>{ONE}", [CALL], ended=True, parser=parser, thinking=True)
    assert content == "hm</think>" and len(calls) == 1


def test_a_turn_has_as_many_calls_as_the_model_made(parser):
    assert len(told(ONE * 200, [CALL], ended=True, parser=parser)[1]) == 200
