"""A viewer of runs in the browser: `retool view RUN [RUN...]`, also while they train.

`data.py` queries the records by SQL. `app.py` has the pages and checks who may request them, `group.py` the samples
side by side, `tokens.py` the token lens, `timeline.py` a step's time, `problems.py` the same problem over time and
between runs, `export.py` files for other programs. `verl_ext/pages/` makes pages of `templates/`.
In: folders of runs and evaluations, which are only read. Out: pages on the loopback address.
"""
