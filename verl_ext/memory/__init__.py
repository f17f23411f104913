"""How much memory a run takes: of a GPU, of a host, of a disk. Whether there is as much, the doctor says.

`shape.py` has the sizes of a model, `estimate.py` the formula, `simulate.py` counts a training step operation by
operation, `words.py` has bytes in words.
In: a `Plan`, which is all that memory depends on. Out: bytes, and the formula with its numbers.
"""
