"""A chat endpoint as the agent loop's model: real loop, real requests over HTTP, a scripted model and sandbox."""

import asyncio
import json
from typing import Any

import pytest

from tests.chat_endpoint import PARAMETERS, ChatEndpoint, Refused, serving, solve
from verl_ext.evaluation.meter import Meter
from verl_ext.evaluation.store import Store
from verl_ext.rollout.chat import ChatServer
from verl_ext.rollout.servers import ServerFailure, ServerRefused

QUESTIONS = {"17+25?": "42", "3+4?": "7"}
NO_TOOLS = tuple(name for name in PARAMETERS if name != "tools")


class Adder:
    """A sandbox that can print a sum."""

    async def run(self, code: str, **limits: Any) -> Any:
        from verl_ext.sandbox.client import RunResult

        numbers = code.strip().removeprefix("print(").removesuffix(")").split("+")
        return RunResult("ok", f"{sum(map(int, numbers))}\n", "", 0, queue_s=0.0, run_s=0.0, attempts=1, message="")

    async def aclose(self) -> None: ...


@pytest.fixture
def sample(tmp_path, tokenizer, qwen_tokenizer, monkeypatch):
    """Take samples of QUESTIONS from an endpoint; returns the rows by question, and the server."""
    from verl_ext.evaluation.sampling import Sampler, make_tasks
    from verl_ext.evaluation.settings import load_config

    monkeypatch.setattr("verl_ext.environments.interpreter.shared_client", lambda settings: Adder())

    def take(endpoint: ChatEndpoint, protocol: str = "code", meter: Meter | None = None, **options: Any) -> Any:
        lengths = {"data.max_prompt_length": 512, "data.max_response_length": 512}
        settings = {"retool.protocol": protocol, "retool.validation.retries": 0} | lengths
        config = load_config("tiny_dapo", [f"{name}={value}" for name, value in settings.items()])
        rows = [
            {"uid": f"mine:{number}", "index": number, "data_source": "mine", "ability": "math", "problem": question}
            | {"raw_prompt": [{"role": "user", "content": question}], "extra_info": {}}
            | {"reward_model": {"ground_truth": answer}}
            for number, (question, answer) in enumerate(QUESTIONS.items())
        ]
        kept = Store(tmp_path / "samples", {}, {})

        async def run() -> ChatServer:
            server = ChatServer(endpoint.url, **{"max_attempts": 2, "timeout_s": 5.0} | options)
            try:
                await server.connect()
                used = tokenizer if protocol == "code" else qwen_tokenizer
                sampler = Sampler(config, used, server, "qwen2")
                await sampler.run(make_tasks(rows, 1, 0), kept, concurrency=1, meter=meter)
            finally:
                await server.aclose()
                kept.join()
            return server

        with serving(endpoint):
            server = asyncio.run(run())
        return {row["problem"]: row for row in kept.rows.values()}, server

    return take


def said(row: dict[str, Any]) -> str:
    return "".join(turn["text"] for turn in row["turns"]).replace("<|im_end|>", "")


# How an endpoint is asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("able", "style"),
    [
        ({"continues": "vllm"}, "continue"),
        ({"continues": "prefix"}, "continue"),
        ({}, "tools"),
        ({"takes": NO_TOOLS}, "turns"),
        ({"takes": ("stop", "max_tokens")}, "turns"),
        ({"takes": ()}, "turns"),  # nor stop strings
    ],
)
def test_the_loop_runs_the_teachers_programs_in_every_style(sample, able, style):
    endpoint = ChatEndpoint(by_tools if style == "tools" else solve, **able)
    rows, server = sample(endpoint)
    assert server.style == style
    for question, answer in QUESTIONS.items():
        row = rows[question]
        program = f"<code>\nprint({question.removesuffix('?')})\n</code>\n<interpreter>\n{answer}\n</interpreter>\n"
        assert said(row) == f"I add.\n{program}It is \\boxed{{{answer}}}."
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert (row["acc"], row["end_reason"], row["prompt"]) == (1.0, "answer", prompt)
    last = endpoint.requests[-1]["messages"]
    roles = {"continue": ["assistant"], "tools": ["assistant", "tool"], "turns": ["assistant", "user"]}
    assert [message["role"] for message in last] == ["system", "user", *roles[style]]


