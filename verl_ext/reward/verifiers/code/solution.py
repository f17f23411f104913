"""The program that holds the solution: makes the calls of a test. Sent as source.

It follows values.py in one file, and ends with `serve(program, calls)`. The solution may do anything here: only the
test's calls are present, and the output of this process is only taken for returned data.
"""

import itertools
import os
import sys
import types
from collections.abc import Iterator

from verl_ext.reward.verifiers.code.values import decode, encode, pack

MAX_ITEMS = 10_000  # of an iterator, which may be endless


def serve(program, calls):
    """Run the program, then make the calls; print an answer, one line, for each."""
    sys.set_int_max_str_digits(0)
    output = open(os.dup(1), "w", encoding="ascii", closefd=False)  # noqa: SIM115  to the end
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    module = types.ModuleType("solution")  # what stands below `if __name__ == "__main__"` does not run
    sys.modules["__main__"] = sys.modules["solution"] = module
    exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
    results = {}
    for number, call in enumerate(calls):
        output.write(pack(answer(module, call, number, results)) + "\n")
        output.flush()
    os._exit(0)


def answer(module, call, number, results):
    """Return {"value": ...} or {"error": name}; keep a value in `results`, to which later calls refer by number."""
    path, args, kwargs = call
    try:
        args = [decode(item, lambda data: results[data[1]]) for item in args]
        kwargs = {name: decode(item, lambda data: results[data[1]]) for name, item in kwargs.items()}
        owner, _, name = path.rpartition("().")  # of Solution().f
        function = getattr(vars(module)[owner](), name) if owner else vars(module)[name]
        value = results[number] = function(*args, **kwargs)
        if isinstance(value, Iterator):
            value, results[number] = itertools.tee(value)
        return {"value": encode(value, encode_other)}
    except BaseException as error:  # a SystemExit ends the call only
        return {"error": type(error).__name__}


def encode_other(value):
    if not isinstance(value, Iterator):
        return ["object", type(value).__name__, bool(value)]
    items = [encode(item, encode_other) for item in itertools.islice(value, MAX_ITEMS + 1)]
    return ["iterator", items[:MAX_ITEMS], len(items) <= MAX_ITEMS]
