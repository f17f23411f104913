"""Checkpoints on disk, of SFT and RL: each is whole or not there; which one a run resumes from; which ones are kept.

A checkpoint is written below `.saving/` and becomes `global_step_<n>` by one rename when every rank has written its
part; `checkpoint.json` in it lists its files and their sizes, and verl's tracker names it last. So a run that is killed
at any moment leaves the checkpoints it had. `checkpoint_patches.py` makes verl do so; this file knows folders only.

    python -m verl_ext.checkpoints outputs/qwen2-32b_dapo               # what is there, and where a run would resume
    python -m verl_ext.checkpoints outputs/old_run --accept 300         # vouch for one that was saved without this file
"""

import argparse
import json
import logging
import math
import os
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

MANIFEST = "checkpoint.json"
TRACKER = "latest_checkpointed_iteration.txt"  # verl's; the merge and the quickstart read it
SAVING = ".saving"  # what is being written, and what is being deleted
VALIDATION = "validation.json"  # in the run's folder: step -> value of the metric that decides on the best
VERL_KEYS = ("max_ckpt_to_keep", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save")

_STEP = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"(\w+)_world_size_(\d+)_rank_(\d+)\.pt")

Say = Callable[[str], None]


class NotWhole(RuntimeError):
    """A checkpoint lacks something, or none of those that are there is whole."""


