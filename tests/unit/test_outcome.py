"""How a rollout ended and who was at fault, by hand; and the spellings that users' files contain."""

import json

import pytest

from verl_ext.outcome import (
    EVALUATION_FAILURES,
    EXCLUSIONS,
    INFRASTRUCTURE_FAILURES,
    REMEDIES,
    UNVERIFIED,
    UNVERIFIED_VERDICT,
    Fault,
    PromptEnd,
    RolloutEnd,
    evaluation_failure,
    infrastructure_failure,
    rollout_end,
)


@pytest.mark.parametrize(
    ("info", "end", "failed"),
    [
        ({"finish_reason": "answer", "unverified": 0.0, "sandbox_failure": 0.0}, "answer", False),
        ({"finish_reason": "answer", "unverified": 1.0}, "verifier_unknown", True),
        ({"finish_reason": "sandbox_failure", "unverified": 1.0, "sandbox_failure": 1.0}, "sandbox_failure", True),
        ({"finish_reason": "sandbox_failure"}, "sandbox_failure", True),  # of a reward manager without the flag
        ({"finish_reason": "aborted"}, "aborted", True),
        ({"finish_reason": "aborted", "unverified": 1.0}, "aborted", True),  # the verifier saw half a response
        ({"finish_reason": "server_failure"}, "aborted", True),  # a row of an evaluation
        ({"finish_reason": "max_tokens"}, "max_tokens", False),  # the model's
        ({"finish_reason": "stop"}, "stop", False),  # of a loop that is not ours
        ({"acc": 1.0}, "", False),
        ({"finish_reason": None, "unverified": None}, "", False),  # columns that only another data source has
    ],
)
def test_the_loops_infrastructure_failure_comes_before_the_verifiers_and_both_before_the_models_end(info, end, failed):
    assert rollout_end(info) == end
    assert infrastructure_failure(info) == (end if failed else None)
    spelt = {"aborted": "server_failure", "verifier_unknown": "unverified"}
    assert evaluation_failure(info) == (spelt.get(end, end) if failed else None)


def test_only_sandbox_verifier_and_server_are_infrastructure_and_a_bug_is_ours():
    assert INFRASTRUCTURE_FAILURES == ("sandbox_failure", "verifier_unknown", "aborted")
    of_model = {"max_turns", "max_tokens", "malformed_limit", "timeout", "agent_error"}
    assert {end for end in RolloutEnd if end.fault is Fault.MODEL} == of_model
    assert (RolloutEnd.ANSWER.fault, RolloutEnd.RAISED.fault) == (Fault.NONE, Fault.OURS)
    assert set(REMEDIES) == set(EXCLUSIONS) == {*INFRASTRUCTURE_FAILURES, "void_turn", "raised"}


def test_the_words_of_users_files_stay():
    """Older runs, dumps and evaluations are read by these strings, and dashboards use them."""
    assert EVALUATION_FAILURES == ("sandbox_failure", "server_failure", "unverified")
    assert (UNVERIFIED, UNVERIFIED_VERDICT, RolloutEnd.UNVERIFIED) == ("unverified", "unknown", "verifier_unknown")
    assert set(PromptEnd) == {"open", "trained", "equal", "void", "failed", "stale", "surplus"}
    written = json.dumps({RolloutEnd.UNVERIFIED: RolloutEnd.ABORTED, f"failure/{RolloutEnd.RAISED}": 1})
    assert written == '{"verifier_unknown": "aborted", "failure/raised": 1}'
