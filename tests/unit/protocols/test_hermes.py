"""The hermes protocol: its parser, and the real loop with it between scripted server, sandbox and tools."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.protocols.base import CODE_SCHEMA, MALFORMED_KINDS, Call, MalformedCall
from verl_ext.protocols.hermes import HermesProtocol
from verl_ext.sandbox.client import RunResult

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
        if line == "3":  # the string ends, the line too, and no comma follows
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
        (call_text("sin", x=1), "unknown_tool", 'unknown tool "sin"; there is add, code_interpreter'),
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
        ("[" * 3000, "nested more than 64 deep"),
        *((("[" * depth) + ("]" * depth), "nested more than 64 deep") for depth in (65, 500, 990, 993, 1200)),
        ('{"a":' * 993 + "1" + "}" * 993, "nested more than 64 deep"),
        (add("[" * 900 + "]" * 900), "nested more than 64 deep"),
        ('{"name": "code_interpreter", "arguments": {"code": %s}}' % ("1" * 5000), "an integer has 5000 digits"),
        (add("1" * 301), "an integer has 301 digits, more than 300"),
        (add("1e999"), 'the number "1e999" is too large'),
        (add("NaN"), "NaN is no number of JSON"),
        (add("-Infinity"), "-Infinity is no number of JSON"),
        ('{"name": "add", "name": "sin", "arguments": {}}', 'the key "name" is there twice'),
        (add("1").replace('"b"', '"a"'), 'the key "a" is there twice'),
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
    assert error.kind == "bad_json" and "'a' has a character that no text can have" in str(error)


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


def test_an_unclosed_call_is_no_answer_unless_one_is_boxed_behind_it(parse):
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


def test_a_lone_surrogate_is_shown_and_not_raised(roll_out, tokenizer, turn):
    """JSON can spell a character that no text can have, and no tokenizer takes."""
    texts = ['<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', call_text(code="print(1)"), "\\boxed{1}"]
    output, *_ = roll_out(
        tokenizer,
        [turn(text) for text in texts],
        ["1 \ud800"],
        protocol="hermes",
        response_length=500,
        max_tool_response_tokens=100,
    )
    shown = tokenizer.decode(output.response_ids)
    assert 'unknown tool "\\ud800"' in shown and reply("1 \\ud800") in shown
    assert output.extra_fields["finish_reason"] == "answer"


def test_an_answer_is_no_call(parse):
    assert parse("The answer is \\boxed{2}.<|im_end|>") == []
    assert parse("In HTML <code>x</code> is code. \\boxed{2}<|im_end|>") == []
    assert parse("I would not use <tool_call> here. \\boxed{2}<|im_end|>") == []
    assert parse("I do not know.<|im_end|>") == []
    assert parse(call_text(code="1"), ended=False) == []  # cut off by the budget


def test_calls_in_parallel_keep_their_order_and_have_a_limit(parse):
    text = call_text(code="a") + "\n" + call_text("add", a=1) + call_text(code="b")
    first, error, second = parse(text)
    assert (first.arguments["code"], error.kind, second.arguments["code"]) == ("a", "missing_argument", "b")
    first, *rest = parse(text, max_parallel_calls=1)
    assert first.arguments["code"] == "a" and [each.kind for each in rest] == ["two_blocks"] * 2
    unclosed, good = parse('<tool_call>{"name"' + call_text(code="b"))
    assert unclosed.kind == "unclosed_tag" and good.arguments["code"] == "b"


# The loop ------------------------------------------------------------------------------------------------------------


class Add:
    """A tool as verl's BaseTool has it; `fail` is what `execute` raises."""

    name = "add"
    fail = None
    log: list

    def __init__(self):
        from verl.tools.schemas import OpenAIFunctionToolSchema

        self.tool_schema = OpenAIFunctionToolSchema.model_validate(ADD_SCHEMA)
        self.log = []

    async def create(self, instance_id=None, **kwargs):
        self.log.append(("create", kwargs))
        return "instance", None

    async def execute(self, instance_id, parameters, **kwargs):
        from verl.tools.schemas import ToolResponse

        self.log.append((instance_id, parameters))
        if self.fail is not None:
            raise self.fail
        return ToolResponse(text=str(parameters["a"] + parameters["b"])), 0.5, {}

    async def release(self, instance_id, **kwargs):
        self.log.append(("release", instance_id))


