import pytest

from verl_ext.reward.maths.extraction import extract_answer, strip_tool_blocks


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\boxed {3}", "3"),
        (r"\fbox{3}", "3"),
        (r"\\boxed{3}", "3"),  # an escaped backslash
        (r"} \boxed{3}", "3"),  # a stray brace before
        (r"\boxed{a { b} and later \boxed{3}", "3"),  # an unclosed box before
        (r"\boxed{3} \boxed{4", "3"),  # an unclosed box after
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1, 2, 3"),
        (r"$\boxed{(2,2)} \quad \text{and} \quad \boxed{(6,2)}$", "(2,2), (6,2)"),
        (r"\boxed{1} no \boxed{2}", "2"),
        (r"\boxed{1}, that is \boxed{1}; or \boxed{1}", "1"),
        (r"$y_1 = \boxed{1}$ and $y_2 = \boxed{2}$", "1, 2"),
        (r"so $x = -\boxed{3}$", "-(3)"),
        (r"as follows - \boxed{3}", "3"),
        (r"\boxed{3}^2", "(3)^2"),
        (r"\boxed{3}^\circ", "3"),
        (r"<answer>5</answer>", "5"),
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"<answer>4</answer> or rather <answer>5</answer>", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{3", None),
        (r"<answer>5", None),
        (r"the answer is 42", None),
        ("", None),
    ],
)
def test_last_complete_box_is_the_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "block",
    [
        r"<code>print('\boxed{6}')</code>",
        r"<interpreter>\boxed{6}</interpreter>",
        r"<interpreter></interpreter> \boxed{6}</interpreter>",  # a tool that prints its own closing tag
        r'<tool_call>{"code": "\boxed{6}"}</tool_call>',
        r"<tool_response>\boxed{6}</tool_response>",
        "```python\n# \\boxed{6}\n```",
        "```output\n\\boxed{6}\n```",
        "~~~python\n# \\boxed{6}\n~~~",
        "```python\n6\n```\n```\n\\boxed{6}\n```",
        "```python\n6\n```\n**Output:**\n```\n\\boxed{6}\n```",
        "<CODE >print('\\boxed{6}')</CODE>",
        "<|im_start|>tool\n\\boxed{6}<|im_end|>",
        "<|im_start|>user\n<tool_response>\n\\boxed{6}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        r"<code>print('</think>')</code>",
    ],
)
def test_code_and_tool_output_are_no_answer(block):
    assert extract_answer(block) is None
    assert extract_answer(rf"\boxed{{5}} {block} done") == "5"
    assert extract_answer(rf"{block} so \boxed{{7}}") == "7"


@pytest.mark.parametrize("block", ["<code>", "<interpreter>", "<tool_call>", "<tool_response>", "```python\n"])
def test_unclosed_block_reaches_to_the_end(block):
    assert extract_answer(rf"\boxed{{5}} {block} \boxed{{6}}") == "5"


def test_block_that_was_never_opened_begins_at_the_start():
    assert extract_answer(r"\boxed{6}</interpreter> done") is None
    assert extract_answer(r"\boxed{6}</interpreter> so \boxed{7}") == "7"


@pytest.mark.parametrize("fence", ["```\n{}\n```", "```latex\n{}\n```", "```math\n{}\n```"])
def test_fence_of_prose_is_read(fence):
    assert extract_answer(fence.format(r"\boxed{5}")) == "5"


def test_only_what_follows_the_last_think_block_is_read():
    assert extract_answer(r"<think>\boxed{1} <code> </think> \boxed{2}") == "2"
    assert extract_answer(r"\boxed{1}</think> I do not know") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"I skip the `<think>` tag. \boxed{1}", "1"),
        (r"The tags are `<think>` and `</think>`. \boxed{1}", "1"),
        (r"\boxed{1} It stands before '</think>'.", "1"),
        (r"<think>I close with `</think>`: \boxed{2}", None),
        (r'<think>It says "</think>", \boxed{2}</think> \boxed{1}', "1"),
        (r'<think>He said "two"</think> \boxed{1}', "1"),  # a quote that ends before the tag
        (r"<think>\boxed{2} `</think> \boxed{1}", "1"),
    ],
)
def test_a_think_tag_in_quotes_is_only_a_mention(text, answer):
    assert extract_answer(text) == answer


def test_box_in_thoughts_that_never_end_is_an_answer_only_if_wanted():
    for text in (r"<think>\boxed{1}", r"<think>a</think> then <think>so \boxed{1}"):
        assert extract_answer(text) is None
        assert extract_answer(text, unfinished_thinking=True) == "1"
    assert extract_answer(r"\boxed{1} <think> is it \boxed{2}") == "1"


def test_box_that_only_shows_the_form_is_passed_over():
    for form in ("", " ", "...", r"\ldots", r"\text{answer}", "your answer", r"\,", r"\square"):
        assert extract_answer(rf"\boxed{{7}}. (I used \boxed{{{form}}} as asked.)") == "7"
    for answer in ("0", r"\emptyset", "x", r"\text{none}"):
        assert extract_answer(rf"\boxed{{7}}. No, \boxed{{{answer}}}") == answer
    assert extract_answer(r"\boxed{...}") == "..."


def test_what_the_model_says_around_its_code_is_kept_in_order():
    assert strip_tool_blocks("a<code>1</code>b<interpreter>2</interpreter>c") == "abc"
