"""Tables and heat maps of runs, some of which are missing."""

import json

import pytest

from scripts.studies.stability import in_short, read_runs, summarize, table, write_maps

CONDITIONS = ((0, False), (4, True))


def result(after, *, before=0.4, masked=0.1, cosine=None, steps=2, **cell):
    row = {"clipped_low": masked, "clipped_high": 0.0, "dropped": 0.0}
    cell = {"objective": "dapo", "staleness": 0, "bf16": False, "seed": 0} | cell
    rows = [row, row | {"dropped": 0.2, "cosine": cosine}]
    return {"cell": cell, "steps": steps, "before": before, "after": after, "rows": rows}


def test_figures_by_hand():
    """.5, .7, .9: mean .7, sample standard deviation .2, 4.303 x .2 / sqrt 3 = .4969. Masked: .1 and .1 + .2."""
    found = summarize([result(0.5, cosine=0.2), result(0.7, cosine=None), result(0.9, cosine=0.4)])
    assert (found.accuracy, found.half_width) == pytest.approx((0.7, 0.4969), abs=1e-4)
    assert (found.masked, found.cosine, found.collapsed) == pytest.approx((0.2, 0.3, 0))


def test_a_run_that_ends_below_its_start_has_collapsed():
    assert summarize([result(0.3), result(0.4), result(0.5)]).collapsed == pytest.approx(1 / 3)
    assert summarize([result(0.3)]).half_width is None


def write(folder, **cell):
    made = result(0.6, cosine=0.5, **cell)
    with open(folder / "runs.jsonl", "a") as file:
        file.write(json.dumps(made) + "\n")


def test_what_is_not_there_is_missing(tmp_path):
    write(tmp_path)
    write(tmp_path, objective="gspo", staleness=4, bf16=True)
    found = read_runs(tmp_path / "runs.jsonl")
    printed = table(("dapo", "gspo"), CONDITIONS, found, 12)
    assert "2 of 12 runs are done." in printed and len(printed.splitlines()) == 4
    paths = write_maps(("dapo", "gspo"), CONDITIONS, found, tmp_path)
    assert [path.name for path in paths] == [
        f"stability_{name}.svg" for name in ("accuracy", "collapsed", "masked", "cosine")
    ]
    for path, text in zip(paths, ("0.60", "0.00", "0.200", "0.50"), strict=True):
        drawn = path.read_text()
        assert drawn.count(">missing<") == 2 and drawn.count(f">{text}<") == 2
        assert "4 stale, bf16" in drawn


def test_no_run_at_all(tmp_path):
    assert "0 of 12 runs" in table(("dapo", "gspo"), CONDITIONS, read_runs(tmp_path / "none"), 12)
    assert write_maps(("dapo",), CONDITIONS, {}, tmp_path)[0].read_text().count(">missing<") == 2


def test_runs_of_other_lengths_are_not_mixed(tmp_path):
    write(tmp_path)
    write(tmp_path, seed=1, steps=80)
    with pytest.raises(ValueError, match=r"\[2, 80\] steps"):
        read_runs(tmp_path / "runs.jsonl")


def test_a_broken_line_is_named(tmp_path):
    write(tmp_path)
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match=r"runs.jsonl, line 2: no key 'cell'. Expected a run of the map"):
        read_runs(tmp_path / "runs.jsonl")


def test_a_run_in_short_has_the_figures_of_the_whole():
    whole = result(0.6)
    whole["rows"] = [row | {"step": i} for i, row in enumerate(whole["rows"] * 10)]
    whole["rows"][9]["cosine"], whole["rows"][19]["cosine"] = 0.25, 0.75
    short = in_short(whole)
    assert [row["step"] for row in short["rows"]] == [4.5, 14.5]
    assert [row["cosine"] for row in short["rows"]] == [0.25, 0.75]
    figures, expected = summarize([short]), summarize([whole])
    assert (figures.masked, figures.cosine) == pytest.approx((expected.masked, expected.cosine))
