"""Releases of a package, as its registry has them, as commits of a git repository.

pip downloads the source distributions, and runs their build to read their metadata; nothing else of them is run here.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from verl_ext.tasks import git
from verl_ext.tasks.git import Tree

LOGS = ("CHANGELOG", "CHANGES", "HISTORY", "NEWS", "README")  # whose new lines tell what a release changes, in order
MOST_TOLD = 4000  # characters of them
GENERATED = ("PKG-INFO", ".pyc", ".pyo")


class NotDownloaded(RuntimeError):
    """pip did not download a release: the message is what it said."""


def releases(name: str, count: int) -> list[str]:
    """Return the newest `count` versions of a package, the oldest first.

    Raises:
        NotDownloaded: pip does not know the package.
    """
    said = _pip("index", "versions", name)
    listed = [line for line in said.splitlines() if line.startswith("Available versions:")]
    if not listed:
        raise NotDownloaded(f"pip index versions {name} listed no version: {said[-300:]}")
    return [version.strip() for version in listed[0].partition(":")[2].split(",")][:count][::-1]


def sdist(name: str, version: str) -> tuple[Tree, datetime]:
    """Return the files of a release's source distribution, without what its build made, and their newest time.

    Raises:
        NotDownloaded: there is no source distribution, or pip cannot read it.
    """
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--quiet", "--no-deps", f"--no-binary={name}", "--dest", folder, f"{name}=={version}")
        found = sorted(Path(folder).glob("*.tar.gz"))
        if not found:
            raise NotDownloaded(f"{name} {version} has no source distribution as tar.gz.")
        return read_sdist(found[0].read_bytes())


def read_sdist(data: bytes) -> tuple[Tree, datetime]:
    """Return the files of a tar.gz below its only folder, without what a build made, and their newest time."""
    tree, newest = Tree(), 0.0
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            parts = PurePosixPath(info.name).parts[1:]
            path = "/".join(parts)
            is_generated = path.endswith(GENERATED) or any(part.endswith(".egg-info") for part in parts)
            if not info.isfile() or not parts or ".." in parts or ".git" in parts or is_generated:
                continue
            tree[path] = tar.extractfile(info).read(), 0o755 if info.mode & 0o100 else 0o644
            newest = max(newest, info.mtime)
    return tree, datetime.fromtimestamp(newest, UTC)


def commit_releases(repo: Path, name: str, trees: Sequence[tuple[str, Tree, datetime]]) -> None:
    """Make a git repository whose commits are releases: (version, files, time), the oldest first."""
    repo.mkdir(parents=True)
    git.git("init", "--quiet", "--initial-branch=main", cwd=repo)
    before = Tree()
    for version, tree, time in trees:
        git.git("rm", "-r", "--quiet", "--force", "--ignore-unmatch", ".", cwd=repo)  # emptied folders, too
        git.write_files(tree, repo)
        git.git("add", "--all", "--force", cwd=repo)
        message = f"{name} {version}\n\n{news(before, tree)}".strip()
        git.git("commit", "--quiet", "--allow-empty", "--message", message, cwd=repo, date=time.isoformat())
        before = tree


def news(before: Tree, after: Tree) -> str:
    """Return the lines that a release's log of changes has anew; "" without one."""
    for log in LOGS:
        for path, (content, _) in sorted(after.items()):
            if "/" in path or path.upper().partition(".")[0] != log:
                continue
            old = set(before[path][0].decode(errors="replace").splitlines()) if path in before else set()
            new = [line for line in content.decode(errors="replace").splitlines() if line not in old]
            if any(line.strip() for line in new) and before:
                return "\n".join(new).strip()[:MOST_TOLD]
    return ""


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotDownloaded(f"pip {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
