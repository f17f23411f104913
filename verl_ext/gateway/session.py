"""One episode of an agent as the gateway sees it: a tree of the model's turns, and the rows that it is trained on.

Stored tokens are the truth. A request whose messages continue a turn gets that turn's tokens and the tokens of what is
new. Any other request forks: its whole prompt is rendered anew, and nothing of that prompt trains.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_ext.episode import AgentUse, Span, TokenRow
from verl_ext.gateway.messages import TOO_LONG, Message, Refused, chain, normal, told
from verl_ext.gateway.template import Frame, Template
from verl_ext.protocols.base import Call
from verl_ext.protocols.thinking import is_thinking, opens_thinking

_TAIL = 64  # characters before a turn, in which an opened `<think>` is found

Fork = Literal["history", "tools", "template"]


@dataclass
class Sampled:
    """What the servers wrote for one request.

    Attributes:
        ids: with the end token, or with the client's stop string.
        log_probs: one for each of `ids`; None if the servers are not asked for them.
        spans: which version of the weights wrote which of `ids` (`rollout.weight_versions.spans_of`, from 0).
        failed: why the servers gave the request up; the rest then does not count.
        server, lost, from_server: as in `Turn` and `Episode`.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    spans: list[Span] = field(default_factory=list)
    failed: str | None = None
    server: str | None = None
    lost: list[str] = field(default_factory=list)
    from_server: dict[str, Any] = field(default_factory=dict)


Generate = Callable[[str, list[int], dict[str, Any]], Awaitable[Sampled]]  # of request id, prompt, sampling parameters


@dataclass(eq=False)
class Place:
    """Where a request stands in the tree: what `Session.add` needs to know when its turn is written.

    Attributes:
        context: tokens between the parent's last token, or the beginning, and the turn.
        said: role and text of the messages that stand in `context`.
        frame: what the template shows before the model's whole turn.
        before: digest of the messages before the model's whole turn.
        opened: text of the model's whole turn so far, as the client knows it; "" unless the turn continues.
        thinking: the turn begins within thinking.
    """

    parent: "Node | None"
    context: list[int]
    fork: Fork | None
    said: list[tuple[str, str]]
    tools: Any
    frame: Frame
    before: str
    opened: str = ""
    thinking: bool = False

    @property
    def prompt_ids(self) -> list[int]:
        return (self.parent.all_ids() if self.parent else []) + self.context


@dataclass(eq=False)
class Node:
    """A turn of the model in the tree.

    Attributes:
        text: of the tokens without the end token, with the client's stop string.
        told: the part of `text` that the client knows: without its stop string.
        end: text of the end token, "" if the turn was cut or stopped.
        message: the turn as the client is told.
        finish: OpenAI's `finish_reason`.
        delivered: a client took the answer. Set by the server.
        asked: requests that continue from it.
    """

    place: Place
    sampled: Sampled
    text: str
    told: str
    end: str
    message: dict[str, Any]
    finish: Literal["stop", "length", "tool_calls"]
    started_s: float  # since 1970
    generate_s: float
    delivered: bool = False
    asked: int = 0

    @property
    def parent(self) -> "Node | None":
        return self.place.parent

    @property
    def context(self) -> list[int]:
        return self.place.context

    @property
    def ids(self) -> list[int]:
        return self.sampled.ids

    @property
    def whole(self) -> str:
        """Return the text of the model's whole turn as the client knows it, with what the client put into it."""
        return self.place.opened + self.told

    @property
    def is_kept(self) -> bool:
        """Whether a client got the answer, or continues from it. Any other answer changed nothing of what followed."""
        return self.delivered or self.asked > 0

    def line(self) -> "list[Node]":
        """Return the nodes from the root to this one."""
        line, node = [], self
        while node:
            line.append(node)
            node = node.parent
        return line[::-1]

    def all_ids(self) -> list[int]:
        """Return all tokens from the root to the end of this turn."""
        ids: list[int] = []
        for node in self.line():
            ids += node.context
            ids += node.ids
        return ids


@dataclass
class Leaf:
    """A row, and the nodes from the root to the leaf. `trained`, the last ones, are those that train in this row."""

    row: TokenRow
    nodes: list[Node]
    trained: list[Node]


