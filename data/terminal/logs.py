"""Search and sum up logs of services and of a web server."""

import gzip
from collections import Counter

from terminal.template import Draw, Made, script, template, text
from terminal.words import EVENTS, PEOPLE, SERVICES, WORDS

LEVELS = ["INFO", "INFO", "WARN", "ERROR"]


def service_log(d: Draw, low: int = 8, high: int = 14, day: str = "") -> list[str]:
    """Return lines such as `2031-05-07 08:15:09 INFO auth: job started` in order of time, with every level."""
    first, services = d.number(1, 20), d.rng.sample(SERVICES, 3)
    lines = []
    for n in range(d.number(low, high)):
        date = day or f"2031-05-{first + n // 5:02d}"
        when = f"{date} {8 + n % 5 * 2 + d.number(0, 1):02d}:{d.number(0, 59):02d}:{d.number(0, 59):02d}"
        level = LEVELS[n % 4] if n < 4 else d.pick(LEVELS)
        lines.append(f"{when} {level} {services[n] if n < 3 else d.pick(services)}: {d.pick(EVENTS)}")
    return sorted(lines)


def log_file(d: Draw) -> str:
    return f"{d.fresh(SERVICES)}.log"


@template("easy")
def count_level(d: Draw) -> Made:
    a, out, lines, level = log_file(d), d.file(), service_log(d), d.pick(["INFO", "WARN", "ERROR"])
    say = [
        f"Count the {level} lines of {a} and write the number to {out}.",
        f"How many lines of {a} have the level {level}? Write the number to {out}.",
    ]
    count = sum(f" {level} " in line for line in lines)
    return Made(say, {a: text(lines)}, [f"grep -c {level} {a} > {out}"], [["same", out, str(count)]])


@template("easy")
def of_service(d: Draw) -> Made:
    a, out, lines = log_file(d), d.file(), service_log(d)
    service = d.pick(lines).split()[3].rstrip(":")
    say = [f"Write all lines of the service {service} in {a} to {out}.", f"Save what {service} logged in {a} as {out}."]
    expected = [line for line in lines if f" {service}: " in line]
    return Made(say, {a: text(lines)}, [f"grep ' {service}: ' {a} > {out}"], [["same", out, text(expected)]])


@template("easy")
def of_day(d: Draw) -> Made:
    a, out, lines = log_file(d), d.file(), service_log(d)
    day = d.pick(lines)[:10]
    say = [f"Write the lines of {day} in {a} to {out}.", f"Save what {a} logged on {day} as {out}."]
    expected = [line for line in lines if line.startswith(day)]
    return Made(say, {a: text(lines)}, [f"grep ^{day} {a} > {out}"], [["same", out, text(expected)]])


@template("easy")
def last_of_level(d: Draw) -> Made:
    a, out, lines, level = log_file(d), d.file(), service_log(d), d.pick(["INFO", "WARN", "ERROR"])
    say = [
        f"Write the last {level} line of {a} to {out}.",
        f"What is the last {level} in {a}? Write its line to {out}.",
    ]
    expected = [line for line in lines if f" {level} " in line][-1]
    return Made(say, {a: text(lines)}, [f"grep {level} {a} | tail -n 1 > {out}"], [["same", out, expected]])


@template("easy")
def without_level(d: Draw) -> Made:
    a, out, lines, level = log_file(d), d.file(), service_log(d), d.pick(["INFO", "WARN", "ERROR"])
    say = [
        f"Write {a} without its {level} lines to {out}.",
        f"{out} should have all lines of {a} but those of {level}.",
    ]
    expected = [line for line in lines if f" {level} " not in line]
    return Made(say, {a: text(lines)}, [f"grep -v {level} {a} > {out}"], [["same", out, text(expected)]])


def access_log(d: Draw, low: int = 14, high: int = 24) -> list[list]:
    """Return [address, path, status, milliseconds] of requests; the first address and path occur most often."""
    addresses = [f"10.{d.number(0, 9)}.{d.number(0, 99)}.{n}" for n in d.rng.sample(range(1, 250), 4)]
    paths = [f"/{word}" for word in d.some(WORDS, 4)]
    found = []
    for n in range(d.number(low, high)):
        address, path = (addresses[0], paths[0]) if n % 2 else (d.pick(addresses), d.pick(paths))
        found.append([address, path, d.pick([200, 200, 200, 301, 404, 500]), d.number(1, 999)])
    return d.shuffled(found)


def access_lines(requests: list[list]) -> str:
    return text(f"{address} GET {path} {status} {ms}ms" for address, path, status, ms in requests)


