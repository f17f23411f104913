"""The mutants of a source, which of them are drawn, and what earlier calls found out about them."""

import ast
import json
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = '''"""A docstring < another."""

logger = logging.getLogger("name")
NAMES = ("a", "two words")


class Settings:
    """A text."""

    number: int = 3


def share(values: list[int], least: int = 1) -> float:
    """A docstring."""
    logger.info("%s", values[1:])
    if not values:
        raise ValueError(f"{least + 1} values")
    for value in values:
        if value <= least and value != 7:
            break
    best = max(values[:2])
    return best / 2 if value is None else -0.5
'''


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    from scripts.studies import mutants

    return mutants


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.studies import mutate

    return mutate


def changes(mutants: ModuleType) -> set[tuple[str, str, str]]:
    return {(mutant.function, mutant.text, mutant.new) for mutant in mutants.find_mutants("file.py", SOURCE)}


def test_each_operator_changes_what_it_should(mutants: ModuleType):
    expected = {
        ("", '"a"', '""'),
        ("Settings", "3", "4"),
        *(("share", "1", new) for new in ("2", "0")),  # the default argument
        *(("share", " <= ", new) for new in (" < ", " > ")),
        *(("share", "not values", new) for new in ("(values)", "True", "False")),
        ("share", 'raise ValueError(f"{least + 1} values")', "pass"),
        ("share", " and ", " or "),
        ("share", " != ", " == "),
        *(("share", "7", new) for new in ("8",)),
        *(("share", "value <= least and value != 7", new) for new in ("True", "False")),
        ("share", "break", "continue"),
        ("share", "max", "min"),
        *(("share", "2", new) for new in ("3", "")),
        ("share", "return best / 2 if value is None else -0.5", "return None"),
        ("share", " / ", " * "),
        ("share", " is ", " is not "),
        *(("share", "value is None", new) for new in ("True", "False")),
        ("share", "None", "0"),
        ("share", "-0.5", "(0.5)"),
        ("share", "0.5", "1.5"),
    }
    assert changes(mutants) == expected


def test_every_mutant_is_python_and_differs(mutants: ModuleType):
    for mutant in mutants.find_mutants("file.py", SOURCE):
        changed = mutant.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), mutant


@pytest.mark.parametrize(("new", "is_python"), [("return None", True), ("return (", False), ("continue", False)])
def test_a_mutant_that_does_not_compile_is_no_python(mutants: ModuleType, new: str, is_python: bool):
    source = "def f(x):\n    return x\n"  # `continue` parses here, but there is no loop
    start = source.index("return")
    mutant = mutants.Mutant("file.py", "f", "a change", "return x", new, 0, start, start + len("return x"), 2)
    assert mutant.is_python(source) is is_python


def test_an_edit_elsewhere_leaves_the_names_by_which_mutants_are_drawn(mutants: ModuleType):
    before = {mutant.name for mutant in mutants.find_mutants("file.py", SOURCE)}
    edited = SOURCE.replace("NAMES", "import os\n\nNAMES").replace("two words", "three more words")
    assert {mutant.name for mutant in mutants.find_mutants("file.py", edited)} == before
    same_twice = "def f():\n    return 1 + 1\n"
    names = [mutant.name for mutant in mutants.find_mutants("file.py", same_twice)]
    assert len(names) == len(set(names)) == 6, "two constants of two changes each, the sum, the return"


def test_text_beyond_ascii_is_changed_at_the_right_place(mutants: ModuleType):
    source = "def f(x):\n    return ('é', x < 1)\n"
    changed = {mutant.apply(source) for mutant in mutants.find_mutants("file.py", source)}
    assert "def f(x):\n    return ('é', x <= 1)\n" in changed


def test_every_module_and_its_tests_are_there_and_the_draw_repeats(mutate: ModuleType):
    for file in mutate.TESTS:
        assert (mutate.REPO / file).is_file()
        assert all((mutate.REPO / test).is_file() for test in mutate.tests_of(file)), file
    drawn = mutate.draw(20, 0)
    assert len(drawn) == 20 and drawn != mutate.draw(20, 1)
    assert set(mutate.draw(10, 0)) < set(drawn)


def test_results_are_read_again_and_a_line_cut_short_is_not(mutate: ModuleType, tmp_path: Path):
    path = tmp_path / "outputs" / "mutation.jsonl"
    journal = mutate.Journal(path)
    journal.add(key="a", result="killed", mutant=["file.py", "f"])
    journal.add(key="b", result="survived", mutant=["file.py", "g"])
    with open(path, "a") as file:
        file.write(json.dumps({"key": "c", "result": "killed"})[:-3])
    again = mutate.Journal(path)
    assert again.results == {"a": "killed", "b": "survived"} and again.killed == {("file.py", "f")}
    again.add(key="c", result="survived", mutant=["file.py", "h"])
    assert mutate.Journal(path).results["c"] == "survived"