@dataclass(eq=False)
class Session:
    """The turns of one episode.

    Args:
        params: of sampling, the run's.
        max_context: tokens of a prompt and its turn.
    """

    template: Template
    max_context: int
    params: dict[str, Any] = field(default_factory=dict)
    use: AgentUse = field(default_factory=AgentUse)
    nodes: list[Node] = field(default_factory=list)  # by the time of their answers
    last_refusal: str | None = None  # code of the newest refusal; None after a success
    is_sealed: bool = False
    _failures: dict[tuple[str, str], str] = field(default_factory=dict)  # by what stands before the turn
    _after: dict[str, list[Node]] = field(default_factory=dict)  # by the digest of messages and turn
    _before: dict[str, list[Node]] = field(default_factory=dict)  # by the digest of the messages before the turn

    @property
    def failed(self) -> str | None:
        """Return why the servers failed a request that was not answered in a further try; None if there is none.

        Another request's success changes nothing for an agent that gave this one up.
        """
        return next(reversed(self._failures.values()), None)

    def place(self, messages: Any, tools: Any = None, *, is_open: bool = False) -> Place:
        """Return where a request stands, with its exact prompt.

        Args:
            messages: in OpenAI's form, as the client sent them.
            tools: in OpenAI's form; None or empty: none.
            is_open: the last message is the model's, and the model continues it (vLLM's `continue_final_message`).
        Raises:
            Refused: the session has ended, the messages cannot be rendered, or there is no room for an answer.
        """
        if self.is_sealed:
            raise Refused("the session has ended", 410, "session_ended")
        if not isinstance(messages, list) or not messages:
            raise Refused(f"messages: expected a list with at least one; got {messages!r:.200}")
        tools = tools or None
        if self.nodes and tools == self.nodes[-1].place.tools:
            tools = self.nodes[-1].place.tools  # each request brings its own copy, and one is kept
        place = (self._open_place if is_open else self._new_place)([*map(normal, messages)], tools)
        if (tokens := len(place.prompt_ids)) >= self.max_context:
            self.last_refusal = TOO_LONG
            sentence = f"the prompt has {tokens} tokens, and the limit of prompt and answer is {self.max_context}"
            raise Refused(sentence, code=TOO_LONG)
        if place.parent:
            place.parent.asked += 1
        return place

    def _new_place(self, messages: list[dict[str, Any]], tools: Any) -> Place:
        digests = chain(messages)
        parts = self.template.rendered(messages, tools)
        known = (i for i in range(len(messages), 0, -1) if digests[i] in self._after)
        start = next(known, 0)
        parent, context, new, fork = None, None, messages[start:], None
        if any(message["role"] == "assistant" for message in new):  # a turn that this session did not write
            fork = "history" if self.nodes else None
        elif start:
            twins = self._after[digests[start]]
            for node in _best_first(twins, tools):
                context = self.template.delta(parts, node.place.frame, node.whole, node.end)
                if context is not None:
                    parent = node
                    break
            else:
                fork = "template" if any(node.place.tools == tools for node in twins) else "tools"
        if context is None:
            new, context = messages, self.template.encode(parts)
        frame = self.template.frame(parts)
        thinking = opens_thinking(parts[-1][-_TAIL:])
        return Place(parent, context, fork, self._said(new), tools, frame, digests[-1], thinking=thinking)

    def _open_place(self, messages: list[dict[str, Any]], tools: Any) -> Place:
        *before, turn = messages
        if turn["role"] != "assistant" or turn.get("tool_calls"):
            raise Refused("continue_final_message: expected the last message to be the assistant's, without tool_calls")
        text, digest = turn["content"], chain(before)[-1]
        parts = self.template.rendered(before, tools)
        frame = self.template.frame(parts)
        known = self._before.get(digest, [])
        fits = [node for node in known if node.place.frame == frame and not node.end and text.startswith(node.whole)]
        for node in sorted(_best_first(fits, tools), key=lambda node: -len(node.whole)):
            stop, added = node.text[len(node.told) :], text[len(node.whole) :]
            if not added.startswith(stop):  # the tokens have the stop string
                continue
            added = added.removeprefix(stop)
            context, said = self.template.encode(self.template.opened([""], added)), [("assistant", added)]
            thinking = is_thinking(node.text + added, node.place.thinking)
            return Place(node, context, None, said, tools, frame, digest, text, thinking)
        is_other = known or (self.nodes and any(message["role"] == "assistant" for message in before))
        context = self.template.encode(self.template.opened(parts, text))
        thinking = is_thinking(text, opens_thinking(parts[-1][-_TAIL:]))
        fork = "history" if is_other else None
        return Place(None, context, fork, self._said(messages), tools, frame, digest, text, thinking)

    def _said(self, messages: Sequence[Message]) -> list[tuple[str, str]]:
        """Return role and text of messages, with calls as the model writes them."""
        write = self.template.parser.write
        return [
            (message["role"], write(message["content"], [*map(_call, message.get("tool_calls", ()))]))
            for message in messages
        ]

    def add(
        self,
        place: Place,
        sampled: Sampled,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        may_call: bool = True,
        started_s: float | None = None,
        generate_s: float = 0.0,
    ) -> Node:
        """Store the turn that was written at a place, and return it.

        Args:
            max_tokens: that the servers were asked for.
            stop: the client's stop strings.
            may_call: a call is told as a call; else as the text that the model wrote.
        Raises:
            Refused: the servers gave the request up, or the session has ended. Nothing is stored.
        """
        if self.is_sealed:
            raise Refused("the session has ended", 410, "session_ended")
        if sampled.failed or not sampled.ids:
            why = self._failures[place.before, place.opened] = sampled.failed or "the servers sent no token"
            raise Refused(f"the servers failed: {why}", 503)
        end, text = self.template.split_end(sampled.ids, is_full=len(sampled.ids) >= max_tokens)
        stops = [at for each in stop if (at := text.find(each)) >= 0]
        shown, is_over = text[: min(stops)] if stops else text, bool(end or stops)
        parser, thinking = self.template.parser, place.thinking
        content, calls = told(shown, may_call and place.tools, ended=is_over, parser=parser, thinking=thinking)
        message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        finish = "tool_calls" if calls else "stop" if is_over else "length"
        started_s = time.time() if started_s is None else started_s
        node = Node(place, sampled, text, shown, end, message, finish, started_s, generate_s)
        self._store(node)
        return node

    def _store(self, node: Node) -> None:
        place, use = node.place, self.use
        whole = node.message if not place.opened else {"role": "assistant", "content": node.whole}
        self._after.setdefault(chain([normal(whole)], place.before)[-1], []).append(node)
        self._before.setdefault(place.before, []).append(node)
        self.nodes.append(node)
        self.last_refusal = None
        self._failures.pop((place.before, place.opened), None)
        use.turns += 1
        use.extended += place.parent is not None
        if place.fork:
            use.forks[place.fork] += 1
        elif place.parent is None:
            use.first += 1

    def seal(self) -> None:
        """Let nothing be added any more."""
        self.is_sealed = True

    def rows(self, max_rows: int | None = None) -> list[Leaf]:
        """Return a row for each leaf of the tree of kept nodes, in the order of the leaves' answers.

        The tokens of a node train once: in the first row that has it. An answer that nobody got, and that nothing
        continues from, is left out. The last row has the newest answer.

        Args:
            max_rows: the newest rows that are kept.
        """
        kept: dict[Node, None] = {}
        for node in self.nodes:
            if node.is_kept:
                kept |= dict.fromkeys(node.line())
        parents = {node.parent for node in kept}
        leaves = [node for node in self.nodes if node in kept and node not in parents]
        found, owners = [], dict[Node, int]()
        for i, leaf in enumerate(leaves[-max_rows if max_rows else 0 :]):
            line = leaf.line()
            trained = [node for node in line if owners.setdefault(node, i) == i]
            found.append(Leaf(_row(trained), line, trained))
        use = self.use
        use.rows, use.rows_left_out = len(found), len(leaves) - len(found)
        stands = sum(len(node.ids) for leaf in found for node in leaf.nodes)
        left_out = sum(len(node.ids) for node in kept if node not in owners)
        use.masked_tokens = stands - sum(len(node.ids) for node in owners) + left_out
        return found


