"""Copies of tests that must fail: whatever passes the test fails the copy."""

import random

import pytest

from verl_ext.tasks.canaries import with_canaries

SOURCE = """import unittest


def double(x):
    return x + x


def test_number():
    assert double(1) == 2


def test_text():
    text = double("ä")
    assert "ää" == text, "tab\tand ä"


def test_nested():
    assert double([{"a": True}]) == [
        {"a": True},
        {"a": True},
    ]


class TestDouble(unittest.TestCase):
    def test_float(self):
        self.assertEqual(double(1.5), 3.0)

    def test_truth(self):
        self.assertTrue(double(1))


def test_loop():
    for x in range(3):
        assert double(x) == 2


async def test_coroutine():
    assert double(1) == 2
"""


def outcomes(source):
    """Run the tests of a module without pytest: name -> whether it passed."""
    space = {}
    exec(compile(source, "module", "exec"), space)
    tests = {name: each for name, each in space.items() if name.startswith("test_") and "coroutine" not in name}
    of_class = space["TestDouble"]
    tests |= {
        f"TestDouble::{name}": getattr(of_class(name), name) for name in dir(of_class) if name.startswith("test_")
    }
    found = {}
    for name, test in tests.items():
        try:
            test()
            found[name] = True
        except AssertionError:
            found[name] = False
    return found


@pytest.mark.parametrize("seed", range(8))
def test_each_copy_fails_and_each_test_says_what_it_said(seed):
    before = outcomes(SOURCE)
    source, names = with_canaries(SOURCE, random.Random(seed), 10)
    after = outcomes(source)
    assert len(names) == len(set(names)) == 5 and not set(names) & before.keys()  # 4 copies and a plain one
    assert {name: after[name] for name in before} == before
    assert [name for name in after if name not in before and after[name]] == []
    assert set(names) == after.keys() - before.keys()


def test_copies_are_as_many_as_asked_chosen_by_the_seed_and_of_functions_and_classes():
    made = [with_canaries(SOURCE, random.Random(seed), 2) for seed in range(20)]
    assert len({source for source, _ in made}) > 5
    assert all(len(names) == 3 and sum("::" in name for name in names) == 1 for _, names in made)


def test_code_that_is_equal_to_everything_passes_copies():
    """So that it is caught: a copy that passes shows it."""
    source, names = with_canaries(SOURCE, random.Random(0), 10)
    source = source.replace("return x + x", "return type('Any', (), {'__eq__': lambda self, other: True})()")
    assert sum(outcomes(source)[name] for name in names) == 4


def test_a_module_without_plain_values_has_one_test_that_must_fail():
    source, names = with_canaries("def test_x():\n    assert f(x) == g(x)", random.Random(0), 3)
    assert len(names) == 1 and source.count("def test_") == 2
    space = {}
    exec(source, space)
    with pytest.raises(AssertionError):
        space[names[0]]()


def test_lines_and_names_are_those_of_python():
    """A form feed ends no line, and a decorator may name its test."""
    source = """@decorate("def test_a")
def test_a():
    assert 1 + 1 == 2


def test_b():  # a page\x0cand a \u2028 line
    assert 1 + 1 == 2
"""
    text, names = with_canaries(source, random.Random(0), 2)
    said = {}
    exec(text, {"decorate": lambda _: lambda test: said.setdefault(test.__name__, test)})
    assert {name for name in names if name.startswith("test_a")} == set(said) - {"test_a"} and "test_a" in said
    assert len(names) == 3


def test_a_module_that_is_no_python_is_refused():
    with pytest.raises(SyntaxError):
        with_canaries("print 1", random.Random(0), 3)
