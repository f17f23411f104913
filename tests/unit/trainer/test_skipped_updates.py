"""Updates that verl skips are counted and reported, and a run that has no others ends."""

import logging
import math

import pytest
import torch

NAN, INF = math.nan, math.inf


@pytest.fixture
def watch():
    from verl_ext.trainer.skipped_updates import SkippedUpdates

    return SkippedUpdates


def step_of(skipped, updates, role="actor"):
    return {f"{role}/skipped_updates_total": float(skipped), f"{role}/updates_total": float(updates)}


def test_verls_metrics_of_a_batch_say_how_many_of_its_updates_were_skipped(cpu_platform):
    """And of the batches of a step together: verl adds them up, whatever their sizes."""
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    aggregator = MetricsAggregator()
    for norms in ([1.0, NAN, 0.5, INF], [NAN], [0.1, 0.2]):
        reduced = trainer_base.reduce_metrics({"actor/grad_norm": norms, "actor/lr": [1e-6], "critic/grad_norm": [1.0]})
        assert reduced["actor/lr"] == 1e-6 and math.isnan(reduced["actor/grad_norm"]) == (NAN in norms)
        aggregator.add_step_metrics(reduced, sample_count=len(norms))
    step = aggregator.get_aggregated_metrics()
    assert (step["actor/updates_total"], step["actor/skipped_updates_total"]) == (7, 3)
    assert (step["critic/updates_total"], step["critic/skipped_updates_total"]) == (3, 0)


def test_a_batch_without_an_update_of_the_actor_counts_none(cpu_platform):
    from verl.trainer.ppo.v1 import trainer_base

    assert trainer_base.reduce_metrics({"actor/loss": [1.0]}) == {"actor/loss": 1.0}


def test_skipped_updates_are_reported(watch, caplog):
    watch().check(7, step_of(2, 4))
    assert "step 7: 2 of 4 updates (actor) were skipped because the norm of their gradient is not finite" in caplog.text
    caplog.clear()
    watch().check(8, step_of(0, 4) | {"actor/grad_norm": 0.1})
    assert not caplog.text


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("dtype", "most"),
    [(None, 3), ("bf16", 3), ("fp32", 3)] + [(half, 20) for half in ("16", "fp16", "float16", torch.float16)],
)
def test_a_run_without_another_update_in_steps_in_a_row_ends(watch, dtype, most, role):
    watched = watch(dtype)
    for step in range(5, 4 + most):
        watched.check(step, step_of(4, 4, role))
    with pytest.raises(
        RuntimeError, match=rf"All updates \({role}\) of {most} steps in a row, up to step .* step 4\. If"
    ):
        watched.check(4 + most, step_of(4, 4, role))


@pytest.mark.parametrize("between", [step_of(3, 4), step_of(0, 1), step_of(0, 0)])
def test_a_step_with_another_update_restarts_the_count(watch, between):
    watched = watch()
    for step, metrics in enumerate([step_of(4, 4)] * 2 + [between] + [step_of(4, 4)] * 2):
        watched.check(step, metrics)


def test_a_step_of_the_trainer_is_watched(make, monkeypatch, caplog):
    """Two steps are reported; the third, before its checkpoint, is the last."""
    from types import SimpleNamespace

    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def step(self, metrics, timing):
        metrics |= step_of(2, 2)
        return SimpleNamespace(keys=[], tags=[], partition_id="train")

    trainer, calls = make("trainer.save_freq=1")
    monkeypatch.setattr(PPOTrainer, "step", step)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="of 3 steps in a row, up to step 3, were"):
        trainer.fit(None)
    assert calls.saves == [1, 2] and calls.logged[2]["actor/skipped_updates_total"] == 2
    assert [step for step in (1, 2, 3) if f"step {step}: 2 of 2 updates (actor)" in caplog.text] == [1, 2, 3]


@pytest.mark.parametrize(("precision", "most"), [(None, 3), (False, 3), ({"param_dtype": "fp16"}, 20)])
def test_sft_is_watched_where_it_logs(cpu_platform, precision, most):
    """Validations do not count."""
    from verl.utils.tracking import Tracking

    config = {"trainer": {"default_local_dir": "x", "save_freq": -1, "test_freq": -1}, "retool": {"checkpoints": {}}}
    tracking = Tracking("p", "e", [], config=config | {"engine": {"mixed_precision": precision}})
    logged = []
    tracking.logger["test"] = type(
        "", (), {"log": lambda self, data, step: logged.append(data), "finish": lambda self: 0}
    )()
    for step in range(1, most):
        tracking.log({"train/grad_norm": NAN, "train/loss": 1.0}, step)
        tracking.log({"val/loss": 1.0}, step)
    with pytest.raises(RuntimeError, match=rf"All updates \(train\) of {most} steps in a row"):
        tracking.log({"train/grad_norm": INF}, most)
    assert logged[0] == {"train/grad_norm": pytest.approx(NAN, nan_ok=True), "train/loss": 1.0} | {
        "train/skipped_updates_total": 1.0
    }
    assert logged[1] == {"val/loss": 1.0} and logged[-1]["train/skipped_updates_total"] == 1.0
    tracking.log({"train/grad_norm": 0.5}, most + 1)
    assert logged[-1] == {"train/grad_norm": 0.5, "train/skipped_updates_total": 0.0}
