"""What became of every prompt of an RL run, and of its servers: `retool ledger RUN`.

`prompts.py` writes and sums `prompts.jsonl`, `servers.py` does so for `servers.jsonl`; `__main__.py` prints both.
In: draws, ends, starts and deaths, as the run reports them. Out: the two files, and whether they sum.
"""
