"""Test that with `+repeatable=cpu` two runs of the real stack with the same seed have equal metrics."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.conftest import OWN_SERVER, REPO, launch_tiny, run_to_end
from verl_ext.records import store
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

OVERRIDES = (
    "+repeatable=cpu",
    "trainer.total_training_steps=3",
    "trainer.save_freq=-1",
    "trainer.test_freq=3",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "++reward.reward_kwargs.random_reward_p=0.15",  # some groups are equal and are replaced, the others have a gradient
)


@pytest.fixture(scope="module")
def start(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("repeatable")

    def start(name: str, **environment: str) -> Path:
        out = folder / name
        with running_server() as url:
            run_to_end(launch_tiny("dapo", out, small, *OVERRIDES, SANDBOX_URL=url, **environment), out / "log.txt")
        return out

    return start


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_metrics", REPO / "scripts" / "compare_metrics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rollouts(out: Path) -> list[tuple]:
    """Return what the model and the tools wrote, and the reward."""
    return sorted(
        (r["uid"], r["session"], r["prompt"], repr([turn["text"] for turn in r["turns"]]), r["score"])
        for r in store.rows(out)
    )


def test_two_runs_with_one_seed_are_equal(start: Callable[..., Path], compare: ModuleType) -> None:
    """tests/unit/rollout/test_loop.py and tests/unit/trainer/test_repeatable.py check that another seed differs."""
    first = start("first")
    second = start("second", **OWN_SERVER)  # another server: another seed of hashes
    metrics = compare.read_run(first)
    assert sorted(metrics) == [1, 2, 3]
    assert compare.differences(metrics, compare.read_run(second)) == []
    assert rollouts(first) == rollouts(second)
    # If nothing happened, equality would show nothing: the run did learn, and some of its groups were replaced.
    assert all(data["actor/grad_norm"] > 0 for data in metrics.values())
    assert sum(data["filter_groups/generated"] for data in metrics.values()) > 3 * 4
    assert any(name.startswith("val-core/") for name in metrics[3])
