"""Which checkpoints a run keeps (`retool.checkpoints`): the last ones, and the best one by a metric of validations."""

import json
import logging
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from verl_ext.checkpoints.folder import SAVING, delete, path_of, steps, tracked_step
from verl_ext.checkpoints.manifest import problem
from verl_ext.runs import durable
from verl_ext.settings import CheckpointSettings
from verl_ext.settings.checks import check

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

VALIDATION = "validation.json"  # in the run's folder: step -> value of the metric that decides on the best
VERL_KEYS = ("max_ckpt_to_keep", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save")


def kept_steps(whole: Iterable[int], *, keep_last: int | None, best: int | None, tracked: int | None) -> set[int]:
    """Return the last `keep_last` steps (None: all), the best one and the one that the tracker names."""
    ordered = sorted(whole)
    newest = ordered if keep_last is None else ordered[-keep_last:]
    return {*newest, *(step for step in ordered if step in (best, tracked))}


@dataclass
class Rolling:
    """Deletes the checkpoints that `retool.checkpoints` does not keep, after each save and each validation.

    The folder is read from disk every time, and the values of the metric are kept in `validation.json`: so the choice
    is right after a resume, and the best checkpoint of an earlier start stays. Steps above the newest one saved by this
    process (a run set back to an earlier step) and checkpoints that are not whole are never deleted.

    Args:
        folder: `trainer.default_local_dir`.
        keep_last: number of checkpoints; None keeps all.
        best_metric: name of a logged metric; `*` stands for any part of it, and the mean over all that match counts.
            None keeps no best checkpoint.
        best_mode: "max" | "min".
    """

    folder: Path
    keep_last: int | None = None
    best_metric: str | None = None
    best_mode: str = "max"
    saved: int | None = None  # newest step that this process has saved
    values: dict[int, float] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)  # steps that this process has validated
    sound: set[int] = field(default_factory=set)  # steps whose bytes this process has written or compared

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Rolling":
        """Read the settings from a run's resolved config, SFT or RL.

        Raises:
            ValueError: a setting is impossible, or one of verl's own, which forget at a resume, is set.
        """
        trainer, retool = config["trainer"], config.get("retool") or {}
        settings = retool.get("checkpoints") or {}
        if set_keys := [key for key in VERL_KEYS if trainer.get(key)]:
            raise ValueError(
                f"trainer.{set_keys[0]}={trainer[set_keys[0]]}: verl 0.9.1 forgets at a resume which checkpoints it "
                "kept, so verl_ext deletes old ones. Set it to null and retool.checkpoints.keep_last to the number."
            )
        check(settings, CheckpointSettings, "retool.checkpoints")
        rolling = cls(Path(trainer["default_local_dir"]), **settings)
        rolling._compare_intervals(trainer, retool)
        rolling._load()
        return rolling

    def _compare_intervals(self, trainer: Mapping[str, Any], retool: Mapping[str, Any]) -> None:
        """Warn of saves at steps without a full validation."""
        key, intervals = "trainer.test_freq", [trainer.get("test_freq")]
        if (light := retool.get("light_validation") or {}).get("enable"):
            key, intervals = "retool.light_validation.full_every", [light["full_every"]]
        elif (schedule := retool.get("validation_schedule") or {}).get("enable"):
            key, intervals = "retool.validation_schedule.phases", [every for _, every in schedule["phases"]]
        save_freq = trainer.get("save_freq")
        if not (self.best_metric and isinstance(save_freq, int) and save_freq > 0):
            return
        known = [every for every in intervals if isinstance(every, int)]
        if len(known) == len(intervals) and any(every <= 0 or save_freq % every for every in known):
            logger.warning(
                "retool.checkpoints.best_metric=%s: only a step with a full validation can be the best, but "
                "trainer.save_freq=%s is not a multiple of %s=%s.",
                *(self.best_metric, save_freq, key, ", ".join(map(str, intervals))),
            )

    def _load(self) -> None:
        path = self.folder / VALIDATION
        if not path.exists():
            return
        try:
            there = json.loads(path.read_text())
            about = there["metric"], there["mode"]
            values = {int(step): float(value) for step, value in there["values"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error!r}). Expected the steps' values of {self.best_metric}, without which "
                "the best checkpoint is unknown. Restore it, or delete it to let a later validation decide."
            ) from error
        if about != (self.best_metric, self.best_mode):
            logger.warning("%s has values of %s, not of %s; they are ignored.", path, about[0], self.best_metric)
            return
        self.values = values

    def record(self, data: Mapping[str, Any], step: int) -> None:
        """Record the metric from what is logged at a step, if it is there.

        Raises:
            ValueError: the data is one of verl's validations, and the metric is not in it.
        """
        if not self.best_metric:
            return
        found = [float(value) for key, value in data.items() if fnmatchcase(key, self.best_metric)]
        if not found:
            if validated := [key for key in data if key == "val/loss" or key.startswith("val-core/")]:
                raise ValueError(
                    f"retool.checkpoints.best_metric={self.best_metric} is not among the metrics of the validation at "
                    f"step {step}: {', '.join(validated)}. Set it to one of these, or to null."
                )
            return
        value = statistics.fmean(found)
        if not math.isfinite(value):
            logger.warning("Step %s cannot be the best because it has %s = %s.", step, self.best_metric, value)
            return
        self.values[step] = value
        self.recorded.add(step)
        durable.make_folder(self.folder)
        durable.write_text(
            self.folder / VALIDATION,
            json.dumps({"metric": self.best_metric, "mode": self.best_mode, "values": self.values}, indent=1),
        )
        self.delete_others()

    def best(self, among: Iterable[int]) -> int | None:
        """Return the step with the best value, the newest of equal ones; None if no step has a value."""
        sign = 1 if self.best_mode == "max" else -1
        known = [(sign * self.values[step], step) for step in among if step in self.values]
        return max(known)[1] if known else None

    def after_save(self, step: int) -> None:
        """Forget values from before a run was set back, then delete. SFT validates a step before its save, RL after."""
        self.saved = step
        self.sound.add(step)
        self.values = {s: value for s, value in self.values.items() if s < step or s in self.recorded}
        self.delete_others()

    def delete_others(self) -> None:
        """Delete the checkpoints that are not kept, if this process has saved: a validation by itself deletes none."""
        if self.saved is None or self.keep_last is None:
            return
        whole = [step for step in steps(self.folder) if step <= self.saved and self._is_whole(step)]
        best = self.best(whole)
        kept = kept_steps(whole, keep_last=self.keep_last, best=best, tracked=tracked_step(self.folder))
        others = [step for step in whole if step not in kept]
        if not others:
            return
        durable.make_folder(self.folder / SAVING)
        for step in others:  # out of sight at once, however long deleting takes
            path_of(self.folder, step).rename(self.folder / SAVING / f"deleted_{step}")
        durable.sync(self.folder)
        durable.sync(self.folder / SAVING)
        delete(self.folder / SAVING)
        named = "" if best is None else f" (best: {best}, {self.best_metric} {self.values[best]:.4g})"
        logger.info("Checkpoints: kept %s%s, deleted %s.", sorted(kept), named, others)

    def _is_whole(self, step: int) -> bool:
        """Return whether a checkpoint is whole; contents are compared once, because only the sizes may be right."""
        is_whole = problem(path_of(self.folder, step), contents=step not in self.sound) is None
        if is_whole:
            self.sound.add(step)
        return is_whole
