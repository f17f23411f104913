"""The program that holds a test: lists its calls of the solution, or checks the answers to them. Sent as source.

It follows values.py in one file, and ends with `run_test(...)`. The test is one that prepare.py compiled.
"""

import json
import os
import random
import sys

from verl_ext.reward.verifiers.code.values import decode, encode, pack, unpack


class Refused(BaseException):
    """The test cannot be run in two parts; no `except Exception` of the test is to see it."""


class Answer:
    """An answer that is not known yet, or an object that is no plain data: looking at it raises an error."""

    def __init__(self, error, number=None, truth=None):
        vars(self).update(_error_=error, _number_=number, _truth_=truth)

    def look(self, *args):
        raise vars(self)["_error_"]

    def __bool__(self):
        return self.look() if self._truth_ is None else self._truth_

    def __copy__(self, memo=None):
        return self

    @property
    def __class__(self):  # for isinstance
        return self.look() if self._truth_ is None else Answer

    __deepcopy__ = __copy__
    __eq__ = __ne__ = __lt__ = __gt__ = __hash__ = __call__ = __str__ = __repr__ = __format__ = look
    __getattr__ = __setattr__ = __iter__ = __getitem__ = __contains__ = __len__ = __int__ = __float__ = look


class Run:
    """One run of a test: without answers it lists the calls, with answers it must make the same calls again."""

    def __init__(self, listed, answers):
        self.listed, self.answers, self.calls = listed, answers, []

    def ask(self, path, /, *args, **kwargs):
        """Return the answer to a call, or an `Answer` in its place."""
        number = len(self.calls)
        call = [path, [encode(arg, self.refer) for arg in args]]
        self.calls.append([*call, {name: encode(arg, self.refer) for name, arg in kwargs.items()}])
        if self.answers is None:
            return Answer(Refused("the test looks at an answer outside of an assert"), number)
        listed = json.dumps(self.listed[number : number + 1])
        if listed != json.dumps(self.calls[number:]) and '["result",' not in listed:
            raise Refused("the test makes other calls each time that it runs")
        try:
            answer = unpack(self.answers[number])
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return decode(answer["value"], lambda data: self.stand_in(data, number))
        except Exception as error:
            return Answer(RuntimeError(f"no answer: {error!r}"))

    def refer(self, value):
        if type(value) is Answer and value._number_ is not None:
            return ["result", value._number_]
        if self.answers is not None:  # whatever the program returned is not the fault of the test
            return ["result", None]
        raise Refused(f"the test gives the program an object of {type(value).__name__!r}, which is no plain data")

    def stand_in(self, data, number):
        """Return what stands for an iterator, or for an object that is no plain data."""
        if data[0] == "iterator":
            return iterate([decode(item, lambda inner: self.stand_in(inner, number)) for item in data[1]], data[2])
        return Answer(RuntimeError(f"the program returned an object of {str(data[1])!r}"), number, bool(data[2]))


def iterate(items, is_whole):
    yield from items
    if not is_whole:
        raise RuntimeError(f"the program's iterator has more than {len(items)} items")


def use(answer):
    """Return an answer; raise the error of a call that has none."""
    if type(answer) is Answer and answer._number_ is None:
        answer.look()
    return answer


def run_test(test, mark, listed, answers):
    """Run a test, and report its calls if `answers` is None, or else whether it passed.

    Args:
        mark: what the report begins with.
        listed: the calls that it reported.
        answers: the lines that the solution's program printed.
    """
    sys.set_int_max_str_digits(0)
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    random.seed(0)  # the same test in both runs
    if "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    run = Run(listed and unpack(listed), answers)
    later = Answer(Refused("the test calculates with an answer outside of an assert"))
    names = {"__name__": "__main__", "_ask_": run.ask, "_use_": use, "_later_": later, "_judging_": answers is not None}
    try:
        exec(compile(test, "test.py", "exec", dont_inherit=True), names)
        report = {"passed": True}
        if answers is None:
            report = {"calls": pack(run.calls)} if run.calls else {"refused": "the test never calls the program"}
    except Refused as error:
        report = {"refused": str(error)}
    except BaseException as error:
        report = {"passed": False}
        if answers is None:
            report = {"refused": f"the test fails before it looks at an answer ({type(error).__name__}: {error})"[:300]}
    os.write(output, f"\n{mark}{json.dumps(report)}\n".encode())
    os._exit(0)
