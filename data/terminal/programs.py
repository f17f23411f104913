"""Write, run and repair small programs. The test runs them on inputs that the model does not see."""

from collections import Counter

from terminal.template import Draw, Made, script, template, text
from terminal.words import PEOPLE, WORDS


def stem(d: Draw) -> str:
    return d.fresh(WORDS)


def runs(path: str, cases: list[tuple[str, object]], command: str = "") -> list[list]:
    return [["prints", path, command or f"python3 {path}", f"{given}\n", f"{out}\n"] for given, out in cases]


@template("easy")
def times_plus(d: Draw) -> Made:
    a, m, n = f"{stem(d)}.py", d.number(2, 99), d.number(1, 99)
    say = [
        f"Write {a}, a program that reads a whole number and prints it times {m} plus {n}.",
        f"Write a Python program {a}: it reads a number, multiplies it by {m}, adds {n} and prints it.",
    ]
    steps = [f'echo "print(int(input())*{m}+{n})" > {a}']
    return Made(say, {}, steps, runs(a, [(x, x * m + n) for x in (3, 0, d.number(10, 99))]))


@template("easy")
def shell_times(d: Draw) -> Made:
    a, m, (sign, word) = f"{stem(d)}.sh", d.number(2, 99), d.pick([("*", "times"), ("+", "plus"), ("-", "minus")])
    say = [
        f"Write a bash script {a} that prints its first argument {word} {m}.",
        f"{a} should be a bash script: it takes a whole number and prints the number {word} {m}.",
    ]
    steps = [f"echo 'echo $(($1{sign}{m}))' > {a}"]
    checks = [["prints", a, f"bash {a} {x}", "", str(eval(f"{x}{sign}{m}"))] for x in (3, d.number(100, 999))]
    return Made(say, {}, steps, checks)


@template("easy")
def run_program(d: Draw) -> Made:
    a, out, m, n, x = f"{stem(d)}.py", d.file(), d.number(100, 999), d.number(2, 9), d.number(2, 99)
    code = f"import sys\n\nx = int(sys.argv[1])\nfor _ in range({n}):\n    x = x * 7 % {m} + 1\nprint(x)\n"
    value = x
    for _ in range(n):
        value = value * 7 % m + 1
    say = [
        f"Run the Python program {a} with the argument {x} and write its output to {out}.",
        f"What does {a} print for {x}? Save its output as {out}.",
    ]
    return Made(say, {a: code}, [f"python3 {a} {x} > {out}"], [["same", out, str(value)]])


@template("easy")
def run_with_input(d: Draw) -> Made:
    a, b, out, n = f"{stem(d)}.py", d.file(), d.file(), d.number(2, 5)
    lines = d.lines(4, 8)
    code = f"import sys\n\nfor number, line in enumerate(sys.stdin):\n    print(number * {n}, line.strip()[::-1])\n"
    expected = text(f"{number * n} {line[::-1]}" for number, line in enumerate(lines))
    say = [
        f"Run the Python program {a} with {b} as its input, and write what it prints to {out}.",
        f"Give {b} to the standard input of {a} and save the output as {out}.",
    ]
    return Made(say, {a: code, b: text(lines)}, [f"python3 {a} < {b} > {out}"], [["same", out, expected]])


@template("easy")
def repeat_text(d: Draw) -> Made:
    a, n, word = f"{stem(d)}.py", d.number(2, 30), stem(d)
    say = [
        f"Write a Python program {a} that prints {word} {n} times, each on its own line.",
        f"Write {a}: a Python program that prints the word {word} on {n} lines.",
    ]
    steps = [f"echo \"for _ in range({n}): print('{word}')\" > {a}"]
    return Made(say, {}, steps, [["prints", a, f"python3 {a}", "", f"{word}\n" * n]])


BUGS = [  # what it should do, the wrong part, the right one, the program, and what it gives, before k is added
    (
        "prints the sum of the numbers in a line",
        ("sum = -n", "sum += n"),
        "sum = 0\nfor n in map(int, input().split()):\n    {}\nprint(sum + {k})\n",
        sum,
    ),
    (
        "prints the largest number of a line",
        ("n < best", "n > best"),
        "best = 0\nfor n in map(int, input().split()):\n    if {}:\n        best = n\nprint(best + {k})\n",
        max,
    ),
    (
        "counts the even numbers of a line",
        ("n % 2 == 1", "n % 2 == 0"),
        "x = map(int, input().split())\nprint(sum(1 for n in x if {}) + {k})\n",
        lambda x: sum(n % 2 == 0 for n in x),
    ),
    (
        "prints the first number of a line minus the last one",
        ("x[0] - x[1]", "x[0] - x[-1]"),
        "x = list(map(int, input().split()))\nprint({} + {k})\n",
        lambda x: x[0] - x[-1],
    ),
]


