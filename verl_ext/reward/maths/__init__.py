"""Whether two answers in mathematical notation are equal.

`extraction.py` finds the answer, `normalisation.py` cleans it with `notation.py`. `structure.py`, `rationals.py` and
`intervals.py` compare what can be compared without algebra, with `labels.py`, `units.py` and `choices.py`.
`symbolic.py` asks sympy (`algebra.py`) in a separate process.
In: a response, a ground truth. Out: equal, not equal, or unknown. `score.py`, one folder up, combines them.
"""
