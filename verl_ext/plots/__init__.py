"""Charts as SVG files for docs: `drawing.py` draws what `verl_ext/pages/charts.py` describes.

In: numbers. Out: SVG.
"""
