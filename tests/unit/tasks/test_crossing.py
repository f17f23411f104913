"""What of an agent's repository goes to the scoring box."""

import pytest

from verl_ext.tasks.archive import File, Folder, Link
from verl_ext.tasks.crossing import crossing, is_test

BASE = {
    "words/__init__.py": (b"old", 0o644),
    "words/data.json": (b"{}", 0o644),
    "words/extra.py": (b"extra", 0o644),
    "tests/test_words.py": (b"tests", 0o644),
    "setup.cfg": (b"", 0o644),
    "types.py": (b"", 0o644),
}
UNTOUCHED = {path: File(data, mode) for path, (data, mode) in BASE.items()}


def test_changed_and_new_sources_cross_and_equal_ones_do_not():
    new = {"words/__init__.py": File(b"new"), "words/more.py": File(b"more", 0o755), "words": Folder()}
    crossed = crossing(BASE, UNTOUCHED | new)
    assert crossed.files == {"words/__init__.py": (b"new", 0o644), "words/more.py": (b"more", 0o755)}
    assert (crossed.deleted, crossed.left_out) == ([], [])


def test_deleted_sources_are_deleted_and_deleted_tests_are_not():
    kept = {path: each for path, each in UNTOUCHED.items() if path not in ("words/extra.py", "tests/test_words.py")}
    crossed = crossing(BASE, kept)
    assert crossed.deleted == ["words/extra.py"]
    assert crossed.left_out == ["deleted tests/test_words.py"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tests/test_words.py", "test"),
        ("tests/helper.txt", "test"),
        ("words/test_inner.py", "test"),
        ("words/inner_test.py", "test"),
        ("conftest.py", "test"),
        ("words/conftest.py", "test"),
        ("pytest.ini", "configuration"),
        ("words/pytest.ini", "configuration"),
        ("setup.cfg", "configuration"),
        ("pyproject.toml", "configuration"),
        ("sitecustomize.py", "configuration"),
        ("usercustomize.py", "configuration"),
        ("words/x.pth", "machinery"),
        ("words/fast.so", "machinery"),
        ("words/old.pyc", "machinery"),
        ("words.egg-info/entry_points.txt", "machinery"),
        ("x-1.dist-info/entry_points.txt", "machinery"),
        ("pytest.py", "imposter"),
        ("_pytest/__init__.py", "imposter"),
        ("json.py", "imposter"),
        ("src/unittest/__init__.py", "imposter"),
    ],
)
def test_what_sways_tests_stays_and_is_named(path, said):
    crossed = crossing(BASE, UNTOUCHED | {path: File(b"planted")})
    assert crossed.files == {} and crossed.left_out == [f"{said} {path}"]


def test_a_module_of_the_repository_may_have_the_name_of_pythons():
    assert crossing(BASE, UNTOUCHED | {"types.py": File(b"new")}).files == {"types.py": (b"new", 0o644)}


def test_links_stay_whatever_they_replace():
    crossed = crossing(BASE, UNTOUCHED | {"words/__init__.py": Link("/tests/spec.json")})
    assert crossed.files == {} and crossed.left_out == ["link words/__init__.py"]


def test_what_use_makes_stays_and_is_not_named():
    made = [
        ".git/HEAD",
        ".git/hooks/post-checkout",
        "words/__pycache__/x.cpython-311.pyc",
        ".pytest_cache/v/lastfailed",
    ]
    assert crossing(BASE, UNTOUCHED | {path: File(b"") for path in made}) == ({}, [], [])


@pytest.mark.parametrize("path", ["testing/helpers.py", "words/contest.py", "words/latest.py", "protest/x.py"])
def test_sources_with_names_like_tests_are_sources(path):
    assert not is_test(path)
