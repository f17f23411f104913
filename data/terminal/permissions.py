"""Set, compare and list permissions. The owner can always read, so that the test can."""

from terminal.template import Draw, Made, template, text

MODES = [0o400, 0o440, 0o444, 0o600, 0o640, 0o644, 0o660, 0o664, 0o666, 0o700, 0o750, 0o755, 0o770, 0o775, 0o777]


def octal(mode: int) -> str:
    return f"{mode:o}"


def modes(files: dict[str, int]) -> list[list]:
    return [["mode", path, octal(mode)] for path, mode in files.items()]


@template("easy")
def set_mode(d: Draw) -> Made:
    a, mode = f"{d.folder()}/{d.file()}", d.pick([mode for mode in MODES if mode != 0o644])
    say = [
        f"Set the permissions of {a} to {octal(mode)}.",
        f"{a} should have mode {octal(mode)}.",
        f"Give {a} the mode {octal(mode)}.",
    ]
    return Made(say, {a: d.text()}, [f"chmod {octal(mode)} {a}"], modes({a: mode}))


@template("easy")
def make_executable(d: Draw) -> Made:
    a = f"{d.folder()}/{d.file('sh')}"
    say = [f"Make {a} executable for everybody.", f"Everybody should be able to execute {a}.", f"Let all run {a}."]
    return Made(say, {a: ("#!/bin/bash\necho ready\n", 0o644)}, [f"chmod a+x {a}"], modes({a: 0o755}))


@template("easy")
def protect(d: Draw) -> Made:
    a = f"{d.folder()}/{d.file()}"
    say = [
        f"Take all write permissions of {a} away.",
        f"Nobody should be able to write to {a}.",
        f"Make {a} read-only for all, and change nothing else.",
    ]
    return Made(say, {a: (d.text(), 0o664)}, [f"chmod a-w {a}"], modes({a: 0o444}))


@template("easy")
def private_folder(d: Draw) -> Made:
    top, inner = d.path(), d.folder()
    files = {f"{top}/{d.file()}": 0o644, f"{top}/{inner}/{d.file()}": 0o664}
    say = [
        f"Take all permissions on {top} and everything below it away from group and others.",
        f"Only the owner may use {top} and what is in it: remove all rights of group and others.",
    ]
    expected = {top: 0o700, f"{top}/{inner}": 0o700} | dict.fromkeys(files, 0o600)
    return Made(say, {path: (d.text(), mode) for path, mode in files.items()}, [f"chmod -R go= {top}"], modes(expected))


@template("easy")
def share_by_ending(d: Draw) -> Made:
    top, ending, other = d.path(), *d.rng.sample(["sh", "py", "txt", "csv", "log"], 2)
    chosen = {f"{top}/{d.file(ending)}": 0o600 for _ in range(2)}
    rest = {f"{top}/{d.file(other)}": 0o600}
    say = [
        f"Let the group read all .{ending} files in {top}. Change nothing else.",
        f"Give the group read permission on the .{ending} files in {top}.",
    ]
    files = {path: (d.text(), 0o600) for path in [*chosen, *rest]}
    return Made(say, files, [f"chmod g+r {top}/*.{ending}"], modes(dict.fromkeys(chosen, 0o640) | rest))


@template("medium")
def list_executable(d: Draw) -> Made:
    top, out = d.folder(), d.file()
    files = {f"{top}/{d.file('sh')}": d.pick([0o755, 0o700]) for _ in range(d.number(1, 3))}
    files |= {f"{top}/{d.folder()}/{d.file()}": 0o755} | {f"{top}/{d.file()}": 0o644 for _ in range(2)}
    say = [
        f"Write the paths of all files below {top} that their owner may execute to {out}, sorted, e.g. {top}/x.sh.",
        f"Which files below {top} are executable for their owner? Write the paths, beginning with {top}/, sorted, to "
        f"{out}.",
    ]
    steps = [f"ls -lR {top}", f"find {top} -type f -perm -u+x | sort > {out}", f"cat {out}"]
    expected = text(sorted(path for path, mode in files.items() if mode & 0o100))
    return Made(say, {path: (d.text(), mode) for path, mode in files.items()}, steps, [["same", out, expected]])


@template("medium")
def scripts_and_rest(d: Draw) -> Made:
    top, one, two = d.path(), octal(d.pick([0o755, 0o750, 0o700])), octal(d.pick([0o644, 0o640, 0o600]))
    scripts = [f"{top}/{d.file('sh')}" for _ in range(2)] + [f"{top}/{d.folder()}/{d.file('sh')}"]
    rest = [f"{top}/{d.file()}", f"{top}/{d.folder()}/{d.file('csv')}"]
    say = [
        f"Below {top}, set all .sh files to mode {one} and all other files to mode {two}. Leave folders as they are.",
        f"Scripts (.sh) below {top} need the permissions {one}, every other file {two}. Do not change folders.",
    ]
    files = {path: (d.text(), d.pick([0o664, 0o666, 0o777])) for path in [*scripts, *rest]}
    steps = [
        f"find {top} -type f -name '*.sh' -exec chmod {one} {{}} +",
        f"find {top} -type f ! -name '*.sh' -exec chmod {two} {{}} +",
        f"ls -lR {top}",
    ]
    expected = dict.fromkeys(scripts, int(one, 8)) | dict.fromkeys(rest, int(two, 8))
    return Made(say, files, steps, modes(expected | {path.rpartition("/")[0]: 0o755 for path in files}))


