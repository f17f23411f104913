"""Templates that the gateway is tried with, and a policy whose answers a test chooses."""

import copy
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from tests.unit.gateway.clients import Room, opened
from verl_ext.gateway.session import Node, Place, Sampled, Session
from verl_ext.gateway.template import Template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Calculate.",
            "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
        },
    }
]
# Qwen3's rules in short: earlier thoughts are dropped when a user speaks, and within a tool loop they stay; the newest
# turn gets an empty block of thoughts if it has none.
QWEN3 = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = '' %}{% set content = m.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}
{%- for call in m.tool_calls %}
{%- if loop.index0 or content %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call_text(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calc', 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="session")
def qwen3_tokenizer(qwen_tokenizer: Any) -> Any:
    other = copy.deepcopy(qwen_tokenizer)
    other.add_tokens(["<think>", "</think>"])
    other.chat_template = QWEN3
    return other


@pytest.fixture(scope="session")
def templates(tokenizer: Any, qwen_tokenizer: Any, qwen3_tokenizer: Any) -> dict[str, Template]:
    return {
        "tiny": Template(tokenizer),
        "qwen2.5": Template(qwen_tokenizer),
        "qwen3": Template(qwen3_tokenizer),
        "qwen3 without thinking": Template(qwen3_tokenizer, {"enable_thinking": False}),
    }


@dataclass
class Policy:
    """A session and its far side: each answer is a text that the test gives, and is noted as the servers would."""

    session: Session
    log: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)  # prompt, ids, log-probs
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def ask(
        self,
        messages: Sequence[dict[str, Any]],
        answer: str,
        tools: Any = None,
        *,
        is_open: bool = False,
        ended: bool = True,
        stop: Sequence[str] = (),
        delivered: bool = True,
    ) -> Node:
        """Let the model answer, and return its turn. A stop string cuts the answer as the engine does."""
        place = self.session.place(list(messages), tools, is_open=is_open)
        return self.answer(place, answer, ended=ended, stop=stop, delivered=delivered)

    def answer(
        self, place: Place, text: str, *, ended: bool = True, stop: Sequence[str] = (), delivered: bool = True
    ) -> Node:
        template = self.session.template
        found = [text.index(each) + len(each) for each in stop if each in text]
        ids = template.encode(
            template.opened([""], text[: min(found)] if found else text)
        )  # a special token's text in pieces
        ids += [template.tokenizer.eos_token_id] * (ended and not found)
        log_probs = [-next(self._numbers) / 1000 for _ in ids]
        self.log.append((place.prompt_ids, ids, log_probs))
        half = len(ids) // 2
        spans = [span for span in ((0, half, len(self.log)), (half, len(ids), len(self.log) + 1)) if span[1] > span[0]]
        sampled = Sampled(ids, log_probs, spans)
        node = self.session.add(place, sampled, max_tokens=len(ids) + ended, stop=stop)
        node.delivered = delivered
        return node

    def text(self, ids: Sequence[int]) -> str:
        return self.session.template.tokenizer.decode(ids)


@pytest.fixture
def policy(templates: dict[str, Template]) -> Any:
    def make(name: str = "qwen2.5", **settings: Any) -> Policy:
        return Policy(Session(templates[name], **{"max_context": 5000} | settings))

    return make


@pytest.fixture
async def plain(tokenizer: Any) -> AsyncIterator[Room]:
    """A session of the tiny task's model, whose template shows no tools, behind a real server."""
    async with opened(tokenizer) as room:
        yield room


@pytest.fixture
async def qwen(qwen_tokenizer: Any) -> AsyncIterator[Room]:
    """A session with Qwen2.5's template behind a real server."""
    async with opened(qwen_tokenizer) as room:
        yield room
