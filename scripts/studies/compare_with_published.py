"""Compare a run's metrics with those of the published ReTool run (data/published), on an HTML page and in a table.

    python -m scripts.studies.compare_with_published  # only the published run
    python -m scripts.studies.compare_with_published --run outputs/qwen2-32b_dapo --sft outputs/qwen2-32b_sft

Reads what verl's file logger wrote (metrics-*.jsonl, joined by step). The page also says which of the published columns
verl 0.9.1 logs under which name today. Source and licence of the published metrics: data/published/README.md
"""

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from scripts.studies.drawing import write_picture
from scripts.studies.shared import REPO, command_line
from verl_ext.pages.charts import Chart, Series
from verl_ext.pages.page import environment, render
from verl_ext.report.verdict import held_out_source
from verl_ext.runs import durable
from verl_ext.runs.folder import metric_files
from verl_ext.runs.metrics import Metrics, read_metrics

PUBLISHED = REPO / "data" / "published"
HELD_OUT = "accuracy on held-out problems"
ALIGNMENTS = {"step": "step", "updates": "optimizer updates", "prompts": "prompts trained on"}


class Batch(NamedTuple):
    """The size of one step of a run: prompts (SFT: traces) trained on, and optimizer updates."""

    prompts: int
    updates: int


PUBLISHED_BATCH = {"rl": Batch(512, 8), "sft": Batch(32, 1)}  # configs/qwen2-32b_{dapo,sft}.yaml


class Compared(NamedTuple):
    """A metric of the published run, and its counterpart in a run of verl 0.9.1."""

    title: str
    unit: str
    published: str  # key
    today: str  # key
    note: str = ""


COMPARED = {
    "rl": (
        Compared(
            "reward",
            "mean score",
            "critic/score/mean",
            "critic/score/mean",
            "published: up to 0.4 more for wrong answers with tool calls. Yours: over the groups trained on",
        ),
        Compared(HELD_OUT, "share right", "val-core/aime_2025/acc/mean@30", "val-core/<data source>/acc/mean@<n>"),
        Compared("response length", "tokens", "response_length/mean", "response_length/mean", "tool output included"),
        Compared(
            "at the length limit",
            "share of responses",
            "response_length/clip_ratio",
            "train/truncation_rate",
            "published: as long as the batch's longest, which was the limit. Yours: over all that was generated",
        ),
        Compared("turns", "per response", "num_turns/mean", "num_turns/mean", "2 + 2 x calls; 2 is no call"),
        Compared("entropy", "nats per token", "actor/entropy", "actor/entropy"),
        Compared("KL of an update", "nats per token", "actor/ppo_kl", "actor/ppo_kl", "policy to its old log-probs"),
        Compared("clipped tokens", "share of tokens", "actor/pg_clipfrac", "actor/pg_clipfrac"),
        Compared("gradient norm", "before clipping", "actor/grad_norm", "actor/grad_norm"),
        Compared("step", "seconds", "timing_s/step", "timing_s/step", "without validation"),
        Compared("rollouts", "seconds", "timing_s/gen", "timing_s/gen", "part of the step"),
        Compared("update", "seconds", "timing_s/update_actor", "timing_s/update_actor", "part of the step"),
        Compared("throughput", "tokens per s and GPU", "perf/throughput", "perf/throughput", "of the whole step"),
        Compared(
            "GPU memory",
            "GB allocated at most",
            "perf/max_memory_allocated_gb",
            "actor/perf/max_memory_allocated_gb",
            "as torch counts it in one process; 0 on a CPU",
        ),
        Compared(
            "host memory", "GB in use", "perf/cpu_memory_used_gb", "actor/perf/cpu_memory_used_gb", "of the machine"
        ),
    ),
    "sft": (Compared("SFT loss", "nats per token", "train/loss", "train/loss"),),
}

# Published columns whose name or meaning differs in verl 0.9.1, or that it lacks: pattern -> (its key, what differs).
# All other columns keep their names; `tests/unit/test_compare_with_published.py` checks both against a real run's keys.
MOVED: dict[str, tuple[str | None, str]] = {
    r"perf/(max_memory_allocated|max_memory_reserved|cpu_memory_used)_gb": (r"actor/perf/\1_gb", ""),
    r"val-aux/.*?/score/(.*)": (r"val-aux/<data source>/reward/\1", "score and reward were the same number"),
    r"timing_s/agent_loop/tool_calls/mean": ("tool/seconds", "was the mean over a response's calls, is per call"),
    r"timing_s/agent_loop/.*": (None, "verl 0.9.1 does not measure the loop; tool/time_share and trajectories/ do"),
    r"timing_s/reward": (None, "rewards are computed within the rollouts"),
    r"timing_s/(start|stop)_profile": (None, "not measured"),
    r"response_length/clip_ratio": (
        "train/truncation_rate",
        "the old key exists, but covers only the batch, without the groups that were replaced",
    ),
    r"train/lr\(1e-3\)": ("train/lr", "was in thousandths"),
    r"train/time\(s\)": (None, "verl 0.9.1's SFT trainer logs no time"),
}


