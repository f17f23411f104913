"""Checkpoints that are whole or not there: `retool checkpoints RUN` shows them.

`folder.py` decides which ones are whole and resumed from, `rolling.py` which ones are kept, `manifest.py` lists sizes
and checksums, `course.py` says what a resumed run must share with the run that saved, and `hooks.py` makes verl follow
all this. `lora.py` adds adapters to the weights when verl merges a checkpoint.
In: what verl saves. Out: a folder with `checkpoint.json`, or nothing.
"""
