"""The records of every rollout of a run: one process writes them, anything may read them.

`recorder.py` writes rollouts, tokens and times. `schema.py` has the columns, `store.py` the files; `trajectories.py`,
`fates.py` and `token_rows.py` make the rows. `problem.py` says which rows of a data set are one problem.
In: rollouts, steps. Out: files, and their rows.
"""
