"""The name of an episode's row in verl's queue, and what an episode is after its way through the queue."""

import itertools
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.episode import (
    SUMMARY,
    AgentUse,
    Episode,
    EpisodeKey,
    Reward,
    Score,
    Span,
    TokenRow,
    ToolUse,
    Turn,
    from_row,
    summary_of,
)
from verl_ext.outcome import RolloutEnd

KEY = EpisodeKey("u", 3)

# Names ----------------------------------------------------------------------------------------------------------------

SPELLED = {
    "u_3_0": EpisodeKey("u", 3),
    "u_3_12": EpisodeKey("u", 3, row=12),
    "u_1000003_0": EpisodeKey("u", 3, copy=1),
    "u_1000000_1": EpisodeKey("u", 0, copy=1, row=1),
    "u_999999_0": EpisodeKey("u", 999_999),
    "u_12000007_2": EpisodeKey("u", 7, copy=12, row=2),
    "a_b__c_3_0": EpisodeKey("a_b__c", 3),
    "1_2_3_4": EpisodeKey("1_2", 3, row=4),
    "_0_0": EpisodeKey("", 0),
}


@pytest.mark.parametrize("text", SPELLED)
def test_a_key_is_spelled_as_verl_does_and_read_back(text):
    assert EpisodeKey.parse(text) == SPELLED[text] and str(SPELLED[text]) == text


def test_a_name_that_the_workers_of_verl_give_is_the_episodes():
    """trainer/ppo/v1/agent_loop_tq.py:178 (0.9.1): f"{uid}_{session_id}_{i}"."""
    for uid, session, row in itertools.product(("u", "a_b"), (0, 15), (0, 2)):
        assert EpisodeKey.parse(f"{uid}_{session}_{row}") == EpisodeKey(uid, session, row=row)


numbers = st.integers(0, 999_999)
keys = st.builds(EpisodeKey, st.text(), numbers, copy=st.integers(0, 99), row=st.integers(0, 99))


@given(keys)
def test_every_key_is_read_back(key):
    assert EpisodeKey.parse(str(key)) == key


@given(keys, keys)
def test_no_two_keys_are_spelled_alike(key, other):
    assert (str(key) == str(other)) == (key == other)


@pytest.mark.parametrize(
    "text", ["", "u", "u_0", "_0", "u_x_0", "u_0_x", "u_0_", "u__0", "u_-1_0", "u_0_-1", "u_0.5_0"]
)
def test_what_names_no_row_is_refused(text):
    with pytest.raises(ValueError, match=f"'{text}' names no episode; expected UID_SESSION_ROW, with numbers"):
        EpisodeKey.parse(text)


def test_keys_sort_by_group_then_by_numbers():
    """As texts, session 10 would come before 2."""
    order = ["a_2_0", "a_2_1", "a_2_10", "a_1000002_0", "a_1000002_1", "a_10_0", "b_0_0"]
    assert [str(key) for key in sorted(map(EpisodeKey.parse, reversed(order)))] == order


def test_rows_and_copies_have_the_names_of_their_episode_and_of_their_original():
    row, copy, row_of_copy = replace(KEY, row=2), replace(KEY, copy=1), replace(KEY, copy=1, row=2)
    assert [key.episode for key in (KEY, row, copy, row_of_copy)] == [KEY, KEY, copy, copy]
    assert {key.original for key in (KEY, row, copy, row_of_copy)} == {KEY}


# Rows -----------------------------------------------------------------------------------------------------------------


def test_a_row_counts_the_tokens_of_the_model_and_its_turns_as_verl_does():
    """User, model, tool, model: 4. The reply to the last turn is a fifth, although nobody reads it."""
    row = TokenRow(ids=[*range(8)], model_spans=[(0, 4), (7, 8)])
    assert (row.num_model_tokens, row.num_turns) == (5, 4)
    row.ids.append(8)
    assert (row.num_model_tokens, row.num_turns) == (5, 5)
    assert TokenRow().num_turns == 1


