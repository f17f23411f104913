"""SFT and RL checkpoints on disk: each is whole or not there; which one a run resumes from; which ones are kept.

A checkpoint is written below `.saving/`. When every rank's part is on disk, `checkpoint.json` lists its files with
sizes and checksums (`manifest.py`), one rename makes it `global_step_<n>`, verl's tracker names it, and only then are
older ones deleted, each step fsynced before the next (`durable.py`). So a kill or a power loss at any moment leaves the
previous checkpoints intact. `hooks.py` makes verl do so; this file knows only folders.
"""

import json
import logging
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from verl_ext.checkpoints.manifest import MANIFEST, NotWhole, problem, vouch
from verl_ext.runs import durable
from verl_ext.runs.folder import PARTS, step_of
from verl_ext.settings import CheckpointSettings
from verl_ext.settings.checks import check

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

TRACKER = "latest_checkpointed_iteration.txt"  # verl's; the merge and the quickstart read it
SAVING = ".saving"  # what is being written, and what is being deleted
REPLACED = "replaced"  # in `.saving/`: the checkpoint whose step is saved again, until the new one is in its place
VALIDATION = "validation.json"  # in the run's folder: step -> value of the metric that decides on the best
VERL_KEYS = ("max_ckpt_to_keep", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save")

Say = Callable[[str], None]


# What is there -------------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Return the steps of the folders `global_step_<n>`, ascending, whole or not."""
    found = (step_of(path) for path in folder.glob("global_step_*") if path.is_dir())
    return sorted(step for step in found if step is not None)


def runs_of(folder: Path) -> list[Path]:
    """Return the folders of checkpoints: the SFT and RL runs of a quickstart's folder, else the folder itself."""
    parts = [folder / name for name in PARTS if steps(folder / name)]
    return parts if parts and not steps(folder) else [folder]


def path_of(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def tracked_step(folder: Path) -> int | None:
    """Return the step that verl's tracker names; None if the tracker is missing or, after a kill, empty."""
    try:
        return int((folder / TRACKER).read_text())
    except (FileNotFoundError, ValueError):
        return None


def whole_steps(folder: Path) -> list[int]:
    return [step for step in steps(folder) if problem(path_of(folder, step)) is None]


# Where a run resumes -------------------------------------------------------------------------------------------------


def resume_point(folder: Path, say: Say = logger.info) -> Path | None:
    """Return where `resume_mode=auto` continues: the step that the tracker names, else the newest whole one.

    The tracker comes first because a user may set it back to an earlier step. None means that there is no checkpoint
    yet. Nothing is changed: the path may be below `.saving/`, and `restore` then moves it into place.

    Raises:
        NotWhole: there are checkpoints, but none is whole; a run that started over would overwrite them in time.
    """
    copies, tracked = recoverable(folder), tracked_step(folder)
    places = {step: path_of(folder, step) for step in steps(folder)} | copies
    problems = {step: problem(path, contents=False) for step, path in places.items()}
    chosen = None
    for step in sorted(places, key=lambda step: (step == tracked, step), reverse=True):
        if problems[step] is None:
            problems[step] = problem(places[step])  # of the others, which may be large, only the sizes are compared
            if problems[step] is None:
                chosen = step
                break
    broken = [f"{places[step]} is not complete: {problems[step]}." for step in sorted(places) if problems[step]]
    for line in broken:
        say(f"Resume: {line} It stays as it is.")
    if chosen in copies:
        say(f"Resume: {places[chosen]} is complete. A kill came before it was moved into place; it is moved now.")
    elif (folder / SAVING).exists():
        say(f"Resume: {folder / SAVING} holds what a run was saving when it was killed. It is not used.")
    if chosen is None:
        broken += [f"{path} is not complete: {problem(path)}." for path in _vouched(folder)]
        if broken:
            raise NotWhole(
                f"{' '.join(broken)} A run that starts over would overwrite it. Move it away, or if you know that a "
                f"step is complete, accept it: python -m verl_ext.checkpoints {folder} --accept STEP"
            )
        say(f"Resume: no checkpoint in {folder}; training starts from scratch.")
        return None
    newest = max(step for step in places if problems[step] is None)
    if chosen != tracked:
        named = "names no step" if tracked is None else f"names step {tracked}, which is missing or not complete"
        say(f"Resume: {folder / TRACKER} {named}; {chosen} is the newest complete step.")
    elif chosen < newest:
        say(f"Resume: {folder / TRACKER} names step {chosen}, which takes precedence over the newest ({newest}).")
    say(f"Resume: from {places[chosen]}, step {chosen}.")
    return places[chosen]


def require_whole(path: str | os.PathLike | None) -> Path:
    """Return the checkpoint that `resume_from_path` names.

    Raises:
        ValueError: the path does not name a folder `global_step_<n>`.
        NotWhole: a part of the checkpoint is missing; the message says which.
    """
    checkpoint = Path(path or "")
    if step_of(path) is None:
        raise ValueError(
            f"trainer.resume_from_path is {path!r}. Expected the folder of a checkpoint, such as "
            "outputs/qwen2-32b_dapo/global_step_300."
        )
    if seen := problem(checkpoint):
        others = [str(path_of(checkpoint.parent, step)) for step in whole_steps(checkpoint.parent)]
        raise NotWhole(
            f"trainer.resume_from_path={checkpoint} is not a complete checkpoint: {seen}. Complete ones there: "
            f"{', '.join(others) or 'none'}. resume_mode=auto picks one. If you know that this one is complete, accept "
            f"it: python -m verl_ext.checkpoints {checkpoint.parent} --accept {step_of(path)}"
        )
    return checkpoint


def choose(mode: str, path: str | os.PathLike | None, folder: Path, say: Say = logger.info) -> Path | None:
    """Return the checkpoint that `trainer.resume_mode` selects; it may still be below `.saving/`, see `restore`.

    Raises:
        ValueError: the mode is not one of verl's, or the path names no checkpoint.
        NotWhole: a part of the checkpoint is missing.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        return resume_point(folder, say)
    if mode != "resume_path":
        raise ValueError(f"trainer.resume_mode={mode!r}; expected auto, resume_path or disable.")
    step = step_of(path)
    copies = {} if step is None else recoverable(Path(path).parent, step)
    chosen = copies.get(step) or require_whole(path)
    say(f"Resume: from {chosen}, as trainer.resume_from_path says.")
    return chosen


def set_back(folder: Path, chosen: Path, say: Say = logger.info) -> None:
    """Set the tracker back to the chosen checkpoint if it names a later one, which the run leaves behind.

    The run's journals forget what came after the chosen step. So `auto` must not continue from a later checkpoint
    before this start has saved one.
    """
    step, tracked = step_of(chosen), tracked_step(folder)
    if tracked is not None and step < tracked and chosen.resolve().parent == folder.resolve():
        durable.write_text(folder / TRACKER, str(step))
        say(f"Resume: {folder / TRACKER} named step {tracked} and is set back to step {step}.")


# Saving --------------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> Path:
    """Return an empty `.saving/`, into which a checkpoint is written.

    What a killed run left there is deleted, but only what no resume could need: `restore` comes first.
    """
    restore(folder)
    saving = folder / SAVING
    if saving.exists():
        _delete(saving)
    durable.make_folder(saving)
    return saving


def publish(folder: Path, step: int) -> Path:
    """Make `.saving/global_step_<n>`, which all ranks have written, the checkpoint of that step, and name it last.

    When this returns, the checkpoint survives a power loss. One that it replaces is in `.saving/replaced/` meanwhile.

    Raises:
        NotWhole: shards of some ranks are missing.
        OSError: the disk does not take it; the previous checkpoints are still there.
    """
    saving = folder / SAVING
    vouch(path_of(saving, step))
    for parent in (saving, folder, folder.parent):  # from here on, `restore` finds the checkpoint
        durable.sync(parent)
    target = _put_in_place(path_of(saving, step), folder, aside=REPLACED)
    durable.write_text(folder / TRACKER, str(step))
    _delete(saving)
    return target


def _delete(path: Path) -> None:
    """Delete what no resume needs; warn if it cannot be deleted because another machine has a file open (NFS)."""
    for old in path.parent.glob(f"{path.name}.*"):
        shutil.rmtree(old, ignore_errors=True)
    try:
        shutil.rmtree(path)
    except OSError as error:
        aside = path.with_name(f"{path.name}.{time.time_ns()}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            logger.warning("%s could not be deleted (%s). Its remains are in %s.", path, error, aside)


def recoverable(folder: Path, wanted: int | None = None) -> dict[int, Path]:
    """Return the whole copies in `.saving/` that a resume needs, by step: a kill came before they were in place.

    These are the copies of the wanted step and of the step that the tracker names, if it is missing or not whole
    outside; or all copies, if nothing else is whole. Other copies come from a save that never returned, and the run has
    an older checkpoint.
    """
    if not (copies := [path for path in _vouched(folder) if problem(path) is None]):
        return {}
    there, named = whole_steps(folder), (tracked_step(folder), wanted)
    by_step = {step_of(path): path for path in copies}
    return {step: path for step, path in by_step.items() if step not in there and (not there or step in named)}


def restore(folder: Path, wanted: int | None = None, say: Say = logger.info) -> None:
    """Put what is `recoverable` in its place, before a run resumes or saves."""
    for copy in recoverable(folder, wanted).values():
        say(f"{copy} is complete. A kill came before it was moved into place; it is moved now.")
        _put_in_place(copy, folder, aside="broken")


def _vouched(folder: Path) -> list[Path]:
    """Return the copies in `.saving/` that have a list of files; of two copies of a step, the newer comes last."""
    copies = (path for parent in (REPLACED, ".") for path in (folder / SAVING / parent).glob("global_step_*"))
    return [path for path in copies if step_of(path) is not None and (path / MANIFEST).is_file()]


def _put_in_place(copy: Path, folder: Path, *, aside: str) -> Path:
    """Rename a whole copy to `global_step_<n>`; a folder of that name moves to `.saving/<aside>/` first."""
    target = folder / copy.name
    if target.exists():  # it is broken, or the run was set back to an earlier step
        old = folder / SAVING / aside / target.name
        durable.make_folder(old.parent)
        target.rename(old)
        durable.sync(old.parent)
        durable.sync(folder)
    copy.rename(target)
    durable.sync(folder)
    durable.sync(copy.parent)
    return target


# Which ones are kept -------------------------------------------------------------------------------------------------


def kept_steps(whole: Iterable[int], *, keep_last: int | None, best: int | None, tracked: int | None) -> set[int]:
    """Return the last `keep_last` steps (None: all), the best one and the one that the tracker names."""
    ordered = sorted(whole)
    newest = ordered if keep_last is None else ordered[-keep_last:]
    return {*newest, *({best, tracked} & set(ordered))}


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
        if not (self.best_metric and all(isinstance(freq, int) for freq in (save_freq, *intervals)) and save_freq > 0):
            return
        if any(every <= 0 or save_freq % every for every in intervals):
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
        _delete(self.folder / SAVING)
        named = "" if best is None else f" (best: {best}, {self.best_metric} {self.values[best]:.4g})"
        logger.info("Checkpoints: kept %s%s, deleted %s.", sorted(kept), named, others)

    def _is_whole(self, step: int) -> bool:
        """Return whether a checkpoint is whole; contents are compared once, because only the sizes may be right."""
        is_whole = problem(path_of(self.folder, step), contents=step not in self.sound) is None
        if is_whole:
            self.sound.add(step)
        return is_whole
