"""The table of what was expected and seen, of this run and of those before it in the same folder."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.gpu.stage import Result, Row
from verl_ext.runs.durable import write_text

REPO = Path(__file__).resolve().parents[2]
SIGNS = {True: "ok", False: "**NOT OK**", None: ""}
FAILED, NOT_ALL_RAN = 1, 3  # exit statuses; argparse's is 2


def exit_status(results: list[Result]) -> int:
    """0 if every stage passed, FAILED if one did not, NOT_ALL_RAN if none failed, and some or all did not run."""
    if any(not each.passed and not each.not_run for each in results):
        return FAILED
    return 0 if results and all(each.passed for each in results) else NOT_ALL_RAN


def cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def table(results: list[Result]) -> str:
    """Markdown: a line for each row, and for each stage that did not run or broke off."""
    lines = ["| stage | what | expected | seen | |", "|---|---|---|---|---|"]
    for result in results:
        lines += [cells(result.label, row.what, row.expected, row.seen, SIGNS[row.ok]) for row in result.rows]
        if result.not_run:
            lines.append(cells(result.label, "not run", "", result.not_run, ""))
        if result.error:
            lines.append(cells(result.label, "broke off", "", result.error, SIGNS[False]))
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    counts = {
        "passed": [each.label for each in results if each.passed],
        "failed": [each.label for each in results if not each.passed and not each.not_run],
        "not run": [each.label for each in results if each.not_run],
    }
    return ", ".join(f"{len(names)} {what}" + f" ({', '.join(names)})" * bool(names) for what, names in counts.items())


def seen_at() -> str:
    """Date, commit and Python, as a row of a later day needs them; `-dirty`: files differ from the commit."""
    commit = ""
    if shutil.which("git"):
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit or 'unknown'}, Python {sys.version.split()[0]}"


def read_results(out: Path) -> list[Result]:
    """Of the runs before, in `acceptance.json` of the folder.

    Raises:
        SystemExit: the file is there and is none of ours; it is not overwritten.
    """
    path = out / "acceptance.json"
    if not path.is_file():
        return []
    try:
        return [
            Result(**each | {"rows": [Row(**row) for row in each["rows"]]}) for each in json.loads(path.read_text())
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(
            f"gpu_acceptance: {path}: {error!r}. Expected the results of earlier runs. Move the file away, or name "
            "another folder with --out."
        ) from error


def record(result: Result, out: Path, order: list[str]) -> None:
    """Replace the stage's earlier result of equal options, in `acceptance.json` and `acceptance.md`.

    A stage that did not run replaces no result. A crash leaves each file whole: the old one or the new one.

    Args:
        order: names of stages, as they run.
    """
    results = {each.label: each for each in read_results(out)}
    if not result.not_run or result.label not in results or results[result.label].not_run:
        results[result.label] = result
    merged = sorted(results.values(), key=lambda each: order.index(each.name) if each.name in order else len(order))
    write_text(out / "acceptance.json", json.dumps([asdict(each) for each in merged], indent=1) + "\n")
    runs = ["| `bash scripts/gpu_acceptance.sh` | seen | seconds |", "|---|---|---|"]
    runs += [cells(each.label, each.at, "not run" if each.not_run else f"{each.seconds:.0f}") for each in merged]
    write_text(out / "acceptance.md", "\n".join([table(merged), "", summary(merged), "", *runs, ""]))
