"""Show what changed in the small model: tables and a picture, from the runs of `scripts.studies.seeds`.

    python -m scripts.studies.seeds --model small  # the runs, hours
    python -m scripts.studies.small_study [--runs outputs/seeds_small] [--problems 96] [--results FILE]

Prints the curves of RL as means, counts kinds of errors in what the runs wrote, and evaluates each seed's model before
and after RL again, greedily and with eight samples per problem. The findings on a run are a line of FILE, and the run
is not studied again: another machine can continue with FILE.
"""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from data import arithmetic
from scripts.studies.drawing import write_picture
from scripts.studies.shared import REPO, Published, command_line, whole_cpu
from verl_ext.cpu import is_cpu_only
from verl_ext.evaluation.figures import align
from verl_ext.evaluation.samples import Sample, read_samples
from verl_ext.pages.charts import Chart, Series
from verl_ext.runs.folder import judged_files

SOURCE = "word_problems"
ENOUGH_JUDGED = 0.99  # of the samples of an evaluation
CURVES = (  # metric, title, unit
    ("train/acc", "Accuracy in training", "share of rollouts"),
    ("tool/error_rate", "Calls that failed", "share of calls"),
    ("actor/entropy_loss", "Entropy", "nats per token"),
    ("response_length/mean", "Response", "tokens"),
    ("filter_groups/filled_with_equal", "Fillers", "groups"),
)
STEPS = 6  # per mean in the table of curves
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_OUTPUT = re.compile(r"<interpreter>\n(.*?)\n</interpreter>", re.DOTALL)
# What is wrong with a response: the first that holds, judged by rules over its text, not by a model.
ERRORS: dict[str, Callable[[Sample], bool]] = {
    "right": lambda sample: sample.acc == 1,
    "no answer": lambda sample: not sample.pred,
    "its last program failed": lambda sample: sample.tool_errors > 0 and _printed(sample) is None,
    "no program: the right calculation, a wrong result": lambda sample: _calculates_the_answer(sample),
    "the answer is not what the program printed": lambda sample: _printed(sample) not in (None, _value(sample.pred)),
    "a number of its program is not in the problem": lambda sample: bool(_numbers_of_code(sample) - _given(sample)),
    "numbers of the problem, another formula": lambda sample: True,
}


def _value(text: str) -> float | None:
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*", text)
    return float(found[1]) if found else None


def _printed(sample: Sample) -> float | None:
    """Return the number that the last program printed."""
    outputs = _OUTPUT.findall(sample.output)
    return _value(outputs[-1]) if outputs else None


def _calculation(sample: Sample) -> str:
    """Return what a response without Python calculates: `4 * 7`, if its first line is `4 * 7 = 28`."""
    return sample.output.partition("\n")[0].partition("=")[0]


def _calculates_the_answer(sample: Sample) -> bool:
    """Return whether a response without a program has a calculation that gives the right answer, whatever it states."""
    truth = _value(sample.ground_truth)
    try:
        value = arithmetic.evaluate(_calculation(sample))
    except ValueError:
        return False
    return truth is not None and not _CODE.search(sample.output) and math.isclose(value, truth, rel_tol=1e-6)


def _numbers_of_code(sample: Sample) -> set[str]:
    programs = _CODE.findall(sample.output) or [_calculation(sample)]
    return set(_NUMBER.findall(programs[-1]))


def _given(sample: Sample) -> set[str]:
    return set(_NUMBER.findall(sample.prompt))


def kind_of(sample: Sample) -> str:
    """Return the first of ERRORS that holds."""
    return next(name for name, holds in ERRORS.items() if holds(sample))


def samples_of(run: Path, when: str) -> list[Sample]:
    """Read the judged samples of the word problems, before or after RL."""
    (file,) = judged_files(run / "eval" / when)
    return [sample for sample in read_samples(file) if sample.data_source == SOURCE and not sample.failure]


def shares_of(run: Path, when: str) -> dict[str, float]:
    """Return the share of responses of each kind."""
    counts = Counter(map(kind_of, samples_of(run, when)))
    return {kind: counts[kind] / counts.total() for kind in ERRORS}


def error_table(studies: Mapping[str, Mapping]) -> list[list[str]]:
    """Tabulate the share of responses of each kind, before and after RL, for each run."""
    table = [["of all responses, before -> after RL", *studies]]
    for kind in ERRORS:
        sides = [
            [study["errors"][when].get(kind, math.nan) for when in ("before", "after")] for study in studies.values()
        ]
        table.append([kind, *(" -> ".join(f"{share:.1%}" for share in side) for side in sides)])
    return table


def examples(run: Path, number: int = 3) -> str:
    """Show problems whose first response was wrong before RL and is right after it, with both responses."""
    first: dict[tuple[str, ...], dict[str, Sample]] = {}
    for when in ("before", "after"):
        for sample in samples_of(run, when):
            first.setdefault(sample.problem_key(), {}).setdefault(when, sample)
    chosen, kinds = [], set()
    for pair in first.values():
        if len(pair) < 2:  # all samples of one side failed
            continue
        kind = kind_of(pair["before"])
        if pair["before"].acc == 0 and pair["after"].acc == 1 and pair["before"].id not in kinds:
            kinds.add(pair["before"].id)
            question = pair["before"].prompt.rpartition("\\boxed{}.")[2].partition("assistant")[0].strip()
            sides = "".join(f"\n{when}:\n{pair[when].output}\n" for when in ("before", "after"))
            chosen.append(f"{question}\n({kind})\n{sides}")
    return "\n---\n".join(chosen[:number])


