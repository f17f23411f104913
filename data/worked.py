"""Problems with the program that solves them: executed, checked against the gold answer, and written for SFT and RL.

For small/prepare.py, prepare_mawps.py and prepare_gsm8k.py. `split_apart` keeps the SFT, RL and test problems apart.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import arithmetic
from shortcuts import describe_shortcuts

from verl_ext.datasets.problems import Problem, Report, features, problem_row, shortened, write_problems
from verl_ext.datasets.rows import DataError, write_parquet
from verl_ext.datasets.text import PROMPTS, EvaluationProblems, same_problem_key, template_key
from verl_ext.datasets.traces import Trace, make_message, write_traces
from verl_ext.runs import durable

PROTOCOL, NO_TOOL = "code_short", "text_short"  # keys of PROMPTS
SHORTCUTS_FILE = "shortcuts.txt"  # next to eval.parquet: what rules score on it
_FLOAT_ERROR = Fraction(1, 10**9)  # .1 + .2 prints 0.30000000000000004
_ROUNDED = Fraction(1, 100)  # MAWPS rounds answers to two digits; GSM8K's are exact


@dataclass(frozen=True)
class Worked:
    """A problem, the program that solves it and what the program prints. `answer` is the gold one."""

    text: str
    code: str
    output: str
    answer: str
    id: str


def as_fraction(number: str) -> Fraction:
    """Return `1,005`, `1/2`, `10%` or `.5` as a number.

    Raises:
        ValueError, ZeroDivisionError: it is not a number.
    """
    bare = number.strip().replace(",", "")
    return Fraction(bare.removesuffix("%")) / (100 if bare.endswith("%") else 1)


def work_out(text: str, code: str, gold: str, name: str, *, exact: bool = True) -> Worked:
    """Run the program, and check that it prints the gold answer.

    Args:
        exact: if false, the gold answer may be rounded to two digits; the returned answer is the program's.
    Raises:
        ValueError: the program is not arithmetic, prints another number, or prints one that has no short decimal
            (1/3): the scorer accepts no rounded answer.
    """
    output = arithmetic.run(code)
    if not output:
        raise ValueError("there is no program")
    if abs(Fraction(output) - as_fraction(gold)) > (_FLOAT_ERROR if exact else _ROUNDED):
        raise ValueError(f"the program prints {output}, but the answer is {gold}")
    answer = arithmetic.plain(float(output))
    if abs(Fraction(output) - Fraction(answer)) > _FLOAT_ERROR:
        raise ValueError(f"the program prints {output}, which is not a short decimal")
    return Worked(text, code, output, answer, name)


def trace_of(worked: Worked, protocol: str = PROTOCOL) -> Trace:
    """Return a trace: one interpreter call (without the tool: the calculation), its output and the boxed answer."""
    question = make_message("user", PROMPTS[protocol].format(problem=worked.text))
    answer = f"The answer is \\boxed{{{worked.answer}}}."
    if protocol == NO_TOOL:
        calculation = worked.code.removeprefix("print(").removesuffix(")")
        spoken = make_message("assistant", f"{calculation} = {worked.output}\n{answer}")
        return Trace(worked.text, [question, spoken], 1, worked.id)
    call, reply = make_message("assistant", "", [worked.code]), make_message("tool", worked.output)
    return Trace(worked.text, [question, call, reply, make_message("assistant", answer)], 1, worked.id)


def problem_of(worked: Worked) -> Problem:
    return Problem(worked.text, worked.answer, worked.id)


def split_apart(*sets: Sequence[Worked]) -> tuple[list[list[Worked]], Report]:
    """Leave out of each set what an earlier set has, in any spelling, and the set's own duplicates.

    Name the sets from the one that must stay whole (the test) to the one that gives way. An earlier set has a problem
    if it is equal except for spaces, case and punctuation, or for numbers and names, or if it shares half of the runs
    of 30 letters (`EvaluationProblems`). Within a set, the same problem may occur with other numbers.
    """
    report, kept, seen, templates = Report(), [], set(), set()
    before: list[tuple[str, str]] = []
    for number, problems in enumerate(sets):
        others = EvaluationProblems(before)
        kept.append([])
        for problem in problems:
            report.rows += 1
            key = same_problem_key(problem.text)
            example = f"{problem.id}: {shortened(problem.text)}"
            if key in seen:
                report.drop("the same problem occurs earlier", example)
            elif template_key(problem.text) in templates:
                report.drop(f"set {number + 1}: an earlier set has it with other numbers or names", example)
            elif before and (overlap := others.find_overlap(problem.text)):
                report.drop(
                    f"set {number + 1}: overlap with an earlier set", f"{overlap[1]:.0%} of {overlap[0]} | {example}"
                )
            else:
                kept[-1].append(problem)
            seen.add(key)
        before += [(problem.id, problem.text) for problem in kept[-1]]
        templates |= {template_key(problem.text) for problem in kept[-1]}
    report.distinct, report.kept = len(seen), sum(map(len, kept))
    return kept, report


def write_task(
    out: Path,
    *,
    sft: Sequence[Worked],
    sft_val: Sequence[Worked],
    rl: Sequence[Worked],
    rl_source: str,
    evaluation: dict[str, Sequence[Problem]],
    protocol: str = PROTOCOL,
) -> None:
    """Write sft_train, sft_val, rl_train and eval.parquet, as the small run reads them, and print figures and examples.

    Args:
        rl_source: data source of the RL problems.
        evaluation: problems by data source; the score of shortcuts on each is printed.
        protocol: of the traces, PROTOCOL or NO_TOOL. The problems' instructions stay; `+tool=none` replaces them.
    Raises:
        DataError: one of the files has no row.
    """
    parts = {"sft_train": sft, "sft_val": sft_val, "rl_train": rl, "eval": [*itertools.chain(*evaluation.values())]}
    if empty := [str(out / f"{name}.parquet") for name, problems in parts.items() if not problems]:
        raise DataError(f"No problem is left to write to {', '.join(empty)}; nothing was written.")
    for name, traces in (("sft_train", sft), ("sft_val", sft_val)):
        write_traces([trace_of(worked, protocol) for worked in traces], out / f"{name}.parquet")
    write_problems(
        [problem_of(w) for w in rl], out / "rl_train.parquet", data_source=rl_source, split="train", protocol=PROTOCOL
    )
    rows = [
        problem_row(problem, index, data_source=source, split="test", protocol=PROTOCOL)
        for source, problems in evaluation.items()
        for index, problem in enumerate(problems)
    ]
    write_parquet(rows, out / "eval.parquet", features())
    counts = ", ".join(f"{source} {len(problems):,}" for source, problems in evaluation.items())
    print(f"{out / 'eval.parquet'}: {len(rows):,} rows ({counts})")
    rates = describe_shortcuts({source: [(p.text, p.answer) for p in each] for source, each in evaluation.items()})
    durable.write_text(out / SHORTCUTS_FILE, f"{rates}\n")
    print(rates)


def keep_worked(rows: Iterable[tuple[str, str, str, str]], report: Report, *, exact: bool = True) -> Iterator[Worked]:
    """Yield `work_out` of (text, code, gold, id) rows; the report counts those that it refuses."""
    for text, code, gold, name in rows:
        report.rows += 1
        try:
            worked = work_out(text, code, gold, name, exact=exact)
        except (ValueError, ZeroDivisionError) as error:
            report.drop("the program does not give the answer", f"{name}: {error}")
            continue
        report.kept += 1
        yield worked
