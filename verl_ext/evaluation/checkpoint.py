"""Turn a checkpoint of verl's FSDP trainers, SFT or RL, into a Hugging Face folder; find its evaluation settings."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.runs import durable
from verl_ext.settings import REPO

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class CheckpointError(ValueError):
    """There is no complete checkpoint, or it cannot be merged."""


@dataclass(frozen=True)
class Checkpoint:
    run: Path  # the folder of the run
    step: int
    shards: Path  # `global_step_N/actor` of RL, `global_step_N` of SFT

    @property
    def merged(self) -> Path:
        """Return where `merge` puts the Hugging Face folder: next to the step, so that it outlives old checkpoints."""
        return self.run / f"merged_step_{self.step}"


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint that a path means: a run's folder (its newest complete step), `global_step_N`, or its
    `actor`; for the quickstart's folder, that of its RL run, or else of its SFT run.

    A step is complete if all ranks' shards are there, as its `checkpoint.json` lists them (manifest.py; the optimizer's
    may be gone). A step of verl without verl_ext has no such list: then the run must have noted it, or a later one, in
    `latest_checkpointed_iteration.txt`, which verl writes last. A step that was copied elsewhere, without that note
    next to it, is judged by its shards.

    Raises:
        CheckpointError: there is no such folder or no complete step, or the named step is not complete.
    """
    path = path.resolve()
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Expected a run's folder, its global_step_N, or global_step_N/actor."
        )
    step_folder = path.parent if path.name == "actor" else path
    if (step := checkpoints.step_of(step_folder)) is not None:
        noted = checkpoints.tracked_step(step_folder.parent)
        if missing := _missing(step_folder, step, step if noted is None else noted):
            raise CheckpointError(f"{step_folder} is not complete: {missing}. Take another step, or the run's folder.")
        return Checkpoint(step_folder.parent, step, _shards(step_folder))
    path = checkpoints.runs_of(path)[-1]  # the last: RL
    steps, noted = checkpoints.steps(path), checkpoints.tracked_step(path)
    for step in reversed(steps):
        if not _missing(checkpoints.path_of(path, step), step, noted or 0):
            return Checkpoint(path, step, _shards(checkpoints.path_of(path, step)))
    raise CheckpointError(
        f"{path} has no complete checkpoint: steps {steps or 'none'}, noted as saved {noted or 'none'}. Expected "
        "the folder of an SFT or RL run (trainer.default_local_dir), its global_step_N, or global_step_N/actor."
    )


def merge(checkpoint: Checkpoint) -> Path:
    """Merge the shards by verl's model merger, unless that was done after they were written; return the folder.

    Two processes that merge one checkpoint wait for each other, by a lock on `merged_step_N.log`.

    Raises:
        CheckpointError: the merger failed; its output is in `merged_step_N.log`.
    """
    target = checkpoint.merged
    with open(f"{target}.log", "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        if target.is_dir() and target.stat().st_mtime >= max(
            file.stat().st_mtime for file in checkpoint.shards.glob("*.pt")
        ):
            print(f"{target} is merged already", flush=True)
            return target
        print(f"merging {checkpoint.shards} into {target}", flush=True)
        part = Path(f"{target}.part")
        shutil.rmtree(part, ignore_errors=True)
        log.truncate(0)
        environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "verl_ext"}
        status = subprocess.run(
            merge_command(checkpoint.shards, part), cwd=REPO, env=environment, stdout=log, stderr=log
        ).returncode
        if status:
            tail = "\n".join(Path(log.name).read_text(errors="replace").splitlines()[-5:])
            raise CheckpointError(
                f"merging {checkpoint.shards} failed with status {status}; the end of {log.name}:\n{tail}"
            )
        put_merged(part, target)
    if computes_in_fp32(checkpoint):
        print(
            f"{target} is bf16, though its run computed in fp32: verl's merger has no option for another type. "
            f"{checkpoint.shards} keeps the weights in fp32.",
            flush=True,
        )
    return target


def computes_in_fp32(checkpoint: Checkpoint) -> bool:
    """Return whether the run's settings, if they exist, set fp32: verl 0.9.1's merger rounds it.

    See fsdp_model_merger.py:187.
    """
    saved = checkpoint.run / "hydra" / "config.yaml"
    config = OmegaConf.load(saved) if saved.is_file() else OmegaConf.create()
    engine = "actor_rollout_ref.actor.fsdp_config" if "actor_rollout_ref" in config else "engine"
    given = OmegaConf.select(config, f"{engine}.mixed_precision.param_dtype")
    return str(given).removeprefix("torch.") in ("fp32", "float32", "float")


def put_merged(part: Path, target: Path) -> None:
    """Give a merged folder its name once its bytes are on the disk: a folder with that name counts as done."""
    durable.sync_tree(part)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(part, target)
    durable.sync(target.parent)


def merge_command(shards: Path, target: Path) -> list[str]:
    """Return the command of verl's model merger."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    return [*command, "--local_dir", str(shards), "--target_dir", str(target)]


def settings_of(run: Path) -> tuple[str, list[str]]:
    """Return (config, overrides) to evaluate a run's model with: an RL run's own; for SFT those of the RL run that
    starts from it (`qwen2-32b_sft` -> `qwen2-32b_dapo`), with the protocol of the traces.

    Raises:
        CheckpointError: the run's Hydra folder is missing, or no RL run belongs to it.
    """
    saved = run / "hydra" / "config.yaml"
    if not saved.is_file():
        raise CheckpointError(f"{saved} does not exist, so the run's settings are unknown. Give --config NAME.")
    config = OmegaConf.load(saved)
    if "actor_rollout_ref" in config:
        return str(saved), []
    name = str(config.trainer.experiment_name).removesuffix("_sft") + "_dapo"
    if not (REPO / "configs" / f"{name}.yaml").is_file():
        raise CheckpointError(
            f"{saved} belongs to the SFT run {config.trainer.experiment_name!r}, but there is no configs/{name}.yaml. "
            "Give --config with the RL run whose settings you want."
        )
    protocol = OmegaConf.select(config, "data.retool.protocol") or "code"
    return name, ["+tool=none"] if protocol == "text" else [f"retool.protocol={protocol}"]


def _shards(step_folder: Path) -> Path:
    actor = step_folder / "actor"
    return actor if actor.is_dir() else step_folder


def _missing(step_folder: Path, step: int, noted: int) -> str:
    """Return what a step lacks, "" if it is complete; `noted` is the step that the run has noted as complete."""
    folder = _shards(step_folder)
    found = [tuple(map(int, m.groups())) for file in folder.iterdir() if (m := _SHARD.fullmatch(file.name))]
    if not found:
        return f"{folder} has no model_world_size_*_rank_*.pt"
    worlds = {world for world, _ in found}
    if len(worlds) > 1:
        return f"{folder} has shards of {' and '.join(map(str, sorted(worlds)))} ranks"
    (world,) = worlds
    if absent := sorted(set(range(world)) - {rank for _, rank in found}):
        return f"{folder} lacks the shards of ranks {absent} of {world}"
    if not (folder / "huggingface" / "config.json").is_file():
        return f"{folder} has no huggingface/config.json"
    if (step_folder / checkpoints.MANIFEST).is_file():
        return checkpoints.problem(step_folder, lambda name: _SHARD.fullmatch(Path(name).name) is not None) or ""
    if step > noted:
        return f"the run has noted step {noted} as its last complete one, so saving this one was interrupted"
    return ""
