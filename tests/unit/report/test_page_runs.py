"""The report of other runs than the quickstart's, and of several runs."""

import json
import re

import pytest

from tests.unit.evaluation.rows import evaluation, write
from tests.unit.report.runs import Balance, add_evaluation, add_training, row, write_lines, written
from verl_ext.records import store
from verl_ext.report.__main__ import main


def start_file(folder, number, steps, **data):
    write_lines(folder / f"metrics-{number}.jsonl", [{"step": s, "data": {"timing_s/step": 2.0} | data} for s in steps])


def config(folder, text):
    (folder / "hydra").mkdir(parents=True, exist_ok=True)
    (folder / "hydra" / "config.yaml").write_text(text)


@pytest.fixture
def rl_run(tmp_path):
    """What an RL launcher leaves that validates at steps 0 and 20, and was resumed from step 10."""
    run = tmp_path / "dapo"
    config(run, "actor_rollout_ref: {rollout: {n: 8}}\ntrainer: {}\n")
    start_file(run, 100, range(1, 13), **{"train/acc": 0.5})
    start_file(run, 200, range(11, 21), **{"train/acc": 0.9})
    write(run, [row(f"p{i}", i < 2) for i in range(8)])
    write(run, [row(f"p{i}", i < 7) for i in range(8)], step=20)
    return run


def test_the_folder_of_an_rl_run_is_reported(rl_run):
    text, page, summary = written(rl_run)
    assert summary["kind"] == "rl" and summary["sides"] == ["step 0", "step 20"]
    assert summary["verdict"].startswith("RL raised accuracy from 25.0% [")
    assert "step 0 to step 20 on 8 held-out problems of tiny_tools" in summary["verdict"]
    assert "Step 20" in text and "Step 20" in page and "RL step" in page and "SFT loss" not in page
    assert summary["missing"] == []
    Balance().feed(page)


def test_held_out_accuracy_stands_at_the_steps_of_its_validations(rl_run):
    for step, later in ((0, 4), (20, 16)):
        old, new = (store.path_of(rl_run, "trajectories", each, validate=True) for each in (step, later))
        old.rename(new)
    html = written(rl_run)[1]
    data = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', html)]
    accuracy = next(each for each in data if each["title"] == "accuracy")
    held_out = dict(zip(accuracy["x"], accuracy["series"][-1]["y"], strict=True))
    assert {step: value for step, value in held_out.items() if value is not None} == {4: 0.25, 16: 0.875}


def test_a_resumed_run_says_from_which_step(rl_run):
    text, page, summary = written(rl_run)
    assert summary["rl"]["starts"] == [{"resumed_from": 0, "last": 12}, {"resumed_from": 10, "last": 20}]
    said = "started from scratch, steps 1 to 12; resumed from step 10, steps 11 to 20"
    assert f"RL: {said}." in page
    assert "RL: resumed from step 10, steps 11 to 20" in text
    (rl_run / "metrics-200.jsonl").unlink()
    assert "started from scratch" not in written(rl_run)[1]  # nothing to say of a run that was started once


def test_an_rl_run_without_validations_shows_its_metrics_and_recorded_rollouts(tmp_path):
    run = tmp_path / "dapo"
    config(run, "actor_rollout_ref: {}\n")
    start_file(run, 100, range(1, 7), **{"train/acc": 0.5})
    record = {"step": 6, "ground_truth": "7", "prompt": "<|im_start|>user\n3+4?<|im_end|>\n", "score": 0.5}
    record["turns"] = [
        {"role": "model", "text": "<code>print(3+4)</code>"},
        {"role": "tool", "text": "\n<interpreter>\n7\n</interpreter>\n"},
        {"role": "model", "text": "\\boxed{7}<|im_end|>"},
    ]
    store.write(store.path_of(run, "trajectories", 6), "trajectories", [record, record | {"score": None}])
    text, page, summary = written(run)
    assert "6 RL steps, with no validation samples" in summary["verdict"]
    assert "<h3>RL step 6</h3>" in page
    assert "As the model read it" in page and "reward 0.5</span>" in page
    assert summary["missing"] == ["evaluation"] and "retool.recorder and trainer.test_freq" in text
    Balance().feed(page)
    validated = record | {"uid": "v", "session": 0, "step": 7, "problem": "p", "end_reason": "answer", "acc": 1.0}
    store.write(store.path_of(run, "trajectories", 7, validate=True), "trajectories", [validated])
    _, page, summary = written(run)
    assert summary["verdict"].startswith("Accuracy at step 7 is 100.0% [") and summary["missing"] == []


def test_the_folder_of_an_sft_run_is_reported_with_its_evaluation(tmp_path):
    run = tmp_path / "tiny_sft"
    config(run, "model: {}\noptim: {lr: 0.004}\n")
    write_lines(run / "metrics-1.jsonl", [{"step": s, "data": {"train/loss": 4.0 / s}} for s in range(1, 21)])
    text, page, summary = written(run)
    assert summary["kind"] == "sft" and "20 SFT steps. Lower: training loss from" in text
    assert "SFT loss" in page and "RL" not in re.sub("Tool-integrated RL on verl", "", page.split("<body>")[1])
    assert summary["missing"] == ["evaluation"] and "bash scripts/merge_and_eval.sh RUN" in text
    write(run / "evaluation" / "global_step_20", [row("a", 1), row("b", 0)], step=20)
    text, page, summary = written(run)
    assert summary["verdict"].startswith("Accuracy at step 20 is 50.0% [") and summary["missing"] == []
    Balance().feed(page)


