"""Ask a teacher at a chat endpoint, and keep its answers: each request costs money, and none is made twice."""

import argparse
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.evaluation.options import STYLES
from verl_ext.protocols.thinking import without_thinking
from verl_ext.runs import jsonl

if TYPE_CHECKING:
    from verl_ext.rollout.talk import Answer

GIVE_UP_AFTER = 16  # requests in a row that failed
Messages = list[dict[str, str]]


class TeacherDown(RuntimeError):
    """GIVE_UP_AFTER requests in a row failed."""


class Teacher:
    """Asks for answers, and counts the requests in a row that failed.

    Args:
        answer: makes one request; raises ServerFailure.
    """

    def __init__(self, answer: "Callable[[Messages], Awaitable[Answer]]"):
        self._answer, self._failed = answer, 0

    async def ask(self, messages: Messages) -> "Answer | None":
        """Return what the teacher says, without its thinking; None if no answer came: the next start asks again.

        Raises:
            TeacherDown: see there.
        """
        from verl_ext.rollout.servers import ServerFailure

        try:
            said = await self._answer(messages)
        except ServerFailure as error:
            self._failed += 1
            if self._failed >= GIVE_UP_AFTER:
                raise TeacherDown(f"The last {GIVE_UP_AFTER} requests failed: {error}") from error
            return None
        self._failed = 0
        return replace(said, text=without_thinking(said.text))


def add_endpoint_options(add: Callable[..., Any], *, reply_tokens: int) -> None:
    """Add the options of a teacher at an endpoint, by the `add_argument` of a group."""
    add("--served-model", default="", metavar="NAME", help="default: the first model that the endpoint serves")
    add("--api-key-env", default="", metavar="VARIABLE", help="environment variable that holds a key")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="default: 600 s")
    add("--temperature", type=float, default=0.7, metavar="X", help="default: 0.7")
    what = f"tokens of an answer (default: {reply_tokens})"
    add("--reply-tokens", type=int, default=reply_tokens, metavar="N", help=what)


def params_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of a request."""
    return {"max_tokens": args.reply_tokens, "temperature": args.temperature}


@asynccontextmanager
async def at_endpoint(args: argparse.Namespace) -> AsyncIterator[Teacher]:
    """Connect to the endpoint of `--chat`.

    Raises:
        ValueError: the endpoint refuses us.
    """
    from verl_ext.rollout.chat import ChatServer  # seconds
    from verl_ext.rollout.servers import ServerRefused

    key = os.environ.get(args.api_key_env, "")
    options = {"model": args.served_model, "api_key": key, "timeout_s": args.request_timeout}
    server = ChatServer(args.chat, style=STYLES[-1], **options)
    try:
        async with aclosing(server):
            await server.connect()
            yield Teacher(lambda messages: server.answer(messages, params_of(args)))
    except ServerRefused as error:
        raise ValueError(str(error)) from error


def settings_of(args: argparse.Namespace, teacher: str, template: str) -> dict[str, Any]:
    """Return what a teacher's answers depend on."""
    settings = {"teacher": teacher, "model": args.served_model, "template": template}
    return settings | {"temperature": args.temperature, "reply_tokens": args.reply_tokens}


def begin_answers(file: Path, settings: Mapping[str, Any]) -> None:
    """Begin the file of a teacher's answers, or see that the one that is there was made with the same settings.

    Raises:
        ValueError: the file was made with other settings.
    """
    jsonl.cut_half_line(file)
    there = list(itertools.islice(jsonl.read(file), 2)) if file.exists() else []
    if len(there) < 2:  # no answer is lost
        file.write_text(jsonl.dumps({"settings": settings}) + "\n", encoding="utf-8")
    elif there[0].get("settings") != settings:
        raise ValueError(
            f"{file} holds answers to other settings: {there[0].get('settings')}; now they are {settings}. Use the "
            "same, another --out, or delete the file."
        )
