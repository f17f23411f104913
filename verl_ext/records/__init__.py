"""What a run writes and other commands read.

`trajectories.py` writes rollouts, `journal.py` what a resumed run must remember. `run_folder.py` says which folder is
a run, `run_record.py` reads it. `durable.py` writes files that survive a power loss.
In: rollouts, steps, folders. Out: files, and what is in them.
"""
