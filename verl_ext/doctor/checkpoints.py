"""What a run will write, whether there is room for it, and which checkpoint it would continue from."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints import manifest
from verl_ext.datasets.peek import count_rows
from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.memory import plan_of
from verl_ext.doctor.run import Run
from verl_ext.memory.estimate import estimate
from verl_ext.memory.words import size
from verl_ext.runs.lock import Taken, check_training_folder
from verl_ext.settings.domains import use_files

LARGER_DISK = "set trainer.default_local_dir (OUTPUT_DIR) to a folder on a larger disk."


def steps_per_epoch(run: Run) -> int | None:
    """Count the steps of an epoch as verl 0.9.1 does: trainer_base.py:765 for RL, the data loader's length for SFT."""
    return _batches(run, "train")


def _batches(run: Run, split: str) -> int | None:
    """Return the number of whole batches of a split; None if its rows cannot be counted."""
    rows = count_rows(run.files(split))
    if rows is not None and (most := run.get(f"data.{split}_max_samples", -1)) > 0:
        rows = min(rows, most)
    if rows is None or run.is_rl:
        return rows and rows // run.batch
    return rows // run.data_parallel // max(1, run.batch // run.data_parallel)


def total_steps(run: Run) -> int | None:
    steps = run.get("trainer.total_training_steps")
    if steps is None and (epoch := steps_per_epoch(run)) is not None:
        steps = epoch * run.get("trainer.total_epochs", 1)
    return steps


def check_steps(run: Run) -> Iterator[Finding]:
    """Check that the data are enough for the steps."""
    epoch, total, epochs = steps_per_epoch(run), total_steps(run), run.get("trainer.total_epochs", 1)
    if epoch == 0:
        most = run.get("data.train_max_samples", -1)
        limit = f", of which data.train_max_samples={most} are used," * (most > 0)
        yield fail(f"""{count_rows(run.files("train"))} rows{limit} are fewer than a batch of {run.batch}, so no step
            would run -> Lower data.train_batch_size, or add data.""")
    elif epoch is not None and total is not None and total > epoch * epochs:
        yield warn(f"""trainer.total_training_steps={total}, but {epochs} epoch(s) of {epoch} steps end at step
            {epoch * epochs}, so a learning-rate schedule would not reach its end
            -> Set trainer.total_epochs to {-(-total // epoch)}, or lower the steps.""")
    every, without = run.get("trainer.test_freq", -1), "data.val_files=[] trainer.test_freq=-1"
    if not run.is_rl and not run.files("val") and (every == "after_each_epoch" or every > 0):
        yield fail(f"""trainer.test_freq={every} validates, but data.val_files names no file, at which verl fails
            -> Set data.val_files, or run without validation: {without}.""")
    elif not run.is_rl and run.files("val") and _batches(run, "val") == 0:
        yield fail(f"""{count_rows(run.files("val"))} rows of data.val_files are fewer than a batch of {run.batch}: verl
            drops incomplete batches, so val/loss would be the mean of nothing
            -> Add rows, lower data.train_batch_size, or run without validation: {without}.""")