@template("medium")
def close_open_files(d: Draw) -> Made:
    top, out = d.folder(), d.file()
    files = {f"{top}/{d.file()}": d.pick([0o666, 0o646, 0o777]) for _ in range(d.number(1, 3))}
    files |= {f"{top}/{d.folder()}/{d.file()}": 0o666} | {f"{top}/{d.file()}": d.pick([0o644, 0o664]) for _ in range(2)}
    say = [
        f"Write the paths of the files below {top} that others may write to, sorted, to {out}, e.g. {top}/x.txt. Then "
        "take that permission away from others, and no other permission.",
    ]
    steps = [f"find {top} -type f -perm -o+w | sort > {out}", f"cat {out}", f"xargs chmod o-w < {out}; ls -lR {top}"]
    listed = text(sorted(path for path, mode in files.items() if mode & 0o002))
    checks = [["same", out, listed], *modes({path: mode & ~0o002 for path, mode in files.items()})]
    return Made(say, {path: (d.text(), mode) for path, mode in files.items()}, steps, checks)


@template("hard")
def apply_list(d: Draw) -> Made:
    top, a = d.folder(), d.file()
    paths = [f"{top}/{d.file()}" for _ in range(3)] + [f"{top}/{d.folder()}/{d.file('sh')}" for _ in range(2)]
    wanted = {path: d.pick([mode for mode in MODES if mode != 0o660]) for path in paths}
    lines = d.shuffled([f"{octal(mode)} {path.removeprefix(top + '/')}" for path, mode in wanted.items()])
    lines.insert(d.number(0, 3), "# mode and path")
    say = [
        f"{a} lists permissions, and files below {top} to which they apply. Set them. Lines that begin with # are "
        "comments.",
        f"Give the files below {top} the modes that {a} lists for them (paths are relative to {top}; # begins a "
        "comment).",
    ]
    steps = [
        f"cat {a}",
        f"ls -lR {top}",
        f"grep -v '^#' {a} | while read mode path; do chmod $mode {top}/$path; done",
        f"find {top} -type f -printf '%m %p\\n'",
    ]
    return Made(say, {a: text(lines)} | {path: (d.text(), 0o660) for path in paths}, steps, modes(wanted))


@template("hard")
def copy_modes(d: Draw) -> Made:
    old, new = d.folder(), d.folder()
    names = [d.file() for _ in range(3)] + [f"{d.folder()}/{d.file()}" for _ in range(2)]
    wanted = {name: d.pick(MODES[3:]) for name in names}
    extra = d.file()
    say = [
        f"The folder {new} has the same files as {old}, but lost their permissions. Give each file of {new} the mode "
        f"that it has in {old}. A file that {old} lacks gets mode 600.",
    ]
    files = {f"{old}/{name}": (d.text(), mode) for name, mode in wanted.items()}
    files |= {f"{new}/{name}": (files[f"{old}/{name}"][0], 0o654) for name in names} | {
        f"{new}/{extra}": (d.text(), 0o654)
    }
    steps = [
        f"find {old} {new} -type f -printf '%m %p\\n'",
        f"find {new} -type f -exec chmod 600 {{}} +",
        f"cd {old} && find . -type f -exec chmod --reference={{}} ../{new}/{{}} \\;",
        f"cd .. && find {new} -type f -printf '%m %p\\n'",
    ]
    return Made(say, files, steps, modes({f"{new}/{name}": mode for name, mode in (wanted | {extra: 0o600}).items()}))


@template("hard")
def mode_report(d: Draw) -> Made:
    top, out = d.folder(), d.file()
    paths = [f"{top}/{d.file()}" for _ in range(4)] + [f"{top}/{d.folder()}/{d.file()}" for _ in range(2)]
    files = {path: d.pick(MODES) for path in paths}
    files[paths[0]] = 0o664
    say = [
        f"Take the group's write permission away from all files below {top}. Then write `mode path` for each of them "
        f"to {out}, e.g. `640 {top}/x.txt`, sorted by path.",
    ]
    steps = [
        f"find {top} -type f -perm -g+w",
        f"find {top} -type f -exec chmod g-w {{}} +",
        f"find {top} -type f -printf '%m %p\\n' | sort -k2 > {out}",
        f"cat {out}",
    ]
    wanted = {path: mode & ~0o020 for path, mode in files.items()}
    report = text(f"{octal(wanted[path])} {path}" for path in sorted(wanted))
    return Made(say, {p: (d.text(), mode) for p, mode in files.items()}, steps, [["same", out, report], *modes(wanted)])
