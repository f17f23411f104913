"""The prompts of a run with domains: their order, their state in a checkpoint, and what the curriculum leaves out."""

import copy
import logging
from collections import Counter

import pytest

from verl_ext.settings import Curriculum as Settings
from verl_ext.trainer.curriculum import Curriculum
from verl_ext.trainer.domains import Domains
from verl_ext.trainer.loader import DomainLoader

ROWS = {"a": [0, 2, 4, 6, 8], "b": [1, 3, 5]}


def make(rows=ROWS, seed=1, curriculum=None, weights=None):
    domains = Domains(weights or dict.fromkeys(rows, 1.0), batch_size=4)
    dataset = [f"row {i}" for i in range(1 + max(max(numbers) for numbers in rows.values()))]
    choose = lambda: domains.choose({}, 1)  # noqa: E731
    loader = DomainLoader(
        dataset, lambda rows: {"row": rows}, rows, domains=domains, choose=choose, seed=seed, curriculum=curriculum
    )
    return loader, domains


def draw(loader, domains, number, start=0):
    """Draw prompts; every four are a batch."""
    rows = []
    for i in range(start, start + number):
        rows += next(loader)["row"]
        loader.name(f"uid-{i}")
        if len(domains.in_queue) == 4:
            domains.settle(Counter(domains.in_queue.values()))
            domains.forget([*domains.in_queue])
    return rows


