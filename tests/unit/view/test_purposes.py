"""The page on what code is for: shares of every step, and the rules."""

from verl_ext.evaluation import purposes
from verl_ext.view.data import Run
from verl_ext.view.purposes import over_training


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
