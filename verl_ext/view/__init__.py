"""A viewer of runs, in the browser: `python -m verl_ext.view RUN [RUN...]`, also while they train.

`data.py` asks the records by SQL, `app.py` has the pages and who may ask for them, `curves.py` the run page, `group.py`
what stands side by side, `tokens.py` the token lens, `timeline.py` a step's time, `purposes.py` what code is for,
`problems.py` the same problem over time and between runs, `export.py` files for other programs; `evaluation.py` makes
records of an evaluation's samples. `templates/` and `static/` have the looks; `verl_ext/plots/` draws curves.
In: folders of runs and evaluations, which are only read. Out: pages on the loopback address.
"""
