"""The sandbox server and everything that isolates a program: `retool sandbox`.

`api.py` is HTTP, `pool.py` the queue and the judge of lost programs, `workers.py` the server's side of the processes,
`zygote.py`, `worker.py` and `program.py` are the processes, `isolation.py` their walls.
In: a request with Python code. Out: what the code printed, and how the program ended.
"""
