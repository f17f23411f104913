"""Charts in one file: their places, their colours, and a legend where a chart has several series."""

from verl_ext.report.charts import HEIGHT, WIDTH, Series, line_chart
from verl_ext.report.picture import write_picture


def chart(*names):
    return line_chart([Series(name, [1, 2], [1.0, 2.0]) for name in names], x_label="x", y_label="y", title="t")


def test_charts_are_placed_in_rows(tmp_path):
    write_picture([("one", chart("a")), ("two", chart("a")), ("three", chart("a"))], tmp_path / "p.svg", columns=2)
    drawn = (tmp_path / "p.svg").read_text()
    assert f'viewBox="0 0 {2 * (WIDTH + 20)} {2 * (HEIGHT + 40)}"' in drawn
    assert f'<svg x="0" y="{HEIGHT + 70}"' in drawn and f'<svg x="{WIDTH + 20}" y="30"' in drawn
    assert "var(--" not in drawn and "data-chart" not in drawn and "<rect x=" not in drawn


def test_several_series_have_a_legend(tmp_path):
    write_picture([("one", chart("apples", "pears")), ("two", chart("plums"))], tmp_path / "p.svg")
    drawn = (tmp_path / "p.svg").read_text()
    assert ">apples</text>" in drawn and ">pears</text>" in drawn and ">plums</text>" not in drawn
    assert drawn.count('width="10" height="10"') == 2
