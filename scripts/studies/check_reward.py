"""Check the verifiers on labelled files, and list every disagreement. Exits with 1 if a check fails.

    python -m scripts.studies.check_reward WHAT FILE

    pairs     rows: pred, gold, equal, kind ("answer": put into a box)
    golds     rows: answer; each equals its own spellings and no other gold
    traces    rows: messages, ground_truth, upstream_correct
    code      rows: reference, test; starts a sandbox on 127.0.0.1
    labelled  rows: gold, response, label (.jsonl, .json or .parquet)

The files of tests/data will do. Pairs: at least 98% right and no false positive. Code: references pass, mutants fail.
`pairs` and `labelled` print math-verify's figures next to ours. `labelled` takes any file of responses that somebody
has judged, such as VerifierBench's mathematics, finds its columns (--gold, --response, --label name others) and lists
the rows in which our verdict and the label differ. A disagreement does not make it fail, because such labels also err.
"""

import ast
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.studies.shared import command_line
from verl_ext.reward import Score, score_answer
from verl_ext.reward.grade import judge_by_math_verify
from verl_ext.reward.maths.extraction import extract_answer
from verl_ext.reward.maths.rationals import read_quantity
from verl_ext.reward.score import compare
from verl_ext.runs import jsonl, parquet

MIN_RIGHT = 0.98
TOLERANCE = 0.01  # relative, of the graders that accept rounded decimals


COLUMNS = {
    "gold": ("gold", "gold_answer", "ground_truth", "answer", "correct_answer", "reference"),
    "response": ("response", "llm_response", "model_generation", "generation", "llm_output", "output", "completion"),
    "label": ("label", "gold_judgment", "correctness", "is_correct", "equal", "judgment"),
}
LABELS = {"true": True, "correct": True, "right": True, "a": True, "1": True, "1.0": True}
LABELS |= {"false": False, "incorrect": False, "wrong": False, "b": False, "0": False, "0.0": False}
LABELS |= {"c": None, "invalid": None}  # VerifierBench's third: a response that cannot be judged


def check_pairs(rows: list[dict[str, Any]]) -> bool:
    """Judge labelled pairs; contested ones are left out of the count."""
    counted = [row for row in rows if not row.get("contested")]
    judged = []
    for row in counted:
        response = rf"The final answer is \boxed{{{row['pred']}}}." if row["kind"] == "answer" else row["pred"]
        judged.append((row["equal"], *judge(response, row["gold"])))
        score = judged[-1][1]
        if (score.acc == 1.0) != row["equal"]:
            print(f"  {row['category']}: expected {row['equal']}, {score.verdict} by {score.method}: "
                  f"{row['pred'][:80]!r} against {row['gold'][:80]!r}")  # fmt: skip
    right, false_positives = compare_graders(judged)
    print(f"{right} of {len(counted)} right ({right / len(counted):.1%}), {false_positives} false positives")
    return right >= MIN_RIGHT * len(counted) and not false_positives


def judge(response: str, gold: str) -> tuple[Score, bool | None]:
    """Return our score, and math-verify's verdict on the whole response; None if it is not asked (guards.py)."""
    return score_answer(response, gold), judge_by_math_verify(response, gold, extract_answer(response) or "")


def compare_graders(judged: list[tuple[bool, Score, bool | None]]) -> tuple[int, int]:
    """Print a line per grader against the labels; return how many ours got right, and its false positives."""
    ours = [(label, score.acc == 1.0) for label, score, _ in judged]
    theirs = [(label, bool(verdict)) for label, _, verdict in judged]
    print(f"{'':12} {'right':>15} {'false pos.':>10} {'false neg.':>10} {'precision':>10} {'recall':>8}")
    for name, verdicts in (("ours", ours), ("math-verify", theirs)):
        table = Counter(verdicts)
        right = table[True, True] + table[False, False]
        said, true = table[True, True] + table[False, True], table[True, True] + table[True, False]
        print(
            f"{name:12} {right:6} ({right / len(judged):6.1%}) {table[False, True]:10} {table[True, False]:10} "
            f"{table[True, True] / max(said, 1):10.1%} {table[True, True] / max(true, 1):8.1%}"
        )
    unasked = sum(verdict is None for _, _, verdict in judged)
    if unasked:
        print(f"{unasked} answers were not given to math-verify, which might hang, and count as wrong in its row")
    table = Counter(ours)
    return table[True, True] + table[False, False], table[False, True]


