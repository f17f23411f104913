"""What the quickstart prints about a running command, from its metrics and its log."""

import json
import os
import time

import pytest


def write_metrics(folder, name, *records, age_s=0.0, total=None):
    path = folder / name
    with open(path, "a") as file:
        for step, data in records:
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    os.utime(path, (time.time() + 1 - age_s,) * 2)
    if total:
        (folder / "hydra").mkdir(exist_ok=True)
        (folder / "hydra" / "config.yaml").write_text(f"trainer:\n  total_training_steps: {total}\n")


RL_STEP = {
    "train/acc": 0.5,
    "critic/score/mean": -0.1,
    "tool/code_ratio": 0.75,
    "tool/error_rate": 0.125,
    "response_length/mean": 41.6,
    "actor/entropy": 0.25,
    "timing_s/step": 2.04,
}


@pytest.fixture
def clock(monkeypatch):
    """time.time of supervise, to be set by the test; starts at the present."""
    from types import SimpleNamespace

    from verl_ext.quickstart import supervise

    clock = SimpleNamespace(now=time.time(), time=lambda: clock.now)
    monkeypatch.setattr(supervise, "time", clock)
    return clock


def test_rl_progress_is_one_line_a_step(tmp_path, capsys, clock):
    from verl_ext.quickstart.supervise import show_rl_progress

    write_metrics(tmp_path, "metrics-1.jsonl", (1, RL_STEP), age_s=60)  # of an earlier start
    show = show_rl_progress(tmp_path)
    show()
    assert capsys.readouterr().out == ""

    clock.now += 30
    write_metrics(tmp_path, "metrics-2.jsonl", (0, {"val-core/acc": 1.0}), (6, RL_STEP), total=50)
    show()
    line = "score -0.100 | acc 0.50 | code 0.75 | tool err 12.5% | len 42 tok | entropy 0.250 | 2.0 s"
    assert capsys.readouterr().out == f"  first step after 30 s\n  step 6/50 | {line}\n"

    clock.now += 10
    bypass = {"actor/entropy_loss" if key == "actor/entropy" else key: value for key, value in RL_STEP.items()}
    half = json.dumps({"step": 8, "data": RL_STEP})
    write_metrics(tmp_path, "metrics-2.jsonl", (7, bypass))
    with open(tmp_path / "metrics-2.jsonl", "a") as file:
        file.write(half[:20])  # being written
    show()
    assert capsys.readouterr().out == f"  step 7/50 | {line} | ETA 7:10\n"  # 43 steps of 10 s

    clock.now += 9.9
    with open(tmp_path / "metrics-2.jsonl", "a") as file:
        file.write(half[20:] + "\n")
    show()
    assert capsys.readouterr().out == f"  step 8/50 | {line} | ETA 6:58\n"  # 42 x 9.95 = 417.9 s
    show()
    assert capsys.readouterr().out == ""


def test_an_eta_is_never_60_seconds(tmp_path, capsys, clock):
    from verl_ext.quickstart.supervise import show_rl_progress

    show = show_rl_progress(tmp_path)
    write_metrics(tmp_path, "metrics-1.jsonl", (1, RL_STEP), total=3)
    show()
    clock.now += 119.6
    write_metrics(tmp_path, "metrics-1.jsonl", (2, RL_STEP))
    show()
    assert capsys.readouterr().out.endswith(" | ETA 2:00\n")


def test_sft_progress_is_a_line_every_ten_seconds_and_the_last_step(tmp_path, capsys, clock):
    from verl_ext.quickstart.supervise import show_sft_progress

    show = show_sft_progress(tmp_path)
    for step in range(1, 41):
        clock.now += 1
        write_metrics(
            tmp_path, "metrics-1.jsonl", (step, {"train/loss": 1 / step}), (step, {"val/loss": 9.0}), total=40
        )
        show()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[1:]] == [f"  step {n}/40" for n in (1, 11, 21, 31, 40)]
    assert lines[2] == "  step 11/40 | loss 0.091 | ETA 0:29" and lines[-1] == "  step 40/40 | loss 0.025 | ETA 0:00"


def test_the_doctors_findings_and_the_step_of_a_resume_are_shown_from_a_log(tmp_path, capsys):
    from verl_ext.quickstart.supervise import show_notes

    log = tmp_path / "log.txt"
    log.write_text("Resume: from /old/global_step_5, step 5.\n")  # of an earlier start
    watch = show_notes(log)
    with open(log, "a") as file:
        file.write("INFO importing\nWARN  batch       16 prompts do not divide\n" + " " * 18 + "-> Take 15.\n")
        file.write("doctor: tiny_dapo, quick checks: 9 OK, 1 WARN\n" + " " * 18 + "of a configuration\n")
        file.write("\x1b[36m(TaskRunner pid=7)\x1b[0m INFO:2026-01-01:Resume: from /run/global_step_20, step 20.\nhalf")
    watch()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "  WARN  batch       16 prompts do not divide" and shown[1].strip() == "-> Take 15."
    assert shown[-2:] == [
        "  doctor: tiny_dapo, quick checks: 9 OK, 1 WARN",
        "  Resume: from /run/global_step_20, step 20.",
    ]
    with open(log, "a") as file:
        file.write(" a line\nResume: no checkpoint in /run; training starts from scratch.\n")
    watch()
    assert capsys.readouterr().out == ""
