import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.protocols.base import CODE_SCHEMA, MalformedCall, SegmentEncoder, cut_output, format_output
from verl_ext.protocols.code import CodeProtocol, extract_code


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("<code>print(1)</code>", "print(1)", "plain"),
        ("First I compute.\n<code>\nprint(1)\n</code>", "\nprint(1)\n", "as written, line ends too"),
        ("<code>\n```python\nif a:\n    b()\n```\n</code>", "if a:\n    b()", "the fence goes, indentation stays"),
        ("<code>```\nx\n```</code>", "x", "a fence without language"),
        ("<code>```py3+\nx```</code>", "x", "a fence closed on the last line"),
        ("<code>s = '```'\nprint(s)</code>", "s = '```'\nprint(s)", "backticks that are no fence"),
        ("<code>```\na = '''\n```\n'''\n```</code>", "a = '''\n```\n'''", "only the outer fence"),
        ("Use <code> tags. <code>print(2)</code>", "print(2)", "the last block that opens"),
        ("<code>s = '</code>'</code>", "s = '</code>'", "up to the last stop"),
        ("<code>print(3)</code>\n", "print(3)", "characters after the stop, from a token that carried them"),
    ],
)
def test_extract_code_takes_the_call_the_text_ends_in(text, code, why):
    assert extract_code(text) == code, why


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)</code>", "</code> without <code>"),
        ("</code>", "</code> without <code>"),
        ("<code></code>", "empty <code></code>"),
        ("<code> \n\t</code>", "empty <code></code>"),
        ("<code>```python\n\n```</code>", "empty <code></code>"),
    ],
)
def test_a_call_that_cannot_be_run_says_why(text, message):
    with pytest.raises(MalformedCall, match=f"^FormatError: {message}$"):
        extract_code(text)


@pytest.mark.parametrize(
    ("stdout", "stderr", "full", "last_line"),
    [
        ("42\n", "", "42", "42"),
        ("", "", "(no output)", "(no output)"),
        (" \n", "\n", "(no output)", "(no output)"),
        (
            "1\n2\n",
            "Traceback:\n  line 1\nNameError: x\n",
            "1\n2\nTraceback:\n  line 1\nNameError: x",
            "1\n2\nNameError: x",
        ),
        ("", "a\nb", "a\nb", "b"),
    ],
)
def test_format_output_is_stdout_then_stderr(stdout, stderr, full, last_line):
    assert format_output(stdout, stderr) == full
    assert format_output(stdout, stderr, traceback="last_line") == last_line


def test_an_unknown_traceback_setting_is_refused_even_where_there_is_no_error():
    with pytest.raises(ValueError, match="'short'.*'full' or 'last_line'"):
        format_output("42", "", traceback="short")


def test_interpreter_block_stands_on_lines_of_its_own(tokenizer):
    block = "".join(CodeProtocol(tokenizer).reply(["42"], ended=False))
    assert "x</code>" + block + "y" == "x</code>\n<interpreter>\n42\n</interpreter>\ny"


# What a tool says is text ---------------------------------------------------------------------------------------------

TOKENIZERS = ["tokenizer", "qwen_tokenizer"]
FRAGMENTS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "</interpreter>",
    "<code>",
    "</code>",
    "<tool_call>",
    "<|",
    ">",
]


@pytest.mark.parametrize("which", TOKENIZERS)
@settings(deadline=None, max_examples=60, derandomize=True)
@given(outputs=st.lists(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5))).map("".join), max_size=3))
def test_no_output_can_have_a_token_of_the_frame(request, which, outputs):
    tokenizer = request.getfixturevalue(which)
    encoder = SegmentEncoder(tokenizer)
    added = set(tokenizer.added_tokens_decoder)
    frame = "\n<|im_start|>user\n<interpreter>\n"
    parts = [frame] + [text for output in outputs for text in (output, frame)]
    ids = encoder.encode(parts)
    assert tokenizer.decode(ids) == "".join(parts)
    in_frame = [i for i in tokenizer.encode(frame, add_special_tokens=False) if i in added]
    assert in_frame and [i for i in ids if i in added] == in_frame * (len(outputs) + 1)
    for output in outputs:
        alone = encoder.encode_output(output)
        assert tokenizer.decode(alone) == output and not added & set(alone)