@template("medium")
def top_visitor(d: Draw) -> Made:
    a, out, requests = log_file(d), d.file(), access_log(d)
    column, what = d.pick([(0, "address"), (1, "path")])
    counts = Counter(row[column] for row in requests).most_common()
    best = min(key for key, count in counts if count == counts[0][1])
    say = [
        f"Which {what} occurs most often in the web server's log {a}? Write it to {out}. If there are several, take "
        "the first in alphabetical order.",
    ]
    ranking = f"awk '{{print ${(1, 3)[column]}}}' {a} | sort | uniq -c | sort -k1,1nr -k2,2"
    steps = [f"head -n 3 {a}", f"{ranking} | head -n 3", f"{ranking} | head -n 1 | awk '{{print $2}}' > {out}"]
    return Made(say, {a: access_lines(requests)}, steps, [["same", out, best]])


@template("medium")
def status_counts(d: Draw) -> Made:
    a, out, requests = log_file(d), d.file(), access_log(d)
    counts = Counter(row[2] for row in requests)
    say = [
        f"Count the requests in {a} by status. Write a line `status count` for each status to {out}, smallest status "
        "first.",
        f"How often does each status occur in the log {a}? Write lines such as `200 7`, sorted by status, to {out}.",
    ]
    steps = [f"head -n 3 {a}", f"awk '{{n[$4]++}} END {{for (s in n) print s, n[s]}}' {a} | sort > {out}", f"cat {out}"]
    return Made(
        say, {a: access_lines(requests)}, steps, [["same", out, text(f"{s} {counts[s]}" for s in sorted(counts))]]
    )


@template("medium")
def slow_paths(d: Draw) -> Made:
    a, out, requests = log_file(d), d.file(), access_log(d)
    limit = sorted(row[3] for row in requests)[-d.number(3, 6)] - 1
    slow = sorted({row[1] for row in requests if row[3] > limit})
    say = [
        f"Which paths in {a} had a request that took more than {limit} ms? Write each once to {out}, sorted.",
        f"Write the paths of all requests in {a} slower than {limit} ms to {out}, sorted and without duplicates.",
    ]
    steps = [f"head -n 3 {a}", f"awk '$5 + 0 > {limit} {{print $3}}' {a} | sort -u > {out}", f"cat {out}"]
    return Made(say, {a: access_lines(requests)}, steps, [["same", out, text(slow)]])


@template("hard")
def errors_by_hour(d: Draw) -> Made:
    folder, out, level = d.folder(), d.file(), d.pick(["ERROR", "WARN"])
    days = [f"2031-06-{n:02d}" for n in sorted(d.rng.sample(range(1, 30), 3))]
    logs = {day: service_log(d, 10, 16, day) for day in days}
    files = {f"{folder}/{day}.log": text(logs[day]) for day in days[2:]}
    files |= {f"{folder}/{day}.log.gz": gzip.compress(text(logs[day]).encode(), mtime=0) for day in days[:2]}
    counts = Counter(line[11:13] for lines in logs.values() for line in lines if f" {level} " in line)
    say = [
        f"{folder} has logs, of which old ones are compressed. Count the {level} lines of all of them together by "
        f"hour of the day, and write `hour count`, such as `08 3`, for each hour that has any to {out}, sorted by "
        "hour.",
    ]
    steps = [
        f"ls {folder}",
        f"zcat -f {folder}/* | head -n 3",
        f"zcat -f {folder}/* | grep ' {level} ' | cut -c12-13 | sort | uniq -c | awk '{{print $2, $1}}' > {out}",
        f"cat {out}",
    ]
    return Made(say, files, steps, [["same", out, text(f"{hour} {counts[hour]}" for hour in sorted(counts))]])


@template("hard")
def time_online(d: Draw) -> Made:
    a, out, people, clock, lines = log_file(d), d.file(), d.some(PEOPLE, 3), d.number(0, 500), []
    online: dict[str, int] = {}
    total: Counter[str] = Counter(dict.fromkeys(people, 0))
    for n in range(d.number(10, 16)):
        clock += d.number(1, 90)
        who = people[n] if n < 3 else d.pick(people)
        if who in online:
            total[who] += clock - online.pop(who)
        else:
            online[who] = clock
        lines.append(f"{clock} {who} {'login' if who in online else 'logout'}")
    lines += [f"{clock + n} {who} logout" for n, who in enumerate(sorted(online), 1)]
    total.update({who: clock + n - online[who] for n, who in enumerate(sorted(online), 1)})
    code = f"""
since, total = {{}}, {{}}
for line in open("{a}"):
    second, who, what = line.split()
    if what == "login":
        since[who] = int(second)
    else:
        total[who] = total.get(who, 0) + int(second) - since.pop(who)
for who in sorted(total):
    print(who, total[who])
"""
    say = [
        f"Each line of {a} has a second, a name, and login or logout. For how many seconds was each person logged in "
        f"altogether? Write lines `name seconds`, sorted by name, to {out}.",
    ]
    steps = [f"head -n 4 {a}", script("/tmp/online.py", code), f"python3 /tmp/online.py > {out}", f"cat {out}"]
    return Made(say, {a: text(lines)}, steps, [["same", out, text(f"{who} {total[who]}" for who in sorted(total))]])
