"""Make word problems that need multi-digit arithmetic, and traces that solve them with and without an interpreter.

A model of 10^5 parameters cannot multiply two-digit numbers in its head, but it can learn to write the formula, read
what the interpreter prints and copy it into the box. What RL has to find is which of the strategies in the traces pays.
"""

import ast
import contextlib
import io
import random
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from verl_ext.protocols.base import format_output

NAMES = ["Tom", "Ana", "Lee", "Mia", "Sam", "Eva"]
THINGS = ["apples", "pens", "books", "coins", "cards", "eggs"]

# How a trace solves its problem, and the share of each. Only `tool` and `repair` can be right for a reason.
TRACE_MIX = {"mental": 0.50, "tool": 0.20, "wrong_formula": 0.15, "repair": 0.10, "give_up": 0.05}
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}


@dataclass(frozen=True)
class Problem:
    """One word problem. `wrong` are formulas of a careless reader; `key` identifies the problem except for names."""

    question: str
    expression: str
    wrong: tuple[str, ...]
    answer: str
    key: str


def _boxes_gain(n: str, t: str, a: int, b: int, c: int) -> tuple[str, str, tuple[str, ...]]:
    question = f"{n} has {a} boxes with {b} {t} each and gets {c} more. How many {t}?"
    return question, f"{a}*{b}+{c}", (f"{a}+{b}+{c}", f"{a}*{b}-{c}", f"{a}*({b}+{c})")


def _boxes_lose(n: str, t: str, a: int, b: int, c: int) -> tuple[str, str, tuple[str, ...]]:
    question = f"{n} has {a} boxes with {b} {t} each and loses {c}. How many {t}?"
    return question, f"{a}*{b}-{c}", (f"{a}+{b}-{c}", f"{a}*{b}+{c}", f"{a}*({b}-{c})")


def _same_price(n: str, t: str, a: int, b: int, c: int) -> tuple[str, str, tuple[str, ...]]:
    question = f"{n} buys {a} {t} at {b} cents and {c} more at the same price. Total cents?"
    return question, f"({a}+{c})*{b}", (f"{a}+{c}*{b}", f"{a}*{b}+{c}", f"{a}*{b}*{c}")


def _remainder(n: str, t: str, a: int, b: int, c: int) -> tuple[str, str, tuple[str, ...]]:
    question = f"What is the remainder when {a} times {b} is divided by {c}?"
    return question, f"{a}*{b}%{c}", (f"{a}*{b}//{c}", f"({a}+{b})%{c}", f"{a}*{b}-{c}")


def _full_bags(n: str, t: str, a: int, b: int, c: int) -> tuple[str, str, tuple[str, ...]]:
    question = f"{n} packs {a * b} {t} into bags of {c}. How many full bags?"
    return question, f"{a * b}//{c}", (f"{a * b}%{c}", f"{a * b}-{c}", f"{a * b}*{c}")


def _two_sales(n: str, t: str, a: int, b: int, c: int) -> tuple[str, str, tuple[str, ...]]:
    question = f"{n} sells {a} {t} at {b} cents and {c} {t} at {a} cents. Total cents?"
    return question, f"{a}*{b}+{c}*{a}", (f"{a}*{b}+{c}", f"{a}*({b}-{c})", f"({a}+{c})*{b}")


TEMPLATES: list[Callable[..., tuple[str, str, tuple[str, ...]]]] = [
    _boxes_gain,
    _boxes_lose,
    _same_price,
    _remainder,
    _full_bags,
    _two_sales,
]


