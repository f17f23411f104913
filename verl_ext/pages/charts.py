"""Charts: what they show. `static/charts.js` draws them with uPlot and shows the values under the pointer or at the
place chosen with the arrow keys.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from verl_ext.pages.text import plain


@dataclass(frozen=True)
class Series:
    """One line: y over x.

    Attributes:
        points: marks instead of a line, for a few measured values.
        spread: low and high of each value.
        key: the metric.
        run: number of the run in the viewer's addresses.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False
    spread: Sequence[tuple[float, float]] = ()
    key: str = ""
    run: int | None = None


@dataclass(frozen=True)
class Chart:
    """Lines over a common x axis; in a template, `{{ chart }}` is its HTML.

    Attributes:
        include: values that the y axis must reach besides the data.
        log: logarithmic y axis; needs positive values.
        stacked: bars instead of lines; each series is a part of them, and all have the same x.
    Raises:
        ValueError: no series, one without values, or parts of unequal length.
    """

    title: str
    series: Sequence[Series]
    y_label: str
    x_label: str = "step"
    include: Sequence[float] = ()
    log: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        if not self.series or any(len(each.x) == 0 or len(each.x) != len(each.y) for each in self.series):
            raise ValueError(f"Chart {self.title!r} needs at least one series, each with at least one value.")
        if self.stacked and any(list(each.x) != list(self.series[0].x) for each in self.series):
            raise ValueError(f"Chart {self.title!r} is stacked: every part needs the same x.")

    def data(self) -> dict:
        """Return the fields for the script, with all series over the same `x`, None where one has no value; `spread` as
        [x, low, high]; and a `label` for each."""
        x = sorted({at for each in self.series for at in each.x})
        found = asdict(self)
        found |= {"x": x} | {name: plain(getattr(self, name)) for name in ("title", "y_label", "x_label")}
        for each, label in zip(found["series"], self.labels, strict=True):
            each |= {"label": plain(label), "name": plain(each["name"]), "key": plain(each["key"])}
            at = dict(zip(each.pop("x"), each["y"], strict=True))
            each["spread"] = [[place, *ends] for place, ends in zip(at, each["spread"], strict=False)]
            each["y"] = [at.get(place) for place in x]
        return found

    @property
    def labels(self) -> list[str]:
        """Return labels that tell the series apart: name, key or both."""
        named, keyed = (len({getattr(each, field) for each in self.series}) > 1 for field in ("name", "key"))
        parts = [[each.name] * named + [each.key] * keyed for each in self.series]
        return [
            " ".join(filter(None, part)) or each.key or each.name for part, each in zip(parts, self.series, strict=True)
        ]

    @property
    def ends(self) -> str:
        """Return the first and last values, for readers who cannot see the lines."""
        return "; ".join(
            f"{label}: {each.y[0]:.4g} at {each.x[0]:g}, {each.y[-1]:.4g} at {each.x[-1]:g}"
            for label, each in zip(self.labels, self.series, strict=True)
        )

    def __html__(self) -> Markup:
        said = plain(f"{self.title}, {self.y_label}. {self.ends}. Arrow keys move.")
        return Markup(
            '<p class="unit note">{}</p><div class="chart" tabindex="0" role="group" aria-roledescription="chart" '
            'aria-label="{}"></div><p class="value note" aria-live="polite"></p>'
            '<script type="application/json">{}</script>'
        ).format(plain(self.y_label), said, htmlsafe_json_dumps(self.data()))
