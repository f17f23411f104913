"""The run page: its curves are those of the metrics file, and an alarm points at the line that helps."""

import json
import re
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.unit.view.conftest import charts_of
from tests.unit.view.synthetic import write_run
from verl_ext.pages import curves
from verl_ext.runs.metrics import Metrics, read_metrics

REPO = Path(__file__).resolve().parents[3]


def test_curves_are_the_values_of_the_metrics_file(client: TestClient, run_folder: Path) -> None:
    logged = [json.loads(line) for line in (run_folder / "metrics-1790000000.jsonl").read_text().splitlines()]
    chart = charts_of(client.get("/").text)["accuracy"]
    assert chart["x"] == [line["step"] for line in logged] == [1, 2, 3, 4]
    assert chart["series"][0]["y"] == [line["data"]["train/acc"] for line in logged]
    assert chart["series"][0]["run"] == 0


def test_runs_are_overlaid_and_the_published_one_is_a_preset(viewer, run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "run_b", seed=18, steps=2)
    chart = charts_of(viewer(run_folder, other).get("/?published=1").text)["score"]
    names = {line["name"]: line for line in chart["series"]}
    assert list(names) == ["run_a", "run_b", "published"] and names["published"]["run"] is None
    at = dict(zip(chart["x"], names["run_b"]["y"], strict=True))
    assert at[2] is not None and at[4] is None  # a run without a value has a gap, not an invented number
    published = {line["step"]: line["data"] for line in map(json.loads, curves.PUBLISHED.open())}
    assert names["published"]["y"][chart["x"].index(10)] == published[10]["critic/score/mean"]


def test_an_entropy_that_halves_is_no_alarm(client: TestClient) -> None:
    # 0.5 x 0.7^step: the mean of steps 1 and 2 is 0.2975, of steps 3 and 4 0.1458; not below 0.3 x 0.2975.
    assert "No alarm" in client.get("/").text


def test_what_our_own_runs_and_the_published_one_log_raises_no_alarm_of_the_ratio() -> None:
    logged = read_metrics([REPO / "tests" / "data" / "rl_metrics.jsonl"])
    for metrics in (curves.published(), logged):
        assert metrics.curve("actor/ppo_kl")[1], "verl logs it"
        assert not [alarm for alarm in curves.alarms(metrics) if "off-policy" in alarm["sentence"]]
    assert logged.curve("rollout_corr/kl")[1]


