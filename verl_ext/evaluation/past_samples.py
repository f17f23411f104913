"""Samples of a past run as a source of pass rates: its records, its validation dumps, verl's rollout dumps.

Each sample has the prompt's text and whether the response was right. A sample with an infrastructure failure is marked
and counts neither way.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.evaluation.result import NoSamples
from verl_ext.evaluation.samples import read_dump, share_of
from verl_ext.outcome import UNVERIFIED, evaluation_failure
from verl_ext.records import store
from verl_ext.records.problem import canonical
from verl_ext.runs import jsonl
from verl_ext.runs.folder import SAMPLES, find_run, old_log_of, rollouts_of, sample_files, training_folder

SURELY_WRONG = -0.6 + 1e-6  # a wrong answer's highest reward, with all of objectives/shaping.py's tool bonus


class PastSample(NamedTuple):
    """One response to a problem of a past run."""

    input: str  # the prompt as the chat template rendered it
    acc: float | None  # in [0, 1]; None if unknown
    failure: str | None  # what kept it from being judged; None: it was judged
    # What distinguishes problems with the same last message; "" if the file does not say.
    problem: str = ""  # by `problem_of` (records/problem.py)
    data_source: str = ""
    id: str = ""
    gold: str = ""


class Source(NamedTuple):
    """The samples of some files, and a description of them."""

    what: str
    samples: list[PastSample]


def read_past_samples(path: Path) -> Source:
    """Return the samples of a file of samples or records, a folder of dumps, a run, or a quickstart (its RL run).

    For a run these are its records, or the older log of JSON lines: they have every response that was generated. Else
    they are its validation dumps, else its evaluations, else verl's rollout dumps, which have only the groups that were
    trained on.

    Raises:
        NoSamples: there are none.
        ValueError: a row is of another form; the message names the file and the line.
    """
    files = _files(path)
    read = [(kind, file) for file in files if (kind := _kind_of(file))]
    samples = [sample for kind, file in read for sample in _KINDS[kind][1](file)]
    if not samples:
        raise NoSamples(f"No samples in {', '.join(map(str, files))}: the files are empty.")
    named = files[0] if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    return Source(f"{len(samples):,} samples ({_KINDS[read[-1][0]][0]}) of {named}", samples)


def _files(path: Path) -> list[Path]:
    """Return the files of samples in the order they were written."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoSamples(f"No samples at {path}: there is no such file or folder.")
    if any(_kind_of(file) == "log" for file in old_log_of(path)):
        return old_log_of(path)
    run = training_folder(path, "rl", "sft") if find_run(path).kind == "quickstart" else path
    recorded = [file.path for file in store.files_of(run)]
    if found := recorded or old_log_of(run / "trajectories") or sample_files(run) or rollouts_of(run):
        return found
    raise NoSamples(
        f"No samples in {run}. Looked for records/trajectories/*.parquet (retool.recorder.enable), <step>.jsonl of "
        "trainer.validation_data_dir or trainer.rollout_data_dir, and evaluation/global_step_<n>/samples.jsonl."
    )


def _kind_of(file: Path) -> str | None:
    """Return one of _KINDS, by the keys of the first row; None if the file is empty."""
    if file.suffix == ".parquet":
        return "records"
    if not (row := next(jsonl.read(file), None)):
        return None
    if "turns" in row and "reward" in row:
        return "log"
    if "acc" not in row and {"input", "score"} <= row.keys():
        return "rollouts"
    return "evaluation" if file.name == SAMPLES else "validation"


def _judged(file: Path) -> list[PastSample]:
    return [
        PastSample(each.input, each.acc, each.failure, each.problem, each.data_source, each.id, _gold(each.gts))
        for each in read_dump(file)
    ]


def _gold(truth: Any) -> str:
    return "" if truth is None else canonical(truth)


def _recorded(file: Path) -> Iterable[PastSample]:
    named = ("problem", "domain", "id", "ground_truth")
    for row in store.read(file, ("prompt", "end_reason", "acc", *named)).to_pylist():
        if row["prompt"] is not None:  # a rollout that raised has none
            acc = share_of(row["acc"])
            failure = evaluation_failure({"finish_reason": row["end_reason"], UNVERIFIED: acc is None})
            names = (row[name] or "" for name in named)
            yield PastSample(row["prompt"], None if failure else acc, failure, *names)


def _logged(file: Path) -> Iterable[PastSample]:
    """Yield the last record of each response: several records of one response are attempts at it."""

    def parse(row: dict[str, Any]) -> tuple[Any, PastSample]:
        reward = row["reward"]
        is_unverified = reward.get(UNVERIFIED) or reward.get("acc") is None
        failure = evaluation_failure(reward | {"finish_reason": row["finish_reason"], UNVERIFIED: is_unverified})
        names = {name: reward.get(name) or "" for name in ("data_source", "id")}
        sample = PastSample(row["prompt"], None if failure else float(reward["acc"]), failure, **names)
        return (row["uid"], row["session"], row["validate"]), sample

    return dict(jsonl.read(file, parse, "a record of the trajectory log")).values()


def _dumped(file: Path) -> Iterable[PastSample]:
    """Yield samples of verl's rollout dumps, which have the reward, not `acc`: above 0 is right, up to -0.6 wrong.

    A reward in between may be that of a failed rollout (0), or of a right one with length penalties, and counts neither
    way.
    """

    def parse(row: dict[str, Any]) -> tuple[Any, PastSample]:
        score = float(row["score"])
        acc = 1.0 if score > 0 else 0.0 if score <= SURELY_WRONG else None
        names = {name: row.get(name) or "" for name in ("problem", "data_source", "id")}
        names["gold"] = _gold(row.get("gts"))
        return row.get("uid"), PastSample(row["input"], acc, UNVERIFIED if acc is None else None, **names)

    rows = jsonl.read(file, parse, "a row of verl's rollout dump")
    return {number if uid is None else uid: sample for number, (uid, sample) in enumerate(rows)}.values()


_KINDS: dict[str, tuple[str, Callable[[Path], Iterable[PastSample]]]] = {  # kind -> what it is, and its reader
    "records": ("the records", _recorded),
    "log": ("the trajectory log", _logged),
    "validation": ("validation dumps", _judged),
    "evaluation": ("an evaluation", _judged),
    "rollouts": ("verl's rollout dumps: only groups that were trained on", _dumped),
}


def check_match(unknown: int, samples: Sequence[Any], sources: Sequence[Path], data: Path) -> None:
    """Raise if no sample is of a problem of the data file.

    Raises:
        NoSamples: the message shows what a prompt of the samples looks like.
    """
    if samples and unknown == len(samples):
        shown = " ".join(samples[0].input.split())[:160]
        named = ", ".join(map(str, sources))
        raise NoSamples(
            f"None of the {len(samples):,} samples in {named} belongs to a problem of {data}. The text "
            "of a problem must be the same in both: the same data, with the same instructions around the problem. The "
            f"first sample's prompt: {shown!r}"
        )
