"""Grade files of responses: `python -m verl_ext.reward.score --input rows.jsonl --output graded.jsonl`.

A row is JSON with `response` (or `messages`, of which the assistant's count) and `ground_truth`; rollout and validation
dumps of verl (`output`, `gts`) and the files of `unverified_dir` are such rows, too. Each row comes back with `acc`,
`pred`, `verdict` and `method`; values that it had under these names, or as `score`, move to `recorded`. The verifier is
chosen by `data_source` and `ability` as in training. An output that is there already is continued.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from verl_ext.reward.guards import refusal
from verl_ext.reward.normalisation import normalise
from verl_ext.reward.score import Score
from verl_ext.reward.verifiers import Verifiers, verify_response

ADDED = ("acc", "pred", "verdict", "method")
CHUNK = 32  # rows handed to a process at a time
AHEAD = 4  # chunks per process that are read before they are needed
LISTED = 20  # disagreements printed; all are in the output
MATH_VERIFY_S = 5  # per parsing and per comparison


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.reward.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="JSONL files, or folders of them")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; continued if it is there")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per CPU)")
    parser.add_argument("--config", type=Path, help="YAML of a run: takes its verifiers and sandbox servers")
    parser.add_argument("--compare", choices=["math-verify"], help="also judge by this grader, and list disagreements")
    arguments = parser.parse_args(argv)
    config = {}
    if arguments.config:
        import yaml

        config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    try:
        files = find_files(arguments.input)
        grade_files(files, arguments.output, config, arguments.workers, arguments.compare == "math-verify")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summarise(arguments.output))
    return 0


def find_files(paths: list[Path]) -> list[Path]:
    """The JSONL files named, and those in the folders named, numbers in order (2.jsonl before 10.jsonl)."""
    files = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl"), key=lambda f: (len(f.stem) if f.stem.isdigit() else 0, f.name))
        if path.is_dir() and not inside:
            raise ValueError(f"The folder {path} holds no .jsonl file.")
        files += inside if path.is_dir() else [path]
    return files


def grade_files(files: list[Path], output: Path, config: dict[str, Any], workers: int, compare: bool) -> None:
    """Append a graded row to `output` for each row of `files` that it does not have yet, in their order.

    Raises:
        ValueError: a row is broken, or `output` holds rows of something else. What was graded before stays.
    """
    total = sum(sum(1 for _ in open(file, "rb")) for file in files)
    done = _continue_at(files, output)
    rows = islice(_read(files), done, None)
    progress = _Progress(done, total)
    output.parent.mkdir(parents=True, exist_ok=True)
    workers = max(1, workers)
    # Forked from a clean server process: ours may have threads.
    context = get_context("forkserver")
    with (
        ProcessPoolExecutor(workers, context, _start_worker, (config, compare)) as pool,
        open(output, "a", encoding="utf-8") as sink,
    ):
        pending: deque = deque()
        try:
            while chunk := list(islice(rows, CHUNK)):
                pending.append(pool.submit(_grade_chunk, chunk))
                if len(pending) > AHEAD * workers:
                    _write(pending.popleft().result(), sink, progress)
            while pending:
                _write(pending.popleft().result(), sink, progress)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.end()


def _read(files: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for each row; the place, file and line, is for messages."""
    for file in files:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{file}:{number} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{file}:{number} is not a JSON object but {line[:60]!r}")
                yield f"{file}:{number}", row


def _continue_at(files: list[Path], output: Path) -> int:
    """How many rows `output` has; drops a last line that was broken off."""
    if not output.exists():
        return 0
    with open(output, "rb+") as graded:
        end = done = 0
        last = b""
        for line in graded:
            if line.endswith(b"\n"):
                end, done, last = end + len(line), done + 1, line
        graded.truncate(end)
    if done:
        place, row = next(islice(_read(files), done - 1, None), ("the end of the input", {}))
        if read_row(json.loads(last), str(output)) != (read_row(row, place) if row else None):
            raise ValueError(
                f"{output} has {done} rows, and the last is not that of {place}: it was graded from another input. "
                "Delete it, or name another --output."
            )
    return done


def read_row(row: dict[str, Any], place: str) -> tuple[str, Any]:
    """Response and ground truth of a row of any of the known forms.

    Raises:
        ValueError: it lacks one; `place` says where the row is.
    """
    if "messages" in row:
        response = "\n".join(m.get("content") or "" for m in row["messages"] if m.get("role") == "assistant")
    else:
        response = row.get("response", row.get("output"))
    ground_truth = row.get("ground_truth", row.get("gts", (row.get("reward_model") or {}).get("ground_truth")))
    if not isinstance(response, str) or ground_truth is None:
        raise ValueError(
            f"{place} has the keys {', '.join(row)}: expected `response` or `messages` (or `output`), and "
            "`ground_truth` (or `gts`)."
        )
    return response, ground_truth


