"""The settings under `reward.reward_kwargs`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from verl_ext.objectives.shaping import PIECEWISE, overlong_penalty, piecewise_length_penalty
from verl_ext.reward.terms import Term, read_terms


@dataclass(frozen=True)
class RewardOptions:
    """The settings under `reward.reward_kwargs`; the first three names are those of verl's DAPO manager.

    The plain reward is +1 for a right answer and -1 otherwise (2 acc - 1 if a verifier gives a share). DAPO adds the
    overlong penalty to it, so that the sum lies in [-2, 1]: a wrong answer that is too long is worse than another.

    Attributes:
        max_resp_len: tokens, L_max of DAPO's Eq. 13; None takes `data.max_response_length`.
        overlong_buffer: tokens, L_cache of Eq. 13 (`overlong_buffer_cfg.len`); None turns the penalty off.
        overlong_factor: weight of the penalty (`overlong_buffer_cfg.penalty_factor`).
        overlong_counts: "response" counts all response tokens, as DAPO does; "model" leaves tool output out. It holds
            for both length penalties.
        length_penalty: points (tokens, penalty) of `shaping.piecewise_length_penalty`; in a YAML "piecewise" stands for
            its default ones. None adds no penalty.
        tool_bonus: the published run's, not the paper's: a wrong answer gets 0.1 per tool call, up to -0.6 in all.
        reward_floor: the reward is never below this; None (DAPO) sets no floor.
        random_reward_p: control experiment. The trained reward is +1 with this probability whatever the response,
            drawn by a hash of the sample; `acc` stays the truth. A policy must not improve with it.
        random_reward_seed: another seed draws other random rewards.
        unverified_dir: folder for responses that could not be verified, to be graded again; None keeps none.
        verifiers: pattern of `data_source` or `ability` -> verifier; see verifiers/__init__.py.
        terms: functions of your own that the reward adds; see terms.py.
    """

    max_resp_len: int
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    overlong_counts: str = "response"
    length_penalty: Sequence[tuple[float, float]] | None = None
    tool_bonus: bool = False
    reward_floor: float | None = None
    random_reward_p: float | None = None
    random_reward_seed: int = 0
    unverified_dir: str | None = None
    verifiers: Mapping[str, Any] | None = None
    terms: tuple[Term, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RewardOptions":
        """Read `reward.reward_kwargs` of a whole verl config.

        Raises:
            ValueError: a key means nothing here (Hydra would accept it silently), a value is out of range, or a
                function of `terms` cannot be imported.
        """
        settings = dict(config["reward"].get("reward_kwargs") or {})
        buffer_cfg = dict(settings.pop("overlong_buffer_cfg", None) or {})
        known = {field.name for field in fields(cls)} - {"overlong_buffer", "overlong_factor"}
        # `log` is verl's: here the penalty is always logged, as reward_overlong.
        unknown_cfg = buffer_cfg.keys() - {"enable", "len", "penalty_factor", "log"}
        if unknown := settings.keys() - known | {f"overlong_buffer_cfg.{key}" for key in unknown_cfg}:
            raise ValueError(
                f"Unknown settings under reward.reward_kwargs: {', '.join(sorted(unknown))}. Expected some of "
                f"{', '.join(sorted(known))}, overlong_buffer_cfg.{{enable,len,penalty_factor,log}}."
            )
        if settings.get("max_resp_len") is None:
            settings["max_resp_len"] = config["data"]["max_response_length"]
        if buffer_cfg.get("enable", False):
            buffer, max_length = buffer_cfg.get("len") or 0, settings["max_resp_len"]
            overlong_penalty(torch.tensor([0]), max_length=max_length, buffer=buffer)  # raises here, at start-up
            settings |= {"overlong_buffer": buffer, "overlong_factor": buffer_cfg.get("penalty_factor", 1.0)}
        points = settings.get("length_penalty")
        if isinstance(points, str) and points != "piecewise":
            raise ValueError(
                f"length_penalty is {points!r}: expected 'piecewise', [[tokens, penalty], ...], or null for none."
            )
        if points is not None:
            settings["length_penalty"] = PIECEWISE if points == "piecewise" else tuple(map(tuple, points))
            piecewise_length_penalty(torch.tensor([0]), settings["length_penalty"])  # raises here, at start-up
        settings["terms"] = read_terms(settings.get("terms"))
        options = cls(**settings)
        if options.overlong_counts not in ("response", "model"):
            raise ValueError(f"overlong_counts is {options.overlong_counts!r}: expected 'response' or 'model'.")
        if options.random_reward_p is not None and not 0.0 <= options.random_reward_p <= 1.0:
            raise ValueError(f"random_reward_p is {options.random_reward_p}: expected a probability, or null.")
        return options
