"""What a page contains of a chart. How it is drawn: tests/unit/report/test_browser.py."""

import json
import re

import pytest

from scripts.studies.drawing import COLOURS
from verl_ext.pages.charts import Chart, Series
from verl_ext.pages.page import STATIC


def data_of(chart):
    """Return what the page's script reads."""
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', chart.__html__())[1])


def test_all_series_are_over_the_same_steps_with_gaps_where_one_has_no_value():
    held_out = Series("held out", [0, 2], [0.25, 0.5], points=True, spread=[(0.1, 0.4), (0.3, 0.7)])
    data = data_of(
        Chart("Accuracy", [Series("training", [1, 2, 3], [0.1, 0.2, 0.3]), held_out], "share", include=(0, 1))
    )
    assert data["x"] == [0, 1, 2, 3] and data["include"] == [0, 1]
    assert [each["y"] for each in data["series"]] == [[None, 0.1, 0.2, 0.3], [0.25, None, 0.5, None]]
    assert [each["spread"] for each in data["series"]] == [[], [[0, 0.1, 0.4], [2, 0.3, 0.7]]]


@pytest.mark.parametrize(
    ("lines", "labels"),
    [
        ([("training", "")], ["training"]),
        ([("a", "acc")], ["acc"]),
        ([("a", "acc"), ("b", "acc")], ["a", "b"]),
        ([("a", "acc"), ("a", "score")], ["acc", "score"]),
        ([("a", "acc"), ("a", "score"), ("b", "acc")], ["a acc", "a score", "b acc"]),
    ],
)
def test_who_cannot_see_the_lines_is_told_what_tells_them_apart_and_their_ends(lines, labels):
    chart = Chart("Accuracy", [Series(name, [1, 2], [0.125, 1.0], key=key) for name, key in lines], "share")
    ends = "; ".join(f"{label}: 0.125 at 1, 1 at 2" for label in labels)
    assert re.search('aria-label="(.*?)"', chart.__html__())[1] == f"Accuracy, share. {ends}. Arrow keys move."
    assert [each["label"] for each in data_of(chart)["series"]] == labels


def test_texts_are_escaped():
    chart = Chart('"<u>', [Series("</script><b>", [1], [0.5]), Series('"&', [1], [0.5])], "<i>", "<s>")
    assert not re.search("<[bius]>", chart.__html__()) and chart.__html__().count("</script>") == 1
    assert [each["name"] for each in data_of(chart)["series"]] == ["</script><b>", '"&']


def test_a_chart_refuses_what_cannot_be_drawn():
    with pytest.raises(ValueError, match="at least one"):
        Chart("Accuracy", [Series("training", [], [])], "share")
    with pytest.raises(ValueError, match="same x"):
        Chart("Step time", [Series("gen", [1, 2], [1.0, 2.0]), Series("update", [1], [1.0])], "s", stacked=True)


def test_the_colours_of_pages_and_of_files_are_the_same():
    light = (STATIC / "page.css").read_text().partition("@media")[0]
    assert tuple(re.findall(r"--c\d: (#\w+);", light)) == COLOURS
