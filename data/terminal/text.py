"""Count, sort, replace and join lines and words."""

from collections import Counter

from terminal.template import Draw, Made, template, text
from terminal.words import CITIES, PEOPLE, WORDS


@template("easy")
def count_lines(d: Draw) -> Made:
    a, out, lines = d.file(), d.file(), d.lines(4, 20)
    say = [f"Count the lines of {a} and write the number to {out}.", f"How many lines has {a}? Write it to {out}."]
    return Made(say, {a: text(lines)}, [f"wc -l < {a} > {out}"], [["same", out, str(len(lines))]])


@template("easy")
def sort_unique(d: Draw) -> Made:
    a, out, words = d.file(), d.file(), d.rng.choices(d.rng.sample(WORDS, 6), k=9)
    say = [
        f"Sort the lines of {a}, each only once, into {out}.",
        f"Write the different lines of {a} in alphabetical order to {out}.",
    ]
    return Made(say, {a: text(words)}, [f"sort -u {a} > {out}"], [["same", out, text(sorted(set(words)))]])


@template("easy")
def replace_word(d: Draw) -> Made:
    a, (old, new, other) = d.file(), d.some(WORDS, 3)
    lines = [f"{d.pick([old, other])} {old} {d.pick(PEOPLE)}", *d.shuffled([f"{other} {old}", other, f"{old} {other}"])]
    say = [
        f"Replace {old} with {new} everywhere in {a}.",
        f"In {a}, every {old} should be {new}.",
        f"Change each {old} in {a} to {new}.",
    ]
    expected = text(lines).replace(old, new)
    return Made(say, {a: text(lines)}, [f"sed -i 's/{old}/{new}/g' {a}"], [["same", a, expected]])


@template("easy")
def take_line(d: Draw) -> Made:
    a, out, lines = d.file(), d.file(), d.lines(8, 14)
    number = d.number(2, len(lines) - 1)
    say = [f"Write line {number} of {a} to {out}.", f"{out} should hold only line {number} of {a}."]
    return Made(say, {a: text(lines)}, [f"sed -n {number}p {a} > {out}"], [["same", out, lines[number - 1]]])


@template("easy")
def first_or_last(d: Draw) -> Made:
    a, out, lines = d.file(), d.file(), d.lines(11, 14)
    count, part = d.number(2, 9), d.pick(["first", "last"])
    expected = lines[:count] if part == "first" else lines[-count:]
    say = [f"Write the {part} {count} lines of {a} to {out}.", f"Save the {part} {count} lines of {a} as {out}."]
    tool = {"first": "head", "last": "tail"}[part]
    return Made(say, {a: text(lines)}, [f"{tool} -n {count} {a} > {out}"], [["same", out, text(expected)]])


@template("easy")
def upper_case(d: Draw) -> Made:
    a, out, lines = d.file(), d.file(), d.lines(3, 6)
    say = [f"Write {a} in capital letters to {out}.", f"{out} should be {a} with all letters in upper case."]
    return Made(say, {a: text(lines)}, [f"tr a-z A-Z < {a} > {out}"], [["same", out, text(lines).upper()]])


