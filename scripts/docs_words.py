#!/usr/bin/env python3
"""Print the words of each page against its budget; fail if one exceeds it by a tenth, or all of them exceed 28,200.

Words are counted as `wc -w` does, tables and code included. Not counted are docs/reference/settings.md, which is
generated, and docs/upstream/, which is written for verl's tracker.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOTAL = 28_200
BUDGETS = {
    "README.md": 650,
    "CONTRIBUTING.md": 620,
    "CHANGELOG.md": 430,
    "CODE_OF_CONDUCT.md": 70,
    "SECURITY.md": 550,
    "recipe/README.md": 60,
    "docs/index.md": 250,
    "docs/start/quickstart.md": 600,
    "docs/start/status.md": 600,
    "docs/start/alternatives.md": 400,
    "docs/tutorials/train-32b.md": 1050,
    "docs/tutorials/train-one-gpu.md": 450,
    "docs/tutorials/own-task.md": 900,
    "docs/guides/data.md": 500,
    "docs/guides/traces.md": 950,
    "docs/guides/evaluate.md": 400,
    "docs/guides/resume.md": 450,
    "docs/guides/async.md": 800,
    "docs/guides/objectives.md": 850,
    "docs/guides/reward.md": 800,
    "docs/guides/tools.md": 480,
    "docs/guides/environments.md": 800,
    "docs/guides/terminal.md": 900,
    "docs/guides/agents.md": 1250,
    "docs/guides/domains.md": 600,
    "docs/guides/sandbox.md": 850,
    "docs/guides/doctor.md": 400,
    "docs/guides/monitor.md": 600,
    "docs/guides/diagnose.md": 1150,
    "docs/guides/fleet.md": 600,
    "docs/guides/docker.md": 300,
    "docs/reference/recipes.md": 600,
    "docs/reference/metrics.md": 480,
    "docs/reference/run-folder.md": 250,
    "docs/reference/glossary.md": 450,
    "docs/explanation/method.md": 750,
    "docs/explanation/failures.md": 550,
    "docs/explanation/architecture.md": 600,
    "docs/evidence/index.md": 350,
    "docs/evidence/small-models.md": 500,
    "docs/evidence/objectives.md": 500,
    "docs/evidence/cold-start.md": 460,
    "docs/evidence/environments.md": 350,
    "docs/evidence/terminal.md": 550,
    "docs/evidence/agents.md": 400,
    "docs/evidence/async.md": 450,
    "docs/evidence/faults.md": 500,
    "docs/evidence/gpu.md": 450,
    "docs/evidence/speed.md": 350,
    "docs/evidence/reward.md": 300,
}
GENERATED = {"docs/reference/settings.md"}


def pages() -> list[str]:
    """List every Markdown page that a reader of the documentation meets, from the repository's root."""
    found = [*ROOT.glob("*.md"), ROOT / "recipe/README.md", *ROOT.glob("docs/**/*.md")]
    named = {path.relative_to(ROOT).as_posix() for path in found}
    return sorted(page for page in named if not page.startswith("docs/upstream/"))


def words(page: str) -> int:
    return len((ROOT / page).read_text(encoding="utf-8").split())


def main() -> int:
    counted = {page: words(page) for page in pages() if page not in GENERATED}
    over = []
    for page, number in counted.items():
        budget = BUDGETS.get(page, 0)
        if number > 1.1 * budget or (page == "README.md" and number > budget):
            over.append(page)
        print(f"{number:6,} of {budget:6,}  {page}{'  <- too long' if page in over else ''}")
    total = sum(counted.values())
    print(f"{total:6,} of {TOTAL:6,}  in all")
    return 1 if over or total > TOTAL else 0


if __name__ == "__main__":
    sys.exit(main())
