"""The sandbox server and everything that isolates a program: `python -m verl_ext.sandbox.server`.

`api.py` is HTTP, `pool.py` the queue and the workers, `zygote.py`, `worker.py` and `program.py` the processes,
`isolation.py` their walls.
In: a request with Python code. Out: what the code printed, and how the program ended.
"""
