"""Text in a turn that is thinking, or only a mention, and therefore no call, in both protocols."""

import json

import pytest

from tests.unit.protocols.test_hermes import TOOLS, call_text
from verl_ext.protocols.base import Call, MalformedCall
from verl_ext.protocols.code import CodeProtocol
from verl_ext.protocols.hermes import HermesProtocol
from verl_ext.protocols.thinking import is_thinking, opens_thinking, without_thinking

DRAFT, REAL = call_text(code="draft"), call_text(code="real")


def codes(parsed):
    return [call.arguments["code"] if isinstance(call, Call) else call.kind for call in parsed]


@pytest.fixture(params=[1, 4])
def hermes(tokenizer, request):
    protocol = HermesProtocol(tokenizer, max_parallel_calls=request.param)
    return lambda text, **state: codes(protocol.parse(text, TOOLS, ended=True, **state))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>I could write {DRAFT}</think>{REAL}", ["real"]),
        (f"<think>{DRAFT}{DRAFT}</think> so <think>or {DRAFT}</think>\n{REAL}", ["real"]),
        (f"<think>{DRAFT}</think>It is \\boxed{{2}}.", []),
        (f"<think>{DRAFT}", []),  # never closed
        (f"<think>a</think>So: <think>{DRAFT}", []),
        ('<think><tool_call>{"name": </think>' + REAL, ["real"]),  # a draft that is no call
        ("<think>`</think>` would end it. " + DRAFT + "</think>" + REAL, ["real"]),
        (f"<think>close with `</think>` {DRAFT}", []),  # a tag that is only mentioned
        (f'<think>{DRAFT} He said "yes"</think>{REAL}', ["real"]),  # the quote ends before the tag
        (f"{DRAFT}\n</think>\n\n{REAL}", ["real"]),  # the prompt opened it
        (f"The tag `<think>` is none here. {REAL}", ["real"]),
        (f"<think>a</think>{call_text(code='<think>')}", ["<think>"]),
        (call_text(code="print('</think>')"), ["print('</think>')"]),
        (call_text(code="<think>") + "<think>" + DRAFT + "</think>", ["<think>"]),
    ],
)
def test_a_draft_within_thinking_is_no_call_of_hermes(hermes, text, expected):
    assert hermes(text) == expected


def test_thinking_that_the_prompt_opened_is_thinking_up_to_its_end(hermes):
    assert hermes(f"{DRAFT}</think>{REAL}", thinking=True) == ["real"]
    assert hermes(f"<think>{DRAFT}</think>{REAL}", thinking=True) == ["real"]  # also opened by the model
    assert hermes(f"I must write `</think>` before it. {DRAFT}", thinking=True) == []
    assert without_thinking("a <think>b</think>c</think>d") == "d"  # a second end closes all text before it
    assert hermes(DRAFT, thinking=True) == [] and hermes("<tool_call>{", thinking=True) == []


@pytest.mark.parametrize(
    "prose",
    [
        "I will use <tool_call> now.\n",
        "Calls stand between <tool_call> and </tool_call>.\n",
        "In `<tool_call>` and `</tool_call>`, or '<tool_call>', stands JSON.\n",
        "<tool_call> opens a call.\n",
        "<think>I need <tool_call>, then JSON, then </tool_call></think>",
        "A lone </tool_call> means nothing. ",
    ],
)
def test_a_mention_of_the_tag_is_no_call_of_hermes(hermes, prose):
    assert hermes(prose + REAL) == ["real"]
    assert hermes(prose + "It is \\boxed{2}.") == []


def test_a_mention_without_a_call_is_an_answer_but_an_attempt_is_told(hermes):
    assert hermes("I would not use <tool_call> here.") == hermes("What does </tool_call> mean?") == []
    assert hermes("<tool_call>\nprint(1)") == ["unclosed_tag"]
    assert hermes("<tool_call>print(1)</tool_call>") == ["bad_json"]
    assert hermes("print(1)\n</tool_call>") == hermes("</tool_call>") == ["unopened_tag"]


@pytest.fixture
def code(tokenizer):
    protocol = CodeProtocol(tokenizer)
    return lambda text, ended=False, **state: codes(protocol.parse(text, TOOLS, ended=ended, **state))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>I write <code>draft</code>", []),
        ("<think>I write <code>draft</code> no.</think><code>real</code>", ["real"]),
        ("<think>a <code>draft</code> b <code>draft</code></think> <think>c</think> <code>real</code>", ["real"]),
        ("<think>a</think> <think><code>draft</code>", []),
        ("<think>In <code> tags.</think>\n<code>\nreal\n</code>", ["\nreal\n"]),
        ("<think>\n<code>\ndraft\n</think>\nSo <code>real</code>", ["real"]),  # a draft that was never closed
        ("<think>It ends at </code>", []),
        ("Write it in `<code>` and `</code>`", []),
        ("Write it in '<code>' and '</code>'. So <code>real</code>", ["real"]),
        ("`</code>` ends it", []),
        ("<code>\nprint('<think>')\n</code>", ["\nprint('<think>')\n"]),
        ('<code>\nprint("a <think> b")\n</code>', ['\nprint("a <think> b")\n']),
        ('<think>a</think><code>\nprint("</think>")\n</code>', ['\nprint("</think>")\n']),
        ("draft <code>x</code></think><code>real</code>", ["x"]),  # without the prompt nothing says that it is thinking
    ],
)
def test_a_draft_or_a_mention_is_no_call_of_the_code_protocol(code, text, expected):
    assert code(text) == expected


