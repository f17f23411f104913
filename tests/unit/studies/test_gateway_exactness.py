"""The study of the gateway's exactness notices what differs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from scripts.studies.gateway_exactness import Findings, answered
from tests.unit.gateway.conftest import policy, qwen3_tokenizer, templates, user  # noqa: F401 (fixtures)

Log = list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]


@pytest.fixture
def played(policy: Callable) -> tuple[Any, Log, list]:  # noqa: F811
    """Return a session of two rows, what the engine logged, and what the client got."""
    agent = policy("tiny")
    first = agent.ask([user("a")], "1")
    agent.ask([user("a"), first.message, user("b")], "2")
    agent.ask([user("c")], "3")
    log = [tuple(map(tuple, each)) for each in agent.log]
    return agent.session, log, [answered(node.message) for node in agent.session.nodes]


def differences(session: Any, log: Log, got: list) -> set[str]:
    findings = Findings()
    findings.add_session(session, got)
    findings.add_log(session.nodes, log)
    return {what for what, number in findings.wrong.items() if number}


def test_an_exact_session_has_no_difference(played: tuple) -> None:
    assert differences(*played) == set()


def test_a_changed_token_and_a_changed_log_prob_are_found(played: tuple) -> None:
    session, log, got = played
    (prompt, ids, log_probs), *rest = log
    both = {"a turn is no generation", "a generation is no turn"}
    for wrong in (
        (prompt, (ids[0] + 1, *ids[1:]), log_probs),
        (prompt, ids, (-9.0, *log_probs[1:])),
        (prompt[1:], ids, ()),
    ):
        assert differences(session, [wrong, *rest], got) == both


def test_a_lost_and_a_doubled_turn_are_found(played: tuple) -> None:
    session, log, got = played
    assert differences(session, [*log, log[0]], got) == {"a generation is no turn"}
    assert differences(session, log[1:], got) == {"a turn is no generation"}


def test_an_answer_that_only_the_client_knows_is_found(played: tuple) -> None:
    session, log, got = played
    found = differences(session, log, [*got, ("9", "[]")])
    assert found == {
        "an answer that a client got is no delivered turn",
        "a client got more answers than were delivered",
    }


def test_a_wrong_row_is_found(played: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    session, log, got = played
    rows = session.rows()
    for change in ({"ids": [*rows[0].row.ids[:-1], 0]}, {"mask": [1] * len(rows[0].row.ids)}, {"log_probs": []}):
        wrong = [dataclasses.replace(rows[0], row=dataclasses.replace(rows[0].row, **change)), *rows[1:]]
        monkeypatch.setattr(type(session), "rows", lambda self, wrong=wrong: wrong)
        assert differences(session, log, got) == {"a row has other tokens than its turns"}
    twice = [dataclasses.replace(rows[0]), rows[0], *rows[1:]]
    monkeypatch.setattr(type(session), "rows", lambda self: twice)
    assert differences(session, log, got) == {"a kept turn does not train in one row"}
