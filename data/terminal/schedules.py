"""Read and write schedules in the form of crontabs: minute, hour, day, month, weekday, command."""

from datetime import datetime, timedelta

from terminal.template import Draw, Made, script, template, text
from terminal.words import SCRIPTS

DAYS = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split()


def command(d: Draw) -> str:
    return f"./{d.fresh(SCRIPTS)}.sh"


def clock(hour: int, minute: int) -> str:
    return f"{hour:02d}:{minute:02d}"


def job(d: Draw) -> list[str]:
    """Return the parts of a line: daily, or on one weekday."""
    day = d.pick(["*", "*", str(d.number(0, 6))])
    return [str(d.number(0, 59)), str(d.number(0, 23)), "*", "*", day, command(d)]


def crontab(jobs: list[list[str]]) -> str:
    return text([" ".join(one) for one in jobs])


def cron(a: str, jobs: list[list[str]]) -> list:
    return ["cron", a, [" ".join(one) for one in jobs]]


@template("easy")
def add_daily(d: Draw) -> Made:
    a, jobs, what, hour, minute = d.file("cron"), [job(d), job(d)], command(d), d.number(0, 23), d.number(0, 59)
    say = [
        f"Add a cron line to {a} that runs {what} every day at {clock(hour, minute)}.",
        f"{what} should run daily at {clock(hour, minute)}. Append its line to the crontab {a}.",
    ]
    new = [str(minute), str(hour), "*", "*", "*", what]
    return Made(say, {a: crontab(jobs)}, [f'echo "{" ".join(new)}" >> {a}'], [cron(a, [*jobs, new])])


@template("easy")
def add_weekly(d: Draw) -> Made:
    a, jobs, what, hour, day = d.file("cron"), [job(d), job(d)], command(d), d.number(0, 23), d.number(0, 6)
    say = [
        f"Add a cron line to {a} that runs {what} each {DAYS[day]} at {clock(hour, 0)}.",
        f"{what} should run every {DAYS[day]} at {clock(hour, 0)}. Append its line to the crontab {a}.",
    ]
    new = ["0", str(hour), "*", "*", str(day), what]
    return Made(say, {a: crontab(jobs)}, [f'echo "{" ".join(new)}" >> {a}'], [cron(a, [*jobs, new])])


@template("easy")
def add_interval(d: Draw) -> Made:
    a, jobs, what, step = d.file("cron"), [job(d), job(d)], command(d), d.pick([2, 3, 4, 5, 6, 10, 12, 15, 20, 30])
    say = [
        f"Add a cron line to {a} that runs {what} every {step} minutes.",
        f"{what} should run every {step} minutes. Append its line to the crontab {a}.",
    ]
    new = [f"*/{step}", "*", "*", "*", "*", what]
    return Made(say, {a: crontab(jobs)}, [f'echo "{" ".join(new)}" >> {a}'], [cron(a, [*jobs, new])])


@template("easy")
def remove_job(d: Draw) -> Made:
    a, jobs = d.file("cron"), [job(d) for _ in range(d.number(3, 5))]
    gone = d.pick(jobs)
    what = gone[-1].removeprefix("./").removesuffix(".sh")
    say = [f"Remove the job {what}.sh from the crontab {a}.", f"{what}.sh should run no more. Delete its line in {a}."]
    expected = [cron(a, [one for one in jobs if one is not gone]), ["lacks", a, what]]
    return Made(say, {a: crontab(jobs)}, [f"sed -i '/{what}.sh/d' {a}"], expected)


@template("easy")
def count_jobs(d: Draw) -> Made:
    a, out, jobs = d.file("cron"), d.file(), [job(d) for _ in range(d.number(2, 9))]
    comments = [f"# {one[-1]} is important" for one in d.rng.sample(jobs, 2)]
    lines = d.shuffled([*(" ".join(one) for one in jobs), *comments])
    say = [
        f"How many jobs has the crontab {a}, comments not counted? Write the number to {out}.",
        f"Count the lines of {a} that are no comments (#) and write the number to {out}.",
    ]
    return Made(say, {a: text(lines)}, [f"grep -vc '^#' {a} > {out}"], [["same", out, str(len(jobs))]])


@template("medium")
def change_time(d: Draw) -> Made:
    a, jobs, hour, minute = d.file("cron"), [job(d) for _ in range(d.number(4, 6))], d.number(0, 23), d.number(0, 59)
    old = d.pick(jobs)
    new = [str(minute), str(hour), *old[2:]]
    what = old[-1].removeprefix("./")
    say = [
        f"In the crontab {a}, let {what} run at {clock(hour, minute)} instead, on the same days as before.",
        f"Move the job {what} in {a} to {clock(hour, minute)}. Its days and all other jobs stay as they are.",
    ]
    steps = [f"grep {what} {a}", f"sed -i -E '/{what}/s/^[0-9]+ [0-9]+/{minute} {hour}/' {a}", f"grep {what} {a}"]
    expected = [new if one is old else one for one in jobs]
    return Made(say, {a: crontab(jobs)}, steps, [cron(a, expected)])


@template("medium")
def jobs_of_day(d: Draw) -> Made:
    a, out, day = d.file("cron"), d.file(), d.number(0, 6)
    jobs = [job(d) for _ in range(6)]
    jobs[0][4], jobs[1][4], jobs[2][4] = str(day), "*", str((day + 1) % 7)
    jobs = d.shuffled(jobs)
    names = sorted(one[-1].removeprefix("./") for one in jobs if one[4] in ("*", str(day)))
    say = [
        f"Which scripts of the crontab {a} run on a {DAYS[day]}? Write their names, such as x.sh, sorted, to {out}.",
        f"Write the names of all scripts that {a} runs on {DAYS[day]}s to {out}, sorted, without ./ before them.",
    ]
    program = f'$5 == "*" || $5 == {day} {{print $6}}'
    steps = [f"cat {a}", f"awk '{program}' {a} | sed 's#^./##' | sort > {out}", f"cat {out}"]
    return Made(say, {a: crontab(jobs)}, steps, [["same", out, text(names)]])


