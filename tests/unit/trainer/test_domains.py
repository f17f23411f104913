"""Quotas of the trained batch, the choice of each prompt's domain, and pauses."""

import itertools
import logging
from collections import Counter

import pytest

from verl_ext.trainer.domains import ONLY, PAUSE_AFTER, PROBE_EVERY_S, Domains, Quotas


def taken_in_turn(quotas, size, batches):
    """Let every batch be what the quotas want."""
    wanted = []
    for _ in range(batches):
        wanted.append(quotas.wanted(size))
        quotas.settle(wanted[-1])
    return wanted


def test_what_rounding_takes_from_a_domain_it_gets_in_a_later_batch():
    """10 at 2:1 is 6.67 + 3.33; the second domain lacks 0.33, and 3.33 + 0.33 = 3.67; then 3.33 - 0.33."""
    wanted = taken_in_turn(Quotas({"a": 2, "b": 1}), 10, 3)
    assert wanted == [{"a": 7, "b": 3}, {"a": 6, "b": 4}, {"a": 7, "b": 3}]


def test_a_quota_of_less_than_a_group_is_a_group_of_every_so_many_batches():
    """8 x 0.02 = 0.16: a group every 6.25 batches, and 16 of 100."""
    wanted = taken_in_turn(Quotas({"rare": 1, "other": 49}), 8, 100)
    assert sum(each["rare"] for each in wanted) == 16 and all(sum(each.values()) == 8 for each in wanted)
    assert max(each["rare"] for each in wanted) == 1


def test_what_a_domain_lends_comes_back():
    quotas = Quotas({"fast": 1, "slow": 1})
    quotas.settle({"fast": 7, "slow": 1})
    assert quotas.wanted(8) == {"fast": 1, "slow": 7}  # 4 - 3, 4 + 3
    quotas.settle({"fast": 4, "slow": 4})  # slow has no more than its half ready
    assert quotas.wanted(8) == {"fast": 1, "slow": 7}


def test_a_debt_is_at_most_two_batches():
    quotas = Quotas({"a": 3, "dead": 1})
    for _ in range(50):
        quotas.settle({"a": 8})
    assert quotas.state_dict() == {"a": -13.0, "dead": 5.0}  # 2 x 6 + 1 and 2 x 2 + 1
    assert sum(each["dead"] for each in taken_in_turn(quotas, 8, 5)) - 5 * 2 <= 5 + 13


def test_a_domain_of_weight_0_has_no_quota_and_quotas_of_one_domain_are_the_batch():
    assert Quotas({"a": 1, "val only": 0}).wanted(5) == {"a": 5}
    assert Quotas({ONLY: 1.0}).wanted(7) == {ONLY: 7}


def test_a_paused_domain_earns_nothing_and_owes_nothing():
    quotas = Quotas({"a": 1, "b": 1, "c": 2})
    quotas.settle({"a": 4, "c": 4})
    quotas.forgive("b")
    assert quotas.shares(paused=["b"]) == {"a": 1 / 3, "c": 2 / 3}
    quotas.settle({"a": 3, "b": 2, "c": 3}, paused=["b"])  # two groups of it were ready
    assert quotas.state_dict()["b"] == 0.0
    assert quotas.wanted(9, paused=["b"]).keys() == {"a", "c"}


def test_credits_outlive_a_checkpoint_and_a_change_of_the_table():
    quotas = Quotas({"a": 2, "b": 1})
    quotas.settle({"a": 10})
    resumed = Quotas({"a": 2, "b": 1})
    resumed.load_state_dict(quotas.state_dict())
    assert resumed.wanted(10) == quotas.wanted(10) == {"a": 3, "b": 7}
    changed = Quotas({"b": 1, "new": 1})
    changed.load_state_dict(quotas.state_dict())
    assert changed.wanted(10)["new"] == 4  # 5 + 3.33 and 5, of 10


# The next prompt ------------------------------------------------------------------------------------------------------


NUMBERS = itertools.count()


def drawn(domains, number, ready=(), step=1):
    """Draw prompts one after the other."""
    for _ in range(number):
        domains.add(f"uid-{next(NUMBERS)}", domains.choose(Counter(ready), step))
    return dict(Counter(domains.in_queue.values()))


def test_the_first_prompts_of_a_step_are_its_quotas():
    domains = Domains({"a": 5, "b": 2, "c": 1}, batch_size=16)
    assert drawn(domains, 16) == {"a": 10, "b": 4, "c": 2}


def test_a_domain_with_few_useful_groups_gets_more_prompts():
    """1 of 4 groups is useful: for as many useful ones it needs four times the prompts."""
    domains = Domains({"a": 1, "b": 1}, batch_size=8)
    domains.keep_rates["b"] = 0.25
    assert drawn(domains, 40) == {"a": 8, "b": 32}


