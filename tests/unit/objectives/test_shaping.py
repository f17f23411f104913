import pytest


def penalties(lengths, **settings):
    import torch

    from verl_ext.objectives.shaping import overlong_penalty

    return overlong_penalty(torch.tensor(lengths), **settings).tolist()


def test_penalty_falls_straight_from_the_buffer_to_the_maximum():
    # L_max 16384, L_cache 4096: from 12288 on, 1/4096 per token; 14336 is 2048 tokens in, 2048/4096 = 0.5
    lengths = [0, 12287, 12288, 13312, 14336, 16383, 16384, 20000]
    assert penalties(lengths, max_length=16384, buffer=4096) == [0, 0, 0, -0.25, -0.5, -4095 / 4096, -1, -1]


def test_buffer_may_be_the_whole_length():
    assert penalties([0, 5, 10], max_length=10, buffer=10) == [0, -0.5, -1]


@pytest.mark.parametrize("buffer", [0, -1, 17])
def test_impossible_buffer_is_our_error(buffer):
    with pytest.raises(ValueError, match=f"buffer is {buffer} tokens with a maximum length of 16"):
        penalties([1], max_length=16, buffer=buffer)


def test_verls_own_dapo_manager_agrees():
    """verl 0.9.1, dapo.py: min(-(length - (max - buffer)) / buffer, 0); beyond the maximum it has no floor."""
    for length in range(0, 161):
        expected = min(-(length - (160 - 40)) / 40, 0)
        assert penalties([length], max_length=160, buffer=40) == pytest.approx([expected])


def test_piecewise_penalty_has_two_slopes_and_no_jump():
    """-0.01 a thousand over 4,000 tokens: -0.04 at 12,000. -0.05 a thousand over 4,384: -0.2192 more at 16,384."""
    import torch

    from verl_ext.objectives.shaping import piecewise_length_penalty

    lengths = [0, 8000, 9000, 10000, 12000, 13000, 14000, 16384, 20000]
    expected = [0, 0, -0.01, -0.02, -0.04, -0.09, -0.14, -0.2592, -0.2592]
    assert piecewise_length_penalty(torch.tensor(lengths)).tolist() == pytest.approx(expected, abs=1e-6)
    steps = piecewise_length_penalty(torch.arange(0, 17000)).diff()
    assert steps.max() <= 0 and steps.min() > -0.0001  # at most 0.05 / 1000 a token


@pytest.mark.parametrize(
    "points", [[(10, 0)], [(10, -0.1), (20, -0.2)], [(20, 0), (10, -0.1)], [(10, 0), (20, 0.1)], [(10, 0), (10, -0.1)]]
)
def test_points_that_are_no_falling_line_are_refused(points):
    import torch

    from verl_ext.objectives.shaping import piecewise_length_penalty

    with pytest.raises(ValueError, match="expected two or more"):
        piecewise_length_penalty(torch.tensor([1]), points)


def test_tool_bonus_is_the_published_runs():
    """The published code: min(-0.6, -1 + 0.1 * (num_turns - 2) / 2), where n calls make 2 n + 2 turns."""
    import torch

    from verl_ext.objectives.shaping import tool_bonus

    calls = torch.arange(0, 9)
    assert (tool_bonus(calls) - 1).tolist() == pytest.approx([-1, -0.9, -0.8, -0.7, -0.6, -0.6, -0.6, -0.6, -0.6])
    published = [min(-0.6, -1 + 0.1 * ((2 * n + 2) - 2) / 2) for n in range(9)]
    assert (tool_bonus(calls) - 1).tolist() == pytest.approx(published)
