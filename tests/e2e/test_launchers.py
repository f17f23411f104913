"""The launchers of the large runs, on a CPU with the tiny model: their own code path with small sizes."""

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import launch, read_metrics, run_to_end
from verl_ext.doctor.shape import read_shape
from verl_ext.sandbox import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("run", ["qwen2-32b_sft"])
def test_sft(small: Path, tmp_path: Path, run: str) -> None:
    """Two ranks that share each sequence (Ulysses), six steps."""
    log = tmp_path / "log"
    process = launch(
        f"run_{run}.sh",
        log,
        "+hardware=cpu_tiny_sft",
        MODEL_PATH=str(small / "model"),
        TRAIN_FILE=str(small / "data" / "sft_val.parquet"),
        OUTPUT_DIR=str(tmp_path / "out"),
        NNODES="1",
        NPROC_PER_NODE="2",
        DOCTOR="1",
    )
    run_to_end(process, log)
    losses = [data["train/loss"] for _, data in read_metrics(tmp_path / "out", keep=lambda data: "train/loss" in data)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "doctor: qwen2-32b_sft, quick checks" in log.read_text() and "1 FAIL" not in log.read_text()
    checkpoint = tmp_path / "out" / "global_step_6"
    written = sum(path.stat().st_size for kind in ("model", "optim") for path in checkpoint.glob(f"{kind}_*.pt"))
    shape = read_shape(str(small / "model"))
    # 4 bytes of a weight and 8 of Adam's moments, as the doctor estimates; the files' own form takes some kilobytes
    assert 12 * shape.parameters < written < 12 * shape.parameters + 500_000


@pytest.mark.parametrize("run", ["qwen2-32b_dapo", "qwen2-32b_dapo_published"])
def test_rl(small: Path, tmp_path: Path, run: str) -> None:
    """Two steps, with validation before and after; the published form with hermes' tool calls and the tool bonus."""
    log = tmp_path / "log"
    with running_server(options=("--preload", "")) as url:
        process = launch(
            f"run_{run}.sh",
            log,
            "+hardware=cpu_tiny",
            MODEL_PATH=str(small / "sft" / "merged"),
            TRAIN_FILE=str(small / "data" / "rl_train.parquet"),
            VAL_FILE=str(small / "data" / "eval.parquet"),
            OUTPUT_DIR=str(tmp_path / "out"),
            SANDBOX_URL=url,
            NNODES="1",
            DOCTOR="1",
            RAY_TMPDIR=os.environ.get("RAY_TMPDIR", "/tmp/ray"),
        )
        run_to_end(process, log)
    steps = read_metrics(tmp_path / "out", keep=lambda data: "actor/pg_loss" in data)
    assert [step for step, _ in steps] == [1, 2]
    assert steps[0][1]["filter_groups/generated"] >= 4
    assert (tmp_path / "out" / "global_step_2" / "actor").is_dir()
    assert sorted(path.name for path in (tmp_path / "out" / "validation").iterdir()) == ["0.jsonl", "2.jsonl"]