@template("medium")
def from_table(d: Draw) -> Made:
    a, out, jobs = d.file("csv"), d.file("cron"), [job(d) for _ in range(d.number(3, 5))]
    lines = [f"{clock(int(hour), int(minute))},{what.removeprefix('./')}" for minute, hour, _, _, _, what in jobs]
    say = [
        f"{a} has a time and a script per line. Write a crontab {out} that runs each script, as ./script, daily at "
        "its time.",
        f"Turn {a} (lines `HH:MM,script`) into a crontab {out}: each script runs every day at that time, as ./script.",
    ]
    steps = [f"cat {a}", f"awk -F'[:,]' '{{print $2+0, $1+0, \"* * * ./\" $3}}' {a} > {out}", f"cat {out}"]
    expected = [[*one[:4], "*", one[5]] for one in jobs]
    return Made(say, {a: text(lines)}, steps, [cron(out, expected)])


@template("hard")
def next_runs(d: Draw) -> Made:
    a, out, count = d.file("cron"), d.file(), d.number(3, 6)
    hours, minute = sorted(d.rng.sample(range(24), d.number(2, 3))), d.number(0, 59)
    days = sorted(d.rng.sample(range(7), 2))
    what, start = command(d), datetime(2031, d.number(1, 12), d.number(1, 28), d.number(0, 23), d.number(0, 59))
    line = f"{minute} {','.join(map(str, hours))} * * {','.join(map(str, days))} {what}"
    runs, when = [], start
    while len(runs) < count:
        when += timedelta(minutes=1)
        if when.minute == minute and when.hour in hours and when.isoweekday() % 7 in days:
            runs.append(f"{when:%Y-%m-%d %H:%M}")
    code = f"""
from datetime import datetime, timedelta
minute, hours, days = {minute}, {hours}, {days}
when, found = datetime({start.year}, {start.month}, {start.day}, {start.hour}, {start.minute}), 0
while found < {count}:
    when += timedelta(minutes=1)
    if when.minute == minute and when.hour in hours and when.isoweekday() % 7 in days:
        print(f"{{when:%Y-%m-%d %H:%M}}")
        found += 1
"""
    say = [
        f"When does {what} run next, according to the crontab {a}? Write the {count} times after "
        f"{start:%Y-%m-%d %H:%M}, as in that form, one per line in order, to {out}.",
    ]
    steps = [
        f"grep {what.removeprefix('./')} {a}",
        script("/tmp/next.py", code),
        f"python3 /tmp/next.py > {out}",
        f"cat {out}",
    ]
    return Made(say, {a: crontab([job(d)]) + line + "\n" + crontab([job(d)])}, steps, [["same", out, text(runs)]])


@template("hard")
def spread_clashes(d: Draw) -> Made:
    a, out, jobs = d.file("cron"), d.file(), [job(d) for _ in range(5)]
    for one in jobs:
        one[4] = "*"
    hour, minute = str(d.number(0, 22)), str(d.number(0, 40))
    clashing = d.rng.sample(jobs, 3)
    for one in clashing:
        one[:2] = [minute, hour]
    gap, order = d.number(2, 9), [one for one in jobs if one[:2] == [minute, hour]]
    expected = [[str(int(minute) + gap * order.index(one)), *one[1:]] if one in order else one for one in jobs]
    say = [
        f"Several jobs of the crontab {a} start at the same minute. Let the first of them stay, and start each "
        f"further one {gap} minutes after the one before it, in the order of the file. Write the whole crontab to "
        f"{out}.",
    ]
    program = f'{{k = $1 " " $2; $1 += {gap} * n[k]++; print}}'
    steps = [
        f"cat {a}",
        f"awk '{{print $1, $2}}' {a} | sort | uniq -c",
        f"set -f; awk '{program}' {a} > {out}",
        f"cat {out}",
    ]
    return Made(say, {a: crontab(jobs)}, steps, [cron(out, expected)])


@template("hard")
def from_sentences(d: Draw) -> Made:
    a, out, lines, expected = d.file(), d.file("cron"), [], []
    forms = [
        ("every day at {t}", "{m} {h} * * *"),
        ("every {day} at {t}", "{m} {h} * * {n}"),
        ("on weekdays at {t}", "{m} {h} * * 1-5"),
        ("on day {k} of each month at {t}", "{m} {h} {k} * *"),
        ("every {s} minutes", "*/{s} * * * *"),
    ]
    for said, line in d.shuffled(forms)[: d.number(3, 5)]:
        h, m, n = d.number(0, 23), d.number(0, 59), d.number(0, 6)
        values = {
            "h": h,
            "m": m,
            "n": n,
            "day": DAYS[n],
            "t": clock(h, m),
            "k": d.number(1, 28),
            "s": d.pick([5, 10, 15, 20]),
        }
        what = command(d)
        lines.append(f"{what} {said.format(**values)}")
        expected.append(f"{line.format(**values)} {what}")
    say = [
        f"{a} describes jobs in words, each with its command first. Write a crontab {out} with a line for each of "
        "them.",
        f"Write the jobs that {a} describes as a crontab to {out}: five fields for the time, then the command.",
    ]
    half = len(expected) // 2
    steps = [
        f"cat {a}",
        script(out, text(expected[:half])),
        script("/tmp/rest", text(expected[half:])),
        f"cat /tmp/rest >> {out}; cat {out}",
    ]
    return Made(say, {a: text(lines)}, steps, [["cron", out, expected]])
