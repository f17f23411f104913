import json
import re
from html.parser import HTMLParser

import pytest

from verl_ext.report.page import main, write_report

HOSTILE = "</pre><script>alert('x')</script>&amp;"
VOID = {"meta", "br", "link", "img", "input", "path", "circle"}


def row(problem, acc, *, source="tiny_tools", calls=1, errors=0, failed=0, output=None):
    code = f"<code>print({problem!r})</code>\n<interpreter>\n7\n</interpreter>\n" * calls
    return {
        "input": f"user\n{problem}\nassistant\n",
        "output": output or f"{code}\\boxed{{{7 if acc else 5}}}",
        "gts": "7",
        "score": 1.0 if acc else -1.0,
        "step": 0,
        "acc": float(acc),
        "pred": "7" if acc else "5",
        "verdict": "",
        "method": "",
        "data_source": source,
        "finish_reason": "sandbox_failure" if failed else "answer",
        "tool_calls": float(calls),
        "tool_errors": float(errors),
        "tool_timeouts": 0.0,
        "model_turns": 1.0,
        "response_tokens": 20.0,
        "truncated": 0.0,
        "unverified": 0.0,
        "sandbox_failure": float(failed),
        "uid": f"uuid{problem}_0_0",
    }


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


def add_evaluation(folder, right_before=range(2), right_after=range(7)):
    """8 problems of the trained kind and 2 others; one sample each."""
    before = [row(f"p{i}", i in right_before, calls=i % 2) for i in range(8)]
    before += [row(f"o{i}", 0, source="tiny_tools_ood_large", calls=0) for i in range(2)]
    after = [row(f"p{i}", i in right_after, errors=i == 0) for i in range(8)]
    after += [row("o0", 1, source="tiny_tools_ood_large"), row("o1", 0, source="tiny_tools_ood_large", failed=1)]
    write_lines(folder / "eval" / "before" / "0.jsonl", before)
    write_lines(folder / "eval" / "after" / "5.jsonl", after)


def add_training(folder):
    sft = [{"step": step, "data": {"train/loss": 4.0 / step}} for step in range(1, 21)]
    write_lines(folder / "sft" / "metrics-1.jsonl", [*sft, {"step": 20, "data": {"val/loss": 0.25}}])
    rl = []
    for step in range(1, 6):
        timings = {"timing_s/gen": 1.0, "timing_s/update_actor": 0.5, "timing_s/step": 2.0 + 8 * (step <= 2)}
        rl.append({"step": step, "data": {"train/acc": step / 10, "critic/score/mean": None} | timings})
    rl[4]["data"]["val-core/tiny_tools/acc/mean@2"] = 0.875
    write_lines(folder / "rl" / "metrics-1.jsonl", rl)
    for stage in ("sft", "rl"):
        (folder / stage / "hydra").mkdir()
    (folder / "sft" / "hydra" / "config.yaml").write_text("optim: {lr: 0.004}\n")
    (folder / "rl" / "hydra" / "config.yaml").write_text(f'data: {{train_batch_size: 16}}\nnote: "{HOSTILE}"\n')
    stages = [("sft", 300.0, "done", 4.2), ("rl", 65.4, "broken", 9.5)]
    (folder / "stages.json").write_text(
        json.dumps([{"stage": s, "started": 0, "wall_s": w, "status": st, "peak_gb": gb} for s, w, st, gb in stages])
    )


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "quickstart"
    run.mkdir()
    return run