@pytest.fixture
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def turn(encode, tokenizer):
    return lambda text: encode(text) + [tokenizer.eos_token_id]


def reply(*outputs):
    """What the tiny tokenizer's template puts behind the model's end token."""
    return "\n" + "".join(f"<|im_start|>tool\n{text}<|im_end|>\n" for text in outputs) + "<|im_start|>assistant\n"


def test_code_runs_in_the_sandbox_and_further_tools_by_themselves(roll_out, tokenizer, turn, encode):
    tool = Add()
    turns = [turn(call_text(code="print(1+1)") + "\n" + call_text("add", a=1, b=2)), turn("\\boxed{2}")]
    output, server, sandbox = roll_out(
        tokenizer,
        turns,
        ["2\n"],
        protocol="hermes",
        tools=[tool],
        max_parallel_calls=2,
        response_length=400,
        prompt={"tools_kwargs": {"add": {"create_kwargs": {"seed": 1}}}},
    )
    assert output.response_ids == turns[0] + encode(reply("2", "3")) + turns[1]
    assert output.response_mask == [1] * len(turns[0]) + [0] * len(encode(reply("2", "3"))) + [1] * len(turns[1])
    assert sandbox.codes == ["print(1+1)"]
    assert tool.log == [
        ("create", {"create_kwargs": {"seed": 1}}),
        ("instance", {"a": 1, "b": 2}),
        ("release", "instance"),
    ]
    assert output.extra_fields["tool_calls"] == 2 and output.extra_fields["tool_rewards"] == [0.5]
    assert output.extra_fields["finish_reason"] == "answer"
    assert "stop" not in server.calls[0] and output.num_turns == 4


def test_malformed_calls_are_answered_beside_those_that_ran(roll_out, tokenizer, turn):
    text = call_text(code="print(1+1)") + call_text("sin", x=1)
    output, *_ = roll_out(
        tokenizer,
        [turn(text), turn("\\boxed{2}")],
        ["2"],
        protocol="hermes",
        max_parallel_calls=2,
        response_length=400,
        max_tool_response_tokens=100,
    )
    told = 'FormatError: unknown tool "sin"; there is code_interpreter'
    assert reply("2", told) in tokenizer.decode(output.response_ids)
    assert output.extra_fields["tool_use"]["malformed"] == {"unknown_tool": 1}
    assert output.extra_fields["tool_calls"] == 1


def test_a_sample_may_select_its_tools(roll_out, tokenizer, turn):
    turns = [turn(call_text(code="1")), turn("\\boxed{2}")]

    def roll(protocol, selection):
        prompt = {"extra_info": {"tool_selection": selection}}
        return roll_out(tokenizer, turns, ["1"], protocol=protocol, tools=[Add()], response_length=400, prompt=prompt)

    output, *_ = roll("hermes", ["add"])
    assert output.extra_fields["tool_use"]["malformed"] == {"unknown_tool": 1}
    output, *_ = roll("hermes", [])  # none named: all
    assert output.extra_fields["tool_use"]["ok"] == 1
    with pytest.raises(ValueError, match=r"names \['sin'\], but there are \['add', 'code_interpreter'\]"):
        roll("hermes", ["sin"])
    with pytest.raises(ValueError, match=r"tool_selection names \['add'\].*only the hermes protocol"):
        roll("code", ["add"])


TWO_CALLS = call_text(code="print(1)") + call_text(code="print(2)")
DOWN = RunResult("sandbox_failure", "", "", None, queue_s=0.0, run_s=0.0, attempts=4, message="connection refused")
WRONG = RunResult("code_error", "", "NameError: x", 1, queue_s=0.0, run_s=0.0, attempts=1, message="")


def roll_two(roll_out, tokenizer, turn, results, **settings):
    turns = [turn(TWO_CALLS), turn("\\boxed{2}")]
    settings = {"max_parallel_calls": 2, "response_length": 400} | settings
    output, _, sandbox = roll_out(tokenizer, turns, results, protocol="hermes", **settings)
    return output, sandbox