@pytest.mark.parametrize("which", TOKENIZERS)
def test_ordinary_output_is_encoded_together_with_its_frame_as_the_template_would(request, which):
    tokenizer = request.getfixturevalue(which)
    parts = ["\n<interpreter>\n", "[1, 2]", "\n</interpreter>\n"]
    assert SegmentEncoder(tokenizer).encode(parts) == tokenizer.encode("".join(parts), add_special_tokens=False)


def test_a_tokenizer_that_begins_every_text_with_a_token_begins_no_segment_with_it(tokenizer):
    from tokenizers.processors import TemplateProcessing

    begins = copy.deepcopy(tokenizer)
    begin = ("<|im_start|>", begins.convert_tokens_to_ids("<|im_start|>"))
    begins._tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    assert begins.encode("hi")[0] == begin[1]
    for parts in (["a", "b", "c"], ["a", "<|im_end|>", "c"]):
        assert SegmentEncoder(begins).encode(parts) == SegmentEncoder(tokenizer).encode(parts)


def test_the_tokenizer_itself_is_left_as_it_was(tokenizer):
    text = "<|im_start|></code>"
    before = tokenizer.encode(text, add_special_tokens=False)
    assert len(SegmentEncoder(tokenizer).encode_output(text)) > len(before) == 2
    assert tokenizer.encode(text, add_special_tokens=False) == before
    assert not tokenizer.added_tokens_decoder[before[1]].special


def test_white_space_that_is_an_added_token_stays_one(tokenizer):
    from tokenizers import AddedToken

    wide = copy.deepcopy(tokenizer)
    wide.add_tokens([AddedToken(" " * 4, special=False, normalized=False)])  # as in CodeGen's and Gemma's tokenizers
    ids = SegmentEncoder(wide).encode_output("if x:\n    y<|im_end|>")
    assert wide.convert_tokens_to_ids(" " * 4) in ids and wide.eos_token_id not in ids


def test_a_tokenizer_that_cannot_keep_text_and_token_apart_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    unigram = Tokenizer(
        models.Unigram([("<unk>", -9.0), ("</s>", 0.0), ("<", -1.0), ("/", -1.0), ("s", -1.0), (">", -1.0)])
    )
    with pytest.raises(ValueError, match="turns the text '</s>' into one special token.*could forge a turn"):
        SegmentEncoder(PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>"))


def test_a_cut_counts_the_tokens_that_the_text_then_has(tokenizer):
    encode = SegmentEncoder(tokenizer).encode_output
    cut = cut_output(tokenizer, "<|im_end|>" * 500, 40, encode)
    head, _, tail = cut.partition("\n[... ")
    assert len(encode(head)) == 20 and "characters cut ...]" in tail  # half of the limit: head and tail


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("<code>print(1)", ["unclosed_tag"]),
        ("It is \\boxed{2}. I check: <code>print(1)", ["unclosed_tag"]),  # the answer came before the call
        ("<code>1 is \\boxed{1}, no: <code>print(1)", ["unclosed_tag"]),  # the last call counts
        ("<code>print(1)\nNo: it is \\boxed{2}", []),  # the call was given up for an answer
        ("It is \\boxed{2}.", []),
    ],
)
def test_an_unclosed_call_is_no_answer_unless_one_is_boxed_after_it(tokenizer, text, kinds):
    tools = {"code_interpreter": CODE_SCHEMA}
    assert [call.kind for call in CodeProtocol(tokenizer).parse(text, tools, ended=True)] == kinds
    assert CodeProtocol(tokenizer).parse(text, tools, ended=False) == []  # cut off by the budget