@pytest.mark.parametrize(
    ("key", "values", "says", "heading"),
    [
        ("actor/entropy", [0.5, 0.5, 0.1, 0.1], "entropy collapses: from 0.5 to 0.1", "## Entropy falls"),
        ("actor/entropy", [0.1, 0.1, 0.5, 0.5], "entropy grows", "## Entropy rises"),
        (
            "tool/code_ratio",
            [0.8, 0.8, 0.2, 0.2],
            "Tool use falls: from 80.0% to 20.0% of the responses",
            "## It stops calling",
        ),
        ("train/truncation_rate", [0, 0, 0.2, 0.2], "cut by the budget: from 0.0% to 20.0%", "- **Truncated."),
        ("failure/share_aborted", [0.1], "10.0% of the responses end as aborted", "## Excluded responses"),
        ("failure/share_raised", [0.1], "10.0% of the groups have a rollout that raised", "## Excluded responses"),
        ("actor/ppo_kl", [0.01, -0.08], "-0.08 nats per token from its old log-probs", "- If `actor/ppo_kl`"),
        ("actor/skipped_updates_total", [0.0, 2.0], "Updates are skipped, 2 per step", "## Skipped updates"),
        ("rollout_corr/kl", [0.3], "0.3 nats per token from the weights that wrote", "- If `rollout_corr/kl`"),
        ("training/rollout_actor_probs_pearson_corr", [0.9], "correlate by only 0.900", "- If `training/rollout_actor"),
    ],
)
def test_an_alarm_links_to_the_line_that_helps(viewer, tmp_path, key, values, says, heading) -> None:
    lines = [{"step": step, "data": {key: value}} for step, value in enumerate(values, 1)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = viewer(tmp_path / "run").get("/").text
    sentence = re.search(r'<ul class="alarms"><li>(.*?)</li></ul>', html)[1]
    assert says in sentence
    line = int(re.search(r'href="/diagnose#L(\d+)"', sentence)[1])
    assert curves.DIAGNOSE.read_text().splitlines()[line - 1].startswith(heading)
    assert f'id="L{line}"' in viewer(tmp_path / "run").get("/diagnose").text


FALLS = [0.207, 0.207, 0.034, 0.034]  # the entropy of the quickstart's run


@pytest.mark.parametrize(
    ("key", "accuracy", "alarm"),
    [
        ("train/acc", [0.4, 0.5, 0.9, 1.0], False),
        ("val-core/tiny_tools/acc/mean@2", [0.4, 0.5, 0.9, 1.0], False),
        ("train/acc", [0.4, 0.5, 0.45, 0.45], True),  # flat
        ("train/acc", [0.4, 0.4, 0.41, 0.41], True),  # a rise of 0.01 is as good as flat
        ("train/acc", [0.4, 0.4, 0.43, 0.43], False),
        ("train/acc", [0.9, 0.8, 0.2, 0.1], True),
        ("train/acc", [0.1] * 5 + [0.9] * 5 + [0.3] * 5, True),  # it rose, and fell from its peak
        ("train/acc", [0.1] * 5 + [0.5] * 5 + [0.48] * 5, False),
        ("train/acc", [0.1] * 5 + [0.5] * 5 + [0.38] * 5, True),  # 0.12 below its peak
        ("train/acc", [0.4], True),  # one value is no curve
        ("actor/grad_norm", [1.0, 1.0, 9.0, 9.0], True),  # no accuracy is logged
    ],
)
def test_an_entropy_that_falls_is_an_alarm_unless_accuracy_rises(viewer, tmp_path, key, accuracy, alarm) -> None:
    entropy = FALLS if len(accuracy) <= 4 else [0.207] * 5 + [0.1] * 5 + [0.034] * 5
    lines = [{"step": step, "data": {"actor/entropy": value}} for step, value in enumerate(entropy, 1)]
    lines += [{"step": step, "data": {key: value}} for step, value in enumerate(accuracy, 1)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = viewer(tmp_path / "run").get("/").text
    said = "The entropy falls from 0.207 to 0.034 nats per token, as is normal while accuracy rises"
    assert ("The entropy collapses" in page, "No alarm." in page, said in page) == (alarm, not alarm, not alarm)


def test_what_no_alarm_could_look_at_is_named(client: TestClient) -> None:
    page = client.get("/").text
    assert "9 checks could not run" in page and "No alarm." in page
    assert (
        "The run has logged no value, or fewer than four, for train/truncation_rate, failure/share_sandbox_failure"
        in page
    )


def test_a_run_in_which_no_alarm_could_look_at_anything_is_not_called_well(viewer, tmp_path: Path) -> None:
    """An SFT run logs none of the keys."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics-1.jsonl").write_text('{"step": 1, "data": {"train/loss": 0.5}}\n')
    page = viewer(tmp_path / "run").get("/").text
    assert "No check could run." in page and "11 checks could not run" in page and "No alarm." not in page


def test_a_thousand_steps_of_as_many_keys_as_verl_logs_are_drawn_at_once() -> None:
    steps = {step: {f"actor/key_{number}": 1.0 for number in range(132)} | {"train/acc": 0.5} for step in range(1000)}
    began = time.process_time()
    assert list(curves.charts([("run", 0, Metrics(steps, set()))])) == ["Does it learn?"]
    assert time.process_time() - began < 0.3


def test_the_entropy_that_a_bypassed_pass_leaves_is_looked_at(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "data": {"actor/entropy_loss": 0.5**step}}) for step in range(8)]
    (tmp_path / "metrics-1.jsonl").write_text("\n".join(lines) + "\n")
    falling = read_metrics([tmp_path / "metrics-1.jsonl"])
    assert [alarm["sentence"][:21] for alarm in curves.alarms(falling)] == ["The entropy collapses"]
    assert "actor/entropy" not in curves.not_logged(falling)


def test_a_check_that_needs_more_steps_could_not_run() -> None:
    young = Metrics({step: {"actor/entropy": 1.0, "actor/ppo_kl": 0.0} for step in range(3)}, set())
    assert curves.alarms(young) == []
    assert "actor/entropy" in curves.not_logged(young) and "actor/ppo_kl" not in curves.not_logged(young)
