"""A recorded batch under every preset, with numbers that a reader can redo on paper.

Four responses of one token to one prompt, two right and two wrong: advantages +-.866 of the same size. Before the
updates pi_old / pi_rollout is 1.2, .6, 1, 3; the updates make pi / pi_old 1.5, 1.1, .7, 1.
"""

import json

import pytest
import torch

pytestmark = pytest.mark.timeout(180)  # the presets are composed once, all of them


@pytest.fixture(scope="module")
def presets():
    from scripts.studies.correction_lab import all_presets

    return {each.name: each for each in all_presets()}


def column(*values):
    return torch.tensor(values)[:, None]


@pytest.fixture
def recorded():
    from scripts.studies.record_batches import RecordedBatch

    rollout = column(-3.0, -3.0, -3.0, -3.0)
    old = rollout + column(1.2, 0.6, 1.0, 3.0).log()
    right = torch.tensor([1.0, 1.0, 0.0, 0.0])
    return RecordedBatch(
        mask=torch.ones(4, 1).bool(),
        rollout_log_prob=rollout,
        old_log_prob=old,
        log_prob=old + column(1.5, 1.1, 0.7, 1.0).log(),
        sum_pi_squared=2 * old.exp() + column(0.0, 0.0, 0.0, 2.0),  # W = 1 - 2 pi + this: 1, 1, 1, 3
        scores=2 * right - 1,
        acc=right,
        void=torch.tensor([False, False, False, True]),
        calls=torch.tensor([2, 2, 1, 1]),
        failed_calls=torch.tensor([0, 2, 0, 0]),
        groups=["a"] * 4,
        versions=[(3, 3), (3, 4), (None, None), (5, 5)],
        updates=2,
    )


@pytest.fixture
def weights(presets, recorded):
    from scripts.studies.correction_lab import apply

    def weights(name, place):
        log_prob = recorded.old_log_prob if place == "start" else recorded.log_prob
        return apply(presets[name], recorded, log_prob).weights.tolist()

    return weights


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("dapo", [1, 1, 1, 1], [0, 1.1, 0, 1]),  # 1.5 > 1.28 where A > 0, .7 < .8 where A < 0
        ("icepop", [1.2, 0.6, 1, 0], [0, 0.66, 0, 0]),  # 3 is above 2; .6 x 1.1
        ("glm5_async", [1.2, 0, 1, 0], [0, 0, 0, 0]),  # of 1.2 .6 1 3 and 1.8 .66 .7 3, those in (.8, 1.28)
        ("gspo", [1, 1, 1, 1], [0, 0, 0, 1]),  # bounds of 3e-4 and 4e-4
        ("cispo", [1, 1, 1, 1], [1.28, 1.1, 0.7, 1]),  # truncated, never 0
    ],
)
def test_weights_by_hand(weights, name, start, end):
    assert weights(name, "start") == pytest.approx(start, abs=1e-6)
    assert weights(name, "end") == pytest.approx(end, abs=1e-6)


def test_effective_sample_size_by_hand():
    from scripts.studies.correction_lab import effective_share

    assert effective_share(torch.tensor([1.0, 1.0])) == 1.0
    assert effective_share(torch.tensor([1.2, 0.6, 1.0, 0.0])) == pytest.approx(0.7)  # 2.8^2 / (4 x 2.8)
    assert effective_share(torch.tensor([0.0, 5.0])) == 0.5  # one of two
    assert effective_share(torch.zeros(3)) is None