def test_every_epoch_has_each_row_of_a_domain_once_in_an_order_of_its_own():
    loader, domains = make({"a": range(6)})
    rows = draw(loader, domains, 18)
    epochs = [rows[:6], rows[6:12], rows[12:]]
    assert all(sorted(epoch) == [f"row {i}" for i in range(6)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert draw(*make({"a": range(6)}), 18) == rows != draw(*make({"a": range(6)}, seed=2), 18)
    assert draw(*make({"a": range(3)}, seed=None), 6) == ["row 0", "row 1", "row 2"] * 2


def test_an_iterator_of_verls_trainer_never_ends():
    loader, _ = make()
    assert iter(loader) is loader


def test_rows_come_from_the_domain_that_is_chosen_and_are_named_after_it():
    loader, domains = make(weights={"a": 3.0, "b": 1.0})
    for i in range(8):
        row = int(next(loader)["row"][0].removeprefix("row "))
        loader.name(f"uid-{i}")
        assert row in ROWS[domains.of(f"uid-{i}")]
    assert Counter(domains.in_queue.values()) == domains.submitted == {"a": 6, "b": 2}


@pytest.mark.parametrize("at", [0, 4, 8, 12])
def test_a_resumed_run_draws_what_the_run_would_have_drawn(at):
    loader, domains = make(weights={"a": 2.0, "b": 1.0})
    draw(loader, domains, at)
    state = copy.deepcopy(loader.state_dict())
    resumed = make(weights={"a": 2.0, "b": 1.0})
    resumed[0].load_state_dict(state)
    assert draw(*resumed, 12, at) == draw(loader, domains, 12, at)


def test_a_domain_that_has_other_rows_now_begins_anew_and_says_so(caplog):
    loader, domains = make()
    draw(loader, domains, 4)
    more, _ = make({"a": ROWS["a"], "b": [1, 3, 5, 7], "new": [9]})
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.loader"):
        more.load_state_dict(loader.state_dict())
    assert "domain b has 4 rows, but 3 in the checkpoint" in caplog.text and "domain a" not in caplog.text
    orders = more.state_dict()["orders"]
    assert [orders[name]["at"] for name in ("a", "b", "new")] == [2, 0, 0]
    more.load_state_dict(None)  # as verl_ext/checkpoints tells a loader of a data set of another size
    assert more.state_dict()["orders"] == orders


def test_a_checkpoint_notes_the_data_set_as_it_does_that_of_verls_loader():
    from verl_ext.checkpoints.course import Course

    course = Course.of(make()[0], 1, None)
    assert (course.rows, course.rows_per_step) == (9, 1)


def test_a_checkpoint_of_verls_own_loader_is_not_read(caplog):
    loader, _ = make()
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.loader"):
        loader.load_state_dict({"_snapshot": {}, "_steps_since_snapshot": 3})
    assert "without domains or curriculum" in caplog.text
    assert loader.state_dict() == make()[0].state_dict()


# Curriculum -----------------------------------------------------------------------------------------------------------


def curriculum(sizes, easy_share=0.0, hard_share=0.0, seed=1):
    numbers = {"easy_above": 1.0, "hard_below": 0.0}
    return Curriculum(Settings(**numbers, easy_share=easy_share, hard_share=hard_share), sizes, seed)


def test_solved_and_hopeless_problems_are_left_out_and_others_always_come():
    pools = curriculum({"a": 4})
    loader, domains = make({"a": range(4)}, curriculum=pools)
    accs = {"row 0": [1, 1], "row 1": [0, 1], "row 2": [0, 0], "row 3": []}  # of the last one, all rollouts failed
    first = draw(loader, domains, 4)
    for i, row in enumerate(first):
        pools.observe(f"uid-{i}", accs[row])
    assert sorted(draw(loader, domains, 4, start=4)) == ["row 1", "row 1", "row 3", "row 3"]


def test_the_shares_are_those_of_the_epochs_and_repeat_with_the_seed():
    def epochs(seed):
        pools = curriculum({"a": 1}, easy_share=0.25, seed=seed)
        pools.drawn("uid", "a", 0)
        pools.observe("uid", [1.0])
        return [pools.is_drawn("a", 0, epoch) for epoch in range(2000)]

    assert sum(epochs(1)) == pytest.approx(500, abs=80)  # 4 standard deviations of 19
    assert epochs(1) == epochs(1) != epochs(2)


def test_the_newest_group_decides():
    pools = curriculum({"a": 1})
    for accs, pool in (([1, 1], "easy"), ([0, 1], "middle"), ([0, 0], "hard")):
        pools.drawn("uid", "a", 0)
        pools.observe("uid", accs)
        assert pools.pool("a", 0) == pool


def test_a_domain_that_is_solved_still_gives_a_prompt():
    pools = curriculum({"a": 3})
    loader, domains = make({"a": range(3)}, curriculum=pools)
    for i in range(6):
        draw(loader, domains, 1, start=i)
        pools.observe(f"uid-{i}", [1, 1])


def test_what_was_learned_and_what_is_under_way_are_in_the_checkpoint():
    pools = curriculum({"a": 5, "b": 3})
    loader, domains = make(curriculum=pools)
    draw(loader, domains, 4)
    for i in range(3):
        pools.observe(f"uid-{i}", [1, 1])
    state = copy.deepcopy(loader.state_dict())
    again = curriculum({"a": 5, "b": 3})
    resumed, resumed_domains = make(curriculum=again)
    resumed.load_state_dict(state)
    for each in (pools, again):
        each.observe("uid-3", [0, 0])
    assert draw(resumed, resumed_domains, 8, 4) == draw(loader, domains, 8, 4)
    assert again.state_dict() == pools.state_dict()


def test_a_domain_that_had_no_weight_or_has_none_now_is_resumed_without_its_pools():
    """Of the run's domains b has prompts, but none is drawn; then a has none, with prompts under way."""
    had, has = curriculum({"a": 5}), curriculum({"c": 2})
    had.drawn("uid-0", "a", 0)
    had.observe("uid-0", [1, 1])
    had.drawn("uid-1", "a", 1)
    again = curriculum({"a": 5})
    again.load_state_dict(had.state_dict(), ["a", "b"])
    assert again.state_dict() == had.state_dict()
    has.load_state_dict(had.state_dict(), ["a", "b", "c"])
    has.observe("uid-1", [1, 1])
    assert has.state_dict() == {"rates": {"c": {}}, "in_flight": {}}


def test_a_step_reports_the_pools():
    from verl_ext.events import Ended

    pools = curriculum({"a": 5, "b": 3})
    loader, domains = make(curriculum=pools)
    draw(loader, domains, 4)
    metrics = pools.on_ended(Ended(1, accs={"uid-0": [1.0], "uid-1": [0.0], "uid-2": [0.0, 1.0], "uid-9": [1.0]}))
    of_a = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("curriculum/a/")}
    assert of_a == {"easy": 1, "middle": 1, "hard": 0, "untried": 3}  # a, b, a, b were drawn
    assert metrics["curriculum/b/hard"] == 1 and metrics["curriculum/left_out"] == 0
    assert "curriculum/easy" in curriculum({"": 3}).on_ended(Ended(1))