def _row(trained: list[Node]) -> TokenRow:
    """Return the row in which these nodes train, each of which continues the one before. All else is its prompt."""
    has_log_probs = all(node.sampled.log_probs is not None for node in trained)
    row = TokenRow(trained[0].place.prompt_ids, log_probs=[] if has_log_probs else None)

    def append(ids: list[int], mask: int, log_probs: list[float]) -> None:
        row.ids.extend(ids)
        row.mask.extend([mask] * len(ids))
        if row.log_probs is not None:
            row.log_probs.extend(log_probs)

    for node in trained:
        if node is not trained[0]:
            append(node.context, 0, [0.0] * len(node.context))
        start = len(row.ids)
        row.version_spans += [(start + begin, start + end, version) for begin, end, version in node.sampled.spans]
        append(node.ids, 1, node.sampled.log_probs or [])
        row.model_spans.append((start, len(row.ids)))
    return row


def _best_first(nodes: Sequence[Node], tools: Any) -> list[Node]:
    """Return twins, whose messages are equal, in the order in which a request is likely to mean them.

    Parallel agents may have the same conversation so far: each of them continues from a turn of its own.
    """
    return sorted(nodes, key=lambda node: (node.place.tools != tools, not node.is_kept, node.asked > 0))


def _call(call: Message) -> Call:
    return Call(call["function"]["name"], call["function"]["arguments"], 0)