class Row(NamedTuple):
    """A line of the table: (x, value) of the first and the last value, and of ours at the published end."""

    metric: Compared
    source: str  # data source of ours, for accuracy on held-out problems; else empty
    published: tuple[tuple[float, float], tuple[float, float]] | None
    own: tuple[tuple[float, float], tuple[float, float]] | None
    own_at_end: tuple[float, float] | None  # nearest to the last published x, if ours reaches that far


class Part(NamedTuple):
    """The compared metrics of one part, RL or SFT."""

    name: str  # rl | sft
    published: Metrics
    own: Metrics  # empty if there is none
    published_batch: Batch
    own_batch: Batch | None
    align: str

    def published_curves(self, key: str) -> dict[str, Series]:
        """Return curves by data source if `key` is an accuracy on held-out problems; else one under the empty name."""
        source = held_out_source(key) or ""
        curve = _curve(_name("published", source), self.published, key, self.published_batch, self.align)
        return {source: curve} if curve else {}

    def own_curves(self, key: str) -> dict[str, Series]:
        """Return our curves in the same form; there may be several data sources."""
        keys = {"": key}
        if key.startswith("val-core/<"):
            found = {name for values in self.own.steps.values() for name in values}
            keys = {source: name for name in sorted(found) if (source := held_out_source(name))}
        curves = {
            source: _curve(_name("yours", source), self.own, name, self.own_batch, self.align)
            for source, name in keys.items()
        }
        return {source: curve for source, curve in curves.items() if curve}


def read_part(name: str, paths: Sequence[Path], batch: Batch | None, align: str, *, published: bool = True) -> Part:
    """Read the published metrics of `name` (rl, sft), and those in `paths`: files, runs' folders, or a quickstart's.

    Args:
        batch: of the run in `paths`; None reads it from hydra/config.yaml next to the metrics, if `align` needs it.
    Raises:
        FileNotFoundError: a path is not there, or a folder has no metrics.
        ValueError: a file is of another form, holds none of the metrics compared, or the batch is unknown.
    """
    files = [file for path in paths for file in metric_files(path, name)]
    own = read_metrics(files)
    empty = Metrics({}, set())
    part = Part(name, empty, own, PUBLISHED_BATCH[name], batch, align)
    if paths and not any(part.own_curves(metric.today) for metric in COMPARED[name]):
        found = ", ".join(sorted({key for values in own.steps.values() for key in values})[:5]) or "nothing"
        raise ValueError(
            f"{', '.join(map(str, paths))} has no metrics of {name.upper()}; it has {found}. Expected "
            f"{', '.join(metric.today for metric in COMPARED[name][:2])}. Name SFT runs with --sft, RL runs with --run."
        )
    if paths and batch is None and align != "step":
        part = part._replace(own_batch=read_batch(name, files[0].parent / "hydra" / "config.yaml"))
    return part._replace(published=read_metrics([PUBLISHED / f"{name}.jsonl"])) if published else part


def read_batch(name: str, config: Path) -> Batch:
    """Read the batch of a run from the configuration that Hydra left.

    Raises:
        ValueError: it is not there, or has no batch size.
    """
    if not config.is_file():
        raise ValueError(f"No {config}, so the batch of your run is unknown. Set --{name}-batch PROMPTS[,UPDATES]")
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    try:
        prompts = values["data"]["train_batch_size"]
        if name == "sft":
            return Batch(prompts, 1)
        return Batch(prompts, prompts // values["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{config} has no {error}; expected the configuration of an {name.upper()} run, or --{name}-batch."
        ) from error


def rows(part: Part) -> list[Row]:
    """Make the table: a line per metric that either side has, and per data source of held-out problems."""
    lines = []
    for metric in COMPARED[part.name]:
        published, own = part.published_curves(metric.published), part.own_curves(metric.today)
        for source in dict.fromkeys([*published, *own]):
            sides = published.get(source), own.get(source)
            lines.append(Row(metric, source, *map(_ends, sides), _value_at_end(*sides)))
    return lines


def format_table(part: Part) -> str:
    """Format the table for a terminal."""
    x = ALIGNMENTS[part.align]
    header = ("metric", "unit", "published", f"{x}", "yours", f"{x}", "yours at the published end")
    table = [header]
    for row in rows(part):
        at_end = f"{row.own_at_end[1]:.4g} ({row.own_at_end[0]:g})" if row.own_at_end else "-"
        title = f"{row.metric.title}: {row.source}" if row.source else row.metric.title
        table.append((title, row.metric.unit, *format_ends(row.published), *format_ends(row.own), at_end))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def format_ends(ends: tuple[tuple[float, float], tuple[float, float]] | None) -> tuple[str, str]:
    """Format the first and the last value and their x: `0.0583 -> 0.251`, `1 - 10`."""
    if ends is None:
        return "-", "-"
    (x0, y0), (x1, y1) = ends
    return (f"{y0:.4g}", f"{x0:g}") if x0 == x1 else (f"{y0:.4g} -> {y1:.4g}", f"{x0:g} - {x1:g}")


