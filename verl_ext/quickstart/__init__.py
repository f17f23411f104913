"""The quickstart, from data to report, as one resumable pipeline: `bash scripts/quickstart.sh`.

`options.py` reads its options, `rungs.py` says which models it can train, `pipeline.py` has the stages,
`source.py` starts from another quickstart's SFT, `supervise.py` runs a command, shows its progress and cleans up after
it, `disk.py` reports a full disk, `fresh.py` deletes an earlier run.
In: options. Out: a folder with both runs, their evaluations and the report.
"""
