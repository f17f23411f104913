"""`max_staleness`: a response whose oldest token is too old is not trained on, even if its group aged in the queue."""

import pytest

from tests.unit.trainer.prompt_groups import MODES, buffer_maker, info
from verl_ext.episode import EpisodeKey


@pytest.fixture
def make(monkeypatch):
    return buffer_maker(monkeypatch)


def group(*rollouts):
    """(acc, versions of its spans) of each rollout."""
    return [info(acc, versions=versions) for acc, versions in rollouts]


FRESH = group((0, [4]), (1, [4]), (1, [4]), (0, [4]))
TWO_OLD = group((0, [4]), (1, [4]), (1, [2, 4]), (0, [3]))  # half: too few are left
ONE_OLD = group((0, [4]), (1, [4]), (1, [4]), (0, [4, 2, 4]))
EQUAL_WITHOUT_OLD = group((1, [4]), (1, [4]), (1, [4]), (0, [2]))


@pytest.mark.parametrize("mode", MODES)
def test_old_responses_are_left_out_like_failed_ones(make, mode):
    outcomes = [TWO_OLD, ONE_OLD, EQUAL_WITHOUT_OLD, FRESH, FRESH]
    _, buffer = make(outcomes, batch_size=3, mode=mode, max_staleness=0)
    batch, metrics = buffer.sample(5, "train", 3)
    ends = buffer.take_ended(1).prompts
    assert ends == {"uid-0": "stale", "uid-1": "trained", "uid-2": "equal", "uid-3": "trained", "uid-4": "trained"}
    assert len(batch.keys) == 12 and "uid-1_3_0" not in batch.keys  # a copy of another one is in its place
    because = "left out of the batch: a token from weights older than max_staleness allows"
    assert buffer.selection.left_out == {EpisodeKey("uid-1", 3): because}
    assert metrics["staleness/dropped"] == 4 and metrics["staleness/max"] == 0 and metrics["failure/groups_filled"] == 1
    assert not any(metrics[name] for name in metrics if name.startswith("failure/") and "groups_filled" not in name)


@pytest.mark.parametrize(("tau", "expected"), [(None, 2), (2, 2), (1, 1), (0, 0)])
def test_no_trained_response_is_older_than_allowed(make, tau, expected):
    _, buffer = make([TWO_OLD, FRESH, ONE_OLD], batch_size=2, mode="separate_async", max_staleness=tau)
    _, metrics = buffer.sample(5, "train", 2)
    assert metrics["staleness/max"] == expected
    assert metrics["staleness/dropped"] == {0: 3, 1: 1}.get(tau, 0)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_group_that_waits_ages(make, mode):
    queue, buffer = make([FRESH] * 4, batch_size=3, mode=mode, max_staleness=1)
    buffer.sample(5, "train", 1)
    batch, metrics = buffer.sample(6, "train", 1)
    assert metrics["staleness/max"] == 1 and metrics["staleness/dropped"] == 0
    queue.groups["uid-3"] = None  # replaced below
    queue.outcomes = iter([group((0, [6]), (1, [6]), (1, [6]), (0, [6]))])
    batch, metrics = buffer.sample(7, "train", 1)  # the third is two versions old by now
    assert {key.split("_")[0] for key in batch.keys} == {"uid-4" if len(queue.groups) > 4 else "uid-3"}
    assert buffer.take_ended(1).prompts["uid-2"] == "stale" and metrics["staleness/dropped"] == 4


def test_a_group_that_is_equal_without_its_old_responses_was_never_useful(make):
    _, buffer = make([EQUAL_WITHOUT_OLD, *[FRESH] * 2], batch_size=2, mode="colocate_async", max_staleness=0)
    _, metrics = buffer.sample(5, "train", 1)
    assert metrics["filter_groups/keep_rate"] == 0.5  # of two that ended, one