def columns(published: Metrics, own: Metrics) -> list[dict[str, object]]:
    """List each published column (one per kind of validation, not per k): today's name or None, what differs, and
    whether our run has it.
    """
    present = {general_key(key) for values in own.steps.values() for key in values}
    lines = {}
    for key in (key for step in sorted(published.steps) for key in published.steps[step]):
        general = general_key(key)
        today, note = general, ""
        if moved := next((pattern for pattern in MOVED if re.fullmatch(pattern, key)), None):
            template, note = MOVED[moved]
            today = template and general_key(re.sub(moved, template, key))
        lines[general] = {"published": general, "today": today, "note": note, "present": today in present}
    return list(lines.values())


def general_key(key: str) -> str:
    """Return a validation key without its data source and number of samples: val-*/<data source>/acc/mean@<n>."""
    return re.sub(r"@\d+", "@<n>", re.sub(r"^val-(?:core|aux)/(?!num_turns/)[^/]+/", "val-*/<data source>/", key))


def chart(part: Part, metric: Compared) -> Chart | None:
    """Draw the curves of a metric; None if neither side has it."""
    series = [*part.published_curves(metric.published).values(), *part.own_curves(metric.today).values()]
    if not series:
        return None
    x_label = f"{part.name.upper()}, {ALIGNMENTS[part.align]}"
    return Chart(metric.title, series, metric.unit, x_label)


def write_page(parts: Sequence[Part], out: Path) -> None:
    """Write the page, with all charts, tables and the columns' names."""
    page = render(
        environment(Path(__file__).parent).get_template("compare_template.html"),
        compared=parts,
        charts={part.name: [(metric, chart(part, metric)) for metric in COMPARED[part.name]] for part in parts},
        rows=rows,
        format_ends=format_ends,
        columns={part.name: columns(part.published, part.own) for part in parts},
        alignments=ALIGNMENTS,
        published_readme=(PUBLISHED / "README.md").read_text(encoding="utf-8"),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(out, page)


def _name(side: str, source: str) -> str:
    return f"{side}, {source}" if source else side


def _curve(name: str, metrics: Metrics, key: str, batch: Batch | None, align: str) -> Series | None:
    steps, values = metrics.curve(key)
    factor = 1 if align == "step" or batch is None else getattr(batch, align)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    points = held_out_source(key) is not None or max(gaps, default=0) > 20  # no line over steps that nobody logged
    return Series(name, [step * factor for step in steps], values, points) if steps else None


def _ends(curve: Series | None) -> tuple[tuple[float, float], tuple[float, float]] | None:
    return curve and ((curve.x[0], curve.y[0]), (curve.x[-1], curve.y[-1]))


def _value_at_end(published: Series | None, own: Series | None) -> tuple[float, float] | None:
    if not published or not own or own.x[-1] < published.x[-1]:
        return None
    return min(zip(own.x, own.y, strict=True), key=lambda spot: abs(spot[0] - published.x[-1]))


def _batch(text: str) -> Batch:
    found = re.fullmatch(r"([1-9]\d*)(?:,([1-9]\d*))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch; expected PROMPTS or PROMPTS,UPDATES, such as 512,8")
    return Batch(int(found[1]), int(found[2] or 1))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument(
        "--run",
        type=Path,
        nargs="+",
        default=[],
        help="RL run: its folder, the folder of its quickstart, or metrics-*.jsonl",
    )
    parser.add_argument("--sft", type=Path, nargs="+", default=[], help="an SFT run, likewise")
    parser.add_argument("--no-published", action="store_true", help="your run only")
    parser.add_argument(
        "--align",
        choices=ALIGNMENTS,
        default="step",
        help="x axis: trainer steps (default), optimizer updates, or prompts (SFT: traces) trained on. A published "
        "step has 512 prompts and 8 updates, in SFT 32 traces and 1 update",
    )
    for name in PUBLISHED_BATCH:
        parser.add_argument(
            f"--{name}-batch",
            type=_batch,
            metavar="P[,U]",
            help="prompts and updates per step of your run, if hydra/ lacks them",
        )
    parser.add_argument("--out", type=Path, default=Path("outputs/compare.html"), help="default: outputs/compare.html")
    parser.add_argument("--picture", type=Path, help="also write the charts as one SVG file")
    args = parser.parse_args(argv)
    if args.no_published and not (args.run or args.sft):
        parser.error("--no-published needs --run or --sft, because there is nothing else to show.")
    wanted = {"rl": (args.run, args.rl_batch), "sft": (args.sft, args.sft_batch)}
    try:
        parts = [
            read_part(name, paths, batch, args.align, published=not args.no_published)
            for name, (paths, batch) in wanted.items()
            if paths or not args.no_published
        ]
        write_page(parts, args.out)
        if args.picture:
            charts = [chart(part, metric) for part in parts for metric in COMPARED[part.name]]
            write_picture([each for each in charts if each], args.picture)
    except (OSError, ValueError) as error:
        sys.exit(f"compare_with_published.py: {error}")
    for part in parts:
        print(f"{part.name.upper()}\n{format_table(part)}\n")
    print(f"Page: {args.out}")


if __name__ == "__main__":
    main()
