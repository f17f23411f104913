"""A table of numbers as colours, as one SVG file: for what has two axes that are no numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import escape

LEFT, TOP, CELL_WIDTH, CELL_HEIGHT = 150, 56, 92, 26
LOW, HIGH = (247, 251, 255), (33, 113, 181)  # colours of the ends of the scale
MISSING = "#e3e3e3"


def write_heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], tuple[float, str]],
    *,
    scale: tuple[float, float],
    out: Path,
) -> None:
    """Writes the map; a cell that is not in `cells` is grey and says `missing`.

    Args:
        cells: (row, column) -> value, and the text that is shown.
        scale: values of the palest and of the darkest colour; what is beyond them has theirs.
    """
    width, height = LEFT + CELL_WIDTH * len(columns) + 10, TOP + CELL_HEIGHT * len(rows) + 10
    marks = [f'<text x="10" y="20" font-size="15">{escape(title)}</text>']
    for place, column in enumerate(columns):
        x = LEFT + CELL_WIDTH * (place + 0.5)
        marks.append(f'<text x="{x}" y="{TOP - 8}" text-anchor="middle">{escape(column)}</text>')
    for line, row in enumerate(rows):
        y = TOP + CELL_HEIGHT * line
        marks.append(f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(row)}</text>')
        for place, column in enumerate(columns):
            x, found = LEFT + CELL_WIDTH * place, cells.get((row, column))
            share = 0.0 if found is None else (found[0] - scale[0]) / (scale[1] - scale[0])
            colour, ink = MISSING, "#777777"
            if found is not None:
                share = min(1.0, max(0.0, share))
                colour = "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(LOW, HIGH, strict=True))
                ink = "#ffffff" if share > 0.6 else "#1b1b1b"
            marks.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" fill="{colour}"/>'
            )
            text = "missing" if found is None else found[1]
            marks.append(
                f'<text x="{x + CELL_WIDTH / 2}" y="{y + 17}" text-anchor="middle" fill="{ink}">{escape(text)}</text>'
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>{"".join(marks)}</svg>\n',
        encoding="utf-8",
    )
