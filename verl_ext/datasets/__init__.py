"""How data sets are read, cleaned and written; the scripts are in data/.

`problems.py` and `traces.py` read public forms, `text.py` cleans and finds duplicates, `rows.py` writes verl's Parquet
rows, `sft.py` makes tokens and loss mask of traces, `peek.py` only looks at files.
In: files of problems or traces. Out: rows, and SFT samples.
"""
