"""The page, the summary and the console text of a quickstart."""

import errno
import json
import os
import re
from html import unescape

import pytest

from tests.unit.evaluation.rows import write
from tests.unit.report.runs import HOSTILE, Balance, add_evaluation, add_training, row, write_lines, written
from verl_ext.pages.page import SCRIPTS
from verl_ext.records import store
from verl_ext.report.__main__ import main


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


def test_the_five_worst_problems_are_named_by_what_they_ask(folder):
    """Wrong after: p0 to p6. First those that were right before, p5 and p6; p7 is right, and nothing could judge p8."""
    before = [row(f"Find p{i}.", i >= 5) for i in range(9)]
    after = [row(f"Find p{i}.", i == 7, failed=i == 8) for i in range(9)]
    for side, rows in (("before", before), ("after", after)):
        write(folder / "eval" / side, rows)
    _, page, summary = written(folder)
    named = [each["question"] for each in summary["worst"]]
    assert set(named[:2]) == {"Find p5.", "Find p6."} and len(set(named)) == 5
    assert not {"Find p7.", "Find p8."} & set(named)
    assert summary["worst"][0] | {"question": ""} == {
        "question": "", "id": "", "data_source": "tiny_tools", "samples": 1, "acc": 0.0, "before": 1.0,
    }  # fmt: skip
    table = page[page.index("The worst problems") :]
    assert all(f"<td>{name}</td>" in table for name in named) and "Right before" in table
    write(folder / "eval" / "after", [row(f"Find p{i}.", 1) for i in range(9)])
    assert "The worst problems" not in written(folder)[1]


def test_braces_in_a_data_source_are_its_name(folder):
    """`accuracy on {name}` must not be taken for a template."""
    for source in ("{braces}_ood", "{0}_ood", "{_ood", "100%s_ood"):
        for side, right in (("before", 0), ("after", 1)):
            rows = [row(f"p{i}", right, source=source if i % 2 else "tiny_tools") for i in range(16)]
            write(folder / "eval" / side, rows)
        _text, page, summary = written(folder)
        assert f"accuracy on {source} rose from 0.0% to 100.0%" in summary["improved"] and source in unescape(page)


def test_what_turns_or_hides_a_text_is_shown_by_its_number(folder):
    add_training(folder)
    turned, config = "p\u202egnp.exe\u2066\u200b\x1b[2J", folder / "rl" / "hydra" / "config.yaml"
    for side in ("before", "after"):
        turns = [("model", turned)]
        write(folder / "eval" / side, [row(turned, side == "after", source="s\u202e_ood", turns=turns)])
    config.write_text('note: "\u202e"\n', encoding="utf-8")
    write_lines(folder / "rl" / "metrics-2.jsonl", [{"step": 6, "data": {"val-core/s\u202e/acc/mean@2": 0.5}}])
    _, page, _ = written(folder)
    for hidden in "\u202e\u2066\u200b\x1b":
        assert hidden not in page
    assert "\\u202e" not in page, "nor in what the script of a chart is given"
    assert "p&lt;U+202E&gt;gnp.exe&lt;U+2066&gt;&lt;U+200B&gt;\u241b[2J" in page


def test_a_full_disk_leaves_the_report_that_was_there(folder, monkeypatch):
    add_evaluation(folder)
    written(folder)
    before = {name: (folder / name).read_bytes() for name in ("report.html", "summary.json")}
    add_evaluation(folder, right_after=range(2))

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit, match="report: .*No space left on device: .*summary.json"):
        main(["--run", str(folder)])
    add_evaluation(folder.parent / "other")
    with pytest.raises(SystemExit, match="No space left"):
        main(["--run", str(folder), str(folder.parent / "other")])
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert not list(folder.glob("*.part")) and not (folder / "comparison.html").exists()


def test_page_needs_no_network_and_is_well_formed(folder):
    add_evaluation(folder)
    add_training(folder)
    _, page, _ = written(folder)
    markup = re.sub("<script>.*?</script>", "", page, flags=re.DOTALL)  # ours, which the policy lets load nothing
    assert not re.search(r"https?:|\b(src|href)\s*=|@import|url\(", markup)
    assert "default-src 'none'; script-src 'sha256-" in unescape(page)
    checker = Balance()
    checker.feed(page)
    assert checker.open == []


def test_every_text_of_the_run_is_escaped(folder):
    add_training(folder)
    turns = [("model", f"{HOSTILE}<code>{HOSTILE}</code>\\boxed{{{HOSTILE}}}"), ("tool", HOSTILE)]
    hostile = row(HOSTILE, 1, source=f"tools{HOSTILE}", turns=turns, ground_truth=HOSTILE, end_reason=HOSTILE)
    write(folder / "eval" / "after", [hostile])
    (folder / "stages.json").write_text(json.dumps([{"stage": HOSTILE, "status": HOSTILE, "wall_s": 1.0}]))
    _, page, _ = written(folder)
    assert HOSTILE not in page
    assert page.count("<script>") == len(SCRIPTS)  # ours
    assert page.count("&lt;/pre&gt;&lt;script&gt;") >= 8
    Balance().feed(page)


