"""Every rollout of a run: what is kept of it, written by one process, and read.

`recorder.py` writes rollouts, tokens and times: `schema.py` has the columns, `store.py` the files, `trajectories.py`,
`fates.py` and `token_rows.py` make the rows. `problem.py` says which rows of a data set are one problem.
In: rollouts, steps. Out: files, and what is in them.
"""
