"""`data/prepare_repository.py`: which commits become tasks, measured in real boxes, and how releases become commits."""

import io
import json
import tarfile
from datetime import UTC, datetime

import prepare_repository
import pyarrow.parquet as pq
import pytest
from repositories import changes, own_lines_by_file
from sdists import commit_releases, news, read_sdist

from tests.unit.tasks import repositories
from verl_ext.tasks import git
from verl_ext.tasks.hidden_tests import Instance


@pytest.fixture
def repo(tmp_path):
    """Commits: a fix, documentation only, tests only, and a change that no test sees."""
    repo = repositories.words(tmp_path / "words")
    repositories.commit(repo, {"README.md": "more\n"}, "documentation")
    repositories.commit(repo, {"tests/test_more.py": "def test_more():\n    pass\n"}, "tests")
    trivial = {
        "words/__init__.py": repositories.NEW + "\nEXTRA = 1\n",
        "tests/test_more.py": "def test_one():\n    pass\n",
    }
    repositories.commit(repo, trivial, "trivial")
    return repo


def test_only_commits_that_change_sources_and_tests_are_looked_at(repo):
    found = changes(repo, "words", None)
    assert [each.problem_statement.splitlines()[0] for each in found] == ["Several spaces are one", "trivial"]
    assert [each.problem_statement for each in changes(repo, "words", 1)] == ["trivial"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_repository_becomes_rows_and_what_is_of_no_use_is_named(repo, box_server, tmp_path, capsys):
    out = tmp_path / "out"
    prepare_repository.main(["from-git", str(repo), "--out", str(out), "--sandbox", box_server.url])
    said = capsys.readouterr().out
    assert "2 fail to pass, 2 pass to pass" in said and "1 of 2 changes are tasks" in said
    assert "dropped: no test fails before and passes after" in said
    [row] = pq.read_table(out / "rl_train.parquet").to_pylist()
    assert row["data_source"] == "repository" and len(list((out / "repos").iterdir())) == 2
    [line] = (out / "instances.jsonl").read_text().splitlines()
    instance = json.loads(line)
    assert json.loads(instance["FAIL_TO_PASS"])[1] == "tests/test_words.py::test_spaces"

    # What it wrote is what SWE-bench has, and is read again, for lists that hold and for lists that do not.
    wrong = instance | {"FAIL_TO_PASS": ["tests/test_words.py::test_plain"], "instance_id": "wrong"}
    (tmp_path / "given.jsonl").write_text(f"{line}\n{json.dumps(wrong)}\n")
    given = ["from-json", str(tmp_path / "given.jsonl"), "--repo", str(repo), "--out", str(tmp_path / "again")]
    prepare_repository.main([*given, "--sandbox", box_server.url])
    said = capsys.readouterr().out
    assert "wrong" in said and "test_plain of FAIL_TO_PASS does not fail before and pass after" in said
    [again] = pq.read_table(tmp_path / "again" / "rl_train.parquet").to_pylist()
    assert again["prompt"] == row["prompt"]
    first, second = (json.loads(each["extra_info"]["repository"]) for each in (row, again))
    assert first["instance"] == second["instance"] and first["archives"]["image"] == second["archives"]["image"]


@pytest.mark.nightly
def test_a_package_that_the_sandbox_has_makes_no_task(box_server, tmp_path, capsys):
    files = {path.replace("words/", "iniconfig/"): text for path, text in repositories.BEGIN.items()}
    repositories.commit(tmp_path / "iniconfig", files, "Begin")
    fix = {path.replace("words/", "iniconfig/"): text for path, text in repositories.FIX.items()}
    repositories.commit(tmp_path / "iniconfig", fix, "Fix")
    given = ["from-git", str(tmp_path / "iniconfig"), "--out", str(tmp_path / "out"), "--sandbox", box_server.url]
    with pytest.raises(SystemExit, match="nothing to train on"):
        prepare_repository.main(given)
    said = capsys.readouterr().out
    assert "dropped: the sandbox has package iniconfig, in which an agent could read the fix" in said
    assert "0 of 1 changes are tasks" in said


def test_lines_that_only_the_fix_has_are_looked_for_by_their_module(repo):
    base = git.read_tree(repo, "HEAD~4")
    [instance, *_] = changes(repo, "words", None)
    assert isinstance(instance, Instance)
    line = 'return "-".join(text.lower().split())'
    assert own_lines_by_file(instance, base, ["words"]) == {"words/__init__.py": [line]}
    assert own_lines_by_file(instance, base, ["other"]) == {}


def test_releases_become_commits_with_their_time_and_news(tmp_path):
    def packed(files, mtime):
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            for path, text in files.items():
                info = tarfile.TarInfo(f"words-1/{path}")
                info.size, info.mtime = len(text), mtime
                tar.addfile(info, io.BytesIO(text.encode()))
        return read_sdist(archive.getvalue())

    made = {"PKG-INFO": "", "words.egg-info/SOURCES.txt": "", ".git/config": "", "words/__pycache__/x.pyc": ""}
    first = packed(made | {"words.py": "1", "CHANGES.md": "# 1\n- begin\n", "old.py": ""}, 1_600_000_000)
    second = packed(made | {"words.py": "2", "CHANGES.md": "# 2\n- slug\n# 1\n- begin\n"}, 1_700_000_000)
    assert set(first[0]) == {"words.py", "CHANGES.md", "old.py"}
    assert first[1] == datetime(2020, 9, 13, 12, 26, 40, tzinfo=UTC)
    commit_releases(tmp_path / "words", "words", [("1", *first), ("2", *second)])
    said = git.git("log", "--format=%cI %B", cwd=tmp_path / "words").decode()
    assert said.split() == "2023-11-14T22:13:20+00:00 words 2 # 2 - slug 2020-09-13T12:26:40+00:00 words 1".split()
    assert set(git.read_tree(tmp_path / "words", "HEAD")) == {"words.py", "CHANGES.md"}


def test_a_folder_of_a_release_may_be_a_file_of_the_next(tmp_path):
    time, trees = datetime(2020, 1, 1, tzinfo=UTC), ({"words/a.py": (b"1", 0o644)}, {"words": (b"2", 0o644)})
    commit_releases(tmp_path / "words", "words", [("1", trees[0], time), ("2", trees[1], time), ("3", trees[0], time)])
    assert [git.read_tree(tmp_path / "words", f"HEAD~{back}") for back in (2, 1, 0)] == [*trees, trees[0]]


def test_releases_are_committed_whole_or_not_at_all_and_downloaded_once(tmp_path, monkeypatch):
    def interrupted(repo, *_):
        repo.mkdir(parents=True)
        raise KeyboardInterrupt

    tree, downloaded = {"words.py": (b"1", 0o644)}, []
    monkeypatch.setattr(
        prepare_repository, "sdist", lambda *of: downloaded.append(of) or (tree, datetime(2020, 1, 1, tzinfo=UTC))
    )
    args = prepare_repository.parse(["from-sdists", "words", "--versions", "1,2", "--out", str(tmp_path)])
    with monkeypatch.context() as patched:
        patched.setattr(prepare_repository, "commit_releases", interrupted)
        with pytest.raises(KeyboardInterrupt):
            args.read(args)
    for _ in range(2):
        repo, _ = args.read(args)
        assert git.read_tree(repo, "HEAD~1") == tree and len(downloaded) == 4
    assert [path.name for path in repo.parent.iterdir()] == ["words"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["from-git", "{}"], "from-git: git rev-list"),
        (["from-git", "{}/none"], "from-git: .*No such file"),
        (["from-json", "{}/none.jsonl", "--repo", "{}"], "from-json: .*No such file"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(given, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        prepare_repository.main([*(word.format(tmp_path) for word in given), "--out", str(tmp_path / "out")])


def test_a_readme_tells_what_is_new_if_there_is_no_log():
    old, new = {"README.rst": (b"Words\n", 0o644)}, {"README.rst": (b"Words\n1.2 slug\n", 0o644)}
    assert news(old, new) == "1.2 slug"
    assert news(old, new | {"HISTORY.rst": (b"1.2: more\n", 0o644)}) == "1.2: more"
    assert news(new, new) == ""
