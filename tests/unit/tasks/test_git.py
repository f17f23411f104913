"""What is read of a repository's commits, and that an agent's repository holds nothing of a later one."""

import subprocess

import pytest

from tests.unit.tasks import repositories
from verl_ext.tasks import git
from verl_ext.tasks.instance import instance_of


@pytest.fixture
def repo(tmp_path):
    return repositories.words(tmp_path / "words")


def test_a_tree_is_what_git_has(repo):
    (repo / "run.sh").write_text("#!/bin/sh\n")
    (repo / "run.sh").chmod(0o755)
    (repo / "naïve name.txt").write_bytes(b"\x00\r\n\xff")
    git.git("add", "--all", cwd=repo)
    git.git("commit", "-qm", "odd files", cwd=repo)
    tree = git.read_tree(repo, "HEAD")
    assert tree["words/__init__.py"] == (repositories.NEW.encode(), 0o644)
    assert tree["run.sh"] == (b"#!/bin/sh\n", 0o755)
    assert tree["naïve name.txt"] == (b"\x00\r\n\xff", 0o644)
    assert len(tree) == 6


def test_a_symbolic_link_is_refused_by_name(repo):
    (repo / "link").symlink_to("README.md")
    git.git("add", "--all", cwd=repo)
    git.git("commit", "-qm", "a link", cwd=repo)
    with pytest.raises(git.GitError, match="'link'.*symbolic link"):
        git.read_tree(repo, "HEAD")


def test_patches_make_the_second_commit_of_the_first(repo):
    (repo / "image.bin").write_bytes(bytes(range(256)))
    (repo / "README.md").unlink()
    git.git("add", "--all", cwd=repo)
    git.git("commit", "--amend", "-qm", "Fix", cwd=repo)
    base, fixed = git.read_tree(repo, "HEAD~1"), git.read_tree(repo, "HEAD")
    instance = instance_of(repo, "words", "HEAD~1", "HEAD")
    assert "test_words" in instance.test_patch and "test_words" not in instance.patch
    assert git.apply(git.apply(base, instance.patch), instance.test_patch) == fixed


def test_a_patch_that_leaves_the_tree_is_refused(repo):
    patch = "--- /dev/null\n+++ b/../outside\n@@ -0,0 +1 @@\n+x\n"
    with pytest.raises(git.GitError):
        git.apply(git.read_tree(repo, "HEAD"), patch)
    with pytest.raises(git.GitError, match="apply"):
        git.apply({}, instance_of(repo, "words", "HEAD~1", "HEAD").patch)


def _ids(repo):
    said = git.git("cat-file", "--batch-all-objects", "--batch-check", cwd=repo).decode().splitlines()
    return {line.split()[0] for line in said}


def _laid_out(tree, folder):
    for path, (content, mode) in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        (folder / path).chmod(mode)
    return folder


def test_the_fix_cannot_be_found_in_the_agents_repository(repo, tmp_path):
    git.git("tag", "v2", cwd=repo)
    git.git("gc", "--quiet", cwd=repo)
    secrets = git.git("rev-list", "--objects", "HEAD", "^HEAD~1", cwd=repo).decode().splitlines()
    secrets = {line.split()[0] for line in secrets}
    assert len(secrets) == 7 - 1 and secrets <= _ids(repo)  # commit, root, words, tests, and two files
    agents = _laid_out(git.without_history(git.read_tree(repo, "HEAD~1")), tmp_path / "agents")
    assert len(_ids(agents)) == 8 and not secrets & _ids(agents)
    assert git.git("log", "--all", "--format=%s", cwd=agents) == b"Start\n"
    assert git.git("status", "--porcelain", cwd=agents) == b""
    for command in ("reflog", "tag", "remote", "stash list", "fsck --lost-found --no-progress", "branch --remotes"):
        assert git.git(*command.split(), cwd=agents) == b"", command
    for name in secrets:
        with pytest.raises(git.GitError):
            git.git("cat-file", "-e", name, cwd=agents)
    found = subprocess.run(["grep", "-r", "text.lower().split", agents], capture_output=True)
    assert found.stdout == b"" and found.returncode == 1


def test_equal_files_make_equal_repositories(repo):
    tree = git.read_tree(repo, "HEAD")
    assert git.without_history(tree) == git.without_history(dict(reversed(tree.items())))


def test_a_repository_that_holds_the_fix_is_named(repo, tmp_path):
    instance = instance_of(repo, "words", "HEAD~1", "HEAD")
    base, fixes = git.read_tree(repo, "HEAD~1"), [instance.patch, instance.test_patch]
    good = git.without_history(base)
    assert git.remains_of(good, base, fixes) == []

    folder = _laid_out(good, tmp_path / "loose")
    (folder / "fix.py").write_text(repositories.NEW)
    git.git("hash-object", "-w", "fix.py", cwd=folder)  # unreachable
    (folder / "fix.py").unlink()
    name = git.blob_id(repositories.NEW.encode())
    found = git.remains_of(git.files_of(folder), base, fixes)
    assert f"object {name} (blob)" in found and any("an object of git has" in each for each in found)

    folder = _laid_out(good, tmp_path / "history")
    git.git("commit", "-q", "--allow-empty", "-m", "Next", cwd=folder)
    git.git("tag", "v2", cwd=folder)
    found = git.remains_of(git.files_of(folder), base, fixes)
    assert {"2 commits"} <= set(found) and any("2 references" in each for each in found)

    copied = good | {"copy.txt": (repositories.NEW.encode(), 0o644)}
    assert any("copy.txt has" in each for each in git.remains_of(copied, base, fixes))
    logged = good | {".git/logs/HEAD": (b"", 0o644)}
    assert git.remains_of(logged, base, fixes) == [".git/logs"]