def test_a_message_that_is_continued_keeps_all_programs_and_outputs(sample):
    def say(messages: list[dict[str, Any]]) -> str:
        programs = messages[-1]["content"].count("<interpreter>") if messages[-1]["role"] == "assistant" else 0
        return "It is \\boxed{7}." if programs == 2 else f"\nStep {programs}.\n<code>\nprint({programs}+1)\n</code>"

    endpoint = ChatEndpoint(say, continues="vllm")
    sample(endpoint)
    shown = "<code>\nprint({0}+1)\n</code>\n<interpreter>\n{1}\n</interpreter>\n"
    grown = "".join(f"\nStep {number}.\n{shown.format(number, number + 1)}" for number in range(2))
    assert [message["content"] for message in endpoint.requests[-1]["messages"][1:]] == ["3+4?", grown]


def by_tools(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
    """Solve by the endpoint's own tool calls."""
    if isinstance(text := solve(messages), str) and "<code>" in text:
        code = text.partition("<code>\n")[2].partition("\n</code>")[0]
        function = {"name": "code_interpreter", "arguments": json.dumps({"code": code})}
        call = {"id": "x", "type": "function", "function": function}
        return {"content": "I add.", "tool_calls": [call, call]}  # of which the <code> protocol has one in a turn
    return text


@pytest.mark.parametrize(("style", "takes"), [("tools", PARAMETERS), ("turns", NO_TOOLS), ("turns", ())])
def test_the_hermes_protocol_of_a_run_gets_calls_as_json(sample, style, takes):
    def say(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        answered = "tool_response" in messages[-1]["content"] or messages[-1]["role"] == "tool"
        if answered:
            return f"It is \\boxed{{{messages[-1]['content'].replace('<tool_response>', '').split()[0]}}}."
        question = messages[-1]["content"]
        arguments = {"code": f"print({question.removesuffix('?')})"}
        if style == "turns":
            call = json.dumps({"name": "code_interpreter", "arguments": arguments})
            return f"I add.\n<tool_call>\n{call}\n</tool_call>\n<tool_response>\n99\n</tool_response>\nIt is 99."
        function = {"name": "code_interpreter", "arguments": json.dumps(arguments)}
        return {"content": "I add.", "tool_calls": [{"id": "x", "type": "function", "function": function}]}

    rows, _ = sample(ChatEndpoint(say, takes=takes), "hermes")
    assert [row["acc"] for row in rows.values()] == [1.0, 1.0]
    call = '{"name": "code_interpreter", "arguments": {"code": "print(17+25)"}}'
    assert said(rows["17+25?"]).startswith(f"I add.\n<tool_call>\n{call}\n</tool_call>")
    assert "99" not in said(rows["17+25?"]), "no output comes from the teacher"


def test_an_output_that_the_teacher_writes_itself_is_not_read(sample):
    def say(messages: list[dict[str, Any]]) -> str:
        text = str(solve(messages))
        return text + "\n<interpreter>\n1\n</interpreter>\nIt is \\boxed{1}." * ("<code>" in text)

    rows, _ = sample(ChatEndpoint(say, takes=("max_tokens",)))  # which has no stop strings
    assert [row["acc"] for row in rows.values()] == [1.0, 1.0]


@pytest.mark.parametrize("arguments", ["{", "[]", '{"code": 5}', '{"program": "print(1)"}', None])
def test_a_call_that_cannot_be_run_is_the_teachers_error(sample, arguments):
    def say(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        if len(messages) > 2:
            return "It is \\boxed{7}."
        function = {"name": "code_interpreter", "arguments": arguments}
        return {"content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}

    rows, _ = sample(ChatEndpoint(say), style="tools")
    assert [row["acc"] for row in rows.values()] == [0.0, 1.0]
    assert all(row["calls"][0]["status"].startswith("malformed:") for row in rows.values())


@pytest.mark.parametrize(
    "call",
    [{"id": "x"}, {"function": None}, {"function": "x"}, {"function": {"arguments": "{}"}}],
)
def test_an_answer_of_another_form_is_the_endpoints_failure(sample, call):
    rows, _ = sample(ChatEndpoint(lambda messages: {"content": "", "tool_calls": [call]}), style="tools")
    assert [row["end_reason"] for row in rows.values()] == ["aborted"] * 2


def test_a_content_in_parts_is_text_without_those_that_are_none(sample):
    def say(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": solve(messages)}]}

    rows, _ = sample(ChatEndpoint(say, takes=("max_tokens",)), style="turns")
    assert [row["acc"] for row in rows.values()] == [1.0, 1.0]


def test_thinking_is_recorded_and_not_sent_again(sample):
    def say(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": solve(messages), "reasoning_content": "Let me see."}

    endpoint = ChatEndpoint(say, takes=NO_TOOLS)
    rows, _ = sample(endpoint)
    assert said(rows["3+4?"]).startswith("<think>\nLet me see.\n</think>\n\nI add.\n<code>")
    assert "Let me see" not in json.dumps(endpoint.requests)


# What an endpoint refuses --------------------------------------------------------------------------------------------


def test_parameters_that_an_endpoint_does_not_take_are_left_out_and_told(sample):
    endpoint = ChatEndpoint(solve, takes=("stop",))
    rows, server = sample(endpoint)
    first = next(each for each in endpoint.requests if each["messages"][-1]["content"] == "3+4?")
    assert first["max_completion_tokens"] == 512
    later = rows["3+4?"]["turns"][2]["start"]
    assert endpoint.requests[-1]["max_completion_tokens"] == 512 - later, "what is left of the response"
    assert server.interface == "/v1/chat/completions, style turns, without max_tokens, temperature, top_p"
    assert endpoint.requests[-1].keys() == {"model", "messages", "stop", "max_completion_tokens"}


def test_a_refusal_by_the_endpoints_own_rules_is_an_answer_that_is_counted(sample):
    def say(messages: list[dict[str, Any]]) -> dict[str, Any] | str:
        if "17" in messages[-1]["content"]:
            return {"content": None, "refusal": "I cannot help with that."}
        if messages[-1]["content"] == "3+4?":
            raise Refused(400, "content_filter: no sums")
        return solve(messages)

    meter = Meter()
    rows, _ = sample(ChatEndpoint(say, takes=NO_TOOLS), meter=meter)
    assert [(row["end_reason"], row["acc"]) for row in rows.values()] == [("answer", 0.0)] * 2
    assert said(rows["17+25?"]) == "I cannot help with that." and meter.used.refusals == 2


def test_what_cannot_work_for_any_problem_stops_the_command(sample):
    def say(messages: list[dict[str, Any]]) -> str:
        raise Refused(401, "no such key")

    with pytest.raises(ServerRefused, match="no such key"):
        sample(ChatEndpoint(say, takes=NO_TOOLS))
    with pytest.raises(ServerRefused, match="does not continue a message of the assistant"):
        sample(ChatEndpoint(solve), style="continue")
    with pytest.raises(ServerFailure, match="failed 1 times, the last time"):
        asyncio.run(ChatServer("http://127.0.0.1:9/v1", max_attempts=1).connect())


@pytest.mark.parametrize("status", [0, 408, 429, 500])
def test_what_fails_is_asked_again_and_then_left_for_the_next_start(sample, status):
    failed = []

    def say(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        if "17" in json.dumps(messages) and len(failed) < 2:
            failed.append(1)
            raise Refused(status, "later", {"Retry-After-Ms": "1"})
        return solve(messages)

    endpoint = ChatEndpoint(say, takes=NO_TOOLS)
    rows, _ = sample(endpoint)
    assert (rows["17+25?"]["end_reason"], rows["17+25?"]["acc"], rows["3+4?"]["acc"]) == ("aborted", None, 1.0)
    asked = len([each for each in endpoint.requests if "3+4" in json.dumps(each)])
    rows, _ = sample(endpoint)
    assert [row["acc"] for row in rows.values()] == [1.0, 1.0]
    assert len([each for each in endpoint.requests if "3+4" in json.dumps(each)]) == asked, "not asked twice"


# What it costs -------------------------------------------------------------------------------------------------------


def test_a_budget_begins_no_sample_once_it_is_spent_also_by_an_earlier_start(sample):
    meter = Meter(max_requests=2, price=(1.0, 10.0))
    rows, _ = sample(ChatEndpoint(solve, takes=NO_TOOLS), meter=meter)
    assert list(rows) == ["17+25?"] and (meter.used.requests, meter.used.completion_tokens) == (2, 14)
    assert meter.cost() == pytest.approx((10 * (2 + 4) + 10 * 14) / 1e6)
    assert meter.shown() == {"requests": "2", "tokens": "74", "cost": "0.00"}
    assert list(sample(ChatEndpoint(solve, takes=NO_TOOLS), meter=Meter(max_tokens=74))[0]) == ["17+25?"]
    rows, _ = sample(ChatEndpoint(solve, takes=NO_TOOLS), meter=Meter(max_tokens=75))
    assert [row["acc"] for row in rows.values()] == [1.0, 1.0]


def test_a_model_that_runs_here_tells_no_tokens_of_prompts():
    meter = Meter()
    meter.add({"sampling": None, "turns": [{"role": "model", "tokens": 5}, {"role": "tool", "tokens": 2}]})
    assert meter.summary() == "1 requests; tokens: 5 of responses; 0 refusals"
