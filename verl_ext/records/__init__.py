"""Every rollout of a run: what is kept of it, written by one process, and read.

`recorder.py` writes rollouts, tokens and times: `schema.py` has the columns, `store.py` the files, `trajectories.py`,
`fates.py` and `token_rows.py` make the rows. `samples.py` reads them, and other files of judged responses.
In: rollouts, steps. Out: files, and what is in them.
"""
