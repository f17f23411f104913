"""Test the launchers of the large runs on a CPU with the tiny model: their own code path with small sizes."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import launch, read_metrics, run_to_end
from verl_ext.cpu.warm_python import ENVIRONMENT
from verl_ext.memory.shape import read_shape
from verl_ext.runs.folder import file_of, judged_files
from verl_ext.sandbox import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_sft(small: Path, python: str, tmp_path: Path) -> None:
    """Two ranks share each sequence (Ulysses) for six steps."""
    log = tmp_path / "log"
    process = launch(
        "run_qwen2-32b_sft.sh",
        log,
        "+hardware=cpu_tiny_sft",
        MODEL_PATH=str(small / "model"),
        TRAIN_FILE=str(small / "data" / "sft_val.parquet"),
        OUTPUT_DIR=str(tmp_path / "out"),
        NNODES="1",
        NPROC_PER_NODE="2",
        **ENVIRONMENT | {"PYTHON": python, "DOCTOR": "1"},
    )
    run_to_end(process, log)
    losses = [data["train/loss"] for _, data in read_metrics(tmp_path / "out", keep=lambda data: "train/loss" in data)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "doctor: qwen2-32b_sft, quick checks" in log.read_text() and "1 FAIL" not in log.read_text()
    checkpoint = tmp_path / "out" / "global_step_6"
    written = sum(path.stat().st_size for kind in ("model", "optim") for path in checkpoint.glob(f"{kind}_*.pt"))
    shape = read_shape(str(small / "model"))
    # 4 bytes of a weight and 8 of Adam's moments, as the doctor estimates; the file format takes some kilobytes
    assert 12 * shape.parameters < written < 12 * shape.parameters + 500_000


def run_rl(run: str, *overrides: str, small: Path, out: Path, python: str) -> list[tuple[int, dict]]:
    """Start the launcher of a run, wait for its end, and return the metrics of its steps."""
    log = out.with_name("log")
    with running_server(options=("--preload", "")) as url:
        process = launch(
            f"run_{run}.sh",
            log,
            *overrides,
            MODEL_PATH=str(small / "sft" / "merged"),
            TRAIN_FILE=str(small / "data" / "rl_train.parquet"),
            VAL_FILE=str(small / "data" / "eval.parquet"),
            OUTPUT_DIR=str(out),
            SANDBOX_URL=url,
            NNODES="1",
            DOCTOR="1",
            **ENVIRONMENT | {"PYTHON": python},
            RAY_TMPDIR=os.environ.get("RAY_TMPDIR", "/tmp/ray"),
        )
        run_to_end(process, log)
    return read_metrics(out, keep=lambda data: "actor/pg_loss" in data)


@pytest.mark.parametrize(  # qwen2-32b_dapo: test_two_nodes.py
    "run", ["qwen3-0.6b_dapo", pytest.param("qwen2-32b_dapo_published", marks=pytest.mark.nightly)]
)
def test_rl(small: Path, python: str, tmp_path: Path, run: str) -> None:
    """Two steps run, with validation before and after; the published form has hermes' tool calls, the 0.6B sdpa."""
    # One run imports in every process, as a user's does; the others fork from one with the imports.
    python = sys.executable if run == "qwen2-32b_dapo_published" else python
    hardware = "[cpu_tiny,no_flash_attn]" if run == "qwen3-0.6b_dapo" else "cpu_tiny"
    out = tmp_path / "out"
    steps = run_rl(run, f"+hardware={hardware}", small=small, out=out, python=python)
    assert [step for step, _ in steps] == [1, 2]
    assert steps[0][1]["filter_groups/generated"] >= 4
    assert (out / "global_step_2" / "actor").is_dir()
    assert json.loads((out / "validation.json").read_text())["values"].keys() == {"0", "2"}
    assert [file_of(path).step for path in judged_files(out)] == [0, 2]


@pytest.mark.nightly
def test_rl_with_servers_on_separate_gpus(small: Path, python: str, tmp_path: Path) -> None:
    """The preset gpu_separate runs with two pretended GPUs; only the transfer of weights is the CPU's."""
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    steps = run_rl(
        "qwen2-7b_dapo",
        "+hardware=[gpu_separate,cpu_tiny]",
        f"{engine}.backend=shared_file",
        f"{engine}.custom_backend_module=verl_ext.cpu.checkpoint_engine",
        "ray_kwargs.ray_init.num_gpus=2",
        small=small,
        out=tmp_path / "out",
        python=python,
    )
    assert [step for step, _ in steps] == [1, 2]
    journal = [json.loads(line) for line in (tmp_path / "out" / "servers.jsonl").read_text().splitlines()]
    assert [entry["event"] for entry in journal if entry["event"] != "run"] == ["started"]
