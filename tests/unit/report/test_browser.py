"""The report in a real browser, opened from disk: its charts say under the pointer what the run logged."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.report.runs import add_evaluation, add_training, write_lines, written
from tests.unit.view import chromium
from verl_ext.report.__main__ import main

pytestmark = [
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.timeout(120),
]
CHART = "[...document.querySelectorAll('.chart')].find((box) => box.ariaLabel.startsWith('{}'))"
SPOT = (  # a point of a chart's plot area, in the window
    "(() => {{ const box = {chart}; box.scrollIntoView({{ block: 'center' }});"
    " const over = box.plot.over.getBoundingClientRect();"
    " return [Math.min(over.right - 2, over.left + 2 + box.plot.valToPos({x}, 'x')), over.top + 40]; }})()"
)


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[chromium.Tab]:
    async with chromium.browser(tmp_path / "profile") as tab:
        yield tab


async def under_pointer(tab: chromium.Tab, title: str, x: float) -> str:
    """Return what a chart says while the pointer is over it."""
    chart = CHART.format(title)
    spot = await tab.js(SPOT.format(chart=chart, x=x))
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=spot[0], y=spot[1])
    return await tab.until(f"{chart}.parentElement.querySelector('.value').textContent")


async def colour(tab: chromium.Tab, title: str, x: float, y: float) -> list[int]:
    """Return the pixel of a chart's canvas at a value: red, green, blue, opacity."""
    return await tab.js(
        f"(() => {{ const plot = {CHART.format(title)}.plot; return [...plot.ctx.getImageData("
        f"Math.round(plot.valToPos({x}, 'x', true)), Math.round(plot.valToPos({y}, 'y', true)), 1, 1).data]; }})()"
    )


async def test_charts_are_drawn_and_say_what_the_run_logged(tab, folder: Path) -> None:
    add_evaluation(folder)
    add_training(folder)
    summary = written(folder)[2]
    page = (folder / "report.html").as_uri()
    await tab.open(page)
    drawn = await tab.js("[...document.querySelectorAll('.chart')].map((box) => box.querySelectorAll('canvas').length)")
    assert drawn == [1] * 6

    logged = [json.loads(line) for line in (folder / "rl" / "metrics-1.jsonl").read_text().splitlines()]
    data = await tab.js(f"{CHART.format('accuracy')}.plot.data.map((line) => [...line])")
    assert data[0] == [0, 1, 2, 3, 4, 5]
    assert data[1] == [None] + [line["data"]["train/acc"] for line in logged]
    top = summary["headline"]
    assert data[2] == [top["before"]["value"], None, None, None, None, top["after"]["value"]]
    assert await under_pointer(tab, "accuracy", 2) == "RL step 2: train/acc 0.2"
    assert await under_pointer(tab, "accuracy", 5) == "RL step 5: train/acc 0.5, held out, with interval 0.875"
    assert await under_pointer(tab, "held out", 5) == "RL step 5: val-core/tiny_tools/acc/mean@2 0.875"
    assert await under_pointer(tab, "SFT loss", 20) == "SFT step 20: train/loss 0.2, val/loss 0.25"
    assert tab.requests == [page] and not tab.errors


async def test_marks_have_their_interval_and_bars_their_parts(tab, folder: Path) -> None:
    """A step of 2 s is 1 s of rollouts, .5 s of the update, .5 s of the rest; a first one of 10 s has 8 s more."""
    add_evaluation(folder)
    add_training(folder)
    top = written(folder)[2]["headline"]["before"]
    await tab.open((folder / "report.html").as_uri())
    assert await under_pointer(tab, "Step time", 4) == "RL step 4: gen 1, update_actor 0.5, other 0.5"
    parts = [await colour(tab, "Step time", 4.2, y) for y in (0.5, 1.25, 1.75, 2.4)]
    assert [part[3] for part in parts] == [255, 255, 255, 0]  # nothing above the bar
    assert len({tuple(part) for part in parts}) == 4
    in_interval = await colour(tab, "accuracy", 0, (top["value"] + top["high"]) / 2)
    assert in_interval[:3] == pytest.approx(parts[1][:3], abs=12), "the second colour, as the second line has"
    assert (await colour(tab, "accuracy", 0.5, (top["value"] + top["high"]) / 2))[3] == 0
    assert not tab.errors


async def test_arrow_keys_move_through_a_chart_and_enter_opens_nothing(tab, folder: Path) -> None:
    add_training(folder)
    written(folder)
    await tab.open((folder / "report.html").as_uri())
    await tab.js(f"{CHART.format('accuracy')}.focus()")
    for _ in range(2):
        await tab.key("ArrowRight")
    await tab.key("Enter")
    said = f"{CHART.format('accuracy')}.parentElement.querySelector('.value').textContent"
    assert await tab.js(said) == "RL step 2: train/acc 0.2"
    assert await tab.js("location.pathname") == str(folder / "report.html") and not tab.errors


async def test_values_that_hardly_differ_and_a_value_alone_in_its_line_are_drawn(tab, folder: Path) -> None:
    """uPlot found no ticks for the first, and drew no mark for the second."""
    add_training(folder)
    correlation = "training/rollout_actor_probs_pearson_corr"
    steps = [{"step": step, "data": {"num_turns/mean": 2 + 1e-9 * step, correlation: 1.0}} for step in range(1, 4)]
    write_lines(folder / "rl" / "metrics-2.jsonl", steps)
    losses = [
        {"step": step, "data": {"train/loss": 4.0} | ({"val/loss": 2.0} if step == 250 else {})} for step in range(500)
    ]
    write_lines(folder / "sft" / "metrics-1.jsonl", losses)
    written(folder)
    await tab.open((folder / "report.html").as_uri())
    low, high = await tab.js(f"(({{min, max}}) => [min, max])({CHART.format('turns')}.plot.scales.y)")
    assert low < 1.9 and high > 2.1
    mark = await colour(tab, "SFT loss", 250, 2)
    assert mark[3] == 255 and not tab.errors


async def test_keys_reach_what_scrolls_and_a_narrow_window_holds_the_page(tab, folder: Path) -> None:
    add_evaluation(folder)
    add_training(folder)
    written(folder)
    await tab.call("Emulation.setDeviceMetricsOverride", mobile=False, width=390, height=800, deviceScaleFactor=1)
    await tab.open((folder / "report.html").as_uri())
    assert await tab.js("document.documentElement.scrollWidth == document.documentElement.clientWidth")
    unreached = (
        "[...document.querySelectorAll('main :not(.chart, a[href], summary)')].filter("
        "(e) => (getComputedStyle(e).overflowY == 'auto') != (e.tabIndex == 0)).map((e) => e.outerHTML)"
    )
    assert json.loads(await tab.js(f"JSON.stringify({unreached})")) == []


async def test_a_comparison_has_a_line_for_each_run(tab, folder: Path, tmp_path: Path) -> None:
    add_training(folder)
    other = tmp_path / "other"
    other.mkdir()
    add_training(other)
    main(["--run", str(folder), str(other), "--out", str(tmp_path / "both")])
    page = (tmp_path / "both" / "comparison.html").as_uri()
    await tab.open(page)
    labels = await tab.js(f"{CHART.format('accuracy')}.plot.series.slice(1).map((s) => s.label)")
    assert labels == ["quickstart", "other"]
    assert await under_pointer(tab, "accuracy", 3) == "RL step 3: quickstart 0.3, other 0.3"
    assert tab.requests == [page] and not tab.errors