@template("medium")
def repair(d: Draw) -> Made:
    a, k, (does, (wrong, right), code, result) = f"{stem(d)}.py", d.number(1, 99), d.pick(BUGS)
    say = [
        f"{a} {does}, plus {k}, but there is a bug in it. Correct it. It reads the line from its standard input.",
        f"The program {a} is wrong. It should read a line of whole numbers; it {does}, plus {k}. Repair it.",
    ]
    made = code.replace("{k}", str(k))
    given = [[d.number(1, 99) for _ in range(d.number(4, 7))] for _ in range(3)]
    given.append([4, 2, 9, 8, 6])
    quote = str.maketrans({"[": "\\[", "]": "\\]"})
    steps = [f"cat {a}", f"sed -i 's/{wrong.translate(quote)}/{right}/' {a}", f"echo 3 8 5 | python3 {a}"]
    checks = runs(a, [(" ".join(map(str, x)), result(x) + k) for x in given])
    return Made(say, {a: made.replace("{}", wrong)}, steps, checks)


@template("medium")
def repair_syntax(d: Draw) -> Made:
    a, m, word = f"{stem(d)}.py", d.number(2, 9), stem(d)
    right = [f"def {word}(x):", f"    return x * {m} + 1", "", f"print({word}(int(input())))"]
    at, old, new = d.pick(
        [(0, ":", ""), (3, ")))", "))"), (1, "    ", ""), (3, "print(", "print["), (1, "return", "retrun")]
    )
    wrong = [line.replace(old, new) if n == at else line for n, line in enumerate(right)]
    say = [
        f"`python3 {a}` fails with a syntax error. Correct the program; it reads a number and prints it times {m} "
        "plus 1.",
        f"The Python program {a} cannot be run: something is wrong in one line. It should print its input times {m} "
        "plus 1.",
    ]
    steps = [f"cat {a}; echo 5 | python3 {a}", f"sed -i '{at + 1}s/.*/{right[at]}/' {a}", f"echo 5 | python3 {a}"]
    return Made(say, {a: text(wrong)}, steps, runs(a, [(x, x * m + 1) for x in (5, d.number(10, 99))]))


@template("medium")
def filter_program(d: Draw) -> Made:
    a, n, b = f"{stem(d)}.py", d.number(5, 14), d.file()
    longer = d.pick([True, False])
    lines = [d.lines(6, 9), d.lines(6, 9)]
    keep = (lambda line: len(line) > n) if longer else (lambda line: len(line) < n)
    say = [
        f"Write {a}, a Python program that prints those lines of its standard input that have "
        f"{'more' if longer else 'fewer'} than {n} characters, in reverse order. {b} is an example of an input.",
    ]
    code = f"""
import sys
lines = [line.rstrip("\\n") for line in sys.stdin]
for line in reversed(lines):
    if len(line) {">" if longer else "<"} {n}:
        print(line)
"""
    extra = ["x" * (n - 1), "y" * n, "z" * (n + 1)]
    cases = [
        ("\n".join(own), "\n".join(line for line in reversed(own) if keep(line)))
        for own in ([*lines[0], *extra], extra)
    ]
    steps = [f"cat {b}", script(a, code), f"python3 {a} < {b}"]
    return Made(say, {b: text(lines[1])}, steps, runs(a, cases))


@template("hard")
def word_counts(d: Draw) -> Made:
    a, b, n = f"{stem(d)}.py", d.file(), d.number(2, 4)
    pool = d.some(WORDS, 8)
    texts = [" ".join(d.rng.choices(pool, k=25)) for _ in range(3)]

    def result(given: str) -> str:
        counts = Counter(given.split())
        return text(
            f"{word} {count}" for word, count in sorted(counts.items(), key=lambda p: (-p[1], p[0])) if count >= n
        )

    say = [
        f"Write {a}, a Python program that reads words from its standard input and prints `word count` for each word "
        f"that occurs at least {n} times: most frequent first, equally frequent ones in alphabetical order. {b} is "
        "an example.",
    ]
    code = f"""
import sys
from collections import Counter
counts = Counter(sys.stdin.read().split())
for word, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
    if count >= {n}:
        print(word, count)
"""
    steps = [f"cat {b}", script(a, code), f"python3 {a} < {b}", f"echo b a b a | python3 {a}"]
    return Made(say, {b: texts[0] + "\n"}, steps, runs(a, [(given, result(given)) for given in texts[1:]]))