def _start_worker(config: dict[str, Any], compare: bool) -> None:
    global _VERIFIERS, _RUNNER, _COMPARE
    entries = ((config.get("reward") or {}).get("reward_kwargs") or {}).get("verifiers")
    _VERIFIERS = Verifiers(config, entries)
    _RUNNER = asyncio.Runner()  # one event loop for all chunks: clients keep their connections
    _COMPARE = compare


def _grade_chunk(chunk: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    async def grade_all() -> list[Score]:
        return await asyncio.gather(*(_grade(place, row) for place, row in chunk))

    graded = []
    for (place, row), score in zip(chunk, _RUNNER.run(grade_all()), strict=True):
        recorded = {key: row.pop(key) for key in (*ADDED, "score") if key in row}
        row |= {"acc": score.acc, "pred": score.pred, "verdict": score.verdict, "method": score.method}
        if recorded:
            row["recorded"] = recorded
        if _COMPARE:
            row["math_verify"] = judge_by_math_verify(*read_row(row, place), score.pred)
        graded.append(row)
    return graded


async def _grade(place: str, row: dict[str, Any]) -> Score:
    response, ground_truth = read_row(row, place)
    sample = row | ({"prompt": row["input"]} if "input" in row else {})
    verifier = _VERIFIERS.find(str(row.get("data_source", "")), str(row.get("ability", "")))
    try:
        return await verify_response(verifier, response, ground_truth, sample)
    except ValueError as error:
        raise ValueError(f"{place} cannot be graded: {error}") from error


def judge_by_math_verify(response: str, ground_truth: Any, pred: str) -> bool | None:
    """math-verify's own verdict on the whole response, as its users call it.

    Called in a main thread, since its time-outs are signals. None for answers that it could hang on or run out of
    memory on (guards.py).
    """
    from math_verify import parse, verify

    if refusal(normalise(pred[:4000]), normalise(str(ground_truth))):
        return None
    gold = parse(f"${ground_truth}$", parsing_timeout=MATH_VERIFY_S)
    return bool(verify(gold, parse(response, parsing_timeout=MATH_VERIFY_S), timeout_seconds=MATH_VERIFY_S))


def _write(rows: list[dict[str, Any]], sink: Any, progress: "_Progress") -> None:
    sink.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    sink.flush()
    progress.add(len(rows))


class _Progress:
    """A line on stderr: rewritten in a terminal, else a new one every 10 s."""

    def __init__(self, done: int, total: int):
        self._start, self._done, self._total = done, done, total
        self._begun = self._shown = time.monotonic()

    def add(self, rows: int) -> None:
        self._done += rows
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self._shown > (0.1 if terminal else 10.0):
            self._shown = now
            rate = (self._done - self._start) / (now - self._begun)
            left = (self._total - self._done) / rate
            bar = "#" * (30 * self._done // self._total)
            line = f"[{bar:<30}] {self._done}/{self._total} rows | {rate:.0f} rows/s | {left:.0f} s left"
            print(line, end="\r" if terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        seconds = time.monotonic() - self._begun
        print(f"{self._done - self._start} rows graded in {seconds:.1f} s" + " " * 40, file=sys.stderr)


def summarise(output: Path) -> str:
    """Counts by verdict; agreement with recorded verdicts and with math-verify, where the rows have them."""
    verdicts, recorded, compared, listed = Counter(), Counter(), Counter(), []
    total_acc = 0.0
    for place, row in _read([output]):
        verdicts[row["verdict"]] += 1
        total_acc += row["acc"] or 0.0
        right = row["acc"] == 1.0
        before = _recorded_right(row)
        if before is not None:
            recorded[before, row["verdict"]] += 1
        if "math_verify" in row:
            compared[row["math_verify"], right] += 1
            if row["math_verify"] not in (None, right):
                _, ground_truth = read_row(row, place)
                listed.append(
                    f"  {place}: math-verify {_word(row['math_verify'])}, ours {row['verdict']} by {row['method']}: "
                    f"{row['pred'][:60]!r} against {str(ground_truth)[:60]!r}"
                )
    count = verdicts.total()
    lines = [f"{count} rows, mean acc {total_acc / max(count, 1):.4f}: " + _counts(verdicts)]
    for (before, verdict), number in sorted(recorded.items()):
        lines.append(f"recorded {_word(before)}, now {verdict}: {number}")
    if compared:
        agreed = compared[True, True] + compared[False, False]
        skipped = compared[None, True] + compared[None, False]
        lines.append(
            f"math-verify agrees on {agreed} of {count - skipped}; only math-verify right: {compared[True, False]}; "
            f"only ours right: {compared[False, True]}; not shown to it: {skipped}"
        )
        lines += listed[:LISTED] + ([f"  and {len(listed) - LISTED} more"] if len(listed) > LISTED else [])
    return "\n".join(lines)


def _recorded_right(row: dict[str, Any]) -> bool | None:
    recorded = row.get("recorded", {})
    if recorded.get("verdict", "") != "unknown" and recorded.get("acc") is not None:
        return recorded["acc"] == 1.0
    return row.get("upstream_correct")


def _word(right: bool) -> str:
    return "right" if right else "wrong"


def _counts(counter: Counter) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())
