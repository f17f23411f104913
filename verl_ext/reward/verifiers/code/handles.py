"""Stand-ins for the solution's objects in the program that holds the tests. Sent there as source, with tests.py.

The solution decides nothing here: it sends only data, and an object is compared by its data, never by its methods. A
guess stands for an answer that is not known yet, so that a test can ask for more than one in a round.
"""

import operator

CHUNK = 64  # items of an iterator that are asked for at once
BUILTIN_NAMES = {name for kind in (str, bytes, int, float, list, dict, set, tuple) for name in dir(kind)}
# Methods by which an object could judge an expected value that it is shown: only for objects of a class under test.
VERDICTS = {"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "equals", "count", "index", "find"}
VERDICTS |= {name for name in BUILTIN_NAMES if name.startswith("is")}
DESCRIPTIONS = "__name__ __qualname__ __doc__ __dict__ __wrapped__".split()  # special names that may be asked for
# A name with a capital letter is like a class; it is one under test if the test uses what it makes as an object.
CLASS, INSTANCE, LIKE_CLASS, LIKE_INSTANCE, OTHER = 4, 3, 2, 1, 0
OPERATORS = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()


class Handle:
    """An object of the solution, by its number there; `_content` is that of a class derived from a built-in type.

    `level`: CLASS for a class under test, INSTANCE for its instances, which may have their own operators. Objects of
    lower levels have none: a function's result would be shown the expected value and asked whether it is right.
    """

    def __init__(self, run, wire, name, level):
        vars(self).update(_run=run, _wire=wire, _name=name, _level=level, _content=None, _items=[], _ended=False)

    @property
    def __class__(self):
        return Handle if self._content is None else type(self._content)

    def _ask(self, verb, *args, **kwargs):
        return self._run.ask(verb, [self, *args], kwargs, level_of(verb, self._level))

    def _own(self, name, verb, *args):
        """Return the content's answer, or that of an object under test; raise TypeError for any other object."""
        if self._content is not None:
            return getattr(operator, name)(self._content, *args)
        if self._level >= INSTANCE or all(isinstance(arg, Handle) for arg in args):
            return self._ask(verb, *args)
        raise TypeError(f"unsupported operand: an object of {self._name!r}, returned by the solution")

    def __getattr__(self, name):
        if self._content is not None and hasattr(self._content, name):
            return getattr(self._content, name)
        special = name.startswith("__") and name not in DESCRIPTIONS
        if special or (name in VERDICTS and self._level < INSTANCE):
            raise AttributeError(f"{self._name!r} object has no attribute {name!r} that a test may use")
        return self._ask("getattr", name)

    def __call__(self, *args, **kwargs):
        return self._ask("call", *args, **kwargs)

    def __eq__(self, other):
        if isinstance(other, Handle) and other._content is None:
            return self._content is None and same(self, other, set())
        other = other._content if type(other) is Handle else other
        return self._content is not None and self._content == other

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self._name) if self._content is None else hash(self._content)

    def __bool__(self):
        if self._content is not None or not self._level:
            return self._content is None or bool(self._content)
        return self._ask("bool") is True

    def __len__(self):
        return len(self._content) if self._content is not None else int(self._ask("len"))

    def __iter__(self):
        return iter(self._content) if self._content is not None else self._ask("iter")

    def __next__(self):
        if not self._items and not self._ended:
            taken = self._ask("take", CHUNK)
            if type(taken) is Guess:
                raise StopIteration
            items, error = taken
            self._items.extend(reversed(items))
            vars(self)["_ended"] = len(items) < CHUNK
            if error is not None:
                self._items.insert(0, self._run.exception(*error))
        if not self._items:
            raise StopIteration
        item = self._items.pop()
        if issubclass(type(item), BaseException):  # it ended the iterator: the solution's data are never exceptions
            raise item
        return item

    def __getitem__(self, key):
        return self._content[key] if self._content is not None else self._ask("getitem", key)

    def __contains__(self, item):
        if self._level >= INSTANCE:
            return self._ask("contains", item) is True
        return any(item == mine for mine in self)

    def __instancecheck__(self, other):
        return isinstance(other, Handle) and self._run.ask("isinstance", [other, self], {}, OTHER) is True

    def __enter__(self):
        return self._ask("getattr", "__enter__")()

    def __exit__(self, *exception):
        self._ask("getattr", "__exit__")(None, None, None)

    def __await__(self):
        return self._ask("await")
        yield

    def __round__(self, *digits):
        return round(self._content, *digits) if self._content is not None else self._ask("round", *digits)

    def __format__(self, form):
        return format(str(self), form)