def make_problem(rng: random.Random, *, split: str) -> Problem:
    """Draw a problem of a split.

    Args:
        split: "train" or "test": three numbers of 11..99, split by a hash of template and formula, so that no test
            problem is in the training data under whatever name; "ood_large": three numbers of 100..999; "ood_chain": a
            fourth number, that is one more operation than any training problem has.
    Raises:
        ValueError: unknown split.
    """
    if split not in ("train", "test", "ood_large", "ood_chain"):
        raise ValueError(f"Unknown split {split!r}; expected train, test, ood_large or ood_chain.")
    low, high = (100, 999) if split == "ood_large" else (11, 99)
    while True:
        numbers = [rng.randint(low, high) for _ in range(3)]
        kind = rng.randrange(len(TEMPLATES))
        question, expression, wrong = TEMPLATES[kind](rng.choice(NAMES), rng.choice(THINGS), *numbers)
        if split == "ood_chain":
            extra = rng.randint(low, high)
            question, expression = f"{question} Then add {extra}.", f"{expression}+{extra}"
        key = f"{kind}:{expression}"  # not the numbers: 12 * 30 and 18 * 20 apples are the same 360 to pack
        is_test = zlib.crc32(key.encode()) % 10 == 0
        if split in ("ood_large", "ood_chain") or is_test == (split == "test"):
            return Problem(
                question, expression, wrong, str(eval(expression)), key
            )  # our own arithmetic, two lines above


def interpreter_output(code: str) -> str:
    """Return what the interpreter prints for one of our snippets, or the last line of the traceback.

    A test runs the same snippets in the real sandbox and compares.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            exec(compile(code, "main.py", "exec"), {})  # our own snippets, see `make_trace`
        except Exception as error:  # whatever the snippet raises is its output
            # Not `traceback`: in Python 3.11 it leaves out the "Did you mean: 'print'?" that an interpreter ends with.
            sys.__excepthook__(type(error), error, error.__traceback__)
    return format_output(stdout.getvalue(), stderr.getvalue(), traceback="last_line")


def make_trace(problem: Problem, kind: str, rng: random.Random) -> list[dict[str, str]]:
    """Make an SFT conversation in ReTool's form: user; assistant with `<code>`; interpreter; ...; assistant with
    `\\boxed{}`.

    Args:
        kind: a key of `TRACE_MIX`.
    """
    formula = problem.expression

    def assistant(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    def run(code: str, before: str = "") -> list[dict[str, str]]:
        return [
            assistant(f"{before}<code>{code}</code>"),
            {"role": "interpreter", "content": interpreter_output(code)},
        ]

    messages = [{"role": "user", "content": problem.question}]
    if kind == "mental":
        return messages + [assistant(f"I compute {formula} in my head. \\boxed{{{problem.answer}}}")]
    if kind in ("tool", "wrong_formula"):
        steps = run(f"print({formula if kind == 'tool' else rng.choice(problem.wrong)})")
        return messages + steps + [assistant(f"\\boxed{{{steps[-1]['content']}}}")]
    faulty = run(rng.choice([f"print({formula}", f"prin({formula})", f"x={formula}"]))
    if kind == "give_up":
        return messages + faulty + [assistant(f"I compute {formula} in my head. \\boxed{{{problem.answer}}}")]
    if kind == "repair":
        return messages + faulty + run(f"print({formula})", "Fix it. ") + [assistant(f"\\boxed{{{problem.answer}}}")]
    raise ValueError(f"Unknown kind of trace {kind!r}; expected one of {list(TRACE_MIX)}.")


def without_tool(trace: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a trace of `make_trace` without its calls, for text RL: its last formula is worked out in steps."""
    question, *said = trace
    answer = said[-1]["content"]
    if len(said) > 1 and answer.startswith("\\boxed"):  # it copies what the last program printed
        formula = said[-3]["content"].partition("print(")[2].removesuffix(")</code>")
        answer = f"{work_out(formula)} {answer}"
    return [question, {"role": "assistant", "content": answer}]


def work_out(formula: str) -> str:
    """Return the operations of a formula with their results: `(12+3)*40` gives `12+3=15. 15*40=600.`"""
    done = []

    def value(node: ast.expr) -> int:
        if not isinstance(node, ast.BinOp):
            return node.value
        operation = f"{value(node.left)}{_SIGNS[type(node.op)]}{value(node.right)}"
        result = eval(operation)  # our own arithmetic
        done.append(f"{operation}={result}.")
        return result

    value(ast.parse(formula, mode="eval").body)
    return " ".join(done)
