"""DapoReplayBuffer with several domains: the realised quotas, lending, pauses, and what a step logs of each domain."""

from collections import Counter

import pytest

from tests.unit.trainer.domain_run import Like, Run, shares
from tests.unit.trainer.prompt_groups import MODES

WEIGHTS = {"math": 5.0, "science": 3.0, "chat": 2.0}
SHARES = {"math": 0.5, "science": 0.3, "chat": 0.2}
UNEQUAL = {"math": Like(keep=0.9), "science": Like(keep=0.3), "chat": Like(keep=0.5)}
SLOWER = {"math": Like(keep=0.9), "science": Like(keep=0.5, looks=5), "chat": Like(looks=3)}


@pytest.mark.parametrize("killed_after", [None, 13])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("likes", [UNEQUAL, SLOWER], ids=["keep rates", "latencies"])
def test_the_trained_groups_have_the_shares_of_the_table(monkeypatch, likes, mode, killed_after):
    """What is generated has not: a domain with few useful groups gets more prompts."""
    run = Run(monkeypatch, likes, WEIGHTS, 8, mode=mode, warmup=2)
    taken = []
    for step in range(1, 31):
        taken.append(run.step(step))
        if step == killed_after:
            run.kill_and_resume()
    assert shares(taken) == pytest.approx(SHARES, abs=0.02)
    assert run.metrics["domain/science/run_share"] == pytest.approx(shares(taken)["science"])
    generated = Counter(row["data_source"] for row in run.queue.drawn)
    assert generated["science"] / len(run.queue.drawn) > 0.35


def test_prompts_of_a_step_are_its_quotas_if_all_groups_are_useful(monkeypatch):
    run = Run(monkeypatch, {name: Like() for name in WEIGHTS}, WEIGHTS, 8)
    batches = [run.step(step) for step in range(1, 6)]
    assert sum(batches, Counter()) == {"math": 20, "science": 12, "chat": 8}  # 40 in five steps
    assert len(run.queue.drawn) == 40


def test_a_domain_without_useful_groups_fills_its_own_quota_and_no_other(monkeypatch):
    likes = {"math": Like(), "science": Like(keep=0.0), "chat": Like()}
    for mode in MODES:
        run = Run(monkeypatch, likes, WEIGHTS, 10, mode=mode)
        for step in range(1, 9):
            assert run.step(step) == {"math": 5, "science": 3, "chat": 2}
            assert run.metrics["filter_groups/filled_with_equal"] == run.metrics["domain/science/fillers"] == 3
        assert run.metrics["domain/science/keep_rate"] == 0.0 and run.metrics["domain/math/keep_rate"] == 1.0
        assert not run.domains.spent  # the next batch begins with all that it may generate
        assert len(run.queue.drawn) < 8 * 10 * 4  # `max_num_gen_batches`, of which the two others need one


@pytest.mark.parametrize("mode", MODES)
def test_fillers_do_not_take_the_place_of_slower_domains(monkeypatch, mode):
    likes = {"math": Like(keep=0.4, looks=2), "science": Like(keep=0.0), "chat": Like(keep=0.4, looks=2)}
    run = Run(monkeypatch, likes, WEIGHTS, 10, mode=mode, warmup=2, max_num_gen_batches=4)
    assert [run.step(step)["science"] for step in range(1, 9)] == [3] * 8


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_domain_that_never_ends_holds_up_no_other(monkeypatch, mode):
    """It gets no more prompts than leave a batch of the others, and they are taken in its place."""
    likes = {"math": Like(keep=0.9), "science": Like(looks=10**6), "chat": Like(keep=0.5)}
    run = Run(monkeypatch, likes, WEIGHTS, 8, mode=mode)
    taken = [run.step(step) for step in range(1, 25)]
    assert sum(taken, Counter())["science"] == 0
    assert Counter(row["data_source"] for row in run.queue.drawn)["science"] <= 8


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_slow_domain_gets_back_what_it_lent(monkeypatch, mode):
    likes = {"fast": Like(), "slow": Like(looks=6)}
    run = Run(monkeypatch, likes, {"fast": 1, "slow": 1}, 8, mode=mode, warmup=3)
    taken = [run.step(step) for step in range(1, 31)]
    assert taken[0] == {"fast": 8}  # its groups are not ready
    assert max(each["slow"] for each in taken) > 4
    assert shares(taken)["slow"] == pytest.approx(0.5, abs=0.06)


