"""The settings of our sampler, `trainer.v1.sampler.sampler_kwargs`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class SamplerSettings:
    """What `sampler.DapoReplayBuffer` is told.

    Attributes:
        poll_interval_s: between two looks at the queue.
        filter_groups: verl's `algorithm.filter_groups`, of which `metric` is the key of `reward_extra_info` whose
            equality makes a group useless (`score`: the sum of all terms of the reward), and `max_num_gen_batches` the
            most prompts of a step, in train batches.
        void_turn_filter: whether a rollout with a turn that has neither code nor answer is left out like a failed one
            (true), only left out of the loss ("loss": it stays in the baseline, as in SimpleTIR, arXiv:2509.02479), or
            trained on (false).
        resample: whether twice the responses are generated and half of them kept, and how ("paper" or "code":
            objectives/grpo_roc.py); None: no.
        max_staleness: how many versions the oldest token of a response may be behind the servers' weights. An older
            response is left out like a failed one, even if it aged while its group waited. None: no limit.
        keep_surplus: whether useful groups that a step of the mode `sync` did not need wait for the next one, as long
            as verl's `max_off_policy_threshold` allows: each step adds a version, and 1 allows none. No checkpoint
            contains them: after a resume their prompts come again in the next epoch.
    Raises:
        ValueError: `max_num_gen_batches` is below 1, or another setting has a value that is not allowed.
    """

    poll_interval_s: float
    filter_groups: Mapping[str, Any]
    void_turn_filter: bool | str
    resample: str | None = None
    max_staleness: int | None = None
    keep_surplus: bool | None = False

    def __post_init__(self) -> None:
        if self.max_gen_batches < 1:
            raise ValueError(
                f"algorithm.filter_groups.max_num_gen_batches is {self.max_gen_batches}; expected at least 1, the "
                "number of batches that a step may generate before it takes what it has."
            )
        is_known = type(self.void_turn_filter) is bool or self.void_turn_filter == "loss"
        is_known &= self.resample in (None, "paper", "code")
        if not is_known or (self.resample and self.void_turn_filter is True):  # with both, too few could be left
            got = f"void_turn_filter={self.void_turn_filter!r}, resample={self.resample!r}"
            expected = "void_turn_filter=false, true or loss and resample=null, paper or code; resample excludes true"
            raise ValueError(f"sampler_kwargs has {got}; expected {expected}.")
        is_age = type(self.max_staleness) is int and self.max_staleness >= 0 and not self.resample
        if self.max_staleness is not None and not is_age:
            got = f"max_staleness={self.max_staleness!r}, resample={self.resample!r}"
            raise ValueError(f"sampler_kwargs has {got}; expected max_staleness=null, or 0, 1, ... without resample.")

    @property
    def filter_metric(self) -> str | None:
        return self.filter_groups["metric"] if self.filter_groups["enable"] else None

    @property
    def max_gen_batches(self) -> int:
        return self.filter_groups["max_num_gen_batches"]

    @property
    def generated_for_one(self) -> int:
        """Responses that are generated for each response of a batch."""
        return 2 if self.resample else 1

    def check_ages(self, threshold: int | None, strategy: str) -> None:
        """Refuse to keep surplus groups that would never be too old by verl's `max_off_policy_*` settings."""
        if self.keep_surplus and (strategy != "drop" or threshold is None):
            raise ValueError(
                f"sampler_kwargs has keep_surplus=true and max_off_policy_strategy={strategy!r}, max_off_policy_"
                f"threshold={threshold!r}, so no group is ever too old; expected drop, and a number."
            )


SAMPLER_KEYS = frozenset(each.name for each in fields(SamplerSettings))
