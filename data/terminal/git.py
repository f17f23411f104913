"""Look into and change git repositories, which are made with fixed dates and people."""

import hashlib
import struct
import zlib

from terminal.template import Draw, Made, template, text
from terminal.words import PEOPLE, WORDS

Commit = tuple[str, dict[str, str], str]  # subject, the files that it writes, author
START = 1_900_000_000  # s; the commits follow each other by an hour
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
VERBS = "Add Correct Describe Extend Improve Move Polish Rename Replace Rewrite Shorten Simplify Update".split()


def repository(
    folder: str,
    main: list[Commit],
    branches: dict[str, tuple[int, list[Commit]]] | None = None,
    tags: dict[str, int] | None = None,
) -> dict[str, str | bytes]:
    """Return the files of a repository with its branch `main` checked out. It is written here, as loose objects,
    because running git thousands of times takes minutes.

    Args:
        branches: name -> (how many commits of main it has, its own ones).
        tags: name -> how many commits of main it has.
    """
    objects: dict[str, bytes] = {}
    files, shas = {}, {}
    last = ("", {})
    for number, one in enumerate(main, 1):
        shas[number] = last = _commit(objects, last, one)
    head, files = last
    refs = {"heads/main": head} | {f"tags/{name}": shas[number][0] for name, number in (tags or {}).items()}
    for name, (start, own) in (branches or {}).items():
        last = shas[start]
        for one in own:
            last = _commit(objects, last, one)
        refs[f"heads/{name}"] = last[0]
    inside = {"HEAD": "ref: refs/heads/main\n", "config": CONFIG, "index": _index(objects, files)}
    inside |= {f"refs/{name}": f"{sha}\n" for name, sha in refs.items()}
    inside |= {f"objects/{sha[:2]}/{sha[2:]}": content for sha, content in objects.items()}
    return {f"{folder}/{path}": content for path, content in files.items()} | {
        f"{folder}/.git/{path}": content for path, content in inside.items()
    }


def _object(objects: dict[str, bytes], kind: str, content: bytes) -> str:
    whole = f"{kind} {len(content)}\0".encode() + content
    name = hashlib.sha1(whole).hexdigest()
    objects[name] = zlib.compress(whole)
    return name


def _commit(objects: dict[str, bytes], before: tuple[str, dict[str, str]], one: Commit) -> tuple[str, dict[str, str]]:
    """Return the name of a commit, and all its files."""
    subject, changed, author = one
    files = before[1] | changed
    blobs = {path: _object(objects, "blob", files[path].encode()) for path in sorted(files)}
    tree = b"".join(f"100644 {path}\0".encode() + bytes.fromhex(blob) for path, blob in blobs.items())
    parent = f"parent {before[0]}\n" if before[0] else ""
    who = f"{author} <{author.lower()}@example.org> {START + 3600 * len(objects)} +0000"
    head = f"tree {_object(objects, 'tree', tree)}\n{parent}author {who}\ncommitter {who}\n\n{subject}\n"
    return _object(objects, "commit", head.encode()), files


def _index(objects: dict[str, bytes], files: dict[str, str]) -> bytes:
    """Return .git/index, version 2, with no times, so that git compares contents."""
    index = b"DIRC" + struct.pack(">II", 2, len(files))
    for path in sorted(files):
        blob = bytes.fromhex(_object(objects, "blob", files[path].encode()))
        entry = (
            struct.pack(">6I4I", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, 0)
            + blob
            + struct.pack(">H", len(path))
            + path.encode()
        )
        index += entry + b"\0" * (8 - len(entry) % 8)
    return index + hashlib.sha1(index).digest()


def commits(d: Draw, low: int = 3, high: int = 6, people: list[str] | None = None) -> list[Commit]:
    """Return commits with different subjects, each of which writes a file or two."""
    count = d.number(low, high)
    people, names = people or d.some(PEOPLE, 3), [d.file() for _ in range(3)]
    subjects = [f"{d.pick(VERBS)} {word}" for word in d.some(WORDS, count)]
    writes = [dict.fromkeys([names[n % 3]]) for n in range(count)]
    return [(s, {path: d.text() for path in files}, d.pick(people)) for s, files in zip(subjects, writes, strict=True)]


def log(folder: str, expected: str, *arguments: str) -> list:
    return ["git", folder, ["log", *arguments], expected]


def heads(folder: str, names: list[str]) -> list:
    return ["git", folder, ["for-each-ref", "--format=%(refname:short)", "refs/heads"], text(sorted(names))]


def show(folder: str, path: str, expected: str, at: str = "main") -> list:
    return ["git", folder, ["show", f"{at}:{path}"], expected]


