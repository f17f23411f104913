"""Pack, unpack and look into tar, gzip and zip archives."""

import gzip
import hashlib
import io
import zipfile

from terminal.template import Draw, Made, template, text
from terminal.words import FOLDERS
from verl_ext.tasks.archive import pack


def some_files(d: Draw, low: int = 2, high: int = 4, ending: str = "txt") -> dict[str, str]:
    return {d.file(ending): d.text() for _ in range(d.number(low, high))}


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def tgz(d: Draw) -> str:
    return d.file("tar.gz")


@template("easy")
def unpack(d: Draw) -> Made:
    a, folder, files = tgz(d), d.folder(), some_files(d)
    say = [f"Unpack {a} here. It holds the folder {folder}.", f"Extract {a}, which has a folder {folder}."]
    return Made(say, {a: pack(files, folder)}, [f"tar -xzf {a}"], [["tree", folder, files]])


@template("easy")
def unpack_into(d: Draw) -> Made:
    a, folder, files = tgz(d), d.folder(), some_files(d)
    other = d.file()
    say = [f"Unpack {a} into the folder {folder}, which exists.", f"Extract {a} into {folder}."]
    made = {a: pack(files), f"{folder}/{other}": "Put it here.\n"}
    return Made(say, made, [f"tar -xzf {a} -C {folder}"], [["tree", folder, files | {other: "Put it here.\n"}]])


@template("easy")
def pack_folder(d: Draw) -> Made:
    a, folder, files = tgz(d), d.folder(), some_files(d)
    say = [f"Pack the folder {folder} into {a}.", f"Make a compressed tar archive {a} of the folder {folder}."]
    checks = [["members", a, below(folder, files)], ["gzipped", a]]
    return Made(say, below(folder, files), [f"tar -czf {a} {folder}"], checks)


@template("easy")
def count_members(d: Draw) -> Made:
    a, out, files = tgz(d), d.file(), some_files(d, 3, 12)
    say = [f"How many files are in {a}? Write the number to {out}.", f"Count the files in {a} and write it to {out}."]
    return Made(say, {a: pack(files)}, [f"tar -tzf {a} | wc -l > {out}"], [["same", out, str(len(files))]])


@template("easy")
def compress(d: Draw) -> Made:
    a, content = f"{d.folder()}/{d.file()}", d.text()
    say = [f"Compress {a} with gzip, so that {a}.gz replaces it.", f"Turn {a} into {a}.gz with gzip."]
    return Made(say, {a: content}, [f"gzip {a}"], [["gz", f"{a}.gz", content], ["gone", a]])


@template("easy")
def decompress(d: Draw) -> Made:
    a, content = f"{d.folder()}/{d.file()}", d.text()
    say = [f"Decompress {a}.gz to {a}.", f"Turn {a}.gz back into the plain file {a}."]
    return Made(say, {f"{a}.gz": gzip.compress(content.encode(), mtime=0)}, [f"gunzip {a}.gz"], [["same", a, content]])


@template("medium")
def one_member(d: Draw) -> Made:
    a, out, files = tgz(d), d.file(), {f"{d.folder()}/{name}": c for name, c in some_files(d, 4, 6).items()}
    path = d.pick(list(files))
    name = path.rpartition("/")[2]
    say = [
        f"Somewhere in {a} is a file {name}. Write its content to {out}, without leaving other files of the archive "
        "here.",
        f"Take only {name} out of {a}, wherever it is in there, and save it as {out} in the current folder.",
    ]
    steps = [f"tar -tzf {a}", f"tar -xzOf {a} {path} > {out}"]
    return Made(say, {a: pack(files)}, steps, [["same", out, files[path]], ["names", ".", [a, out]]])


@template("medium")
def to_zip(d: Draw) -> Made:
    a, out, folder, files = tgz(d), d.file("zip"), d.folder(), some_files(d)
    say = [
        f"Turn the archive {a}, which holds a folder, into a zip file {out} with the same paths. Python's zipfile "
        "can write it.",
        f"We need the content of {a} as a zip archive {out}, with the same paths. There may be no zip, but there is "
        "Python.",
    ]
    steps = [f"tar -tzf {a}", f"tar -xzf {a} && python3 -m zipfile -c {out} {folder}", f"python3 -m zipfile -l {out}"]
    return Made(say, {a: pack(files, folder)}, steps, [["members", out, below(folder, files)]])


