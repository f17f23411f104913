"""Write the data of a quickstart on your own problems: RL problems, a held-out test, and SFT traces if you have some.

    python data/own/prepare.py --data mine.jsonl --out outputs/mine/data
    python data/own/prepare.py --data mine.jsonl --traces traces.parquet --out outputs/mine/data

A row has a problem and its answer, or verl's columns. The test is a share of the problems, the same at every call. The
traces are those of `retool traces`, or in any form that it reads. They get the same instructions as the
problems, unless these are whole prompts, and traces of test problems are left out.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_ext.datasets.problems import Report, check_row, clean_problems, problem_row, read_problems, shortened
from verl_ext.datasets.rows import DataError, read_rows
from verl_ext.datasets.text import PROMPTS, bare_problem, same_problem_key
from verl_ext.protocols.trace import conversation_of
from verl_ext.runs import parquet
from verl_ext.traces.sources import read_traces
from verl_ext.traces.trace import Trace

TEST_SHARE, MOST_TEST, LEAST = 0.2, 256, 40
VALIDATION = 64  # traces that validate SFT, a multiple of the batch in both YAMLs; with fewer than 640 traces, none
SFT = pa.schema({"messages": pa.string(), "tools": pa.string(), "id": pa.string()})  # the first two are JSON


def has_prompts(source: str) -> bool:
    """Return whether the rows of a file are in verl's columns, with whole prompts."""
    first = next(iter(read_rows(source)), None)
    return first is not None and isinstance(first[1].get("prompt"), list)


def read_own(source: str, name: str, prompt: str) -> list[dict[str, Any]]:
    """Return the problems of a file as rows in verl's columns, each once.

    Args:
        name: `data_source` of rows that have none.
        prompt: key of PROMPTS, for rows that are no prompts yet.
    Raises:
        DataError: a row is wrong, or there are fewer than LEAST.
    """
    if has_prompts(source):
        rows = _in_verls_columns(source)
    else:
        problems, report = clean_problems(read_problems(source), evaluation=None, integer_answers=False)
        print(report)
        rows = [
            problem_row(problem, index, data_source=name, split="train", protocol=prompt)
            for index, problem in enumerate(problems)
        ]
    if (count := len({problem_key(row) for row in rows})) < LEAST:
        raise DataError(f"{source} has {count} usable problems; RL and its test need at least {LEAST}.")
    return rows


def _in_verls_columns(source: str) -> list[dict[str, Any]]:
    rows, seen, report = [], set(), Report()
    for where, row in read_rows(source):
        check_row(row, where, "prompt")
        report.rows += 1
        key = (problem_key(row), str(row["reward_model"]["ground_truth"]))
        if key in seen:
            report.drop("the same problem occurs earlier", f"{where}: {shortened(key[0])}")
            continue
        seen.add(key)
        rows.append(row | {"extra_info": dict(row.get("extra_info") or {}) | {"index": len(rows)}})
    report.distinct = report.kept = len(rows)
    print(report)
    return rows


def problem_key(row: dict[str, Any]) -> str:
    """Return a text that is equal for spellings of the same problem."""
    return same_problem_key(bare_problem(row["prompt"][-1]["content"]))


def split(rows: list[dict[str, Any]], most_test: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and test rows: a problem is in the same part wherever it stands, and whatever the seed."""
    keys = {problem_key(row) for row in rows}  # fewer than rows if a problem has several ground truths
    drawn = sorted(keys, key=lambda key: hashlib.blake2b(key.encode()).digest())
    test = set(drawn[: min(most_test, max(1, round(TEST_SHARE * len(drawn))))])
    return [row for row in rows if problem_key(row) not in test], [row for row in rows if problem_key(row) in test]


def read_sft(source: str, test: Iterable[dict[str, Any]], prompt: str | None) -> list[dict[str, str | None]]:
    """Return the traces of a source as rows for SFT.

    Args:
        test: rows whose problems no trace may have.
        prompt: key of PROMPTS: the instructions that the traces' problems get; None: their prompts stay as they are.
    Raises:
        DataError: the source cannot be read, or fewer than two traces are left.
    """
    held_out, rows, report = {problem_key(row) for row in test}, [], Report()
    for found in read_traces(source):
        report.rows += 1
        if not isinstance(found, Trace):
            report.drop("not a trace", f"{found.id}: {found.why}")
        elif same_problem_key(found.problem) in held_out:
            report.drop("its problem is held out for the test", f"{found.id}: {shortened(found.problem)}")
        else:
            messages, tools = (
                json.dumps(_asked_by(found, prompt)),
                None if found.tools is None else json.dumps(found.tools),
            )
            try:
                conversation_of(messages, tools)
            except ValueError as error:
                report.drop("not a trace", f"{found.id}: {error}")
                continue
            rows.append({"messages": messages, "tools": tools, "id": found.id})
    report.distinct = report.kept = len(rows)
    print(report)
    if len(rows) < 2:
        raise DataError(f"{len(rows)} traces of {source} are left for SFT, which needs at least 2. See above for why.")
    return rows


def _asked_by(trace: Trace, prompt: str | None) -> list[dict[str, Any]]:
    """Return a trace's messages with the instructions of a protocol around its problem."""
    if prompt is None:
        return trace.messages
    before, response = trace.prompt[:-1], trace.messages[len(trace.prompt) :]
    return [*before, {"role": "user", "content": PROMPTS[prompt].format(problem=trace.problem)}, *response]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FILE", help="parquet or JSONL file of problems and answers")
    parser.add_argument("--traces", metavar="FILE", help="for SFT: parquet or JSONL file, or folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--prompt", choices=PROMPTS, default="code_short", help="instructions (default: %(default)s)")
    parser.add_argument("--test", type=int, default=MOST_TEST, help="held-out problems at most (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, test = split(read_own(args.data, Path(args.data).stem, args.prompt), args.test)
    for name, rows in (("rl_train", train), ("eval", test)):
        parquet.write(args.out / f"{name}.parquet", pa.Table.from_pylist(rows))
        print(f"{args.out / name}.parquet: {len(rows):,} rows")
    if args.traces:
        traces = read_sft(args.traces, test, None if has_prompts(args.data) else args.prompt)
        count = VALIDATION if len(traces) >= 10 * VALIDATION else 0
        for name, rows in (("sft_val", traces[:count]), ("sft_train", traces[count:])):
            parquet.write(args.out / f"{name}.parquet", pa.Table.from_pylist(rows, SFT))
            print(f"{args.out / name}.parquet: {len(rows):,} traces")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
