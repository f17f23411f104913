"""What LeanAgentLoopWorker leaves out of verl's work, or does at another time; tests/e2e runs it in the real stack."""

import ast
import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.rollout.rollouts import samples_of
from verl_ext.episode import Episode, EpisodeKey, Reward

ROOT = Path(__file__).parents[3]


def test_a_group_is_stored_at_once_when_its_last_sample_has_ended(roll_out_prompt) -> None:
    running, (keys, (fields, tags)), finished = roll_out_prompt(samples_of([3, 1, 2]), raw_prompt="not stored")

    assert running == ("train:p", "running") and finished == ("train:p", "finished")
    assert keys == "train:['p_2_0', 'p_1_0', 'p_0_0']"
    assert [len(row) for row in fields["responses"].unbind()] == [2, 1, 3]
    assert [row.tolist() for row in fields["input_ids"].unbind()] == [[1, 2, 0, 1], [1, 2, 0], [1, 2, 0, 1, 2]]
    assert [row.tolist() for row in fields["rm_scores"].unbind()] == [[0, 2], [1], [0, 0, 3]]
    assert [row.tolist() for row in fields["position_ids"].unbind()][1] == [0, 1, 2]
    assert fields.get("reward_model").tolist() == [{"a": 1}] * 3 and fields.get("uid").tolist() == ["p"] * 3
    assert "raw_prompt" not in fields.keys()
    assert tags[0] == {
        "status": "success",
        "prompt_len": 2,
        "response_len": 2,
        "seq_len": 4,
        "global_steps": 7,
        "min_global_steps": 6,
        "max_global_steps": 7,
    }


