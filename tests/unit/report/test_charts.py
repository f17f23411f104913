import json
import re
from html import unescape

import pytest

from verl_ext.report.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Series,
    interval_strip,
    line_chart,
    linear_ticks,
    log_ticks,
    stacked_chart,
)

AXES = {"x_label": "RL step", "y_label": "share", "title": "Accuracy"}


def shown_values(chart):
    """What the page's script reads."""
    return json.loads(unescape(re.search(r'data-chart="([^"]*)"', chart)[1]))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.03, 0.97, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.12, 0.31, [-0.2, -0.1, 0, 0.1, 0.2, 0.3, 0.4]),
        (0.99961, 0.99979, [0.9996, 0.99965, 0.9997, 0.99975, 0.9998]),
        (50, 50, [20, 30, 40, 50, 60, 70, 80]),  # a constant gets room around it
    ],
)
def test_linear_ticks_are_round_and_enclose_the_data(low, high, expected):
    assert linear_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1, 40, [10, 20, 30, 40]), (0, 4, [0, 1, 2, 3, 4]), (0.5, 1.5, [1])]
)
def test_ticks_of_a_step_axis_are_whole_steps_inside_it(low, high, expected):
    assert linear_ticks(low, high, whole=True) == expected


def test_log_ticks_enclose_the_data():
    assert log_ticks(0.21, 6.4) == [0.2, 0.5, 1, 2, 5, 10]
    assert log_ticks(0.2, 5) == [0.2, 0.5, 1, 2, 5]
    with pytest.raises(ValueError, match="positive"):
        log_ticks(0, 1)


def test_a_line_goes_through_its_values_upwards():
    chart = line_chart([Series("training", [1, 2, 3], [0.0, 0.5, 1.0])], **AXES, include=(0, 1))
    middle_x, middle_y = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    assert f'd="M{LEFT:.1f},{BOTTOM:.1f}L{middle_x:.1f},{middle_y:.1f}L{RIGHT:.1f},{TOP:.1f}"' in chart
    assert "RL step</text>" in chart and "share</text>" in chart and 'data-x="RL step"' in chart
    assert shown_values(chart)["series"] == [{"name": "training", "x": [1, 2, 3], "y": [0, 0.5, 1]}]


def test_points_have_marks_and_intervals_but_no_line():
    ends = Series("held out", [0, 10], [0.5, 1.0], points=True, spread=[(0.25, 0.75), (1.0, 1.0)])
    chart = line_chart([ends], **AXES, include=(0, 1))
    height = BOTTOM - TOP
    assert f'd="M{LEFT:.1f},{BOTTOM - height / 4:.1f}V{BOTTOM - 3 * height / 4:.1f}"' in chart
    assert chart.count("<circle") == 2 and "L" not in re.search(r'class="line"[^>]* d="([^"]*)"', chart)[1]


def test_a_log_axis_puts_equal_ratios_at_equal_distances():
    chart = line_chart([Series("loss", [1, 2, 3], [1, 10, 100])], **AXES, log=True)
    assert f"L{(LEFT + RIGHT) / 2:.1f},{(TOP + BOTTOM) / 2:.1f}L" in chart


def test_stacked_bars_stand_on_each_other():
    chart = stacked_chart([1, 2], {"gen": [1.0, 1.0], "update": [3.0, 1.0]}, **AXES)
    bars = [re.findall(r"M[\d.]+,([\d.]+)V([\d.]+)", path) for path in re.findall(r'd="(M[^"]*z)"', chart)]
    ticks_high = 4  # the highest bar is 1 + 3
    per_second = (BOTTOM - TOP) / ticks_high
    assert [float(end) for end in bars[0][0]] == pytest.approx([BOTTOM, BOTTOM - per_second], abs=0.1)
    assert [float(end) for end in bars[1][0]] == pytest.approx([BOTTOM - per_second, TOP], abs=0.1)
    assert "gen</span>" in chart and "update</span>" in chart


def test_names_are_escaped():
    series = [Series("<b>", [1], [0.5]), Series('"&', [1], [0.5])]
    chart = line_chart(series, x_label="<i>", y_label="y", title='"<u>')
    assert not re.search("<[biu]>", chart)
    assert [each["name"] for each in shown_values(chart)["series"]] == ["<b>", '"&']


def test_interval_strip_leaves_out_a_side_that_is_missing():
    assert interval_strip((0.5, 0.4, 0.6), None).count("<circle") == 1
    assert 'cx="79.0"' in interval_strip((0.5, 0.4, 0.6), None)


def test_charts_refuse_what_they_cannot_draw():
    with pytest.raises(ValueError, match="at least one"):
        line_chart([Series("training", [], [])], **AXES)
    with pytest.raises(ValueError, match="as long as x"):
        stacked_chart([1, 2], {"gen": [1.0]}, **AXES)


def test_the_axis_reaches_the_values_it_must_include_and_the_data_beyond_them():
    chart = line_chart([Series("", [1, 2], [0.5, 1.2])], **AXES, include=(0, 1))
    assert f"L{RIGHT:.1f},{BOTTOM - (BOTTOM - TOP) * 1.2 / 1.5:.1f}" in chart  # ticks 0, 0.5, 1, 1.5
