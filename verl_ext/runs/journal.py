"""What a run learned at its steps, in a file beside the checkpoints that outlives a kill and follows a resume."""

from pathlib import Path
from typing import Any

from verl_ext.runs import durable, jsonl


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
            ValueError: a line is no record.
        """
        if not self.path.exists():
            return []
        expected = "an object with `step` (restore the file, or delete it to begin without what the run had learned)"
        rows = jsonl.read(self.path, lambda row: (row["step"] <= step, row), expected)
        kept = [row for is_kept, row in rows if is_kept]
        durable.write_text(self.path, "".join(f"{jsonl.dumps(record)}\n" for record in kept))
        return kept

    def append(self, step: int, **values: Any) -> None:
        """Note a step's values; when this returns, they outlive a power loss, as the step's checkpoint does."""
        durable.make_folder(self.path.parent)
        durable.append_line(self.path, jsonl.dumps({"step": step} | values))
