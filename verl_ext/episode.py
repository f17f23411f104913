"""One response of a model to one prompt, from its first token to its record: `Episode`, and `EpisodeKey`, its name.

The agent loop makes an episode (rollout/loop.py), and a reward manager adds the reward (reward/rewarder.py). Three
functions encode it: `to_outputs` (rollout/rows.py) for verl's queue, `from_row` here for the trainer, which reads it
from there, and `to_record` (records/trajectories.py) for the run's records.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import msgspec

from verl_ext.outcome import UNVERIFIED_VERDICT, RolloutEnd, rollout_end

Span = tuple[int, int, int | None]  # tokens [start, end) of a response, and the version of the weights that wrote them

_COPY = 1_000_000  # what verl's spelling of a session adds for each copy: verl sorts sessions as integers


@dataclass(frozen=True, order=True)
class EpisodeKey:
    """The name of one row of an episode in verl's queue: its prompt, its place in the group, its place in the episode.

    `str` and `parse` are the only code that knows verl's spelling, `{uid}_{session}_{row}`
    (trainer/ppo/v1/agent_loop_tq.py:178, 0.9.1).

    Attributes:
        uid: of one draw of a prompt, and so of its group.
        session: number of the episode in its group.
        copy: 0; a copy that fills a group in place of an excluded episode has another number.
        row: number of the row in the episode. Most episodes have one.
    """

    uid: str
    session: int
    copy: int = 0
    row: int = 0

    def __str__(self) -> str:
        return f"{self.uid}_{self.session + _COPY * self.copy}_{self.row}"

    @classmethod
    @lru_cache(maxsize=2**16)  # a step looks at each key several times
    def parse(cls, text: str) -> "EpisodeKey":
        """Read verl's spelling.

        Raises:
            ValueError: the text is no key of a row; the key of a prompt, for one, is its uid alone.
        """
        uid, *numbers = text.rsplit("_", 2)
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise ValueError(f"{text!r} names no episode; expected UID_SESSION_ROW, with numbers for the last two.")
        copy, session = divmod(int(numbers[0]), _COPY)
        return cls(uid, session, copy, int(numbers[1]))

    @staticmethod
    def uid_of(text: str) -> str:
        """Return the uid in a key of verl's queue, whether it is a row's or a prompt's."""
        return text.rsplit("_", 2)[0]

    @property
    def episode(self) -> "EpisodeKey":
        """Return the name of the episode or copy: that of its first row."""
        return replace(self, row=0) if self.row else self

    @property
    def original(self) -> "EpisodeKey":
        """Return the name of the episode that was rolled out, also for a copy of it."""
        return replace(self, copy=0, row=0) if self.copy or self.row else self


@dataclass(frozen=True)
class CallResult:
    """What a tool said. `failure` names the infrastructure failure that kept the tool from saying anything.

    `stdout`, `stderr` and `exit_code` are a program's; None for other tools. `ends` says why the episode ends with this
    call; the model does not read `output` then.
    """

    output: str
    error: str | None = None  # kind of error; None if the call ended well
    failure: str | None = None
    queue_s: float = 0.0
    run_s: float = 0.0
    attempts: int = 1
    replays: int = 0  # of all earlier calls, because the server of a notebook was lost
    stdout: str | None = None
    stderr: str | None = None
    exit_code: int | None = None
    ends: RolloutEnd | None = None

    @property
    def complaint(self) -> str:
        """Return the part of `output` that says what was wrong: a tool's message, a program's last line, "" if none."""
        if self.error is None:
            return ""
        return self.output if self.stdout is None else self.output.rpartition("\n")[2]


@dataclass
class TurnCall:
    """A call that a turn made; `result` is None if it was not run."""

    tool: str | None  # None: the call could not be run
    arguments: dict[str, Any] = field(default_factory=dict)
    malformed: str | None = None  # why it could not: one of MALFORMED_KINDS
    result: CallResult | None = None
    started_s: float | None = None  # since 1970
    queue_s: float = 0.0  # all of its time except `result.run_s`


@dataclass
class Reply:
    """What was said to the model after its turn, as text and as tokens of the response.

    `shown` is what its frame holds, as the model read it: what the tool said to each call, or a user's messages.
    """

    text: str
    tokens: int
    start: int  # tokens of the response before it
    shown: list[str] = field(default_factory=list)
    role: Literal["tool", "user"] = "tool"


@dataclass
class Turn:
    """A turn of the model, and what its calls said. `end` is the text of the end token that ends `text`, "" if none.

    An agent's turns may form a tree, which has several rows; `start` is then a place in the turn's own row.
    """

    text: str
    tokens: int
    start: int  # tokens of the response before it
    server: str | None  # address and port of the server that wrote it, or its newest part
    started_s: float  # since 1970
    generate_s: float  # from the request to the end, including the wait for the server
    calls: list[TurnCall] = field(default_factory=list)
    reply: Reply | None = None
    end: str = ""
    parent: int | None = None  # index in `Episode.turns` of the turn it continues from; None: the one before; -1: none
    row: int = 0  # index in `Episode.rows` of the row that trains it
    fork: Literal["history", "tools", "template"] | None = None  # why its prompt was rendered anew; None: it was not


