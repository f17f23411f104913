"""Write one self-contained page (`report.html`) and `summary.json` of a run: training, evaluations, rollouts.

The page shows what is in the run's folder; it names each missing part and what makes it. report.html has the
page's layout, comparison.py compares several runs.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from verl_ext.evaluation import figures as evaluation
from verl_ext.evaluation.store import flatten
from verl_ext.pages import curves
from verl_ext.pages.charts import Chart, Series
from verl_ext.pages.page import environment as templates
from verl_ext.pages.page import render
from verl_ext.pages.text import duration
from verl_ext.report.contents import RunContents, read_run
from verl_ext.report.rollouts import pick_rollouts, pick_training_rollouts, worst_problems
from verl_ext.report.verdict import headline, judge
from verl_ext.runs import durable
from verl_ext.runs.machine import environment
from verl_ext.runs.metrics import step_times, warm_step

_SAMPLES = "records/trajectories/val_<step>.parquet or evaluation/global_step_<n>/records/"
_EVALUATE = "bash scripts/merge_and_eval.sh RUN"
_LAUNCHER = "the launcher in recipe/retool"
MAKES = {
    "quickstart": {
        "evaluation before RL": ("eval/before/records/", "bash scripts/quickstart.sh --stage eval"),
        "evaluation after RL": ("eval/after/records/", "bash scripts/quickstart.sh --stage eval"),
        "SFT metrics": ("sft/metrics-<start>.jsonl", "bash scripts/quickstart.sh --stage sft"),
        "RL metrics": ("rl/metrics-<start>.jsonl", "bash scripts/quickstart.sh --stage rl"),
        "rollouts": (
            "eval/before/records/, eval/after/records/ or rl/records/",
            "bash scripts/quickstart.sh --stage eval",
        ),
        "stage times": ("stages.json", "bash scripts/quickstart.sh"),
        "SFT configuration": ("sft/hydra/config.yaml", "bash scripts/quickstart.sh --stage sft"),
        "RL configuration": ("rl/hydra/config.yaml", "bash scripts/quickstart.sh --stage rl"),
    },
    "rl": {
        "evaluation": (_SAMPLES, f"retool.recorder and trainer.test_freq of the launcher, or {_EVALUATE}"),
        "RL metrics": ("metrics-<start>.jsonl", f"trainer.logger=[console,file] of {_LAUNCHER}"),
        "rollouts": ("records/", "retool.recorder of the launcher"),
        "RL configuration": ("hydra/config.yaml", _LAUNCHER),
    },
    "sft": {
        "evaluation": ("evaluation/global_step_<n>/records/", _EVALUATE),
        "SFT metrics": ("metrics-<start>.jsonl", f"trainer.logger=[console,file] of {_LAUNCHER}"),
        "SFT configuration": ("hydra/config.yaml", _LAUNCHER),
    },
    "evaluation": {"evaluation": ("records/", _EVALUATE)},
}  # kind of run -> part of its page -> the file it needs, what makes it


SETTINGS = (
    ("prompts per step", "data.train_batch_size"),
    ("samples per prompt", "actor_rollout_ref.rollout.n"),
    ("prompts per mini-batch", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    ("learning rate", "actor_rollout_ref.actor.optim.lr"),
    ("clip low", "actor_rollout_ref.actor.clip_ratio_low"),
    ("clip high", "actor_rollout_ref.actor.clip_ratio_high"),
    ("loss aggregation", "actor_rollout_ref.actor.loss_agg_mode"),
    ("dynamic sampling", "algorithm.filter_groups.enable"),
    ("response budget (tokens)", "data.max_response_length"),
    ("temperature", "actor_rollout_ref.rollout.temperature"),
)  # of the RL configuration, shown above the whole of it


def write_report(folder: Path) -> str:
    """Write report.html and summary.json into the run's folder and return the result table for the console.

    Raises:
        NoRun: the folder holds no run.
        ValueError: a file in the folder is malformed.
    """
    run = read_run(folder)
    figures = evaluate_run(run)
    summary = summarize(run, figures)
    html = page(run, summary)
    durable.write_text(folder / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    durable.write_text(folder / "report.html", html)
    return f"{console_table(run, figures, summary)}\nReport: {folder / 'report.html'}"


def evaluate_run(run: RunContents) -> dict[str, Any]:
    """Return side ("before", "after", "difference") -> figures per group of problems; empty if one is missing.

    A group with a difference has the figures of its problems on both sides; `excluded` counts all samples even then.
    """
    samples = {"before": run.before, "after": run.after}
    common = dict(zip(samples, evaluation.paired(run.before, run.after), strict=True))
    judged = [rows for rows in (*samples.values(), *common.values()) if rows]
    # best@k and maj@k are compared, so all have one k
    k = min((evaluation.evaluate(rows, draws=1)["overall"].n for rows in judged), default=None)
    sides = {}
    for side, rows in samples.items():
        whole, of_common = (evaluation.evaluate(each, k=k) if each else {} for each in (rows, common[side]))
        of_common = {name: replace(each, excluded=whole[name].excluded) for name, each in of_common.items()}
        sides[side] = whole | of_common
    return sides | {"difference": evaluation.compare(run.before, run.after, k=k) if all(sides.values()) else {}}


def summarize(run: RunContents, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json: always the same keys; None or empty if there is nothing to say."""
    train_loss, val_loss = ((run.sft.curve(key)[1] or [None])[-1] for key in ("train/loss", "val/loss"))
    walls = [stage["wall_s"] for stage in run.stages if stage["wall_s"] is not None]
    sides = evaluation.to_json(figures)
    judgement = judge(run, sides)
    found = {
        "evaluation before RL": run.before,
        "evaluation after RL": run.after,
        "evaluation": run.after,
        "SFT metrics": run.sft.steps,
        "RL metrics": run.rl.steps,
        "rollouts": run.before or run.after or run.training_rollouts,
        "stage times": run.stages,
        "SFT configuration": run.configs.get("SFT"),
        "RL configuration": run.configs.get("RL"),
    }
    return {
        "run": run.folder.resolve().name,
        "kind": run.kind,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": judgement.text,
        "improved": judgement.improved,
        "not_improved": judgement.not_improved,
        "headline": headline(sides),
        "sides": run.sides,
        "evaluation": sides,
        "worst": worst_problems(run.before, run.after),
        "sft": {
            "steps": max(run.sft.steps, default=0),
            "train_loss": train_loss,
            "val_loss": val_loss,
            "starts": [start._asdict() for start in run.sft.starts],
        },
        "rl": {
            "steps": max(run.rl.steps, default=0),
            "warm_step": warm_step(run.rl),
            "start_up_s": run.start_up,
            "starts": [start._asdict() for start in run.rl.starts],
        },
        "stages": run.stages,
        "total_wall_s": sum(walls) if walls else None,
        "peak_gb": max((stage["peak_gb"] for stage in run.stages if stage["peak_gb"]), default=None),
        "environment": environment(),
        "missing": [part for part in MAKES[run.kind] if not found[part]],
    }