TURNS_EQUAL = group((1, [4]), (1, [4]), (1, [4]), (0, [3]))
TURNS_VOID = [info(acc, versions=[4], void_turns=1) for acc in (0, 1, 1)] + group((0, [3]))


@pytest.mark.parametrize(("turns", "end"), [(TURNS_EQUAL, "equal"), (TURNS_VOID, "void")])
def test_a_group_that_turns_useless_while_it_waits_does_not_end_again(make, turns, end):
    """It was useful when it ended, in step 5: two of two. In step 6 one group ends: one of one."""
    options = {"mode": "colocate_async", "max_staleness": 1, "void_turn_filter": "loss"}
    queue, buffer = make([FRESH, turns, *[FRESH] * 2], batch_size=2, **options)
    _, metrics = buffer.sample(5, "train", 1)
    assert metrics["filter_groups/keep_rate"] == 1.0
    queue.submit(1)
    _, metrics = buffer.sample(6, "train", 1)
    assert metrics["filter_groups/keep_rate"] == 1.0
    assert buffer.take_ended(1).prompts["uid-1"] == end


def test_surplus_that_was_kept_ages_too(make):
    options = {"keep_surplus": True, "max_off_policy_threshold": 9, "max_staleness": 0}
    newer = group((0, [5]), (1, [5]), (1, [5]), (0, [5]))
    queue, buffer = make([FRESH, FRESH, newer], batch_size=1, **options)
    queue.submit(1)
    buffer.sample(5, "train", 1)
    assert buffer.num_kept == 1
    batch, metrics = buffer.sample(6, "train", 1)
    assert {key.split("_")[0] for key in batch.keys} == {"uid-2"} and metrics["staleness/dropped"] == 4
    assert buffer.take_ended(1).prompts == {"uid-0": "trained", "uid-1": "stale", "uid-2": "trained"}


def test_a_server_without_versions_and_values_that_cannot_be_are_refused(make):
    _, buffer = make([[info(0), info(1)]], batch_size=1, max_staleness=0)
    with pytest.raises(ValueError, match="max_staleness needs the version of the weights .* Set max_staleness=null"):
        buffer.sample(5, "train", 1)
    _, buffer = make([[info(0), info(1)]], batch_size=1)
    assert "staleness/max" not in buffer.sample(5, "train", 1)[1]
    for value, resample in ((-1, None), ("1", None), (0.5, None), (1, "paper")):
        with pytest.raises(ValueError, match=f"max_staleness={value!r}, .*=null, or 0, 1, ... without resample"):
            make([], batch_size=0, max_staleness=value, resample=resample)


def test_a_group_that_was_equal_by_its_age_ends_once_also_in_the_run_that_resumes(make):
    """It waits as a filler. The resumed run does not know how old its rollouts were when the group ended."""
    options = {"mode": "colocate_async", "max_num_gen_batches": 1, "max_staleness": 1}
    queue, buffer = make([EQUAL_WITHOUT_OLD] * 3, batch_size=3, **options)
    buffer.sample(5, "train", 1)
    ends = buffer.take_ended(1).prompts
    assert ends == dict.fromkeys(["uid-0", "uid-1", "uid-2"], "equal")

    resumed, buffer = make((), batch_size=0, **options)
    resumed.tags, resumed.values, resumed.groups = queue.tags, queue.values, queue.groups
    buffer.seen_before = {uid: ends[uid] for uid in ("uid-1", "uid-2")}
    resumed.outcomes = iter([group((0, [5]), (1, [5]), (1, [5]), (0, [5]))] * 9)
    resumed.submit(1)
    for _ in range(3):  # the two that wait are fillers
        buffer.sample(6, "train", 1)
    assert set(buffer.take_ended(1).prompts) == {"uid-3"}


def test_an_age_is_a_number(make):
    with pytest.raises(ValueError, match="max_staleness=True"):
        make([FRESH], batch_size=1, max_staleness=True)