@dataclass
class TokenRow:
    """A prompt and a response as tokens. `ids`, `mask` and `log_probs` always have the same length."""

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1: the model wrote the token
    log_probs: list[float] | None = field(default_factory=list)  # None: the engine was not asked for them
    model_spans: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of each turn of the model
    version_spans: list[Span] = field(default_factory=list)  # in order; tokens of tools are in none

    def add(self, ids: list[int], mask: int, log_probs: list[float]) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        if self.log_probs is not None:
            self.log_probs += log_probs

    @property
    def num_model_tokens(self) -> int:
        return sum(end - start for start, end in self.model_spans)

    @property
    def num_turns(self) -> int:
        """Number of turns as verl counts them: the user's, the model's, and the tools' after these."""
        return 1 + len(self.model_spans) + sum(start < end < len(self.ids) for start, end in self.model_spans)

    def oldest_version(self) -> int | None:
        """Return the oldest version of the weights; None if a server reported none, or no token was written."""
        return _oldest([version for *_, version in self.version_spans])


MAX_EVIDENCE = 2**18


def _oldest(versions: list[int | None]) -> int | None:
    known = [version for version in versions if version is not None]
    return min(known, default=None) if len(known) == len(versions) else None


def _per_call(zero: float = 0) -> Any:
    return field(default=zero, metadata={"is_per_call": True})


@dataclass
class ToolUse:
    """Counts and seconds of one episode; the mean per call of a field made by `_per_call` is a metric, `tool/NAME`."""

    ok: int = 0  # calls that ended well
    errors: dict[str, int] = field(default_factory=Counter)  # calls that did not, by `error_kind`
    malformed: dict[str, int] = field(default_factory=Counter)  # by MALFORMED_KINDS
    tools: dict[str, list[int]] = field(default_factory=dict)  # name -> calls that ended well, and that did not
    fixed: int = 0  # failed or malformed calls whose next call ended well
    json_repairs: int = _per_call()  # calls that `retool.repair_json` made readable
    outputs_cut: int = _per_call()
    void_turns: int = 0  # turns of the model with neither a call that can be run nor a boxed answer (arXiv:2509.02479)
    code_lines: int = _per_call()  # not blank, of all calls
    first_call_token: int | None = None  # position in the response, estimated within its turn by characters
    generate_s: float = 0.0  # waited for the model
    tool_s: float = 0.0  # waited for tools, which splits into queue_s, run_s and the way there and back
    queue_s: float = _per_call(0.0)  # includes the attempts that failed because of the infrastructure
    run_s: float = _per_call(0.0)
    replays: int = _per_call()  # of all earlier calls, because the server of a notebook was lost

    @property
    def failed(self) -> int:
        """Number of calls that were run and did not end well."""
        return sum(self.errors.values())

    @property
    def calls(self) -> int:
        return self.ok + self.failed


@dataclass
class AgentUse:
    """What an agent that has only a base_url did with it (gateway/), in one episode."""

    requests: int = 0
    turns: int = 0  # answers of the model; as many as `extended`, `first` and `forks` together
    extended: int = 0  # turns that continue from the tokens of an earlier turn
    first: int = 0  # turns that begin a conversation
    forks: dict[str, int] = field(default_factory=Counter)  # turns on a prompt that was rendered anew, by reason
    joined: int = 0  # retries that joined a running request, or got its stored answer again
    repeats: int = 0  # requests with the body of another that were no retry: each got an answer of its own
    undelivered: int = 0  # answers that no client waited for
    rows: int = 0
    rows_left_out: int = 0  # the oldest, beyond `max_rows`
    masked_tokens: int = 0  # sampled tokens of these turns that stand in a row without training there, or in none
    agent_s: float = 0.0  # the agent's own seconds: no request was open


@dataclass(frozen=True)
class Score:
    """What became of one response.

    Attributes:
        acc: 1.0 right, 0.0 wrong or without an answer, None if it could not be decided. Other verifiers (verifiers/)
            may give a share of 1.0, with the verdict "partial".
        pred: the answer as the response gave it; "" without one.
        verdict: "unknown" is neither right nor wrong: the gold by itself takes more CPU time or memory than a
            comparison may, or the infrastructure failed. A failure that an answer's own text causes is "wrong".
        method: the rule that decided, for logs: "integer", "string", "number", "words", "count", "guard: tower", ...
        normalised: the answer in the spelling that was compared, for logs; "" if the rule has none.
        evidence: what an environment needs to score the ended episode again (`Environment.score_again`), at most
            MAX_EVIDENCE bytes; for the records, not in verl's queue.
    """

    acc: float | None
    pred: str
    verdict: Literal["correct", "partial", "wrong", "no_answer", "unknown"]
    method: str
    normalised: str = field(default="", compare=False)
    evidence: bytes = field(default=b"", compare=False, repr=False)

    @classmethod
    def graded(cls, acc: float, pred: str, method: str, normalised: str = "", evidence: bytes = b"") -> "Score":
        """Return a score with the verdict that belongs to `acc`."""
        verdict = "correct" if acc == 1.0 else "partial" if acc > 0.0 else "wrong"
        return cls(acc, pred, verdict, method, normalised, evidence)

    @property
    def is_unverified(self) -> bool:
        return self.verdict == UNVERIFIED_VERDICT


