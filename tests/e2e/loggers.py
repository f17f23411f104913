"""Read what verl's loggers `tensorboard` and `wandb` (offline) have written, as step -> metrics."""

import json
import struct
from collections import defaultdict
from pathlib import Path

BLOCK = 32768  # bytes; a .wandb file is a LevelDB log: records in chunks that lie within blocks
HEADER, FULL, LAST = 7, 1, 4  # bytes of a chunk's header; types of a chunk that ends a record


def read_tensorboard(folder: Path) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
    """Read (scalars, the text of the validation generations) by step, of all starts of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    scalars: dict[int, dict[str, float]] = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            scalars[event.step][tag] = event.value
    texts = [tag for tag in events.Tags()["tensors"] if tag.startswith("val/generations")]
    return scalars, {
        event.step: event.tensor_proto.string_val[0].decode() for tag in texts for event in events.Tensors(tag)
    }


def read_wandb(folder: Path) -> dict[int, dict]:
    """Read metrics by step, of all `offline-run-*` in the folder `wandb`; those of later starts win."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps: dict[int, dict] = defaultdict(dict)
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        for raw in _records(file.read_bytes()):
            record = Record.FromString(raw)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            steps[items.get("_step", record.history.step.num)].update(items)
    return steps


def _records(data: bytes) -> list[bytes]:
    records, parts, position = [], [], HEADER  # the file also has a header, as long as a chunk's
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if kind == 0:
            break
        parts.append(data[position + HEADER : position + HEADER + length])
        position += HEADER + length
        if kind in (FULL, LAST):
            records.append(b"".join(parts))
            parts = []
    return records