def test_the_folder_of_an_evaluation_is_reported(tmp_path):
    evaluation(tmp_path, [row("a", 1), row("b", 0)])
    _text, page, summary = written(tmp_path)
    assert summary["verdict"].startswith("Accuracy in this evaluation is 50.0% [") and summary["missing"] == []
    assert "<h2>Training</h2>" not in page and '<article class="card"' in page
    Balance().feed(page)


def test_stages_taken_from_another_quickstart_say_so_and_cost_nothing(folder):
    taken = {
        "stage": "sft",
        "started": 0,
        "wall_s": None,
        "status": "done",
        "peak_gb": None,
        "from": "outputs/quickstart",
    }
    own = {"stage": "rl", "started": 0, "wall_s": 65.4, "status": "done", "peak_gb": 3.0}
    (folder / "stages.json").write_text(json.dumps([taken, own]))
    _, page, summary = written(folder)
    assert "done, taken from outputs/quickstart" in page and summary["total_wall_s"] == 65.4
    Balance().feed(page)


@pytest.mark.parametrize("there", [[], ["notes.txt"], ["data/rl_train.parquet"]])
def test_a_folder_that_is_no_run_is_an_error_and_gets_no_page(tmp_path, there):
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match="No run at .*Expected a training run .metrics-.*settings.json.*stages.json"):
        main(["--run", str(tmp_path)])
    assert not list(tmp_path.glob("*.html"))


def test_several_runs_stand_side_by_side_with_their_names(folder, rl_run, tmp_path, capsys):
    add_evaluation(folder)
    add_training(folder)
    other = tmp_path / "other" / "dapo"
    write(other, [row(f"p{i}", i < 3) for i in range(8)], step=5)
    start_file(other, 1, range(1, 6), **{"train/acc": 0.2})
    main(["--run", str(rl_run), str(other), "--run", str(folder), "--out", str(tmp_path / "both")])
    text = capsys.readouterr().out
    page = (tmp_path / "both" / "comparison.html").read_text()
    content = json.loads((tmp_path / "both" / "comparison.json").read_text())
    names = [f"{rl_run.parent.name}/dapo", "other/dapo", f"{tmp_path.name}/quickstart"]
    assert list(content) == names
    for name in names:
        assert name in page and name in text
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "87.5% [" in lines[names[0]] and "37.5% [" in lines[names[1]]
    assert "-50.0 [" in lines[names[1]]  # 3 of 8 right instead of 7, on the same problems
    assert content[names[0]]["difference_from_first"] is None
    assert f"Differences are from {names[0]}, paired by problem, over the problems that both runs have." in page
    data = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    assert [each["name"] for each in next(c for c in data if c["title"] == "accuracy")["series"]] == names
    Balance().feed(page)


def test_a_comparison_begins_with_accuracy_tokens_and_time(folder, tmp_path):
    """As the first figure of ReTool's paper: tool RL and text RL."""
    add_evaluation(folder)
    add_training(folder)
    text_run = tmp_path / "text"
    start_file(
        text_run,
        1,
        range(1, 4),
        **{"train/acc": 0.2, "train/model_tokens": 30.0, "timing_s/step": 60.0, "filter_groups/generated": 16},
    )
    main(["--run", str(folder), str(text_run), "--out", str(tmp_path)])
    page = (tmp_path / "comparison.html").read_text()
    assert page.index("Accuracy, length and time") < page.index("Does it learn?")
    data = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    accuracy, tokens, time = data[:3]
    assert [each["name"] for each in accuracy["series"]] == ["quickstart", "text", "quickstart, held out"]
    held_out = accuracy["series"][2]
    assert [place for place, *_ in held_out["spread"]] == [0, 5] and held_out["points"]
    assert held_out["spread"][1][1] < 0.875 < held_out["spread"][1][2]
    assert [each["y"] for each in tokens["series"]] == [[30.0] * 3]
    lines = {
        each["name"]: [x for x, y in zip(time["x"], each["y"], strict=True) if y is not None] for each in time["series"]
    }
    assert lines["text"] == [60, 120, 180] and time["x_label"] == "seconds of RL steps"
    assert lines["quickstart"] == pytest.approx([10, 20, 22, 24, 26])
    assert "48" in re.search(r'<th scope="row">text</th>(.*?)</tr>', page)[1], "prompts of three steps"
    Balance().feed(page)


@pytest.mark.parametrize(
    ("problems", "ids", "says"),
    [
        ("ab", "", "Differences are from first, paired by problem, over the problems that both runs have."),
        ("ab", "x", "Differences are from first, paired by template, over the problems that both runs have."),
        ("cd", "", "second has no judged problem in common with first."),
    ],
)
def test_a_comparison_says_how_it_is_paired(problems, ids, says, tmp_path):
    for name, asked in (("first", "ab"), ("second", problems)):
        rows = [row(problem, 1) | {"id": ids} for problem in asked]
        evaluation(tmp_path / name, rows)
    main(["--run", str(tmp_path / "first"), str(tmp_path / "second"), "--out", str(tmp_path)])
    lead = re.search('<p class="lead">(.*?)</p>', (tmp_path / "comparison.html").read_text())[1]
    assert lead == f"Accuracy is of each run's last evaluation, with its 95% interval. {says}"


def test_a_run_named_twice_or_an_out_for_one_is_an_error(rl_run):
    with pytest.raises(SystemExit, match="more than once"):
        main(["--run", str(rl_run), "--run", str(rl_run)])
    with pytest.raises(SystemExit):
        main(["--run", str(rl_run), "--out", "x"])
