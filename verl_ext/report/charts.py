"""Charts as inline SVG, for a page that works from disk: lines over steps, stacked bars, before/after intervals.

Colours are CSS variables of the page (--c1 ... --c8), so that light and dark need one picture. The page's script reads
`data-chart` to show values under the pointer; without a script the charts still read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 250  # view box; the picture scales with its column
LEFT, RIGHT, TOP, BOTTOM = 70, 450, 12, 206  # plot area in the view box

NUM_COLOURS = 8  # --c1 ... --c8 of the page; a ninth line takes the first again


@dataclass(frozen=True)
class Series:
    """One line: y over x. `points` draws marks instead, for a few measured values, with their `spread` as bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False
    spread: Sequence[tuple[float, float]] = field(default=())  # low, high of each value


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    title: str,
    include: Sequence[float] = (),
    log: bool = False,
) -> Markup:
    """Lines over a common x axis.

    Args:
        include: values the y axis must reach beside the data's; its ends are the next round numbers.
        log: logarithmic y axis; needs positive values.
    Raises:
        ValueError: no series, or one without values.
    """
    if not series or any(len(each.x) == 0 for each in series):
        raise ValueError(f"Chart {title!r} needs at least one series, each with at least one value.")
    xs = [x for each in series for x in each.x]
    ys = [y for each in series for y in each.y] + [y for each in series for pair in each.spread for y in pair]
    ys += include
    ticks = (log_ticks if log else linear_ticks)(min(ys), max(ys))
    scale_x, (x_low, x_high) = _x_scale(xs)
    warp = math.log if log else float

    def scale_y(value: float) -> float:
        share = (warp(value) - warp(ticks[0])) / (warp(ticks[-1]) - warp(ticks[0]))
        return BOTTOM - share * (BOTTOM - TOP)

    marks = []
    for number, each in enumerate(series):
        colour = _colour(number)
        spots = [(scale_x(x), scale_y(y)) for x, y in zip(each.x, each.y, strict=True)]
        if not each.points:
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            marks.append(f'<path class="line" style="stroke:{colour}" d="{path}"/>')
        for x, (low, high) in zip(each.x, each.spread, strict=False):
            bar = f"M{scale_x(x):.1f},{scale_y(low):.1f}V{scale_y(high):.1f}"
            marks.append(f'<path class="line" style="stroke:{colour}" d="{bar}"/>')
        if each.points or len(spots) == 1:
            marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" style="fill:{colour}"/>' for x, y in spots]
    return _picture(
        title,
        [*_axes(ticks, scale_y, linear_ticks(x_low, x_high, whole=True), scale_x, x_label, y_label), *marks],
        [(each.name, each.x, each.y) for each in series],
        x_label,
        (x_low, x_high),
        legend=len(series) > 1 or series[0].points,
    )


def stacked_chart(
    x: Sequence[float], parts: Mapping[str, Sequence[float]], *, x_label: str, y_label: str, title: str
) -> Markup:
    """One bar per x, its parts stacked in the order given.

    Raises:
        ValueError: no x, or a part whose length differs from x's.
    """
    if not x or any(len(values) != len(x) for values in parts.values()):
        raise ValueError(f"Chart {title!r} needs at least one bar, and every part as long as x.")
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    ticks = linear_ticks(0, max(totals))
    gap = min((b - a for a, b in zip(x, x[1:], strict=False)), default=1)
    scale_x, (x_low, x_high) = _x_scale([x[0] - gap / 2, x[-1] + gap / 2])
    width = max(0.5, 0.84 * (scale_x(x[0] + gap) - scale_x(x[0])))

    def scale_y(value: float) -> float:
        return BOTTOM - value / ticks[-1] * (BOTTOM - TOP)

    marks, floor = [], [0.0] * len(x)
    for number, values in enumerate(parts.values()):
        path = ""
        for i, value in enumerate(values):
            top, bottom = scale_y(floor[i] + value), scale_y(floor[i])
            path += f"M{scale_x(x[i]) - width / 2:.1f},{bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z"
            floor[i] += value
        marks.append(f'<path style="fill:{_colour(number)}" d="{path}"/>')
    return _picture(
        title,
        [*_axes(ticks, scale_y, linear_ticks(x_low, x_high, whole=True), scale_x, x_label, y_label), *marks],
        [(name, x, values) for name, values in parts.items()],
        x_label,
        (x_low, x_high),
        legend=True,
    )