def test_rollouts_show_code_and_its_output_apart(folder):
    add_evaluation(folder)
    _, page, _ = written(folder)
    assert re.search(r'<pre class="code" tabindex="0" aria-label="code"><span class="nb">print</span>', page)
    assert re.search(r'<pre class="out" tabindex="0" aria-label="output">7</pre>', page)
    assert "\\boxed{7}" in page and '→ <span class="answer">5</span>, expected <span class="answer">7</span>' in page
    assert page.count("<article") == 10


def test_a_rollout_that_infrastructure_failed_is_shown_as_not_judged(folder):
    write(folder / "eval" / "after", [row("p", 0, failed=True)])
    assert '<span class="badge none">! not judged, reward –</span>' in written(folder)[1]


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


@pytest.mark.parametrize(("n", "best"), [(1, 0.5), (2, 22 / 28)])
def test_sides_with_other_numbers_of_samples_are_compared_with_one_k(folder, n, best):
    """Four of eight samples are right after RL. Of the 28 pairs of them, 6 are both wrong."""
    for side, samples, right in (("before", n, 0), ("after", 8, 4)):
        rows = [row(f"p{i}", number < right, session=number) for i in range(4) for number in range(samples)]
        write(folder / "eval" / side, rows)
    text, page, summary = written(folder)
    sides = [summary["evaluation"][side]["tiny_tools"] for side in ("before", "after", "difference")]
    assert [each["k"] for each in sides] == [n] * 3
    assert [each["metrics"]["acc/best@k"]["value"] for each in sides] == pytest.approx([0, best, best])
    assert (f"best@{n} and maj@{n}" in page) is (n > 1)
    assert "best@8" not in page + text and (f"best@{n}" in text) is (n > 1) and "mean@8" in text


def test_an_evaluation_that_was_interrupted_is_compared_on_the_problems_that_it_reached(folder):
    """Of four problems, two are right before RL; after it the two others were reached, and one is right."""
    write(folder / "eval" / "before", [row(f"p{i}", i < 2) for i in range(4)])
    write(folder / "eval" / "after", [row(f"p{i}", i < 3) for i in range(2, 4)])
    text, _page, summary = written(folder)
    sides = [summary["evaluation"][side]["tiny_tools"] for side in ("before", "after", "difference")]
    accs = [(each["num_problems"], each["metrics"]["acc/mean@k"]["value"]) for each in sides]
    assert accs == [(2, 0.0), (2, 0.5), (2, 0.5)]
    assert "2 problems have judged samples on only one side" in text


def test_one_sided_evaluation_is_reported_as_such(folder):
    write(folder / "eval" / "before", [row("a", 1), row("b", 0)])
    _text, page, summary = written(folder)
    assert summary["verdict"].startswith("Accuracy before RL is 50.0% [")
    assert summary["headline"]["after"] is None and summary["headline"]["difference"] is None
    assert "evaluation after RL" in summary["missing"]
    assert "No evaluation after RL" in page and "--stage eval" in page


def test_an_evaluation_without_a_verdict_says_so(folder):
    write(folder / "eval" / "after", [row("a", 0, failed=1)])
    _text, _page, summary = written(folder)
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
    for part in ("sft", "rl", "environment", "evaluation"):
        assert empty[part].keys() == full[part].keys()


def test_alarms_and_what_could_not_be_looked_at_are_named(folder):
    add_training(folder)
    entropy = [{"step": step, "data": {"actor/entropy": 2.0**step}} for step in range(1, 9)]
    write_lines(folder / "rl" / "metrics-2.jsonl", entropy)
    page = written(folder)[1]
    assert "<li>The entropy grows: from 7.5 to 120 nats per token. " in page and "diagnose.md" in page
    assert "could not run</summary>The run has logged no value, or fewer than four, for tool/code_ratio" in page


def test_without_evaluations_training_rollouts_are_shown(folder):
    store.write(store.path_of(folder / "rl", "trajectories", 3), "trajectories", [row("q?", 1, step=3)])
    _, page, summary = written(folder)
    assert "<h3>RL step 3</h3>" in page
    assert "rollouts" not in summary["missing"]


def test_command_writes_both_files_and_prints_the_table(folder, capsys):
    add_evaluation(folder)
    main(["--run", str(folder)])
    assert str(folder / "report.html") in capsys.readouterr().out
    assert (folder / "report.html").exists() and (folder / "summary.json").exists()


def test_command_fails_with_one_message_for_a_wrong_folder(tmp_path):
    with pytest.raises(SystemExit, match="No run at .*nowhere. Expected the folder.*`bash scripts/quickstart.sh`"):
        main(["--run", str(tmp_path / "nowhere")])
