"""A checkpoint of verl's FSDP trainers, SFT or RL, as a Hugging Face folder, and the settings to evaluate it with."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

REPO = Path(__file__).resolve().parents[2]
_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_STEP = re.compile(r"global_step_(\d+)")


class CheckpointError(ValueError):
    """There is no whole checkpoint, or it cannot be merged."""


@dataclass(frozen=True)
class Checkpoint:
    run: Path  # the folder of the run
    step: int
    shards: Path  # `global_step_N/actor` of RL, `global_step_N` of SFT

    @property
    def merged(self) -> Path:
        """Where `merge` puts the Hugging Face folder: beside the step, so that deleting old checkpoints spares it."""
        return self.run / f"merged_step_{self.step}"


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a path means: a run's folder (its newest whole step), `global_step_N`, or its `actor`.

    A step is whole if all ranks' shards are there and the run has noted it, which verl does last; a run folder without
    that note, `latest_checkpointed_iteration.txt`, was never saved whole. A step that was copied elsewhere has no note
    beside it, and counts by its shards.

    Raises:
        CheckpointError: no such folder, no whole step, or the named step is not whole.
    """
    path = path.resolve()
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder. Expected a run's folder, its global_step_N, or global_step_N/actor."
        )
    step_folder = path.parent if path.name == "actor" else path
    if match := _STEP.fullmatch(step_folder.name):
        missing = _missing(step_folder)
        noted = _noted_step(step_folder.parent)
        if not missing and noted is not None and int(match[1]) > noted:
            missing = f"the run has noted step {noted} as its last whole one: saving this one was broken off"
        if missing:
            raise CheckpointError(f"{step_folder} is not whole: {missing}. Take another step, or the run's folder.")
        return Checkpoint(step_folder.parent, int(match[1]), _shards(step_folder))
    steps = {int(m[1]): folder for folder in path.iterdir() if (m := _STEP.fullmatch(folder.name))}
    noted = _noted_step(path)
    for step in sorted(steps, reverse=True):
        if noted is not None and step <= noted and not _missing(steps[step]):
            return Checkpoint(path, step, _shards(steps[step]))
    raise CheckpointError(
        f"{path} has no whole checkpoint: steps {sorted(steps) or 'none'}, noted as saved {noted or 'none'}. Expected "
        "the folder of an SFT or RL run (trainer.default_local_dir), its global_step_N, or global_step_N/actor."
    )


def merge(checkpoint: Checkpoint) -> Path:
    """Merge the shards by verl's model merger, unless that was done after they were written; returns the folder.

    Raises:
        CheckpointError: the merger failed; its output is in `merged_step_N.log`.
    """
    target = checkpoint.merged
    if target.is_dir() and target.stat().st_mtime >= max(
        file.stat().st_mtime for file in checkpoint.shards.glob("*.pt")
    ):
        print(f"{target}: merged already", flush=True)
        return target
    print(f"merging {checkpoint.shards} into {target}", flush=True)
    part, log = Path(f"{target}.part"), Path(f"{target}.log")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(checkpoint.shards), "--target_dir", str(part)]
    with open(log, "wb") as sink:
        environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "verl_ext"}
        status = subprocess.run(command, cwd=REPO, env=environment, stdout=sink, stderr=sink).returncode
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise CheckpointError(f"merging {checkpoint.shards} failed with status {status}; the end of {log}:\n{tail}")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(part, target)
    return target


def settings_of(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """(config, overrides) to evaluate a run's checkpoint with: an RL run's own; for SFT those of the RL run that starts
    from it (`qwen2-32b_sft` -> `qwen2-32b_dapo`), with the protocol of the traces.

    Raises:
        CheckpointError: the run's Hydra folder is not there, or no RL run belongs to it.
    """
    saved = checkpoint.run / "hydra" / "config.yaml"
    if not saved.is_file():
        raise CheckpointError(f"{saved} does not exist, so that the run's settings are unknown. Give --config NAME.")
    config = OmegaConf.load(saved)
    if "actor_rollout_ref" in config:
        return str(saved), []
    name = str(config.trainer.experiment_name).removesuffix("_sft") + "_dapo"
    if not (REPO / "configs" / f"{name}.yaml").is_file():
        raise CheckpointError(
            f"{saved} is of an SFT run called {config.trainer.experiment_name!r}, and there is no configs/{name}.yaml. "
            "Give --config with the RL run whose settings shall be taken."
        )
    return name, [f"retool.protocol={OmegaConf.select(config, 'data.retool.protocol') or 'code'}"]


def _shards(step_folder: Path) -> Path:
    actor = step_folder / "actor"
    return actor if actor.is_dir() else step_folder


def _missing(step_folder: Path) -> str:
    """What a step lacks to be whole; "" for nothing."""
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
    return "" if (folder / "huggingface" / "config.json").is_file() else f"{folder} has no huggingface/config.json"


def _noted_step(run: Path) -> int | None:
    note = run / "latest_checkpointed_iteration.txt"
    return int(note.read_text()) if note.is_file() else None
