"""Keep the problems that a model can learn from: an offline difficulty filter on how often it solves each.

    # from samples that exist: those of past runs or evaluations, or files of records
    python scripts/filter_by_pass_rate.py --data data/dapo_math_17k.parquet --out data/dapo_filtered.parquet \\
        --runs outputs/run
    # or with samples from the launcher's own rollouts, tools on; the same command continues an interrupted one
    MODEL_PATH=outputs/qwen2-32b_sft/merged python scripts/filter_by_pass_rate.py --data data/dapo_math_17k.parquet \\
        --out data/dapo_filtered.parquet --generate recipe/retool/run_qwen2-32b_dapo.sh trainer.nnodes=1

Bands:
  not-easy       drops problems solved in more than 62.5% of the samples, as OlmoRL does with 8 samples at temperature
                 1.0 and top-p 1.0 from the checkpoint that RL starts from (Olmo 3, arXiv:2512.13961)
  rarely-solved  keeps problems solved in at most 25% of the samples, but at least once, by this model or by that of
                 --solved-by. GLM-5 (arXiv:2602.15763) keeps what its predecessor rarely solves and stronger models
                 can; it gives no number, 25% is ours

The rows that are kept get one more column, `pass_rate`, from which `retool.adaptive_n` reads how hard they are.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_ext.evaluation.problems import bare_prompt
from verl_ext.evaluation.samples import NAMES, NoSamples, Sample, read_samples
from verl_ext.quickstart.supervise import CommandFailed, Supervisor
from verl_ext.records.problem import problem_of
from verl_ext.runs import durable, jsonl, parquet
from verl_ext.runs.folder import NoRun, files_of, find_run, judged_files, training_folder
from verl_ext.runs.lock import lock_folder
from verl_ext.sandbox.launch import SandboxNotReady, running_server
from verl_ext.settings.overrides import quoted
from verl_ext.trainer.adaptive_n import PASS_RATE_COLUMN

REPO = Path(__file__).resolve().parents[1]
MAX_RATES = {"not-easy": 0.625, "rarely-solved": 0.25}


@dataclass
class Tally:
    """Samples of one problem. Those with an infrastructure failure (sandbox, verifier) are in none of the figures."""

    judged: int = 0
    correct: int = 0  # with an acc of 1
    acc: float = 0.0  # the sum: a verifier may give a share

    @property
    def pass_rate(self) -> float | None:
        return self.acc / self.judged if self.judged else None


def generate(data: Path, rows: pa.Table, work: Path, args: argparse.Namespace) -> list[Path]:
    """Sample every problem with the launcher's rollouts, in chunks; return their runs.

    A chunk that has its records is not run again.

    Raises:
        SystemExit: `work` holds the samples of other data or settings, or another process writes there.
        CommandFailed: a run failed.
    """
    work.mkdir(parents=True, exist_ok=True)
    settings = {
        "data": hashlib.sha256(data.read_bytes()).hexdigest(),
        "model": os.environ.get("MODEL_PATH"),
        "command": [args.generate.name, *args.overrides],
        "samples": args.samples,
        "chunk": args.chunk,
    }
    noted = work / "settings.json"
    if noted.exists() and json.loads(noted.read_text()) != settings:
        raise SystemExit(
            f"{work} holds samples of other settings:\n  there: {noted.read_text()}\n  now:   {json.dumps(settings)}\n"
            "Delete the folder, or use the same settings."
        )
    durable.write_text(noted, json.dumps(settings))
    url = os.environ.get("SANDBOX_URL")
    starts = range(0, len(rows), args.chunk)
    runs = [work / f"chunk_{number:04}" for number in range(len(starts))]
    sandbox = nullcontext(url) if url else running_server()
    with lock_folder(work) as lock, sandbox as url, Supervisor(lock) as supervisor:
        for number, (start, run) in enumerate(zip(starts, runs, strict=True)):
            is_done = bool(judged_files(run))
            print(f"[{number + 1}/{len(runs)}] {run}{': done already' if is_done else ''}", flush=True)
            if is_done:
                continue
            chunk = run.with_suffix(".parquet")
            parquet.write(chunk, rows.slice(start, args.chunk))
            supervisor.run(
                [
                    *("bash", str(args.generate), *args.overrides, f"data.train_files={quoted(str(data))}"),
                    f"data.val_files=[{','.join([quoted(str(chunk))] * args.samples)}]",
                    *("trainer.val_only=True", "trainer.val_before_train=True", "trainer.resume_mode=disable"),
                    *("trainer.save_freq=-1", "retool.recorder.enable=true"),
                    *(
                        "actor_rollout_ref.rollout.val_kwargs.n=1",
                        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
                    ),
                    *(
                        "actor_rollout_ref.rollout.val_kwargs.top_p=1.0",
                        "actor_rollout_ref.rollout.val_kwargs.top_k=-1",
                    ),
                ],
                log=run.with_suffix(".log"),
                env={"PYTHON": sys.executable, "OUTPUT_DIR": str(run), "SANDBOX_URL": url},
            )
            if not judged_files(run):
                raise CommandFailed(f"the run wrote no records into {run}")
    return runs


def past_samples(path: Path) -> list[Sample]:
    """Return all samples, without texts except the prompt, of a file of records, a run, an evaluation, or a quickstart
    (its RL run), and print how many. A run without records stands for its evaluations.

    Raises:
        NoSamples: there are none.
        NoRun: the folder is no run.
    """
    if not path.exists():
        raise NoSamples(f"No samples at {path}: there is no such file or folder.")
    files = [path]
    if path.is_dir():
        run = training_folder(path, "rl", "sft") if find_run(path).kind == "quickstart" else path
        files = [file.path for file in files_of(run)] or judged_files(run)
    samples = [sample for file in files for sample in read_samples(file, NAMES) if sample.prompt]  # none if it raised
    if not samples:
        raise NoSamples(f"No samples in {path}. Looked for records/ (retool.recorder.enable) and evaluation/ in it.")
    print(f"{len(samples):,} samples of {files[0] if len(files) == 1 else f'{files[0].parent} ({len(files)} files)'}")
    return samples


def tally(samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]]) -> tuple[list[Tally], int]:
    """Return (the tally of each row's problem, number of samples whose problem is in no row).

    Args:
        rows: those of a data file in verl's columns; rows of the same problem share its samples.
    """
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        # An evaluation names a problem without the instructions around it.
        prompts = (row["prompt"], bare_prompt(row["prompt"]))
        for name in {problem_of({**row, "raw_prompt": prompt}) for prompt in prompts}:
            places.setdefault(name, []).append(place)
    tallies, unknown = [Tally() for _ in rows], 0
    for sample in samples:
        found = places.get(sample.problem, [])
        unknown += not found
        for place in found if not sample.failure else ():
            tallies[place].judged += 1
            tallies[place].correct += sample.acc == 1
            tallies[place].acc += sample.acc or 0.0
    return tallies, unknown


def tally_runs(paths: Sequence[Path], rows: pa.Table, data: Path) -> tuple[list[Tally], int, int]:
    """Return (the tally of each row, number of samples of other problems, number of infrastructure failures).

    Raises:
        NoSamples: there are none, or none belongs to a row.
    """
    samples = [sample for path in paths for sample in past_samples(path)]
    tallies, unknown = tally(samples, rows.to_pylist())
    if unknown == len(samples):
        raise NoSamples(
            f"None of the {len(samples):,} samples in {', '.join(map(str, paths))} belongs to a problem of {data}. A "
            "problem is the same if data source, id, whole prompt and ground truth are. The first sample's prompt: "
            f"{' '.join(samples[0].prompt.split())[:160]!r}"
        )
    return tallies, unknown, sum(sample.failure is not None for sample in samples)


def filter_problems(
    rows: pa.Table, runs: Sequence[Path], teachers: Sequence[Path], args: argparse.Namespace
) -> pa.Table:
    """Return the rows that are kept, with their pass rates; print how many and why, and write a JSON line on each row
    next to `args.out`.

    Raises:
        SystemExit: problems without a judged sample, and --unjudged does not say what to do with them.
    """
    own, unknown, failed = tally_runs(runs, rows, args.data)
    teacher = tally_runs(teachers, rows, args.data)[0] if teachers else None
    if unknown:
        print(f"{unknown:,} samples are not counted: {args.data} lacks their problems")
    if failed:
        print(f"{failed:,} samples are left out, because sandbox, server or verifier failed")
    unjudged = [row for row, each in enumerate(own) if not each.judged]
    if unjudged and args.unjudged == "error":
        raise SystemExit(
            f"{len(unjudged):,} of {len(rows):,} problems have no judged sample (the first is row {unjudged[0]}). "
            "They are not in the runs, over data.max_prompt_length, or sandbox or verifier failed. Name more --runs, "
            "or set --unjudged keep or --unjudged drop."
        )
    max_rate = MAX_RATES[args.band] if args.max_rate is None else args.max_rate
    must_be_solved = args.band == "rarely-solved" or teacher is not None
    kept = [
        is_kept(each, max_rate=max_rate, must_be_solved=must_be_solved, teacher=teacher[row] if teacher else None)
        if each.judged
        else args.unjudged == "keep"
        for row, each in enumerate(own)
    ]
    print(histogram(own, kept))
    print(f"{len(rows):,} problems, {len(unjudged):,} without a judged sample, {sum(kept):,} kept")
    extra_info = [info or {} for info in rows["extra_info"].to_pylist()]
    lines = zip(range(len(rows)), extra_info, own, kept, strict=True)
    durable.write_text(args.out.with_suffix(".pass_rates.jsonl"), "".join(f"{rate_line(*line)}\n" for line in lines))
    if PASS_RATE_COLUMN in rows.column_names:  # of an earlier model
        rows = rows.drop_columns(PASS_RATE_COLUMN)
    rates = pa.array([each.pass_rate for each in own], pa.float64())
    kept_rows = rows.append_column(PASS_RATE_COLUMN, rates).filter(pa.array(kept))
    return kept_rows.replace_schema_metadata()  # the notes of pandas and datasets describe the old rows and columns


def is_kept(own: Tally, *, max_rate: float, must_be_solved: bool, teacher: Tally | None = None) -> bool:
    """Return whether a judged problem is not too easy and, if `must_be_solved`, was solved once (a teacher counts)."""
    solved = own.correct > 0 or (teacher is not None and teacher.correct > 0)
    return (own.pass_rate or 0.0) <= max_rate and (solved or not must_be_solved)


def histogram(tallies: Iterable[Tally], kept: Iterable[bool]) -> str:
    """Return a line for each pass rate that occurs: how many problems have it, and how many of them are kept."""
    counts: dict[float, list[int]] = {}
    for each, keep in zip(tallies, kept, strict=True):
        if (rate := each.pass_rate) is not None:
            bin_ = counts.setdefault(round(rate, 3), [0, 0])
            bin_[0] += 1
            bin_[1] += keep
    most = max((count for count, _ in counts.values()), default=1)
    lines = ["pass rate  problems     kept"]
    for rate, (count, keep) in sorted(counts.items()):
        lines.append(f"{rate:9.3f} {count:9,} {keep:8,}  {'#' * round(40 * count / most)}")
    return "\n".join(lines)


def rate_line(row: int, extra_info: dict[str, Any], own: Tally, keep: bool) -> str:
    """Return one JSON line about a problem."""
    rates = {"samples": own.judged, "correct": own.correct, "pass_rate": own.pass_rate, "kept": keep}
    return jsonl.dumps({"row": row, "id": str(extra_info.get("id", extra_info.get("index", row)))} | rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="parquet in verl's RL columns")
    parser.add_argument("--out", type=Path, required=True, help="parquet of the rows that are kept")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--runs", type=Path, nargs="+", metavar="PATH", help="past runs, or files of records")
    source.add_argument("--generate", type=Path, metavar="LAUNCHER", help="of recipe/retool, with its variables")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides for --generate")
    parser.add_argument("--samples", type=int, default=8, help="samples per problem (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="problems per start of the launcher (default: 2048)")
    parser.add_argument("--band", choices=MAX_RATES, default="not-easy", help="default: %(default)s")
    parser.add_argument("--max-rate", type=float, help="upper end of the band, 0 to 1")
    parser.add_argument("--solved-by", type=Path, nargs="+", default=[], help="as --runs, of a stronger model")
    parser.add_argument(
        "--unjudged",
        choices=("error", "keep", "drop"),
        default="error",
        help="what to do with problems without a judged sample (default: %(default)s)",
    )
    args = parser.parse_args()
    if args.overrides and not args.generate:
        parser.error(f"{args.overrides[0]}: overrides are for --generate")
    args.data, args.out = args.data.resolve(), args.out.resolve()
    rows = parquet.read(args.data)  # in pandas, integers next to a null would become floats
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        runs = args.runs or generate(args.data, rows, args.out.with_suffix(".samples"), args)
    except (CommandFailed, SandboxNotReady) as error:
        raise SystemExit(f"filter_by_pass_rate: {error}") from None
    try:
        kept = filter_problems(rows, runs, args.solved_by, args)
    except (NoRun, ValueError) as error:
        raise SystemExit(f"filter_by_pass_rate: {error}") from None
    if not len(kept):
        raise SystemExit("No problem is left; nothing was written. Widen the band: --band, --max-rate.")
    parquet.write(args.out, kept)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
