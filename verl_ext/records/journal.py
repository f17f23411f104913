"""What a run learned at its steps, in a file beside the checkpoints that outlives a kill and follows a resume."""

import json
from pathlib import Path
from typing import Any

from verl_ext.records import durable


class StepJournal:
    """JSON lines, each with the `step` it belongs to. Written by one process.

    It is independent of the checkpoints: a run that goes on from step 30 forgets what it noted after step 30, whichever
    checkpoints are kept.
    """

    def __init__(self, path: Path):
        self.path = path

    def resume(self, step: int) -> list[dict[str, Any]]:
        """The records of `step` and before. Later ones, and a last line that a kill cut short, are removed.

        Raises:
            ValueError: a line before the last is no record.
        """
        if not self.path.exists():
            return []
        records = []
        lines = self.path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if record["step"] <= step:
                    records.append(record)
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines):
                    raise ValueError(
                        f"{self.path}, line {number}: expected a JSON object with `step`, got {line[:80]!r}. Restore "
                        "the file, or delete it to begin without what the run had learned."
                    ) from error
        durable.write_text(self.path, "".join(f"{json.dumps(record)}\n" for record in records))
        return records

    def append(self, step: int, **values: Any) -> None:
        """Note a step's values; when this returns, they outlive a power loss, as the step's checkpoint does."""
        durable.make_folder(self.path.parent)
        durable.append_line(self.path, json.dumps({"step": step} | values))
