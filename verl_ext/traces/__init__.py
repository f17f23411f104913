"""Traces: conversations that SFT learns from, wherever they come from, through one gate.

`sources.py` and `from_records.py` read them, `gate.py` and `rerun.py` judge each by itself, `select.py` those of a
problem together, and `output.py` and `page.py` write what was kept and why the others were not. `check.py` and
`from_run.py` are commands. `questions.py` makes questions of a corpus: `chains.py` and `mentions.py` find documents
that lead to each other, `wording.py` words a question, and `hops.py` says whether it needs them all.
In: files of traces, records of runs. Out: a file that SFT reads, and a line for each trace that was left out.
"""
