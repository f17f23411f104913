"""A chat endpoint on 127.0.0.1 whose model is a function: what a conversation of a style gets as its answer."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl_ext.protocols.code import CODE_START, CODE_STOP

PARAMETERS = ("max_tokens", "temperature", "top_p", "stop", "tools", "continue_final_message", "add_generation_prompt")


@dataclass
class Refused(Exception):
    """An answer with an HTTP status."""

    status: int
    text: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class ChatEndpoint:
    """Attributes:
    say: conversation -> what the model says next: a text, or a message; it may raise Refused.
    takes: names of the parameters that it does not refuse.
    continues: "vllm" or "prefix", how a message of the assistant is continued; "" begins a new message.
    requests: bodies, in order.
    """

    say: Callable[[list[dict[str, Any]]], str | dict[str, Any]]
    takes: tuple[str, ...] = PARAMETERS
    continues: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        known = {"model", "messages", "max_completion_tokens", *self.takes}
        if self.continues != "vllm":
            known -= {"continue_final_message", "add_generation_prompt"}
        if unknown := sorted(body.keys() - known):
            raise Refused(400, f"Unsupported parameter: {unknown[0]}")
        messages = body["messages"]
        if self.continues != "prefix" and any("prefix" in message for message in messages):
            raise Refused(400, "Unknown field prefix")
        goes_on = body.get("continue_final_message") or messages[-1].get("prefix")
        said = self._probed(messages, bool(goes_on)) or self.say(messages)
        message = {"role": "assistant"} | (said if isinstance(said, dict) else {"content": said})
        text = message.get("content") or ""
        stops = [text.find(stop) for stop in body.get("stop") or [] if stop in text]
        if stops and isinstance(text, str):
            message["content"] = text[: min(stops)]
        reason = "tool_calls" if message.get("tool_calls") else message.pop("finish_reason", "stop")
        usage = {"prompt_tokens": 10 * len(messages), "completion_tokens": 7, "total_tokens": 0}
        return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}

    def _probed(self, messages: list[dict[str, Any]], goes_on: bool) -> str:
        """Answer the questions by which a client finds out what there is."""
        if messages[0]["content"] == "Say yes.":
            return "yes"
        if messages[-1]["content"] == "one two three four":
            return " five six seven" if goes_on else "one two three four five six seven"
        return ""


def solve(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    """Solve the user's first sum by one program, whatever style the conversation has."""
    question = next(message["content"] for message in messages if message["role"] == "user")
    said = "".join(message.get("content") or "" for message in messages if message["role"] != "system")
    outputs = [message["content"] for message in messages if message["role"] == "tool"]
    if "<interpreter>" in said.replace(question, ""):
        outputs.append(said.rpartition("<interpreter>\n")[2].partition("\n")[0])
    if outputs:
        return f"It is \\boxed{{{outputs[-1].strip()}}}."
    return f"I add.\n{CODE_START}\nprint({question.removesuffix('?')})\n{CODE_STOP}"


@contextmanager
def serving(endpoint: ChatEndpoint) -> Iterator[ChatEndpoint]:
    """Serve the endpoint in threads for the block; its `url` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "scripted"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self._send(200, endpoint.answer(body))
            except Refused as error:
                if error.status:
                    self._send(error.status, {"error": {"message": error.text}}, error.headers)
                else:  # the connection is cut
                    self.connection.close()

        def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield endpoint
    finally:
        http.shutdown()
        http.server_close()
        thread.join(timeout=10)