@dataclass
class Reward:
    """What a reward manager says of an episode: `score`, which is trained on, and all that it reports by name.

    Attributes:
        score: None if verl's trainer scores later.
        info: verl's `reward_extra_info`: numbers and texts by name. `acc`, the share that is right, is among them.
    """

    score: float | None
    info: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def acc(self) -> float:
        return float(self.info["acc"])


@dataclass
class Episode:
    """One response of a model to one prompt, and what became of it.

    Attributes:
        rows: what it is trained on as: one row, if the response only grew.
        finish_reason: why the loop ended it: a `RolloutEnd`, or another project's word. `end` also knows the verdict.
        use: None if another project's loop ran, which counts nothing.
        agent: None if no agent with a base_url made the episode.
        score: what its environment says of it; None: the reward manager scores it.
        reward: None until it is scored.
        turns, prompt, sampling, opening, protocol: for the records; they do not go through verl's queue.
        opening: `messages` and `tools` (schemas), what the environment opened with; empty if it is not recorded.
        protocol: name of the tool protocol.
        lost_servers: they died during a request, which continued elsewhere.
        from_server: what else the server sent with the newest turn, for verl's metrics.
    """

    key: EpisodeKey
    rows: list[TokenRow] = field(default_factory=list)
    finish_reason: str = ""
    use: ToolUse | None = None
    agent: AgentUse | None = None
    score: Score | None = None
    reward: Reward | None = None
    turns: list[Turn] = field(default_factory=list)
    prompt: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    opening: dict[str, Any] = field(default_factory=dict)
    protocol: str | None = None
    lost_servers: list[str] = field(default_factory=list)
    from_server: dict[str, Any] = field(default_factory=dict)
    exception: str | None = None  # what was raised, if it raised
    started_s: float | None = None  # since 1970, like `ended_s`
    ended_s: float | None = None
    score_s: float = 0.0

    @property
    def end(self) -> RolloutEnd | str:
        """Return why it ended, by loop and verdict; see `outcome.rollout_end`."""
        return rollout_end({"finish_reason": self.finish_reason, **(self.reward.info if self.reward else {})})

    @property
    def given_reward(self) -> Reward:
        """Return the reward of an episode that is scored."""
        assert self.reward is not None, f"{self.key} is not scored"
        return self.reward

    @property
    def is_truncated(self) -> bool:
        """Whether the token limit cut it, as the loop noted."""
        return self.finish_reason == RolloutEnd.MAX_TOKENS

    @property
    def num_model_tokens(self) -> int:
        return sum(row.num_model_tokens for row in self.rows)

    @property
    def row(self) -> TokenRow:
        """Return the last row, which has the answer."""
        return self.rows[-1]

    def oldest_version(self) -> int | None:
        """Return the oldest version of the weights that wrote a token of it; None if one is not known."""
        return _oldest([row.oldest_version() for row in self.rows])


SUMMARY = "episode"  # key of verl's `extra_fields`: the part of an episode that the trainer reads
_NOT_IN_SUMMARY = {"reward": None, "turns": [], "prompt": None, "sampling": {}, "opening": {}, "protocol": None}
_NOT_IN_SUMMARY |= {"from_server": {}}


def summary_of(episode: Episode) -> dict[str, Any]:
    """Return an episode as plain values for verl's queue, without what is there as a column or only for the records."""
    rows = [TokenRow(model_spans=row.model_spans, version_spans=row.version_spans) for row in episode.rows]
    score = episode.score and replace(episode.score, evidence=b"")
    return msgspec.to_builtins(replace(episode, rows=rows, score=score, **_NOT_IN_SUMMARY))


def from_row(key: EpisodeKey, extra_fields: Mapping[str, Any], score: float | None = None) -> Episode:
    """Return an episode from the column `extra_fields` of its row in verl's queue; see `summary_of` for what is in it.

    Args:
        score: the reward, which has its own column in the queue.
    """
    if (summary := extra_fields.get(SUMMARY)) is not None:
        episode = msgspec.convert(summary, Episode)
        episode.key = key
    else:  # another project's loop
        row = TokenRow(model_spans=extra_fields.get("model_spans") or [])
        episode = Episode(key, rows=[row], finish_reason=str(extra_fields.get("finish_reason") or ""))
    if (info := extra_fields.get("reward_extra_info")) is not None:
        episode.reward = Reward(score, info)
    return episode
