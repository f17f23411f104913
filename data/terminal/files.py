"""Copy, move, create, find and sort out files."""

from terminal.template import Draw, Made, template, text
from terminal.words import STEMS, WORDS


@template("easy")
def copy_file(d: Draw) -> Made:
    a, b, content = d.file(), d.file(), d.text()
    say = [f"Copy {a} to {b}.", f"Make a copy of {a} and call it {b}.", f"{b} should be a copy of {a}. Create it."]
    return Made(say, {a: content}, [f"cp {a} {b}"], [["same", a, content], ["same", b, content]])


@template("easy")
def rename_file(d: Draw) -> Made:
    a, b, content = d.file(), d.file(), d.text()
    say = [f"Rename {a} to {b}.", f"The file {a} has the wrong name. It should be {b}.", f"Give {a} the new name {b}."]
    return Made(say, {a: content, d.file(): d.text()}, [f"mv {a} {b}"], [["same", b, content], ["gone", a]])


@template("easy")
def move_file(d: Draw) -> Made:
    a, folder, content = d.file(), d.folder(), d.text()
    say = [f"Move {a} into the folder {folder}.", f"{a} belongs in the folder {folder}. Move it there."]
    files = {a: content, f"{folder}/{d.file()}": d.text(), d.file(): d.text()}
    return Made(say, files, [f"mv {a} {folder}"], [["same", f"{folder}/{a}", content], ["gone", a]])


@template("easy")
def make_folders(d: Draw) -> Made:
    path = "/".join(d.folder() for _ in range(d.number(2, 3)))
    say = [
        f"Create the folder {path}.",
        f"Make the directory {path}, with those above it.",
        f"We need a folder {path}.",
    ]
    return Made(say, {d.file(): d.text()}, [f"mkdir -p {path}"], [["folder", path]])


@template("easy")
def delete_by_ending(d: Draw) -> Made:
    folder, ending, other = d.path(), *d.rng.sample(["log", "tmp", "bak", "old", "txt", "csv"], 2)
    kept = {d.file(other): d.text() for _ in range(d.number(1, 3))}
    files = kept | {d.file(ending): d.text() for _ in range(d.number(2, 3))}
    say = [
        f"Delete all .{ending} files in {folder} and keep the others.",
        f"Remove the files in {folder} that end in .{ending}, but nothing else.",
    ]
    files = {f"{folder}/{name}": content for name, content in files.items()}
    return Made(say, files, [f"rm {folder}/*.{ending}"], [["tree", folder, kept]])


@template("easy")
def write_file(d: Draw) -> Made:
    a, words = d.file(), " ".join(d.some(WORDS, d.number(1, 3)))
    say = [f"Create {a} with the single line: {words}", f"Write the line {words} to a new file {a}."]
    return Made(say, {d.file(): d.text()}, [f"echo {words} > {a}"], [["same", a, words]])


@template("medium")
def find_largest(d: Draw) -> Made:
    top, out = d.folder(), d.file()
    sizes = d.rng.sample(range(3, 40), 5)
    paths = [f"{top}/{d.folder()}/{d.file()}" for _ in range(3)] + [f"{top}/{d.file()}" for _ in range(2)]
    files = {path: text([d.rng.choice(WORDS).ljust(9, ".")] * size) for path, size in zip(paths, sizes, strict=True)}
    largest = max(files, key=lambda path: len(files[path]))
    say = [
        f"Find the largest file below {top}, in any folder, and write its path, such as {top}/x/y.txt, to {out}.",
        f"Which file below {top} is the largest? Write its path, which begins with {top}/, to {out}.",
    ]
    listing = f"find {top} -type f -printf '%s %p\\n' | sort -n"
    return Made(say, files, [listing, f"{listing} | tail -n 1 | cut -d' ' -f2 > {out}"], [["same", out, largest]])