def interval_strip(before: tuple[float, float, float] | None, after: tuple[float, float, float] | None) -> Markup:
    """Values with intervals (value, low, high) on a 0 to 1 axis: `before` hollow above, `after` full below."""
    marks = ['<path class="grid" d="M4,4V28M79,4V28M154,4V28"/>']
    for each, y, name in ((before, 10, "before"), (after, 22, "after")):
        if each is not None:
            value, low, high = (4 + 150 * min(1.0, max(0.0, number)) for number in each)
            marks.append(f'<path class="strip {name}" d="M{low:.1f},{y}H{high:.1f}"/>')
            marks.append(f'<circle class="strip {name}" cx="{value:.1f}" cy="{y}" r="4"/>')
    return Markup(f'<svg class="interval" viewBox="0 0 158 32" aria-hidden="true">{"".join(marks)}</svg>')


def linear_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round values (steps of 1, 2 or 5 times a power of ten), about five of them, whose ends enclose [low, high].

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
    """1, 2 and 5 times powers of ten whose ends enclose [low, high]. (0.2, 6.4) -> 0.2, 0.5, 1, 2, 5, 10."""
    if low <= 0:
        raise ValueError(f"A logarithmic axis needs positive values, got {low}.")
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    first = max(i for i, value in enumerate(values) if value <= low * (1 + 1e-9))
    last = min(i for i, value in enumerate(values) if value >= high * (1 - 1e-9) and i > first)
    return values[first : last + 1]


def _colour(number: int) -> str:
    return f"var(--c{number % NUM_COLOURS + 1})"


def _x_scale(xs: Sequence[float]):
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return lambda x: LEFT + (x - low) / (high - low) * (RIGHT - LEFT), (low, high)


def _axes(y_ticks, scale_y, x_ticks, scale_x, x_label: str, y_label: str) -> list[str]:
    marks = []
    for value in y_ticks:
        y = scale_y(value)
        marks.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{RIGHT}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        marks.append(f'<text x="{scale_x(value):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    middle = (TOP + BOTTOM) / 2
    marks.append(f'<path class="axis" d="M{LEFT},{BOTTOM}H{RIGHT}"/>')
    marks.append(
        f'<text class="label" x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    marks.append(
        f'<text class="label" transform="translate(10 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return marks


def _picture(
    title: str, marks: Sequence[str], data, x_label: str, x_range: tuple[float, float], *, legend: bool
) -> Markup:
    hover = {
        "x0": x_range[0],
        "x1": x_range[1],
        "series": [
            {"name": name, "x": [float(f"{v:.6g}") for v in x], "y": [float(f"{v:.4g}") for v in y]}
            for name, x, y in data
        ],
    }
    ends = "; ".join(f"{name}: {y[0]:.4g} at {x[0]:g}, {y[-1]:.4g} at {x[-1]:g}" for name, x, y in data)
    entries = "".join(
        f'<span><i style="background:{_colour(number)}"></i>{escape(name)}</span>'
        for number, (name, _, _) in enumerate(data)
    )
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}. {ends}")}" '
        f'data-x="{escape(x_label)}" data-left="{LEFT}" data-right="{RIGHT}" data-top="{TOP}" data-bottom="{BOTTOM}" '
        f'data-chart="{escape(json.dumps(hover, separators=(",", ":")))}">{"".join(marks)}</svg>'
        + (f'<div class="legend">{entries}</div>' if legend else "")
    )