def check_disk(run: Run) -> Iterator[Finding]:
    """Check for room for one checkpoint, for the fewest that settings could keep, and for those that they do keep."""
    folder, total = run.output_folder, total_steps(run)
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    every = run.get("trainer.save_freq") or -1
    if every == "after_each_epoch":
        every = steps_per_epoch(run) or -1
    if run.is_rl and every < 0:
        yield ok(f"no checkpoints are saved (trainer.save_freq={every})")
        return
    if run.shape is None:
        yield warn(f"""{size(free)} is free in {existing}, but the size of a checkpoint is unknown: {run.model_path} has
            no config.json of a dense model -> Set MODEL_PATH of the launcher to the model's folder, or count 12 bytes
            for each parameter.""")
        return
    memory = estimate(plan_of(run))
    one = memory.checkpoint
    text = f"a checkpoint takes {size(one)} ({memory.terms['checkpoint']}); {size(free)} is free in {existing}"
    if free < one:
        yield fail(f"{text} -> Free some space, or {LARGER_DISK}")
        return
    kept, best = run.get("retool.checkpoints.keep_last"), run.get("retool.checkpoints.best_metric") is not None
    saved = 1 if every < 0 else None if total is None else -(-total // every)  # SFT always saves at its end
    rolling = None if kept is None else kept + 1 + best  # with the best one, and the one that is being written
    number = min((each for each in (saved, rolling) if each is not None), default=None)
    if number is None:
        yield ok(text)
        return
    there, logs, recorder = len(list(folder.glob("global_step_*"))), 0, run.get("retool.recorder", {})
    if recorder.get("enable"):
        logs = recorder["max_gb"] * 2**30
    need = max(0, number - there) * one + logs
    which = f"all {number} are kept (every {every} steps)"
    if every < 0:
        which = "only that of the last step is saved"
    elif kept is not None:
        which = f"the last {kept}{' and the best' * best} are kept, so there are {number} while one is written"
    text += f"; {which}, which takes {size(need)} with the records"
    if need <= free:
        yield ok(text)
        return
    room = there + max(0, int((free - logs) // one))
    text += f"; the disk would be full after {room - there} more, at step {room * every}"
    least = 2 + best if saved is None else min(saved, 2 + best)  # the last, the next, the best
    if room >= least:
        keep = max(1, min(3, room - 1 - best))
        yield warn(f"{text} -> Set retool.checkpoints.keep_last={keep}, or save less often.")
        return
    say = fail if there + free // one < min(least, 2) else warn
    without = "set retool.checkpoints.best_metric=null, which needs one fewer, or " if least == 3 else ""
    yield say(f"""{text}; even keep_last=1 needs {size((least - there) * one + logs)} for {least} checkpoint(s) at once
        -> Free that much, {without}{LARGER_DISK}""")


def check_resume(run: Run) -> Iterator[Finding]:
    """Report which checkpoint the run continues from, as verl_ext/checkpoints decides, and what is left to do."""
    folder, mode, said = run.output_folder, run.get("trainer.resume_mode", "auto"), []
    look = f"Look at them with retool checkpoints {folder}"
    if mode not in ("auto", "disable", "resume_path"):  # names.py reports it
        return
    if mode == "disable" and (there := checkpoints.steps(folder)):
        yield warn(f"""trainer.resume_mode is disable, but {folder} has checkpoints up to step {there[-1]}, with which
            the run would mix its own -> Choose a separate folder: trainer.default_local_dir (OUTPUT_DIR).""")
    try:
        if not run.get("trainer.val_only"):
            check_training_folder(folder)
    except Taken as error:
        yield fail(f"{error} -> Look at it with retool view {folder}")
        return
    named = run.get("trainer.resume_from_path")
    if named and mode == "auto" and not run.is_rl:
        mode = "resume_path"
    try:
        chosen = checkpoints.choose(mode, run.folder / named if named else None, folder, said.append)
        if chosen:
            manifest.require_ranks(chosen / "actor" if run.is_rl else chosen, run.gpus)
        if chosen and not run.is_rl:
            manifest.require_data_states(chosen, run.data_parallel)
    except (ValueError, checkpoints.NotWhole) as error:
        yield fail(f"{error} -> {look}")
        return
    if len(said) > 1:
        yield warn(f"{' '.join(said[:-1])} -> {look}")
    if chosen is None:
        yield ok("the run starts from step 0")
        return
    step, total = checkpoints.named_step(chosen), total_steps(run)
    if total is not None and step >= total:
        yield warn(f"""the run has reached step {step} of {total}, so nothing is left to do
            -> Raise the number of steps, or continue with the evaluation.""")
        return
    if changed := list(_changed(run)):
        yield warn(f"""settings differ from the last start in {folder}: {"; ".join(changed)}; but weights, optimizer
            with its learning rate, and order of the data continue from {chosen.name} as they were
            -> For a run with these settings, choose a separate folder: trainer.default_local_dir (OUTPUT_DIR).""")
    text = f"the run continues from {chosen.name}" + (f" of {total}" if total is not None else "")
    epoch = None if run.is_rl else steps_per_epoch(run)
    if epoch and step % epoch == 0:
        text += f", at the end of epoch {step // epoch}, and begins the next one"
    yield ok(text)


def _changed(run: Run) -> Iterator[str]:
    """Yield settings that are part of a checkpoint and differ from the configuration of the last start."""
    file = run.output_folder / "hydra" / "config.yaml"
    if not file.is_file():
        return
    try:
        before = cast(DictConfig, OmegaConf.load(file))
    except (OSError, yaml.YAMLError):  # the start was killed
        return
    with suppress(ValueError, OmegaConfBaseException):
        use_files(before)  # as in `run`
    of_optimizer = (f"{run.optim}.{name}" for name in ("lr", "betas", "weight_decay"))
    for key in (f"{run.model}.path", "data.train_files", *of_optimizer):
        with suppress(OmegaConfBaseException):  # the YAML is of another version
            if (was := OmegaConf.select(before, key)) is not None and was != (now := OmegaConf.select(run.config, key)):
                yield f"{key} was {was} and is {now}"
