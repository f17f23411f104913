"""`OpenAiServer` against scripted HTTP servers: vLLM's form, one that answers with text, and a strict one."""

import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_ext.rollout.servers import OpenAiServer, ServerFailure, ServerRefused, TooFewGpus, VllmServer, turn_seed

MODELS = {"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 256}, {"id": "other"}]}
PARAMS = {  # as the agent loop sends them
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "seed": 7,
    "max_tokens": 50,
    "stop": ["</code>"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "output_kind": object(),
}
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
OWN_HEADERS = ("authorization", "openai-organization", "openai-project")


@asynccontextmanager
async def connected(
    tokenizer: Any, answer: Callable[[dict], Any], **settings: Any
) -> AsyncIterator[tuple[OpenAiServer, list[dict]]]:
    """A server whose /completions gives `answer(request)`, an answer or (status, text); yields it and its requests."""
    requests: list[dict] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def complete(request: web.Request) -> web.Response:
        own = {name: value for name, value in request.headers.items() if name.lower() in OWN_HEADERS}
        requests.append(await request.json() | own)
        given = answer(requests[-1])
        if isinstance(given, web.Response):
            return given
        if isinstance(given, tuple):
            return web.Response(status=given[0], text=given[1], headers={"Retry-After-Ms": "1"})
        return web.json_response({"choices": [given]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    async with TestServer(app) as http:
        server = OpenAiServer(str(http.make_url("/v1/")), **settings)
        try:
            await server.find_model()
            if tokenizer is not None:
                await server.connect(tokenizer)
                requests.clear()
            yield server, requests
        finally:
            await server.aclose()


def vllm_like(tokenizer: Any, ids: list[int]) -> Callable[[dict], dict]:
    def answer(request: dict) -> dict:
        prompt = request["prompt"]
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_special_tokens=False)
        return {"text": tokenizer.decode(ids), "token_ids": ids, "prompt_token_ids": prompt, "finish_reason": "stop"}

    return answer


def text_only(text: str, finish_reason: str = "stop", **more: Any) -> Callable[[dict], Any]:
    return lambda request: {"text": text, "finish_reason": finish_reason, **more}


async def turn(server: OpenAiServer, prompt_ids: list[int], **changes: Any) -> list[int]:
    output = await server.generate("request", prompt_ids=prompt_ids, sampling_params=PARAMS | changes, priority=0)
    assert output.stop_reason == "completed"
    return output.token_ids


async def test_a_server_of_token_ids_gets_and_gives_them_untouched(tokenizer):
    ids = tokenizer.encode("<code>print(1)</code>")
    async with connected(tokenizer, vllm_like(tokenizer, ids), api_key="secret") as (server, requests):
        assert (server.model, server.root, server.max_model_len) == ("tiny", "/models/tiny", 256)
        assert server.interface == "/v1/completions, token ids in, token ids out"
        assert await turn(server, [1, 2, 3]) == ids
        (request,) = requests
    assert request == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,  # said, so that no generation_config.json of the server decides
        "repetition_penalty": 1.0,
        "seed": turn_seed(7, [1, 2, 3]),
        "max_tokens": 50,
        "stop": ["</code>"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "return_token_ids": True,
        "Authorization": "Bearer secret",
    }


def test_every_turn_of_a_sample_has_a_seed_of_its_own():
    seeds = {turn_seed(7, range(length)) for length in (3, 50, 90)}
    assert len(seeds) == 3
    assert 0 <= turn_seed(2**63 - 1, range(10)) < 2**63


async def test_a_server_that_tokenises_otherwise_is_refused(tokenizer):
    def answer(request: dict) -> dict:
        return {"text": "", "token_ids": [1], "prompt_token_ids": [5, 6], "finish_reason": "length"}

    with pytest.raises(ServerRefused, match=r"as \[5, 6\].*--tokenizer"):
        async with connected(tokenizer, answer):
            pass


@pytest.mark.parametrize(
    ("answer", "expected", "ended"),
    [
        (text_only("<code>print(1)"), "<code>print(1)</code>", False),  # the stop string is cut off, as OpenAI does
        (text_only("<code>print(1)</code>"), "<code>print(1)</code>", False),
        (text_only("<code>print(1)", stop_reason="</code>"), "<code>print(1)</code>", False),  # an older vLLM
        (text_only("<code>print(1)", stop_reason=None), "<code>print(1)", True),  # by its end token
        (text_only("<code>print(1)", matched_stop="</code>"), "<code>print(1)</code>", False),  # SGLang
        (text_only("<code>print(1)", matched_stop=5), "<code>print(1)", True),
        (text_only("<code>print(1)", "length"), "<code>print(1)", False),
        (text_only("\\boxed{2}"), "\\boxed{2}", True),
    ],
)
async def test_a_server_of_text_is_read_with_what_ended_the_turn(tokenizer, answer, expected, ended):
    async with connected(tokenizer, answer) as (server, requests):
        assert server.interface == "/v1/completions, token ids in, text (tokenised again here) out"
        ids = await turn(server, [1, 2, 3])
        assert tokenizer.decode(ids) == expected + (tokenizer.eos_token if ended else "")
        (request,) = requests
    assert request["prompt"] == [1, 2, 3] and request["stop"] == ["</code>"]
    assert not {"stop_token_ids", "include_stop_str_in_output", "top_k", "min_p", "return_token_ids"} & set(request)


async def test_a_strict_server_of_text_gets_text(tokenizer):
    def answer(request: dict) -> Any:
        if "return_token_ids" in request or not isinstance(request["prompt"], str):
            return 422, "unknown field, or prompt is no string"
        return {"text": "\\boxed{2}", "finish_reason": "stop"}

    async with connected(tokenizer, answer) as (server, requests):
        assert server.interface == "/v1/completions, text in, text (tokenised again here) out"
        await turn(server, tokenizer.encode("1+1?"), top_k=5)
        assert requests[0]["prompt"] == "1+1?" and requests[0]["top_k"] == 5


async def test_text_that_is_longer_in_tokens_here_stays_within_the_budget(tokenizer):
    async with connected(tokenizer, text_only("1234567890")) as (server, _):
        assert len(await turn(server, [1], max_tokens=4)) == 4


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_what_infrastructure_fails_is_asked_again_and_then_said(tokenizer, status):
    answers = iter([(status, "busy"), (status, "busy"), {"text": "\\boxed{2}", "finish_reason": "stop"}])
    current = [text_only("")]
    async with connected(tokenizer, lambda request: current[0](request)) as (server, requests):
        current[0] = lambda request: next(answers)
        assert tokenizer.decode(await turn(server, [1])).startswith("\\boxed{2}") and len(requests) == 3
        current[0] = lambda request: (status, "busy")
        with pytest.raises(ServerFailure, match=f"failed 4 times, the last time: HTTP {status}: busy"):
            await turn(server, [1])
        assert len(requests) == 3 + 4


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_request_that_the_engine_did_not_end_is_a_failure(tokenizer, reason):
    current = [text_only("")]
    async with connected(tokenizer, lambda request: current[0](request)) as (server, _):
        current[0] = text_only("\\boxed{2", reason)
        with pytest.raises(ServerFailure, match=f"ended the request with '{reason}'"):
            await turn(server, [1])


async def test_a_server_that_has_gone_is_a_failure():
    with socket.socket() as silent:  # holds the port, which another test's server would take
        silent.bind(("127.0.0.1", 0))
        server = OpenAiServer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/", max_attempts=2)
        with pytest.raises(ServerFailure, match="failed 2 times.*Connect"):
            await server.find_model()
        await server.aclose()


@pytest.mark.parametrize("text", ["<html>", '{"object": "error"}', "[1]", ""])
@pytest.mark.parametrize("content_type", ["text/html", "application/json"])
async def test_what_is_no_completion_is_a_failure(tokenizer, text, content_type):
    current = [text_only("")]
    async with connected(tokenizer, lambda request: current[0](request), max_attempts=2) as (server, _):
        current[0] = lambda request: web.Response(text=text, content_type=content_type)
        with pytest.raises(ServerFailure, match="answered .*, expected `choices`"):
            await turn(server, [1])


async def test_nothing_of_the_environment_reaches_the_server(tokenizer, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "private")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    async with connected(tokenizer, text_only("")) as (server, requests):
        await turn(server, [1])
        assert "private" not in str(requests)


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_request_that_is_refused_is_not_asked_again(tokenizer, status):
    current = [text_only("")]
    async with connected(tokenizer, lambda request: current[0](request)) as (server, requests):
        current[0] = lambda request: (status, json.dumps({"error": "no such model"}))
        with pytest.raises(ServerRefused, match=f"HTTP {status}.*no such model"):
            await turn(server, [1])
        assert len(requests) == 1


async def test_a_model_is_chosen_by_name():
    async with connected(None, text_only(""), model="other") as (server, _):
        assert (server.model, server.root, server.max_model_len) == ("other", None, None)
    with pytest.raises(ServerRefused, match="does not serve 'third'; it serves tiny, other"):
        async with connected(None, text_only(""), model="third"):
            pass


def test_more_gpus_than_there_are_are_refused_before_anything_starts(tmp_path):
    from omegaconf import OmegaConf

    rollout = OmegaConf.create({"tensor_model_parallel_size": 4096, "data_parallel_size": 1})
    with pytest.raises(TooFewGpus, match=r"is 4096, but there are \d+ GPUs here"):
        VllmServer(tmp_path, rollout)


def test_the_engine_gets_the_runs_settings_without_those_of_training(tmp_path):
    import torch

    from verl_ext.evaluation.settings import load_config

    rollout = load_config("tiny_dapo", []).actor_rollout_ref.rollout
    server = VllmServer(tmp_path, rollout)
    assert server.seeded == (torch.cuda.device_count() > 0), "the engine dies of seeds on a CPU"
    settings = server._settings
    assert (settings["model"], settings["max_model_len"], server.max_model_len) == (str(tmp_path), 224, 224)
    assert settings["logprobs_mode"] == rollout.logprobs_mode == "processed_logprobs", "as in training"
    assert (settings["dtype"], settings["block_size"], settings["enforce_eager"]) == ("float32", 32, True)
    assert rollout.engine_kwargs.vllm.worker_extension_cls and "worker_extension_cls" not in settings
    assert rollout.load_format == "dummy" and "load_format" not in settings, "random weights would be evaluated"
    rollout.max_model_len = None
    assert VllmServer(tmp_path, rollout).max_model_len == 96 + 128  # prompt and response


def test_beside_gpus_vllms_engine_is_no_fork_of_a_process_that_asked_for_them(tmp_path, monkeypatch):
    import torch
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_ext.evaluation.settings import load_config

    methods = []
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda args: methods.append(os.environ.get(METHOD)))
    rollout = load_config("tiny_dapo", []).actor_rollout_ref.rollout
    for gpus in (0, 1):
        monkeypatch.delenv(METHOD, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        VllmServer(tmp_path, rollout).start()
    assert methods == [None, "spawn"]