@template("medium")
def from_zip(d: Draw) -> Made:
    a, out, files = d.file("zip"), d.file(), some_files(d, 3, 5)
    box = io.BytesIO()
    with zipfile.ZipFile(box, "w") as made:
        for name, content in files.items():
            made.writestr(zipfile.ZipInfo(name), content)
    total = sum(content.count("\n") for content in files.values())
    say = [
        f"How many lines do the files in {a} have together? Write the number to {out}.",
        f"Count the lines of all files in the zip archive {a} together and write the sum to {out}.",
    ]
    steps = [
        f"python3 -m zipfile -e {a} /tmp/unzipped",
        "wc -l /tmp/unzipped/*",
        f"cat /tmp/unzipped/* | wc -l > {out}",
    ]
    return Made(say, {a: box.getvalue()}, steps, [["same", out, str(total)]])


@template("hard")
def repack_without(d: Draw) -> Made:
    a, out, folder, ending = tgz(d), tgz(d), d.folder(), d.pick(["log", "tmp", "bak"])
    kept, dropped = some_files(d, 2, 4), some_files(d, 1, 3, ending)
    say = [
        f"Make a new archive {out} with the files of {a} except those that end in .{ending}. Keep the paths, and leave "
        f"{a} as it is."
    ]
    packed = pack(kept | dropped, folder)
    steps = [
        f"tar -tzf {a}",
        f"mkdir /tmp/all && tar -xzf {a} -C /tmp/all",
        f"tar -czf {out} -C /tmp/all --exclude='*.{ending}' {folder}",
        f"tar -tzf {out}",
    ]
    checks = [["members", out, below(folder, kept)], ["members", a, below(folder, kept | dropped)]]
    return Made(say, {a: packed}, steps, checks)


@template("hard")
def nested(d: Draw) -> Made:
    a, inner, out, name = tgz(d), tgz(d), d.file(), d.file()
    files, content = some_files(d), d.text()
    deep = f"{d.pick(FOLDERS)}/{name}"
    inside = pack(files | {deep: content})
    where = f"{d.folder()}/{inner}"
    say = [
        f"{a} holds another archive, and in that one is a file {name}. Write the content of {name} to {out}.",
        f"Find {name}: it is in an archive inside {a}. Save its content as {out} here.",
    ]
    steps = [
        f"tar -tzf {a}",
        f"tar -xzOf {a} {where} > /tmp/inner.tar.gz && tar -tzf /tmp/inner.tar.gz",
        f"tar -xzOf /tmp/inner.tar.gz {deep} > {out}",
        f"cat {out}",
    ]
    return Made(say, {a: pack({where: inside, **some_files(d)})}, steps, [["same", out, content]])


@template("hard")
def join_parts(d: Draw) -> Made:
    folder, whole, inside, out = d.folder(), tgz(d), d.folder(), d.file()
    files = {d.file(): text(d.lines(20, 30)) for _ in range(3)}
    packed = pack(files, inside)
    size = len(packed) // d.number(3, 5) + 1
    parts = {f"{folder}/{whole}.part{n}": packed[n * size : (n + 1) * size] for n in range(-(-len(packed) // size))}
    digest = hashlib.sha256(packed).hexdigest()
    say = [
        f"{folder} has an archive {whole} in parts. Join them in order to {whole} here, unpack it here, and write its "
        f"sha256 (64 hexadecimal digits, nothing else) to {out}.",
    ]
    steps = [
        f"ls -l {folder}",
        f"cat {folder}/{whole}.part* > {whole}",
        f"sha256sum {whole} | cut -d' ' -f1 > {out} && cat {out}",
        f"tar -xzf {whole} && ls {inside}",
    ]
    return Made(
        say, parts, steps, [["tree", inside, files], ["same", out, digest], ["members", whole, below(inside, files)]]
    )
