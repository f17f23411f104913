"""The files of a run, how they are written and read, and the machine that it is on.

`folder.py` says which folder is a run and which files it has, `metrics.py` reads its curves, `journal.py` has what a
resumed run must remember, `batch_file.py` a batch that was trained on. `jsonl.py` has the rules of JSON lines,
`parquet.py` those of Parquet, `durable.py` writes files that survive a power loss, `lock.py` keeps a second writer out,
`machine.py` looks at a machine, `processes.py` ends processes whose parent was killed.
In: folders and rows. Out: files, and what is in them.
"""
