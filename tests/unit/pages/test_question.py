import time

import pytest

from verl_ext.datasets.text import PROMPTS
from verl_ext.pages.question import first_words, question_of

ASKED = "What is $1 + 1$?\nGive a number."
LINE = "What is $1 + 1$? Give a number."


@pytest.mark.parametrize("instructions", [*PROMPTS.values(), "{problem}"])
@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>system\nuser\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] {} [/INST]",
        "system\nBe brief.\nuser\n{}\nassistant\n",
        "user\nOne?\nassistant\nTwo.\nuser\n{}\nassistant\n",
        "{}",
    ],
)
def test_the_question_is_the_users_last_message_without_instructions(template, instructions):
    assert question_of(template.format(instructions.format(problem=ASKED))) == LINE


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (ASKED, LINE),
        ("word " * 100, "word " * 16 + "…"),
        ("x" * 100, "x" * 80 + " …"),
        ("", ""),
        (None, ""),
    ],
)
def test_its_first_words_are_a_line(prompt, words):
    assert first_words(prompt) == words and len(words) <= 82


def test_a_hostile_prompt_costs_little():
    started = time.process_time()
    for text in ("<|" * 50_000, "user\n" * 20_000, "*user question:*" * 5_000, " " * 100_000, "<|im_start|>" * 10_000):
        first_words(text)
    assert time.process_time() - started < 1.0