@pytest.mark.parametrize("results", [["1", DOWN], [DOWN, "2"], [WRONG, DOWN]])
def test_any_of_parallel_calls_that_the_sandbox_fails_ends_the_rollout(roll_out, tokenizer, turn, results):
    output, sandbox = roll_two(roll_out, tokenizer, turn, results)
    assert output.extra_fields["finish_reason"] == "sandbox_failure" and len(sandbox.codes) == 2
    assert output.extra_fields["tool_use"]["errors"] == {} and output.extra_fields["tool_calls"] == 0
    assert output.response_ids == turn(TWO_CALLS)


@pytest.mark.parametrize(
    ("results", "said"), [(["1", WRONG], ("1", "NameError: x")), ([WRONG, "2"], ("NameError: x", "2"))]
)
def test_the_error_of_one_of_parallel_calls_is_counted_and_shown_in_its_place(roll_out, tokenizer, turn, results, said):
    output, _ = roll_two(roll_out, tokenizer, turn, results)
    assert output.extra_fields["tool_use"]["errors"] == {"NameError": 1}
    assert output.extra_fields["tool_use"]["ok"] == 1 and output.extra_fields["tool_calls"] == 2
    assert reply(*said) in tokenizer.decode(output.response_ids)


def test_parallel_calls_count_each_against_max_tool_calls(roll_out, tokenizer, turn):
    output, sandbox = roll_two(roll_out, tokenizer, turn, ["1", "2"], max_tool_calls=2)
    assert output.extra_fields["finish_reason"] == "answer" and sandbox.codes == ["print(1)", "print(2)"]

    output, sandbox = roll_two(roll_out, tokenizer, turn, ["1", "2"], max_tool_calls=1)
    assert output.extra_fields["finish_reason"] == "max_turns" and sandbox.codes == []
    assert output.response_ids == turn(TWO_CALLS) and output.extra_fields["tool_calls"] == 0

    output, sandbox = roll_two(roll_out, tokenizer, turn, ["1", "2"], max_tool_calls=1, run_last_code=True)
    assert output.extra_fields["finish_reason"] == "max_turns" and sandbox.codes == ["print(1)", "print(2)"]
    assert output.extra_fields["tool_calls"] == 2 and output.response_mask[-1] == 0

    turns = [turn(call_text(code="print(0)")), turn(TWO_CALLS), turn("\\boxed{2}")]
    settings = {"protocol": "hermes", "max_parallel_calls": 2, "response_length": 400}
    output, _, sandbox = roll_out(tokenizer, turns, ["0", "1", "2"], max_tool_calls=2, **settings)
    assert output.extra_fields["finish_reason"] == "max_turns" and sandbox.codes == ["print(0)"]
    output, _, sandbox = roll_out(tokenizer, turns, ["0", "1", "2"], max_tool_calls=3, **settings)
    assert output.extra_fields["finish_reason"] == "answer" and len(sandbox.codes) == 3


def test_an_unclosed_call_is_answered_to_the_model(roll_out, tokenizer, turn):
    unclosed = turn('\\boxed{1}, or: <tool_call>\n{"name": "code_interpreter"')
    output, _, sandbox = roll_out(
        tokenizer, [unclosed, turn("\\boxed{2}")], protocol="hermes", response_length=400, max_tool_response_tokens=100
    )
    told = "FormatError: <tool_call> without </tool_call>; nothing was run"
    assert output.response_ids[: len(unclosed)] == unclosed and sandbox.codes == []
    assert reply(told) in tokenizer.decode(output.response_ids)
    assert output.extra_fields["tool_use"]["malformed"] == {"unclosed_tag": 1}
    assert output.extra_fields["finish_reason"] == "answer"


def test_an_unknown_protocol_is_refused(roll_out, tokenizer):
    with pytest.raises(ValueError, match="retool.protocol is 'xml'; expected one of code, hermes"):
        roll_out(tokenizer, [], protocol="xml")