def test_thinking_that_the_prompt_opened_has_no_code_to_run(code):
    assert code("I write <code>draft</code>", thinking=True) == []
    assert code("I write <code>draft</code> no</think>\n<code>real</code>", thinking=True) == ["real"]
    assert code("<think>a <code>draft</code>", thinking=True) == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("<think><code>print(1)", []),
        ("<think><code>print(1)</think>It is 2.", []),
        ("<think>a</think><code>print(1)", ["unclosed_tag"]),
        ("I need no <code> here.", []),
        ("I need no `<code>` here, <code>, or <code>.", []),
        ("<code>\nprint(1)", ["unclosed_tag"]),
        ('<think><tool_call>{"name"</think>No.', []),
        ("I write no <tool_call> here.", []),
    ],
)
def test_an_ended_turn_is_told_of_an_attempt_outside_of_its_thinking_only(code, text, kinds):
    assert code(text, ended=True) == kinds


@pytest.mark.parametrize(
    "program",
    [
        'print("<code>")',
        "print('a <code> b')  # <code>",
        'a = 1\nprint("<code>x")',
        '```python\nprint("<code>")\n```',
    ],
)
def test_a_program_with_the_opening_tag_is_read_whole(code, tokenizer, program):
    from verl_ext.protocols.base import strip_fence

    written = CodeProtocol(tokenizer).write("I use <code> tags.", [Call("code_interpreter", {"code": program}, 0)])
    (read,) = code(written)
    assert read.strip("\n") == strip_fence(program)
    assert code("<code>print('<code>')</code>") == ["print('<code>')"]


TAGGED = [
    "print('</tool_call>')",
    "print('<tool_call>')",
    "s = '<tool_call>\\n{}\\n</tool_call>'",
    '"</tool_call>" + "<tool_call>"',
    "print('a \\\\\" </tool_call> \\\\')",
    "# </tool_call>\n<tool_call>\n{",
    "</tool_call></tool_call></tool_call>",
    "'<|im_end|>' + \"{'\" + '\\u2028'",
]


@pytest.mark.parametrize("program", TAGGED)
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_a_tag_within_the_json_of_a_call_is_text(tokenizer, program, ensure_ascii):
    protocol = HermesProtocol(tokenizer, max_parallel_calls=2, repair_json=True)
    calls = [
        Call("code_interpreter", {"code": program, "more": {program: [program]}}, 0),
        Call("add", {"a": 1, "b": 2}, 0),
    ]
    for each in (calls[:1], calls, calls[::-1]):
        parsed = protocol.parse(protocol.write("Text", each) + "<|im_end|>", TOOLS, ended=True)
        assert [(call.tool, call.arguments, call.repaired) for call in parsed] == [
            (call.tool, call.arguments, False) for call in each
        ]
    body = json.dumps({"name": "code_interpreter", "arguments": {"code": program}}, ensure_ascii=ensure_ascii)
    (call,) = protocol.parse(f"<tool_call>{body}</tool_call>", TOOLS, ended=True)
    assert call.arguments == {"code": program}
    if ensure_ascii:  # `<` may be escaped as well
        body = body.replace("<", "\\u003c")
        assert protocol.parse(f"<tool_call>{body}</tool_call>", TOOLS, ended=True)[0].arguments == {"code": program}


def test_json_that_is_repaired_may_have_the_tag_too(tokenizer):
    body = '{"name": "code_interpreter", "arguments": {"code": "a = \'</tool_call>\'\n<tool_call>"}}'
    text = f"<tool_call>{body}</tool_call>"
    protocol = HermesProtocol(tokenizer, repair_json=True)
    (call,) = protocol.parse(text, TOOLS, ended=True)
    assert call.repaired and call.arguments == {"code": "a = '</tool_call>'\n<tool_call>"}
    (error,) = HermesProtocol(tokenizer).parse(text, TOOLS, ended=True)
    assert isinstance(error, MalformedCall) and error.kind == "bad_json"


def test_a_quote_too_few_spoils_its_own_call_only(tokenizer):
    """A string that is not closed would reach into the next call."""
    protocol = HermesProtocol(tokenizer, max_parallel_calls=2)
    bad = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(1)}}</tool_call>'
    assert codes(protocol.parse(f"{bad}\n{REAL}", TOOLS, ended=True)) == ["bad_json", "real"]
    assert codes(protocol.parse(f"{REAL}\n{bad}", TOOLS, ended=True)) == ["real", "bad_json"]


def test_thinking_by_its_tags():
    assert opens_thinking("<|im_start|>assistant\n<think>\n") and not opens_thinking("<think>\n\n</think>\n\n")
    assert not is_thinking("a", False) and is_thinking("a", True) and is_thinking("</think><think>", False)
    assert without_thinking("<think>a</think>b<think>c</think>d") == "bd"
    assert without_thinking("a</think>b") == "b" == without_thinking("a<think></think>b", True)
    assert without_thinking("a<think>b") == "a" and without_thinking("a", True) == ""
