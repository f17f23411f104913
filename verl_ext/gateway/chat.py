"""OpenAI's chat completions: the body of a request read, an answer written, at once or as server-sent events."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from verl_ext.gateway.asked import SAMPLING, Asked, checked_limit, checked_stops, decoded
from verl_ext.gateway.messages import Refused
from verl_ext.gateway.rooms import Answer

_FORCED = "a forced choice would not be the model's, and its log-probs would not be what is trained"
# Fields that cannot be served exactly: the values that change nothing, and why others are refused.
_REFUSED: dict[str, tuple[tuple, str]] = {
    "n": ((None, 1), "a request gets one answer; send it once for each"),
    "best_of": ((None, 1), "a request gets one answer"),
    "tool_choice": ((None, "auto", "none"), _FORCED),
    "function_call": ((None, "auto", "none"), _FORCED),
    "functions": ((None, []), "use tools"),
    "response_format": ((None, {"type": "text"}), _FORCED),
    "structured_outputs": ((None, {}), _FORCED),
    "guided_json": ((None,), _FORCED),
    "guided_regex": ((None,), _FORCED),
    "guided_choice": ((None,), _FORCED),
    "guided_grammar": ((None,), _FORCED),
    "logit_bias": ((None, {}), _FORCED),
    "bad_words": ((None, []), _FORCED),
    "allowed_token_ids": ((None,), _FORCED),
    "stop_token_ids": ((None, []), "use stop"),
    "top_logprobs": ((None, 0), "the engine tells the log-prob of the sampled token only"),
    "prompt_logprobs": ((None,), "the engine tells the log-probs of sampled tokens only"),
    "echo": ((None, False), "the answer is the new turn"),
    "prediction": ((None,), "turns are sampled, not predicted"),
    "audio": ((None,), "this model reads and writes text"),
    "modalities": ((None, ["text"]), "this model reads and writes text"),
    "chat_template": ((None,), "the run's chat template is used"),
    "chat_template_kwargs": ((None, {}), "those of data.apply_chat_template_kwargs are used"),
    "documents": ((None, []), "put them into a message"),
    "web_search_options": ((None,), "give the model a tool instead"),
}


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    continue_final_message: bool | None = None


_whole = msgspec.defstruct("Body", [(name, Any, None) for name in (*_REFUSED, *SAMPLING)], bases=(_Body,))
_decoder = msgspec.json.Decoder(cast(type[_Body], _whole))


def read(body: bytes) -> Asked:
    """Return what a request asks.

    Raises:
        Refused: the body cannot be read, or asks for what cannot be exact.
    """
    call = decoded(_decoder, body)
    for name, (allowed, why) in _REFUSED.items():
        if (value := getattr(call, name)) not in allowed:
            raise Refused(f"{name}={value!r:.80} is not served: {why}.")
    if not call.messages:
        raise Refused("Expected at least one message.")
    for tool in call.tools or ():
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise Refused(f"Expected tools of the type function with a name, got {str(tool)[:80]}.")
    if call.continue_final_message and call.messages[-1].get("role") != "assistant":
        raise Refused("continue_final_message continues a message of the assistant, which is not the last.")
    limits = [checked_limit(name, getattr(call, name)) for name in ("max_tokens", "max_completion_tokens")]
    return Asked(
        call.messages,
        call.tools or None,
        may_call=call.tool_choice != "none",
        stops=checked_stops(call.stop),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        log_probs=bool(call.logprobs),
        stream=bool(call.stream),
        with_usage=bool((call.stream_options or {}).get("include_usage")),
        is_open=bool(call.continue_final_message),
        model=call.model,
        ignored=[name for name in SAMPLING if getattr(call, name) is not None],
    )


def answer(made: Answer) -> dict[str, Any]:
    """Return a whole answer; `stop_reason` is the stop string that ended the turn, as vLLM tells it."""
    choice = {
        "index": 0,
        "message": made.node.message,
        "finish_reason": made.node.finish,
        "stop_reason": made.stop,
        "logprobs": _log_probs(made.log_probs) if made.log_probs else None,
    }
    return _head(made, "chat.completion") | {"choices": [choice], "usage": _usage(made)}


def events(made: Answer) -> bytes:
    """Return the whole answer as a stream: the role, the text, each call, the reason of the end, and the usage."""
    message, head = made.node.message, _head(made, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    for i, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        deltas.append({"tool_calls": [{"index": i} | call | {"function": {"name": function["name"], "arguments": ""}}]})
        deltas.append({"tool_calls": [{"index": i, "function": {"arguments": function["arguments"]}}]})
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": made.node.finish, "stop_reason": made.stop})
    if made.log_probs:
        choices[0]["logprobs"] = _log_probs(made.log_probs)
    chunks = [head | {"choices": [choice]} for choice in choices]
    if made.asked.with_usage:
        chunks.append(head | {"choices": [], "usage": _usage(made)})
    return b"".join(map(event, chunks)) + b"data: [DONE]\n\n"


def refusal(error: Refused) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def event(data: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


def _head(made: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{made.id}", "object": kind, "created": made.created_s, "model": made.model}


def _usage(made: Answer) -> dict[str, int]:
    prompt, completion = made.prompt_tokens, len(made.node.ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _log_probs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return the log-probs by token. A token may be a part of a character: U+FFFD stands for it."""
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in tokens
    ]
    return {"content": content, "refusal": None}
