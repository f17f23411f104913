"""Test real vLLM servers behind `retool.fleet.routing=ring`: with verl's managers but no trainer, and in a run.

Two servers start; another one joins while requests run, and one of the first leaves.
"""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import REPO, launch_tiny, read_metrics, run_to_end
from tests.e2e.versions import Actor, cluster
from tests.processes import kill_tree
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
ROLLOUTS, TURNS = 16, 8
PROMPT, TURN, REPLY = 64, 24, 40  # tokens: of the prompt, of what the model writes in a turn, of what a tool answers
TOKENS = 600  # of a request that runs while servers come and go


@pytest.fixture(scope="module")
def fleet(python: str, models: tuple) -> SimpleNamespace:
    """Start two servers with weights of version 0; return verl's managers `servers` and `checkpoints`, and `config`."""
    import verl  # noqa: F401
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import LLMServerManager

    from verl_ext.fleet import balancer
    from verl_ext.settings import compose_run

    folder, _ = models
    config = compose_run(
        "tiny_dapo",
        [
            *("hardware=cpu_separate", "objective=glm5_async", f"actor_rollout_ref.model.path={folder / 'model'}"),
            *("actor_rollout_ref.rollout.n_gpus_per_node=2", "actor_rollout_ref.rollout.max_num_seqs=16"),
            *("data.max_prompt_length=64", "data.max_response_length=700"),
            *("retool.fleet.weight_update=keep", "retool.fleet.routing=ring"),
        ],
    )
    with cluster(python, config, num_gpus=3):
        balancer.install(config)
        servers = LLMServerManager.create(config=config)
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        checkpoints = CheckpointEngineManager(config=engine, actor_wg=Actor(folder), replicas=servers.get_replicas())
        checkpoints.update_weights(global_steps=0)
        yield SimpleNamespace(servers=servers, checkpoints=checkpoints, config=config)


def tokens(seed: str, number: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(10, 400) for _ in range(number)]


async def cached_share(client: Any, name: str) -> float:
    """Return the share of prompt tokens, in rollouts of several turns, that came from a server's prefix cache."""

    async def roll_out(number: int) -> tuple[int, int]:
        rollout = f"{name} {number}"
        ids, cached, prompts = tokens(rollout, PROMPT), 0, 0
        for turn in range(TURNS):
            params = {"max_tokens": TURN, "ignore_eos": True, "logprobs": True}
            output = await client.generate(rollout, prompt_ids=ids, sampling_params=params)
            cached, prompts = cached + output.extra_fields["num_cached_tokens"], prompts + len(ids)
            ids = ids + list(output.token_ids) + tokens(f"{rollout} {turn}", REPLY)
        return cached, prompts

    cached, prompts = zip(*await asyncio.gather(*map(roll_out, range(ROLLOUTS))), strict=True)
    return sum(cached) / sum(prompts)


def test_the_turns_of_a_rollout_find_its_cache(fleet, capsys):
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle

    class Random(GlobalRequestLoadBalancer):
        def acquire_server(self, request_id: str) -> tuple[str, Any]:
            self.clear_sticky_cache()
            self._inflight_requests = dict.fromkeys(self._inflight_requests, 0)
            return super().acquire_server(request_id)

    handles = dict(zip(fleet.servers.server_addresses, fleet.servers.server_handles, strict=True))
    routers = {
        "ring": fleet.servers.global_load_balancer,
        "random": get_router_handle(handles, load_balancer_cls=Random),
        "verl": get_router_handle(handles),
    }
    shares = {}
    for name, router in routers.items():
        client = FullyAsyncLLMServerClient(fleet.config, router)
        began = time.monotonic()
        shares[name] = asyncio.run(cached_share(client, name))
        with capsys.disabled():
            print(f"\n{name}: {shares[name]:.3f} of the prompt tokens from the cache, {time.monotonic() - began:.1f} s")
    assert shares["ring"] > 0.75 and shares["ring"] > shares["random"] + 0.1
    assert abs(shares["ring"] - shares["verl"]) < 0.02  # both are sticky


