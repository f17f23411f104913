"""The program that holds the tests: the solution's names are proxies, which ask for calls. Sent as source.

It follows values.py and handles.py in one file, and ends with `run_test(...)`. A call whose answer is known returns
the answer. The first call without an answer is asked for; then the test continues with guesses, only to ask for further
calls in the same round.
"""

import __future__

import builtins
import importlib
import io
import json
import os
import random
import signal
import sys
import types

from verl_ext.reward.verifiers.code.handles import CLASS, LIKE_CLASS, OTHER, Guess, Handle
from verl_ext.reward.verifiers.code.values import decode, encode

GUESS_S = 0.5  # of CPU time, for continuing with guesses
MAX_REQUESTS = 4000  # asked for in one round
MAX_REPORT = 700_000  # characters; the sandbox keeps a million bytes of output


class Unpassable(TypeError):
    """The test passes an argument that is not data, so that no program can be called with it."""


class Replay:
    """One run of a test, with the answers that are known."""

    def __init__(self, mark, played, functions, modules, classes, own_builtin, output):
        self.mark, self.played, self.functions, self.output = mark, played, functions, output
        self.modules, self.classes, self.own_builtin = modules, classes, own_builtin
        self.count, self.guessing, self.asked, self.written = 0, False, [], 0
        self.handles, self.exceptions, self.names, self.unpassable = {}, {}, {}, {}

    def ask(self, verb, args, kwargs, level):
        number, self.count = self.count, self.count + 1
        try:
            request = [verb, [self.encode(arg) for arg in args], {name: self.encode(kwargs[name]) for name in kwargs}]
        except Unpassable as error:
            self.unpassable = {"unpassable": str(error)}
            raise
        if not self.guessing and number < len(self.played):
            asked, answer = self.played[number]
            if json.dumps(self.resolve(asked)) == json.dumps(request):
                if answer is None:
                    self.report({"passed": False, "why": "a call was not answered"})
                return self.settle(args, kwargs, answer, level)
        if not self.guessing:
            self.start_guessing(request, number)
        self.written += len(json.dumps(request))
        if len(self.asked) == MAX_REQUESTS or self.written > MAX_REPORT and self.asked:
            self.stop()
        self.asked.append(request)
        return Guess(self, number, level)

    def settle(self, args, kwargs, answer, level):
        """Apply a known answer: what was printed, what was changed, and the value or the error."""
        if "printed" in answer:
            print(answer["printed"], end="")
        if answer.get("args"):
            changed = [[self.decode(item, level) for item in answer["args"][0]], answer["args"][1]]
            for old, new in zip(args, changed[0], strict=True):
                update(old, new)
            for name, old in kwargs.items():
                update(old, self.decode(changed[1][name], level))
        if "error" in answer:
            raise self.exception(*answer["error"])
        return self.decode(answer["value"], level)

    def exception(self, names, args):
        """Return an exception of the solution; its own classes are made here, by name, over a built-in one."""
        kind = self.exception_class(names)
        if issubclass(kind, (StopIteration, StopAsyncIteration, GeneratorExit)):
            kind = RuntimeError  # otherwise it would end a loop of the test, and the loop's checks with it
        try:
            return kind(*args)
        except Exception:
            return kind()

    def exception_class(self, names):
        if names[-1] not in vars(builtins) or not issubclass(vars(builtins)[names[-1]], BaseException):
            raise ValueError("no built-in exception")
        kind = vars(builtins)[names[-1]]
        for position in range(len(names) - 2, -1, -1):
            key = tuple(names[position:])
            kind = self.exceptions.setdefault(key, type(str(names[position]), (kind,), {}))
        return kind

    def start_guessing(self, request, number):
        self.guessing, self.start = True, number
        self.write({"from": number, "need": [request]})  # in case the guesses end this process
        signal.signal(signal.SIGPROF, lambda *_: self.stop())
        signal.setitimer(signal.ITIMER_PROF, GUESS_S)

    def stop(self):
        self.report({"from": self.start, "need": self.asked} | self.unpassable)

    def report(self, report):
        self.write(report)
        os._exit(0)

    def write(self, report):
        os.write(self.output, f"\n{self.mark}{json.dumps(report)}\n".encode())

    def encode(self, value):
        return encode(value, self.to_handle)

    def to_handle(self, value, content):
        if type(value) is Handle:
            return value._wire
        if type(value) is Guess:
            if value._number is None:
                self.stop()
            return ["result", value._number]
        if content is not None:
            return content
        if isinstance(value, (types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType, type)):
            return self.function(value)
        # The solution may use more than the items of a file, or of an object of one of the test's classes.
        if hasattr(value, "__next__") and not hasattr(value, "read") and type(value).__module__ != "__main__":
            return ["iterator", [self.encode(item) for item in value]]
        raise Unpassable(f"the test passes an object of {type(value).__name__!r}, which is not plain data")

    def function(self, value):
        """Encode a function as an import for the other side, or as the source of one that needs nothing else."""
        module, name = getattr(value, "__module__", None) or "builtins", value.__qualname__
        owner = getattr(value, "__self__", None)
        if not (owner is None or isinstance(owner, types.ModuleType)):
            raise Unpassable(f"the test passes {name!r} of an object, which is not plain data")
        if module in sys.stdlib_module_names and module != "__main__":
            return ["import", module, name]
        code = getattr(value, "__code__", None)
        for line, source in self.functions:
            if code and line == code.co_firstlineno and not value.__closure__:
                made = {}
                exec(f"_function = {source}" if source.startswith("lambda") else source, made)
                if made.get("_function", made.get(name)).__code__.co_code == code.co_code:
                    return ["function", source, value.__name__]
        raise Unpassable(f"the test passes the function {name!r}, which needs more than its own source")

    def decode(self, data, level=OTHER):
        return decode(data, lambda data: self.from_handle(data, level))

    def from_handle(self, data, level):
        if data[0] == "exception":
            return self.exception_class(data[1])
        if data[0] != "object":
            raise ValueError(f"no such value: {data[0]!r}")
        if data[1] not in self.handles:
            self.handles[data[1]] = Handle(self, ["object", data[1]], str(data[2]), level)
        handle = self.handles[data[1]]
        vars(handle)["_content"] = self.decode(data[3], level) if len(data) > 3 else None
        return handle

    def resolve(self, asked):
        """Return a request that was made with guesses, with the answers that they stood for."""
        if isinstance(asked, dict):
            return {name: self.resolve(item) for name, item in asked.items()}
        if not isinstance(asked, list):
            return asked
        if asked[:1] == ["result"]:
            answer = self.played[asked[1]][1] or {}
            return self.resolve(answer.get("value", ["error"]))
        return asked[:2] if asked[:1] == ["object"] else [self.resolve(item) for item in asked]


