"""`scripts/studies/seeds.py` prints its table and makes no published run again."""

import json
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def seeds():
    from scripts.studies import seeds

    return seeds


def test_what_is_published_is_not_run_again(seeds, tmp_path, monkeypatch, capsys):
    started = []

    def figures_of(folder):
        return {"evaluation": {when: {} for when in ("before", "after")}, "curves": {}}

    monkeypatch.setattr(seeds, "quickstart", lambda out, *arguments: started.append((out.name, *arguments)))
    monkeypatch.setattr(seeds, "figures_of", figures_of)
    monkeypatch.setattr(seeds, "estimate", lambda *_: {"value": 0.3216, "low": 0.2, "high": 0.4})
    results = tmp_path / "small.jsonl"
    task = seeds.RUNGS["small"].task_digest()
    row = {"run": "seed 0", "settings": {"model": "small", "seed": 0, "task": task}} | figures_of(None)
    results.write_text(json.dumps(row) + "\n")
    options = ["--model", "small", "--seeds", "0", "1", "--out", str(tmp_path), "--results", str(results)]
    seeds.main(options)
    small = ("--model", "small")
    stages = ("--stage", "data", "--stage", "sft", "--stage", "merge")
    reward = ("--rl", "+reward.reward_kwargs.random_reward_p=0.322")
    assert started == [
        ("seed_1", *small, "--seed", "1"),
        ("seed_0", *small, "--seed", "0", *stages),  # what the control starts from
        ("control", "--from", str(tmp_path / "seed_0"), *reward, "--seed", "0"),
        ("no_tool", *small, "--prepare=--no-tool", "--sft=+tool=none_sft", "--rl=+tool=none", "--seed", "0"),
    ]
    del started[:]
    seeds.main(options)
    assert not started and "| without Python | .32 [.20, .40] |" in capsys.readouterr().out
    seeds.main([*options, "--seeds", "1"])  # another machine's part: the control and the arm are there, of seed 0
    assert not started
    written = results.read_text()
    control = next(line for line in written.splitlines() if seeds.CONTROL in line)
    results.write_text(written.replace(control, control.replace(task, "another")))
    with pytest.raises(SystemExit):
        seeds.main(options)
    assert not started and "control: random rewards was made with other settings" in capsys.readouterr().err
    results.write_text(written)
    with monkeypatch.context() as patched:
        patched.setenv("MODEL_PATH", "another/model")
        with pytest.raises(SystemExit):
            seeds.main(options)
    assert not started and "'model_path': 'another/model'" in capsys.readouterr().err
    results.write_text(written.replace(task, "another"))
    with pytest.raises(SystemExit):
        seeds.main(options)
    assert not started and f"now:   {row['settings']}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        seeds.main(["--seeds", "2", "0", "--out", str(tmp_path), "--results", str(results)])
    said = capsys.readouterr().err
    assert not started and re.search("(?s)seed 0 was made with other settings.*'small'.*\n.*'tiny'", said)


def test_a_row_of_the_table_has_accuracies_and_intervals(seeds):
    def side(inside: tuple, outside: tuple) -> dict:
        figures = {"tiny_tools": inside, "tiny_tools_ood_large": outside, "tiny_tools_ood_chain": outside}
        return {
            source: {"metrics": {"acc/mean@k": dict(zip(("value", "low", "high"), figure, strict=True))}}
            for source, figure in figures.items()
        }

    nothing = (0.0, 0.0, 0.056)
    summary = {"evaluation": {"before": side((0.321, 0.283, 0.367), nothing)}}
    summary["evaluation"]["after"] = side((0.966, 0.951, 0.981), nothing)
    row = "| seed 0 | .32 [.28, .37] | .97 [.95, .98] | .00 [.00, .06] | .00 [.00, .06] |"
    assert seeds.table("tiny", {"seed 0": summary}).splitlines()[-1] == row
    assert seeds.accuracy({"evaluation": {"after": side((1.0, 0.986, 1.0), nothing)}}, "after", "tiny_tools") == (
        "1.00 [.99, 1.00]"
    )