def test_servers_join_and_leave_under_running_requests(fleet, capsys):
    import ray

    from verl_ext.fleet.members import Members
    from verl_ext.rollout.client import AsyncTurnClient

    members = Members(fleet.servers, fleet.checkpoints)

    def rows() -> dict[int, dict[str, Any]]:
        return {row["server"]: row for row in members.rows()}

    def wait_for(is_so: Any) -> float:
        began = time.monotonic()
        while not is_so(rows()):
            assert time.monotonic() < began + 300, rows()
            time.sleep(0.1)
        return time.monotonic() - began

    client = fleet.servers.get_client(client_cls=AsyncTurnClient)

    async def ask(number: int, written: int) -> Any:
        params = {"max_tokens": written, "ignore_eos": True, "logprobs": True}
        rollout = f"running {written} {number}"
        return await client.generate(rollout, prompt_ids=tokens(rollout, PROMPT), sampling_params=params)

    async def ask_all(number: int, written: int) -> list[Any]:
        return await asyncio.gather(*(ask(each, written) for each in range(number)))

    def is_whole(output: Any, written: int) -> bool:
        return len(output.token_ids) == len(output.log_probs) == written and output.stop_reason != "aborted"

    first = fleet.checkpoints.replicas[0]
    engine = ray.get(
        first.server_handle.__ray_call__.remote(
            lambda server: [each.pid for each in server.engine.engine_core.resources.engine_manager.processes]
        )
    )
    assert all(map(psutil.pid_exists, engine))

    assert members.add().startswith("Server 2 is starting.")
    started_s = wait_for(lambda rows: rows[2]["state"] == "waits for weights")
    with members.weights_change():
        fleet.checkpoints.update_weights(global_steps=1)
    assert {row["server"]: (row["state"], row["version"]) for row in rows().values()} == dict.fromkeys(
        range(3), ("serves", 1)
    )

    async def leave_under_load() -> tuple[list[Any], float, float]:
        running = asyncio.ensure_future(ask_all(24, TOKENS))
        await asyncio.sleep(2)
        loads = await asyncio.to_thread(rows)
        assert all(0 < row["requests"] <= 10 for row in loads.values()), loads  # ceil(1.25 x 24 / 3)
        began = time.monotonic()
        await asyncio.to_thread(members.remove, 0)
        gone_s = await asyncio.to_thread(wait_for, lambda rows: 0 not in rows)
        outputs = await running
        return outputs, gone_s, time.monotonic() - began

    outputs, gone_s, ended_s = asyncio.run(leave_under_load())
    assert all(is_whole(output, TOKENS) for output in outputs)
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, engine)) or ray.available_resources().get("GPU") != 1:
        assert time.monotonic() < deadline, "the engine of the server that left still runs, or its GPU is not free"
        time.sleep(0.1)
    assert len(fleet.servers.server_addresses) == len(fleet.checkpoints.replicas) == 2
    with members.weights_change():
        fleet.checkpoints.update_weights(global_steps=2)
    outputs = asyncio.run(ask_all(4, 20))
    assert all(is_whole(output, 20) and output.extra_fields["global_steps"] == 2 for output in outputs)
    with capsys.disabled():
        print(f"\na server started in {started_s:.1f} s, one left in {gone_s:.1f} s, requests ended in {ended_s:.1f} s")


def test_servers_of_a_run_leave_and_join_by_command_while_it_trains(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "rl"

    def fleet_command(*words: str) -> str:
        command = [sys.executable, "-m", "verl_ext.fleet", words[0], str(out), *words[1:]]
        result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
        print(result.stdout)
        return result.stdout

    def wait_for(is_so: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 300
        while not is_so(fleet_command("list")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(2)

    with running_server() as url:
        process = launch_tiny(
            "dapo",
            out,
            small,
            *("hardware=cpu_separate", "trainer.total_training_steps=30", "trainer.test_freq=-1"),
            *("actor_rollout_ref.rollout.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=3"),
            "retool.fleet.routing=ring",
            SANDBOX_URL=url,
        )
        try:
            while not read_metrics(out):
                assert process.poll() is None, (out / "log.txt").read_text(errors="replace")[-4000:]
                time.sleep(1)
            assert fleet_command("list").count("serves") == 2
            fleet_command("remove", "0")
            wait_for(lambda table: "leaves" not in table)
            fleet_command("add")
            wait_for(lambda table: "\n2 " in table and table.count("serves") == 2)
        except BaseException:
            kill_tree(process.pid)
            raise
        run_to_end(process, out / "log.txt")
    steps = [step for step, _ in read_metrics(out, lambda data: "actor/grad_norm" in data)]
    assert steps == list(range(1, 31))
    ledger = [sys.executable, "-m", "verl_ext.ledger", str(out)]
    assert subprocess.run(ledger, cwd=REPO, stdout=subprocess.DEVNULL, timeout=100).returncode == 0