# Pauses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_judge_pauses_its_domain_alone_until_it_is_back(monkeypatch, mode):
    likes = {"math": Like(), "science": Like(), "chat": Like()}
    run = Run(monkeypatch, likes, WEIGHTS, 10, mode=mode)
    for step in range(1, 4):
        run.step(step)
    likes["chat"].is_down = True
    down = [run.step(step) for step in range(4, 14)]
    assert run.metrics["domain/chat/paused"] == 1 and run.metrics["domain/math/paused"] == 0
    assert 0 < run.metrics["domain/chat/submitted"] <= 2  # to see whether it works again
    assert shares(down[2:])["math"] == pytest.approx(5 / 8, abs=0.02)
    likes["chat"].is_down = False
    back = [run.step(step) for step in range(14, 34)]
    assert run.metrics["domain/chat/paused"] == 0
    assert shares(back[3:]) == pytest.approx(SHARES, abs=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_many_failures_of_one_domain_do_not_end_the_run(monkeypatch, mode):
    """12 of its prompts are under way when its judge fails; 8 failures of all domains would end the run."""
    likes = {"a": Like(), "b": Like(is_down=True, looks=2)}
    run = Run(monkeypatch, likes, {"a": 1, "b": 3}, 8, mode=mode, warmup=1, max_num_gen_batches=1)
    if mode == "sync":
        run.queue.submit(8)
    assert run.step(1) == {"a": 8} and run.metrics["domain/b/groups_failed"] > 8


@pytest.mark.parametrize("mode", MODES)
def test_failures_of_every_domain_end_the_run(monkeypatch, mode):
    likes = {name: Like(is_down=True) for name in WEIGHTS}
    run = Run(monkeypatch, likes, WEIGHTS, 8, mode=mode)
    with pytest.raises(RuntimeError, match="prompt groups of step 1 failed for reasons outside the model"):
        run.step(1)


# Limits and metrics ---------------------------------------------------------------------------------------------------


def test_a_domain_may_have_a_limit_of_its_own_for_staleness(monkeypatch):
    """All rollouts that are submitted before step 5 are of version 3, one behind; the others are of version 4."""
    likes = {"a": Like(versions=(3,)), "b": Like(versions=(3,))}
    run = Run(monkeypatch, likes, {"a": 1, "b": 1}, 8, max_staleness={"b": 0})

    def refill(count):
        likes["b"].versions = (4,)
        return run.queue.submit(count)

    run.buffer.refill_fn = refill
    assert run.step(5) == {"a": 4, "b": 4}
    assert run.metrics["staleness/dropped"] == 8 and run.metrics["staleness/mean"] == 0.5
    assert len(run.queue.drawn) == 12


def test_a_step_of_several_batches_logs_its_domains_once(monkeypatch):
    run = Run(monkeypatch, UNEQUAL, WEIGHTS, 8, mode="separate_async", warmup=2, parameter_sync_step=2)
    run.step(1)
    assert not any(name.startswith("domain/") for name in run.metrics)
    run.step(1)
    named = {name.split("/")[2] for name in run.metrics if name.startswith("domain/math/")}
    assert named == {"share", "run_share", "fillers", "submitted", "groups_failed", "paused", "acc", "keep_rate"}
    assert sum(run.metrics[f"domain/{name}/submitted"] for name in WEIGHTS) == len(run.queue.drawn)
    assert sum(run.metrics[f"domain/{name}/share"] for name in WEIGHTS) == pytest.approx(1.0)


def test_a_bug_pauses_no_domain_and_stops_the_run(monkeypatch):
    run = Run(monkeypatch, {"a": Like(), "b": Like(is_broken=True)}, {"a": 1.0, "b": 1.0}, 4)
    with pytest.raises(RuntimeError, match="raised"):
        run.step(1)
    assert run.domains.paused == {}