@pytest.mark.parametrize(
    ("rows", "oldest"),
    [
        ([[(0, 2, 5), (2, 3, 4), (5, 9, 6)]], 4),
        ([[(0, 2, 5)], [(0, 3, 7)]], 5),
        ([[(0, 2, 5), (2, 3, None)]], None),
        ([[(0, 2, 5)], [(0, 3, None)]], None),
        ([[(0, 2, 5)], []], None),
        ([[]], None),
        ([], None),
    ],
)
def test_the_oldest_version_is_of_all_rows_and_unknown_where_one_is(rows, oldest):
    assert Episode(KEY, [TokenRow(version_spans=spans) for spans in rows]).oldest_version() == oldest


def test_the_answer_is_in_the_last_row_and_tokens_are_of_all():
    rows = [TokenRow(model_spans=[(0, 4)]), TokenRow(model_spans=[(1, 3), (5, 6)])]
    episode = Episode(KEY, rows)
    assert episode.row is rows[1] and episode.num_model_tokens == 7


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish_reason", "info", "end"),
    [
        (RolloutEnd.ANSWER, None, RolloutEnd.ANSWER),
        ("answer", {"acc": 1.0}, RolloutEnd.ANSWER),
        ("answer", {"acc": 0.0, "unverified": 1.0}, RolloutEnd.UNVERIFIED),
        ("aborted", {"acc": 0.0, "unverified": 1.0}, RolloutEnd.ABORTED),
        ("answer", {"sandbox_failure": 1.0}, RolloutEnd.SANDBOX_FAILURE),
        ("answer", {"finish_reason": "aborted"}, RolloutEnd.ABORTED),
        ("", {"finish_reason": "answer"}, RolloutEnd.ANSWER),
        ("stop", {"acc": 1.0}, "stop"),
    ],
)
def test_the_end_is_that_of_the_loop_and_of_the_verdict(finish_reason, info, end):
    reward = None if info is None else Reward(0.0, info)
    assert Episode(KEY, finish_reason=finish_reason, reward=reward).end == end


@pytest.mark.parametrize("finish_reason", [*RolloutEnd, ""])
def test_an_episode_is_truncated_if_the_loop_says_so(finish_reason):
    assert Episode(KEY, finish_reason=finish_reason).is_truncated == (finish_reason == "max_tokens")


def test_accuracy_is_a_number_whatever_a_manager_says():
    assert Reward(1.0, {"acc": True}).acc == 1.0 and type(Reward(1.0, {"acc": True}).acc) is float


def test_calls_are_those_that_ran():
    use = ToolUse(ok=3, errors={"timeout": 1, "NameError": 2}, malformed={"empty_code": 9})
    assert (use.calls, use.failed) == (6, 3)


# Through verl's queue -------------------------------------------------------------------------------------------------

counts, seconds, places = st.integers(0, 2**40), st.floats(0, 1e9), st.integers(0, 2**20)
OF_TYPE = {
    int: counts,
    float: seconds,
    str: st.text(),
    bytes: st.binary(),
    int | None: st.none() | places,
    float | None: st.none() | seconds,
    str | None: st.none() | st.text(),
    dict[str, int]: st.dictionaries(st.text(), counts),
    dict[str, list[int]]: st.dictionaries(st.text(), st.lists(counts, min_size=2, max_size=2)),
    dict[str, Any]: st.dictionaries(st.text(), counts | st.text() | st.none()),
    list[int]: st.lists(counts),
    list[int | None]: st.lists(counts),
    list[float] | None: st.none() | st.lists(seconds),
    list[str]: st.lists(st.text()),
    list[tuple[int, int]]: st.lists(st.tuples(places, places)),
    list[Span]: st.lists(st.tuples(places, places, st.none() | places)),
}


def made(cls: type, **others: Any) -> Any:
    """Return a strategy for a class: values of every field by its type, so that a new field is among them."""
    types = get_type_hints(cls)
    return st.builds(cls, **{name: OF_TYPE[types[name]] for name in types.keys() - others.keys()}, **others)