@template("hard")
def stack_machine(d: Draw) -> Made:
    a, names = f"{stem(d)}.py", d.some(WORDS, 4)
    signs = dict(zip(names, d.shuffled(["+", "-", "*"]) + ["swap"], strict=True))
    effects = {"swap": "exchanges the two topmost numbers"}
    effects |= {sign: f"replaces the two topmost numbers x, y (y on top) by x {sign} y" for sign in "+-*"}
    told = "; ".join(f"{name} {effects[sign]}" for name, sign in signs.items())
    say = [
        f"Write {a}, a Python program for a stack of whole numbers. It reads words from a line: a number is put on the "
        f"stack; {told}. At the end it prints the topmost number.",
    ]
    code = f"""
stack = []
for word in input().split():
    if word in {names!r}:
        y, x = stack.pop(), stack.pop()
    if word == "{names[3]}":
        stack += [y, x]
    elif word == "{names[0]}":
        stack.append(x {signs[names[0]]} y)
    elif word == "{names[1]}":
        stack.append(x {signs[names[1]]} y)
    elif word == "{names[2]}":
        stack.append(x {signs[names[2]]} y)
    else:
        stack.append(int(word))
print(stack[-1])
"""
    cases = [_stack_case(d, signs) for _ in range(5)]
    steps = ["ls", script(a, code), f"echo 5 3 {names[0]} | python3 {a}", f"echo 9 2 {names[3]} | python3 {a}"]
    return Made(say, {d.file(): d.text()}, steps, runs(a, [*cases, (f"9 2 {names[3]}", 9)]))


def _stack_case(d: Draw, signs: dict[str, str]) -> tuple[str, int]:
    stack, given = [], []
    for name in d.shuffled(list(signs) * 2):
        while len(stack) < 2 or d.pick([0, 0, 1]):
            stack.append(d.number(1, 20))
            given.append(str(stack[-1]))
        y, x = stack.pop(), stack.pop()
        given.append(name)
        stack += [y, x] if signs[name] == "swap" else [{"+": x + y, "-": x - y, "*": x * y}[signs[name]]]
    return " ".join(given), stack[-1]


@template("hard")
def ledger(d: Draw) -> Made:
    a, b, (give, take, tell) = f"{stem(d)}.py", d.file(), d.some(WORDS, 3)
    people = d.some(PEOPLE, 3)

    def play() -> tuple[str, str]:
        sums, lines, out = Counter(), [], []
        for n in range(12):
            who, what, amount = d.pick(people), d.pick([give, give, take, tell]), d.number(1, 50)
            what = tell if n == 11 else what
            lines.append(f"{what} {who}" if what == tell else f"{what} {who} {amount}")
            if what == tell:
                out.append(f"{who} {sums[who]}")
            elif what == give:
                sums[who] += amount
            elif sums[who] >= amount:
                sums[who] -= amount
            else:
                out.append("refused")
        return "\n".join(lines), "\n".join(out)

    say = [
        f"Write {a}, a Python program that keeps accounts, which begin at 0. It reads commands, one per line: "
        f"`{give} NAME N` adds N; `{take} NAME N` subtracts N, or prints `refused` if there is less than N; `{tell} "
        f"NAME` prints `NAME SUM`. {b} is an example of an input.",
    ]
    code = f"""
import sys
sums = {{}}
for line in sys.stdin:
    what, who, *amount = line.split()
    if what == "{tell}":
        print(who, sums.get(who, 0))
    elif what == "{give}":
        sums[who] = sums.get(who, 0) + int(amount[0])
    elif sums.get(who, 0) >= int(amount[0]):
        sums[who] -= int(amount[0])
    else:
        print("refused")
"""
    steps = [f"cat {b}", script(a, code), f"python3 {a} < {b}", f"echo {tell} {people[0]} | python3 {a}"]
    return Made(say, {b: play()[0] + "\n"}, steps, runs(a, [play() for _ in range(3)]))
