"""What a resumed run must have in common with the run that saved its checkpoint: `course.json`, in the checkpoint.

An SFT checkpoint records its place in the data as a number of steps. If the rows of a step or of the data set change,
that number means a different place: rows would be left out or trained twice. RL keeps its place by rows. The learning
rate is a function of the step and of the total number of steps.
"""

import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

FILE = "course.json"
_ANEW = (
    "To train with other values, merge the checkpoint (python -m verl.model_merger) and start a run from the merged "
    "model in another trainer.default_local_dir."
)


@dataclass(frozen=True)
class Course:
    """What the order of a run's data and its learning rate depend on; None if unknown.

    Attributes:
        rows: of the data set, except those that are left out.
        digest: of the rows, as far as the data set has one.
        rows_per_step: over all ranks.
        total_training_steps, lr_scheduler_type, lr: from the optimizer's config.
    """

    rows: int
    digest: str | None
    rows_per_step: int
    total_training_steps: int | None
    lr_scheduler_type: str | None
    lr: float | None

    @classmethod
    def of(cls, loader: Any, ranks: int, optim: Any) -> "Course":
        """Args:
        loader: verl's StatefulDataLoader on one of `ranks` data-parallel ranks.
        optim: the optimizer's config, or None.
        """
        names = ("total_training_steps", "lr_scheduler_type", "lr")
        digest = getattr(loader.dataset, "digest", None)
        rate = {name: getattr(optim, name, None) for name in names}
        return cls(len(loader.dataset), digest, loader.batch_size * ranks, **rate)

    def write(self, checkpoint: Path) -> None:
        (checkpoint / FILE).write_text(json.dumps(asdict(self), indent=1))


def saved_course(checkpoint: Path) -> Course | None:
    """Return the course of a whole checkpoint; None if an older release saved it."""
    try:
        found = json.loads((checkpoint / FILE).read_text())
    except FileNotFoundError:
        return None
    return Course(**{field.name: found.get(field.name) for field in fields(Course)})


def require_same_rows(checkpoint: Path, now: Course) -> None:
    """Raise ValueError if the step of an SFT checkpoint means a different place in the data of this run."""
    saved = saved_course(checkpoint)
    if saved is None:
        logger.warning(
            "Resume: %s has no %s because an older release saved it. If data.train_batch_size or the rows differ from "
            "those of its run, rows are left out or trained twice.",
            *(checkpoint, FILE),
        )
        return
    named = {
        "rows_per_step": "data.train_batch_size is {}",
        "rows": "the training data have {} usable rows",
        "digest": "the digest of the training data is {}",
    }
    for name, words in named.items():
        before, after = getattr(saved, name), getattr(now, name)
        if None not in (before, after) and before != after:
            raise ValueError(
                f"{checkpoint}: {words.format(before)}; in this run, {words.format(after)}. The step of the checkpoint "
                "would mean another place in the data, so rows would be left out or trained twice. Resume with the "
                f"batch size, files and length limits of the checkpoint's run. {_ANEW}"
            )


def has_other_rows(checkpoint: Path, now: Course) -> bool:
    """Return whether an RL checkpoint's place refers to data with another number of rows, and warn if it does."""
    saved = saved_course(checkpoint)
    if saved is None or saved.rows == now.rows:
        return False
    logger.warning(
        "Resume: the training data had %s rows when %s was saved and has %s now, so its place in them is lost. "
        "Training starts at the first batch of an epoch, and problems of this epoch may come again.",
        *(saved.rows, checkpoint, now.rows),
    )
    return True


def warn_of_another_rate(checkpoint: Path, step: int, now: Course) -> None:
    """Warn if the learning rate does not continue as it was, or does not become what the config says.

    Args:
        step: of the schedule, in the unit of `total_training_steps`.
    """
    saved = saved_course(checkpoint)
    if saved is None:
        return
    schedules = {saved.lr_scheduler_type, now.lr_scheduler_type}
    totals = saved.total_training_steps, now.total_training_steps
    if len(schedules) > 1 or (schedules != {"constant"} and totals[0] != totals[1] and None not in totals):
        finished = " It had reached its end and rises again." if step >= (totals[0] or step + 1) else ""
        logger.warning(
            "Resume: the learning-rate schedule was %s over %s steps and is now %s over %s steps, so the rate jumps at "
            "its step %d.%s To keep the old schedule, set optim.lr_scheduler_type and the number of steps back. %s",
            *(saved.lr_scheduler_type, totals[0], now.lr_scheduler_type, totals[1], step, finished, _ANEW),
        )
    if saved.lr != now.lr and None not in (saved.lr, now.lr):
        logger.warning(
            "Resume: optim.lr=%s has no effect, because a resumed optimizer keeps its own, %s. %s",
            *(now.lr, saved.lr, _ANEW),
        )