def written(folder):
    """(console text, page, summary) of the report of a folder."""
    text = write_report(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return text, (folder / "report.html").read_text(encoding="utf-8"), summary


class Balance(HTMLParser):
    """Raises where an end tag does not close the element that is open."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside <{'<'.join(self.open[-3:])}> at {self.getpos()}"
        self.open.pop()


def test_summary_and_page_hold_the_figures_of_the_dumps(folder):
    add_evaluation(folder)
    add_training(folder)
    text, page, summary = written(folder)

    top = summary["headline"]
    assert (top["group"], top["data_sources"], top["num_problems"]) == ("in_distribution", ["tiny_tools"], 8)
    assert (top["before"]["value"], top["after"]["value"], top["difference"]["value"]) == (0.25, 0.875, 0.625)
    assert summary["evaluation"]["after"]["tiny_tools"]["metrics"]["tool/code_ratio"]["value"] == 1.0
    assert summary["evaluation"]["before"]["tiny_tools"]["metrics"]["tool/code_ratio"]["value"] == 0.5
    ood = summary["evaluation"]["after"]["tiny_tools_ood_large"]
    assert ood["metrics"]["acc/mean@k"]["value"] == 1.0  # the sandbox failed the other sample
    assert ood["excluded"] == {"sandbox_failure": 1, "server_failure": 0, "unverified": 0}
    starts = [{"resumed_from": 0, "last": 20}]
    assert summary["sft"] == {"steps": 20, "train_loss": 0.2, "val_loss": 0.25, "starts": starts}
    assert summary["rl"]["steps"] == 5
    assert summary["rl"]["warm_step"] == {
        "num_steps": 3,
        "median_s": 2.0,
        "split_s": {"gen": 1.0, "update_actor": 0.5, "other": 0.5},
    }
    assert summary["curves"]["rl"]["train/acc"] == {"step": [1, 2, 3, 4, 5], "value": [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert summary["curves"]["rl"]["val-core/tiny_tools/acc/mean@2"] == {"step": [5], "value": [0.875]}
    assert summary["total_wall_s"] == 365.4
    assert summary["peak_gb"] == 9.5
    assert summary["missing"] == []
    assert summary["verdict"].startswith("RL raised accuracy from 25.0% [")
    assert "% [" in summary["verdict"] and "to 87.5% [" in summary["verdict"]

    for shown in (
        "25.0% [",
        "87.5% [",
        "+62.5 [",
        "tiny_tools_ood_large",
        "6 min 05 s",
        "2.00 s",
        "9.5 GB",
        'class="bar broken"',
    ):
        assert shown in page, shown
    for printed in ("0.250 [", "0.875 [", "+0.625 [", "Warm RL step: 2.00 s", "All stages: 6 min 05 s"):
        assert printed in text, printed


def test_page_needs_no_network_and_is_well_formed(folder):
    add_evaluation(folder)
    add_training(folder)
    _, page, _ = written(folder)
    assert re.findall(r"https?://[^\"' )]*", page) == ["http://www.w3.org/2000/svg"]  # a name, not an address to load
    assert not re.search(r"\b(src|href)\s*=|@import|url\(", page)
    checker = Balance()
    checker.feed(page)
    assert checker.open == []


def test_every_text_of_the_run_is_escaped(folder):
    add_training(folder)
    hostile = row(HOSTILE, 1, source=f"tools{HOSTILE}", output=f"{HOSTILE}<code>{HOSTILE}</code>\\boxed{{{HOSTILE}}}")
    hostile |= {"gts": HOSTILE, "finish_reason": HOSTILE}
    write_lines(folder / "eval" / "after" / "5.jsonl", [hostile])
    (folder / "stages.json").write_text(json.dumps([{"stage": HOSTILE, "status": HOSTILE, "wall_s": 1.0}]))
    _, page, _ = written(folder)
    assert HOSTILE not in page
    assert page.count("<script>") == 1  # ours
    assert page.count("&lt;/pre&gt;&lt;script&gt;") >= 8
    Balance().feed(page)


def test_rollouts_show_code_and_interpreter_apart(folder):
    add_evaluation(folder)
    _, page, _ = written(folder)
    assert re.search(r'<pre class="code"><span class="who">model&#39;s code</span>print\(', page)
    assert re.search(r'<pre class="tool"><span class="who">interpreter</span>7</pre>', page)
    assert '<code class="boxed">\\boxed{7}</code>' in page
    assert page.count('<article class="card rollout') == 10


@pytest.mark.parametrize(
    ("right_before", "right_after", "start"),
    [
        (range(1), range(8), "RL raised accuracy from 12.5% ["),
        (range(8), range(1), "RL lowered accuracy from 100.0% ["),
        (range(4), range(5), "RL did not measurably change accuracy (from 50.0% ["),  # +12.5 [0, 37.5]
        (range(4), range(1, 5), "RL did not measurably change accuracy (from 50.0% ["),  # one lost, one gained
        (range(5), range(4), "RL did not measurably change accuracy (from 62.5% ["),
    ],
)
def test_verdict_says_what_the_interval_allows(folder, right_before, right_after, start):
    add_evaluation(folder, right_before, right_after)
    assert written(folder)[2]["verdict"].startswith(start)


def test_one_sided_evaluation_is_reported_as_such(folder):
    write_lines(folder / "eval" / "before" / "0.jsonl", [row("a", 1), row("b", 0)])
    text, page, summary = written(folder)
    assert summary["verdict"].startswith("Accuracy before RL is 50.0% [")
    assert summary["headline"]["after"] is None and summary["headline"]["difference"] is None
    assert "evaluation after RL" in summary["missing"]
    assert "No evaluation after RL" in page and "--stage eval" in page


def test_an_evaluation_without_a_verdict_says_so(folder):
    write_lines(folder / "eval" / "after" / "0.jsonl", [row("a", 0, failed=1)])
    text, page, summary = written(folder)
    assert summary["verdict"].startswith("No sample could be judged")


def test_after_sft_alone_the_page_names_what_is_missing_and_the_command_for_it(folder):
    write_lines(folder / "sft" / "metrics-1.jsonl", [{"step": 1, "data": {"train/loss": 4.0}}])
    text, page, summary = written(folder)
    assert summary["verdict"] == "This run has not been evaluated yet."
    assert summary["headline"] is None
    assert summary["rl"] == {"steps": 0, "warm_step": None, "start_up_s": None, "starts": []}
    assert "SFT metrics" not in summary["missing"]
    for part, command in (("RL metrics", "--stage rl"), ("evaluation before RL", "--stage eval")):
        assert part in summary["missing"]
        assert f"No {part}: " in page
        assert re.search(f"Missing: {part}.*{command}", text)
    Balance().feed(page)


def test_summary_has_the_same_keys_whatever_is_missing(folder):
    (folder / "stages.json").write_text("[]")
    empty = written(folder)[2]
    add_evaluation(folder)
    add_training(folder)
    full = written(folder)[2]
    assert empty.keys() == full.keys()
    for part in ("sft", "rl", "curves", "environment", "evaluation"):
        assert empty[part].keys() == full[part].keys()
    assert empty["curves"]["rl"]["train/acc"] == {"step": [], "value": []}


def test_a_metric_that_was_not_logged_is_named_in_its_place(folder):
    add_training(folder)
    assert "The run's metrics hold no <code>critic/score/mean</code>" in written(folder)[1]


def test_without_evaluations_training_rollouts_are_shown(folder):
    rollout = {"input": "user\nq?\nassistant\n", "output": "\\boxed{1}", "gts": "1", "score": 1.0, "step": 3}
    write_lines(folder / "rl" / "rollouts" / "3.jsonl", [rollout])
    _, page, summary = written(folder)
    assert "<h3>RL step 3</h3>" in page
    assert "rollouts" not in summary["missing"]


def test_command_writes_both_files_and_prints_the_table(folder, capsys):
    add_evaluation(folder)
    main(["--run", str(folder)])
    assert str(folder / "report.html") in capsys.readouterr().out
    assert (folder / "report.html").exists() and (folder / "summary.json").exists()


def test_command_fails_with_one_message_for_a_wrong_folder(tmp_path):
    with pytest.raises(SystemExit, match="No run at .*nowhere. Expected its folder; `bash scripts/quickstart.sh`"):
        main(["--run", str(tmp_path / "nowhere")])


# Other runs than the quickstart's ------------------------------------------------------------------------------------


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
    write_lines(run / "validation" / "0.jsonl", [row(f"p{i}", i < 2) for i in range(8)])
    write_lines(run / "validation" / "20.jsonl", [row(f"p{i}", i < 7) for i in range(8)])
    return run


def test_the_folder_of_an_rl_run_is_reported(rl_run):
    text, page, summary = written(rl_run)
    assert summary["kind"] == "rl" and summary["sides"] == ["step 0", "step 20"]
    assert summary["verdict"].startswith("RL raised accuracy from 25.0% [")
    assert "step 0 to step 20 on 8 held-out problems of tiny_tools" in summary["verdict"]
    assert "Step 20" in text and "Step 20" in page and "RL accuracy" in page and "SFT loss" not in page
    assert summary["missing"] == []
    Balance().feed(page)


def test_a_resumed_run_says_from_which_step(rl_run):
    text, page, summary = written(rl_run)
    assert summary["rl"]["starts"] == [{"resumed_from": 0, "last": 12}, {"resumed_from": 10, "last": 20}]
    said = "started from scratch, steps 1 to 12; resumed from step 10, steps 11 to 20"
    assert f"RL: {said}." in page
    assert "RL: resumed from step 10, steps 11 to 20" in text
    (rl_run / "metrics-200.jsonl").unlink()
    assert "started from scratch" not in written(rl_run)[1]  # nothing to say of a run that was started once


def test_an_rl_run_without_validations_shows_its_metrics_and_logged_trajectories(tmp_path):
    run = tmp_path / "dapo"
    config(run, "actor_rollout_ref: {}\n")
    start_file(run, 100, range(1, 7), **{"train/acc": 0.5})
    record = {"step": 6, "validate": False, "ground_truth": "7", "prompt": "<|im_start|>user\n3+4?<|im_end|>\n"}
    record["reward"] = {"acc": 1.0, "reward_base": 1.0, "reward_overlong": -0.5}
    record["turns"] = [
        {"text": "<code>print(3+4)</code>", "calls": [{"output": "7"}]},
        {"text": "\\boxed{7}<|im_end|>"},
    ]
    write_lines(run / "trajectories" / "host-1.jsonl", [record, record | {"validate": True, "step": 7}])
    text, page, summary = written(run)
    assert "6 RL steps, with no validation samples" in summary["verdict"]
    assert "<h3>RL step 6</h3>" in page and "RL step 7" not in page
    assert '<span class="who">interpreter</span>7</pre>' in page and "reward +0.50" in page and "im_end" not in page
    assert summary["missing"] == ["evaluation"] and "trainer.validation_data_dir" in text
    Balance().feed(page)


def test_the_folder_of_an_sft_run_is_reported_with_its_evaluation(tmp_path):
    run = tmp_path / "tiny_sft"
    config(run, "model: {}\noptim: {lr: 0.004}\n")
    write_lines(run / "metrics-1.jsonl", [{"step": s, "data": {"train/loss": 4.0 / s}} for s in range(1, 21)])
    text, page, summary = written(run)
    assert summary["kind"] == "sft" and "20 SFT steps. Lower: training loss from" in text
    assert "SFT loss" in page and "RL" not in re.sub("Tool-integrated RL on verl", "", page.split("<body>")[1])
    assert summary["missing"] == ["evaluation"] and "bash scripts/merge_and_eval.sh RUN" in text
    write_lines(run / "evaluation" / "global_step_20" / "samples.jsonl", [row("a", 1), row("b", 0)])
    text, page, summary = written(run)
    assert summary["verdict"].startswith("Accuracy at step 20 is 50.0% [") and summary["missing"] == []
    Balance().feed(page)


def test_the_folder_of_an_evaluation_is_reported(tmp_path):
    write_lines(tmp_path / "samples.jsonl", [row("a", 1), row("b", 0)])
    text, page, summary = written(tmp_path)
    assert summary["verdict"].startswith("Accuracy in this evaluation is 50.0% [") and summary["missing"] == []
    assert "<h2>Training</h2>" not in page and '<article class="card rollout' in page
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
    with pytest.raises(SystemExit, match="No run at .*Expected a training run .metrics-.*samples.jsonl.*stages.json"):
        main(["--run", str(tmp_path)])
    assert not list(tmp_path.glob("*.html"))


def test_several_runs_stand_side_by_side_with_their_names(folder, rl_run, tmp_path, capsys):
    add_evaluation(folder)
    add_training(folder)
    other = tmp_path / "other" / "dapo"
    write_lines(other / "validation" / "5.jsonl", [row(f"p{i}", i < 3) for i in range(8)])
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
    assert page.count('<path class="line"') >= 3  # train/acc of all three in one chart
    Balance().feed(page)


def test_a_run_named_twice_or_an_out_for_one_is_an_error(rl_run):
    with pytest.raises(SystemExit, match="more than once"):
        main(["--run", str(rl_run), "--run", str(rl_run)])
    with pytest.raises(SystemExit):
        main(["--run", str(rl_run), "--out", "x"])