def test_a_template_that_drops_tool_turns_is_refused(roll_out, tokenizer, turn):
    import copy

    deaf = copy.deepcopy(tokenizer)
    deaf.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>{{ message.role }}", "{% if message.role == 'tool' %}{% continue %}{% endif %}<|im_start|>x"
    )
    with pytest.raises(ValueError, match="drops messages of the role 'tool'"):
        roll_out(deaf, [turn(call_text(code="1"))], ["1"], protocol="hermes", response_length=400)


FRAGMENTS = ["<tool_call>", "</tool_call>", "<code>", "</code>", "print(1)", "\\boxed{1}", "</", "<|im_end|>", " hm "]
FRAGMENTS += [call_text(code="print(1)"), call_text("add", a=1, b=2), call_text("sin", a=1), '{"name": 1}', "\n"]
OUTPUTS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(["code_error", "timeout", "sandbox_failure"]).map(
        lambda status: RunResult(status, "o", "NameError: x", None, 0.0, 0.0, 1, "down")
    ),
)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    protocol=st.sampled_from(["code", "hermes"]),
    streams=st.lists(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(3, 474)), max_size=6), max_size=6),
    stops=st.lists(st.sampled_from(["completed", "completed", "completed", "aborted"]), min_size=7, max_size=7),
    outputs=st.lists(OUTPUTS, min_size=40, max_size=40),
    response_length=st.integers(1, 300),
    limits=st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 40), st.booleans(), st.integers(1, 3)),
)
def test_tokens_stay_true_for_any_model_tools_and_budget(
    roll_out, tokenizer, protocol, streams, stops, outputs, response_length, limits
):
    turns = []
    for stream, stop in zip(streams, stops, strict=False):
        ids = [i for part in stream for i in ([part] if isinstance(part, int) else tokenizer.encode(part))]
        end = [tokenizer.eos_token_id] if stop == "completed" else []
        turns.append((ids + end, stop, {}))
    turns.append(([20] * response_length, "completed", {}))
    turns += turns[-1:] * 8
    max_tool_calls, max_malformed_calls, max_tool_response_tokens, run_last_code, max_parallel_calls = limits
    output, server, sandbox = roll_out(
        tokenizer,
        turns,
        outputs,
        protocol=protocol,
        tools=[Add()],
        response_length=response_length,
        max_tool_calls=max_tool_calls,
        max_malformed_calls=max_malformed_calls,
        max_tool_response_tokens=max_tool_response_tokens,
        run_last_code=run_last_code,
        max_parallel_calls=max_parallel_calls,
    )

    ids, mask, log_probs = output.response_ids, output.response_mask, output.response_logprobs
    fields = output.extra_fields
    spans = fields["model_spans"]
    assert len(ids) == len(mask) == len(log_probs) <= response_length
    position = 0  # in all that the server sampled
    for (start, end), sampled in zip(spans, server.sent, strict=True):
        assert ids[start:end] == sampled[: end - start]  # decodes to what was sampled, up to a stop that was missed
        assert tokenizer.decode(ids[start:end]) == tokenizer.decode(sampled[: end - start])
        if end - start < len(sampled):
            assert protocol == "code" and tokenizer.decode(ids[start:end]).count("</code>") == 1
        assert log_probs[start:end] == [-(position + i + 1) / 1000 for i in range(end - start)]
        position += len(sampled)
    by_model = {i for start, end in spans for i in range(start, end)}
    assert by_model == {i for i, m in enumerate(mask) if m == 1}  # no token of a tool has mask 1
    assert all(log_probs[i] == 0.0 for i in range(len(ids)) if i not in by_model)
    for call, (start, _) in zip(server.calls, spans, strict=True):
        assert call["prompt_ids"] == output.prompt_ids + ids[:start]
        assert call["max_tokens"] == response_length - start
    use = fields["tool_use"]
    malformed = sum(use["malformed"].values())
    # A turn of calls in parallel may pass the limit when it is the last and is run still.
    assert fields["tool_calls"] <= max_tool_calls + run_last_code * max_parallel_calls
    assert (malformed > max_malformed_calls) == (fields["finish_reason"] == "malformed_limit")
    assert fields["finish_reason"] != "answer" or (ids[-1] == tokenizer.eos_token_id and mask[-1] == 1)
