"""A trace, and the reasons to leave one out."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from verl_ext.datasets.text import bare_problem, same_problem_key
from verl_ext.episode import Score
from verl_ext.protocols.trace import PROMPT_ROLES
from verl_ext.records.problem import canonical


class Reason(StrEnum):
    """Why a trace is left out, in the order of the table. `NOT_CHECKED` is the infrastructure's failure."""

    REFUSED = "refused"  # the teacher would not
    CUT_OFF = "cut_off"  # the teacher was at the end of its tokens
    NOT_A_TRACE = "not_a_trace"  # the agent loop would not write it: it is no conversation, or has a call it refuses
    NO_CALL = "no_call"  # fewer calls than wanted
    NO_ANSWER = "no_answer"
    WRONG_ANSWER = "wrong_answer"
    NO_GOLD = "no_gold"  # nobody knows whether its answer is right
    TOO_LONG = "too_long"
    OVERLAP = "overlap"  # with an evaluation set
    LITERAL_ONLY = "literal_only"  # its programs compute nothing
    OUTPUT_DIFFERS = "output_differs"
    NOT_DETERMINISTIC = "not_deterministic"  # a program says something else each time
    PROGRAM_FAILED = "program_failed"  # a teacher's program raised, or took too long
    FORGED_OUTPUT = "forged_output"  # a teacher wrote another output than its program has
    CONTRADICTS_OUTPUT = "contradicts_output"  # its text states another number than the program printed
    NUMBER_CHANGED = "number_changed"  # a teacher changed a number that was to stay
    TEXT_CHANGED = "text_changed"  # a teacher changed text that was to stay
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    DISAGREEMENT = "disagreement"  # too few samples reach the gold
    TOO_MANY = "too_many"  # of its problem
    BALANCE = "balance"  # of its source
    NOT_CHECKED = "not_checked"  # sandbox, tool or verifier failed; the next start tries again


@dataclass(eq=False)
class LeftOut(Exception):
    """A trace is left out. Raised by the checks, each of which says why."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class Unread(NamedTuple):
    """What was to be a trace and is none, and why."""

    id: str
    source: str
    why: LeftOut


@dataclass
class Trace:
    """A conversation that SFT can learn from.

    Attributes:
        id: names it in messages.
        source: the file or the run that it came from.
        messages: of the prompt, then the assistant's with the tools' answers, in a form of protocols/trace.py.
        tools: their schemas; None: the interpreter only.
        task: what environment and verifier read of a row: `data_source`, `ability`, `reward_model`, `extra_info`.
        about: what is known of its maker.
        score: how the run that it came from judged its answer; None: it is not judged.
    """

    id: str
    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    task: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    score: Score | None = None

    @cached_property
    def prompt(self) -> list[dict[str, Any]]:
        """Return the messages before the assistant's first."""
        ends = (i for i, message in enumerate(self.messages) if message.get("role") not in PROMPT_ROLES)
        return self.messages[: next(ends, len(self.messages))]

    @cached_property
    def problem(self) -> str:
        """Return what the user asks, without the instructions of known data sets."""
        asked = [message.get("content") for message in self.prompt if message.get("role") == "user"]
        return bare_problem(asked[-1]) if asked and isinstance(asked[-1], str) else ""

    @property
    def gold(self) -> Any:
        return (self.task.get("reward_model") or {}).get("ground_truth")

    @cached_property
    def problem_key(self) -> str:
        """Return a text that is equal for traces of one problem: its question, data source, and gold."""
        gold = "" if self.gold is None else canonical(self.gold)
        return "\n".join((same_problem_key(self.problem), str(self.task.get("data_source") or ""), gold))