# What is there -------------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Steps of the folders `global_step_<n>`, ascending, whole or not."""
    found = (_STEP.fullmatch(path.name) for path in folder.glob("global_step_*") if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def tracked_step(folder: Path) -> int | None:
    """The step that verl's tracker names; None where it is missing or, after a kill, empty."""
    try:
        return int((folder / TRACKER).read_text())
    except (FileNotFoundError, ValueError):
        return None


def problem(checkpoint: Path, is_needed: Callable[[str], bool] = lambda name: True) -> str | None:
    """What keeps a checkpoint from being whole, of the files that are needed; None if nothing does."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written when all the rest is there"
    except (ValueError, KeyError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    for name, expected in sizes.items():
        if not is_needed(name):
            continue
        try:
            found = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != expected:
            return f"{name} has {found} of {expected} bytes"
    return None


def whole_steps(folder: Path) -> list[int]:
    return [step for step in steps(folder) if problem(path_of(folder, step)) is None]


def missing_shards(checkpoint: Path) -> list[str]:
    """Shards of ranks that others, by their names, say exist: `model_world_size_8_rank_3.pt`, ..."""
    ranks = defaultdict(set)
    for path in checkpoint.rglob("*.pt"):
        if match := _SHARD.fullmatch(path.name):
            ranks[path.parent, match[1], int(match[2])].add(int(match[3]))
    return [
        str((parent / f"{kind}_world_size_{size}_rank_{rank}.pt").relative_to(checkpoint))
        for (parent, kind, size), there in sorted(ranks.items())
        for rank in sorted(set(range(size)) - there)
    ]


# Where a run resumes -------------------------------------------------------------------------------------------------


def resume_point(folder: Path, say: Say = logger.info) -> Path | None:
    """Where `resume_mode=auto` goes on: the step that the tracker names, or else the newest that is whole.

    The tracker comes first because a user may set it back to an earlier step. None: there is no checkpoint yet.

    Raises:
        NotWhole: there are checkpoints, but none is whole; a run that started over would overwrite them in time.
    """
    problems = {step: problem(path_of(folder, step)) for step in steps(folder)}
    whole = [step for step, seen in problems.items() if seen is None]
    broken = [f"{path_of(folder, step)} is not whole: {seen}." for step, seen in problems.items() if seen]
    for line in broken:
        say(f"Resume: {line} It is left alone.")
    if (folder / SAVING).exists():
        say(f"Resume: {folder / SAVING} holds what a run was saving when it was killed. It is not used.")
    if not whole:
        if broken:
            raise NotWhole(
                f"{' '.join(broken)} A run that starts over would write beside and over that. Move it away; or, if you "
                f"know that a step is complete: python -m verl_ext.checkpoints {folder} --accept STEP"
            )
        say(f"Resume: no checkpoint in {folder}; training starts from scratch.")
        return None
    tracked = tracked_step(folder)
    step = tracked if tracked in whole else whole[-1]
    if step != tracked:
        named = "names no step" if tracked is None else f"names step {tracked}, which is not there or not whole"
        say(f"Resume: {folder / TRACKER} {named}; {step} is the newest whole step.")
    elif step < whole[-1]:
        say(f"Resume: {folder / TRACKER} names step {step}, not the newest ({whole[-1]}), and is followed.")
    say(f"Resume: from {path_of(folder, step)}, step {step}.")
    return path_of(folder, step)


def require_whole(path: str | os.PathLike | None) -> Path:
    """The checkpoint that `resume_from_path` names.

    Raises:
        ValueError: it does not name a folder `global_step_<n>`.
        NotWhole: something of it is missing; says what.
    """
    checkpoint = Path(path or "")
    if not _STEP.fullmatch(checkpoint.name):
        raise ValueError(
            f"trainer.resume_from_path is {path!r}. Expected the folder of a checkpoint, such as "
            "outputs/qwen2-32b_dapo/global_step_300."
        )
    if seen := problem(checkpoint):
        others = [str(path_of(checkpoint.parent, step)) for step in whole_steps(checkpoint.parent)]
        raise NotWhole(
            f"trainer.resume_from_path={checkpoint} is not a whole checkpoint: {seen}. Whole ones there: "
            f"{', '.join(others) or 'none'}. resume_mode=auto picks one; if you know that this one is complete: "
            f"python -m verl_ext.checkpoints {checkpoint.parent} --accept {checkpoint.name.rpartition('_')[2]}"
        )
    return checkpoint


def require_ranks(checkpoint: Path, ranks: int) -> None:
    """Raise ValueError if the shards of a model are those of another number of ranks: verl loads rank by rank."""
    there = {int(match[2]) for path in checkpoint.glob("*.pt") if (match := _SHARD.fullmatch(path.name))}
    if there - {ranks}:
        raise ValueError(
            f"{checkpoint} was saved by {max(there)} ranks, but this run has {ranks}. Resume with as many GPUs, or "
            "merge it (python -m verl.model_merger) and start a run from the merged model."
        )


# Saving --------------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> Path:
    """An empty `.saving/`, into which a checkpoint is written; what a killed run left there is deleted."""
    saving = folder / SAVING
    if saving.exists():
        shutil.rmtree(saving)
    saving.mkdir(parents=True)
    return saving


def publish(folder: Path, step: int) -> Path:
    """Make `.saving/global_step_<n>`, which all ranks have written, the checkpoint of that step, and name it last.

    Raises:
        NotWhole: shards of some ranks are not there.
    """
    saving = folder / SAVING
    vouch(path_of(saving, step))
    target = path_of(folder, step)
    if target.exists():  # of a run that was set back to an earlier step, or broken
        target.rename(saving / f"replaced_{step}")
    path_of(saving, step).rename(target)
    _write(folder / TRACKER, str(step))
    shutil.rmtree(saving)
    return target


def vouch(checkpoint: Path) -> None:
    """Write the list of files that makes a checkpoint whole.

    Raises:
        NotWhole: shards of some ranks are not there.
    """
    if missing := missing_shards(checkpoint):
        raise NotWhole(
            f"{checkpoint} lacks {len(missing)} of its shards, first {missing[0]}. On several nodes, "
            "trainer.default_local_dir must be a folder that all of them see."
        )
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MANIFEST)
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    _write(checkpoint / MANIFEST, json.dumps({"files": sizes}, indent=1))


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


# Which ones are kept -------------------------------------------------------------------------------------------------


def kept_steps(whole: Iterable[int], *, keep_last: int | None, best: int | None, tracked: int | None) -> set[int]:
    """The last `keep_last` steps (None: all), the best one and the one that the tracker names."""
    ordered = sorted(whole)
    newest = ordered if keep_last is None else ordered[-keep_last:]
    return {*newest, *({best, tracked} & set(ordered))}


@dataclass
class Rolling:
    """Deletes the checkpoints that `retool.checkpoints` does not keep, after each save and each validation.

    What is there is read from the disk every time, and the values of the metric are kept in `validation.json`: so it is
    right after a resume, and a best checkpoint of an earlier start stays. Steps above the newest one saved by this
    process (a run set back to an earlier step) and checkpoints that are not whole are left alone.

    Args:
        folder: `trainer.default_local_dir`.
        keep_last: number of checkpoints; None keeps all.
        best_metric: name of a logged metric; `*` stands for any part of it, and the mean over all that match counts.
            None: no best one is kept.
        best_mode: "max" | "min".
    """

    folder: Path
    keep_last: int | None = None
    best_metric: str | None = None
    best_mode: str = "max"
    saved: int | None = None  # newest step that this process has saved
    values: dict[int, float] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)  # steps that this process has validated

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Rolling":
        """From a run's resolved config, SFT or RL.

        Raises:
            ValueError: a setting cannot be, or one of verl's own, which forget at a resume, is set.
        """
        trainer, settings = config["trainer"], (config.get("retool") or {}).get("checkpoints") or {}
        if set_keys := [key for key in VERL_KEYS if trainer.get(key)]:
            raise ValueError(
                f"trainer.{set_keys[0]}={trainer[set_keys[0]]}: verl 0.9.1 forgets what it has kept at a resume, and "
                "verl_ext rolls checkpoints instead. Set it to null, and retool.checkpoints.keep_last to the number."
            )
        if unknown := settings.keys() - {"keep_last", "best_metric", "best_mode"}:
            raise ValueError(
                f"retool.checkpoints has {', '.join(sorted(unknown))}; expected keep_last, best_metric and best_mode."
            )
        rolling = cls(Path(trainer["default_local_dir"]), **settings)
        rolling._check(trainer, config.get("retool") or {})
        rolling._load()
        return rolling

    def _check(self, trainer: Mapping[str, Any], retool: Mapping[str, Any]) -> None:
        if self.keep_last is not None and (type(self.keep_last) is not int or self.keep_last < 1):
            raise ValueError(f"retool.checkpoints.keep_last={self.keep_last!r}; expected 1 or more, or null for all.")
        if self.best_mode not in ("max", "min"):
            raise ValueError(f"retool.checkpoints.best_mode={self.best_mode!r}; expected max or min.")
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
                "retool.checkpoints.best_metric=%s: only a step with a whole validation can be the best, but "
                "trainer.save_freq=%s is no multiple of %s=%s.",
                *(self.best_metric, save_freq, key, ", ".join(map(str, intervals))),
            )

    def _load(self) -> None:
        path = self.folder / VALIDATION
        if not path.exists():
            return
        there = json.loads(path.read_text())
        if (there["metric"], there["mode"]) != (self.best_metric, self.best_mode):
            logger.warning("%s is about %s, not %s, and starts anew.", path, there["metric"], self.best_metric)
            return
        self.values = {int(step): value for step, value in there["values"].items()}

    def record(self, data: Mapping[str, Any], step: int) -> None:
        """Take the metric out of what is logged at a step, if it is there.

        Raises:
            ValueError: it is a validation of verl's, and the metric is not in it.
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
            logger.warning("Step %s has %s = %s and cannot be the best.", step, self.best_metric, value)
            return
        self.values[step] = value
        self.recorded.add(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(
            self.folder / VALIDATION,
            json.dumps({"metric": self.best_metric, "mode": self.best_mode, "values": self.values}, indent=1),
        )
        self.delete_others()

    def best(self, among: Iterable[int]) -> int | None:
        """The step with the best value, of equal ones the newest; None if none has one."""
        sign = 1 if self.best_mode == "max" else -1
        known = [(sign * self.values[step], step) for step in among if step in self.values]
        return max(known)[1] if known else None

    def after_save(self, step: int) -> None:
        """SFT has validated the step before, RL will after; an older value is of a run that was set back since."""
        self.saved = step
        self.values = {s: value for s, value in self.values.items() if s < step or s in self.recorded}
        self.delete_others()

    def delete_others(self) -> None:
        """Nothing before this process has saved: a validation alone deletes no checkpoint."""
        if self.saved is None or self.keep_last is None:
            return
        whole = [step for step in whole_steps(self.folder) if step <= self.saved]
        best = self.best(whole)
        kept = kept_steps(whole, keep_last=self.keep_last, best=best, tracked=tracked_step(self.folder))
        others = [step for step in whole if step not in kept]
        for step in others:
            bin_ = self.folder / SAVING / f"deleted_{step}"  # out of sight at once, however long deleting takes
            bin_.parent.mkdir(exist_ok=True)
            path_of(self.folder, step).rename(bin_)
        if others:
            shutil.rmtree(self.folder / SAVING)
            named = "" if best is None else f" (best: {best}, {self.best_metric} {self.values[best]:.4g})"
            logger.info("Checkpoints: kept %s%s, deleted %s.", sorted(kept), named, others)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.checkpoints", description="What a run's folder has, and where it would resume."
    )
    parser.add_argument("folder", type=Path, help="trainer.default_local_dir of the run, or the quickstart's folder")
    parser.add_argument("--accept", type=int, metavar="STEP", help="vouch that this step is complete as it is now")
    args = parser.parse_args()
    parts = [args.folder / name for name in ("sft", "rl") if steps(args.folder / name)]
    folders = parts if parts and not steps(args.folder) else [args.folder]
    try:
        if args.accept is not None:
            if len(folders) > 1:
                raise SystemExit(f"--accept needs one run's folder: {' or '.join(map(str, folders))}.")
            if not path_of(folders[0], args.accept).is_dir():
                raise SystemExit(f"There is no {path_of(folders[0], args.accept)}; steps there: {steps(folders[0])}.")
            vouch(path_of(folders[0], args.accept))
        for folder in folders:
            if parts:
                print(f"{folder}:")
            for step in steps(folder):
                size = sum(path.stat().st_size for path in path_of(folder, step).rglob("*") if path.is_file())
                seen = problem(path_of(folder, step))
                print(f"step {step:>6}  {size / 1e9:8.3f} GB  {'whole' if seen is None else f'not whole: {seen}'}")
            resume_point(folder, print)
    except NotWhole as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
