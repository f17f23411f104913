"""Tasks that an episode works on in a box of the sandbox: what the box holds, what the model is told, what tests it.

`task.py` has a task and its row of a data set, `archive.py` the files of a box as bytes, and `harbor.py` reads and
writes Harbor's folders. Of repositories, `instance.py` has a change in SWE-bench's fields, `git.py` reads commits and
cuts history, `crossing.py` says which files of an agent count, and `canaries.py` makes tests that must fail. The
environments terminal and repository play tasks.
In: folders of tasks, or a generator's parts. Out: `BoxTask`s, and rows.
"""
