"""SFT and RL checkpoints on disk: each is whole or not there; which one a run resumes from.

A checkpoint is written below `.saving/`. When every rank's part is on disk, `checkpoint.json` lists its files with
sizes and checksums (`manifest.py`), one rename makes it `global_step_<n>`, verl's tracker names it, and only then are
older ones deleted, each step fsynced before the next (`durable.py`). So a kill or a power loss at any moment leaves the
previous checkpoints intact. `hooks.py` makes verl do so; this file knows only folders.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from verl_ext.checkpoints.manifest import MANIFEST, NotWhole, problem, vouch
from verl_ext.runs import durable
from verl_ext.runs.folder import PARTS, step_of

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

TRACKER = "latest_checkpointed_iteration.txt"  # verl's; the merge and the quickstart read it
SAVING = ".saving"  # what is being written, and what is being deleted
REPLACED = "replaced"  # in `.saving/`: the checkpoint whose step is saved again, until the new one is in its place

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


def named_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint, as `path_of` writes it."""
    return int(checkpoint.name.removeprefix("global_step_"))


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
                f"step is complete, accept it: retool checkpoints {folder} --accept STEP"
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
    if path is None or step_of(path) is None:
        raise ValueError(
            f"trainer.resume_from_path is {path!r}. Expected the folder of a checkpoint, such as "
            "outputs/qwen2-32b_dapo/global_step_300."
        )
    checkpoint = Path(path)
    if seen := problem(checkpoint):
        others = [str(path_of(checkpoint.parent, step)) for step in whole_steps(checkpoint.parent)]
        raise NotWhole(
            f"trainer.resume_from_path={checkpoint} is not a complete checkpoint: {seen}. Complete ones there: "
            f"{', '.join(others) or 'none'}. resume_mode=auto picks one. If you know that this one is complete, accept "
            f"it: retool checkpoints {checkpoint.parent} --accept {step_of(path)}"
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
    copy = None if path is None or step is None else recoverable(Path(path).parent, step).get(step)
    chosen = copy or require_whole(path)
    say(f"Resume: from {chosen}, as trainer.resume_from_path says.")
    return chosen


def set_back(folder: Path, chosen: Path) -> None:
    """Set the tracker back to the chosen checkpoint if it names a later one, which the run leaves behind.

    The run's journals forget what came after the chosen step. So `auto` must not continue from a later checkpoint
    before this start has saved one.
    """
    step, tracked = named_step(chosen), tracked_step(folder)
    if tracked is not None and step < tracked and chosen.resolve().parent == folder.resolve():
        durable.write_text(folder / TRACKER, str(step))
        logger.info("Resume: %s named step %s and is set back to step %s.", folder / TRACKER, tracked, step)


# Saving --------------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> Path:
    """Return an empty `.saving/`, into which a checkpoint is written.

    What a killed run left there is deleted, but only what no resume could need: `restore` comes first.
    """
    restore(folder)
    saving = folder / SAVING
    if saving.exists():
        delete(saving)
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
    delete(saving)
    return target


def delete(path: Path) -> None:
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
    by_step = {named_step(path): path for path in copies}
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
