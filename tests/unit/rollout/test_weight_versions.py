"""Which server wrote a turn, and which weight version wrote each token, through verl's own clients and server."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from verl_ext.episode import Episode, EpisodeKey, TokenRow
from verl_ext.rollout.client import TurnRequests
from verl_ext.rollout.rows import to_outputs
from verl_ext.rollout.weight_versions import joined, spans_of


def test_spans_of_a_turn_end_where_the_turn_was_cut():
    attempts = [(3, 4), (0, 5), (4, 5), (2, 6)]
    assert spans_of(attempts, 10, 9) == [(10, 13, 4), (13, 17, 5), (17, 19, 6)]
    assert spans_of(attempts, 10, 5) == [(10, 13, 4), (13, 15, 5)]
    assert spans_of([(0, 4)], 10, 0) == []


def test_neighbours_of_one_version_are_one_span_and_a_tools_tokens_part_them():
    assert joined([(0, 3, 4)], [(3, 5, 4), (5, 6, 5)]) == [(0, 5, 4), (5, 6, 5)]
    assert joined([(0, 3, 4)], [(7, 9, 4)]) == [(0, 3, 4), (7, 9, 4)]


def test_the_oldest_version_is_unknown_if_any_is():
    def oldest(*rows):
        return Episode(EpisodeKey("u", 0), rows=[TokenRow(version_spans=row) for row in rows]).oldest_version()

    assert oldest([(0, 3, 4), (3, 5, 2)]) == 2 and oldest([(0, 3, 4)], [(0, 2, 3)]) == 3
    assert oldest([(0, 3, 4), (3, 5, None)]) is None and oldest([]) is None and oldest([], [(0, 1, 1)]) is None


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


def turn_of(made):
    async def run():
        output = await made.generate("a", prompt_ids=[1], sampling_params={"max_tokens": 9})
        await made.generate("b", prompt_ids=[1], sampling_params={"max_tokens": 9})  # another turn
        return output.extra_fields["turn"]

    return asyncio.run(run())


@pytest.fixture
def clients(cpu_platform, monkeypatch):
    """The clients' module, and verl's, which does not wait between two requests."""
    from verl.workers.rollout import llm_server

    from verl_ext.rollout import client

    async def at_once(_):
        return None

    monkeypatch.setattr(llm_server.asyncio, "sleep", at_once)
    return client


def test_each_request_of_a_turn_is_noted_with_its_version(clients):
    answers = [([7, 7], 3, "aborted"), ([], 4, "aborted"), ([8], 5, "completed"), ([9], 6, "completed")]
    assert turn_of(client(clients.TurnClient, answers[2:])).written == [(1, 5)]
    turn = turn_of(client(clients.AsyncTurnClient, answers))
    assert turn.written == [(2, 3), (0, 4), (1, 5)] and turn.server == "10.0.0.3:80"


@pytest.mark.parametrize("kind", ["TurnClient", "AsyncTurnClient"])
def test_a_request_that_crossed_updates_is_noted_with_all_its_versions(clients, kind):
    answers = [([7, 8, 8], 3, "completed", {"version_runs": [(1, 3), (2, 4)]}), ([9], 6, "completed", {})]
    assert turn_of(client(getattr(clients, kind), answers)).written == [(1, 3), (2, 4)]


def test_a_server_is_not_blamed_for_a_later_request_that_finds_none(clients):
    made, blamed = client(clients.AsyncTurnClient, [([7], 3, "aborted")]), []
    acquire = made._load_balancer.acquire_server.remote
    places = iter([acquire])

    async def acquire_server(request_id):
        if (acquire := next(places, None)) is None:
            raise RuntimeError("No available servers")
        return await acquire(request_id)

    made._load_balancer.acquire_server = SimpleNamespace(remote=acquire_server)
    made._load_balancer.failed = SimpleNamespace(remote=lambda server_id: blamed.append(server_id))
    with pytest.raises(RuntimeError, match="No available servers"):
        turn_of(made)
    assert blamed == []


async def test_turns_at_the_same_time_are_noted_apart(clients):
    """A client is shared by all rollouts of a worker."""
    ends = {name: asyncio.Event() for name in "ab"}

    async def generate(*, prompt_ids, **_):
        await ends["ab"[prompt_ids[0]]].wait()
        return TokenOutput(token_ids=prompt_ids, stop_reason="completed", extra_fields={"global_steps": prompt_ids[0]})

    from verl.workers.rollout.replica import TokenOutput

    made = client(clients.AsyncTurnClient, [])
    made.keep_server("s:1", SimpleNamespace(generate=SimpleNamespace(remote=generate)))
    turns = [made.generate(name, prompt_ids=[i], sampling_params={"max_tokens": 9}) for i, name in enumerate("ab")]
    running = [asyncio.ensure_future(turn) for turn in turns]
    await asyncio.sleep(0)
    ends["b"].set()
    assert (await running[1]).extra_fields["turn"].written == [(1, 1)]
    ends["a"].set()
    assert (await running[0]).extra_fields["turn"].written == [(1, 0)]


def test_a_response_says_which_version_wrote_which_token(roll_out, tokenizer, encode, answer):
    """The second turn was aborted before its first token, and again after two; nothing of version 8 is in it."""
    call = encode("<code>print(1+1)</code>")
    requests = [
        TurnRequests("a:1", [(len(call), 6)], ["c:1"]),
        TurnRequests("b:1", [(0, 8), (2, 7), (len(answer) - 2, 9)], ["c:1"]),
    ]
    turns = [(ids, "completed", {"turn": each}) for ids, each in zip([call, answer], requests, strict=True)]
    episode, *_ = roll_out(tokenizer, turns, ["2"])
    start, end = episode.row.model_spans[1]
    expected = [(0, len(call), 6), (start, start + 2, 7), (start + 2, end, 9)]
    assert episode.row.version_spans == expected
    assert episode.lost_servers == ["c:1", "c:1"]
    (output,) = to_outputs(episode)
    assert [output.extra_fields[f"{bound}_global_steps"] for bound in ("min", "max")] == [6, 9]
    assert [turn.server for turn in episode.turns] == ["a:1", "b:1"]


def test_without_a_client_of_verl_a_turn_has_the_version_that_its_server_reported(roll_out, tokenizer, encode, answer):
    turns = [(encode("<code>print(1+1)</code>"), "completed", {"global_steps": 5}), (answer, "completed", {})]
    episode = roll_out(tokenizer, turns, ["2"])[0]
    assert [version for *_, version in episode.row.version_spans] == [5, None]
    (output,) = to_outputs(episode)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (5, 5)
    assert episode.oldest_version() is None
