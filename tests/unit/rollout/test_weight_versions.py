"""Which server wrote a turn, and which weight version wrote each token, through verl's own clients and server."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from verl_ext.rollout.weight_versions import Attempts, joined, noted_attempts, oldest, spans_of


def test_spans_of_a_turn_end_where_the_turn_was_cut():
    attempts = [(3, 4), (0, 5), (4, 5), (2, 6)]
    assert spans_of(attempts, 10, 9) == [(10, 13, 4), (13, 17, 5), (17, 19, 6)]
    assert spans_of(attempts, 10, 5) == [(10, 13, 4), (13, 15, 5)]
    assert spans_of([(0, 4)], 10, 0) == []


def test_neighbours_of_one_version_are_one_span_and_a_tools_tokens_part_them():
    assert joined([(0, 3, 4)], [(3, 5, 4), (5, 6, 5)]) == [(0, 5, 4), (5, 6, 5)]
    assert joined([(0, 3, 4)], [(7, 9, 4)]) == [(0, 3, 4), (7, 9, 4)]


def test_the_oldest_version_is_unknown_if_any_is():
    assert oldest([(0, 3, 4), (3, 5, 2)]) == 2
    assert oldest([(0, 3, 4), (3, 5, None)]) is None and oldest([]) is None


def client(cls, answers):
    """verl's client, whose server answers with (token ids, version, stop reason, perhaps more) in turn."""
    from verl.workers.rollout.replica import TokenOutput

    answers = iter(answers)

    async def generate(**_):
        ids, version, stop, *more = next(answers)
        fields = {"global_steps": version} | dict(*more)
        return TokenOutput(token_ids=ids, log_probs=None, stop_reason=stop, extra_fields=fields)

    places = itertools.count(1)

    async def acquire_server(request_id):
        return f"10.0.0.{next(places)}:80", SimpleNamespace(generate=SimpleNamespace(remote=generate))

    router = SimpleNamespace(acquire_server=SimpleNamespace(remote=acquire_server))
    made = cls(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="vllm"))), router)
    made._lb_require_acquire_fields, made._release_server = [], lambda *_, **__: None
    return made


def noted(made):
    async def run():
        with noted_attempts() as attempts:
            await made.generate("a", prompt_ids=[1], sampling_params={"max_tokens": 9})
        await made.generate("b", prompt_ids=[1], sampling_params={"max_tokens": 9})  # nobody notes this one
        return attempts

    return asyncio.run(run())


def test_each_request_of_a_turn_is_noted_with_its_version(cpu_platform, monkeypatch):
    from verl.workers.rollout import llm_server

    async def at_once(_):
        return None

    answers = [([7, 7], 3, "aborted"), ([], 4, "aborted"), ([8], 5, "completed"), ([9], 6, "completed")]
    assert noted(client(llm_server.LLMServerClient, answers[2:])) == [(1, 5)]
    monkeypatch.setattr(llm_server.asyncio, "sleep", at_once)
    attempts = noted(client(llm_server.FullyAsyncLLMServerClient, answers))
    assert attempts == [(2, 3), (0, 4), (1, 5)] and attempts.server == "10.0.0.3:80"


@pytest.mark.parametrize("kind", ["LLMServerClient", "FullyAsyncLLMServerClient"])
def test_a_request_that_crossed_updates_is_noted_with_all_its_versions(cpu_platform, kind):
    from verl.workers.rollout import llm_server

    answers = [([7, 8, 8], 3, "completed", {"version_runs": [(1, 3), (2, 4)]}), ([9], 6, "completed", {})]
    assert noted(client(getattr(llm_server, kind), answers)) == [(1, 3), (2, 4)]


def test_a_response_says_which_version_wrote_which_token(roll_out, tokenizer, encode, answer, monkeypatch):
    """The second turn was aborted before its first token, and again after two; nothing of version 8 is in it."""
    from verl_ext.rollout import loop

    call = encode("<code>print(1+1)</code>")
    turns = iter([[(len(call), 6)], [(0, 8), (2, 7), (len(answer) - 2, 9)]])
    servers = iter(["a:1", "b:1"])

    class Noted:
        def __enter__(self):
            attempts = Attempts(next(turns))
            attempts.server = next(servers)
            attempts.lost = ["c:1"]
            return attempts

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(loop, "noted_attempts", Noted)
    recorder = {"enable": True, "token_share": 0.0, "keep_steps": 1, "max_gb": 1}
    output, *_ = roll_out(tokenizer, [call, answer], ["2"], recorder=recorder)
    start, end = output.extra_fields["model_spans"][1]
    expected = [(0, len(call), 6), (start, start + 2, 7), (start + 2, end, 9)]
    assert output.extra_fields["version_spans"] == expected
    assert output.extra_fields["lost_servers"] == ["c:1", "c:1"]
    assert [output.extra_fields[f"{bound}_global_steps"] for bound in ("min", "max")] == [6, 9]
    assert [turn["server"] for turn in output.extra_fields["trajectory"]["turns"]] == ["a:1", "b:1"]


def test_without_a_client_of_verl_a_turn_has_the_version_that_its_server_reported(roll_out, tokenizer, encode, answer):
    turns = [(encode("<code>print(1+1)</code>"), "completed", {"global_steps": 5}), (answer, "completed", {})]
    fields = roll_out(tokenizer, turns, ["2"])[0].extra_fields
    assert [version for *_, version in fields["version_spans"]] == [5, None]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (5, 5)
    assert oldest(fields["version_spans"]) is None
