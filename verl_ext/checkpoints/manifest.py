"""The list that makes a checkpoint whole: `checkpoint.json`, with the size and a checksum of every file.

It is written when all other files are on disk. A comparison with the list finds a file that is missing, short, or full
of zeros at its full length, as a disk may leave it after a power loss. `folder.py` knows which checkpoints there are.
"""

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_ext.runs import durable

MANIFEST = "checkpoint.json"
SHARD = re.compile(r"(\w+)_world_size_(\d+)_rank_(\d+)\.pt")

# A file up to 64 MiB is read whole; from a larger one, 64 blocks of 1 MiB are read, including the first and the last. A
# zeroed stretch is then found if it is longer than 1/63 of the file. A full read of 390 GB would delay every resume.
BLOCK = 1 << 20  # bytes
BLOCKS = 64
_READERS = 8  # threads; crc32 and reads release the interpreter's lock


class NotWhole(RuntimeError):
    """A checkpoint lacks something, or none of the existing checkpoints is whole."""


def problem(
    checkpoint: Path, is_needed: Callable[[str], bool] = lambda name: True, *, contents: bool = True
) -> str | None:
    """Return what keeps a checkpoint from being whole, among the files that are needed; None if nothing does.

    Args:
        contents: compare checksums too, if the list has them; the list of an older release has only sizes.
    """
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text())
        sizes, block, blocks, checksums = dict(listed["files"]), BLOCK, BLOCKS, None
        if "crc32" in listed:
            block, blocks = int(listed["crc32"]["block"]), int(listed["crc32"]["blocks"])
            checksums = {name: listed["crc32"]["files"][name] for name in sizes}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last"
    except (ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    needed = [name for name in sizes if is_needed(name)]
    for name in needed:
        try:
            found = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != sizes[name]:
            return f"{name} has {found} of {sizes[name]} bytes"
    if not contents or checksums is None:
        return None
    try:
        there = _checksums(checkpoint, needed, block, blocks)
    except OSError as error:
        return f"it cannot be read ({error})"
    for name, found in there.items():
        if found != checksums[name]:
            return f"{name} has its {sizes[name]} bytes, but not those that were saved: its checksum differs"
    return None


def vouch(checkpoint: Path) -> None:
    """Flush all of a checkpoint to disk, then the list of its files, which makes it whole.

    Raises:
        NotWhole: shards of some ranks are missing.
        OSError: the disk does not take it.
    """
    if missing := missing_shards(checkpoint):
        raise NotWhole(
            f"{checkpoint} lacks {len(missing)} of its shards, the first of them {missing[0]}. On several nodes, "
            "trainer.default_local_dir must be a folder that all nodes share."
        )
    durable.sync_tree(checkpoint)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MANIFEST)
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    checksums = {"block": BLOCK, "blocks": BLOCKS, "files": _checksums(checkpoint, list(sizes), BLOCK, BLOCKS)}
    durable.write_text(checkpoint / MANIFEST, json.dumps({"files": sizes, "crc32": checksums}, indent=1))


def sync_own(checkpoint: Path, rank: int) -> None:
    """Flush to disk what a rank has written: everything except the shards of the other ranks.

    Each rank does so on its own machine, because an fsync elsewhere need not reach this machine's memory.
    """

    def is_own(name: str) -> bool:
        match = SHARD.fullmatch(name)
        return match is None or int(match[3]) == rank

    durable.sync_tree(checkpoint, is_own)


def missing_shards(checkpoint: Path) -> list[str]:
    """Return the missing shards whose existence the names of the others imply: `model_world_size_8_rank_3.pt`, ..."""
    ranks = defaultdict(set)
    for path in checkpoint.rglob("*.pt"):
        if match := SHARD.fullmatch(path.name):
            ranks[path.parent, match[1], int(match[2])].add(int(match[3]))
    return [
        str((parent / f"{kind}_world_size_{size}_rank_{rank}.pt").relative_to(checkpoint))
        for (parent, kind, size), there in sorted(ranks.items())
        for rank in sorted(set(range(size)) - there)
    ]


def require_ranks(checkpoint: Path, ranks: int) -> None:
    """Raise ValueError if a model was sharded over another number of ranks: verl loads rank by rank."""
    there = {int(match[2]) for path in checkpoint.glob("*.pt") if (match := SHARD.fullmatch(path.name))}
    if there - {ranks}:
        raise ValueError(
            f"{checkpoint} was saved by {max(there)} ranks, but this run has {ranks}. Resume with the same number "
            "of GPUs, or merge it (python -m verl.model_merger) and start a run from the merged model."
        )


def require_data_states(checkpoint: Path, ranks: int) -> None:
    """Raise ValueError if an SFT checkpoint's data-loader states come from another number of data-parallel ranks."""
    states = len(list(checkpoint.glob("data_*.pt")))
    if states != ranks:
        raise ValueError(
            f"{checkpoint} holds the data-loader states of {states} data-parallel ranks, but this run has {ranks}: "
            "some traces would be trained twice, others not at all. Resume with the same number of GPUs and the same "
            "engine.ulysses_sequence_parallel_size, or start a new run from the merged model."
        )


def checksum(path: Path, block: int = BLOCK, blocks: int = BLOCKS) -> int:
    """Return the CRC-32 of a file up to `block * blocks` bytes, or of `blocks` blocks spread over a larger one."""
    size, value = path.stat().st_size, 0
    if size <= block * blocks:
        starts = range(0, size, block)
    else:
        starts = [number * (size - block) // (blocks - 1) for number in range(blocks)]
    with open(path, "rb", buffering=0) as file:
        for start in starts:
            file.seek(start)
            value = zlib.crc32(file.read(block), value)
    return value


def _checksums(checkpoint: Path, names: list[str], block: int, blocks: int) -> dict[str, int]:
    with ThreadPoolExecutor(_READERS) as readers:
        return dict(
            zip(names, readers.map(lambda name: checksum(checkpoint / name, block, blocks), names), strict=True)
        )
