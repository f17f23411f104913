"""Draw SVG files for docs, in the light colours of the pages: charts (charts.py), and a table of numbers as colours."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from verl_ext.pages.charts import Chart

WIDTH, HEIGHT = 460, 250  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 70, 450, 12, 206  # its plot area
MARGIN, HEAD, LEGEND_ROW = 20, 40, 16  # between charts; above one, and for a row of its legend
COLOURS = ("#2f6bd8", "#d9742b", "#1f9a72", "#8a5bc7", "#c64b78", "#6f7a33", "#3a9cc0", "#9a9a94")  # page.css
STYLE = (
    "svg text { font-size: 11.5px; fill: #5f6468; font-variant-numeric: tabular-nums; } "
    "svg .grid { stroke: #ececE7; stroke-width: 1; fill: none; } svg .axis { stroke: #8b9094; stroke-width: 1; } "
    "svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; } "
    "svg text.heading { font-size: 15px; fill: #1b1d1f; }"
)
MAP_LEFT, MAP_TOP, CELL_WIDTH, CELL_HEIGHT = 150, 56, 92, 26
LOW, HIGH = (247, 251, 255), (33, 113, 181)  # colours of the ends of a heat map's scale
MISSING = "#e3e3e3"


def write_picture(charts: Sequence[Chart], out: Path, *, columns: int = 3) -> None:
    """Write charts, `columns` in a row, each with a legend if it has several series.

    Raises:
        ValueError: a chart is stacked; only pages have such charts.
    """
    names = [[each.name for each in chart.series] if len(chart.series) > 1 else [] for chart in charts]
    row_height = HEIGHT + HEAD + LEGEND_ROW * max((-(-len(legend) // 2) for legend in names), default=0)
    cells = []
    for number, (chart, legend) in enumerate(zip(charts, names, strict=True)):
        left, top = number % columns * (WIDTH + MARGIN), number // columns * row_height
        place = f'class="heading" x="{left + WIDTH / 2}" y="{top + 22}" text-anchor="middle"'
        cells.append(f"<text {place}>{escape(chart.title)}</text>")
        cells.append(f'<svg x="{left}" y="{top + 30}" width="{WIDTH}" height="{HEIGHT}" {_drawn(chart)}</svg>')
        for place, name in enumerate(legend):
            x = left + 70 + place % 2 * WIDTH // 2.2
            y = top + HEIGHT + HEAD + LEGEND_ROW * (place // 2)
            cells.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" style="fill:{_colour(place)}"/>')
            cells.append(f'<text x="{x + 15}" y="{y + 1}">{escape(name)}</text>')
    width, height = min(columns, len(charts)) * (WIDTH + MARGIN), -(-len(charts) // columns) * row_height
    _write(out, width, height, f"<style>{STYLE}</style>", cells)


def write_heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], tuple[float, str]],
    *,
    scale: tuple[float, float],
    out: Path,
) -> None:
    """Write a heat map over two axes that are not numbers; a cell that is not in `cells` is grey and says `missing`.

    Args:
        cells: (row, column) -> value, and the text that is shown.
        scale: values of the palest and of the darkest colour; values beyond them get the same colours.
    """
    marks = [f'<text x="10" y="20" font-size="15">{escape(title)}</text>']
    for place, column in enumerate(columns):
        x = MAP_LEFT + CELL_WIDTH * (place + 0.5)
        marks.append(f'<text x="{x}" y="{MAP_TOP - 8}" text-anchor="middle">{escape(column)}</text>')
    for line, row in enumerate(rows):
        y = MAP_TOP + CELL_HEIGHT * line
        marks.append(f'<text x="{MAP_LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(row)}</text>')
        for place, column in enumerate(columns):
            x, (colour, ink, text) = MAP_LEFT + CELL_WIDTH * place, (MISSING, "#777777", "missing")
            if (row, column) in cells:
                value, text = cells[row, column]
                share = min(1.0, max(0.0, (value - scale[0]) / (scale[1] - scale[0])))
                colour = "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(LOW, HIGH, strict=True))
                ink = "#ffffff" if share > 0.6 else "#1b1b1b"
            marks.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" fill="{colour}"/>'
            )
            marks.append(
                f'<text x="{x + CELL_WIDTH / 2}" y="{y + 17}" text-anchor="middle" fill="{ink}">{escape(text)}</text>'
            )
    size = MAP_LEFT + CELL_WIDTH * len(columns) + 10, MAP_TOP + CELL_HEIGHT * len(rows) + 10
    _write(out, *size, "", marks, 'font-size="12"')


def linear_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five round values (steps of 1, 2 or 5 times a power of ten) whose ends enclose [low, high].

    (0.03, 0.97) -> 0, 0.2, ..., 1.0. With `whole`, steps of at least 1 and the ends inside: the ticks of a step axis.
    """
    if high <= low:
        low, high = low - max(0.5 * abs(low), 0.5), high + max(0.5 * abs(high), 0.5)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1, round(step))
        return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten whose ends enclose [low, high]. (0.2, 6.4) -> 0.2, 0.5, 1, 2, 5, 10."""
    if low <= 0:
        raise ValueError(f"A logarithmic axis needs positive values, got {low}.")
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    first = max(i for i, value in enumerate(values) if value <= low * (1 + 1e-9))
    last = min(i for i, value in enumerate(values) if value >= high * (1 - 1e-9) and i > first)
    return values[first : last + 1]


def _write(out: Path, width: float, height: float, head: str, marks: Sequence[str], font: str = "") -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")  # a full disk leaves the old picture
    part.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" {font}>'
        f'{head}<rect width="100%" height="100%" fill="#ffffff"/>{"".join(marks)}</svg>\n',
        encoding="utf-8",
    )
    part.replace(out)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _drawn(chart: Chart) -> Markup:
    """Return the chart's attributes, axes and marks: the text between `<svg` and `</svg>`."""
    if chart.stacked:
        raise ValueError(f"Chart {chart.title!r} is stacked, and only pages have these.")
    xs = [x for each in chart.series for x in each.x]
    ys = [y for each in chart.series for y in itertools.chain(each.y, *each.spread)] + list(chart.include)
    low, high = min(xs), max(xs)
    low, high = (low, high) if low < high else (low - 0.5, high + 0.5)
    y_ticks = (log_ticks if chart.log else linear_ticks)(min(ys), max(ys))
    warp = math.log if chart.log else float
    bottom, top = warp(y_ticks[0]), warp(y_ticks[-1])

    def x_of(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (RIGHT - LEFT)

    def y_of(value: float) -> float:
        return BOTTOM - (warp(value) - bottom) / (top - bottom) * (BOTTOM - TOP)

    marks = []
    for value in y_ticks:
        y = y_of(value)
        marks.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{RIGHT}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in linear_ticks(low, high, whole=True):
        marks.append(f'<text x="{x_of(value):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    marks.append(f'<path class="axis" d="M{LEFT},{BOTTOM}H{RIGHT}"/>')
    below, beside = f'x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}"', f"translate(10 {(TOP + BOTTOM) / 2}) rotate(-90)"
    for place, label in ((below, chart.x_label), (f'transform="{beside}"', chart.y_label)):
        marks.append(f'<text class="label" {place} text-anchor="middle">{escape(label)}</text>')
    for number, each in enumerate(chart.series):
        colour = _colour(number)
        spots = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(each.x, each.y, strict=True)]
        paths = [] if each.points else ["M" + "L".join(spots)]
        for x, (least, most) in zip(each.x, each.spread, strict=False):
            paths.append(f"M{x_of(x):.1f},{y_of(least):.1f}V{y_of(most):.1f}")
        marks += [f'<path class="line" style="stroke:{colour}" d="{path}"/>' for path in paths]
        if each.points or len(spots) == 1:
            for x, y in (spot.split(",") for spot in spots):
                marks.append(f'<circle cx="{x}" cy="{y}" r="3.4" style="fill:{colour}"/>')
    label = escape(f"{chart.title}. {chart.ends}")
    return Markup(f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(marks)}')