class Names(dict):
    """Globals of the test: a name that it does not define itself, and that is not a builtin, is the solution's."""

    def __missing__(self, name):
        run = self["_run_"]
        if hasattr(builtins, name) and name != run.own_builtin:
            raise KeyError(name)
        if name in run.modules:
            return importlib.import_module("numpy" if name == "np" else name)
        value = run.names.get(name)
        if type(value) not in (Handle, Guess, type):  # plain data may have changed since
            level = LIKE_CLASS if name.lstrip("_")[:1].isupper() else OTHER
            level = CLASS if name in run.classes else level
            value = run.names[name] = run.ask("get", [name], {}, level)
        return value


def update(old, new):
    """Change `old` in place into `new`, if its type can be changed."""
    if type(old) is not type(new) or old is new:
        return
    if isinstance(old, (list, tuple)):
        for mine, changed in zip(old, new, strict=False):
            update(mine, changed)
        if isinstance(old, list):
            kept = [a if type(a) is type(b) and a == b else b for a, b in zip(old, new, strict=False)]
            old[:] = kept + new[len(old) :]
    elif isinstance(old, (set, dict)):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new


def read_answer(line):
    """Read an answer of the solution; None if it is not one."""
    try:
        answer = json.loads(line)
    except (TypeError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and ("value" in answer or "error" in answer) else None


def run_test(test, mark, played, functions, modules, classes, own_builtin):
    """Run a test, and report `passed` and `why`, or the requests that it needs from number `from` on.

    Args:
        mark: what a report begins with.
        played: (request, line of its answer) of each request that was made; None without an answer.
        functions: (line, source) of the functions of the test that can be passed on.
        modules: names that are modules, whether or not the test imports them.
        classes: names of classes under test.
        own_builtin: the name of a builtin that means the solution's function here.
    """
    output = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    sys.stdout = io.StringIO()
    played = [(request, read_answer(line)) for request, line in played]
    run = Replay(mark, played, functions, modules, classes, own_builtin, output)
    random.seed(0)  # the same test in each round
    if "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    namespace = Names(__name__="__main__", __annotations__={}, _run_=run, _guessing_=lambda: run.guessing)
    try:
        # Annotations stay text, so that List need not be known here.
        exec(compile(test, "test.py", "exec", __future__.annotations.compiler_flag, dont_inherit=True), namespace)
        outcome = {"passed": True, "why": ""}
    except BaseException as error:
        outcome = {"passed": False, "why": f"{type(error).__name__}: {str(error)[:200]}"}
    if run.guessing:
        run.stop()
    run.report(outcome | {"asked": run.count})
