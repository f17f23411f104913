"""`scripts/studies/compare_objectives.py`: what it runs, what it does not run again, and its tables."""

import json
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
DIGESTS = {"data/rl_train.parquet": "abc"}


@pytest.fixture(scope="module")
def script():
    from scripts.studies import compare_objectives

    return compare_objectives


@pytest.fixture
def results(script, tmp_path):
    from scripts.studies.shared import Published

    return lambda: Published(tmp_path / "docs" / "results.jsonl")  # as each call of the script reads them


class Quickstart:
    """Stands in for the real one: fails as often as `failures` says of a run, and writes its journal."""

    def __init__(self, failures=None, stages=("rl",)):
        self.failures, self.stages, self.started = dict(failures or {}), stages, []

    def __call__(self, out, *arguments):
        self.started.append((out.name, *arguments))
        (out / "rl").mkdir(parents=True, exist_ok=True)
        (out / "rl" / "log.txt").write_text("".join(f"line {i}\n" for i in range(30)) + "ValueError: sizes\n")
        is_broken = self.failures.get(out.name, 0) > 0
        entry = {"settings": {"from": DIGESTS}, "wall_s": 20.0, "status": "broken" if is_broken else "done"}
        (out / "stages.json").write_text(json.dumps([{"stage": stage, **entry} for stage in self.stages]))
        if is_broken:
            self.failures[out.name] -= 1
            raise subprocess.CalledProcessError(1, "quickstart")
        if "eval_after" in self.stages:
            (out / "summary.json").write_text(json.dumps(summary(0.3, 0.8)))
            row = {"step": 1, "data": {"train/acc": 0.412345}}
            (out / "rl" / "metrics-1.jsonl").write_text(f"{json.dumps(row)}\n")


def one_seed(script, *objectives):
    return list(script.cells_of(dict.fromkeys(objectives, (0,)), ["sync"]))


def names(fake):
    return [name for name, *_ in fake.started]


