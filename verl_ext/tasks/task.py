"""A task that an episode works on in a box, `BoxTask`, and its row of a data set.

The model sees only `instruction` and the files of `image`. Tests and solution are in the row, never in the box in which
the model acts.
"""

import base64
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from verl_ext.tasks import archive

SOURCE = "terminal"  # `data_source` of rows if nothing else is said
TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
WRITABLE = ("/app", "/home/agent", "/tmp")  # where a task's image and artifacts may be
REWARD_FILES = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")  # of "reward_file", as in Harbor
MOST_VERIFIER_S = 300.0
_ARCHIVES = {"image": WRITABLE, "tests": (TESTS,), "solution": (SOLUTION,)}  # and where their files go


@dataclass(frozen=True)
class BoxTask:
    """A task.

    Attributes:
        name: unique in its data set.
        instruction: what the user says; all that the model is told.
        image: tar.gz (archive.py) of the files that the box begins with, below WRITABLE.
        tests: tar.gz of `tests/...`, which only the scoring box gets.
        command: tests the artifacts, run in `workdir` of the scoring box. Tests that run the model's programs must do
            so by `as-agent PROGRAM`, which every box has: otherwise these could change the tests or write the score.
        result: "exit_code": it scores 1 if `command` exits with 0, else 0. "reward_file": `command` writes the score, a
            number in [0, 1], to one of REWARD_FILES; of the keys in JSON, "reward" counts.
        artifacts: absolute paths, all that crosses from the model's box to the scoring box, below WRITABLE.
        workdir: where the model's commands and `command` run.
        solution: tar.gz of `solution/...`; `bash /solution/solve.sh` in a model's box solves the task. b"" without one.
        agent_s: seconds that all commands of the model may run together.
        command_s: seconds that one of them may run.
        verifier_s: seconds that `command` may run, at most MOST_VERIFIER_S: what a model makes slow must end, and score
            0, before its scoring counts as failed by the infrastructure (rollout/lives.py).
        memory_mb: of all processes of a box together.
        disk_mb: of all files that a box may hold besides the system's.
        kind, difficulty: for tables.
    Raises:
        ValueError: a value is not allowed.
    """

    name: str
    instruction: str
    image: bytes = b""
    tests: bytes = b""
    command: str = "bash /tests/test.sh"
    result: Literal["exit_code", "reward_file"] = "exit_code"
    artifacts: tuple[str, ...] = ("/app",)
    workdir: str = "/app"
    solution: bytes = b""
    agent_s: float = 300.0
    command_s: float = 30.0
    verifier_s: float = 60.0
    memory_mb: int = 512
    disk_mb: int = 64
    kind: str = ""
    difficulty: str = ""

    def __post_init__(self) -> None:
        where = f"task {self.name!r}"
        for key in ("name", "instruction", "command"):
            if not isinstance(text := getattr(self, key), str) or not text.strip():
                raise ValueError(f"{where}: {key} is {text!r}; expected a text.")
        for key in ("agent_s", "command_s", "verifier_s", "memory_mb", "disk_mb"):
            if not isinstance(number := getattr(self, key), int | float) or not 0 < number < float("inf"):
                raise ValueError(f"{where}: {key} is {number!r}; expected a number above 0.")
        if self.verifier_s > MOST_VERIFIER_S:
            raise ValueError(f"{where}: verifier_s is {self.verifier_s:g}; at most {MOST_VERIFIER_S:g} are allowed.")
        if self.result not in ("exit_code", "reward_file"):
            raise ValueError(f"{where}: result is {self.result!r}; expected exit_code or reward_file.")
        for path in (*self.artifacts, self.workdir):
            if not is_below(path, WRITABLE):
                raise ValueError(
                    f"{where}: artifacts and workdir must be absolute paths at or below {', '.join(WRITABLE)}, without "
                    f"'..', got {path!r}."
                )
        if not self.artifacts:
            raise ValueError(f"{where}: it names no artifacts, so no test could see what the model did.")

    def to_info(self) -> dict[str, Any]:
        """Return the task as plain values for JSON, with its archives in base64; see `from_info`."""
        plain: dict[str, Any] = asdict(self) | {"artifacts": list(self.artifacts)}
        return plain | {key: base64.b64encode(plain[key]).decode() for key in _ARCHIVES}

    @classmethod
    def from_info(cls, info: Mapping[str, Any] | str) -> "BoxTask":
        """Return the task of `to_info`, or of JSON text of it.

        Raises:
            ValueError: it is no such text, a key is missing, unknown or wrong, or an archive holds what it may not.
        """
        try:
            plain: dict[str, Any] = {**(json.loads(info) if isinstance(info, str) else info)}
            known = {each.name for each in fields(cls)}
            if unknown := sorted(plain.keys() - known):
                raise ValueError(f"it has the unknown key {unknown[0]!r}")
            plain |= {key: base64.b64decode(plain[key], validate=True) for key in _ARCHIVES if key in plain}
            plain["artifacts"] = tuple(plain["artifacts"])
            task = cls(**plain)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"extra_info.task is no task: {type(error).__name__}: {error}. Write it by verl_ext.tasks.task.row."
            ) from error
        check_files(task)
        return task


def check_files(task: BoxTask) -> None:
    """Check that the archives of a task hold only files that belong there.

    Raises:
        ValueError: one does not.
    """
    for key, folders in _ARCHIVES.items():
        for path in archive.unpack(getattr(task, key)):
            if not is_below(f"/{path}", folders) and not any(folder.startswith(f"/{path}/") for folder in folders):
                raise ValueError(f"task {task.name!r}: {key} has {path!r}; expected paths below {', '.join(folders)}.")


def row(
    task: BoxTask,
    *,
    source: str = SOURCE,
    index: int = 0,
    split: str = "train",
    gold_calls: Sequence[Mapping[str, Any]] | None = None,
    prompt: str | None = None,
    **info: Any,
) -> dict[str, Any]:
    """Return a task as a row of a data set, in verl's RL columns.

    Args:
        source: `data_source`, which chooses the domain.
        index: number of the row in its file.
        gold_calls: calls that solve the task, [{"name": "bash", "arguments": {"command": ...}}, ...]. Without them, its
            `solution` is what must score 1.
        prompt: the user's message; None: the instruction.
        info: further keys of `extra_info`.
    """
    extra: dict[str, Any] = {"index": index, "split": split, "id": task.name, "task": json.dumps(task.to_info())}
    extra |= {"kind": task.kind, "difficulty": task.difficulty}
    if gold_calls is not None:
        extra["gold_calls"] = json.dumps(list(gold_calls))
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": task.instruction if prompt is None else prompt}],
        "ability": "terminal",
        "reward_model": {"style": "rule", "ground_truth": task.name},
        "extra_info": extra | info,
    }


def of_row(row: Mapping[str, Any]) -> BoxTask:
    """Return the task of a row.

    Raises:
        ValueError: the row has none, or it is wrong.
    """
    info = (row.get("extra_info") or {}).get("task")
    if not info:
        raise ValueError("the row has no extra_info.task. Write rows by verl_ext.tasks.task.row.")
    return BoxTask.from_info(info)


def is_below(path: Any, folders: Sequence[str]) -> bool:
    """Return whether an absolute path without '.' and '..' is one of the folders or below one."""
    is_plain = isinstance(path, str) and path.startswith("/") and posixpath.normpath(path) == path
    return is_plain and any(path == folder or path.startswith(f"{folder}/") for folder in folders)
