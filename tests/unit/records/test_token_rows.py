"""Token columns of trainer and loss become one table."""

import math

import numpy as np

from verl_ext.records.token_rows import CLIPPED_LOW, DROPPED, KEPT, TokenParts, token_table

F = np.float32


def batch(**changes):
    """Two responses of 3 and 2 tokens; of the first one a tool wrote the second token."""
    columns = {
        "record": np.array([70, 71]),
        "lengths": np.array([3, 2]),
        "uid": ["a", "b"],
        "session": [4, 0],
        "row": [0, 2],
        "id": np.array([11, 12, 13, 11, 14]),
        "mask": np.array([True, False, True, True, True]),
        "sampled": np.array([True, False, True, True, True]),
        "turn": np.array([0, 1, 2, 0, 0]),
        "version": np.array([5, -1, 6, 6, 6]),
        "rollout_log_prob": np.array([-1, 0, -2, -3, -4], F),
        "old_log_prob": np.array([-1, 0, -2, -3, -4], F),
        "advantage": np.array([0.5, 0, 0.5, -1, -1], F),
        "spelled": {},
    }
    return columns | changes


def loss(record, log_prob, decision, correction="icepop"):
    return {
        "record": np.array([record]),
        "lengths": np.array([len(log_prob)]),
        "log_prob": np.array(log_prob, F),
        "decision": np.array(decision, np.int8),
        "correction": correction,
    }


def rows(parts, texts=None):
    return token_table(9, parts, texts or {11: "x", 12: "=", 13: "1"}).to_pylist()


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    found = rows(TokenParts([batch(spelled={0: "", 1: "√"})]))
    assert [r["text"] for r in found] == ["", "√", "1", "x", None]


def test_a_token_has_its_place_its_numbers_and_what_the_loss_did_with_it():
    losses = [loss(71, [-3.0, -4.5], [KEPT, DROPPED]), loss(70, [-1.5, 7, -2.0], [CLIPPED_LOW, KEPT, KEPT])]
    found = rows(TokenParts([batch()], losses))
    assert [(r["uid"], r["session"], r["row"], r["step"], r["position"], r["id"]) for r in found] == [
        ("a", 4, 0, 9, 0, 11),
        ("a", 4, 0, 9, 1, 12),
        ("a", 4, 0, 9, 2, 13),
        ("b", 0, 2, 9, 0, 11),
        ("b", 0, 2, 9, 1, 14),
    ]
    assert [r["text"] for r in found] == ["x", "=", "1", "x", None]
    assert [r["mask"] for r in found] == [True, False, True, True, True]
    assert [r["version"] for r in found] == [5, None, 6, 6, 6]
    assert [r["decision"] for r in found] == ["clipped_low", "masked", "kept", "kept", "dropped:icepop"]
    assert [r["log_prob"] for r in found] == [-1.5, None, -2.0, -3.0, -4.5]
    assert found[0]["ratio"] == np.exp(F(-0.5)) and found[2]["ratio"] == 1.0 and found[1]["ratio"] is None
    assert [r["advantage"] for r in found] == [0.5, 0.0, 0.5, -1.0, -1.0]


def test_without_word_of_the_loss_its_columns_are_null_and_a_rejected_token_says_so():
    rejected = np.array([True, False, False, True, True])  # rollout_correction's rejection took the third token
    found = rows(TokenParts([batch(mask=rejected, rollout_log_prob=np.full(5, math.nan, F))]))
    assert [r["decision"] for r in found] == [None, "masked", "dropped:rollout_correction", None, None]
    assert {r["log_prob"] for r in found} == {r["ratio"] for r in found} == {r["rollout_log_prob"] for r in found}
    assert found[0]["rollout_log_prob"] is None


def test_of_two_epochs_the_last_counts_and_a_response_of_another_length_is_not_taken():
    losses = [loss(71, [-9, -9], [KEPT, KEPT]), loss(71, [-3.0, -4.0], [KEPT, KEPT]), loss(70, [-1.0], [KEPT])]
    found = rows(TokenParts([batch()], losses))
    assert [r["log_prob"] for r in found] == [None, None, None, -3.0, -4.0]
    assert token_table(9, TokenParts([], losses), {}).num_rows == 0