@pytest.mark.parametrize(
    ("failing", "stored", "exits"),
    [
        ({0}, ["failure"], []),  # the first status
        ({1, 2, 3}, ["running", "failure"], []),  # the last one, verl's of its failure, and a try
        ({0, 1, 2, 3}, [], [1]),
    ],
)
def test_a_status_that_is_not_stored_is_tried_again_and_ends_the_process_at_last(
    roll_out_prompt, monkeypatch, caplog, failing: set[int], stored: list[str], exits: list[int]
) -> None:
    """The trainer waits for it, and nothing reads what is raised here."""
    import transfer_queue

    from verl_ext.rollout import workers

    asked, seen, ended = itertools.count(), [], []

    async def put(key: str, partition_id: str, tag: dict) -> None:
        if next(asked) in failing:
            raise RuntimeError("request failed")
        seen.append(tag["status"])

    monkeypatch.setattr(transfer_queue, "async_kv_put", put)
    monkeypatch.setattr(workers, "STATUS_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(workers.os, "_exit", ended.append)
    roll_out_prompt(samples_of([1]))
    assert seen == stored and ended == exits
    assert ("would wait forever for the prompt p" in caplog.text) == bool(exits)


@pytest.mark.parametrize(
    ("number", "keys"), [(2, "train:['p_1_0', 'p_0_0']"), (3, "train:['p_2_0', 'p_1_0', 'p_0_0']")]
)
def test_a_prompt_may_say_its_own_number_of_samples(roll_out_prompt, number: int, keys: str) -> None:
    """As with `retool.adaptive_n`; `rollout.n` is 4."""
    _running, (stored, _), finished = roll_out_prompt(samples_of([3, 1, 2, 2]), __rollout_n__=number)
    assert stored == keys and finished == ("train:p", "finished")


@pytest.mark.parametrize("raises_after_s", [0.0, 0.05], ids=["first", "last"])
def test_a_sample_that_raises_makes_its_group_a_failure_whose_rest_is_stored(roll_out_prompt, raises_after_s) -> None:
    async def fail() -> list[int]:
        await asyncio.sleep(raises_after_s)
        raise OSError("a bug")

    _running, (keys, _), status = roll_out_prompt([*samples_of([3, 1]), fail])
    assert keys == "train:['p_1_0', 'p_0_0']"
    assert status == ("train:p", "failure")


@pytest.mark.parametrize(("told", "expected"), [({}, "sandbox_failure"), ({"finish_reason": "its word"}, "its word")])
def test_a_reward_manager_that_does_not_say_how_a_rollout_ended_gets_it_added(told: dict, expected: str) -> None:
    """Validations read it there (trainer/failed_samples.py): a lost sandbox would be a wrong answer."""
    from verl_ext.rollout.scored import ScoredEpisodes

    reward = Reward(0.0, {"acc": 0.0, **told})
    episode = Episode(EpisodeKey("u", 0), finish_reason="sandbox_failure", reward=reward)
    asyncio.run(ScoredEpisodes(None, None, 0).score(episode, {}))
    assert episode.reward.info == {"acc": 0.0, "finish_reason": expected}


ABORTED = {"finish_reason": "aborted"}
SANDBOX_DOWN = {"finish_reason": "sandbox_failure", "sandbox_failure": 1.0}


def failing(*ends: Any):
    """A sample whose tries end so, one after the other: with an exception, or with the reward manager's info."""
    remaining = list(ends)

    async def sample() -> tuple[list[int], Any]:
        end = remaining.pop(0)
        if isinstance(end, Exception):
            raise end
        return [0] * (len(ends) - len(remaining)), end

    return sample


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the worker would have waited."""
    from verl_ext.rollout import scored

    waited = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(scored, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


@pytest.mark.parametrize(
    ("ends", "length"),
    [
        ([{}], 1),
        ([ABORTED, {}], 2),
        ([OSError("a lost server"), ABORTED, {}], 3),
        ([ABORTED] * 3, 3),  # given up: stored, with what marks it
        ([SANDBOX_DOWN], 1),  # the loop has tried its calls again: another response might need no sandbox
    ],
)
def test_a_validation_sample_that_was_aborted_or_raised_is_tried_again(
    roll_out_prompt, pauses, caplog, ends, length
) -> None:
    _, (keys, (fields, _)), status = roll_out_prompt([failing(*ends), failing({})], validate=True)
    assert sorted(ast.literal_eval(keys.removeprefix("val:"))) == ["p_0_0", "p_1_0"] and status == ("val:p", "finished")
    rows = dict(zip(ast.literal_eval(keys.removeprefix("val:")), fields, strict=True))
    assert len(rows["p_0_0"]["responses"]) == length and len(rows["p_1_0"]["responses"]) == 1
    assert rows["p_0_0"]["extra_fields"]["reward_extra_info"] == ends[-1]
    assert pauses == [2.0, 4.0][: length - 1]
    assert caplog.text.count("; trying again (") == length - 1


def test_a_validation_sample_that_raises_to_the_end_is_not_there_and_the_number_of_tries_a_setting(
    roll_out_prompt, pauses
) -> None:
    bug = ValueError("a bug")
    _, (keys, _), status = roll_out_prompt(
        [failing(bug, bug), failing({})], validate=True, retool={"validation": {"retries": 1}}
    )
    assert keys == "val:['p_1_0']" and status == ("val:p", "failure") and pauses == [2.0]


def test_a_training_sample_is_not_tried_again(roll_out_prompt, pauses) -> None:
    """The sampler replaces its group, or leaves it out of it."""
    _, (_, (fields, _)), _ = roll_out_prompt([failing(ABORTED, {}), failing({})])
    assert pauses == [] and sorted(len(row) for row in fields["responses"].unbind()) == [1, 1]


@pytest.mark.parametrize("judged_at", [2, 3, 4])
def test_a_response_that_no_verifier_could_judge_is_judged_again_and_not_sampled_again(
    roll_out_prompt, pauses, judged_at
) -> None:
    verdicts = []

    async def score(episode: Episode, sample: dict) -> Reward:
        verdicts.append(len(episode.row.ids))
        if len(verdicts) == 1:
            raise RuntimeError("the verifier's own error")
        unverified = float(len(verdicts) < judged_at)
        return Reward(0.0, {"unverified": unverified, "finish_reason": "answer"})

    _, (_, (fields, _)), _ = roll_out_prompt([failing(None)], validate=True, score=score)
    assert verdicts == [1] * min(judged_at, 3)
    (extra,) = fields.get("extra_fields").tolist()
    assert extra["reward_extra_info"]["unverified"] == float(judged_at == 4)


def make_worker(config: dict, tokenizer: Any = None) -> Any:
    """A worker without a model, which verl's constructor would load."""
    from verl_ext.rollout.workers import LeanAgentLoopWorker

    class Worker(LeanAgentLoopWorker):
        def __init__(self) -> None:
            self.config, self.tokenizer, self.loops, self.tools = OmegaConf.create(config), tokenizer, {}, []
            self.llm_client = self.processor = self.hf_model_type = self.dataset_cls = None

    return Worker()


@pytest.mark.parametrize(
    ("agent_name", "configured", "protocol"),
    [
        ("retool", "code", "CodeProtocol"),
        ("retool", "hermes", "HermesProtocol"),
        ("retool_code", "hermes", "CodeProtocol"),  # a sample's own choice
        ("retool_hermes", "code", "HermesProtocol"),
    ],
)
def test_the_protocol_is_that_of_the_sample_or_else_of_the_run(agent_name, configured, protocol, tokenizer) -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    from verl_ext.settings import compose_run

    config = compose_run("tiny_dapo")
    rollout = {"response_length": 10, "prompt_length": 10, "multi_turn": {"max_parallel_calls": 1}}
    rollout["agent"] = config.actor_rollout_ref.rollout.agent
    retool = OmegaConf.merge(config.retool, {"protocol": configured, "recorder": {"enable": True}})
    worker = make_worker({"actor_rollout_ref": {"rollout": rollout}, "retool": retool, "data": {}}, tokenizer)
    path = ROOT / config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    for loop in OmegaConf.load(path):  # as verl's worker reads it
        _agent_loop_registry[loop.name] = loop

    async def make():
        return worker.make_loop(agent_name)

    loop = asyncio.run(make())
    assert type(loop.ways.of({}).protocol).__name__ == protocol
    assert worker.loops[agent_name] is loop


def test_an_unknown_agent_loop_is_named() -> None:
    with pytest.raises(KeyError, match="There is no agent loop 'no_such'"):
        make_worker({}).make_loop("no_such")


@pytest.mark.parametrize(("workers", "gpus", "watched"), [(2, 1, False), (1, 2, False), (1, 1, True)])
def test_loops_in_the_server_need_one_server_and_one_worker(workers: int, gpus: int, watched: bool) -> None:
    from verl_ext.rollout.workers import InServerAgentLoopManager

    rollout = {"tensor_model_parallel_size": 1, "data_parallel_size": 1, "agent": {"num_workers": workers}}
    trainer = {"nnodes": 1, "n_gpus_per_node": gpus}
    config = {"actor_rollout_ref": {"rollout": rollout, "model": {}}, "trainer": trainer}
    config["retool"] = {"fleet": {"health": {"enable": watched}}}
    with pytest.raises(ValueError, match="needs one agent-loop worker and one unwatched vLLM server, got"):
        InServerAgentLoopManager(OmegaConf.create(config), None)


async def test_calls_into_the_server_run_in_its_event_loop_and_raise_here() -> None:
    """Ray runs `__ray_call__` in a thread outside the event loop."""
    from verl_ext.rollout.workers import _generate_sequences

    started = []

    async def generate_sequences(batch: str) -> None:
        started.append((batch, asyncio.get_running_loop()))
        if batch == "bad":
            raise ValueError("a bad batch")

    server = SimpleNamespace(_server_task=asyncio.ensure_future(asyncio.sleep(60)))
    server.agent_loop_worker = SimpleNamespace(generate_sequences=generate_sequences)
    await asyncio.to_thread(_generate_sequences, server, "batch")
    assert started == [("batch", asyncio.get_running_loop())]
    with pytest.raises(ValueError, match="a bad batch"):
        await asyncio.to_thread(_generate_sequences, server, "bad")
    server._server_task.cancel()


@pytest.mark.parametrize(
    ("nodes", "gpus", "tensor_parallel", "expected"),
    [(1, 1, 1, 1), (1, 8, 4, 2), (2, 8, 4, 4), (1, 8, 8, 1)],  # nodes x GPUs / GPUs per server
)
def test_number_of_replicas(nodes: int, gpus: int, tensor_parallel: int, expected: int) -> None:
    from verl_ext.rollout.workers import number_of_replicas

    rollout = {"tensor_model_parallel_size": tensor_parallel, "data_parallel_size": 1}
    trainer = {"nnodes": nodes, "n_gpus_per_node": gpus}
    config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"rollout": rollout}})
    assert number_of_replicas(config) == expected


