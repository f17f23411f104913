"""What a run will write, whether there is room for it, and what it would go on from."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.memory import estimate
from verl_ext.doctor.run import Run, size

topic = Topic("checkpoints")
TRACKER = "latest_checkpointed_iteration.txt"  # verl/utils/checkpoint/checkpoint_manager.py:255 (0.9.1)
SHARD = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
PARTS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}  # of save_contents -> of file names


def count_rows(files: list[Path]) -> int | None:
    """Rows of parquet files, from their footers; None where one is missing or no parquet."""
    if not files or not all(path.is_file() and path.suffix == ".parquet" for path in files):
        return None
    import pyarrow.parquet  # 0.3 s

    try:
        return sum(pyarrow.parquet.read_metadata(path).num_rows for path in files)
    except pyarrow.ArrowInvalid:
        return None


def steps_per_epoch(run: Run) -> int | None:
    """As verl 0.9.1 counts them: trainer_base.py:765 for RL, the length of the data loader for SFT."""
    rows, batch = count_rows(run.files("train")), run.get("data.train_batch_size")
    if rows is None:
        return None
    if not run.is_rl:
        rows, batch = rows // run.data_parallel, max(1, batch // run.data_parallel)
    return rows // batch


def total_steps(run: Run) -> int | None:
    steps = run.get("trainer.total_training_steps")
    if steps is None and (epoch := steps_per_epoch(run)) is not None:
        steps = epoch * run.get("trainer.total_epochs", 1)
    return steps


def check_steps(run: Run) -> Iterator[Finding]:
    """Whether the data are enough for the steps."""
    epoch, total = steps_per_epoch(run), total_steps(run)
    if epoch is None:
        return
    if epoch == 0:
        yield topic.fail(
            f"{count_rows(run.files('train'))} rows are less than a batch of {run.get('data.train_batch_size')}: no "
            "step",
            "Lower data.train_batch_size, or add data.",
        )
        return
    epochs = run.get("trainer.total_epochs", 1)
    if total > epoch * epochs:
        yield topic.warn(
            f"trainer.total_training_steps={total}, but {epochs} epoch(s) of {epoch} steps end at {epoch * epochs}, "
            "and a learning-rate schedule would not reach its end",
            f"Set trainer.total_epochs to {-(-total // epoch)}, or lower the steps.",
        )
    save_freq = run.get("trainer.save_freq", -1)
    if not run.is_rl:
        save_freq = epoch if save_freq == "after_each_epoch" else save_freq
        at_end = [step for step in range(save_freq, total, save_freq) if step % epoch == 0] if save_freq > 0 else []
        if at_end:
            yield topic.warn(
                f"a checkpoint of step {at_end[0]} is at the end of an epoch ({epoch} steps), where verl 0.9.1 resumes "
                "into nothing: the next epoch is skipped without a word (verl issues 5725, 7401)",
                f"Take a trainer.save_freq that does not meet multiples of {epoch}.",
            )


def check_disk(run: Run) -> Iterator[Finding]:
    folder = run.output_folder
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    try:
        shape = run.shape
    except (ValueError, KeyError):
        shape = None
    save_freq, total = run.get("trainer.save_freq", -1), total_steps(run)
    if shape is None or not save_freq or isinstance(save_freq, str) or save_freq < 0:
        yield topic.ok(f"{size(free)} are free in {existing}")
        return
    memory = estimate(run, shape)
    one = memory.checkpoint
    there = len(list(folder.glob("global_step_*")))
    kept = run.get("trainer.max_actor_ckpt_to_keep" if run.is_rl else "trainer.max_ckpt_to_keep")
    number = kept if kept is not None else (None if total is None else -(-total // save_freq))
    logs = _log_bytes(run)
    text = f"a checkpoint takes {size(one)} ({memory.terms['checkpoint']}); {size(free)} are free in {existing}"
    if free < one:
        yield topic.fail(text, "Free some, or set trainer.default_local_dir (OUTPUT_DIR) to a larger disk.")
        return
    if number is None:
        yield topic.ok(text)
        return
    need = max(0, number - there) * one + logs
    which = f"the last {number} are kept" if kept is not None else f"all {number} are kept (every {save_freq} steps)"
    text += f"; {which}, {size(need)} with the trajectory logs"
    if need > free:
        fits = int((free - logs) // one)
        key = "max_actor_ckpt_to_keep" if run.is_rl else "max_ckpt_to_keep"
        yield topic.warn(
            f"{text}: the disk is full after {fits}, at step {(there + fits) * save_freq}",
            f"Set trainer.{key}={max(1, min(3, fits - 1))}, or save more rarely.",
        )
    else:
        yield topic.ok(text)


def _log_bytes(run: Run) -> float:
    log = run.get("retool.trajectory_log", {})
    if not log.get("enable"):
        return 0
    return log["max_mb"] * 1e6 * log["max_files"] * run.get("actor_rollout_ref.rollout.agent.num_workers", 1)


def check_resume(run: Run) -> Iterator[Finding]:
    """Which checkpoint the run goes on from, whether that is whole, and what there is left to do."""
    folder, mode = run.output_folder, run.get("trainer.resume_mode", "auto")
    steps = sorted(int(path.name[12:]) for path in folder.glob("global_step_*") if path.name[12:].isdecimal())
    if mode not in ("auto", "disable", "resume_path"):
        yield topic.fail(f"trainer.resume_mode is {mode!r}", "Set it to auto, disable or resume_path.")
    elif mode == "disable":
        if steps:
            yield topic.warn(
                f"trainer.resume_mode=disable, and {folder} holds checkpoints up to step {steps[-1]}, which the run "
                "would mix with its own",
                "Give it a folder of its own: trainer.default_local_dir (OUTPUT_DIR).",
            )
        else:
            yield topic.ok("the run starts from step 0")
    elif mode == "resume_path" or (not run.is_rl and run.get("trainer.resume_from_path")):
        path = Path(run.get("trainer.resume_from_path", ""))
        step = path.name.removeprefix("global_step_")
        if not step.isdecimal() or not (run.folder / path).is_dir():
            yield topic.fail(
                f"trainer.resume_from_path={str(path)!r} is no folder global_step_N",
                "Name one, without what is below it.",
            )
        else:
            yield from _check_checkpoint(run, run.folder / path, int(step))
    else:
        yield from _check_latest(run, folder, steps)


def _check_latest(run: Run, folder: Path, steps: list[int]) -> Iterator[Finding]:
    tracker = folder / TRACKER
    if not tracker.is_file():
        if steps:
            yield topic.warn(
                f"{folder} holds global_step_{steps[-1]}, but no {TRACKER}: the save was cut off, and the run starts "
                "from step 0",
                "If an earlier one is whole: trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={folder}/global_step_N",
            )
        else:
            yield topic.ok("the run starts from step 0: no checkpoint is there")
        return
    text = tracker.read_text().strip()
    if not text.isdecimal():
        yield topic.fail(f"{tracker} has {text!r}, expected a step", f"Write the last whole step into it, of {steps}.")
    elif int(text) not in steps:
        yield topic.fail(
            f"{tracker} names step {text}, which is not there; verl would start from step 0 without a word",
            f"Write one that is there into it ({', '.join(map(str, steps)) or 'none'}), or remove the file to "
            f"start over.",
        )
    else:
        yield from _check_checkpoint(run, folder / f"global_step_{text}", int(text))


def _check_checkpoint(run: Run, folder: Path, step: int) -> Iterator[Finding]:
    actor = folder / "actor" if run.is_rl else folder
    section = "actor_rollout_ref.actor.checkpoint" if run.is_rl else "checkpoint"
    wanted = [PARTS[part] for part in run.get(f"{section}.load_contents", list(PARTS)) if part in PARTS]
    shards = [(SHARD.fullmatch(path.name), path) for path in actor.glob("*.pt")]
    found = {(m[1], int(m[2]), int(m[3])) for m, path in shards if m and path.stat().st_size > 0}
    worlds = {world for _, world, _ in found}
    earlier = "Resume from an earlier one: trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N"
    if worlds and worlds != {run.gpus}:
        yield topic.fail(
            f"{actor} is of {', '.join(map(str, sorted(worlds)))} ranks, the run has {run.gpus}: FSDP's shards cannot "
            "be loaded by another number",
            "Start with as many, or merge it (recipe/README.md) and begin from the merged weights.",
        )
        return
    missing = [f"{part}, rank {r}" for part in wanted for r in range(run.gpus) if (part, run.gpus, r) not in found]
    if missing:
        yield topic.fail(
            f"{actor} is not whole: {len(missing)} of {len(wanted) * run.gpus} shards are missing or empty "
            f"({'; '.join(missing[:3])})",
            earlier,
        )
        return
    data = [folder / "data.pt"] if run.is_rl else [folder / f"data_{rank}.pt" for rank in range(run.data_parallel)]
    if not all(path.is_file() for path in data):
        yield topic.warn(
            f"{folder} has no {data[0].name}: the data begin anew, those of the first {step} steps are seen again",
            earlier,
        )
    total, epoch = total_steps(run), steps_per_epoch(run)
    if total is not None and step >= total:
        yield topic.warn(
            f"step {step} of {total} is reached: nothing is left to do", "Raise the steps, or go on to evaluate."
        )
    elif not run.is_rl and epoch and step % epoch == 0:
        yield topic.fail(
            f"{folder.name} is at the end of epoch {step // epoch}: verl 0.9.1 resumes into nothing there, an epoch is "
            "skipped without a word (verl issues 5725, 7401)",
            earlier,
        )
    else:
        yield topic.ok(f"the run goes on from {folder.name}" + (f" of {total}" if total is not None else ""))