@template("medium")
def most_frequent(d: Draw) -> Made:
    a, out, (first, second, *rest) = d.file(), d.file(), d.some(WORDS, 7)
    count = d.number(5, 8)
    words = d.shuffled([first] * count + [second] * (count - 1) + rest * 2)
    lines = [" ".join(words[i : i + 4]) for i in range(0, len(words), 4)]
    say = [
        f"Which word occurs most often in {a}? Write the word, a space and its number of occurrences to {out}.",
        f"Find the most frequent word of {a} and write it with its count, as in `word 3`, to {out}.",
    ]
    counts = f"tr ' ' '\\n' < {a} | sort | uniq -c | sort -rn"
    steps = [f"{counts} | head -n 3", f"{counts} | head -n 1 | awk '{{print $2, $1}}' > {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, f"{first} {count}"]])


@template("medium")
def reverse_numbered(d: Draw) -> Made:
    a, out, lines, mark = d.file(), d.file(), d.lines(4, 8), d.pick([". ", ") ", ": ", " - "])
    say = [
        f"Write the lines of {a} in reverse order to {out}, numbered from 1, with `{mark}` after each number.",
        f"Turn {a} around: its last line comes first. Number the lines as `1{mark}text` and write them to {out}.",
    ]
    expected = text([f"{n}{mark}{line}" for n, line in enumerate(reversed(lines), 1)])
    steps = [f"cat {a}", f"tac {a} | awk '{{print NR \"{mark}\" $0}}' > {out}", f"cat {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, expected]])


@template("medium")
def join_columns(d: Draw) -> Made:
    a, b, out, count, mark = d.file(), d.file(), d.file("csv"), d.number(4, 8), d.pick([",", ";", "|"])
    names, places = d.some(PEOPLE, count), d.some(CITIES, count)
    say = [
        f"{a} has names and {b} has places, line by line. Write them as name{mark}place to {out}, in the same order.",
        f"Join each line of {a} with the same line of {b}, with {mark} between them, and write the result to {out}.",
    ]
    expected = text([f"{name}{mark}{place}" for name, place in zip(names, places, strict=True)])
    steps = [f"paste -d '{mark}' {a} {b} > {out}", f"head -n 3 {out}"]
    return Made(say, {a: text(names), b: text(places)}, steps, [["same", out, expected]])


@template("hard")
def merge_glossaries(d: Draw) -> Made:
    folder, out, terms = d.folder(), d.file(), d.some(WORDS, 8)
    names = sorted(d.file() for _ in range(3))
    chosen = [terms[:5], terms[2:7], [*terms[6:], terms[0]]]
    files = {
        name: [f"{t}: {d.pick(WORDS)} {d.pick(WORDS)}" for t in d.shuffled(own)]
        for name, own in zip(names, chosen, strict=True)
    }
    merged: dict[str, str] = {}
    for name in names:
        for line in files[name]:
            merged.setdefault(line.partition(":")[0], line)
    say = [
        f"The files in {folder} have lines of the form `term: meaning`. Merge them into {out}, sorted by term. If "
        "several files explain a term, the line of the file that comes first in the alphabet counts.",
        f"Make one glossary {out} of the files in {folder} (lines `term: meaning`), sorted, each term once. Where "
        "files disagree, take the line of the file whose name is alphabetically first.",
    ]
    steps = [
        f"head -n 2 {folder}/*.txt",
        f"awk -F: '!seen[$1]++' {folder}/*.txt > /tmp/merged.txt",
        f"sort -t: -k1,1 /tmp/merged.txt > {out}",
        f"cat {out}",
    ]
    files = {f"{folder}/{name}": text(lines) for name, lines in files.items()}
    return Made(say, files, steps, [["same", out, text(merged[term] for term in sorted(merged))]])


@template("hard")
def replace_section(d: Draw) -> Made:
    a, b, name = d.file("md"), d.file(), d.fresh(WORDS)
    before, old, after, new = d.lines(2, 4), d.lines(2, 4), d.lines(2, 4), d.lines(2, 4)
    start, stop = f"BEGIN {name}", f"END {name}"
    say = [
        f"In {a}, replace what stands between the lines `{start}` and `{stop}` by the content of {b}. The two lines "
        "themselves stay, as does all else.",
        f"The part of {a} from `{start}` to `{stop}` is out of date. Put the lines of {b} between these two lines "
        "instead of the old ones, and change nothing else.",
    ]
    steps = [
        f"cat {a}",
        f"cat {b}",
        f"sed -i -e '/^{start}$/r {b}' -e '/^{start}$/,/^{stop}$/{{//!d}}' {a}",
        f"cat {a}",
    ]
    files = {a: text([*before, start, *old, stop, *after]), b: text(new)}
    return Made(say, files, steps, [["same", a, text([*before, start, *new, stop, *after])]])


@template("hard")
def initials_report(d: Draw) -> Made:
    a, out, lines = d.file(), d.file(), d.rng.sample(WORDS, d.number(12, 20))
    counts = Counter(word[0] for word in lines)
    longest = {letter: max(sorted(w for w in lines if w[0] == letter), key=len) for letter in counts}
    say = [
        f"For each first letter of the words in {a}, write a line `letter count longest` to {out}, sorted by letter. "
        "Of several longest words, take the alphabetically first.",
    ]
    program = "{c=substr($0,1,1); n[c]++; if(length($0)>length(l[c])) l[c]=$0} END {for(c in n) print c, n[c], l[c]}"
    steps = [f"head -n 5 {a}", f"sort {a} > /tmp/sorted.txt", f"awk '{program}' /tmp/sorted.txt | sort > {out}"]
    steps += [f"cat {out}"]
    expected = text(f"{letter} {counts[letter]} {longest[letter]}" for letter in sorted(counts))
    return Made(say, {a: text(lines)}, steps, [["same", out, expected]])