@pytest.mark.parametrize(("hybrid", "expected"), [(False, 3), (True, 5)])
def test_dedicated_servers_are_counted_and_those_on_the_actors_gpus(hybrid: bool, expected: int) -> None:
    from verl_ext.rollout.workers import number_of_replicas

    rollout = {"tensor_model_parallel_size": 4, "data_parallel_size": 1, "nnodes": 2, "n_gpus_per_node": 6}
    trainer = {"nnodes": 1, "n_gpus_per_node": 8, "v1": {"trainer_mode": "separate_async"}}
    actor = {"rollout": rollout, "hybrid_engine": hybrid}
    assert number_of_replicas(OmegaConf.create({"trainer": trainer, "actor_rollout_ref": actor})) == expected


@pytest.mark.parametrize(("routing", "expected"), [("verl", 1), ("ring", 4), (None, 1)])
def test_the_ring_has_the_data_parallel_ranks_of_one_server_to_choose_from(routing, expected) -> None:
    from verl_ext.rollout.workers import number_of_slots

    rollout = {"tensor_model_parallel_size": 2, "data_parallel_size": 4}
    config = {"trainer": {"nnodes": 1, "n_gpus_per_node": 8}, "actor_rollout_ref": {"rollout": rollout}}
    assert number_of_slots(OmegaConf.create(config | {"retool": {"fleet": {"routing": routing}}})) == expected
    assert number_of_slots(OmegaConf.create(config)) == 1  # of a run without the key


