"""Charts, described once (`charts.py`): interactive on a page, static in a file.

`charts.py` has what a page needs for them, with the scripts and styles in `static/`; uPlot draws. `drawing.py` makes
SVG files for docs. `text.py` makes characters visible that would hide or reorder text on a page.
In: numbers. Out: HTML, SVG.
"""