def check_labelled(rows: list[dict[str, Any]], named: dict[str, str | None], *, boxed_only: bool) -> bool:
    """Judge responses that somebody has labelled, and list those on which our verdict and the label differ.

    Args:
        named: column of each of COLUMNS, None to look for one of its usual names.
        boxed_only: leave out responses without a complete box, which we count as no answer whatever they say.
    Raises:
        ValueError: a column is missing, or a label is neither right nor wrong nor left open.
    """
    columns = {role: named[role] or next((name for name in names if name in rows[0]), None)
               for role, names in COLUMNS.items()}  # fmt: skip
    if missing := [role for role, column in columns.items() if column not in rows[0]]:
        raise ValueError(
            f"No column for {', '.join(missing)} among {', '.join(rows[0])}. Name it with --{missing[0]} COLUMN."
        )
    judged, left_out = [], Counter()
    for row in rows:
        written = str(row[columns["label"]]).strip().lower()
        if written not in LABELS:
            raise ValueError(f"The label is {written!r}; expected one of {', '.join(LABELS)}.")
        label, gold, response = LABELS[written], str(row[columns["gold"]]), str(row[columns["response"]])
        if label is None or not gold.strip() or (boxed_only and extract_answer(response) is None):
            left_out["label left open" if label is None else "no gold" if not gold.strip() else "no box"] += 1
            continue
        score, verdict = judge(response, gold)
        judged.append((label, score, verdict))
        if (score.acc == 1.0) != label:
            print(f"  labelled {'right' if label else 'wrong'}, ours {score.verdict} by {score.method}, math-verify "
                  f"{verdict}: {score.pred[:80]!r} against {gold[:80]!r}")  # fmt: skip
    print(f"{len(judged)} rows, {sum(label for label, _, _ in judged)} labelled right; left out: {dict(left_out)}")
    if judged:
        compare_graders(judged)
    return bool(judged)


def read_rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        return parquet.read(file).to_pylist()
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if text.lstrip()[:1] == "[" else list(jsonl.read(file))


def spellings(answer: str) -> list[str]:
    """Return the spellings in which data sets and models write the same answer."""
    written = [answer, rf"\text{{{answer}}}", f"${answer}$", rf"\mathbf{{{answer}}}", f" {answer}. ", rf"x = {answer}"]
    written += [rf"\left({answer}\right)", rf"{answer}\text{{ units}}", rf"{answer}^\circ"]
    digits = answer.removeprefix("-")
    if digits.isdigit():
        sign = answer[: -len(digits)]
        grouped = f"{int(digits):,}"
        written += [sign + digits.zfill(3), sign + "0" + digits, sign + grouped, sign + grouped.replace(",", r"\,")]
        written += [answer + ".0", sign + grouped.replace(",", "{,}")]
    return written


def check_golds(rows: list[dict[str, Any]]) -> bool:
    """Check that every gold equals its own spellings, and no other gold of the file."""
    golds = sorted({str(row["answer"]) for row in rows})
    numbers = {gold: int(gold) if gold.lstrip("-").isdigit() else gold for gold in golds}
    unlike = [(gold, said) for gold in golds for said in spellings(gold) if not compare(said.strip(), gold).equal]
    same = [
        (gold, other)
        for gold in golds
        for other in golds
        if numbers[gold] != numbers[other] and compare(other, gold).equal is not False
    ]
    for gold, said in unlike + same:
        print(f"  {said!r} against {gold!r}: {compare(said, gold)}")
    spelled = sum(len(spellings(gold)) for gold in golds)
    print(f"{len(golds)} golds: {len(unlike)} of {spelled} spellings refused, {len(same)} equal to another gold")
    return not unlike and not same


