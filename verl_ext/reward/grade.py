"""Grade files of responses: `retool grade --input rows.jsonl --output graded.jsonl`.

The input may also be a run, an evaluation, the quickstart's folder, or a file of records (`.parquet`). Of a run, its
validations are graded, else the evaluations of its checkpoints, else all its records. `retool records import` makes
records of verl's dumps.

A row is JSON with `response` (or `messages`, of which the assistant's count) and `ground_truth`; the files of
`unverified_dir` have such rows as well. Each row comes back with `acc`, `pred`, `verdict` and `method`; values that it
had under these names, or as `score`, move to `recorded`. The
verifier is chosen by `data_source` and `ability` as in training, and reads what was asked in `prompt`: without it,
`18 apples` is not 18. An existing output is continued.

A row that cannot be graded, or a line that is not JSON, comes back with the verdict "error" and the reason as `error`,
and the exit status is 1 in the end. The next call tries such rows again: fix the input and repeat the command.
"""

import argparse
import asyncio
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from verl_ext.outcome import UNVERIFIED_VERDICT
from verl_ext.records import store
from verl_ext.records.trajectories import scored_text
from verl_ext.reward.guards import refusal
from verl_ext.reward.maths.normalisation import normalise
from verl_ext.reward.score import Score
from verl_ext.reward.verifiers import Verifiers, verify_response
from verl_ext.runs import jsonl
from verl_ext.runs.folder import NoRun, files_of, judged_files, training_folder
from verl_ext.runs.processes import end_with_parent