def test_a_group_that_is_ready_counts_whole():
    domains = Domains({"a": 1, "b": 1}, batch_size=8)
    domains.keep_rates |= {"a": 0.5, "b": 0.5}
    for i in range(4):
        domains.add(f"ready-{i}", "a")
    assert drawn(domains, 10, ready={"a": 4}) == {"a": 4 + 1, "b": 9}  # 4 + 0.5 x 1, and 0.5 x 9


def test_a_domain_that_is_owed_groups_does_not_displace_the_others():
    domains = Domains({"a": 1, "dead": 1}, batch_size=8)
    for _ in range(50):
        domains.settle({"a": 8})
    assert domains.wanted(8) == {"a": 0, "dead": 8}
    assert drawn(domains, 20) == {"a": 8, "dead": 12}  # a batch of 8 remains for the others


def test_prompts_that_are_asked_for_by_name_come_from_that_domain():
    domains = Domains({"a": 1, "b": 1}, batch_size=4)
    with domains.only("b"):
        assert drawn(domains, 3) == {"b": 3}
    assert domains.choose({}, 1) == "a"


def test_the_expected_share_of_useful_groups_is_each_domains_own():
    domains = Domains({"a": 1, "b": 1})
    domains.learn("a", 0.0)
    domains.learn("a", 0.5)
    assert domains.keep_rates == {"a": pytest.approx(0.525), "b": 1.0}  # (1 + 0.1) / 2, and half way to 0.5
    resumed = Domains({"a": 1, "b": 1})
    resumed.load_state_dict(domains.state_dict())
    assert resumed.keep_rates == domains.keep_rates


# Pauses ---------------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def paused():
    """Domain b of two, whose judge is down since step 3; the clock."""
    clock = Clock()
    domains = Domains({"a": 1, "b": 1}, batch_size=4, clock=clock)
    domains.settle({"a": 1, "b": 3})
    for _ in range(PAUSE_AFTER):
        domains.ended("b", True, "verifier_unknown 8", step=3)
    return domains, clock


def test_a_domain_is_paused_by_name_after_failures_in_a_row(caplog):
    domains = Domains({"a": 1, "b": 1}, batch_size=4)
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.domains"):
        for failed in (*[True] * (PAUSE_AFTER - 1), False, *[True] * (PAUSE_AFTER - 1)):
            domains.ended("b", failed, "verifier_unknown 8", step=3)
        assert not domains.paused and not caplog.text
        domains.ended("b", True, "verifier_unknown 8", step=3)
    assert domains.paused == {"b": "verifier_unknown 8"}
    assert "step 3: domain b is paused because 4 of its prompt groups in a row failed" in caplog.text
    assert "(verifier_unknown 8)" in caplog.text
    assert domains.wanted(4) == {"a": 4} and drawn(domains, 4, step=3) == {"a": 4}


def test_a_paused_domain_gets_one_prompt_a_step_or_each_half_minute_while_none_is_under_way(paused):
    domains, clock = paused
    assert drawn(domains, 9, step=3) == {"a": 9}
    assert drawn(domains, 9, step=4) == {"a": 17, "b": 1}
    clock.now += 2 * PROBE_EVERY_S
    assert drawn(domains, 9, step=5) == {"a": 26, "b": 1}  # that one still runs
    domains.forget([uid for uid, name in domains.in_queue.items() if name == "b"])
    assert drawn(domains, 2, step=5)["b"] == 1
    domains.forget([uid for uid, name in domains.in_queue.items() if name == "b"])
    clock.now += PROBE_EVERY_S - 1
    assert "b" not in drawn(domains, 2, step=5)
    clock.now += 1
    assert drawn(domains, 2, step=5)["b"] == 1


def test_a_prompt_that_succeeds_resumes_its_domain(paused, caplog):
    domains, _ = paused
    domains.ended("b", True, "verifier_unknown 8", step=4)
    assert domains.paused
    domains.ended("b", False, "", step=5)
    assert not domains.paused and domains.wanted(4) == {"a": 2, "b": 2}
    assert "step 5: domain b works again" in caplog.text


def test_the_last_domain_is_never_paused(paused):
    """So failures of everything end the run with the sampler's error."""
    domains, _ = paused
    for _ in range(100):
        domains.ended("a", True, "sandbox_failure 8", step=3)
    assert [*domains.paused] == ["b"] and domains.wanted(4) == {"a": 4}
    alone = Domains({ONLY: 1.0})
    for _ in range(100):
        alone.ended(ONLY, True, "sandbox_failure 8", step=3)
    assert not alone.paused
