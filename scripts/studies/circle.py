"""The circle: a trained model's own samples, checked, teach a fresh model, from which RL starts again.

    python -m scripts.studies.circle [--teacher outputs/quickstart] [--out outputs/circle]

The teacher is the RL-trained model of a quickstart. It samples problems that its SFT has not seen; `verl_ext.traces
check` keeps those that are right, with programs that say what they said. Two fresh tiny models learn from as many
traces: those, and the first of the hand-made ones. From the first starts RL. Prints accuracies on held-out problems
with 95% intervals over problems. What is there is not made again; a quarter of an hour on two cores.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.studies.domains import run
from scripts.studies.shared import REPO, command_line, markdown
from verl_ext.evaluation.figures import evaluate, format_estimate
from verl_ext.evaluation.samples import find_samples, read_samples

PROBLEMS, TRACES, SEED = 2600, 2000, 77  # of the problems that the teacher samples
SFT_STEPS, BATCH = 500, 64  # of configs/tiny_sft.yaml


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--teacher", type=Path, default=REPO / "outputs" / "quickstart", help="a quickstart's folder")
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "circle", help="default: outputs/circle")
    args = parser.parse_args()
    teacher, out = args.teacher.resolve(), args.out.resolve()
    traces = sampled(teacher, out)
    hand_made = pq.read_table(teacher / "data" / "sft_train.parquet", columns=["messages"]).slice(0, TRACES)
    for arm, table, further in (
        ("sampled", pq.read_table(traces, columns=["messages"]).slice(0, TRACES), [("rl", "merge", "eval")]),
        ("hand-made", hand_made, []),
    ):
        learn(out / arm, table, further)
    rows = [["teacher", *figures(teacher / "eval" / "before"), *figures(teacher / "eval" / "after")]]
    for arm in ("sampled", "hand-made"):
        after = out / arm / "eval" / "after"
        rows.append([f"{TRACES} {arm} traces", *figures(out / arm / "eval" / "before")])
        rows[-1] += figures(after) if after.exists() else ["-", "-"]
    print(markdown(["", "after SFT", "larger or longer", "after RL", "larger or longer"], rows))
    return 0


def sampled(teacher: Path, out: Path) -> Path:
    """Let the teacher sample, and return the file of the kept traces."""
    data, traces = out / "problems", out / "traces.parquet"
    if not (data / "rl_train.parquet").exists():
        prepare = [sys.executable, REPO / "data" / "tiny_tools" / "prepare.py", "--out", data, "--seed", SEED]
        run([*prepare, "--rl", PROBLEMS, "--sft", 64])
    if not traces.exists():
        command = [sys.executable, "-m", "verl_ext.traces"]
        source = ["--model", teacher / "rl" / "merged", "--config", "tiny_dapo"]
        run([*command, "sample", *source, "--data", data / "rl_train.parquet", "--out", out / "samples", "--n", 1])
        gate = ["--min-calls", 1, "--per-problem", 1, "--out", traces]
        run([*command, "check", out / "samples", "--evaluation", data / "eval.parquet", *source, *gate])
    return traces


def learn(folder: Path, traces: pa.Table, further: list[tuple[str, ...]]) -> None:
    """Run a quickstart whose SFT reads other traces, and after its evaluation the further stages."""
    command = [sys.executable, "-m", "verl_ext.quickstart", "--out", folder]
    command += [f"--sft=trainer.total_epochs={-(-SFT_STEPS * BATCH // len(traces)) + 1}"]
    if not (folder / "data" / "sft_train.parquet").exists():
        run([*command, "--stage", "data"])
        pq.write_table(traces.slice(64), folder / "data" / "sft_train.parquet")
        pq.write_table(traces.slice(0, 64), folder / "data" / "sft_val.parquet")
    for part in (("sft", "merge", "eval"), *further):
        run([*command, *(word for stage in part for word in ("--stage", stage))])


def figures(folder: Path) -> list[str]:
    """Return the accuracy in distribution, and on larger numbers or longer chains."""
    found = evaluate(read_samples(find_samples(folder)))
    return [format_estimate(found[name].metrics["acc/mean@k"]) for name in ("in_distribution", "out_of_distribution")]


if __name__ == "__main__":
    sys.exit(main())
