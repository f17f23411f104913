"""Charts, described once (`charts.py`): in a page they answer to the pointer, in a file they stand still.

`charts.py` has what a page needs of them, with the scripts and styles in `static/`; uPlot draws. `drawing.py` makes SVG
files for docs. `text.py` makes visible what would hide or turn in a text on a page.
In: numbers. Out: HTML, SVG.
"""
