"""What code is for: each rule, and shares, positions and repairs counted by hand."""

import json

import pytest

from scripts.studies import purposes
from tests.unit.view.synthetic import write_run, write_step
from verl_ext.records import store


@pytest.mark.parametrize(
    ("code", "purpose"),
    [
        ('{"item": "tea"}', "other tool"),
        ("print(", "not Python"),
        ("\0", "not Python"),
        ("(" * 5000, "not Python"),
        ("print('the answer is 7')", "no computation"),
        ("x = -7\nprint(x, 'is', not True)", "no computation"),
        ("x = 7\nassert x * 2 == 14", "checking"),
        ("print(3 * 4 == 12)", "checking"),
        ("def is_valid(n):\n    return n % 2\nprint(is_valid(3))", "checking"),
        ("import random\nprint(random.random() < 0.5 and 1)", "simulation"),
        ("import numpy as np\nprint(np.random.randint(9))", "simulation"),
        ("from numpy.random import randint\nprint(randint(9))", "simulation"),
        ("from sympy import symbols\nprint(symbols('x') ** 2)", "algebra"),
        ("print([a for a in range(9) if a % 2])", "enumeration"),
        ("for a in range(9):\n    if a * a == 49:\n        print(a)", "enumeration"),
        ("import itertools\nprint(len(list(itertools.permutations('abc'))))", "enumeration"),
        ("t = 0\nfor a in range(9):\n    t += a\nprint(t)", "iteration"),
        ("def f(n):\n    return n * f(n - 1) if n else 1\nprint(f(5))", "iteration"),
        ("import numpy as np\nprint(np.linalg.det([[1, 2], [3, 4]]))", "numerics"),
        ("print(12 * 7 + 3)", "calculation"),
        ("print(sum([1, 2]))", "calculation"),
        ("x = 5\nx += 2\nprint(x)", "calculation"),
        ("n = 5\nprint(-n)", "calculation"),
        ("a = True\nb = False\nprint(a and b)", "calculation"),
        ("a = True\nprint(not a)", "calculation"),
    ],
)
def test_a_program_has_the_first_purpose_that_fits(code: str, purpose: str) -> None:
    assert purposes.purpose(code) == purpose


def row(acc: float, *calls: tuple[str | None, str | None], start: int = 10, tokens: int = 40) -> dict:
    """A call, as code and fault, in each turn of the model: every second one."""
    use = json.dumps({"first_call_token": start if calls else None})
    said = [
        {"turn": 2 * number, "code": code, "status": "error" if fault else "ok", "fault": fault}
        for number, (code, fault) in enumerate(calls)
    ]
    return {"acc": acc, "calls": said, "tool_use": use, "response_tokens": tokens}


def test_shares_positions_and_repairs_are_of_what_they_say() -> None:
    rows = [
        row(1.0, ("1 + 1", None), ("assert 1 + 1", None)),  # the first call after 10 of 40 tokens
        row(1.0, ("1 +", "model"), ("1 + 1", None), start=20),  # an error, repaired
        row(0.0, ("1 + 1", "model"), start=30),  # an error, not repaired
        row(0.0),
    ]
    found = purposes.summary(rows)
    shares = {name: value for name, value in found.items() if "/" in name and value}
    # Right ones: 4 calls, of which 2 calculate, 1 checks, 1 cannot be parsed.
    expected = {"right/not Python": 0.25, "right/checking": 0.25, "right/calculation": 0.5, "wrong/calculation": 1.0}
    assert shares == expected
    assert found["first call"] == (10 / 40 + 20 / 40 + 30 / 40) / 3 and found["repaired"] == 0.5
    assert purposes.summary([]) == {}


def test_a_malformed_call_has_no_code_and_no_purpose() -> None:
    found = purposes.summary([row(1.0, (None, "model"), ("1 + 1", None)), row(0.0, (None, "model"))])
    assert {name: value for name, value in found.items() if value and "/" in name} == {"right/calculation": 1.0}


def test_an_infrastructure_failure_is_no_error_to_repair() -> None:
    assert "repaired" not in purposes.summary([row(0.0, ("1 + 1", "infrastructure"), ("1 + 1", None))])


def test_a_call_of_the_same_turn_and_a_malformed_one_repair_and_lack_nothing() -> None:
    sibling = row(0.0, ("1 +", "model"), ("1 + 1", None))
    for call in sibling["calls"]:
        call["turn"] = 0
    assert purposes.summary([sibling])["repaired"] == 0.0  # it was written before the error was seen
    malformed = row(1.0, (None, "model"), ("1 + 1", None))
    assert "repaired" not in purposes.summary([malformed])
    assert purposes.summary([row(1.0, (None, "model"), ("1 +", "model"), ("1 + 1", None)), sibling])["repaired"] == 0.5


def test_the_rules_in_the_docstring_are_those_that_are_used() -> None:
    for purpose in purposes.PURPOSES:
        assert f"\n    {purpose} " in purposes.__doc__


def test_the_table_has_shares_by_verdict_of_each_span_of_training_steps(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run")
    purposes.main([str(run), "--width", "3"])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "|  | 1-3 | 4-6 |"
    for side in ("right", "wrong"):
        shares = [row.split(" | ")[1:] for row in rows if row.startswith(f"| {side}/")]
        for column in zip(*shares, strict=True):
            assert sum(float(share.rstrip("% |")) for share in column) == pytest.approx(100, abs=0.5)
    assert [row.split(" | ")[0] for row in rows[-2:]] == ["| first call", "| repaired"]


def test_a_repair_is_of_a_later_turn(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    error = {"turn": 0, "code": "1", "status": "NameError", "fault": "model"}
    for turn, repaired in ((0, 0.0), (2, 1.0)):
        calls = [error, {"turn": turn, "code": "1", "status": "ok", "fault": None}]
        path = store.path_of(run, "trajectories", 2)
        store.rewrite(path, lambda rows, calls=calls: [row | {"calls": calls} for row in rows])
        assert purposes.over_training(run, 1)[range(2, 3)]["repaired"] == repaired


def test_a_run_without_judged_responses_of_training_is_named(tmp_path) -> None:
    write_step(tmp_path / "rl", 0, validate=True)
    with pytest.raises(SystemExit, match="purposes: .*rl has no judged responses of training steps"):
        purposes.main([str(tmp_path)])
