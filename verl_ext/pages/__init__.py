"""What report and viewer share: one page maker, one look, one way to draw a chart and to write a number.

`page.py` renders templates and makes a page one file, `charts.py` describes charts, `curves.py` says which metrics of a
run are drawn, `transcript.py` and `question.py` prepare a response and what it was asked, `text.py` writes numbers and
makes text of a model harmless. `templates/` has the base of every page, `static/` its stylesheet and scripts; uPlot
draws.
In: numbers, text and rows of records. Out: HTML.
"""
