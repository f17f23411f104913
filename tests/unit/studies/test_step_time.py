"""The command: tables and picture."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.studies import step_time
from scripts.studies.calibration import Compared, compare, published_run
from scripts.studies.events import Speed
from scripts.studies.schedules import Machine, Step
from scripts.studies.step_time import Variant, draw_charts, error_table, main, variant_table, variants
from scripts.studies.workload import Shape

PAGE = Path(__file__).resolve().parents[3] / "docs" / "evidence" / "async.md"
SMALL = Shape(8, 4, 30.0, 40.0, 128.0, 0.02, 1.0, 1.0, 3, 0.5)
MACHINE = Machine(2, 1, Speed(16, 0.02, 4e-6), 1e-5, 5e-5, 0.1, 0.3, workers=64)


def test_each_mode_has_a_line():
    found = list(variants(MACHINE, SMALL, useful=0.75, rollout_gpus=1, steps=2))
    names = [each.name for each in found]
    assert names[:2] == ["sync", "sync, 4 x the sandbox workers"] and "partial" in names
    assert [each.staleness for each in found if each.staleness] == 2 * [1, 2, 3, 4, 5, 6, 7, 8]
    by_name = {each.name: each.step for each in found}
    assert by_name["sync, icepop_onpolicy"].train_s < by_name["sync"].train_s
    assert by_name["sync, active sampling"].useful == 8 > by_name["sync"].useful == 6
    few = replace(MACHINE, workers=2)
    *_, slow = itertools.islice(variants(few, SMALL, useful=0.75, rollout_gpus=1, steps=2), 1)
    assert slow.step.rollout_s > by_name["sync"].rollout_s
    assert by_name["partial"].rollout_s < by_name["sync"].rollout_s


def test_speed_is_useful_groups_an_hour_beside_sync():
    """512 x .5 useful groups in 3600 s, and 512 in 7200 s: 256 an hour each. An eighth of them was played."""
    found = [
        Variant("sync", Step(3600, 3000, 600, 32, 1.0)),
        Variant("slower", Step(7200, 7000, 200, 64, 1.0, oldest=3)),
    ]
    *_, first, second = variant_table(found).splitlines()
    assert first.split()[-5:] == ["600", "256", "256", "1.00", "0"]
    assert second.split()[-5:] == ["200", "512", "256", "1.00", "3"]


def test_means_of_errors_are_over_steps_that_were_not_fitted():
    """10% too long and 10% too short: a mean error of 10%, and none of the sum."""
    run = published_run()
    compared = [
        Compared(1, True, 100, 50, 100, Step(200, 200, 0, 1, 1, 50)),
        Compared(2, False, 100, 50, 200, Step(220, 110, 0, 1, 1, 55)),
        Compared(3, False, 100, None, 200, Step(180, 90, 0, 1, 1, 55)),
    ]
    table = error_table(run, compared).splitlines()
    assert table[-1] == "Steps not fitted: mean error 10.0% of the rollouts, 10.0% of a step, +0.0% of their sum"
    assert table[2].startswith("*    1") and table[3].split()[1:7] == ["100", "110", "+10.0%", "50", "55", "+10.0%"]
    assert len(table[4].split()) == 7  # no time of a response in this run's metrics


def test_the_picture_has_both_charts_and_their_legends(tmp_path):
    compared = [Compared(1, True, 100, 50, 120, Step(130, 110, 0, 1, 1, 50))]
    found = [Variant("sync", Step(3600, 1, 1, 1, 1)), Variant("asynchronous, staleness 1", Step(3000, 1, 1, 1, 1), 1)]
    draw_charts(compared, found, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert text.count("<svg ") == 3 and "var(--" not in text
    assert ">simulated rollouts</text>" in text and ">asynchronous</text>" in text


def test_the_published_run_is_met_and_the_page_has_the_table():
    """Rollouts and step within 5%, the mean time of a response within 10%, also on steps not used for the fit."""
    run = published_run()
    compared = compare(run)
    assert [each.number for each in compared] == list(range(1, 11))
    for each in compared:
        assert math.isclose(each.simulated.rollout_s, each.rollout_s, rel_tol=0.05)
        assert math.isclose(each.simulated.step_s, each.step_s, rel_tol=0.05)
        assert math.isclose(each.simulated.generate_s, each.generate_s, rel_tol=0.1)
    [error] = re.findall(r"([\d.]+% of a step)", error_table(run, compared))
    assert f"mean error of {error.removesuffix(' of a step')}" in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_a_step_that_was_not_published_is_refused(capsys):
    for words in (["--step", "11"], ["--step", "0"], ["--useful", "0"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "expected a step of 1 to 10" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(step_time, "compare", lambda run: [])
    monkeypatch.setattr(step_time, "error_table", lambda run, compared: "")
    with pytest.raises(SystemExit, match="has no metrics"):
        main([str(tmp_path)])