@template("medium")
def sort_by_ending(d: Draw) -> Made:
    folder, endings = d.path(), d.rng.sample(["txt", "csv", "md", "log", "json", "html"], 3)
    names = [d.file(ending) for ending in [*endings, *d.rng.choices(endings, k=d.number(1, 4))]]
    files = {name: d.text() for name in names}
    say = [
        f"Move each file of {folder} into a subfolder of {folder} that is named after its ending, e.g. a.txt to "
        "txt/a.txt.",
        f"Sort the files of {folder} by their endings: x.csv must become {folder}/csv/x.csv, and likewise for all "
        "others.",
    ]
    loop = 'for f in *.*; do mkdir -p "${f##*.}"; mv "$f" "${f##*.}/"; done'
    expected = {f"{name.rpartition('.')[2]}/{name}": content for name, content in files.items()}
    files = {f"{folder}/{name}": content for name, content in files.items()}
    return Made(say, files, [f"ls {folder}", f"(cd {folder} && {loop})"], [["tree", folder, expected]])


@template("medium")
def number_files(d: Draw) -> Made:
    folder, stem = d.folder(), d.fresh(STEMS)
    files = {d.file(): d.text() for _ in range(d.number(3, 6))}
    say = [
        f"Rename the .txt files of {folder} to {stem}-1.txt, {stem}-2.txt and so on, in alphabetical order of their "
        "names.",
        f"Number the files of {folder}: the first by name becomes {stem}-1.txt, the second {stem}-2.txt, and so on.",
    ]
    loop = f'n=1; for f in {folder}/*.txt; do mv "$f" {folder}/{stem}-$n.txt; n=$((n+1)); done'
    expected = {f"{stem}-{n}.txt": files[name] for n, name in enumerate(sorted(files), 1)}
    files = {f"{folder}/{name}": content for name, content in files.items()}
    return Made(say, files, [f"ls {folder}", loop], [["tree", folder, expected]])


@template("hard")
def remove_duplicates(d: Draw) -> Made:
    folder, texts = d.path(), [d.text() for _ in range(d.number(3, 4))]
    contents = d.shuffled([*texts, *d.rng.choices(texts, k=d.number(2, 4))])
    files = dict(sorted((d.file(), content) for content in contents))
    kept = {content: name for name, content in reversed(files.items())}
    say = [
        f"Some files in {folder} have the same content. Of each such group keep the one whose name comes first in the "
        "alphabet, and delete the others.",
        f"Delete duplicates in {folder}: among files with equal content, only the alphabetically first name stays.",
    ]
    extra = f"md5sum {folder}/* | sort | awk 'seen[$1]++ {{print $2}}' > /tmp/extra.txt"
    steps = [f"md5sum {folder}/* | sort", extra, "cat /tmp/extra.txt", f"xargs rm < /tmp/extra.txt; ls {folder}"]
    expected = {name: content for content, name in kept.items()}
    return Made(say, {f"{folder}/{name}": c for name, c in files.items()}, steps, [["tree", folder, expected]])


@template("hard")
def copy_large(d: Draw) -> Made:
    source, target, out, limit = d.folder(), d.folder(), d.file(), d.number(60, 140)
    paths = [f"{d.folder()}/{d.file()}" for _ in range(3)] + [d.file() for _ in range(3)]
    sizes = [limit + 1 + d.number(0, 80), limit + d.number(9, 90), *(d.number(12, limit) for _ in range(4))]
    words = [d.rng.choice(WORDS) for _ in paths]
    files = {path: (word * 99)[: size - 1] + "\n" for path, size, word in zip(paths, sizes, words, strict=True)}
    large = {path: content for path, content in files.items() if len(content) > limit}
    say = [
        f"Copy all files below {source} that have more than {limit} bytes to a new folder {target}, each in the same "
        f"subfolder as before. Then write the copies' paths, such as {target}/a/b.txt, sorted, one per line, to {out}."
    ]
    steps = [
        f"find {source} -type f -printf '%s %P\\n' | sort -n",
        f"mkdir {target}",
        f"(cd {source} && find . -type f -size +{limit}c -exec cp --parents {{}} ../{target} \\;)",
        f"find {target} -type f | sort > {out}; cat {out}",
    ]
    listed = text(sorted(f"{target}/{path}" for path in large))
    files = {f"{source}/{path}": content for path, content in files.items()}
    return Made(say, files, steps, [["tree", target, large], ["same", out, listed]])
