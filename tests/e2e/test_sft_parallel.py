"""Test that SFT gives the same numbers in every layout: one process, two data-parallel ranks, two Ulysses ranks."""

from pathlib import Path

import pytest

from tests.e2e.conftest import launch_tiny, read_metrics, run_to_end

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

LAYOUTS = {  # ranks, Ulysses ranks per sequence
    "one process": (1, 1),
    "fsdp2": (2, 1),
    "ulysses": (2, 2),
}


@pytest.fixture(scope="module")
def curves(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[float, float]]]:
    """Return (loss, gradient norm) of five steps from the same weights, per layout."""
    result = {}
    for name, (ranks, ulysses) in LAYOUTS.items():
        out = tmp_path_factory.mktemp("sft")
        process = launch_tiny(
            "sft",
            out,
            small,
            "trainer.total_training_steps=5",
            "trainer.save_freq=-1",
            "data.val_files=null",
            "optim.lr_warmup_steps_ratio=0",
            f"engine.ulysses_sequence_parallel_size={ulysses}",
            NPROC_PER_NODE=str(ranks),
        )
        run_to_end(process, out / "log.txt")
        metrics = read_metrics(out, lambda data: "train/loss" in data)
        result[name] = [(data["train/loss"], data["train/grad_norm"]) for _, data in metrics]
    return result


@pytest.mark.parametrize("layout", ["fsdp2", "ulysses"])
def test_losses_and_gradients_equal_those_of_one_process(curves: dict, layout: str) -> None:
    assert len(curves[layout]) == 5
    losses, norms = zip(*curves[layout], strict=True)
    expected_losses, expected_norms = zip(*curves["one process"], strict=True)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert norms == pytest.approx(expected_norms, rel=1e-3)


def test_the_loss_moves(curves: dict) -> None:
    """Check that something is learned: otherwise equal losses mean nothing."""
    losses = [loss for loss, _ in curves["one process"]]
    assert abs(losses[0] - losses[-1]) > 1e-3
