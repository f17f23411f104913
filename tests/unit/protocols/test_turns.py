"""What a model's turn becomes in the <code> protocol, how the tool replies, and how a long output is cut."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from verl_ext.protocols import base as protocol_module
from verl_ext.protocols.base import (
    CODE_SCHEMA,
    CODE_TOOL,
    MALFORMED_KINDS,
    Call,
    ChatReply,
    SegmentEncoder,
    cut_output,
    strip_fence,
)
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.call_json import _has_type
from verl_ext.protocols.code import CodeProtocol
from verl_ext.settings import CONFIGS

TOOLS = {CODE_TOOL: CODE_SCHEMA}


@pytest.fixture
def protocol(tokenizer) -> CodeProtocol:
    return CodeProtocol(tokenizer)


@pytest.mark.parametrize(
    ("text", "ended", "kinds", "why"),
    [
        ("It is \\boxed{7}.", True, [], "an answer"),
        ("I give up.", True, [], "no answer, but no call either"),
        ("<code>print(1)", False, [], "cut off by the length: nothing to say to it"),
        ("<code>print(1)", True, ["unclosed_tag"], "it ended its turn without running the code"),
        ("<code>x\nIt is \\boxed{7}.", True, [], "an answer after the tag"),
        ("\\boxed{7}? <code>print(7)", True, ["unclosed_tag"], "a box before the tag is no answer after it"),
        ("<tool_call>{}</tool_call>", True, ["other_protocol"], "the other protocol"),
        ("<tool_call>{}</tool_call>", False, [], "cut off"),
        ("print(1)</code>", False, ["unopened_tag"], "no start"),
        ("<code></code>", False, ["empty_code"], "nothing to run"),
    ],
)
def test_a_turn_without_a_call_that_runs(protocol, text, ended, kinds, why):
    assert [call.kind for call in protocol.parse(text, TOOLS, ended=ended)] == kinds, why


def test_a_call_says_where_it_begins_and_needs_the_tool(protocol):
    text = "So: <code>print(1)</code>"
    assert protocol.parse(text, TOOLS, ended=False) == [Call(CODE_TOOL, {"code": "print(1)"}, 4)]
    assert protocol.parse(text, TOOLS, ended=False)[0].repaired is False
    assert [call.kind for call in protocol.parse(text, {}, ended=False)] == ["unknown_tool"]
    assert protocol.schemas(TOOLS) is None and protocol.stop == "</code>" and protocol.call_ends_turn is False


def test_a_reply_after_an_end_token_is_a_turn_of_the_user(protocol, tokenizer):
    assert protocol.reply(["42"], ended=False) == ["\n<interpreter>\n", "42", "\n</interpreter>\n"]
    before, output, after = protocol.reply(["42"], ended=True)
    start, _, end = ChatReply(tokenizer, "user").render([""])
    assert (before, output, after) == (f"{start}<interpreter>\n", "42", f"\n</interpreter>{end}")
    assert "user" in start and end.rstrip().endswith("assistant")


def test_a_trace_is_written_as_the_model_would(protocol):
    call = Call(CODE_TOOL, {"code": "x"}, 0)
    assert protocol.write("Text", []) == "Text"
    assert protocol.write("Text", [call]) == "Text\n<code>\nx\n</code>"
    assert protocol.write("", [call]) == "<code>\nx\n</code>"
    with pytest.raises(ValueError, match="one call a turn, but there are 2"):
        protocol.write("Text", [call, call])
    with pytest.raises(ValueError, match="calls code_interpreter only, but there is a call of 'search'"):
        protocol.write("Text", [Call("search", {}, 0)])


def test_frames_of_several_replies_are_kept_apart(tokenizer):
    """Rendered twice: the frames are kept per number of replies."""
    reply = ChatReply(tokenizer, "user")
    for _ in range(2):
        one, two = reply.render(["a"]), reply.render(["a", "b"])
        assert one[1::2] == ["a"] and two[1::2] == ["a", "b"]
        assert one[0] == two[0] and one[-1] == two[-1] and len(two) == 5


def test_a_template_is_shown_calls_in_openais_form_that_the_replies_name(tokenizer):
    """Some templates raise, or number the replies, if a call has no id, type or function."""
    import copy
    import json

    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ messages[1].tool_calls | tojson }}|{{ m.tool_call_id }}|"
        "{{ m.content }}]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    before, _, between, *_ = ChatReply(other, "tool").render(["a", "b"])
    calls, first = before.removeprefix("[").removesuffix("|").rsplit("|", 1)
    assert json.loads(calls) == [
        {"id": name, "type": "function", "function": {"name": "tool", "arguments": {}}} for name in ("call0", "call1")
    ]
    assert first == "call0" and between.endswith("|call1|")


def test_a_template_without_the_end_token_or_the_role_is_refused(tokenizer):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="does not end the assistant's turn with the tokenizer's end token"):
        ChatReply(broken, "user").render(["x"])
    model_only = "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}END{% endif %}{% endfor %}"
    broken.chat_template = model_only.replace("END", tokenizer.eos_token)
    with pytest.raises(ValueError, match="drops messages with the role 'user'"):
        ChatReply(broken, "user").render(["x"])


def test_without_a_tokenizer_or_its_end_token_a_protocol_parses_but_cannot_reply(tokenizer):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    for given, why in ((None, "made without a tokenizer"), (endless, "has no end token")):
        protocol = CodeProtocol(given)
        assert len(protocol.parse("<code>print(1)</code>", TOOLS, ended=False)) == 1
        with pytest.raises(ValueError, match=why):
            protocol.user_reply(["x"])


def test_one_fence_goes_and_other_text_stays():
    assert strip_fence("```python\nx\n```") == "x" and strip_fence("x") == "x"


@pytest.fixture
def encode(tokenizer):
    return SegmentEncoder(tokenizer).encode_output


def test_an_output_within_the_limit_stays_whole(tokenizer, encode):
    """The tiny task's tokenizer has a token per digit."""
    for text in ("", "1" * 40):
        assert cut_output(tokenizer, text, 40, encode) == text
    wide = "é" * 30  # 60 bytes, and 30 or 60 tokens
    assert cut_output(tokenizer, wide, len(encode(wide)), encode) == wide


