"""Tasks that an episode works on in a box of the sandbox: what the box holds, what the model is told, what tests it.

`task.py` has a task and its row of a data set, `archive.py` the files of a box as bytes, and `harbor.py` reads and
writes Harbor's folders. Of a repository, `instance.py` has a change in SWE-bench's fields, `git.py` reads commits and
cuts history, `crossing.py` says which files of an agent count, `hidden_tests.py` has the tests of a fix, with those of
`canaries.py`, which must fail, and `repository.py` the row. `run_tests.py` and `find_leaks.py` are programs for a box.
The environments terminal and repository play tasks.
In: folders of tasks, or a generator's parts. Out: `BoxTask`s, and rows.
"""
