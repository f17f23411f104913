"""Test RL over two Ray nodes, and SFT over two torchrun nodes of one process each, on this machine's loopback."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from socket import create_connection

import pytest

from tests.e2e.conftest import REPO, launch, read_metrics, run_to_end
from tests.ports import free_port
from tests.processes import kill_tree
from verl_ext.cpu.warm_python import ENVIRONMENT
from verl_ext.sandbox import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

HEAD, WORKER = "127.0.0.2", "127.0.0.3"
# Ray refuses sizes for a running cluster; configs/hardware/cpu.yaml gives them for one that the run starts.
JOIN = (
    "ray_kwargs.ray_init.num_cpus=null",
    "ray_kwargs.ray_init.num_gpus=null",
    "ray_kwargs.ray_init.object_store_memory=null",
)
PLACES = """
import json, ray
ray.init(address="auto", log_to_driver=False)
from ray._private.state import actors
places = [[actor["ActorClassName"].split(".")[-1], actor["Address"]["IPAddress"]] for actor in actors().values()]
print("PLACES", json.dumps(places))
"""


@pytest.fixture
def cluster(python: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield a command's environment on the head of a cluster of two nodes, with a pretended GPU each."""
    port = free_port(HEAD)
    environment = ENVIRONMENT | {
        "PYTHON": python,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token_hex(16),
        "RAY_ADDRESS": f"{HEAD}:{port}",
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray-", dir="/tmp"),  # Ray notes there which cluster to join
    }
    size = {"NUM_GPUS": "1", "NUM_CPUS": "16"}
    nodes = [ray_cluster(tmp_path / "head", "head", NODE_IP=HEAD, RAY_PORT=str(port), **environment, **size)]
    try:
        wait_for_port(HEAD, port, nodes[0], tmp_path / "head")
        nodes.append(
            ray_cluster(tmp_path / "worker", "worker", f"{HEAD}:{port}", NODE_IP=WORKER, **environment, **size)
        )
        wait = ray_cluster(tmp_path / "wait", "wait", "2", **environment | {"PYTHON": sys.executable})
        run_to_end(wait, tmp_path / "wait", timeout_s=300)
        assert f"{WORKER}: 1 GPUs" in (tmp_path / "wait").read_text()
        yield environment
    finally:
        for node in reversed(nodes):
            node.terminate()
        late = []
        for node in nodes:
            try:
                node.wait(60)
            except subprocess.TimeoutExpired:
                late.append(node.args)
            kill_tree(node.pid)
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
        assert not late, "SIGTERM did not end them in a minute"


def ray_cluster(log: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    with open(log, "wb") as sink:
        return subprocess.Popen(
            ["bash", str(REPO / "scripts" / "ray_cluster.sh"), *arguments],
            env=os.environ | environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def wait_for_port(host: str, port: int, process: subprocess.Popen, log: Path, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            create_connection((host, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(log.read_text(errors="replace")[-4000:])


def test_rl_over_two_ray_nodes(small: Path, cluster: dict[str, str], tmp_path: Path) -> None:
    """The 32B launcher has an actor rank and a vLLM server on each node, both of which take part in both steps."""
    log = tmp_path / "log"
    with running_server(options=("--preload", "")) as url:
        process = launch(
            "run_qwen2-32b_dapo.sh",
            log,
            *("+hardware=cpu_tiny", *JOIN, "trainer.val_before_train=False", "trainer.test_freq=-1"),
            MODEL_PATH=str(small / "sft" / "merged"),
            TRAIN_FILE=str(small / "data" / "rl_train.parquet"),
            VAL_FILE=str(small / "data" / "eval.parquet"),
            OUTPUT_DIR=str(tmp_path / "out"),
            SANDBOX_URL=url,
            NNODES="2",
            **cluster,
        )
        run_to_end(process, log)
    asked = subprocess.run(
        [sys.executable, "-c", PLACES], env=os.environ | cluster, capture_output=True, text=True, timeout=300
    )
    assert asked.returncode == 0, asked.stderr
    line = next(line for line in asked.stdout.splitlines() if line.startswith("PLACES"))
    places = sorted(map(tuple, json.loads(line.removeprefix("PLACES"))))
    for actor in ("WorkerDict", "vLLMHttpServer"):
        assert [ip for name, ip in places if name == actor] == [HEAD, WORKER], str(places)
    steps = read_metrics(tmp_path / "out", keep=lambda data: "actor/pg_loss" in data)
    assert [step for step, _ in steps] == [1, 2]
    assert all(data["training/rollout_actor_probs_pearson_corr"] > 0.99 for _, data in steps)
    shards = sorted(path.name for path in (tmp_path / "out" / "global_step_2" / "actor").glob("model_*.pt"))
    assert shards == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]


def test_sft_over_two_torchrun_nodes(small: Path, python: str, tmp_path: Path) -> None:
    """The launcher runs as it is called on each of two machines; both ranks share each sequence (Ulysses)."""
    port = str(free_port())
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    nodes = [
        launch(
            "run_qwen2-32b_sft.sh",
            log,
            *("+hardware=cpu_tiny_sft", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"),
            MODEL_PATH=str(small / "model"),
            TRAIN_FILE=str(small / "data" / "sft_val.parquet"),
            OUTPUT_DIR=str(tmp_path / "out"),
            NNODES="2",
            NPROC_PER_NODE="1",
            NODE_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **ENVIRONMENT,
            PYTHON=python,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for node, log in zip(nodes, logs, strict=True):
            run_to_end(node, log)
    finally:
        for node in nodes:
            kill_tree(node.pid)
    losses = [data["train/loss"] for _, data in read_metrics(tmp_path / "out", keep=lambda data: "train/loss" in data)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    shards = sorted(path.name for path in (tmp_path / "out" / "global_step_6").glob("model_*.pt"))
    assert shards == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]
