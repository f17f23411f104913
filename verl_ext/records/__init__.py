"""What a run writes and other commands read.

`recorder.py` writes rollouts, tokens and times: `schema.py` has the columns, `store.py` the files, `trajectories.py`,
`fates.py` and `token_rows.py` make the rows. `journal.py` has what a resumed run must remember. `run_folder.py` says
which folder is a run and which files it has, `run_record.py` and `samples.py` read them, `batch_file.py` has a batch
that was trained on, `machine.py` looks at a machine. `jsonl.py` has the rules of JSON lines, `durable.py` writes files
that survive a power loss, `lock.py` keeps a second writer out.
In: rollouts, steps, folders. Out: files, and what is in them.
"""
