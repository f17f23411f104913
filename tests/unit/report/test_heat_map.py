"""Colours of a heat map: the scale's ends, what is beyond them, and what is missing."""

from verl_ext.report.heat_map import write_heat_map


def test_colours_follow_the_scale(tmp_path):
    """Scale 0 to 2: 0 and -1 are the palest, 2 and 5 the darkest, 1 halfway: (247 + 33) / 2 = 140 = 8c red."""
    values = {"a": 0.0, "b": -1.0, "c": 2.0, "d": 5.0, "e": 1.0}
    cells = {("row", name): (value, f"is {value}") for name, value in values.items()}
    out = tmp_path / "new" / "map.svg"
    write_heat_map("A < B", ["row"], [*values, "none"], cells, scale=(0.0, 2.0), out=out)
    drawn = out.read_text()
    assert drawn.count('fill="#f7fbff"') == 2 and drawn.count('fill="#2171b5"') == 2
    assert 'fill="#8cb6da"' in drawn  # (251 + 113) / 2 = 182 = b6, (255 + 181) / 2 = 218 = da
    assert drawn.count(">missing<") == 1 and ">is 5.0<" in drawn and "A &lt; B" in drawn
