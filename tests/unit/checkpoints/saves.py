"""Checkpoints of made-up shards."""

from pathlib import Path

from verl_ext.checkpoints.folder import begin, path_of, publish

SHARDS = [f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)]


def write_shards(checkpoint: Path, names: list[str] = SHARDS) -> None:
    for name in ["actor/" + shard for shard in names] + ["data.pt"]:
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def save(folder: Path, step: int) -> None:
    write_shards(path_of(begin(folder), step))
    assert publish(folder, step) == path_of(folder, step)
