"""Check that the metrics of two runs are equal, step by step, except times. For runs with `+repeatable=cpu`.

    .venv/bin/python scripts/compare_metrics.py outputs/run_a outputs/run_b

Reads all `metrics*.jsonl` of each run (or one file; in a quickstart's folder those of RL, or else of SFT), without
`timing*` and `perf/*`. Says in which step the runs first differ, and in what, and exits with 1 if they do.
"""

import argparse
import math
import sys
from pathlib import Path

from verl_ext.runs.folder import metric_files
from verl_ext.runs.metrics import metric_rows

TIMES = ("timing", "perf/", "train/mfu")  # prefixes of metrics that depend on a clock or on the machine's memory


def read_run(path: Path) -> dict[int, dict[str, float]]:
    """Read metrics by step, without times; of a step that was logged twice (resume), what was logged last.

    Raises:
        FileNotFoundError: there are none.
    """
    steps: dict[int, dict[str, float]] = {}
    for file in metric_files(path, "rl", "sft"):
        for step, data in metric_rows(file):
            kept = {name: value for name, value in data.items() if not name.startswith(TIMES)}
            steps.setdefault(step, {}).update(kept)
    if not steps:
        raise FileNotFoundError(f"The metrics of {path} have no step. Name a run that has finished one.")
    return steps


def differences(first: dict[int, dict[str, float]], second: dict[int, dict[str, float]]) -> list[str]:
    """Return a line for each metric that differs in the first differing step, bit by bit; NaN equals NaN."""
    for step in sorted(first.keys() | second.keys()):
        a, b = first.get(step, {}), second.get(step, {})
        names = sorted(name for name in a.keys() | b.keys() if not _is_equal(a.get(name), b.get(name)))
        if names:
            return [f"step {step} | {name}: {a.get(name)!r} | {b.get(name)!r}" for name in names]
    return []


def _is_equal(a: object, b: object) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs=2, type=Path, metavar="RUN", help="folder of a run or of a quickstart, or a metrics file"
    )
    runs = [read_run(path) for path in parser.parse_args().runs]
    found = differences(*runs)
    print("\n".join(found) if found else f"equal: {len(runs[0])} steps, {sum(map(len, runs[0].values()))} values")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
