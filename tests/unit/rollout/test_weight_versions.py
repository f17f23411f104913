"""Which version of the weights wrote which token, through verl's own clients and server."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from verl_ext.rollout.weight_versions import joined, noted_attempts, oldest, spans_of


def test_spans_of_a_turn_end_where_the_turn_was_cut():
    attempts = [(3, 4), (0, 5), (4, 5), (2, 6)]
    assert spans_of(attempts, 10, 9) == [(10, 13, 4), (13, 17, 5), (17, 19, 6)]
    assert spans_of(attempts, 10, 5) == [(10, 13, 4), (13, 15, 5)]
    assert spans_of([(0, 4)], 10, 0) == []


def test_neighbours_of_one_version_are_one_span_and_a_tools_tokens_part_them():
    assert joined([(0, 3, 4)], [(3, 5, 4), (5, 6, 5)]) == [(0, 5, 4), (5, 6, 5)]
    assert joined([(0, 3, 4)], [(7, 9, 4)]) == [(0, 3, 4), (7, 9, 4)]


def test_the_oldest_version_is_unknown_where_one_is():
    assert oldest([(0, 3, 4), (3, 5, 2)]) == 2
    assert oldest([(0, 3, 4), (3, 5, None)]) is None and oldest([]) is None


def client(cls, answers):
    """verl's client, whose server answers with (token ids, version, stop reason) in turn."""
    from verl.workers.rollout.replica import TokenOutput

    answers = iter(answers)

    async def generate(**_):
        ids, version, stop = next(answers)
        return TokenOutput(token_ids=ids, log_probs=None, stop_reason=stop, extra_fields={"global_steps": version})

    async def acquire(request_id, **_):
        return "server", SimpleNamespace(generate=SimpleNamespace(remote=generate))

    made = cls(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="vllm"))))
    made._acquire_server, made._release_server = acquire, lambda *_, **__: None
    return made


def noted(made):
    async def run():
        with noted_attempts() as attempts:
            await made.generate("a", prompt_ids=[1], sampling_params={"max_tokens": 9})
        await made.generate("b", prompt_ids=[1], sampling_params={"max_tokens": 9})  # of nobody who asks
        return attempts

    return asyncio.run(run())


def test_each_request_of_a_turn_is_noted_with_its_version(cpu_platform, monkeypatch):
    from verl.workers.rollout import llm_server

    async def at_once(_):
        return None

    answers = [([7, 7], 3, "aborted"), ([], 4, "aborted"), ([8], 5, "completed"), ([9], 6, "completed")]
    assert noted(client(llm_server.LLMServerClient, answers[2:])) == [(1, 5)]
    monkeypatch.setattr(llm_server.asyncio, "sleep", at_once)
    assert noted(client(llm_server.FullyAsyncLLMServerClient, answers)) == [(2, 3), (0, 4), (1, 5)]


def test_a_response_says_which_version_wrote_which_token(roll_out, tokenizer, encode, answer, monkeypatch):
    """The second turn was aborted before its first token, and again after two; nothing of version 8 is in it."""
    from verl_ext.rollout import loop

    call = encode("<code>print(1+1)</code>")
    turns = iter([[(len(call), 6)], [(0, 8), (2, 7), (len(answer) - 2, 9)]])

    class Noted:
        def __enter__(self):
            return next(turns)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(loop, "noted_attempts", Noted)
    log = {"enable": True, "folder": "", "max_mb": 1, "max_files": 2}
    output, *_ = roll_out(tokenizer, [call, answer], ["2"], trajectory_log=log)
    start, end = output.extra_fields["model_spans"][1]
    expected = [(0, len(call), 6), (start, start + 2, 7), (start + 2, end, 9)]
    assert output.extra_fields["version_spans"] == expected
    assert [output.extra_fields[f"{bound}_global_steps"] for bound in ("min", "max")] == [6, 9]
    assert [turn["versions"] for turn in output.extra_fields["trajectory"]["turns"]] == [[6], [7, 9]]


def test_without_a_client_of_verl_a_turn_has_the_version_that_its_server_told(roll_out, tokenizer, encode, answer):
    turns = [(encode("<code>print(1+1)</code>"), "completed", {"global_steps": 5}), (answer, "completed", {})]
    fields = roll_out(tokenizer, turns, ["2"])[0].extra_fields
    assert [version for *_, version in fields["version_spans"]] == [5, None]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (5, 5)
    assert oldest(fields["version_spans"]) is None


@pytest.mark.parametrize("aborted", [True, False])
def test_a_request_has_the_version_at_which_it_was_admitted(cpu_platform, aborted):
    """The weights are replaced when the engine has aborted the request, before verl's server reads their version."""
    from verl.workers.rollout.replica import TokenOutput

    from verl_ext.rollout.weight_versions import read_version_at_admission

    class Server:  # as verl's vLLMHttpServer, around an engine
        global_steps = 3

        async def _park_until_admitted(self, request_id):
            await asyncio.sleep(0)
            return None

        async def generate(self, prompt_ids, sampling_params, request_id):
            await self._park_until_admitted(request_id)
            await asyncio.sleep(0.01)
            return TokenOutput(token_ids=prompt_ids, stop_reason="", extra_fields={"global_steps": self.global_steps})

    read_version_at_admission(SimpleNamespace(vLLMHttpServer=Server))

    async def run():
        server, numbers = Server(), itertools.count()
        early = asyncio.ensure_future(server.generate([1], {}, request_id=str(next(numbers))))
        await asyncio.sleep(0.005)
        server.global_steps += aborted
        late = await server.generate([2], {}, request_id=str(next(numbers)))
        assert not server._admitted_at
        return [output.extra_fields["global_steps"] for output in (await early, late)]

    assert asyncio.run(run()) == ([3, 4] if aborted else [3, 3])


def test_verls_server_is_patched_where_it_is_imported(cpu_platform):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    assert vLLMHttpServer.generate.__module__ == "verl_ext.rollout.weight_versions"
    actor = ray.remote(vLLMHttpServer)
    ray.cloudpickle.dumps(actor.__ray_metadata__.modified_class)  # as Ray sends it to the server's process