def test_a_line_of_the_table_by_hand(presets, recorded):
    """dapo at the end: weights 0 0 1 1.1 sorted, so .9 is at place 2.7: 1 + .7 x .1."""
    from scripts.studies.correction_lab import look, table

    found = look(recorded, [presets["dapo"], presets["icepop"], presets["glm5_async"]])
    line = found["end"]["presets"]["dapo"]
    assert line["effective_share"] == pytest.approx(2.1**2 / (4 * 2.21))  # .4989
    assert (line["dropped"], line["clipped_low"], line["clipped_high"]) == (0.0, 0.25, 0.25)
    assert line["weights"] == pytest.approx({"0.5": 0.5, "0.9": 1.07, "0.99": 1.097, "max": 1.1})
    assert found["start"]["presets"]["icepop"]["dropped"] == 0.25
    assert found["end"]["presets"]["glm5_async"]["effective_share"] is None
    assert table(found["end"]).splitlines()[1].split() == (
        ["dapo", "0.499", "0.000%", "25.000%", "25.000%", "0.5", "1.07", "1.097", "1.1"]
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("icepop", 2.8 / (2 * 2.8**0.5)),  # 1.2 .6 -1 0 and 1 1 -1 -1: .8367
        ("maxrl", 1.0),  # r 1 1 0 0, mean 1/2: 1 1 -1 -1
        ("simpletir", 3 / (2 * 3**0.5)),  # the void one is not in the loss: 1 1 -1 0
        ("tir_otb", 6 / (2 * 10**0.5)),  # baseline (1 + 1 - 1 - 3) / 6 = -1/3: 4/3 4/3 -2/3 -2/3, as 2 2 -1 -1
    ],
)
def test_cosines_to_dapo_at_the_start_by_hand(presets, recorded, name, expected):
    from scripts.studies.correction_lab import look

    found = look(recorded, [presets["dapo"], presets[name]])["start"]["cosines"]
    assert found["dapo"][name] == found[name]["dapo"] == pytest.approx(expected, abs=1e-6)
    assert found[name][name] == pytest.approx(1.0)


def test_a_group_of_equal_answers_trains_nothing_where_the_preset_filters_groups(presets, recorded):
    """Two right answers, one of them with a length penalty."""
    from scripts.studies.correction_lab import apply

    recorded = recorded._replace(groups=["a", "b", "a", "b"], acc=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    for name, trains in (("dapo", False), ("grpo", True)):
        found = apply(presets[name], recorded, recorded.old_log_prob)
        assert (bool(found.gradient[[1, 3]].any()), bool(found.gradient[[0, 2]].all())) == (trains, True), name
        assert found.weights.tolist() == pytest.approx([1.0] * (4 if trains else 2))  # of tokens with an advantage


def test_grpo_roc_keeps_half_a_group_and_of_the_right_ones_the_clean_one(presets, recorded):
    from scripts.studies.correction_lab import apply

    applied = apply(presets["grpo_roc"], recorded, recorded.old_log_prob)
    assert applied.tokens == 2 and applied.gradient[0] != 0 and applied.gradient[1] == 0


def test_what_a_tool_wrote_and_what_is_not_a_number_is_no_token(presets, recorded):
    from scripts.studies.correction_lab import apply

    log_prob = recorded.old_log_prob.clone()
    log_prob[0] = torch.nan
    recorded = recorded._replace(mask=column(1, 1, 0, 1).bool())
    applied = apply(presets["dapo"], recorded, log_prob)
    assert applied.tokens == 2 and applied.gradient[[0, 2]].tolist() == [[0.0], [0.0]]


def test_the_command_prints_every_preset_and_writes_numbers_and_pictures(
    tmp_path, capsys, recorded, presets, monkeypatch
):
    from scripts.studies import correction_lab
    from scripts.studies.record_batches import path_of, write_batch

    monkeypatch.setattr(correction_lab, "all_presets", lambda: [*presets.values()])  # composed already
    run = tmp_path / "rl"
    write_batch(path_of(run, 3), recorded, torch.ones(4, dtype=torch.long))
    (run / "metrics-1.jsonl").write_text('{"step": 1, "data": {}}\n')
    correction_lab.main([str(run), "--step", "3"])
    text = capsys.readouterr().out
    assert "4 responses of 1 prompts, 4 sampled tokens, written by versions 3 to 5 of the weights" in text
    found = json.loads((run / "correction_lab" / "step_3.json").read_text())
    assert sorted(found["end"]["presets"]) == sorted(presets) and len(presets) == 19
    for name in presets:
        assert text.count(f"\n{name} ") == 2, name
        assert set(found["start"]["cosines"][name]) == set(presets)
    for place in ("start", "end"):
        assert "icepop_onpolicy" in (run / "correction_lab" / f"step_3_{place}.svg").read_text()
    with pytest.raises(SystemExit, match="Recorded steps: 3"):
        correction_lab.main([str(run), "--step", "4"])
