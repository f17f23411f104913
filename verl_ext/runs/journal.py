"""Keep what a run learns at its steps in a file next to the checkpoints that outlives a kill and follows a resume."""

from pathlib import Path
from typing import Any

from verl_ext.runs import durable, jsonl


class StepJournal:
    """JSON lines, each with the `step` it belongs to, written by one process.

    The journal is independent of the checkpoints: a run that resumes from step 30 forgets its notes of later steps,
    whichever checkpoints are kept.
    """

    def __init__(self, path: Path):
        self.path = path

    def resume(self, step: int) -> list[dict[str, Any]]:
        """Return the records up to `step`. Later ones, and a last line that a kill cut short, are removed.

        Raises:
            ValueError: a line is not a record.
        """
        if not self.path.exists():
            return []
        expected = "an object with `step` (restore the file, or delete it to start without what the run had noted)"
        rows = jsonl.read(self.path, lambda row: (row["step"] <= step, row), expected)
        kept = [row for is_kept, row in rows if is_kept]
        durable.write_text(self.path, "".join(f"{jsonl.dumps(record)}\n" for record in kept))
        return kept

    def append(self, step: int, **values: Any) -> None:
        """Note a step's values. Once this returns, they outlive a power loss, as the step's checkpoint does."""
        durable.make_folder(self.path.parent)
        durable.append_line(self.path, jsonl.dumps({"step": step} | values))
