"""Speeds fitted to a run, and what the published run says about the simulation."""

import json
from dataclasses import replace

import pytest
import yaml

from scripts.studies.calibration import Run, compare, fit, own_run, published_run, simulate, trainer_speeds
from scripts.studies.events import Speed
from scripts.studies.schedules import Machine
from verl_ext.runs.metrics import Metrics

TRUE = Machine(1, 1, Speed(16, 0.02, 4e-6), 1e-5, 5e-5, 0.0, 0.3, workers=8)
STEP = {
    "response_length/max": 128.0,
    "response_length/clip_ratio": 0.02,
    "prompt_length/mean": 30.0,
    "num_turns/mean": 4.0,
    "num_turns/max": 6.0,
    "tool/seconds": 0.05,
    "tool/queue_s": 0.0,
}


def logged(lengths):
    """Return the metrics of steps as a run on `TRUE` would log them."""
    steps = {number: STEP | {"response_length/mean": length} for number, length in enumerate(lengths, start=1)}
    run = Run("", Metrics(steps, set()), 8, 4, TRUE, ())
    for number, row in steps.items():
        step = simulate(run, number, TRUE)
        row |= {"timing_s/gen": step.rollout_s, "timing_s/step": step.step_s, "perf/total_num_tokens": step.tokens}
        row |= {"timing_s/old_log_prob": step.tokens * 1e-5, "timing_s/update_actor": step.tokens * 5e-5}
    return steps


def test_speeds_are_found_again():
    """Begun 4 times too slow and too fast. What counts is the other step: both speeds explain much of the same."""
    steps = logged([30.0, 60.0, 45.0])
    wrong = replace(TRUE, speed=Speed(16, 0.08, 1e-6), log_prob_s=0, update_s=0, other_s=0)
    run = Run("", Metrics(steps, set()), 8, 4, wrong, (1, 2))
    run = replace(run, machine=trainer_speeds(run))
    assert (run.machine.log_prob_s, run.machine.update_s) == pytest.approx((1e-5, 5e-5))
    assert run.machine.other_s == pytest.approx(0.3)
    run = replace(run, machine=fit(run, (16,)))
    assert run.machine.speed.iteration_s == pytest.approx(0.02, rel=0.1)
    third = compare(run)[2]
    assert not third.is_fitted
    assert third.simulated.rollout_s == pytest.approx(third.rollout_s, rel=0.02)


def write_run(folder, mode="sync"):
    (folder / "hydra").mkdir()
    config = {
        "trainer": {"v1": {"trainer_mode": mode}, "nnodes": 1, "n_gpus_per_node": 1},
        "actor_rollout_ref": {
            "rollout": {"max_num_seqs": 16, "n": 4, "tensor_model_parallel_size": 1, "agent": {"num_workers": 2}}
        },
        "retool": {"sandbox": {"max_concurrency": 4}},
        "data": {"train_batch_size": 8},
        "algorithm": {"filter_groups": {"enable": False}},
    }
    (folder / "hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.dumps({"step": step, "data": row}) for step, row in logged([30, 30, 40, 35, 50, 45, 60, 30]).items()]
    (folder / "metrics-1.jsonl").write_text("\n".join(lines) + "\n")


def test_a_runs_folder_is_read(tmp_path):
    """8 steps, the first two cold, a third of the other six fitted; sandbox: 2 workers of 4 calls."""
    write_run(tmp_path)
    run = own_run(tmp_path)
    assert (run.steps, run.fitted) == ([3, 4, 5, 6, 7, 8], (3, 4))
    assert (run.machine.workers, run.machine.speed.slots, run.prompts, run.n) == (8, 16, 8, 4)
    assert all(abs(each.simulated.rollout_s / each.rollout_s - 1) < 0.1 for each in compare(run))


def test_a_run_in_another_mode_is_refused(tmp_path):
    write_run(tmp_path, mode="separate_async")
    with pytest.raises(ValueError, match="mode separate_async"):
        own_run(tmp_path)


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics"):
        own_run(tmp_path)


def test_what_the_trainer_of_the_published_run_takes():
    """Means of steps 1 and 5: 524.642 s / 24,892,834 tokens is 21.08e-6 s, 604.244 / 29,871,167 is 20.23e-6 s."""
    machine = published_run().machine
    assert machine.log_prob_s == pytest.approx((21.076e-6 + 20.228e-6) / 2, rel=1e-3)
    assert machine.switch_s == pytest.approx((2528.954 - 2492.012 + 3299.951 - 3256.579) / 2, abs=0.01)