def evaluated(run: Path, model: str, problems: int) -> dict[str, Any]:
    """Evaluate the run's merged model "sft" or "rl": greedy accuracy, and accuracy and pass@k of eight samples.

    Raises:
        CalledProcessError: an evaluation gave no result.
        ValueError: too many of its samples are not judged.
    """
    found = {}
    for kind, n, temperature in (("greedy", 1, 0.0), ("sampled", 8, 1.0)):
        out = run / "study" / f"{model}_{kind}_{problems}"
        command = (sys.executable, "-m", "verl_ext.evaluation", "--model", str(run / model / "merged"))
        data = ("--config", "smollm2_dapo", "--data", str(run / "data" / "eval.parquet"), "--limit", str(problems))
        sampling = ("--n", str(n), "--temperature", str(temperature), "--out", str(out))
        hardware = ("+hardware=cpu_small",) if is_cpu_only() else ()
        found_in = out / "result.json"
        found_in.unlink(missing_ok=True)  # left by another call
        ended = subprocess.run([*command, *data, *sampling, *hardware], cwd=REPO, env=whole_cpu(), stdout=sys.stderr)
        if not found_in.exists():  # the status is also 1 if a sample is not judged
            raise subprocess.CalledProcessError(ended.returncode, ended.args)
        result = json.loads(found_in.read_text())
        judged, wanted = (result["samples"][name] for name in ("judged", "wanted"))
        if judged < ENOUGH_JUDGED * wanted:
            raise ValueError(
                f"{out}: {judged} of {wanted} samples are judged; expected {ENOUGH_JUDGED:.0%}. Its result.md says why "
                "the others are not. Run the same command again to judge them."
            )
        found[kind] = result["figures"][SOURCE]["metrics"]["acc/mean@k"]
        if n > 1:
            found["pass@k"] = {k: figure["value"] for k, figure in result["by_k"][SOURCE]["pass@k"].items()}
    return found


def evaluation_table(studies: Mapping[str, Mapping]) -> list[list[str]]:
    """Tabulate greedy accuracy and pass@k before and after RL, for the runs that were evaluated again."""

    def rows() -> Iterator[list[str]]:
        for run, study in studies.items():
            for name, found in study.get("evaluated", {}).items():
                sides = (found["greedy"], found["sampled"])
                accuracies = [f"{each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}]" for each in sides]
                yield [f"{run}, {name}", *accuracies, *(f"{found['pass@k'][str(k)]:.3f}" for k in (2, 4, 8))]

    return [["on the first problems of the test", "greedy", "mean of 8", "pass@2", "pass@4", "pass@8"], *rows()]


def study_of(run: Path, problems: int) -> dict[str, Any]:
    """Return what is published of a run; the control and the run without Python are not evaluated again."""
    study: dict[str, Any] = {"errors": {when: shares_of(run, when) for when in ("before", "after")}}
    if run.name.startswith("seed_"):
        models = {"SFT": "sft", "after RL": "rl"}
        study["evaluated"] = {name: evaluated(run, model, problems) for name, model in models.items()}
        study["examples"] = examples(run)
    return study


def curve_table(results: Mapping[str, Mapping]) -> list[list[str]]:
    """Tabulate the means of CURVES over STEPS steps, for each run."""
    last = max(step for each in results.values() for steps, _ in each["curves"].values() for step in steps)
    spans = [range(first, min(first + STEPS, last + 1)) for first in range(1, last + 1, STEPS)]
    table = [[f"means of {STEPS} steps", *(f"{span[0]}-{span[-1]}" for span in spans)]]
    for run, each in results.items():
        for key, title, unit in CURVES:
            points = list(zip(*each["curves"][key], strict=True))
            within = [[value for step, value in points if step in span] for span in spans]
            means = (f"{fmean(values):.3g}" if values else "" for values in within)
            table.append([f"{run}: {title}, {unit}", *means])
    return table


def curves(results: Mapping[str, Mapping]) -> list[Chart]:
    """Make the charts of CURVES, with a line per run."""
    charts = []
    for key, title, unit in CURVES:
        lines = [Series(run, *each["curves"][key]) for run, each in results.items() if each["curves"][key][0]]
        if lines:
            charts.append(Chart(title, lines, unit, "RL step"))
    return charts


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--runs", type=Path, default=REPO / "outputs" / "seeds_small", help="of scripts.studies.seeds")
    parser.add_argument("--problems", type=int, default=96, help="to evaluate greedily and eight times (default: 96)")
    parser.add_argument("--results", type=Path, help="default: study.jsonl in --runs")
    parser.add_argument("--curves", type=Path, help="results of seeds.py (default: results.jsonl in --runs)")
    parser.add_argument("--picture", type=Path, help="SVG file of the curves (default: small.svg in --runs)")
    args = parser.parse_args(argv)
    studies = Published(args.results or args.runs / "study.jsonl")
    runs = sorted(path.parent for path in args.runs.glob("*/summary.json"))
    if not studies.rows and not runs:
        parser.error(f"{args.runs} has no finished run. Start them: python -m scripts.studies.seeds --model small")
    curves_in = args.curves or args.runs / "results.jsonl"
    if not (results := Published(curves_in).rows):
        parser.error(f"{curves_in} has no result. Set --curves to the --results of scripts.studies.seeds.")
    settings = {"problems": args.problems}
    try:
        for run in runs:
            if not studies.has(run.name, settings):
                studies.add(run.name, study_of(run, args.problems), settings)
    except (subprocess.CalledProcessError, ValueError) as error:
        sys.exit(f"small_study.py: {error}")
    write_picture(curves(results), args.picture or args.runs / "small.svg", columns=2)
    tables = (curve_table(results), error_table(studies.rows), evaluation_table(studies.rows))
    print(*map(align, tables), sep="\n\n")
    for run, study in studies.rows.items():
        print(f"\n{run}\n{study.get('examples', '')}")


if __name__ == "__main__":
    main()
