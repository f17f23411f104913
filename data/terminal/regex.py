"""Find, extract and rewrite by regular expressions."""

import re

from terminal.template import Draw, Made, template, text
from terminal.words import CITIES, PEOPLE, SURNAMES, WORDS

CAPITALS, DIGITS = "ABCDEFGHJKLMNPRSTUVWXYZ", "0123456789"


def chars(d: Draw, of: str, count: int) -> str:
    return "".join(d.rng.choices(of, k=count))


def date(d: Draw) -> str:
    return f"{d.number(2020, 2039)}-{d.number(1, 12):02d}-{d.number(1, 28):02d}"


def mixed(d: Draw, good: list[str], others: list[str]) -> list[str]:
    return d.shuffled([*dict.fromkeys([*good, *others])])


@template("easy")
def keep_codes(d: Draw) -> Made:
    a, out, m, n = d.file(), d.file(), d.number(2, 4), d.number(2, 5)
    good = [chars(d, CAPITALS, m) + chars(d, DIGITS, n) for _ in range(3)]
    bad = [
        chars(d, CAPITALS, m + 1) + chars(d, DIGITS, n),
        good[0] + "7",
        good[1].lower(),
        d.fresh(WORDS),
        "-" + good[2],
    ]
    lines = mixed(d, good, bad)
    say = [
        f"Write the lines of {a} that are {m} capital letters and then {n} digits to {out}.",
        f"Codes are {m} capital letters followed by {n} digits. Save the lines of {a} that are codes as {out}.",
    ]
    expected = text(line for line in lines if re.fullmatch(rf"[A-Z]{{{m}}}[0-9]{{{n}}}", line))
    steps = [f"grep -E '^[A-Z]{{{m}}}[0-9]{{{n}}}$' {a} > {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, expected]])


@template("easy")
def begins_or_ends(d: Draw) -> Made:
    a, out, lines = d.file(), d.file(), d.rng.sample(WORDS, 20)
    first, letter = d.pick([True, False]), d.pick("aeilnrst")
    letter = (
        letter if any(w.startswith(letter) if first else w.endswith(letter) for w in lines) else lines[0][-1 + first]
    )
    say = [
        f"Write the words of {a} that {'begin' if first else 'end'} with {letter} to {out}.",
        f"Save all lines of {a} whose {'first' if first else 'last'} letter is {letter} as {out}.",
    ]
    expected = text(w for w in lines if (w.startswith(letter) if first else w.endswith(letter)))
    steps = [f"grep {'^' + letter if first else letter + '$'} {a} > {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, expected]])


@template("easy")
def count_dates(d: Draw) -> Made:
    a, out, count = d.file(), d.file(), d.number(1, 9)
    others = [f"{w} {d.number(1, 99)}-{d.number(1, 99)}" for w in d.some(WORDS, 4)]
    lines = mixed(d, [f"{w} {date(d)}" for w in d.some(WORDS, count)], others)
    say = [
        f"How many lines of {a} have a date such as {date(d)}? Write the number to {out}.",
        f"Count the lines of {a} with a date like {date(d)} and write the number to {out}.",
    ]
    steps = [f"grep -cE '[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}' {a} > {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, str(count)]])


@template("easy")
def drop_comments(d: Draw) -> Made:
    a, out, mark = d.file("cfg"), d.file("cfg"), d.pick(["#", ";", "%", "!"])
    lines = mixed(d, [f"{w} = {d.number(1, 99)}" for w in d.some(WORDS, 4)], [f"{mark} {w}" for w in d.some(WORDS, 3)])
    say = [
        f"Write {a} without the lines that begin with {mark} to {out}.",
        f"Lines of {a} that begin with {mark} are comments. Save the other lines as {out}.",
    ]
    expected = text(line for line in lines if line[0] != mark)
    return Made(say, {a: text(lines)}, [f"grep -v '^{mark}' {a} > {out}"], [["same", out, expected]])


@template("easy")
def extract_tags(d: Draw) -> Made:
    a, out, mark = d.file(), d.file(), d.pick("#@+%")
    lines = [f"{d.pick(WORDS)} {mark}{tag} {d.pick(WORDS)}" for tag in d.some(WORDS, d.number(2, 5))]
    say = [
        f"Write all words of {a} that begin with {mark}, one per line and with {mark}, to {out}.",
        f"Extract the tags of {a}, such as {mark}{d.fresh(WORDS)}, in order to {out}, one per line.",
    ]
    steps = [f"grep -oE '[{mark}][a-z]+' {a} > {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, text(line.split()[1] for line in lines)]])


@template("easy")
def mask_digits(d: Draw) -> Made:
    a, out, mark = d.file(), d.file(), d.pick("#*x?")
    lines = [f"{word} {d.number(10, 99999)}" for word in d.some(WORDS, d.number(3, 6))]
    say = [
        f"Write {a} to {out} with every digit replaced by {mark}.",
        f"Hide the numbers of {a}: replace each digit with {mark} and save the result as {out}.",
    ]
    expected = re.sub("[0-9]", mark, text(lines))
    return Made(say, {a: text(lines)}, [f"sed 's/[0-9]/{mark}/g' {a} > {out}"], [["same", out, expected]])


@template("medium")
def rewrite_dates(d: Draw) -> Made:
    a, out = d.file(), d.file()
    order, mark = d.pick([("\\3", "\\2", "\\1"), ("\\2", "\\3", "\\1")]), d.pick([".", "/"])
    lines = [f"{w} from {date(d)} to {date(d)}" if d.pick([0, 1]) else f"{w} on {date(d)}" for w in d.some(WORDS, 5)]
    shape = mark.join({"\\1": "YYYY", "\\2": "MM", "\\3": "DD"}[part] for part in order)
    say = [
        f"The dates in {a} are written as YYYY-MM-DD. Write the file with all dates as {shape} to {out}.",
        f"Turn every date of {a} (YYYY-MM-DD) into the form {shape} and save the result as {out}.",
    ]
    to = mark.join(order)
    steps = [f"head -n 3 {a}", f"sed -E 's#([0-9]{{4}})-([0-9]{{2}})-([0-9]{{2}})#{to}#g' {a} > {out}", f"cat {out}"]
    expected = re.sub(r"(\d{4})-(\d\d)-(\d\d)", to, text(lines))
    return Made(say, {a: text(lines)}, steps, [["same", out, expected]])


@template("medium")
def extract_mails(d: Draw) -> Made:
    a, out = d.file(), d.file()
    mails = []
    for name in d.some(PEOPLE, 5):
        last, host, ending = d.pick(SURNAMES).lower(), d.pick(CITIES).lower(), d.pick(["org", "net", "com"])
        mails.append(f"{name.lower()}{d.pick(['.', '_', '-'])}{last}@{host}.{ending}")
    parts = [f"{d.pick(WORDS)} {mail}, {d.pick(WORDS)}" for mail in [*mails, *mails[:2]]]
    lines = mixed(d, parts, [f"{d.pick(WORDS)} @ {d.pick(WORDS)}", f"@{d.pick(WORDS)} {d.pick(WORDS)}"])
    say = [
        f"Write the different e-mail addresses in {a} to {out}, sorted, one per line.",
        f"Find all e-mail addresses in {a}. Write each once, in alphabetical order, to {out}.",
    ]
    steps = [f"head -n 3 {a}", f"grep -oE '[a-z._-]+@[a-z]+\\.[a-z]+' {a} | sort -u > {out}", f"cat {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, text(sorted(mails))]])


@template("medium")
def swap_names(d: Draw) -> Made:
    a, out, count = d.file(), d.file(), d.number(4, 8)
    names = list(zip(d.some(PEOPLE, count), d.some(SURNAMES, count), strict=True))
    mark = d.pick([", ", "; ", " / "])
    say = [
        f"The names in {a} are written as `Last{mark}First`. Write them as `First Last` to {out}, in the same order.",
        f"Turn each line `Last{mark}First` of {a} into `First Last`, and save the result as {out}.",
    ]
    steps = [f"head -n 3 {a}", f"sed -E 's#^(.*){mark}(.*)$#\\2 \\1#' {a} > {out}"]
    lines = [f"{last}{mark}{first}" for first, last in names]
    return Made(say, {a: text(lines)}, steps, [["same", out, text(f"{first} {last}" for first, last in names)]])


@template("hard")
def find_pattern(d: Draw) -> Made:
    a, b, out = d.file(), d.file(), d.file()
    words, low, mark = (
        sorted(d.rng.sample(["AB", "CD", "EX", "KL", "MN", "ORD", "QT", "REF", "TX"], 2)),
        d.number(2, 4),
        d.pick("-_:"),
    )
    high = low + d.number(1, 2)

    def code(prefix: str, count: int, end: str = "") -> str:
        return f"{prefix}{mark}{chars(d, DIGITS, count)}{end}"

    def goods() -> list[str]:
        return [code(word, n, end) for word in words for n in (low, high) for end in ("", d.pick("abcxyz"))]

    def bads() -> list[str]:
        swapped = [code(words[0].lower(), low), code("ZZ", high), code(words[1], low - 1), code(words[0], high + 1)]
        return [*swapped, code(words[0], low, "ab"), code(words[1], low, "A"), code(words[0], low).replace(mark, "")]

    say = [
        f"Valid numbers are {words[0]} or {words[1]}, then {mark}, then {low} to {high} digits, then at most one small "
        f"letter. {a} has valid ones, {b} has invalid ones. Write a regular expression that matches whole valid "
        f"numbers and nothing else to {out}. It is tried with Python's re.fullmatch on further ones.",
    ]
    found = f"({words[0]}|{words[1]}){mark}[0-9]{{{low},{high}}}[a-z]?"
    steps = [
        f"cat {a}",
        f"cat {b}",
        f"echo '{found}' > {out}",
        f"grep -cvxEf {out} {a}; grep -cxEf {out} {b}",
    ]
    return Made(say, {a: text(goods()), b: text(bads())}, steps, [["pattern", out, goods(), bads()]])


@template("hard")
def anonymize(d: Draw) -> Made:
    a, out, count = d.file(), d.file(), d.number(5, 8)
    mail, phone = d.pick([("<mail>", "<phone>"), ("[mail]", "[phone]"), ("MAIL", "PHONE")])
    lines, expected = [], []
    for name in d.some(PEOPLE, count):
        has = d.pick([0, 1, 2])
        address, number = (
            f"{name.lower()}@{d.pick(WORDS)}.org",
            f"+{d.number(1, 99)} {chars(d, DIGITS, 3)} {chars(d, DIGITS, 4)}",
        )
        form = ["%s wrote from {0}", "%s can be called at {1} today", "%s has {1} and {0} since 2031"][has] % name
        lines.append(form.format(address, number))
        expected.append(form.format(mail, phone))
    say = [
        f"Write {a} to {out} with each e-mail address replaced by {mail} and each phone number, such as +49 123 "
        f"4567, by {phone}. Nothing else changes; not all numbers are phone numbers.",
    ]
    steps = [
        f"head -n 4 {a}",
        f"sed -E 's/[a-z]+@[a-z]+[.][a-z]+/{mail}/g' {a} > /tmp/without.txt",
        f"sed -E 's/[+][0-9]+ [0-9]{{3}} [0-9]{{4}}/{phone}/g' /tmp/without.txt > {out}",
        f"cat {out}",
    ]
    return Made(say, {a: text(lines)}, steps, [["same", out, text(expected)]])
