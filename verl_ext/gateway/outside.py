"""Take tasks of a run whose `retool.agent.run` is outside, from any process that reaches its address.

    from verl_ext.gateway.outside import take

    while task := take("outputs/my_run"):
        with task:  # an exception in the block counts as the agent's crash
            client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
            client.chat.completions.create(model=task.model, messages=task.messages)

This file needs httpx and nothing else: copy it to a machine that has no verl_ext.
"""

import json
import os
import random
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

TOKEN = "RETOOL_AGENT_TOKEN"
_PAUSE_S = 1.0
_LONG_POLL_S = 20.0
_POLL_S = 2.0  # of each address, if there are several


class Task:
    """A task and its endpoint.

    Attributes:
        task: `messages`, `tools`, `id`, `index`, `data_source`, and `agent`, of the row's `extra_info`.
        base_url, api_key, model: for an OpenAI client. Anthropic's takes base_url without /v1.
    """

    def __init__(self, task: Mapping[str, Any], base_url: str, api_key: str, model: str):
        self.task, self.base_url, self.api_key, self.model = task, base_url, api_key, model
        self._is_ended = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.task["messages"]

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool of the episode's environment; return `output`, and `error`, its kind or None.

        Raises:
            httpx.HTTPStatusError: there is no such tool, or the episode has ended.
        """
        answer = httpx.post(f"{self.base_url}/tools/{name}", json={"arguments": dict(arguments)}, timeout=None)
        return answer.raise_for_status().json()

    def end(self, error: str | None = None) -> None:
        """Say that the agent has ended, and what went wrong if it crashed. Then the episode is scored."""
        if not self._is_ended:
            self._is_ended = True
            answer = httpx.post(f"{self.base_url.removesuffix('/v1')}/end", json={"error": error}, timeout=60)
            if answer.status_code != 410:  # the run ended it before
                answer.raise_for_status()

    def __enter__(self) -> "Task":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """End the task; an exception is the agent's crash, and goes no further, unless it is to end this process."""
        self.end("".join(traceback.format_exception(error))[-4000:] if error else None)
        return isinstance(error, Exception)


def take(where: str | Path | Sequence[str], *, token: str | None = None, wait_s: float = 600.0) -> Task | None:
    """Return a task, or None if there is none within `wait_s` seconds.

    Args:
        where: the run's folder, or the addresses of its gateways.
        token: RETOOL_AGENT_TOKEN of the run; None takes it from the environment.
    Raises:
        httpx.HTTPStatusError: the token is wrong.
    """
    token = os.environ.get(TOKEN, "") if token is None else token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        urls = _addresses(where)
        random.shuffle(urls)
        has_answered = False
        for url in urls:
            poll_s = min(left_s, _LONG_POLL_S if len(urls) == 1 else _POLL_S)
            try:
                answer = httpx.get(f"{url}/task", params={"wait": poll_s}, headers=headers, timeout=poll_s + 30)
            except httpx.TransportError:  # a run that has ended, or a worker that has gone
                continue
            has_answered = True
            if answer.raise_for_status().status_code != 204:
                return Task(**answer.json())
        if not has_answered:
            time.sleep(min(_PAUSE_S, left_s))
    return None


def _addresses(where: str | Path | Sequence[str]) -> list[str]:
    if not isinstance(where, str | Path):
        return [url.rstrip("/") for url in where]
    urls = []
    for file in Path(where).glob("agents/*.json"):
        try:
            urls.append(json.loads(file.read_text())["url"])
        except (OSError, ValueError):  # it is being written or removed
            continue
    return urls
