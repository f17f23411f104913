"""Traces: conversations that SFT learns from, wherever they come from, through one gate.

`sources.py` and `from_records.py` read them, `gate.py` and `rerun.py` judge each by itself, `select.py` those of a
problem together, and `output.py` and `page.py` write what was kept and why the others were not. `check.py` and
`from_run.py` are commands.
In: files of traces, records of runs. Out: a file that SFT reads, and a line for each trace that was left out.
"""
