"""Charts as one SVG file in the page's light colours, for pages that show pictures and no HTML."""

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from verl_ext.report.charts import HEIGHT, WIDTH

STYLE = Path(__file__).with_name("page_style.html")
MARGIN, HEAD, LEGEND_ROW = 20, 40, 16  # units of a chart's view box


def write_picture(charts: Sequence[tuple[str, Markup]], out: Path, *, columns: int = 3) -> None:
    """Writes titled charts (charts.py), `columns` in a row, each with the legend of its series if it has several."""
    style = STYLE.read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--[\w-]+): (#\w+);", style.partition("@media")[0]))
    rules = "".join(re.findall(r"^svg (?:\.|text).*$", style, re.MULTILINE))
    legends = [re.findall(r'background:(var\(--c\d\))"></i>(.*?)</span>', str(chart)) for _, chart in charts]
    legends = [legend if len(legend) > 1 else [] for legend in legends]
    row_height = HEIGHT + HEAD + LEGEND_ROW * max((-(-len(legend) // 2) for legend in legends), default=0)
    cells = []
    for number, ((title, chart), legend) in enumerate(zip(charts, legends, strict=True)):
        left, top = number % columns * (WIDTH + MARGIN), number // columns * row_height
        svg = re.sub(r' data-chart="[^"]*"', "", str(chart).partition("</svg>")[0])
        svg = svg.replace("<svg ", f'<svg x="{left}" y="{top + 30}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        heading = f'<text class="heading" x="{left + WIDTH / 2}" y="{top + 22}" text-anchor="middle">{title}</text>'
        cells.append(f"{heading}{svg}</svg>")
        for place, (colour, name) in enumerate(legend):
            x = left + 70 + place % 2 * WIDTH // 2.2
            y = top + HEIGHT + HEAD + LEGEND_ROW * (place // 2)
            cells.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" style="fill:{colour}"/>')
            cells.append(f'<text x="{x + 15}" y="{y + 1}">{name}</text>')
    width, height = min(columns, len(charts)) * (WIDTH + MARGIN), -(-len(charts) // columns) * row_height
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        f"<style>{rules}svg text.heading {{ font-size: 15px; fill: var(--ink); }}</style>"
        f'<rect width="100%" height="100%" style="fill:var(--card)"/>{"".join(cells)}</svg>\n'
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], picture), encoding="utf-8")
