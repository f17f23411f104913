"""`scripts/seeds.py` prints the table that docs/results.md shows, and makes no run again that is published."""

import json
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def seeds(load_script):
    return load_script("seeds")


def test_what_is_published_is_not_run_again(seeds, tmp_path, monkeypatch, capsys):
    started = []

    def figures_of(folder):
        return {"evaluation": {when: {} for when in ("before", "after")}, "curves": {}}

    monkeypatch.setattr(seeds, "quickstart", lambda out, *arguments: started.append((out.name, *arguments)))
    monkeypatch.setattr(seeds, "figures_of", figures_of)
    monkeypatch.setattr(seeds, "estimate", lambda *_: {"value": 0.3216, "low": 0.2, "high": 0.4})
    results = tmp_path / "small.jsonl"
    results.write_text(json.dumps({"run": "seed 0"} | figures_of(None)) + "\n")
    options = ["--model", "small", "--seeds", "0", "1", "--out", str(tmp_path), "--results", str(results)]
    seeds.main(options)
    small = ("--model", "small", "--seed")
    stages = ("--stage", "data", "--stage", "sft", "--stage", "merge")
    reward = ("--rl", "+reward.reward_kwargs.random_reward_p=0.322")
    assert started == [
        ("seed_1", *small, "1"),
        ("seed_0", *small, "0", *stages),  # what the control starts from
        ("control", "--from", str(tmp_path / "seed_0"), "--seed", "0", *reward),
        ("no_tool", *small, "0", "--data=--no-tool"),
    ]
    del started[:]
    seeds.main(options)
    assert not started and "| without Python | .32 [.20, .40] |" in capsys.readouterr().out


def test_the_page_shows_the_table_as_the_script_prints_it(seeds):
    def side(inside: tuple, outside: tuple) -> dict:
        figures = {"tiny_tools": inside, "tiny_tools_ood_large": outside, "tiny_tools_ood_chain": outside}
        return {
            source: {"metrics": {"acc/mean@k": dict(zip(("value", "low", "high"), figure, strict=True))}}
            for source, figure in figures.items()
        }

    nothing = (0.0, 0.0, 0.056)
    summary = {"evaluation": {"before": side((0.321, 0.283, 0.367), nothing)}}
    summary["evaluation"]["after"] = side((0.966, 0.951, 0.981), nothing)
    page = (REPO / "docs" / "results.md").read_text()
    assert f"\n{seeds.table('tiny', {'seed 0': summary})}\n" in page
    assert seeds.accuracy({"evaluation": {"after": side((1.0, 0.986, 1.0), nothing)}}, "after", "tiny_tools") == (
        "1.00 [.99, 1.00]"
    )
