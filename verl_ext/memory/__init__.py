"""How much memory a run needs on its GPUs, host and disk. The doctor compares it with what the machine has.

`shape.py` has the sizes of a model, `estimate.py` the formula, `simulate.py` counts a training step operation by
operation, and `words.py` formats bytes.
In: a `Plan`, all that memory depends on. Out: bytes, and the formula with its numbers.
"""
