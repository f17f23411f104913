"""The quickstart, from data to report, as one resumable pipeline: `bash scripts/quickstart.sh`.

`options.py` reads its options, `rungs.py` says which models it can train, `pipeline.py` has the stages,
`source.py` starts from another quickstart's SFT, `supervise.py` runs a command with progress and an end, `disk.py`
says that a disk is full.
In: options. Out: a folder with both runs, their evaluations and the report.
"""