def test_a_segment_has_the_tokens_of_its_whole_text(qwen_tokenizer):
    """In pieces it would have other tokens at the seams."""
    ids = SegmentEncoder(qwen_tokenizer).encode(["pri", "nt", ""])
    assert ids == qwen_tokenizer.encode("print", add_special_tokens=False) and len(ids) == 1


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("limit", [40, 41])
def test_a_long_output_keeps_head_and_tail(tokenizer, encode, length, limit):
    """Half of the limit each, the head the larger half; 5000 characters are beyond what is tokenised in one piece."""
    text = "".join(str(i % 10) for i in range(length))
    cut = cut_output(tokenizer, text, limit, encode)
    head, _, rest = cut.partition("\n[... ")
    number, _, tail = rest.partition(" characters cut ...]\n")
    assert len(encode(head)) == limit - limit // 2 and len(encode(tail)) == limit // 2
    assert text.startswith(head) and text.endswith(tail) and len(head) + int(number) + len(tail) == length


def test_a_text_shorter_than_its_note_stays_whole(tokenizer, encode):
    text = "1" * 45
    assert cut_output(tokenizer, text, 40, encode) == text


def test_the_interpreters_schema_is_whole():
    function = CODE_SCHEMA["function"]
    assert CODE_SCHEMA["type"] == "function" and function.keys() == {"name", "description", "parameters"}
    assert function["parameters"].keys() == {"type", "properties", "required"}
    assert function["parameters"]["properties"].keys() == {"code"} == set(function["parameters"]["required"])
    of_yaml = yaml.safe_load((CONFIGS / "tools" / "code_interpreter.yaml").read_text())["tools"][0]["tool_schema"]
    assert of_yaml == CODE_SCHEMA, "SFT traces would have another prompt than rollouts"


def test_a_hermes_trace_keeps_text_beyond_ascii(qwen_tokenizer):
    hermes = make_protocol("hermes", qwen_tokenizer, {}, max_parallel_calls=1)
    assert '"code": "print(\'é\')"' in hermes.write("", [Call(CODE_TOOL, {"code": "print('é')"}, 0)])


def test_a_type_that_a_schema_need_not_name_in_json_schemas_words_is_not_checked():
    assert _has_type(None, "null") and _has_type(3, ["integer", "null"]) and not _has_type("3", ["integer", "null"])


def test_the_kinds_of_malformed_calls_are_those_that_are_counted():
    """Metrics are made of the list; a kind that is not in it would be lost."""
    sources = Path(protocol_module.__file__).parent.glob("*.py")
    raised = {kind for source in sources for kind in re.findall(r'MalformedCall\(\s*"(\w+)"', source.read_text())}
    assert raised == set(MALFORMED_KINDS)
