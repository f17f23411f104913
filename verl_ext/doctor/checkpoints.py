"""What a run will write, whether there is room for it, and what it would go on from."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints import manifest
from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.memory import estimate
from verl_ext.doctor.run import Run, size

topic = Topic("checkpoints")


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


def check_disk(run: Run) -> Iterator[Finding]:
    folder = run.output_folder
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    try:
        shape = run.shape
    except (ValueError, KeyError):
        shape = None
    save_freq, total = run.get("trainer.save_freq") or -1, total_steps(run)
    if save_freq == "after_each_epoch":
        save_freq = steps_per_epoch(run) or -1
    if run.is_rl and save_freq < 0:
        yield topic.ok(f"no checkpoint is saved (trainer.save_freq={save_freq})")
        return
    if shape is None:
        yield topic.warn(
            f"{size(free)} are free in {existing}; what a checkpoint takes is unknown: {run.model_path} has no "
            "config.json of a dense model",
            "Set the path of the model's folder (MODEL_PATH of the launcher), or count 12 bytes for each parameter.",
        )
        return
    memory = estimate(run, shape)
    one = memory.checkpoint
    there = len(list(folder.glob("global_step_*")))
    rolling = run.get("retool.checkpoints", {})
    kept = rolling.get("keep_last")
    number = every = None if total is None or save_freq < 0 else -(-total // save_freq)
    has_best = rolling.get("best_metric") is not None
    if kept is not None:  # and the best one, and the one that is being written
        most = kept + 1 + has_best
        number = most if number is None else min(number, most)
    logs = _log_bytes(run)
    text = f"a checkpoint takes {size(one)} ({memory.terms['checkpoint']}); {size(free)} are free in {existing}"
    if free < one:
        yield topic.fail(text, "Free some, or set trainer.default_local_dir (OUTPUT_DIR) to a larger disk.")
        return
    if number is None:
        yield topic.ok(text)
        return
    need = max(0, number - there) * one + logs
    which = f"all {number} are kept (every {save_freq} steps)"
    if kept is not None:
        best = " and the best" if has_best else ""
        which = f"the last {kept}{best} are kept, {number} are there while one is written"
    text += f"; {which}, {size(need)} with the trajectory logs"
    if need > free:
        fits = max(0, int((free - logs) // one))
        text += f": the disk is full after {fits}, at step {(there + fits) * save_freq}"
        least = 2 + has_best if every is None else min(every, 2 + has_best)  # the last, the next, the best
        if there + fits >= least:
            keep = max(1, min(3, there + fits - 1 - has_best))
            yield topic.warn(text, f"Set retool.checkpoints.keep_last={keep}, or save more rarely.")
            return
        say = topic.fail if there + free // one < min(least, 2) else topic.warn
        without = "set retool.checkpoints.best_metric=null, which takes one less, or " if least == 3 else ""
        yield say(
            f"{text}; even keep_last=1 needs {size((least - there) * one + logs)}, {least} checkpoint(s) at once",
            f"Free as much, {without}set trainer.default_local_dir (OUTPUT_DIR) to a larger disk.",
        )
    else:
        yield topic.ok(text)


def _log_bytes(run: Run) -> float:
    log = run.get("retool.trajectory_log", {})
    if not log.get("enable"):
        return 0
    return log["max_mb"] * 1e6 * log["max_files"] * run.get("actor_rollout_ref.rollout.agent.num_workers", 1)


def _named(path: Path | None) -> Path:
    """The checkpoint that `resume_from_path` names, or the copy in `.saving/` that the run would put in its place.

    Raises:
        ValueError, NotWhole: as `checkpoints.require_whole`.
    """
    step = checkpoints.step_of(path)
    copies = {} if step is None else checkpoints.recoverable(path.parent, step)
    return copies.get(step) or checkpoints.require_whole(path)


def check_resume(run: Run) -> Iterator[Finding]:
    """Which checkpoint the run goes on from, as verl_ext/checkpoints decides, and what there is left to do."""
    folder, mode = run.output_folder, run.get("trainer.resume_mode", "auto")
    path = run.get("trainer.resume_from_path")
    said: list[str] = []
    try:
        if mode == "disable":
            if there := checkpoints.steps(folder):
                yield topic.warn(
                    f"trainer.resume_mode=disable, and {folder} holds checkpoints up to step {there[-1]}, which the "
                    "run would mix with its own",
                    "Give it a folder of its own: trainer.default_local_dir (OUTPUT_DIR).",
                )
            chosen = None
        elif mode == "resume_path" or (mode == "auto" and path and not run.is_rl):
            chosen = _named(run.folder / path if path else None)
        elif mode == "auto":
            chosen = checkpoints.resume_point(folder, said.append)
        else:  # told by names.py
            return
        if chosen:
            manifest.require_ranks(chosen / "actor" if run.is_rl else chosen, run.gpus)
            states = len(list(chosen.glob("data_*.pt")))
            if not run.is_rl and states != run.data_parallel:  # verl_ext/checkpoints/hooks.py refuses it, too
                yield topic.fail(
                    f"{chosen} holds the data-loader states of {states} data-parallel ranks, but this run has "
                    f"{run.data_parallel}",
                    "Resume with as many GPUs and the same engine.ulysses_sequence_parallel_size, or start anew from "
                    "the merged model.",
                )
                return
    except (ValueError, checkpoints.NotWhole) as error:
        yield topic.fail(str(error), f"See what is there: python -m verl_ext.checkpoints {folder}")
        return
    if len(said) > 1:  # why it is not the newest
        yield topic.warn(" ".join(said[:-1]), f"See what is there: python -m verl_ext.checkpoints {folder}")
    if chosen is None:
        yield topic.ok("the run starts from step 0")
        return
    step, total = int(chosen.name.removeprefix("global_step_")), total_steps(run)
    if total is not None and step >= total:
        yield topic.warn(
            f"step {step} of {total} is reached: nothing is left to do", "Raise the steps, or go on to evaluate."
        )
    else:
        text = f"the run goes on from {chosen.name}" + (f" of {total}" if total is not None else "")
        epoch = None if run.is_rl else steps_per_epoch(run)
        if epoch and step % epoch == 0:
            text += f", the end of epoch {step // epoch}, with the next epoch"
        yield topic.ok(text)
