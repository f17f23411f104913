"""The parser of the hermes protocol; test_hermes_loop.py has the loop with it."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.protocols.base import CODE_SCHEMA, MALFORMED_KINDS, Call, MalformedCall
from verl_ext.protocols.hermes import MAX_SURPLUS, HermesProtocol

ADD_SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "x"}, "b": {"type": "number", "description": "y"}},
            "required": ["a", "b"],
        },
    },
}
TOOLS = {"code_interpreter": CODE_SCHEMA, "add": ADD_SCHEMA}
LOG = Path(__file__).parents[2] / "data" / "tool_decode_errors.txt"
DECODE_ERRORS = re.findall(r"Failed to decode tool call: (.+: line (\d+) column (\d+) \(char (\d+)\))", LOG.read_text())


def call_text(name="code_interpreter", **arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@pytest.fixture
def parse(tokenizer):
    def parse(text, *, ended=True, **options):
        return HermesProtocol(tokenizer, **{"max_parallel_calls": 4} | options).parse(text, TOOLS, ended=ended)

    return parse


def broken_json(message, line, column, char):
    """A call that Python's decoder refuses with this very message at this very place, and its code once repaired.

    The log has messages and places only; the calls themselves were not kept.
    """
    start = '\n{"name": "code_interpreter", "arguments": {"code": "'
    kind = message.partition(":")[0]
    fill = "x" * (int(char) - len(start))
    if kind == "Invalid control character at":
        return start + fill + '\nprint(1)"}}\n', fill + "\nprint(1)"
    if kind == r"Invalid \escape":
        return start + fill + r'\(x\)"}}' + "\n", fill + r"\(x\)"
    if kind == "Extra data":
        whole = '\n{"name": "code_interpreter", "arguments": {"code": "%s"}}'
        return whole % ("x" * (int(char) - len(whole) + 2)) + "}\n", None
    if kind == "Expecting ',' delimiter":
        if line == "3":  # both the string and the line end, and no comma follows
            return start + fill[:-2] + '"\n"y"}}', None
        return start + fill[:-1] + '"y"}}\n', None
    if kind == "Expecting value":
        return '\n{"name": ' + " " * (int(char) - 10) + "}\n", None
    if kind == "Expecting property name enclosed in double quotes":
        return '\n{"name": "code_interpreter",'.ljust(int(char)) + "arguments: 1}\n", None
    raise AssertionError(f"no case for {message}")


@pytest.mark.parametrize(("message", "line", "column", "char"), DECODE_ERRORS)
def test_what_a_public_run_could_not_decode_is_told_to_the_model(parse, message, line, column, char):
    body, code = broken_json(message, line, column, char)
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads(body)
    assert str(raised.value) == message

    (error,) = parse(f"Let me see.\n<tool_call>{body}</tool_call>")
    assert isinstance(error, MalformedCall) and error.kind == "bad_json"
    assert str(error).startswith(f"FormatError: the call is not valid JSON: {message}.")

    (repaired,) = parse(f"<tool_call>{body}</tool_call>", repair_json=True)
    if code is None:
        assert isinstance(repaired, MalformedCall)
    else:
        assert repaired == Call("code_interpreter", {"code": code}, 0, repaired=True)


def test_the_log_of_decode_errors_is_read_whole():
    assert len(DECODE_ERRORS) == len(LOG.read_text().splitlines()) == 31


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("<tool_call>\n[1]\n</tool_call>", "bad_json", 'expected {"name": <tool>, "arguments": {...}}, got [1]'),
        ('<tool_call>{"arguments": {}}</tool_call>', "bad_json", 'got {"arguments": {}}'),
        (call_text("sin", x=1), "unknown_tool", 'unknown tool "sin"; the tools are add, code_interpreter'),
        (call_text(), "missing_argument", "code_interpreter needs the argument 'code'"),
        (call_text("add", a=1), "missing_argument", "add needs the argument 'b'"),
        (call_text("add", a=1, b="2"), "missing_argument", "add: 'b' must be number, got \"2\""),
        (call_text("add", a=1, b=True), "missing_argument", "add: 'b' must be number, got true"),
        ('<tool_call>{"name": "add"}</tool_call>', "missing_argument", "got arguments null"),
        (call_text(code=["print(1)"]), "missing_argument", "'code' must be string"),
        (call_text(code=" \n"), "empty_code", "code_interpreter got no code"),
        (call_text(code="```python\n\n```"), "empty_code", "code_interpreter got no code"),
        ('<tool_call>\n{"name": "add"', "unclosed_tag", "<tool_call> without </tool_call>"),
        ('{"name": "add"}\n</tool_call>', "unopened_tag", "</tool_call> without <tool_call>"),
        ("<code>print(1)</code>", "other_protocol", "write calls as JSON between <tool_call> and </tool_call>"),
    ],
)
def test_a_malformed_call_has_a_kind_and_says_what_was_wrong(parse, text, kind, told):
    (error,) = parse(text)
    assert error.kind == kind and kind in MALFORMED_KINDS
    assert told in str(error) and str(error).startswith("FormatError: ")


@pytest.mark.parametrize(
    ("text", "arguments", "why"),
    [
        (call_text(code="print('</code>')"), {"code": "print('</code>')"}, "other tags are text"),
        (call_text(code="```py\nprint(1)\n```"), {"code": "print(1)"}, "less one fence"),
        (call_text(code="s = '<tool_call>'"), {"code": "s = '<tool_call>'"}, "the tag in a string"),
        (call_text("add", a=1, b=2.5), {"a": 1, "b": 2.5}, "integers are numbers"),
        (call_text("add", a=1, b=2, c=3), {"a": 1, "b": 2, "c": 3}, "unknown to the schema: the tool's matter"),
    ],
)
def test_a_good_call(parse, text, arguments, why):
    (call,) = parse("Thinking. " + text + "<|im_end|>")
    assert call.arguments == arguments, why
    assert call.start == len("Thinking. ") and not call.repaired


def add(a):
    return f'{{"name": "add", "arguments": {{"a": {a}, "b": 1}}}}'


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[" * 20_000, "nested more than 64 deep"),
        *((("[" * depth) + ("]" * depth), "nested more than 64 deep") for depth in (65, 500, 990, 993, 1200)),
        ('{"a":' * 993 + "1" + "}" * 993, "nested more than 64 deep"),
        (add("[" * 900 + "]" * 900), "nested more than 64 deep"),
        ('{"name": "code_interpreter", "arguments": {"code": %s}}' % ("1" * 5000), "an integer has 5000 digits"),
        (add("1" * 301), "an integer has 301 digits, more than 300"),
        (add("1e999"), 'the number "1e999" is too large'),
        (add("NaN"), "NaN is not a JSON number"),
        (add("-Infinity"), "-Infinity is not a JSON number"),
        ('{"name": "add", "name": "sin", "arguments": {}}', 'the key "name" appears twice'),
        (add("1").replace('"b"', '"a"'), 'the key "a" appears twice'),
    ],
    ids=lambda value: value[:20] if len(value) > 30 else value,
)
@pytest.mark.parametrize("repair_json", [False, True])
def test_what_is_no_json_for_others_is_the_models_error(parse, body, told, repair_json):
    (error,) = parse(f"<tool_call>{body}</tool_call>", repair_json=repair_json)
    assert error.kind == "bad_json" and "the call is not valid JSON" in str(error) and told in str(error)


@pytest.mark.parametrize("a", ['"\\ud800"', '{"\\udfff": 1}', '["x\\u0000"]'])
def test_text_that_no_file_or_program_can_have_is_the_models_error(tokenizer, a):
    tools = {"add": {"function": {"parameters": {"properties": {"a": {}, "b": {}}}}}}
    protocol = HermesProtocol(tokenizer, max_parallel_calls=1)
    (error,) = protocol.parse(f"<tool_call>{add(a)}</tool_call>", tools, ended=True)
    assert error.kind == "bad_json" and "'a' has a character that is not valid in text" in str(error)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [("array", [1], "1"), ("object", {"x": 1}, [1]), ("boolean", False, 0), ("integer", 1, 1.5), ("null", None, 0)],
)
def test_a_value_of_another_type_is_the_models_error(tokenizer, kind, right, wrong):
    tools = {"ask": {"function": {"parameters": {"properties": {"it": {"type": kind}}}}}}
    (error,) = HermesProtocol(tokenizer).parse(call_text("ask", it=wrong), tools, ended=True)
    assert error.kind == "missing_argument" and f"'it' must be {kind}, got {json.dumps(wrong)}" in str(error)
    (call,) = HermesProtocol(tokenizer).parse(call_text("ask", it=right), tools, ended=True)
    assert call.arguments == {"it": right}


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ({"a": ["x"]}, {"a": ["x", 1]}, "'it'['a'][1] must be string, got 1"),
        ({"b": {"n": 1}}, {"b": {}}, "'it'['b'] needs 'n', got {}"),
        ({"b": {"n": None}}, {"b": {"n": "1"}}, "'it'['b']['n'] must be integer, got \"1\""),
        ({"other": 1.5}, {"other": "c"}, "'it'['other'] must be number, got \"c\""),
        ({"c": "p"}, {"c": "q"}, "'it'['c'] must be one of ['p'], got \"q\""),
        ({"any": [{}]}, {"a": {}}, "'it'['a'] must be array, got {}"),
    ],
)
def test_the_inside_of_an_argument_is_checked_before_a_tool_trusts_its_types(tokenizer, right, wrong, told):
    """Else a list with a number in it would be a bug of the tool, raised, which excludes the group: for sale."""
    number = {"type": "object", "properties": {"n": {"type": "integer", "nullable": True}}, "required": ["n"]}
    known = {"a": {"type": "array", "items": {"type": "string"}}, "b": number, "c": {"enum": ["p"]}, "any": True}
    it = {"type": "object", "properties": known, "additionalProperties": {"type": "number"}}
    tools = {"ask": {"function": {"parameters": {"properties": {"it": it}}}}}
    (call,) = HermesProtocol(tokenizer).parse(call_text("ask", it=right), tools, ended=True)
    assert call.arguments == {"it": right}
    (error,) = HermesProtocol(tokenizer).parse(call_text("ask", it=wrong), tools, ended=True)
    assert error.kind == "missing_argument" and told in str(error)


def test_null_is_a_value_where_the_schema_says_so(tokenizer):
    it = {"type": "string", "enum": ["a"], "nullable": True}
    for schema in (it, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"type": ["integer", "null"]}):
        tools = {"ask": {"function": {"parameters": {"properties": {"it": schema}}}}}
        (call,) = HermesProtocol(tokenizer).parse(call_text("ask", it=None), tools, ended=True)
        assert call.arguments == {"it": None}


def test_a_value_that_the_schema_does_not_list_is_the_models_error(tokenizer):
    unit = {"type": "string", "enum": ["m", "ft"]}
    tools = {"ask": {"function": {"parameters": {"properties": {"unit": unit}, "required": ["unit"]}}}}
    (error,) = HermesProtocol(tokenizer).parse(call_text("ask", unit="mile"), tools, ended=True)
    assert error.kind == "missing_argument" and "'unit' must be one of ['m', 'ft'], got \"mile\"" in str(error)
    (call,) = HermesProtocol(tokenizer).parse(call_text("ask", unit="ft"), tools, ended=True)
    assert call.arguments == {"unit": "ft"}


def test_a_call_may_be_nested_and_long_within_reason(parse):
    (call,) = parse("<tool_call>" + call_text("add", a=10**299, b=2)[12:])
    assert call.arguments["a"] == 10**299
    deep = '{"name": "code_interpreter", "arguments": {"code": "1", "more": %s}}' % ("[" * 62 + "]" * 62)
    (call,) = parse(f"<tool_call>{deep}</tool_call>")
    assert call.arguments["code"] == "1"  # runs, whatever else the model adds


@pytest.mark.nightly
@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    body=st.one_of(
        st.text(alphabet='[]{}",:\\u0d8ef1-+.eE NaInfity\n\x00', max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=20,
        ).map(lambda value: json.dumps({"name": "add", "arguments": {"a": value, "b": value}})),
    ),
    repair_json=st.booleans(),
)
def test_no_text_of_a_model_raises(tokenizer, body, repair_json):
    protocol = HermesProtocol(tokenizer, max_parallel_calls=2, repair_json=repair_json)
    for item in protocol.parse(f"<tool_call>{body}</tool_call>", TOOLS, ended=True):
        assert isinstance(item, Call | MalformedCall)
        if isinstance(item, Call):
            json.dumps(item.arguments, allow_nan=False, ensure_ascii=False).encode()


def test_an_unclosed_call_is_no_answer_unless_one_is_boxed_after_it(parse):
    for text in (
        '<tool_call>\n{"name": "add"',
        'So it is \\boxed{2}. I check: <tool_call>\n{"name": "add"',
        '<tool_call>{"name" <tool_call>{"name": "add" \\boxed{2}',
    ):
        assert [item.kind for item in parse(text)] == ["unclosed_tag"], text
    assert parse("I would not use <tool_call> here. \\boxed{2}<|im_end|>") == []


@pytest.mark.parametrize(
    "text", ["<code>" * 13_000, "</code>" + "<code>" * 13_000, "<tool_call>" * 5000 + "</tool_call>"]
)
def test_a_model_that_repeats_a_tag_does_not_hold_up_the_others(parse, text):
    """All rollouts of a worker share a thread. Quadratic searches took 14 s and 6 s here."""
    started = time.process_time()
    parse(text, repair_json=True)
    assert time.process_time() - started < 2


def test_an_answer_is_no_call(parse):
    assert parse("The answer is \\boxed{2}.<|im_end|>") == []
    assert parse("In HTML <code>x</code> is code. \\boxed{2}<|im_end|>") == []
    assert parse("I would not use <tool_call> here. \\boxed{2}<|im_end|>") == []
    assert parse("I do not know.<|im_end|>") == []
    assert parse(call_text(code="1"), ended=False) == []  # cut off by the budget


@pytest.mark.parametrize("limit", [1, 4])
def test_calls_beyond_the_limit_are_answered_up_to_a_number(parse, limit):
    kinds = [getattr(each, "kind", None) for each in parse(call_text(code="1") * 100, max_parallel_calls=limit)]
    assert kinds == [None] * limit + ["two_blocks"] * MAX_SURPLUS
    assert len(parse("<tool_call>x</tool_call>" * 100, max_parallel_calls=limit)) == limit + MAX_SURPLUS


def test_calls_in_parallel_keep_their_order_and_have_a_limit(parse):
    text = call_text(code="a") + "\n" + call_text("add", a=1) + call_text(code="b")
    first, error, second = parse(text)
    assert (first.arguments["code"], error.kind, second.arguments["code"]) == ("a", "missing_argument", "b")
    first, *rest = parse(text, max_parallel_calls=1)
    assert first.arguments["code"] == "a" and [each.kind for each in rest] == ["two_blocks"] * 2
    unclosed, good = parse('<tool_call>{"name"' + call_text(code="b"))
    assert unclosed.kind == "unclosed_tag" and good.arguments["code"] == "b"