def console_table(run: RunContents, figures: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return the result for a terminal: both evaluations, the difference, step time, and what is missing."""
    lines = []
    for name, side in zip(run.sides, ("before", "after"), strict=True):
        if figures[side]:
            lines.append(f"{capitalized(name)}\n{evaluation.format_evaluation(figures[side])}\n")
    if figures["difference"]:
        lines.append(f"{evaluation.format_comparison(**figures)}\n")
    lines.append(summary["verdict"])
    for name in ("sft", "rl"):
        lines += [f"{name.upper()}: {text}" for text in start_texts(summary[name]["starts"])]
    if warm := summary["rl"]["warm_step"]:
        split = ", ".join(f"{part} {seconds:.2f}" for part, seconds in warm["split_s"].items())
        lines.append(f"Warm RL step: {warm['median_s']:.2f} s, median of {warm['num_steps']} ({split})")
    if phases := summary["rl"]["start_up_s"]:
        split = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
        lines.append(f"First RL step: {sum(phases.values()):.0f} s after the command ({split})")
    if summary["total_wall_s"] is not None:
        lines.append(f"All stages: {duration(summary['total_wall_s'])}")
    makes = MAKES[run.kind]
    lines += [f"Missing: {part}, {makes[part][0]} (to make it: {makes[part][1]})" for part in summary["missing"]]
    return "\n".join(lines)


def start_texts(starts: Sequence[dict[str, int]]) -> list[str]:
    """Return a line for each start of a run that was started more than once: `resumed from step 20, steps 21 to 30`."""
    if len(starts) == 1 and not starts[0]["resumed_from"]:
        return []
    return [
        (f"resumed from step {first}" if (first := start["resumed_from"]) else "started from scratch")
        + f", steps {first + 1} to {start['last']}"
        for start in starts
    ]


def page(run: RunContents, summary: dict[str, Any]) -> str:
    """Return the page, made of the run's contents and the summary's figures."""
    rollouts = pick_rollouts(*run.rows, run.sides) or pick_training_rollouts(run.training_rollouts)
    rows = _table_rows(summary["evaluation"])
    config = flatten(yaml.safe_load(run.configs.get("RL", "{}")) or {})
    steps, parts = step_times(run.rl)
    times = [Series(name, steps, seconds) for name, seconds in parts.items()]
    return render(
        TEMPLATES.get_template("report.html"),
        summary=summary,
        groups=[row for row in rows if evaluation.is_shown(row["name"], row["data_sources"])],
        top=next((row for row in rows if row["name"] == summary["headline"]["group"]), None),
        verdict=judge(run, summary["evaluation"]),
        questions=_with_evaluations(charts([("", run)]), summary),
        rl=run.rl,
        time_chart=Chart("Step time", times, "seconds", "RL step", stacked=True) if steps else None,
        columns={where: list(group) for where, group in groupby(rollouts, lambda rollout: rollout.where)},
        longest_stage_s=max((stage["wall_s"] or 0 for stage in run.stages), default=0),
        configs=run.configs,
        settings=[(label, value) for label, key in SETTINGS if (value := config.get(key)) is not None],
        makes=MAKES[run.kind],
    )


def charts(runs: Sequence[tuple[str, RunContents]]) -> dict[str, list[Chart]]:
    """Return question -> charts of SFT and RL, with a line for each of the named runs."""
    found: dict[str, list[Chart]] = {}
    for part in ("sft", "rl"):
        metrics = [(name, None, getattr(run, part)) for name, run in runs]
        for question, drawn in curves.charts(metrics, x_label=f"{part.upper()} step").items():
            found.setdefault(question, []).extend(drawn)
    return found


def _table_rows(sides: dict[str, dict[str, dict]]) -> list[dict[str, Any]]:
    """Return the figures before and after and their difference, for every group of problems."""
    return [
        {"name": name, "label": name.replace("_", " ") if name in evaluation.POOLED else name}
        | {"data_sources": figures["data_sources"]}
        | {side: groups.get(name) for side, groups in sides.items()}
        for name, figures in (sides["before"] | sides["after"]).items()
    ]


def _with_evaluations(questions: dict[str, list[Chart]], summary: dict[str, Any]) -> dict[str, list[Chart]]:
    """Return the charts with the evaluated accuracy and its interval in that of accuracy, at the steps evaluated."""
    marks = held_out(summary, "held out, with interval")
    return {
        question: [replace(each, series=[*each.series, *marks]) if each.title == "accuracy" else each for each in drawn]
        for question, drawn in questions.items()
    }


def held_out(summary: dict[str, Any], name: str) -> list[Series]:
    """Return the evaluated accuracy of a run with its interval, at the RL steps evaluated; [] if there is none."""
    top, last = summary["headline"], summary["rl"]["steps"]
    steps = {side: int(side.removeprefix("step ")) for side in summary["sides"] if side.startswith("step ")}
    steps |= {"before RL": 0, "after RL": last}
    named = zip(summary["sides"], ("before", "after"), strict=True)
    ends = [(steps[each], top[side]) for each, side in named if each in steps and top and top[side]]
    if not ends:
        return []
    values, spread = [end["value"] for _, end in ends], [(end["low"], end["high"]) for _, end in ends]
    return [Series(name, [step for step, _ in ends], values, points=True, spread=spread)]


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


TEMPLATES = templates(Path(__file__).parent, starts=start_texts, capitalized=capitalized)
