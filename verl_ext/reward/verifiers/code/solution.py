"""The program that holds the solution: answers calls, in the order in which the tests make them. Sent as source.

It follows values.py in one file, and ends with `serve(program, requests, known)`. The solution may do anything here:
only the tests' calls are present, and the output of this process is only taken for returned data.
"""

import builtins
import copy
import importlib
import io
import itertools
import json
import operator
import os
import sys
import types

from verl_ext.reward.verifiers.code.values import decode, encode

MAX_PRINTED = 1 << 16  # characters that one call prints
MAX_OUTPUT = 900_000  # characters of answers in one run; the sandbox keeps a million bytes
LOADED = "loaded"
PAUSED = "paused"  # more answers than fit into one run


def serve(program, requests, known):
    """Run the program, then the requests; print an answer, one line of JSON, for each from number `known` on."""
    output = open(os.dup(1), "w", encoding="ascii", closefd=False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
    output.write(LOADED + "\n")
    output.flush()
    solution, left = Solution(module), MAX_OUTPUT
    for number, request in enumerate(requests):
        answer = solution.answer(*request)
        if number < known:
            continue
        line = json.dumps(answer)
        if len(line) > MAX_OUTPUT:
            line = json.dumps({"error": solution.describe(OverflowError(f"a result of {len(line)} characters"))})
        left -= len(line)
        output.write((line if left >= 0 else PAUSED) + "\n")
        output.flush()
        if left < 0:
            break
    os._exit(0)


class Solution:
    """The objects and results that later calls may refer to."""

    def __init__(self, module):
        self.module = module
        self.objects, self.numbers, self.results = [], {}, []

    def answer(self, verb, args, kwargs):
        """Return {"value": ...} or {"error": ...}, with "args" if the call changed them, and "printed"."""
        sys.stdout = printed = io.StringIO()
        value, answer = None, {}
        try:
            args = [self.decode(item) for item in args]
            kwargs = {name: self.decode(item) for name, item in kwargs.items()}
            before = self.mutable(args, kwargs)
            try:
                value = self.perform(verb, args, kwargs)
                answer["value"] = self.encode(value)
            finally:
                after = self.mutable(args, kwargs)
                if after != before:
                    answer["args"] = after
        except BaseException as error:
            answer["error"] = self.describe(error)
        self.results.append(value)
        sys.stdout = io.StringIO()
        text = printed.getvalue()
        return answer | ({"printed": text[:MAX_PRINTED]} if text else {})

    def mutable(self, args, kwargs):
        """Return the arguments as JSON, if a call can change them in place."""
        values = [*args, *kwargs.values()]
        if any(isinstance(value, (list, dict, set, bytearray, tuple)) for value in values):
            return [[self.encode(value) for value in args], {name: self.encode(kwargs[name]) for name in kwargs}]
        return None

    def perform(self, verb, args, kwargs):
        if verb == "get":
            if args[0] in vars(self.module):
                return vars(self.module)[args[0]]
            raise NameError(f"name {args[0]!r} is not defined")
        if verb == "call":
            return args[0](*args[1:], **kwargs)
        if verb == "take":  # up to a number of items of an iterator, and the error that ended it
            items = []
            try:
                items.extend(itertools.islice(args[0], args[1]))
            except Exception as error:
                return items, self.describe(error)
            return items, None
        if verb == "state":
            kind = type(args[0])
            names = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
            state = {name: getattr(args[0], name) for name in names if hasattr(args[0], name)}
            return dict(vars(args[0]) if hasattr(args[0], "__dict__") else {}) | state
        if verb == "await":
            import asyncio

            async def wait():
                return await args[0]

            return asyncio.run(wait())
        if verb in ("copy", "deepcopy"):
            return getattr(copy, verb)(args[0])
        return (getattr(operator, verb, None) or getattr(builtins, verb))(*args, **kwargs)

    def encode(self, value):
        try:
            return encode(value, self.to_handle)
        except RecursionError:
            return self.to_handle(value, None)

    def to_handle(self, value, content):
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self.names(value)]
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        handle = ["object", self.numbers[id(value)], type(value).__name__]
        return handle if content is None else [*handle, content]

    def decode(self, data):
        return decode(data, self.from_handle)

    def from_handle(self, data):
        kind, which = data[:2]
        if kind == "object":
            return self.objects[which]
        if kind == "result":
            return self.results[which]
        if kind == "iterator":
            return iter([self.decode(item) for item in which])
        if kind == "import":  # such as math.sqrt or len
            value = importlib.import_module(which)
            for name in data[2].split("."):
                value = getattr(value, name)
            return value
        if kind == "function":  # source of a function that needs nothing else
            namespace = {}
            exec(f"_function = {which}" if which.startswith("lambda") else which, namespace)
            return namespace["_function" if which.startswith("lambda") else data[2]]
        raise ValueError(f"no such value: {kind!r}")

    def describe(self, error):
        """Return the names of an error's classes down to a built-in one, and its arguments."""
        try:
            plain = (int, float, str, bool, type(None))
            arguments = [item if type(item) in plain else str(item) for item in error.args]
        except BaseException:
            arguments = []
        return [self.names(type(error)), arguments]

    @staticmethod
    def names(kind):
        names = []
        for base in kind.__mro__:
            names.append(base.__name__)
            if base.__module__ == "builtins":
                break
        return names
