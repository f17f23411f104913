"""Which tests count, from what runs of both sides said."""

import json

import pytest

from tests.unit.tasks import repositories
from verl_ext.tasks import archive, git
from verl_ext.tasks.hidden_tests import CannotRun, Measured, archive_of, both_sides, expected_of, hidden_of, measured
from verl_ext.tasks.instance import Instance, instance_of

FILE = "tests/test_words.py"


@pytest.fixture(scope="module")
def instance(tmp_path_factory):
    repo = repositories.words(tmp_path_factory.mktemp("repo") / "words")
    instance = instance_of(repo, "words", "HEAD~1", "HEAD")
    return instance, both_sides(instance, git.read_tree(repo, "HEAD~1"))


@pytest.fixture
def tests(instance):
    return hidden_of(instance[1], "seed")


def run(tests, **outcomes):
    """What a run said: all copies failed, and each test as given."""
    copies = dict.fromkeys(tests.canaries, "failed")
    return Measured(copies | {f"{FILE}::test_{name}": outcome for name, outcome in outcomes.items()}, [])


OLD = {"plain": "passed", "total": "passed", "spaces": "failed"}
NEW = dict.fromkeys(OLD, "passed")


def test_the_archive_has_the_tests_of_the_fix_with_copies(instance, tests):
    files = archive.unpack(archive_of(tests, None))
    text = files[f"tests/files/{FILE}"].data.decode()
    assert "def test_spaces():" in text and all(f"def {name.rpartition('::')[2]}(" in text for name in tests.canaries)
    assert len(tests.canaries) == 4
    spec = json.loads(files["tests/spec.json"].data)
    assert (spec["files"], spec["tests"], spec["expected"]) == ([FILE], [FILE], {})
    assert files["tests/base/words/__init__.py"].data.decode() == repositories.OLD
    assert "tests/base/tests/test_words.py" not in files


def test_what_fails_before_and_passes_after_counts_as_fixed(instance, tests):
    found = expected_of([run(tests, **OLD)] * 3, [run(tests, **NEW)] * 3, tests, instance[0])
    assert found.expected.fixed == (f"{FILE}::test_spaces",)
    assert found.expected.kept == (f"{FILE}::test_plain", f"{FILE}::test_total")
    assert sorted(found.expected.canaries) == sorted(tests.canaries)
    assert (found.dropped, found.flaky) == ("", [])


def test_a_file_that_cannot_be_imported_before_is_a_failure(instance, tests):
    found = expected_of([Measured({}, [])] * 3, [run(tests, **NEW)] * 3, tests, instance[0])
    assert len(found.expected.fixed) == 3 and found.expected.kept == ()


def test_a_flaky_test_counts_on_no_side(instance, tests):
    before = [run(tests, **OLD), run(tests, **OLD), run(tests, **OLD | {"plain": "failed"})]
    after = [run(tests, **NEW), run(tests, **NEW | {"total": "error"}), run(tests, **NEW)]
    found = expected_of(before, after, tests, instance[0])
    assert (found.expected.fixed, found.expected.kept) == ((f"{FILE}::test_spaces",), ())
    assert found.flaky == [f"{FILE}::test_plain", f"{FILE}::test_total"]


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ([NEW] * 3, [NEW] * 3, "no test fails before and passes after"),
        ([OLD] * 3, [OLD] * 3, "no test fails before and passes after"),
        ([OLD | {"spaces": "skipped"}] * 3, [NEW] * 3, "no test fails before and passes after"),
        ([OLD, OLD, NEW], [NEW] * 3, "flaky tests only"),
        ([OLD] * 3, [NEW, NEW, OLD], "flaky tests only"),
    ],
)
def test_an_instance_without_a_test_of_its_fix_is_dropped(instance, tests, before, after, why):
    runs = [[run(tests, **each) for each in side] for side in (before, after)]
    found = expected_of(*runs, tests, instance[0])
    assert (found.expected, found.dropped) == (None, why)


@pytest.mark.parametrize("sides", [("passed", "failed"), ("failed", "passed"), ("passed", "passed")])
def test_a_copy_that_passes_on_a_side_is_none(instance, tests, sides):
    passing = tests.canaries[0]
    runs = [run(tests, **each).outcomes | {passing: outcome} for each, outcome in zip((OLD, NEW), sides, strict=True)]
    found = expected_of(*([Measured(each, [])] * 3 for each in runs), tests, instance[0])
    assert passing not in found.expected.canaries + found.expected.kept + found.expected.fixed


def test_what_pytest_says_is_told_if_it_runs_nothing(instance, tests):
    nothing = [Measured({}, [], "line\nusage error: no such option\n")] * 3
    assert expected_of(nothing, nothing, tests, instance[0]).dropped.endswith("on no side: usage error: no such option")


def test_without_copies_that_fail_the_instance_is_dropped(instance, tests):
    after = Measured(run(tests, **NEW).outcomes | dict.fromkeys(tests.canaries, "error"), [])
    found = expected_of([run(tests, **OLD)] * 3, [after] * 3, tests, instance[0])
    assert found.dropped == f"no copy of a test of {FILE} must fail"


def test_lists_that_are_given_are_kept_or_refused(instance, tests):
    runs = [run(tests, **OLD)] * 3, [run(tests, **NEW)] * 3
    given = {"FAIL_TO_PASS": json.dumps([f"{FILE}::test_spaces"]), "PASS_TO_PASS": [f"{FILE}::test_plain"]}
    wanted = Instance.from_json(instance[0].to_json() | given)
    assert expected_of(*runs, tests, wanted).expected.kept == (f"{FILE}::test_plain",)
    wanted = Instance.from_json(instance[0].to_json() | {"FAIL_TO_PASS": [f"{FILE}::test_total"]})
    assert "test_total of FAIL_TO_PASS does not fail" in expected_of(*runs, tests, wanted).dropped


def test_an_instance_comes_out_of_its_json(instance):
    assert Instance.from_json(json.loads(json.dumps(instance[0].to_json()))) == instance[0]
    with pytest.raises(ValueError, match="no text 'patch'"):
        Instance.from_json({key: value for key, value in instance[0].to_json().items() if key != "patch"})
    with pytest.raises(ValueError, match="FAIL_TO_PASS is no JSON"):
        Instance.from_json(instance[0].to_json() | {"FAIL_TO_PASS": "test_x"})


def test_a_run_that_did_not_end_says_so():
    with pytest.raises(ValueError, match="did not end"):
        measured("Traceback")


def test_a_sandbox_that_cannot_run_tests_is_no_property_of_them():
    with pytest.raises(CannotRun, match="has no pytest"):
        measured(json.dumps({"broken": "python3 has no pytest."}))
