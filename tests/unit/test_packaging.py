"""What `pip install .` installs: every file of the package, including the viewer's pages, scripts and licences."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_an_installation_has_all_files_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=REPO, check=True)
    package = [path for path in (REPO / "verl_ext").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {path.relative_to(REPO) for path in package}
    assert {path.name for path in names} >= {"uPlot.min.js", "page.css", "group.html", "curves.yaml"}
    assert sorted(name for name in names if not (tmp_path / name).is_file()) == []