def check_traces(rows: list[dict[str, Any]]) -> bool:
    """Grade the assistant's messages of recorded traces, and explain each recorded verdict that differs."""
    table, reasons = Counter(), Counter()
    for row in rows:
        if row.get("upstream_correct") is None:
            continue
        spoken = "\n".join(m["content"] or "" for m in row["messages"] if m["role"] == "assistant")
        score = score_answer(spoken, row["ground_truth"])
        table[bool(row["upstream_correct"]), score.verdict] += 1
        if (score.acc == 1.0) != bool(row["upstream_correct"]):
            reason = explain(score.pred, score.verdict, row["ground_truth"], str(row.get("extracted_answer") or ""))
            reasons[reason] += 1
            print(f"  recorded {row['upstream_correct']}, ours {score.verdict}: {score.pred[:60]!r} against "
                  f"{row['ground_truth'][:60]!r}: {reason}")  # fmt: skip
    for (recorded, verdict), count in sorted(table.items()):
        print(f"recorded {'right' if recorded else 'wrong'}, ours {verdict}: {count}")
    print("disagreements: " + (", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "none"))
    return reasons["not explained"] == 0


def explain(pred: str, verdict: str, gold: str, recorded: str) -> str:
    """Say why a recorded verdict may differ from ours, as far as a rule can tell."""
    if verdict == "correct":
        return "the record took something other than the box"
    if verdict == "no_answer":
        return "no box: the record took the tool's output or the prose"
    if compare(pred.rpartition("=")[2] or "?", gold).equal:
        return "the record took the right side of an equation"
    value, target = approximate(pred.rpartition("approx")[2] or pred), approximate(gold)
    if ":" not in gold and value is not None and target and abs(value - target) <= TOLERANCE * abs(target):
        return "a rounded decimal of an exact gold"
    if not compare(recorded, gold).equal:
        return "what the record extracted is not the gold either"
    return "not explained"


def approximate(latex: str) -> float | None:
    """Return the value of a number, rational or with roots and pi; None for anything else."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    try:
        quantity = read_quantity(latex.strip())
        return float(quantity.value if quantity else sympy.N(latex2sympy(latex)))
    except Exception:  # the parser raises many kinds; all mean that it is not a number
        return None


class _Mutant(ast.NodeTransformer):
    """Transformer that makes every function return something that no reference returns."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [ast.Return(ast.Constant("no such answer"))]
        return node


async def grade_code(rows: list[dict[str, Any]], url: str) -> tuple[list[str], list[str]]:
    """Return ids of tasks whose reference did not pass, and of those whose mutant was not judged wrong."""
    from verl_ext.reward.verifiers.code import CodeVerifier

    verifier = CodeVerifier({}, urls=[url], max_concurrency=4, timeout_s=30)

    async def verdict(program: str, row: dict[str, Any]) -> str:
        score = await verifier.verify(f"Here it is:\n```python\n{program}\n```", row["test"], row)
        return score.verdict

    references = await asyncio.gather(*(verdict(row["reference"], row) for row in rows))
    programs = [ast.unparse(ast.fix_missing_locations(_Mutant().visit(ast.parse(row["reference"])))) for row in rows]
    mutants = await asyncio.gather(*(verdict(program, row) for program, row in zip(programs, rows, strict=True)))
    await verifier.aclose()
    failed = [f"{row['id']} ({got})" for row, got in zip(rows, references, strict=True) if got != "correct"]
    passed = [f"{row['id']} ({got})" for row, got in zip(rows, mutants, strict=True) if got != "wrong"]
    return failed, passed


def check_code(rows: list[dict[str, Any]]) -> bool:
    """Check that references pass their tests in the sandbox, and that mutants fail them."""
    from verl_ext.sandbox import running_server

    with running_server(workers=2) as url:
        failed, passed = asyncio.run(grade_code(rows, url))
    print(f"{len(rows)} tasks: {len(failed)} references not right {failed}, {len(passed)} mutants not wrong {passed}")
    return not failed and not passed


CHECKS = {"pairs": check_pairs, "golds": check_golds, "traces": check_traces, "code": check_code}


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("what", choices=[*CHECKS, "labelled"])
    parser.add_argument("file", type=Path)
    for role, names in COLUMNS.items():
        parser.add_argument(f"--{role}", metavar="COLUMN", help=f"for `labelled` (default: the first of {names})")
    parser.add_argument("--boxed-only", action="store_true", help="for `labelled`: leave out responses without a box")
    arguments = parser.parse_args(argv)
    rows = read_rows(arguments.file)
    if arguments.what == "labelled":
        named = {role: getattr(arguments, role) for role in COLUMNS}
        try:
            return 0 if check_labelled(rows, named, boxed_only=arguments.boxed_only) else 1
        except ValueError as error:
            parser.error(str(error))
    return 0 if CHECKS[arguments.what](rows) else 1


if __name__ == "__main__":
    sys.exit(main())
