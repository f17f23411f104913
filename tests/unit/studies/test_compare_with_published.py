"""scripts/studies/compare_with_published.py on the published metrics and on those of real runs of ours (tests/data)."""

import json
import re
import shutil
import xml.etree.ElementTree
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
RL, SFT = REPO / "tests" / "data" / "rl_metrics.jsonl", REPO / "tests" / "data" / "sft_metrics.jsonl"


@pytest.fixture(scope="module")
def script():
    from scripts.studies import compare_with_published

    return compare_with_published


def write_run(folder: Path, rows: dict[int, dict], *, batch: int | None = None, name: str = "metrics-1.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in rows.items()))
    if batch:
        (folder / "hydra").mkdir(exist_ok=True)
        config = {
            "data": {"train_batch_size": batch},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": batch // 2}},
        }
        (folder / "hydra" / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return folder


def row(script, part, title, source=""):
    return next(line for line in script.rows(part) if line.metric.title == title and line.source == source)


def test_the_published_run_alone(script):
    part = script.read_part("rl", [], None, "step")
    entropy = row(script, part, "entropy")
    assert entropy.published == ((1, pytest.approx(0.15766, abs=1e-5)), (10, pytest.approx(0.18041, abs=1e-5)))
    assert entropy.own is None and entropy.own_at_end is None
    assert row(script, part, script.HELD_OUT, "aime_2025").published[0] == (0, pytest.approx(0.18556, abs=1e-5))
    assert len(script.rows(part)) == len(script.COMPARED["rl"]), "every metric compared is in the published log"


def test_no_line_leads_over_steps_that_nobody_logged(script):
    published = script.read_part("sft", [], None, "step").published_curves("train/loss")[""]
    assert published.x == [1, 2, 3, 4, 5, 151, 152] and published.points
    assert not script.read_part("rl", [], None, "step").published_curves("critic/score/mean")[""].points


def test_figures_that_the_published_readme_computes(script):
    steps = script.read_part("rl", [], None, "step").published.steps
    for data in (steps[step] for step in range(1, 11)):
        tokens = data["perf/total_num_tokens"]
        assert tokens / (data["response_length/mean"] + data["prompt_length/mean"]) == pytest.approx(512 * 16, abs=0.01)
        assert tokens / data["timing_s/step"] / data["perf/throughput"] == pytest.approx(8.0)
    assert sum(steps[step]["timing_s/step"] for step in range(1, 11)) / 3600 == pytest.approx(17.8, abs=0.05)
    assert sum(steps[step]["timing_s/testing"] for step in (5, 10)) / 60 == pytest.approx(35, abs=0.5)


def test_every_published_column_has_todays_name_or_is_said_to_have_none(script):
    """Against the keys that real runs of this repository log."""
    for name, own in (("rl", RL), ("sft", SFT)):
        part = script.read_part(name, [own], None, "step")
        lines = script.columns(part.published, part.own)
        assert [line for line in lines if line["today"] and not line["present"]] == []
        gone = [line["published"] for line in lines if line["today"] is None]
        assert not set(gone) & {script.general_key(key) for data in part.own.steps.values() for key in data}
        for metric in script.COMPARED[name]:
            assert part.own_curves(metric.today), f"{metric.today} is not logged"


def test_files_of_a_resumed_run_are_joined_by_step(script, tmp_path):
    write_run(tmp_path, {1: {"actor/entropy": 1.0}, 2: {"actor/entropy": 2.0}})
    write_run(tmp_path, {2: {"actor/entropy": 20.0}, 3: {"actor/entropy": 30.0}}, name="metrics-2.jsonl")
    curve = script.read_part("rl", [tmp_path], None, "step").own_curves("actor/entropy")[""]
    assert (curve.x, curve.y) == ([1, 2, 3], [1.0, 20.0, 30.0])


def test_alignment_by_prompts_and_updates_takes_the_batch_of_the_run(script, tmp_path):
    """64 prompts a step: the published step 10 (5,120 prompts) is our step 80; 2 updates a step: 80 updates, our 40."""
    run = write_run(tmp_path / "run", {step: {"actor/entropy": step / 100} for step in range(1, 91)}, batch=64)
    by_prompts = row(script, script.read_part("rl", [run], None, "prompts"), "entropy")
    assert by_prompts.published[1][0] == by_prompts.own_at_end[0] == 5120
    assert by_prompts.own_at_end[1] == pytest.approx(0.80)
    by_updates = row(script, script.read_part("rl", [run], None, "updates"), "entropy")
    assert by_updates.own_at_end == (80, pytest.approx(0.40))
    by_step = row(script, script.read_part("rl", [run], None, "step"), "entropy")
    assert by_step.own_at_end == (10, pytest.approx(0.10))
    given = row(script, script.read_part("rl", [run], script.Batch(256, 4), "prompts"), "entropy")
    assert given.own_at_end == (5120, pytest.approx(0.20))


def test_no_value_of_ours_stands_for_steps_that_were_not_reached(script, tmp_path):
    run = write_run(tmp_path / "run", {1: {"actor/entropy": 0.2}, 9: {"actor/entropy": 0.3}})
    assert row(script, script.read_part("rl", [run], None, "step"), "entropy").own_at_end is None


def test_other_problems_do_not_stand_beside_the_published_aime(script, tmp_path):
    rows = {0: {"val-core/aime_2025/acc/mean@4": 0.2, "val-core/mine/acc/mean@2": 0.9}}
    part = script.read_part("rl", [write_run(tmp_path / "run", rows)], None, "step")
    assert row(script, part, script.HELD_OUT, "aime_2025").own == ((0, 0.2), (0, 0.2))
    mine = row(script, part, script.HELD_OUT, "mine")
    assert mine.published is None and mine.own == ((0, 0.9), (0, 0.9))


def test_page_holds_both_runs_and_needs_nothing_from_outside(script, tmp_path, capsys):
    page = tmp_path / "deep" / "page.html"
    run = tmp_path / "<run>"
    run.mkdir()
    shutil.copy(RL, run / "metrics-1.jsonl")
    script.main(["--run", str(run), "--sft", str(SFT), "--out", str(page), "--picture", str(tmp_path / "p.svg")])
    text = page.read_text()
    charts = [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert len(charts) == len(script.COMPARED["rl"]) + len(script.COMPARED["sft"])
    assert all({"published", "yours"} <= {each["name"].split(",")[0] for each in chart["series"]} for chart in charts)
    markup = re.sub(
        "<script>.*?</script>", "", text, flags=re.DOTALL
    )  # uPlot's names its home; the policy lets load nothing
    assert "http://" not in markup and "https://" not in markup and "src=" not in markup
    assert "Apache-2.0" in text, "the source and licence of the published metrics"
    assert "entropy" in capsys.readouterr().out
    xml.etree.ElementTree.parse(tmp_path / "p.svg")


def test_own_run_only(script, tmp_path, capsys):
    script.main(["--run", str(RL), "--no-published", "--out", str(tmp_path / "page.html")])
    page, table = (tmp_path / "page.html").read_text(), capsys.readouterr().out
    assert "published," not in page and "Apache-2.0" not in page
    assert re.search(r"^entropy +nats per token +- +- +3\.385 -> 3\.257 +1 - 2 +-$", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "nowhere"], "nowhere does not exist. Expected the folder of a run"),
        (["--run", "empty"], "empty has no metrics*.jsonl"),
        (["--run", "sft.jsonl"], "no metrics of RL; it has perf/.* SFT runs with --sft"),
        (["--sft", "rl.jsonl"], "no metrics of SFT"),
        (["--run", "broken.jsonl"], r"broken.jsonl, line 1: .*Expected a line of verl's file logger"),
        (["--run", "blank.jsonl"], "no metrics of RL; it has nothing"),
        (["--run", "rl.jsonl", "--align", "prompts"], r"the batch of your run is unknown. Set --rl-batch"),
        (["--run", "half", "--align", "prompts"], r"half/hydra/config.yaml has no 'train_batch_size'"),
    ],
)
def test_wrong_input_is_named(script, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    shutil.copy(RL, "rl.jsonl")
    shutil.copy(SFT, "sft.jsonl")
    Path("empty").mkdir()
    Path("broken.jsonl").write_text('{"epoch": 1}\n')
    Path("blank.jsonl").write_text("")
    shutil.copy(RL, write_run(Path("half"), {}, batch=4) / "metrics-1.jsonl")
    Path("half/hydra/config.yaml").write_text("data: {}\n")
    with pytest.raises(SystemExit) as stopped:
        script.main([*arguments, "--out", "page.html"])
    assert re.search(message.replace("*.jsonl", r"\*\.jsonl"), str(stopped.value)), stopped.value
    assert not Path("page.html").exists()


@pytest.mark.parametrize("arguments", [["--no-published"], ["--rl-batch", "0"], ["--rl-batch", "many"]])
def test_wrong_arguments_are_refused(script, arguments):
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments)


def test_the_quickstarts_folder_stands_for_the_run_in_it(script, tmp_path):
    for name, key in (("rl", "actor/entropy"), ("sft", "train/loss")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics-1.jsonl").write_text(json.dumps({"step": 1, "data": {key: 0.5}}) + "\n")
        assert script.read_part(name, [tmp_path], None, "step").own.steps == {1: {key: 0.5}}
