"""The same problem over time and between runs: figures as `retool evaluate` has them."""

import statistics
from pathlib import Path

import numpy as np
from starlette.testclient import TestClient

from tests.unit.view.synthetic import write_run
from verl_ext.evaluation import figures
from verl_ext.evaluation.estimators import paired_test
from verl_ext.evaluation.samples import read_samples
from verl_ext.records import store
from verl_ext.view import problems
from verl_ext.view.data import Run


def means(run_folder: Path, step: int, validate: bool = False) -> dict[str, float]:
    rows = store.read(store.path_of(run_folder, "trajectories", step, validate=validate)).to_pylist()
    names = sorted({row["problem"] for row in rows})
    judged = {name: [r["acc"] for r in rows if r["problem"] == name and r["acc"] is not None] for name in names}
    return {name: statistics.fmean(values) for name, values in judged.items()}


def test_first_against_last_draw_is_tested_as_an_evaluation_tests_it(run_folder: Path) -> None:
    run = Run(run_folder, "run_a", 0)
    assert problems.sides(run) == ["first", "last", "val_000004"]
    sides = [problems.samples(run, side) for side in ("first", "last")]
    before, after = means(run_folder, 1), means(run_folder, 4)  # every step draws the same five problems
    found = problems.compare(*sides)
    assert found["common"] == 5 and {name: (b, a) for name, _, b, a in found["problems"]} == {
        name: (before[name], after[name]) for name in before
    }
    test = paired_test(np.array([after[name] - before[name] for name in before]), draws=1000, seed=0)
    overall = found["tables"][-1][-1]
    assert overall[:4] == ["overall", str(test.better), str(test.worse), str(test.equal)]
    assert overall[5] == f"{test.p_sign_test:.3g}"


def test_problems_of_one_template_are_compared_as_an_evaluation_compares_them(run_folder: Path) -> None:
    """Two problems share an id: they are two pairs, and one unit of the intervals."""
    sides = []
    for step in (1, 4):
        path = store.path_of(run_folder, "trajectories", step)
        store.rewrite(path, lambda rows: [row | {"id": "template" if row["index"] < 2 else row["id"]} for row in rows])
        sides.append(read_samples(path))
    expected = figures.comparison_tables(
        *(figures.evaluate(side, draws=problems.DRAWS) for side in sides), figures.compare(*sides, draws=problems.DRAWS)
    )
    run = Run(run_folder, "run_a", 0)
    found = problems.compare(*(problems.samples(run, side) for side in ("first", "last")))
    assert found["tables"] == expected and found["common"] == 5
    assert [id for _, id, _, _ in found["problems"]].count("template") == 2


def test_a_problem_that_was_drawn_once_has_no_last_draw(client: TestClient, run_folder: Path) -> None:
    """Its rollouts would be compared with themselves."""
    for step in (2, 3, 4):
        store.rewrite(store.path_of(run_folder, "trajectories", step), lambda rows: [r for r in rows if r["index"] > 1])
    page = client.get("/problems?a=0:first&b=0:last").text
    assert "3 problems have judged samples on both sides" in page
    assert "5 problems have judged" in client.get("/problems?a=0:first&b=0:val_000004").text
    for step in (2, 3, 4):
        store.path_of(run_folder, "trajectories", step).unlink()
    answer = client.get("/problems?a=0:first&b=0:last")
    assert answer.status_code == 404 and "drew no problem in two steps" in answer.text


def test_a_sample_that_was_not_judged_is_in_no_accuracy(run_folder: Path) -> None:
    samples = problems.samples(Run(run_folder, "run_a", 0), "val_000004")
    assert len(samples) == 20 and [sample.failure for sample in samples if sample.failure] == ["sandbox_failure"]


def test_two_runs_are_compared_and_a_problem_leads_to_all_its_draws(viewer, run_folder: Path, tmp_path: Path) -> None:
    client: TestClient = viewer(run_folder, write_run(tmp_path / "run_b", seed=19))
    page = client.get("/problems?a=0:val_000004&b=1:val_000004").text
    assert "5 problems have judged samples on both sides" in page and "p (sign flips)" in page
    page = client.get("/problem", params={"problem": "p1"}).text
    for number, folder in enumerate((run_folder, tmp_path / "run_b")):
        for step in (1, 2, 3, 4):
            assert f'/run/{number}/step_{step:06d}/group?uid=s{step}-p1"' in page
            share = means(folder, step)["p1"]
            assert f'<td class="num">{share:.4g}</td>' in page
    assert "No group of this problem" in client.get("/problem?problem=none").text
    assert client.get("/problems?a=9:first&b=0:nothing").status_code == 200


def test_a_sample_counts_calls_that_ran_and_tokens_of_the_model(run_folder: Path) -> None:
    """As in an evaluation, a malformed call is the model's fault and did not run."""
    path = store.path_of(run_folder, "trajectories", 4, validate=True)
    rows = store.read(path).to_pylist()
    ran = next(row for row in rows if row["calls"] and row["acc"] is not None)
    call = ran["calls"][0] | {"fault": "model", "status": "NameError"}
    malformed = dict.fromkeys(call) | {"turn": 0, "status": "malformed:empty_code", "fault": "model"}
    not_run = dict.fromkeys(call) | {"turn": 0, "code": "1", "status": "not_run"}
    ran["calls"] = [call, malformed, not_run]
    store.write(path, "trajectories", rows)
    samples = problems.samples(Run(run_folder, "run_a", 0), "val_000004")
    (sample,) = (each for each in samples if each.uid == f"{ran['uid']}_{ran['session']}_0")
    assert (sample.tool_calls, sample.tool_errors) == (1, 1)
    assert sample.response_tokens == ran["model_tokens"] < ran["response_tokens"]


def test_a_side_without_rollouts_is_named(client: TestClient, run_folder: Path) -> None:
    store.rewrite(store.path_of(run_folder, "trajectories", 4, validate=True), lambda rows: [])
    answer = client.get("/problems?a=0:first&b=0:val_000004")
    assert answer.status_code == 404 and "Validation, step 4 of run_a: no rollouts" in answer.text


def test_figures_are_of_the_problems_that_both_sides_have(client: TestClient, run_folder: Path) -> None:
    """Two of five; and if there are none, nothing without a text is paired."""
    for step in (2, 3, 4):
        store.path_of(run_folder, "trajectories", step).unlink()
    of_validation = store.path_of(run_folder, "trajectories", 4, validate=True)
    store.rewrite(store.path_of(run_folder, "trajectories", 1), lambda rows: [r for r in rows if r["index"] < 3])
    store.rewrite(of_validation, lambda rows: [row for row in rows if row["index"] > 0])
    sides = [problems.samples(Run(run_folder, "run_a", 0), side) for side in ("first", "val_000004")]
    found = problems.compare(*sides)
    overall = {row[0]: row for row in found["tables"][0]}["overall"]
    shares = [means(run_folder, 1), means(run_folder, 4, validate=True)]
    expected = [f"{(side['p1'] + side['p2']) / 2:.3f}" for side in shares]
    assert found["common"] == 2 and [cell.split()[0] for cell in overall[1:4]] == ["2", *expected]
    store.rewrite(of_validation, lambda rows: [row | {"domain": "others"} for row in rows if row["index"] < 3])
    answer = client.get("/problems?a=0:first&b=0:val_000004")
    assert answer.status_code == 404 and "No problem has judged samples on both sides" in answer.text
