"""Whatever a data set or a model writes, reading it takes time linear in its length.

Every compiled pattern of the rooms that read such text, and their functions, get hostile texts of doubled length. What
reads an answer is tried as a whole: its patterns see what is left of a text, at one place of it.
"""

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product

import pytest
from prepare_gsm8k import program

import verl_ext.datasets
import verl_ext.protocols
from verl_ext.datasets import text as problem_text
from verl_ext.gateway.messages import calls_in
from verl_ext.gateway.template import Template
from verl_ext.protocols.base import CODE_SCHEMA
from verl_ext.protocols.code import CodeProtocol
from verl_ext.protocols.hermes import HermesProtocol
from verl_ext.protocols.trace import split_trace
from verl_ext.reward.maths.extraction import extract_answer

ROOMS = (verl_ext.datasets, verl_ext.protocols)
SCRIPTS = ("prepare_gsm8k", "prepare_mawps", "shortcuts")  # of data/
# What a pattern may repeat, search for, or wait for at the end.
PIECES = [
    *(
        " ",
        "\n",
        "\t \n",
        "1",
        "1,",
        "1.",
        "a",
        "a'",
        "A ",
        "x1",
        "-",
        "+",
        "=",
        "$",
        "~",
        "|",
        ",a",
        "√",
        "∪{",
        "and ",
    ),
    *("\\", "\\,", "\\ ", "\\left", "\\{", "\\frac", "\\frac{1}", "\\sqrt", "\\text{", "\\boxed{", "\\boxed{{", "^{1}"),
    *("{", "}", "{{", "}{", "{a}", "(", ")", "(1,", "[", "]", "[1", "and ", "<", "<<", "<<1=", ">>", "=<<", "x = "),
    *("```", "```\n", "```py\n", "\n\n```", "`", '"', '\\"', '{"', '["a",', "[asy]", "[/asy]", "<answer>", "format:"),
    *("<code>", "</code>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>{", '<tool_call>{"'),
    *("<interpreter>", "</interpreter>", "</code>\n<interpreter>", "*user question:*", "The answer format must be: "),
    "Solve the following problem step by step.",
    "Remember to place the final answer in the last part using the format: ",
]
STARTS = ["", "1", "<code>", '<tool_call>{"', "```\n", "<<", "\\{"]
ENDS = ["", "!a\x00"]


def hostile() -> Iterator[Callable[[int], str]]:
    """Texts by their length."""
    for start, piece, end in product(STARTS, PIECES, ENDS):
        yield lambda chars, start=start, piece=piece, end=end: start + piece * (chars // len(piece)) + end


def cpu_time(read: Callable[[str], object], text: str) -> float:
    started = time.process_time()
    read(text)
    return time.process_time() - started


def superlinear(read: Callable[[str], object], *, chars: int, suspect_s: float) -> list[str]:
    """The texts for which `read` takes much more than twice the CPU time at twice the length.

    Args:
        suspect_s: more than a linear search of `chars` takes, and less than a quadratic one.
    """
    found = []
    for text in hostile():
        if cpu_time(read, text(chars)) < suspect_s:
            continue
        once, twice = (min(cpu_time(read, text(length)) for _ in range(4)) for length in (chars, 2 * chars))
        if once > suspect_s and twice > 3 * once:
            found.append(f"{text(chars)[:60]!r}...: {once:.4f} s, at twice the length {twice:.4f} s")
    return found


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    def within(value: object, name: str) -> Iterator[tuple[str, re.Pattern[str]]]:
        if isinstance(value, re.Pattern):
            yield name, value
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                yield from within(item, f"{name}[{number}]")
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from within(item, f"{name}[{key!r}]")

    seen = set()
    of_rooms = (each.name for room in ROOMS for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}."))
    for module in (*of_rooms, *SCRIPTS):
        for name, value in vars(importlib.import_module(module)).items():
            for full_name, pattern in within(value, f"{module.removeprefix('verl_ext.')}.{name}"):
                if pattern not in seen:
                    seen.add(pattern)
                    yield full_name, pattern


PATTERNS = dict(patterns())


def test_the_patterns_are_found():
    assert (
        len(PATTERNS) > 30
        and {"protocols.instructions._WRAPPED[0][0]", "protocols.base._FENCE", "prepare_gsm8k._PERCENT"}
        < PATTERNS.keys()
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_time_linear_in_the_text(name):
    def read(text: str) -> None:
        for _ in PATTERNS[name].finditer(text):
            pass

    slow = superlinear(read, chars=2000, suspect_s=0.0015)
    assert not slow, f"{PATTERNS[name].pattern}: {len(slow)} texts, {slow[:3]}"


TOOLS = {"code_interpreter": CODE_SCHEMA}
KNOWN = [("short", "What is 2+3?"), ("long", "Let x be the number of marbles that Ann has in her bag, 1/2 + 3.")]
CODE, HERMES = CodeProtocol(None), HermesProtocol(None, max_parallel_calls=4, repair_json=True)


def read_trace(text: str) -> None:
    with suppress(ValueError):
        split_trace(
            [{"role": "user", "content": text}, {"role": "assistant", "content": text}], None, CODE, "<|im_end|>"
        )


READERS = {
    "instructions": problem_text.bare_problem,
    "key": problem_text.same_problem_key.__wrapped__,
    "template": problem_text.template_key,
    "words": problem_text.has_no_words,
    "overlap": problem_text.EvaluationProblems(KNOWN).find_overlap,
    "annotations": program,
    "code": lambda text: CODE.parse(text, TOOLS, ended=True),
    "code in thinking": lambda text: CODE.parse(text, TOOLS, ended=True, thinking=True),
    "hermes": lambda text: HERMES.parse(text, TOOLS, ended=True),
    "hermes in thinking": lambda text: HERMES.parse(text, TOOLS, ended=True, thinking=True),
    "trace": read_trace,
    "answer": extract_answer,
}


def test_calls_that_are_opened_again_and_again_are_read_in_linear_time_by_the_gateway(qwen_tokenizer):
    parser = Template(qwen_tokenizer).parser
    once, twice = (
        min(
            cpu_time(lambda text: calls_in(text, parser), '<tool_call>{\\"' * number + "</tool_call>") for _ in range(3)
        )
        for number in (4000, 8000)
    )
    assert twice < max(3 * once, 0.1)


@pytest.mark.parametrize("name", READERS)
def test_a_text_is_read_in_time_linear_in_its_length(name):
    assert superlinear(READERS[name], chars=6000, suspect_s=0.02) == []
