"""A small repository of two commits: the second corrects a function and adds its test."""

from pathlib import Path

from verl_ext.tasks import git

OLD = """def slug(text):
    return text.lower().replace(" ", "-")


def total(values):
    return sum(values)
"""
NEW = OLD.replace('text.lower().replace(" ", "-")', '"-".join(text.lower().split())')
OLD_TESTS = """import unittest

from words import slug, total


def test_plain():
    assert slug("A b") == "a-b"


def test_total():
    assert total([1, 2]) == 3
"""
NEW_TESTS = (
    OLD_TESTS
    + """

def test_spaces():
    assert slug("A  b ") == "a-b"


class TestSlug(unittest.TestCase):
    def test_tabs(self):
        self.assertEqual(slug("a\\tb"), "a-b")
"""
)
BEGIN = {
    "words/__init__.py": OLD,
    "tests/test_words.py": OLD_TESTS,
    "README.md": "words\n",
    "setup.cfg": "[metadata]\n",
}
FIX = {"words/__init__.py": NEW, "tests/test_words.py": NEW_TESTS}


def commit(repo: Path, files: dict[str, str], message: str) -> str:
    """Write the files, commit everything, and return the commit's name."""
    if not (repo / ".git").exists():
        repo.mkdir(parents=True, exist_ok=True)
        git.git("init", "--quiet", "--initial-branch=main", cwd=repo)
    for path, text in files.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text(text)
    git.git("add", "--all", cwd=repo)
    git.git("commit", "--quiet", "--message", message, cwd=repo)
    return git.git("rev-parse", "HEAD", cwd=repo).decode().strip()


def words(folder: Path) -> Path:
    """Make the repository in a new folder."""
    commit(folder, BEGIN, "Begin")
    commit(folder, FIX, "Several spaces are one\n\nslug keeps each of them.")
    return folder