@pytest.mark.parametrize(
    ("mode", "client"),
    [
        ("sync", "TurnClient"),
        ("colocate_async", "AsyncTurnClient"),
        ("separate_async", "AsyncTurnClient"),
    ],
)
async def test_loops_in_the_server_ask_it_directly_and_continue_after_an_update(
    monkeypatch, mode: str, client: str
) -> None:
    """In the asynchronous modes a weight update interrupts requests, and only verl's client for these modes resumes."""
    from verl_ext.rollout import workers
    from verl_ext.settings import compose_run

    made = []
    monkeypatch.setattr(workers, "LeanAgentLoopWorker", lambda config, client, *rest: made.append(client))
    config = compose_run("tiny_dapo", [f"trainer.v1.trainer_mode={mode}"])

    serving = asyncio.ensure_future(asyncio.sleep(60))

    class Server:
        _server_task = serving

        async def generate(self, **request: Any) -> Any:
            return request

    server = Server()
    await asyncio.to_thread(workers._start_agent_loops, server, "10.0.0.1:1", config, None)
    serving.cancel()
    assert type(made[0]).__name__ == client
    name, handle = await made[0]._acquire_server("a rollout")
    assert name == "10.0.0.1:1"
    assert await handle.generate.remote(prompt_ids=[1]) == {"prompt_ids": [1]}
    made[0]._release_server(name, request_id="a rollout")


async def test_the_load_balancer_is_asked_once() -> None:
    from verl_ext.rollout.client import TurnClient

    asked = []

    async def acquire_server(request_id: str) -> tuple[str, str]:
        asked.append(request_id)
        return "server_0", "handle"

    client = TurnClient(None, SimpleNamespace(acquire_server=SimpleNamespace(remote=acquire_server)))
    client._lb_require_acquire_fields = []  # as verl's router says
    client.keep_server()
    for request_id in "abc":
        assert await client._acquire_server(request_id, prompt_ids=[1]) == ("server_0", "handle")
        client._release_server("server_0", request_id=request_id)  # the router has no `release_server`
    assert asked == ["a"]
