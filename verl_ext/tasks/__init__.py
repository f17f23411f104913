"""Tasks that an episode works on in a box of the sandbox: what the box holds, what the model is told, what tests it.

`task.py` has a task and its row of a data set, `archive.py` the files of a box as bytes, and `harbor.py` reads and
writes Harbor's folders. The environments terminal and repository play tasks.
In: folders of tasks, or a generator's parts. Out: `BoxTask`s, and rows.
"""
