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
    ys = [y for each in series for y in each.y] + [y for each in series for pair in each.spread for y in pair]
    ys += include
    axes = _Axes([x for each in series for x in each.x], min(ys), max(ys), log)
    marks = []
    for number, each in enumerate(series):
        colour = _colour(number)
        spots = [f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in zip(each.x, each.y, strict=True)]
        paths = [] if each.points else ["M" + "L".join(spots)]
        for x, (low, high) in zip(each.x, each.spread, strict=False):
            paths.append(f"M{axes.x(x):.1f},{axes.y(low):.1f}V{axes.y(high):.1f}")
        marks += [f'<path class="line" style="stroke:{colour}" d="{path}"/>' for path in paths]
        if each.points or len(spots) == 1:
            for x, y in (spot.split(",") for spot in spots):
                marks.append(f'<circle cx="{x}" cy="{y}" r="3.4" style="fill:{colour}"/>')
    data = [(each.name, each.x, each.y) for each in series]
    return axes.picture(title, x_label, y_label, marks, data, legend=len(series) > 1 or series[0].points)


def stacked_chart(
    x: Sequence[float], parts: Mapping[str, Sequence[float]], *, x_label: str, y_label: str, title: str
) -> Markup:
    """One bar per x, its parts stacked in the order given.

    Raises:
        ValueError: no x, or a part whose length differs from x's.
    """
    if not x or any(len(values) != len(x) for values in parts.values()):
        raise ValueError(f"Chart {title!r} needs at least one bar, and every part as long as x.")
    gap = min((b - a for a, b in zip(x, x[1:], strict=False)), default=1)
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    axes = _Axes([x[0] - gap / 2, x[-1] + gap / 2], 0, max(totals))
    width = max(0.5, 0.84 * (axes.x(x[0] + gap) - axes.x(x[0])))
    marks, floor = [], [0.0] * len(x)
    for number, values in enumerate(parts.values()):
        path = ""
        for i, value in enumerate(values):
            top, bottom = axes.y(floor[i] + value), axes.y(floor[i])
            path += f"M{axes.x(x[i]) - width / 2:.1f},{bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z"
            floor[i] += value
        marks.append(f'<path style="fill:{_colour(number)}" d="{path}"/>')
    data = [(name, x, values) for name, values in parts.items()]
    return axes.picture(title, x_label, y_label, marks, data, legend=True)


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


class _Axes:
    """Places values in the plot area, and draws the axes around it."""

    def __init__(self, xs: Sequence[float], y_low: float, y_high: float, log: bool = False):
        low, high = min(xs), max(xs)
        self.x_low, self.x_high = (low, high) if low < high else (low - 0.5, high + 0.5)
        self.y_ticks = (log_ticks if log else linear_ticks)(y_low, y_high)
        self._warp = math.log if log else float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        at, low, high = map(self._warp, (value, self.y_ticks[0], self.y_ticks[-1]))
        return BOTTOM - (at - low) / (high - low) * (BOTTOM - TOP)

    def picture(self, title: str, x_label: str, y_label: str, marks: list[str], data: list, *, legend: bool) -> Markup:
        """The chart: axes, `marks`, and `data`, the (name, x, y) of each line or part, for the page's script."""
        drawn = []
        for value in self.y_ticks:
            y = self.y(value)
            drawn.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{RIGHT}"/>')
            drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value in linear_ticks(self.x_low, self.x_high, whole=True):
            drawn.append(f'<text x="{self.x(value):.1f}" y="{BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
        drawn.append(f'<path class="axis" d="M{LEFT},{BOTTOM}H{RIGHT}"/>')
        below, beside = f'x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}"', f"translate(10 {(TOP + BOTTOM) / 2}) rotate(-90)"
        for place, label in ((below, x_label), (f'transform="{beside}"', y_label)):
            drawn.append(f'<text class="label" {place} text-anchor="middle">{escape(label)}</text>')
        lines = [
            {"name": name, "x": [float(f"{v:.6g}") for v in x], "y": [float(f"{v:.4g}") for v in y]}
            for name, x, y in data
        ]
        hover = json.dumps({"x0": self.x_low, "x1": self.x_high, "series": lines}, separators=(",", ":"))
        ends = "; ".join(f"{name}: {y[0]:.4g} at {x[0]:g}, {y[-1]:.4g} at {x[-1]:g}" for name, x, y in data)
        entries = "".join(
            f'<span><i style="background:{_colour(number)}"></i>{escape(name)}</span>'
            for number, (name, _, _) in enumerate(data)
        )
        return Markup(
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}. {ends}")}" '
            f'data-x="{escape(x_label)}" data-left="{LEFT}" data-right="{RIGHT}" data-top="{TOP}" '
            f'data-bottom="{BOTTOM}" data-chart="{escape(hover)}">{"".join([*drawn, *marks])}</svg>'
            + (f'<div class="legend">{entries}</div>' if legend else "")
        )