def test_every_preset_in_every_mode_is_57_runs_of_three_steps_without_an_evaluation(script):
    cells = list(script.cells_of(dict.fromkeys(script.OBJECTIVES, (0,)), list(script.MODES)))
    assert len(cells) == len(set(map(str, cells))) == 57
    found = script.arguments(script.Cell("sapo", "separate_async", 0), Path("q"), short=True)
    assert found[:6] == ["--from", "q", "--seed", "0", "--stage", "rl"]
    assert found[6:] == [
        *("--rl", "objective=sapo", "--rl", "hardware=cpu_separate", "--rl", "trainer.total_training_steps=3"),
        *("--rl", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"),  # else no step has the whole learning rate
    ]
    whole = script.arguments(script.Cell("dapo", "sync", 2), Path("q"), short=False)
    assert whole == ["--from", "q", "--seed", "2", "--rl", "objective=dapo"]


def test_a_finished_run_is_published_and_not_run_again_and_a_failed_one_is_tried_once_more(script, results, tmp_path):
    cells = one_seed(script, "dapo", "sapo", "gmpo")
    run = {"source": tmp_path / "q", "digests": DIGESTS, "short": True}
    first = Quickstart({"sapo_sync_0": 2, "gmpo_sync_0": 1})
    failed = script.run_missing(cells, tmp_path, results=results(), start=first, **run)
    assert names(first) == ["dapo_sync_0", *["sapo_sync_0"] * 2, *["gmpo_sync_0"] * 2]
    assert list(failed) == [script.Cell("sapo", "sync", 0)]
    end = failed[script.Cell("sapo", "sync", 0)].splitlines()
    assert end[0].endswith("sapo_sync_0/rl/log.txt:")
    assert end[1:] == [*(f"line {i}" for i in range(19, 30)), "ValueError: sizes"]
    made = {name: script.settings_of(cell, DIGESTS, short=True) for cell in cells if (name := str(cell))}
    rows = {name: {"run": name, "settings": made[name], "seconds": 20.0} for name in ("dapo_sync_0", "gmpo_sync_0")}
    assert results().rows == rows
    second = Quickstart()  # on another machine, which has only the results
    assert script.run_missing(cells, tmp_path / "other", results=results(), start=second, **run) == {}
    assert names(second) == ["sapo_sync_0"]  # the next call tries it again, and no other


def test_a_comparison_is_done_when_it_is_evaluated(script, results, tmp_path):
    cell = script.Cell("dapo", "sync", 0)
    run = {"out": tmp_path, "source": tmp_path / "q", "digests": DIGESTS, "short": False}
    script.run_missing([cell], results=results(), start=Quickstart(stages=("rl",)), **run)
    assert not results().rows
    again = Quickstart(stages=("rl", "eval_after"))
    script.run_missing([cell], results=results(), start=again, **run)
    (row,) = results().rows.values()
    assert names(again) == ["dapo_sync_0"] and script.gains_of([row]) == [pytest.approx(0.5)]
    assert row["curves"]["train/acc"] == [[1], [0.4123]]


def test_a_line_that_is_no_result_is_named(results, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.jsonl").write_text('{"seconds": 3}\n')
    with pytest.raises(ValueError, match="line 1: no key 'run'. Expected an object with `run`"):
        results()


@pytest.mark.parametrize("other", ["from", "rl", "preset", "task"])
def test_runs_of_other_settings_are_not_taken_for_ones_own(script, results, tmp_path, monkeypatch, other):
    """They are refused before the first run; a run that failed has no result yet."""
    cells, first = one_seed(script, "dapo", "sapo"), Quickstart({"sapo_sync_0": 2})
    run = {"source": tmp_path / "q", "digests": DIGESTS, "short": True}
    script.run_missing(cells[1:], tmp_path, results=results(), start=first, **run)
    made = script.settings_of
    monkeypatch.setattr(script, "settings_of", lambda *_, **__: made(*_, **__) | {other: "another"})
    again = Quickstart()
    with pytest.raises(ValueError, match=rf"(?s)sapo_sync_0 was started with other settings.*'{other}': 'another'"):
        script.run_missing(cells, tmp_path, results=results(), start=again, **run)
    assert not again.started


def test_the_task_is_among_the_settings(script):
    """Its config has the learning rate and the number of steps."""
    cell = script.Cell("dapo", "sync", 0)
    assert script.settings_of(cell, DIGESTS, short=False)["task"] == script.RUNGS["tiny"].task_digest()


def test_a_folder_that_the_script_did_not_begin_is_not_taken_for_a_run(script, tmp_path):
    Quickstart()(tmp_path / "dapo_sync_0")
    with pytest.raises(ValueError, match="dapo_sync_0 was not started by this script"):
        script.is_done(tmp_path / "dapo_sync_0", settings={}, short=True)


def test_a_folder_that_another_process_writes_ends_the_script(script, results, tmp_path):
    """If the script was killed, its training lives on: no other run may begin next to it."""
    start, cells = Quickstart(), one_seed(script, "dapo", "sapo")
    (tmp_path / "dapo_sync_0").mkdir()
    run = {"source": tmp_path / "q", "digests": DIGESTS, "short": True}
    with script.lock_folder(tmp_path / "dapo_sync_0"), pytest.raises(SystemExit, match="Another run writes into"):
        script.run_missing(cells, tmp_path, results=results(), start=start, **run)
    assert not start.started


def test_published_results_of_another_sft_are_not_taken_for_ones_own(script, results, tmp_path):
    cells, run = one_seed(script, "dapo"), {"source": tmp_path / "q", "short": True}
    script.run_missing(cells, tmp_path, digests=DIGESTS, results=results(), start=Quickstart(), **run)
    other = {"data/rl_train.parquet": "xyz"}
    with pytest.raises(ValueError, match=r"(?s)dapo_sync_0 was made with other settings.*abc.*xyz"):
        script.run_missing(cells, tmp_path / "other", digests=other, results=results(), start=Quickstart(), **run)


def test_the_table_of_modes(script):
    """Means: (30 + 40) / 2 in sync, 50 in separate_async."""
    seconds = {("dapo", "sync"): 30.0, ("sapo", "sync"): 40.0, ("dapo", "separate_async"): 50.0}
    modes = ["sync", "separate_async", "colocate_async"]
    text = script.mode_table(["dapo", "sapo"], modes, seconds, {("sapo", "separate_async")})
    assert text.splitlines() == [
        "| objective | sync | separate_async | colocate_async |",
        "|---|---|---|---|",
        "| dapo | ok, 30 s | ok, 50 s | not run |",
        "| sapo | ok, 40 s | failed | not run |",
        "| mean of the runs that are ok | 35 s | 50 s | - |",
    ]


def summary(before, after):
    def side(value):
        return {"tiny_tools": {"metrics": {"acc/mean@k": {"value": value, "low": value - 0.05, "high": value + 0.05}}}}

    return {"evaluation": {"before": side(before), "after": side(after)}}


def test_gains_over_sft_by_hand(script):
    """Gains .5, .6, .7: mean .6, std .1, t of two degrees 4.303: .1 x 4.303 / sqrt 3 = .248."""
    found = {("dapo", seed): summary(0.25, 0.75 + seed / 10) for seed in (0, 1, 2)}
    found |= {("gspo", seed): summary(0.3, 0.5) for seed in (0, 1, 2)} | {("cispo", 0): summary(0.3, 0.9)}
    found["sapo", 0] = summary(0.3, 0.7)
    wanted = dict.fromkeys(["dapo", "gspo", "cispo", "grpo"], (0, 1, 2)) | {"sapo": (0,)}
    lines = script.gain_table(wanted, found).splitlines()
    sides = (
        ".25 [.20, .30] -> .75 [.70, .80]",
        ".25 [.20, .30] -> .85 [.80, .90]",
        ".25 [.20, .30] -> .95 [.90, 1.00]",
    )
    assert lines[2] == " | ".join(["| dapo", *sides, "+0.600 ± 0.248", "+0.500", "yes |"])
    assert lines[3].endswith("| +0.200 ± 0.000 | +0.200 | no |")
    assert lines[4].endswith("| not run | not run | +0.600 | +0.600 | open |")  # one seed says nothing of three
    assert lines[5].endswith("| not run | not run | not run | - | - | open |")
    assert lines[6].endswith("-> .70 [.65, .75] | - | - | +0.400 | +0.400 | yes |")  # one seed was wanted


def test_six_objectives_have_three_seeds_and_the_others_one(script):
    cells = list(script.cells_of(script.SEEDS, ["sync"]))
    assert len(cells) == len(set(cells)) == 6 * 3 + 13
    assert {each.objective for each in cells[:6]} == {each.objective for each in cells if each.seed == 2}
    assert {each.objective for each in cells if each.seed == 2} == set(script.COMPARED)


def test_the_picture_has_a_curve_and_a_gain_of_each_objective(script, tmp_path):
    found = {("dapo", seed): summary(0.3, 0.8 + seed / 10) for seed in (0, 1)}
    for (_, seed), result in found.items():
        result["curves"] = {"train/acc": [[1, 2], [0.1 + seed / 10, 0.2 + seed / 10]]}
    script.draw(["dapo", "olmorl"], found, tmp_path / "all.svg")
    picture = (tmp_path / "all.svg").read_text()
    assert "Gain over SFT" in picture and "dapo: 0.15 at 1, 0.25 at 2" in picture and "dapo: 0.55 at 1" in picture


def test_no_two_objectives_of_a_chart_share_a_colour(script, tmp_path):
    result = summary(0.3, 0.8) | {"curves": {"train/acc": [[1, 2], [0.1, 0.2]]}}
    script.draw(list(script.SEEDS), {(name, 0): result for name in script.SEEDS}, tmp_path / "all.svg")
    picture = (tmp_path / "all.svg").read_text()
    assert all(f"{name}: 0.1 at 1" in picture for name in script.SEEDS)
    for chart in picture.split("<svg")[2:]:
        colours = re.findall('style="(?:stroke|fill):(#[0-9a-f]{6})"', chart.split("</svg>")[0])
        assert 5 <= len(colours) == len(set(colours))


def test_the_page_has_the_gains_of_the_published_results(script):
    evidence = REPO / "docs" / "evidence"
    gains, modes = (
        {row["run"]: row for row in map(json.loads, (evidence / "objectives" / name).read_text().splitlines())}
        for name in ("gains.jsonl", "modes.jsonl")
    )
    found = {(each.objective, each.seed): gains[str(each)] for each in script.cells_of(script.SEEDS, ["sync"])}
    printed = re.findall(
        r"^\| (\w+) \|.*\| \+0\.(\d{3})[^|]*\| \+0\.\d+ \| \w+ \|$", script.gain_table(script.SEEDS, found), re.M
    )
    page = (evidence / "objectives.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|.*\| \+(\d\d\.\d)", page, re.M) == [
        (name, f"{gain[:2]}.{gain[2]}") for name, gain in printed
    ]
    assert len(printed) == 19
    cells = script.cells_of(dict.fromkeys(script.OBJECTIVES, (0,)), list(script.MODES))
    assert modes.keys() == set(map(str, cells))
