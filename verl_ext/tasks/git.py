"""Read commits of a local git repository, and make the one that an agent gets: a single commit without a history.

Git runs without the user's and the machine's configuration, and without hooks. `remains_of` proves that a repository
holds nothing of a later commit.
"""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Tree = dict[str, tuple[bytes, int]]  # path below the repository's root -> content, mode (0o644 or 0o755)

PERSON = "A. Developer", "developer@example.org"
DATE = "2000-01-01T00:00:00+0000"
DISTINCT = 12  # characters of a line that is taken as the fix's own


class GitError(ValueError):
    """Git refused: the message is what it said."""


def git(*arguments: str, cwd: Path | str, given: bytes | None = None, date: str = DATE) -> bytes:
    """Return what git prints.

    Args:
        given: its stdin.
        date: of a commit that it makes.
    Raises:
        GitError: it ended with another exit code than 0.
    """
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(Path(cwd).resolve().parent),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": PERSON[0], f"GIT_{who}_EMAIL": PERSON[1], f"GIT_{who}_DATE": date}
    settings = ["safe.directory=*", f"core.hooksPath={os.devnull}", "core.autocrlf=false", "core.quotePath=false"]
    settings += ["gc.auto=0", "pack.threads=1", "core.logAllRefUpdates=false"]
    command = ["git", *(part for each in settings for part in ("-c", each)), *arguments]
    done = subprocess.run(command, cwd=cwd, input=given or b"", env=environment, capture_output=True, check=False)
    if done.returncode:
        raise GitError(f"git {' '.join(arguments)[:200]}: {done.stderr.decode(errors='replace').strip()[:500]}")
    return done.stdout


def read_tree(repo: Path | str, commit: str) -> Tree:
    """Return the files of a commit.

    Raises:
        GitError: there is no such commit, or it has symbolic links or submodules.
    """
    listed = git("ls-tree", "-r", "-z", "--full-tree", commit, cwd=repo).decode("utf-8", "surrogateescape")
    entries = [entry.split("\t", 1) for entry in listed.split("\0") if entry]
    heads = [head.split() for head, _ in entries]
    if other := [
        path for (mode, *_), (_, path) in zip(heads, entries, strict=True) if mode not in ("100644", "100755")
    ]:
        raise GitError(f"{commit[:12]} has {other[0]!r}, which is a symbolic link or a submodule; only files are read.")
    said = git("cat-file", "--batch", cwd=repo, given="".join(f"{head[2]}\n" for head in heads).encode())
    tree, at = Tree(), 0
    for (mode, _, _), (_, path) in zip(heads, entries, strict=True):
        line = said.index(b"\n", at)
        size = int(said[at:line].split()[2])
        tree[path] = said[line + 1 : line + 1 + size], 0o755 if mode == "100755" else 0o644
        at = line + size + 2
    return tree


def diff(repo: Path | str, base: str, commit: str, paths: Sequence[str]) -> str:
    """Return the changes of `paths` between two commits, as `git apply` reads them; "" without paths."""
    if not paths:
        return ""
    options = "--binary --full-index --no-renames --no-ext-diff --no-textconv --no-color".split()
    return git("--literal-pathspecs", "diff", *options, base, commit, "--", *paths, cwd=repo).decode(
        "utf-8", "surrogateescape"
    )


def changed_paths(repo: Path | str, base: str, commit: str) -> list[str]:
    """Return the files that differ between two commits; a moved one is two."""
    said = git("diff", "--name-only", "--no-renames", "-z", base, commit, cwd=repo)
    return [path for path in said.decode("utf-8", "surrogateescape").split("\0") if path]


def apply(tree: Tree, patch: str) -> Tree:
    """Return the tree after a patch.

    Raises:
        GitError: the patch does not fit, or leaves the tree.
    """
    if not patch.strip():
        return dict(tree)
    with tempfile.TemporaryDirectory() as folder:
        write_files(tree, Path(folder))
        git("apply", "--whitespace=nowarn", "-", cwd=folder, given=patch.encode("utf-8", "surrogateescape"))
        return files_of(Path(folder))


def without_history(tree: Tree) -> Tree:
    """Return the files, with those of a `.git` of one commit that depends only on them.

    No tag, remote, reflog, hook or further object. The index has no times, so that git looks at each file anew.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_files(tree, Path(folder))
        git("init", "--quiet", "--template=", "--initial-branch=main", cwd=folder)
        git("add", "--all", "--force", cwd=folder)
        git("commit", "--quiet", "--allow-empty", "--no-verify", "--message=Start", cwd=folder)
        git("repack", "-a", "-d", "--quiet", cwd=folder)
        git("read-tree", "HEAD", cwd=folder)
        return files_of(Path(folder))


def files_of(folder: Path) -> Tree:
    """Return the files below a folder, with those of its `.git`; no links."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(folder)): (path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644)
        for path in files
    }


def blob_id(content: bytes) -> str:
    """Return the name that git gives a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def own_lines(patch: str, tree: Tree) -> set[bytes]:
    """Return the lines that a patch adds and the tree has nowhere, without those of a few characters."""
    known = b"\n".join(content for content, _ in tree.values())
    added = (line[1:] for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++ "))
    lines = {line.strip().encode("utf-8", "surrogateescape") for line in added}
    return {line for line in lines if len(line) >= DISTINCT and line not in known}


def remains_of(repository: Tree, base: Tree, fixes: Iterable[str]) -> list[str]:
    """Return what a repository that an agent gets still holds of later commits; [] if nothing.

    It reads each object that git can find, packed, loose or unreachable, and each file as it is.

    Args:
        repository: with its `.git`.
        base: the files that the agent may see.
        fixes: patches, of which no blob and no line may be there unless `base` has it.
    """
    found = []
    lines, blobs = set[bytes](), set[str]()
    known = {blob_id(content) for content, _ in base.values()}
    for fix in fixes:
        lines |= own_lines(fix, base)
        blobs |= {blob_id(content) for content, _ in apply(base, fix).values()} - known
    with tempfile.TemporaryDirectory() as folder:
        write_files(repository, Path(folder))
        listed = git("cat-file", "--batch-all-objects", "--batch-check", cwd=folder).decode().splitlines()
        kinds = dict(line.split()[:2] for line in listed)
        contents = git("cat-file", "--batch-all-objects", "--batch", cwd=folder)
        references = git("for-each-ref", cwd=folder).decode().splitlines()
    found += [f"object {name} ({kinds[name]})" for name in sorted(blobs & kinds.keys())]
    if len(references) != 1:
        found.append(f"{len(references)} references: {references}")
    if (commits := sum(kind == "commit" for kind in kinds.values())) != 1:
        found.append(f"{commits} commits")
    if surplus := sum(kind == "blob" for kind in kinds.values()) - len(known & kinds.keys()):
        found.append(f"{surplus} blobs that are not files of the start")
    found += [f".git/{name}" for name in ("logs", "packed-refs", "hooks") if f".git/{name}" in _folders(repository)]
    places = {"an object of git": contents, **{path: content for path, (content, _) in repository.items()}}
    for place, content in places.items():
        found += [f"{place} has {line!r:.120}" for line in sorted(lines) if line in content]
    return found


def _folders(tree: Mapping[str, object]) -> set[str]:
    return {str(parent) for path in tree for parent in (Path(path), *Path(path).parents)}


def write_files(tree: Tree, folder: Path) -> None:
    """Write the files below a folder."""
    for path, (content, mode) in tree.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