@template("easy")
def commit_all(d: Draw) -> Made:
    folder, main, message = d.folder(), commits(d), f"{d.pick(VERBS)} {d.fresh(WORDS)}"
    path, changed = d.pick(list(main[-1][1])), d.text()
    files = repository(folder, main) | {f"{folder}/{path}": changed}
    say = [
        f'Commit all changes in the git repository {folder} with the message "{message}".',
        f'In the repository {folder}, a file has changed. Commit it as "{message}".',
    ]
    checks = [log(folder, f"{message}\n{main[-1][0]}", "--format=%s", "-2", "main"), show(folder, path, changed)]
    return Made(say, files, [f'git -C {folder} commit -qam "{message}"'], checks)


@template("easy")
def new_branch(d: Draw) -> Made:
    folder, main, name = d.folder(), commits(d), f"{d.pick(['fix', 'topic', 'try'])}-{d.fresh(WORDS)}"
    say = [
        f"Create a branch {name} in the git repository {folder}.",
        f"Add the branch {name} to the repository {folder}.",
    ]
    checks = [heads(folder, ["main", name]), log(folder, main[-1][0], "--format=%s", "-1", name)]
    return Made(say, repository(folder, main), [f"git -C {folder} branch {name}"], checks)


@template("easy")
def new_tag(d: Draw) -> Made:
    folder, main, name = d.folder(), commits(d), f"v{d.number(0, 9)}.{d.number(0, 9)}"
    say = [
        f"Tag the last commit of the git repository {folder} as {name}.",
        f"Set the tag {name} in the repository {folder}.",
    ]
    checks = [log(folder, main[-1][0], "--format=%s", "-1", f"refs/tags/{name}")]
    return Made(say, repository(folder, main), [f"git -C {folder} tag {name}"], checks)


@template("easy")
def last_subject(d: Draw) -> Made:
    folder, main, out = d.folder(), commits(d), d.file()
    say = [
        f"Write the message of the last commit in the git repository {folder} to {out}.",
        f"What is the last commit of {folder} called? Write its subject to {out}.",
    ]
    steps = [f"git -C {folder} log -1 --format=%s > {out}"]
    return Made(say, repository(folder, main), steps, [["same", out, main[-1][0]]])


@template("easy")
def count_commits(d: Draw) -> Made:
    folder, main, out = d.folder(), commits(d, 2, 9), d.file()
    say = [
        f"How many commits has the git repository {folder}? Write the number to {out}.",
        f"Count the commits of the repository {folder} and write it to {out}.",
    ]
    steps = [f"git -C {folder} rev-list --count HEAD > {out}"]
    return Made(say, repository(folder, main), steps, [["same", out, str(len(main))]])


@template("medium")
def restore_version(d: Draw) -> Made:
    folder, main, path = d.folder(), commits(d), d.file()
    old, new, message = d.text(), d.text(), f"Restore {d.fresh(WORDS)}"
    main[0][1][path], main[-1][1][path] = old, new
    tag = f"v{d.number(1, 9)}.{d.number(0, 9)}"
    say = [
        f"In the git repository {folder}, bring {path} back to its version of the tag {tag}, and commit it as "
        f'"{message}".',
        f"{path} in the repository {folder} was better at the tag {tag}. Restore that version and commit it as "
        f'"{message}".',
    ]
    steps = [
        f"git -C {folder} log --oneline --decorate",
        f"git -C {folder} checkout {tag} -- {path}",
        f'git -C {folder} commit -qm "{message}"',
    ]
    checks = [show(folder, path, old), log(folder, f"{message}\n{main[-1][0]}", "--format=%s", "-2", "main")]
    return Made(
        say, repository(folder, main, tags={tag: len(main) - 1}), steps, [*checks, ["same", f"{folder}/{path}", old]]
    )


@template("medium")
def by_author(d: Draw) -> Made:
    folder, people, out = d.folder(), d.some(PEOPLE, 3), d.file()
    main = commits(d, 8, 12, people)
    counts = {name: sum(author == name for _, _, author in main) for name in people}
    who = max(people, key=counts.get)
    say = [
        f"How many commits did {who} make in the git repository {folder}? Write the number to {out}.",
        f"Count the commits of {who} in the repository {folder} and write the number to {out}.",
    ]
    steps = [f"git -C {folder} shortlog -sn HEAD", f"git -C {folder} log --format=%an | grep -c '^{who}$' > {out}"]
    return Made(say, repository(folder, main), steps, [["same", out, str(counts[who])]])