episodes = made(
    Episode,
    key=keys,
    rows=st.lists(made(TokenRow), max_size=3),
    finish_reason=st.sampled_from(RolloutEnd) | st.text(),
    use=st.none() | made(ToolUse),
    agent=st.none() | made(AgentUse),
    score=st.none() | made(Score, verdict=st.sampled_from(["correct", "unknown"])),
    reward=st.none() | st.builds(Reward, seconds, st.just({"acc": 1.0})),
    turns=st.lists(st.builds(Turn, st.text(), places, places, st.none(), seconds, seconds), max_size=2),
)
# What an episode has before its way through the queue, and what it has after it.
LEFT_OUT = {"reward": None, "turns": [], "prompt": None, "sampling": {}, "opening": {}, "protocol": None}
LEFT_OUT |= {"from_server": {}}


def kinds_in(value: Any) -> set[type]:
    """Return the types of all values in nested ones."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return {type(value)}.union(*map(kinds_in, inner))


@given(episodes, keys)
def test_an_episode_is_the_same_after_the_queue_without_what_others_carry(episode, key):
    found = from_row(key, {SUMMARY: summary_of(episode), "min_global_steps": 3})
    assert found.key == key
    for name in (field.name for field in fields(Episode)):
        before, after = getattr(episode, name), getattr(found, name)
        if name == "rows":
            spans = [(row.model_spans, row.version_spans) for row in before]
            assert after == [TokenRow(model_spans=model, version_spans=versions) for model, versions in spans]
        elif name in LEFT_OUT:
            assert after == LEFT_OUT[name]
        elif name != "key":
            assert after == before


@given(episodes)
def test_the_queue_gets_plain_values(episode):
    """It pickles them, and other processes need no code of this project to read them."""
    assert kinds_in(summary_of(episode)) <= {dict, list, tuple, str, int, float, type(None)}


def test_the_evidence_of_a_score_is_not_in_the_queue():
    episode = Episode(KEY, score=Score.graded(1.0, "", "tests", evidence=b"x" * 1000))
    assert (
        "eHh4" not in str(summary_of(episode)) and from_row(KEY, {SUMMARY: summary_of(episode)}).score.evidence == b""
    )
    assert len(episode.score.evidence) == 1000, "the records have it"


def test_the_reward_is_that_of_verls_columns():
    extra_fields = {SUMMARY: summary_of(Episode(KEY, reward=Reward(9.0, {"acc": 9.0})))}
    assert from_row(KEY, extra_fields).reward is None
    assert from_row(KEY, extra_fields, score=0.5).reward is None, "a score without its parts is not one of a manager"
    info = {"acc": 1.0, "pred": "7"}
    assert from_row(KEY, extra_fields | {"reward_extra_info": info}, 0.5).reward == Reward(0.5, info)


def test_a_summary_leaves_its_episode_as_it_was():
    episode = Episode(KEY, [TokenRow([1], [2, 3], [1, 1], [0.5, 0.5], [(0, 2)])], prompt="1+1?", use=ToolUse(ok=1))
    before = replace(episode, rows=[replace(row) for row in episode.rows])
    from_row(KEY, {SUMMARY: summary_of(episode)}).use.ok += 1
    assert episode == before


FOREIGN = {"finish_reason": "stop", "model_spans": [(0, 3)], "reward_extra_info": {"acc": 0.5}, "turn_scores": [1]}


def test_the_row_of_another_projects_loop_is_an_episode_without_counts():
    found = from_row(KEY, FOREIGN, score=0.25)
    assert found == Episode(KEY, [TokenRow(model_spans=[(0, 3)])], "stop", reward=Reward(0.25, {"acc": 0.5}))
    assert found.use is None and found.oldest_version() is None


@pytest.mark.parametrize("extra_fields", [{}, dict.fromkeys(FOREIGN), {"min_global_steps": 3}])
def test_another_projects_loop_may_say_nothing(extra_fields):
    assert from_row(KEY, extra_fields) == Episode(KEY, [TokenRow()], "")
