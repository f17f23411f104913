"""How a rollout and a prompt end, and who was at fault. All other modules take these words from here.

One fact has one name in the code: `RolloutEnd.UNVERIFIED` is an answer that no verifier could judge. Files of users'
runs spell this end in three ways, which stay: "verifier_unknown" (its value: records, names of metrics), `UNVERIFIED`
(a part of the reward, a count of an evaluation's result) and `UNVERIFIED_VERDICT` (`verdict` of a score).
`RolloutEnd.ABORTED` is `SERVER_FAILURE` in the result of an evaluation.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """Who is at fault if a rollout or a call did not end well. Whatever the model can cause is the model's fault."""

    NONE = "none"
    MODEL = "model"  # data: the model reads what was wrong, and the rollout is scored
    INFRASTRUCTURE = "infrastructure"  # sandbox, verifier, server: tried again, then excluded, never scored as wrong
    OURS = "ours"  # a bug of this package or of a tool: raised


class RolloutEnd(StrEnum):
    """Why a rollout ended, and whose fault it is: `finish_reason` of the agent loop and of the trajectories, `finish/*`
    of the metrics."""

    ANSWER = "answer", Fault.NONE  # the model ended a turn without a call
    MAX_TURNS = (
        "max_turns",
        Fault.MODEL,
    )  # one call over `retool.max_tool_calls`, a request over `agent.max_turns`
    MAX_TOKENS = "max_tokens", Fault.MODEL  # the response is full
    MALFORMED_LIMIT = "malformed_limit", Fault.MODEL  # calls that could not be run: more than `max_malformed_calls`
    TIMEOUT = "timeout", Fault.MODEL  # calls or agent took longer than `retool.turn_s`, `episode_s`, `agent.timeout_s`
    AGENT_ERROR = "agent_error", Fault.MODEL  # an agent crashed after an answer, which may have caused it; scored
    SANDBOX_FAILURE = "sandbox_failure", Fault.INFRASTRUCTURE  # sandbox or tool did not answer a call
    UNVERIFIED = "verifier_unknown", Fault.INFRASTRUCTURE  # no verifier could judge the answer, whatever it was
    ABORTED = "aborted", Fault.INFRASTRUCTURE  # the rollout server failed or gave the request up
    RAISED = "raised", Fault.OURS  # an exception: nothing of the rollout is stored, nothing of its group is trained on

    fault: Fault

    def __new__(cls, name: str, fault: Fault) -> "RolloutEnd":
        end = str.__new__(cls, name)
        end._value_, end.fault = name, fault
        return end


class PromptEnd(StrEnum):
    """What becomes of a prompt, that is of the group of its rollouts. A group is useful if its answers differ."""

    OPEN = "open"  # not decided: rollouts still run, or the group is useful and no batch has taken it yet
    TRAINED = "trained"  # useful, and taken by a batch
    EQUAL = "equal"  # all right or all wrong: replaced; a filler, with advantage 0, if groups are missing
    VOID = "void"  # too many of its rollouts have void turns (`void_turn_filter`) to train: replaced or a filler
    FAILED = "failed"  # infrastructure failed so many of its rollouts, or one raised: replaced, never trained
    STALE = "stale"  # useful, but written by weights that were too old when a batch had room: replaced
    SURPLUS = "surplus"  # useful, but the batch was full: dropped, or kept for the next step (`keep_surplus`)


class RolloutFate(StrEnum):
    """What becomes of a rollout. A reason follows FILTERED and FAILED: `failed/sandbox_failure`, `filtered/equal`."""

    TRAINED = "trained"  # in the loss
    FILTERED = "filtered"  # why: the end of its group, or VOID_TURN, or RESAMPLING
    STALE = "stale"  # a token of it, or its group, was too old
    FAILED = "failed"  # why: the RolloutEnd; if one rollout raised, its whole group counts as raised


RESAMPLING = "resampling"  # the sampler's option `resample` kept others of its group

UNVERIFIED = "unverified"
UNVERIFIED_VERDICT = "unknown"
SERVER_FAILURE = "server_failure"
_EVALUATION_NAMES = {
    RolloutEnd.SANDBOX_FAILURE: "sandbox_failure",
    RolloutEnd.ABORTED: SERVER_FAILURE,
    RolloutEnd.UNVERIFIED: UNVERIFIED,
}
EVALUATION_FAILURES = tuple(_EVALUATION_NAMES.values())  # of `evaluation_failure`, as tables and result.json list them

INFRASTRUCTURE_FAILURES = tuple(end for end in RolloutEnd if end.fault is Fault.INFRASTRUCTURE)
VOID_TURN = "void_turn"  # the model's own fault; the option `void_turn_filter` excludes such rollouts
STOPS_RUN = "stops_run"  # tag of a rollout in verl's queue: the sentence with which the trainer ends the run
EXCLUSIONS = (*INFRASTRUCTURE_FAILURES, VOID_TURN, RolloutEnd.RAISED)  # why a rollout is kept out of training

REMEDIES = {
    RolloutEnd.SANDBOX_FAILURE: "Start the sandbox (the agent loop's warnings show its answers)",
    RolloutEnd.UNVERIFIED: "See the reward manager's warnings for what could not be verified",
    RolloutEnd.ABORTED: "See the log of the rollout servers",
    VOID_TURN: "Set trainer.v1.sampler.sampler_kwargs.void_turn_filter=false, which trains on such rollouts",
    RolloutEnd.RAISED: "Fix the error that the log reports as 'Error in _run_prompt'",
}

_ENDS = {str(end): end for end in RolloutEnd} | {name: end for end, name in _EVALUATION_NAMES.items()}


def rollout_end(info: Mapping[str, Any]) -> str:
    """Return why a rollout ended: a `RolloutEnd`, or the reason that another project's loop or reward manager gives.

    A failure in the loop takes precedence over one of the verifier, which then got a truncated response.

    Args:
        info: `reward_extra_info` of verl_ext/reward/rewarder.py, or of another manager with the loop's `finish_reason`;
            or a row of verl's dumps.
    """
    if info.get("sandbox_failure"):
        return RolloutEnd.SANDBOX_FAILURE
    reason = str(info.get("finish_reason") or "")
    end = _ENDS.get(reason, reason)
    return RolloutEnd.UNVERIFIED if info.get(UNVERIFIED) and end not in INFRASTRUCTURE_FAILURES else end


def infrastructure_failure(info: Mapping[str, Any]) -> RolloutEnd | None:
    """Return the infrastructure failure that kept a rollout from being judged, or None. `info`: see `rollout_end`."""
    end = rollout_end(info)
    return RolloutEnd(end) if end in INFRASTRUCTURE_FAILURES else None


def evaluation_failure(info: Mapping[str, Any]) -> str | None:
    """Return `infrastructure_failure` as an evaluation's result spells it: one of EVALUATION_FAILURES, or None."""
    failure = infrastructure_failure(info)
    return None if failure is None else _EVALUATION_NAMES[failure]
