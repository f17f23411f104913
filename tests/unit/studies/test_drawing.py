"""Charts in files: the positions of lines, marks and legends, and the colours of a heat map."""

import re
from xml.etree import ElementTree

import pytest

from scripts.studies.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    linear_ticks,
    log_ticks,
    write_heat_map,
    write_picture,
)
from verl_ext.pages.charts import Chart, Series


@pytest.fixture
def drawn(tmp_path):
    """The file of some charts, which is XML."""

    def draw(*charts, **options):
        write_picture(charts, tmp_path / "p.svg", **options)
        ElementTree.parse(tmp_path / "p.svg")
        return (tmp_path / "p.svg").read_text()

    return draw


def chart(*names):
    return Chart("t", [Series(name, [1, 2], [1.0, 2.0]) for name in names], "y", "x")


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


def test_a_line_goes_through_its_values_upwards(drawn):
    picture = drawn(
        Chart("Accuracy", [Series("training", [1, 2, 3], [0.0, 0.5, 1.0])], "share", "RL step", include=(0, 1))
    )
    middle_x, middle_y = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    assert f'd="M{LEFT:.1f},{BOTTOM:.1f}L{middle_x:.1f},{middle_y:.1f}L{RIGHT:.1f},{TOP:.1f}"' in picture
    assert "RL step</text>" in picture and "share</text>" in picture
    assert 'aria-label="Accuracy. training: 0 at 1, 1 at 3"' in picture


def test_points_have_marks_and_intervals_but_no_line(drawn):
    ends = Series("held out", [0, 10], [0.5, 1.0], points=True, spread=[(0.25, 0.75), (1.0, 1.0)])
    picture = drawn(Chart("Accuracy", [ends], "share", include=(0, 1)))
    height = BOTTOM - TOP
    assert f'd="M{LEFT:.1f},{BOTTOM - height / 4:.1f}V{BOTTOM - 3 * height / 4:.1f}"' in picture
    assert picture.count("<circle") == 2 and "L" not in re.search(r'class="line"[^>]* d="([^"]*)"', picture)[1]


def test_a_log_axis_puts_equal_ratios_at_equal_distances(drawn):
    picture = drawn(Chart("Loss", [Series("loss", [1, 2, 3], [1, 10, 100])], "nats", log=True))
    assert f"L{(LEFT + RIGHT) / 2:.1f},{(TOP + BOTTOM) / 2:.1f}L" in picture


def test_the_axis_reaches_the_values_it_must_include_and_the_data_beyond_them(drawn):
    picture = drawn(Chart("Accuracy", [Series("", [1, 2], [0.5, 1.2])], "share", include=(0, 1)))
    assert f"L{RIGHT:.1f},{BOTTOM - (BOTTOM - TOP) * 1.2 / 1.5:.1f}" in picture  # ticks 0, 0.5, 1, 1.5


def test_charts_are_placed_in_rows(drawn):
    picture = drawn(chart("a"), chart("a"), chart("a"), columns=2)
    assert f'viewBox="0 0 {2 * (WIDTH + 20)} {2 * (HEIGHT + 40)}"' in picture
    assert f'<svg x="0" y="{HEIGHT + 70}"' in picture and f'<svg x="{WIDTH + 20}" y="30"' in picture
    assert "var(--" not in picture and "<rect x=" not in picture


def test_several_series_have_a_legend(drawn):
    picture = drawn(chart("apples", "pears"), chart("plums"))
    assert ">apples</text>" in picture and ">pears</text>" in picture and ">plums</text>" not in picture
    assert picture.count('width="10" height="10"') == 2


def test_names_are_escaped_and_stacked_bars_refused(drawn):
    series = [Series("<b>", [1], [0.5]), Series('"&', [1], [0.5])]
    assert "<b>" not in drawn(Chart('"<u>', series, "<i>", "x"))
    with pytest.raises(ValueError, match="only pages"):
        drawn(Chart("Step time", series, "s", stacked=True))


def test_the_colours_of_a_heat_map_follow_its_scale(tmp_path):
    """Scale 0 to 2: 0 and -1 are the palest, 2 and 5 the darkest, 1 halfway: (247 + 33) / 2 = 140 = 8c red."""
    values = {"a": 0.0, "b": -1.0, "c": 2.0, "d": 5.0, "e": 1.0}
    cells = {("row", name): (value, f"is {value}") for name, value in values.items()}
    out = tmp_path / "new" / "map.svg"
    write_heat_map("A < B", ["row"], [*values, "none"], cells, scale=(0.0, 2.0), out=out)
    picture = out.read_text()
    assert picture.count('fill="#f7fbff"') == 2 and picture.count('fill="#2171b5"') == 2
    assert 'fill="#8cb6da"' in picture  # (251 + 113) / 2 = 182 = b6, (255 + 181) / 2 = 218 = da
    assert picture.count(">missing<") == 1 and ">is 5.0<" in picture and "A &lt; B" in picture
