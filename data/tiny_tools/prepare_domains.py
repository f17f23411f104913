"""Write three tiny domains for one model: sums (task.py), draws, which need a notebook, and comparisons with choices.

    python data/tiny_tools/prepare_domains.py --out outputs/domains/data

A draw is a call of a function that exists only in the sandbox, and gives one number per program: whoever draws twice
must keep the first number in a variable until the next call, because it is random to the model. In an interpreter
without a memory the second call draws the first number again. Deterministic in `--seed`; no network.
"""

import argparse
import random
import zlib
from pathlib import Path

import pyarrow as pa
from prepare import distinct_problems, rl_row, sft_row
from task import THINGS

from verl_ext.runs import parquet

# The share of the traces of a domain, and of the strategies in them; "split" and "tool" are right for a reason.
SFT_SHARES = {"sums": 0.5, "draws": 0.3, "choices": 0.2}
DRAWS_MIX = {"split": 0.25, "once": 0.30, "forget": 0.25, "guess": 0.20}
CHOICES_MIX = {"tool": 0.30, "guess": 0.70}
SETUP = """\
def draw(_numbers=iter({numbers}), _programs=set()):
    import sys
    program = sys._getframe(1).f_code
    if program in _programs:
        raise RuntimeError("one draw per call")
    _programs.add(program)
    return next(_numbers)
"""


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def run(code: str, output: str) -> list[dict[str, str]]:
    return [assistant(f"<code>{code}</code>"), {"role": "interpreter", "content": output}]


def draw_problem(rng: random.Random) -> tuple[str, str, tuple[int, int], str]:
    """Return question, formula in `a` and `b`, the numbers that are drawn, and the answer."""
    c, thing = rng.randint(11, 999), rng.choice(THINGS)
    first, second = rng.choice("+-*"), rng.choice("+-")
    question = f"Draw two numbers of {thing}, one per call. What is first{first}second{second}{c}?"
    hidden = random.Random(zlib.crc32(question.encode()))  # one answer per question
    a, b = hidden.randint(11, 99), hidden.randint(11, 99)
    formula = f"a{first}b{second}{c}"
    return question, formula, (a, b), str(eval(formula, {"a": a, "b": b}))  # our own arithmetic


def draw_trace(rng: random.Random) -> list[dict[str, str]]:
    question, formula, (a, b), answer = draw_problem(rng)
    kind = rng.choices(list(DRAWS_MIX), list(DRAWS_MIX.values()))[0]
    messages = [{"role": "user", "content": question}]
    guess = assistant(f"\\boxed{{{rng.randint(-900, 9999)}}}")
    if kind == "guess":
        return [*messages, guess]
    if kind == "once":
        code = f"print({formula.replace('a', 'draw()').replace('b', 'draw()')})"
        return [*messages, *run(code, "RuntimeError: one draw per call"), guess]
    if kind == "forget":
        return [*messages, *run("print(draw())", str(a)), *run("print(draw())", str(b)), guess]
    steps = [*run("a=draw()", "(no output)"), *run(f"print({formula.replace('b', 'draw()')})", answer)]
    return [*messages, *steps, assistant(f"\\boxed{{{answer}}}")]


def choice_problem(rng: random.Random) -> tuple[str, str, str]:
    """Return question, program and the letter of the answer."""
    while True:
        a, b, c, d = (rng.randint(11, 99) for _ in range(4))
        if a * b != c * d:
            question = f"Which is larger? A: {a}*{b} B: {c}*{d}"
            return question, f"print('AB'[{a}*{b}<{c}*{d}])", "AB"[a * b < c * d]


def choice_trace(rng: random.Random) -> list[dict[str, str]]:
    question, program, answer = choice_problem(rng)
    messages = [{"role": "user", "content": question}]
    if rng.random() < CHOICES_MIX["guess"]:
        return [*messages, assistant(f"\\boxed{{{rng.choice('AB')}}}")]
    return [*messages, *run(program, answer), assistant(f"\\boxed{{{answer}}}")]


def rows_of(domain: str, rng: random.Random, count: int, *, split: str) -> list[dict]:
    """Make rows in verl's RL format, with different questions."""
    if domain == "sums":
        problems = distinct_problems(rng, split, count)
        return [rl_row(problem, number, split, domain) for number, problem in enumerate(problems)]
    rows: dict[str, dict] = {}
    while len(rows) < count:
        info, ability = {"index": len(rows), "split": split}, domain
        if domain == "draws":
            question, _, numbers, answer = draw_problem(rng)
            info["setup_code"] = SETUP.format(numbers=list(numbers))
        else:
            question, _, answer = choice_problem(rng)
        if (zlib.crc32(question.encode()) % 10 == 0) == (split == "test"):
            prompt = [{"role": "user", "content": question}]
            truth = {"style": "rule", "ground_truth": answer}
            row = {"data_source": domain, "prompt": prompt, "ability": ability, "reward_model": truth}
            rows.setdefault(question, row | {"extra_info": info})
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft", type=int, default=48_000, help="SFT traces of all domains (default: %(default)s)")
    parser.add_argument("--rl", type=int, default=2_048, help="RL prompts of a domain (default: %(default)s)")
    parser.add_argument("--test", type=int, default=128, help="held-out problems of a domain (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    make = {"sums": lambda r: sft_row(r)["messages"], "draws": draw_trace, "choices": choice_trace}

    def traces(count: int) -> list[dict]:
        kinds = rng.choices(list(SFT_SHARES), list(SFT_SHARES.values()), k=count)
        return [{"messages": make[kind](rng), "kind": kind} for kind in kinds]

    tables = {"sft_train": traces(args.sft), "sft_val": traces(512)}
    for domain in SFT_SHARES:
        tables[f"{domain}_train"] = rows_of(domain, rng, args.rl, split="train")
        # The evaluation problems do not depend on the seed: runs with different seeds are compared on the same ones.
        tables[f"{domain}_test"] = rows_of(domain, random.Random(2504_11536), args.test, split="test")
    for name, rows in tables.items():
        path = args.out / f"{name}.parquet"
        parquet.write(path, pa.Table.from_pylist(rows))
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