@template("medium")
def merge_branch(d: Draw) -> Made:
    folder, main, name = d.folder(), commits(d, 4, 6), f"topic-{d.fresh(WORDS)}"
    path, content = d.file(), d.text()
    own = [(f"Add {path}", {path: content}, d.pick(PEOPLE))]
    say = [
        f"Merge the branch {name} into main in the git repository {folder}.",
        f"The work on branch {name} of the repository {folder} is done. Merge it into main.",
    ]
    steps = [f"git -C {folder} log --oneline --all --graph", f"git -C {folder} merge --no-edit {name}"]
    checks = [show(folder, path, content), ["git", folder, ["log", "--format=%s", f"main..{name}"], ""]]
    checks.append(
        log(folder, text(reversed([one[0] for one in main])), "--format=%s", "--first-parent", "--no-merges", "main")
    )
    return Made(say, repository(folder, main, {name: (2, own)}), steps, checks)


@template("hard")
def lost_setting(d: Draw) -> Made:
    folder, main, path, out = d.folder(), commits(d, 4, 6), d.file("cfg"), d.file()
    key, first, last = d.fresh(WORDS), d.number(100, 999), d.number(1000, 9999)
    rest = [f"{word} = {d.number(1, 99)}" for word in d.some(WORDS, 3)]
    for number, extra in ((0, [f"{key} = {first}"]), (1, [f"{key} = {last}"]), (2, [])):
        main[number][1][path] = text([*rest, *extra])
    say = [
        f"In the git repository {folder}, {path} once had a setting {key}, which a commit removed. Write the value "
        f"that it had just before it was removed to {out}.",
        f"A commit in {folder} deleted the setting {key} from {path}. Find its last value in the history and write "
        f"it to {out}.",
    ]
    history = f"git -C {folder} log -p -S'{key} =' --format='commit %s' -- {path}"
    steps = [
        f"git -C {folder} log --oneline -- {path}",
        f"{history} | grep -E '^(commit|[+-]{key})'",
        f"git -C {folder} log -p -1 -S'{key} =' --format= -- {path} | grep '^-{key}' | cut -d' ' -f3 > {out}",
        f"cat {out}",
    ]
    return Made(say, repository(folder, main), steps, [["same", out, str(last)]])


@template("hard")
def pick_commit(d: Draw) -> Made:
    folder, main, name = d.folder(), commits(d, 3, 5), f"topic-{d.fresh(WORDS)}"
    own = [(f"Add {path}", {path: d.text()}, d.pick(PEOPLE)) for path in (d.file() for _ in range(3))]
    subject, files, _ = d.pick(own)
    (path,) = files
    say = [
        f'In the git repository {folder}, take only the commit "{subject}" of the branch {name} over to main. Its '
        "message stays the same.",
        f'Cherry-pick "{subject}" from the branch {name} of {folder} to main, and nothing else of that branch.',
    ]
    steps = [
        f"git -C {folder} status -sb && git -C {folder} log --format='%h %s' main..{name}",
        f"git -C {folder} log --format=%h --grep='{subject}' {name} > /tmp/commit",
        f"git -C {folder} cherry-pick $(cat /tmp/commit)",
        f"git -C {folder} log --format=%s",
    ]
    expected = text([subject, *reversed([one[0] for one in main])])
    checks = [log(folder, expected, "--format=%s", "main"), show(folder, path, files[path])]
    return Made(say, repository(folder, main, {name: (2, own)}), steps, checks)


@template("hard")
def solve_conflict(d: Draw) -> Made:
    folder, main, name, path = d.folder(), commits(d, 3, 4), f"topic-{d.fresh(WORDS)}", d.file()
    lines, (ours, theirs) = d.lines(3, 5), d.some(WORDS, 2)
    at, message = d.number(0, len(lines) - 1), f"Merge {name}"
    changed = {word: text([*lines[:at], f"{lines[at]} {word}", *lines[at + 1 :]]) for word in (ours, theirs)}
    main[0][1][path], main[-1][1][path] = text(lines), changed[ours]
    own = [(f"Mention {theirs}", {path: changed[theirs]}, d.pick(PEOPLE))]
    say = [
        f"Merge the branch {name} of the git repository {folder} into main. Where {path} conflicts, take the version "
        "of "
        f'{name}. The message of the merge is "{message}".',
    ]
    steps = [
        f"git -C {folder} merge {name}; git -C {folder} status -s",
        f"git -C {folder} checkout --theirs {path} && cat {folder}/{path}",
        f"git -C {folder} add {path}",
        f'git -C {folder} commit -qm "{message}" && git -C {folder} log --oneline -3',
    ]
    checks = [show(folder, path, changed[theirs]), ["same", f"{folder}/{path}", changed[theirs]]]
    checks += [
        ["git", folder, ["log", "--format=%s", f"main..{name}"], ""],
        log(folder, message, "-1", "--format=%s", "main"),
    ]
    return Made(say, repository(folder, main, {name: (1, own)}), steps, checks)
