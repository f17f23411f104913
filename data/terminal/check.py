"""The test program of a task: each check of expected.json must hold, else it prints which does not and exits with 1.

    python3 -I -B /tests/check.py

A check is [name of a function below, path, what is expected, ...]. What the agent left is read as data; programs of it
run by `as-agent`. Only the standard library: it is copied into the tests of every task.
"""

import gzip
import io
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

APP = Path("/app")
MOST = 2**21  # bytes of a file that is read, and of all files of an archive
PROGRAM_S = 10  # seconds that a program of the agent may run
TIMES = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
NAMES = dict(zip("sun mon tue wed thu fri sat".split(), range(7), strict=True))
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
NAMES |= dict(zip(MONTHS, range(1, 13), strict=True))
ALIASES = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0"}
ALIASES |= {"@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *"}


class Wrong(Exception):
    """A check does not hold."""


def expect(found, expected):
    if found != expected:
        raise Wrong(f"expected {expected!r:.300}, found {found!r:.300}")


def read(path):
    """Return the bytes of a plain file."""
    file = APP / path
    if not stat.S_ISREG(os.lstat(file).st_mode):
        raise Wrong("no plain file")
    if os.path.getsize(file) > MOST:
        raise Wrong("too large")
    return file.read_bytes()


def clean(content):
    """Return a text without blanks at the ends of lines and empty lines at its end."""
    content = content if isinstance(content, str) else content.decode()
    return "\n".join(line.rstrip() for line in content.splitlines()).rstrip("\n")


def same(path, expected):
    expect(clean(read(path)), clean(expected))


def lines(path, expected):
    """In any order."""
    expect(sorted(clean(read(path)).split("\n")), sorted(expected))


def is_json(path, expected):
    expect(json.loads(read(path)), expected)


def gone(path):
    expect(os.path.lexists(APP / path), False)


def folder(path):
    expect(stat.S_ISDIR(os.lstat(APP / path).st_mode), True)


def mode(path, expected):
    expect(f"{os.lstat(APP / path).st_mode & 0o777:o}", expected)


def tree(path, expected):
    """All files below a folder, and what they hold."""
    found = {}
    for folder_, folders, files in os.walk(APP / path):
        for name in [*files, *(each for each in folders if (Path(folder_) / each).is_symlink())]:
            file = Path(folder_, name).relative_to(APP)
            found[str(file.relative_to(path))] = clean(read(file))
    expect(found, {name: clean(content) for name, content in expected.items()})


def names(path, expected):
    """All files below a folder, whatever they hold."""
    found = [Path(at, name).relative_to(APP / path) for at, _, files in os.walk(APP / path) for name in files]
    expect(sorted(map(str, found)), sorted(expected))


def lacks(path, word):
    expect(re.findall(rf"\b{re.escape(word)}\b", clean(read(path))), [])


def gzipped(path):
    expect(read(path)[:2], b"\x1f\x8b")


def gz(path, expected):
    with gzip.GzipFile(fileobj=io.BytesIO(read(path))) as file:
        expect(clean(file.read(MOST)), clean(expected))


def members(path, expected):
    """All files in a tar or zip, and what they hold."""
    content, found, left = io.BytesIO(read(path)), {}, MOST
    if zipfile.is_zipfile(content):
        with zipfile.ZipFile(content) as box:
            for info in box.infolist():
                if not info.is_dir():
                    found[info.filename] = box.open(info).read(left)
                    left = max(0, left - len(found[info.filename]))
    else:
        content.seek(0)
        with tarfile.open(fileobj=content) as box:
            for info in box:
                if not info.isdir():
                    found[info.name.removeprefix("./")] = box.extractfile(info).read(left)
                    left = max(0, left - len(found[info.name.removeprefix("./")]))
    expect(*({name: clean(held) for name, held in each.items()} for each in (found, expected)))


def git(path, arguments, expected):
    """What git says of the repository's objects and references; its configuration and hooks, which could run programs,
    are left behind."""
    with tempfile.TemporaryDirectory() as bare:
        for part in ("objects", "refs"):
            shutil.copytree(APP / path / ".git" / part, Path(bare, part), symlinks=True)
        for part in ("HEAD", "packed-refs"):
            if (APP / path / ".git" / part).is_file():
                shutil.copyfile(APP / path / ".git" / part, Path(bare, part))
        Path(bare, "config").write_text("[core]\nrepositoryformatversion = 0\nbare = true\n")
        quiet = {"GIT_DIR": bare, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        command = ["git", *arguments]
        told = subprocess.run(command, env=os.environ | quiet, capture_output=True, timeout=PROGRAM_S)
    expect(clean(told.stdout), clean(expected))


def sql(path, query, expected):
    with tempfile.TemporaryDirectory() as copy:
        Path(copy, "copy.db").write_bytes(read(path))
        database = sqlite3.connect(Path(copy, "copy.db"))
        database.execute("pragma trusted_schema = off")
        expect([list(row) for row in database.execute(query).fetchmany(10_000)], expected)


def cron(path, expected):
    """The jobs of a crontab, in any order and spelling."""
    expect(jobs(clean(read(path))), jobs("\n".join(expected)))


def jobs(content):
    found = []
    for line in content.split("\n"):
        if line.strip() and not re.match(r"\s*(#|\w+\s*=)", line):
            first, _, rest = line.strip().partition(" ")
            parts = f"{ALIASES.get(first, first)} {rest}".split(None, 5)
            if len(parts) != 6:
                raise Wrong(f"no job: {line!r:.100}")
            found.append([times(*each) for each in zip(parts, TIMES, strict=False)] + [parts[5].split()])
    return sorted(found, key=str)


def times(spelled, of):
    """Return the sorted numbers that a part of a crontab's line means."""
    _, low, high = of
    chosen = set()
    for part in spelled.lower().split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        start = low if first == "*" else int(NAMES.get(first, first))
        stop = int(NAMES.get(last, last)) if last else high if first == "*" or step else start
        if not low <= start <= stop <= high:
            raise Wrong(f"no time: {spelled!r:.50}")
        chosen |= {n % 7 if of[0] == "weekday" else n for n in range(start, stop + 1, int(step or 1))}
    return sorted(chosen)


def pattern(path, matching, others):
    """A regular expression that matches some whole lines and not the others."""
    found = re.compile(clean(read(path)))
    expect([line for line in matching if not found.fullmatch(line)], [])
    expect([line for line in others if found.fullmatch(line)], [])


def prints(path, command, stdin, expected):
    """What a command of the agent's programs prints; `path` is where they are."""
    os.lstat(APP / path)
    run = ["as-agent", "bash", "-c", command]
    told = subprocess.run(run, input=stdin.encode(), cwd=APP, stdout=subprocess.PIPE, timeout=PROGRAM_S)
    expect(clean(told.stdout), clean(expected))


def first_wrong(checks):
    """Return which check does not hold, and why; "" if all do."""
    for name, path, *expected in checks:
        try:
            globals()[name](path, *expected)
        except Exception as error:  # whatever the artifacts cause
            return f"{name} {path}: {type(error).__name__}: {error}"
    return "" if checks else "no checks"


if __name__ == "__main__":
    wrong = first_wrong(json.loads((Path(__file__).parent / "expected.json").read_text()))
    sys.exit(wrong or 0)