ADDED = ("acc", "pred", "verdict", "method", "error")
BROKEN_LINE = {"line", "error"}  # keys of what `read_rows` gives for a line that is not a JSON object
CHUNK = 32  # rows handed to a process at a time
PROGRESS_S = (10.0, 0.1)  # between two lines of progress: into a file, on a terminal
AHEAD = 4  # chunks per process that are read before they are needed
LISTED = 20  # disagreements and errors printed; all are in the output
WORDS = {True: "right", False: "wrong"}
MATH_VERIFY_S = 5  # per parsing and per comparison


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="retool grade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="files, folders of JSONL, or runs")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; continued if it exists")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per CPU)")
    parser.add_argument("--config", type=Path, help="YAML of a run, whose verifiers and sandbox servers are used")
    parser.add_argument("--compare", choices=["math-verify"], help="also grade by it, and list disagreements")
    arguments = parser.parse_args(argv)
    try:
        config = OmegaConf.load(arguments.config) if arguments.config else OmegaConf.create({})
        if not isinstance(config, DictConfig):
            raise ValueError(f"{arguments.config} is a list, expected a run's YAML.")
        Verifiers.of_run(config)  # what is wrong with it is told here, and not in each worker
        files = find_files(arguments.input)
        grade_files(files, arguments.output, config, arguments.workers, arguments.compare == "math-verify")
    except (OSError, ValueError, RuntimeError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary, errors = summarise(arguments.output)
    print(summary)
    if errors:
        print(f"error: {len(errors)} rows could not be graded; correct them and repeat the command:", file=sys.stderr)
        print(*(f"  {error}" for error in errors[:LISTED]), sep="\n", file=sys.stderr)
    return 1 if errors else 0


def find_files(paths: list[Path]) -> list[Path]:
    """Return the named JSONL files, those in named folders, in numeric order (2.jsonl before 10.jsonl), and a run's.

    Raises:
        ValueError: a folder or a run has no such file.
    """
    files = []
    for path in paths:
        inside = _files_of_run(path) if path.is_dir() else [path]
        if inside is None:
            inside = sorted(path.glob("*.jsonl"), key=lambda f: (len(f.stem) if f.stem.isdigit() else 0, f.name))
        if not inside:
            raise ValueError(f"The folder {path} has neither .jsonl files nor a run with responses.")
        files += inside
    return files


def _files_of_run(path: Path) -> list[Path] | None:
    """Return a run's files of records, see the top of this file; None for other folders."""
    try:
        return judged_files(path) or [file.path for file in files_of(training_folder(path, "rl", "sft", "evaluation"))]
    except NoRun:
        return None


def grade_files(files: list[Path], output: Path, config: DictConfig, workers: int, compare: bool) -> None:
    """Append a graded row to `output` for each row of `files` that it does not have yet, in their order.

    Rows in `output` with the verdict "error" are graded again first, and replaced in place.

    Raises:
        ValueError: `output` holds rows of something else.
        RuntimeError: a verifier failed, not the row. Rows graded before it stay.
    """
    total = sum(1 for _ in read_rows(files))
    done, errors = _continue_at(files, output)
    rows = islice(read_rows(files), done, None)
    output.parent.mkdir(parents=True, exist_ok=True)
    workers = max(1, workers)
    # Workers are forked from a clean server process, because this one may have threads.
    context = get_context("forkserver")
    initial, pause_s = done - len(errors), PROGRESS_S[sys.stderr.isatty()]
    with (
        ProcessPoolExecutor(workers, context, _start_worker, (config, compare)) as pool,
        tqdm(total=total, initial=initial, unit=" rows", mininterval=pause_s) as progress,
    ):
        try:
            if errors:
                again = (row for index, row in enumerate(read_rows(files)) if index in errors)
                graded = list(_grade_in_order(pool, again, workers, progress))
                _replace_lines(output, dict(zip(sorted(errors), graded, strict=True)))
            with open(output, "a", encoding="utf-8", buffering=1) as sink:  # line-buffered: a kill loses no line
                for row in _grade_in_order(pool, rows, workers, progress):
                    sink.write(jsonl.dumps(row) + "\n")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seconds = progress.format_dict["elapsed"]
    print(f"{progress.n - progress.initial} rows graded in {seconds:.1f} s", file=sys.stderr)


def _grade_in_order(
    pool: ProcessPoolExecutor, rows: Iterator[tuple[str, dict[str, Any]]], workers: int, progress: tqdm
) -> Iterator[dict[str, Any]]:
    """Yield graded rows in order, with a few chunks in work ahead. Raises after the rows before a failed one."""
    pending: deque = deque()
    while True:
        while len(pending) <= AHEAD * workers and (chunk := list(islice(rows, CHUNK))):
            pending.append(pool.submit(_grade_chunk, chunk))
        if not pending:
            return
        graded, failure = pending.popleft().result()
        yield from graded
        progress.update(len(graded))
        if failure:
            raise RuntimeError(failure)


def _replace_lines(file: Path, rows: dict[int, dict[str, Any]]) -> None:
    """Replace lines, counted from 0, by rows; the file is replaced when everything is written."""
    part = file.with_name(f"{file.name}.part")
    with open(file, encoding="utf-8") as lines, open(part, "w", encoding="utf-8") as sink:
        for index, line in enumerate(lines):
            sink.write(jsonl.dumps(rows[index]) + "\n" if index in rows else line)
    part.replace(file)


def read_rows(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for each line; the place, file and line, is for messages.

    A line that is not a JSON object gives a row with its text as `line` and the reason as `error`.
    """
    for file in files:
        if file.suffix == ".parquet":
            yield from _read_records(file)
            continue
        for number, line, row in jsonl.lines(file):
            place = f"{file}:{number}"
            if isinstance(row, ValueError):
                text = line.decode(errors="replace").rstrip("\r\n")
                row = {"line": text, "error": f"{place}: {row}. Expected a JSON object, got {text[:60]!r}"}
            yield place, row


def _read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rollouts of a file of records, except those without a response, which raised or met no server."""
    kept = ("uid", "session", "step", "ability", "prompt", "ground_truth", "acc", "score")
    columns = (*kept, "domain", "turns", "verdict")
    for number, row in enumerate(store.read(file, columns).to_pylist(), 1):
        turns, verdict = row.pop("turns"), row.pop("verdict") or {}
        if not turns:
            continue
        row |= {"data_source": row.pop("domain") or "", "ability": row["ability"] or "", "verdict": verdict.get("text")}
        row["response"] = scored_text(turns)
        yield f"{file}:{number}", row


def _continue_at(files: list[Path], output: Path) -> tuple[int, set[int]]:
    """Return how many rows `output` has, and which of them are errors; drop an incomplete last line."""
    if not output.exists():
        return 0, set()
    jsonl.cut_half_line(output)
    done, errors, last = 0, set(), (-1, {})
    for _, row in read_rows([output]):
        if row.get("verdict") == "error":
            errors.add(done)
        else:
            last = done, row
        done += 1
    index, row = last
    place, there = next(islice(read_rows(files), max(index, 0), None), ("the end of the input", {}))
    is_other = index >= 0 and (not there or read_row(row, str(output)) != read_row(there, place))
    if is_other or done > sum(1 for _ in read_rows(files)):
        raise ValueError(
            f"{output} has {done} rows, but row {index + 1} is not that of {place}: it was graded from another input. "
            "Delete it, or choose another --output."
        )
    return done, errors


def read_row(row: dict[str, Any], place: str) -> tuple[str, Any]:
    """Return response and ground truth of a row in any of the known forms.

    Raises:
        ValueError: the row lacks one; `place` says where the row is.
    """
    try:
        if "messages" in row:
            response = "\n".join(m.get("content") or "" for m in row["messages"] if m.get("role") == "assistant")
        else:
            response = row.get("response")
        ground_truth = row.get("ground_truth", (row.get("reward_model") or {}).get("ground_truth"))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{place} has `messages` or a `reward_model` of another form than verl's: {error}.") from error
    if not isinstance(response, str) or ground_truth is None:
        raise ValueError(
            f"{place} has the keys {', '.join(row)}: expected `response` or `messages`, and "
            "`ground_truth`. `retool records import` makes records of verl's dumps."
        )
    return response, ground_truth


def _start_worker(config: DictConfig, compare: bool) -> None:
    global _VERIFIERS, _RUNNER, _COMPARE
    end_with_parent()
    _VERIFIERS = Verifiers.of_run(config)
    _RUNNER = asyncio.Runner()  # one event loop for all chunks: clients keep their connections
    _COMPARE = compare


def _grade_chunk(chunk: list[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], str | None]:
    """Return the graded rows, and why the next one could not be graded: our or a service's failure, not the row's."""

    async def grade_all() -> list[dict[str, Any] | BaseException]:
        return await asyncio.gather(*(_grade(place, row) for place, row in chunk), return_exceptions=True)

    graded = []
    for (place, _), row in zip(chunk, _RUNNER.run(grade_all()), strict=True):
        if isinstance(row, BaseException):
            return graded, f"{place}: {row!r}. The rows before it are graded; repeat the command to grade the rest."
        graded.append(row)
    return graded, None


async def _grade(place: str, row: dict[str, Any]) -> dict[str, Any]:
    try:
        score = await _score(place, row)
        added = {"acc": score.acc, "pred": score.pred, "verdict": score.verdict, "method": score.method}
    except ValueError as error:
        added = {"acc": None, "pred": "", "verdict": "error", "method": "", "error": str(error)}
    else:
        if _COMPARE:
            added["math_verify"] = judge_by_math_verify(*read_row(row, place), score.pred)
    is_line = row.keys() == BROKEN_LINE
    recorded = {key: row.pop(key) for key in (*ADDED, "score") if key in row}
    return row | added | ({"recorded": recorded} if recorded and not is_line else {})


async def _score(place: str, row: dict[str, Any]) -> Score:
    if row.keys() == BROKEN_LINE:
        raise ValueError(row["error"])
    response, ground_truth = read_row(row, place)
    verifier = _VERIFIERS.find(str(row.get("data_source", "")), str(row.get("ability", "")))
    try:
        return await verify_response(verifier, response, ground_truth, row)
    except ValueError as error:
        raise ValueError(f"{place} cannot be graded: {error}") from error


def judge_by_math_verify(response: str, ground_truth: Any, pred: str) -> bool | None:
    """Return math-verify's own verdict on the whole response, as its users call it.

    Call it in a main thread, since its time-outs are signals. It returns None for answers on which math-verify could
    hang or run out of memory (guards.py).
    """
    from math_verify import parse, verify

    if refusal(normalise(pred[:4000]), normalise(str(ground_truth))):
        return None
    gold = parse(f"${ground_truth}$", parsing_timeout=MATH_VERIFY_S)
    return bool(verify(gold, parse(response, parsing_timeout=MATH_VERIFY_S), timeout_seconds=MATH_VERIFY_S))


def _recorded_right(row: dict[str, Any]) -> bool | None:
    """Return whether a row was recorded as right; None if it has no such record in our form."""
    before = row.get("recorded")
    before = before if isinstance(before, dict) else {}
    if before.get("verdict") != UNVERIFIED_VERDICT and isinstance(before.get("acc"), int | float):
        return before["acc"] == 1.0
    upstream = row.get("upstream_correct")
    return upstream if isinstance(upstream, bool) else None


def summarise(output: Path) -> tuple[str, list[str]]:
    """Return counts by verdict, with agreement with recorded verdicts and math-verify if rows have them; and errors."""
    verdicts, recorded, compared = Counter(), Counter(), Counter()
    listed, errors, total_acc = [], [], 0.0
    for place, row in read_rows([output]):
        verdicts[row["verdict"]] += 1
        total_acc += row["acc"] or 0.0
        right = row["acc"] == 1.0
        if row["verdict"] == "error":
            errors.append(row["error"])
        if (before_right := _recorded_right(row)) is not None:
            recorded[before_right, row["verdict"]] += 1
        theirs = row.get("math_verify", "")
        if theirs not in (None, True, False):  # the row has no verdict, or has a column of this name that is not ours
            continue
        compared[theirs, right] += 1
        if theirs not in (None, right):
            gold = str(read_row(row, place)[1])
            listed.append(
                f"  {place}: math-verify {WORDS[not right]}, ours {row['verdict']} by {row['method']}: "
                f"{row['pred'][:60]!r} against {gold[:60]!r}"
            )
    counts = ", ".join(f"{count} {name}" for name, count in verdicts.most_common())
    mean_acc = total_acc / max(verdicts.total() - len(errors), 1)
    lines = [f"{verdicts.total()} rows, mean acc {mean_acc:.4f}: {counts}"]
    lines += [f"recorded {WORDS[before]}, now {verdict}: {n}" for (before, verdict), n in sorted(recorded.items())]
    if compared:
        agreed = compared[True, True] + compared[False, False]
        skipped = compared[None, True] + compared[None, False]
        lines.append(
            f"math-verify agrees on {agreed} of {compared.total() - skipped}; "
            f"only math-verify right: {compared[True, False]}; only ours right: {compared[False, True]}; "
            f"not shown to it: {skipped}"
        )
        lines += listed[:LISTED] + ([f"  and {len(listed) - LISTED} more"] if len(listed) > LISTED else [])
    return "\n".join(lines), errors
