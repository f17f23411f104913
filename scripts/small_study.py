"""Why the small model learned: the tables and the picture of docs/small.md, from the runs of `scripts/seeds.py`.

    .venv/bin/python scripts/seeds.py --model small            # the runs, hours
    .venv/bin/python scripts/small_study.py [--runs outputs/seeds_small] [--problems 96] [--picture docs/small.svg]

Evaluates the first seed's model before and after RL again, greedily and with eight samples a problem; the same command
goes on where it was broken off. Everything else is read from what the runs wrote.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_ext.evaluation.figures import align
from verl_ext.records.run_record import read_metrics
from verl_ext.records.samples import Sample, read_dump
from verl_ext.report.charts import Series, line_chart
from verl_ext.report.picture import write_picture

REPO = Path(__file__).resolve().parents[1]
SOURCE = "word_problems"
CURVES = (  # metric, title, unit
    ("train/acc", "Accuracy in training", "share of rollouts"),
    ("tool/error_rate", "Calls that failed", "share of calls"),
    ("actor/entropy", "Entropy", "nats per token"),
    ("response_length/mean", "Response", "tokens"),
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_OUTPUT = re.compile(r"<interpreter>\n(.*?)\n</interpreter>", re.DOTALL)
# What is wrong with a response, the first that holds; judged by rules over its text, not by a model.
ERRORS: dict[str, Callable[[Sample], bool]] = {
    "right": lambda sample: sample.acc == 1,
    "no answer": lambda sample: not sample.pred,
    "its last program failed": lambda sample: sample.tool_errors > 0 and _printed(sample) is None,
    "the answer is not what the program printed": lambda sample: _printed(sample) not in (None, _value(sample.pred)),
    "a number of its program is not in the problem": lambda sample: bool(_numbers_of_code(sample) - _given(sample)),
    "numbers of the problem, another formula": lambda sample: True,
}


def _value(text: str) -> float | None:
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*", text)
    return float(found[1]) if found else None


def _printed(sample: Sample) -> float | None:
    """The number that the last program printed."""
    outputs = _OUTPUT.findall(sample.output)
    return _value(outputs[-1]) if outputs else None


def _numbers_of_code(sample: Sample) -> set[str]:
    programs = _CODE.findall(sample.output) or [sample.output.partition("\n")[0].partition("=")[0]]
    return set(_NUMBER.findall(programs[-1]))


def _given(sample: Sample) -> set[str]:
    return set(_NUMBER.findall(sample.input))


def kind_of(sample: Sample) -> str:
    """The first of ERRORS that holds."""
    return next(name for name, holds in ERRORS.items() if holds(sample))


def samples_of(run: Path, when: str) -> list[Sample]:
    """Judged samples of the word problems, before or after RL."""
    (dump,) = (run / "eval" / when).glob("*.jsonl")
    return [sample for sample in read_dump(dump) if sample.data_source == SOURCE and not sample.failure]


def error_table(runs: Sequence[Path]) -> list[list[str]]:
    """Share of responses of each kind, before and after RL, of each run."""
    table = [["of all responses, before -> after RL", *(run.name for run in runs)]]
    sides = [[Counter(map(kind_of, samples_of(run, when))) for when in ("before", "after")] for run in runs]
    for kind in ERRORS:
        shares = [" -> ".join(f"{counts[kind] / counts.total():.1%}" for counts in side) for side in sides]
        table.append([kind, *shares])
    return table


def examples(run: Path, number: int = 3) -> str:
    """Problems whose first response was wrong before RL and is right after it, with both."""
    first: dict[str, dict[str, Sample]] = {}
    for when in ("before", "after"):
        for sample in samples_of(run, when):
            first.setdefault(sample.input, {}).setdefault(when, sample)
    chosen, kinds = [], set()
    for pair in first.values():
        kind = kind_of(pair["before"])
        if pair["before"].acc == 0 and pair["after"].acc == 1 and pair["before"].id not in kinds:
            kinds.add(pair["before"].id)
            question = pair["before"].input.rpartition("\\boxed{}.")[2].partition("assistant")[0].strip()
            sides = "".join(f"\n{when}:\n{pair[when].output}\n" for when in ("before", "after"))
            chosen.append(f"{question}\n({kind})\n{sides}")
    return "\n---\n".join(chosen[:number])


def evaluated(run: Path, problems: int) -> list[list[str]]:
    """Greedy accuracy and pass@k of the model before and after RL; evaluates what is not there yet."""
    table = [["on the first problems of the test", "greedy", "mean of 8", "pass@2", "pass@4", "pass@8"]]
    for name, model in (("SFT", "sft"), ("after RL", "rl")):
        row = [name]
        for kind, n, temperature in (("greedy", 1, 0.0), ("sampled", 8, 1.0)):
            out = run / "study" / f"{model}_{kind}"
            subprocess.run(
                [
                    *(sys.executable, "-m", "verl_ext.evaluate", "--model", str(run / model / "merged")),
                    *(
                        "--config",
                        "smollm2_dapo",
                        "--data",
                        str(run / "data" / "eval.parquet"),
                        "--limit",
                        str(problems),
                    ),
                    *("--n", str(n), "--temperature", str(temperature), "--out", str(out), "+hardware=cpu_small"),
                ],
                cwd=REPO,
                check=True,
                stdout=sys.stderr,
            )
            result = json.loads((out / "result.json").read_text())
            row += figures_of(result, n)
        table.append(row)
    return table


def figures_of(result: dict, n: int) -> list[str]:
    """Accuracy, and with several samples pass@k, as the result of an evaluation has them."""
    accuracy = result["evaluation"][SOURCE]["metrics"]["acc/mean@k"]
    found = [f"{accuracy['value']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]"]
    if n > 1:
        found += [f"{result['by_k'][SOURCE]['pass@k'][str(k)]['value']:.3f}" for k in (2, 4, 8)]
    return found


def curves(runs: Sequence[Path]) -> list[tuple]:
    """(title, chart) of CURVES, a line per run."""
    metrics = {run.name: read_metrics(list((run / "rl").glob("metrics-*.jsonl"))) for run in runs}
    charts = []
    for key, title, unit in CURVES:
        lines = [Series(name, *each.curve(key)) for name, each in metrics.items() if each.curve(key)[0]]
        if lines:
            charts.append((title, line_chart(lines, x_label="RL step", y_label=unit, title=title)))
    return charts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=REPO / "outputs" / "seeds_small", help="of scripts/seeds.py")
    parser.add_argument("--problems", type=int, default=96, help="evaluated greedily and eight times (default: 96)")
    parser.add_argument("--picture", type=Path, help="SVG file of the curves (default: small.svg in --runs)")
    args = parser.parse_args()
    runs = sorted(path.parent for path in args.runs.glob("*/summary.json"))
    if not runs:
        parser.error(f"{args.runs} has no finished run. Make them: .venv/bin/python scripts/seeds.py --model small")
    write_picture(curves(runs), args.picture or args.runs / "small.svg", columns=2)
    print(align(error_table(runs)), align(evaluated(runs[0], args.problems)), examples(runs[0]), sep="\n\n")


if __name__ == "__main__":
    main()
