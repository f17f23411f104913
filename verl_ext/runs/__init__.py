"""The files of a run, how they are written and read, and the machine that it runs on.

`folder.py` decides which folder is a run and which files it has, `metrics.py` reads its curves, `journal.py` keeps what
a resumed run must remember. `jsonl.py` has the rules of JSON lines,
`parquet.py` those of Parquet, `durable.py` writes files that survive a power loss, `lock.py` keeps a second writer out,
`machine.py` inspects a machine, and `processes.py` ends processes whose parent was killed.
In: folders and rows. Out: files, and their contents.
"""
