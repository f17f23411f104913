"""The page on what code is for: shares of every step, and the rules."""

from pathlib import Path

from tests.unit.view.synthetic import write_run, write_step
from verl_ext.evaluation import purposes
from verl_ext.records import store
from verl_ext.view.data import Run
from verl_ext.view.purposes import over_training

FAULTS = (("NameError", "model"), ("ok", None))  # status and fault of a call


def test_the_page_has_shares_by_verdict_for_every_step(client, run_folder) -> None:
    steps = over_training(Run(run_folder, "run_a", 0)).steps
    assert list(steps) == [1, 2, 3, 4]
    for each in steps.values():
        for side in ("right", "wrong"):
            assert abs(sum(value for name, value in each.items() if name.startswith(side)) - 1) < 1e-9
        assert 0 < each["first call"] < 1
    page = client.get("/code").text
    assert "in right responses" in page and "errors repaired by a later call" in page
    for purpose in purposes.PURPOSES:  # the rules that the page quotes are those that are used
        assert f"\n    {purpose} " in purposes.__doc__ and f"\n    {purpose} " in page


def test_a_repair_is_of_a_later_turn(run_folder: Path) -> None:
    """The page asks for the turn of each call."""
    error, well = ({"turn": 0, "code": "1", "status": status, "fault": fault} for status, fault in FAULTS)
    for turn, repaired in ((0, 0.0), (2, 1.0)):
        path, calls = store.path_of(run_folder, "trajectories", 2), [error, well | {"turn": turn}]
        store.rewrite(path, lambda rows, calls=calls: [row | {"calls": calls} for row in rows])
        assert over_training(Run(run_folder, "run_a", 0)).steps[2]["repaired"] == repaired


def test_a_run_without_judged_responses_of_training_is_named(viewer, tmp_path: Path) -> None:
    folder = tmp_path / "validated"
    write_step(folder, 0, validate=True)
    page = viewer(folder, write_run(tmp_path / "run_b")).get("/code").text
    said = "</bdi> has no judged responses of training steps."
    assert f"<bdi>validated{said}" in page and f"<bdi>run_b{said}" not in page
