"""The reports for verl: each has a row and a patch, which applies to the installed verl."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "docs" / "upstream"
SITE = Path(importlib.util.find_spec("verl").submodule_search_locations[0]).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.patch"))


def copy_touched(name: str, folder: Path) -> list[Path]:
    """Copy the files that a patch changes to `folder`, below the paths that it names."""
    files = re.findall(r"^\+\+\+ b/(\S+)$", (FOLDER / f"{name}.patch").read_text(encoding="utf-8"), re.MULTILINE)
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SITE / file, folder / file)
    return [folder / file for file in files]


def apply(name: str, folder: Path) -> None:
    command = ["patch", "-p1", "--fuzz=0", "-i"] if shutil.which("patch") else ["git", "apply"]
    done = subprocess.run([*command, FOLDER / f"{name}.patch"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout + done.stderr


def test_every_report_has_a_patch_a_row_and_at_most_200_words():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\[([\w-]+)\]\(\1\.md\) \|.*`(verl_ext/[\w/]+\.py)` \|$", readme, re.MULTILINE)
    reports = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md") if path.stem != "README"}
    assert sorted(name for name, _ in rows) == sorted(reports) == NAMES and len(NAMES) == 5
    assert [file for _, file in rows if not (REPO / file).exists()] == []
    assert [name for name, text in reports.items() if len(text.split()) > 200] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_applies_to_the_installed_verl(name: str, tmp_path: Path):
    files = copy_touched(name, tmp_path)
    before = [file.read_bytes() for file in files]
    apply(name, tmp_path)
    for file, old in zip(files, before, strict=True):
        new = file.read_bytes()
        assert new != old
        compile(new, file, "exec")