def level_of(verb, level):
    """Return the level of the objects that an object of this level gives."""
    if verb == "call" and level in (CLASS, LIKE_CLASS):
        return level - 1
    return level if verb in OPERATORS and level in (INSTANCE, LIKE_INSTANCE) else OTHER


def same(first, second, seen):
    """Return whether two objects of the solution are the same, or of the same class and in the same state."""
    if not type(first) is type(second) is Handle:
        return first == second
    if first._wire == second._wire:
        return True
    if first._name != second._name or len(seen) > 1000:
        return False
    pair = (first._wire[1], second._wire[1])
    if pair in seen:
        return True
    seen.add(pair)
    states = [one._ask("state") for one in (first, second)]
    if not states[0] or states[0].keys() != states[1].keys():
        return False
    return all(same(state, states[1][name], seen) for name, state in states[0].items())


def _define():
    """Define the operators of handles."""

    def own(name, verb):
        return lambda self, *args: self._own(name, verb, *args)

    def reflected(name):
        def operate(self, other):
            if self._content is not None:
                return getattr(operator, name)(other, self._content)
            if self._level >= INSTANCE:
                return self._run.ask(name, [other, self], {}, self._level)
            raise TypeError(f"unsupported operand: an object of {self._name!r}, returned by the solution")

        return operate

    def convert(kind):
        return lambda self: kind(self._content) if self._content is not None else kind(self._ask(kind.__name__))

    for name in OPERATORS:
        setattr(Handle, f"__{name.strip('_')}__", own(name, name))
        setattr(Handle, f"__r{name.strip('_')}__", reflected(name))
    for name in ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
        setattr(Handle, f"__{name}__", own(name, name))
    for name in ("setattr", "delattr", "setitem", "delitem"):
        setattr(Handle, f"__{name}__", lambda self, *args, name=name: self._ask(name, *args))
    for name in ("copy", "deepcopy"):
        setattr(Handle, f"__{name}__", lambda self, *memo, name=name: self._ask(name))
    for kind in (int, float, complex, str, repr):
        setattr(Handle, f"__{kind.__name__}__", convert(kind))
    Handle.__index__ = convert(int)


_define()


class Guess:
    """A stand-in for an answer that is not known yet; `number` is that of its request, None for a derived value."""

    def __init__(self, run, number, level=OTHER):
        vars(self).update(_run=run, _number=number, _level=level, _ended=False)

    def _ask(self, verb, *args, **kwargs):
        if self._number is None:
            return Guess(self._run, None)
        return self._run.ask(verb, [self, *args], kwargs, level_of(verb, self._level))

    def __getattr__(self, name):
        if name.startswith("__") or (name in BUILTIN_NAMES and not self._level):
            return Guess(self._run, None)
        return self._ask("getattr", name)

    def __setattr__(self, name, value):
        self._ask("setattr", name, value)

    def __call__(self, *args, **kwargs):
        return self._ask("call", *args, **kwargs)

    def __getitem__(self, key):
        return self._ask("getitem", key) if self._level else Guess(self._run, None)

    def __iter__(self):
        return self if self._number is not None and self._run.asked[-1][0] == "iter" else iter(())

    def __next__(self):
        if not self._ended:
            vars(self)["_ended"] = True
            self._ask("take", CHUNK)
        raise StopIteration


for _name in (*OPERATORS, *(f"r{name}" for name in OPERATORS), "neg", "pos", "abs", "round"):
    setattr(Guess, f"__{_name.strip('_')}__", lambda self, *args: Guess(self._run, None))
for _names, _value in (
    ("eq lt le gt ge bool contains instancecheck", True),
    ("ne exit", False),
    ("len int index hash", 0),
    ("float", 0.0),
    ("str repr format", ""),
    ("setitem delitem delattr", None),
):
    for _name in _names.split():
        setattr(Guess, f"__{_name}__", lambda self, *args, _value=_value: _value)
Guess.__copy__ = Guess.__deepcopy__ = lambda self, *memo: self
Guess.__enter__ = lambda self: Guess(self._run, None)
