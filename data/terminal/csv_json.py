"""Read, filter, sum up and convert CSV and JSON."""

import csv
import io
import json

from terminal.template import Draw, Made, script, template, text
from terminal.words import CITIES, PEOPLE, WORDS

HEADER = ["name", "city", "points"]


def rows(d: Draw, low: int = 6, high: int = 12) -> list[list]:
    """Return people, each with one of three cities and a number."""
    people, cities = d.some(PEOPLE, d.number(low, high)), d.some(CITIES, 3)
    return [[name, cities[n] if n < 3 else d.pick(cities), d.number(1, 99)] for n, name in enumerate(people)]


def table(rows: list[list], header: list[str] = HEADER) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


@template("easy")
def take_column(d: Draw) -> Made:
    a, out, people, number = d.file("csv"), d.file(), rows(d), d.number(1, 3)
    say = [f"Write column {number} of {a}, with its header, to {out}.", f"Save only column {number} of {a} as {out}."]
    expected = text([row[number - 1] for row in [HEADER, *people]])
    return Made(say, {a: table(people)}, [f"cut -d, -f{number} {a} > {out}"], [["same", out, expected]])


@template("easy")
def count_city(d: Draw) -> Made:
    a, out, people = d.file("csv"), d.file(), rows(d)
    city = people[0][1]
    count = sum(row[1] == city for row in people)
    say = [
        f"How many rows of {a} have the city {city}? Write it to {out}.",
        f"Count the people from {city} in {a}. Write it to {out}.",
    ]
    return Made(say, {a: table(people)}, [f"grep -c ,{city}, {a} > {out}"], [["same", out, str(count)]])


@template("easy")
def column_sum(d: Draw) -> Made:
    a, out, people = d.file("csv"), d.file(), rows(d)
    say = [
        f"Add up the points, column 3 of {a}, and write the sum to {out}.",
        f"What is the sum of the third column of {a}? Write it to {out}.",
    ]
    steps = [f"awk -F, '{{s+=$3}} END {{print s}}' {a} > {out}"]
    return Made(say, {a: table(people)}, steps, [["same", out, str(sum(row[2] for row in people))]])


@template("easy")
def set_value(d: Draw) -> Made:
    a, keys = d.file("json"), d.some(WORDS, 4)
    values = dict(zip(keys, d.rng.sample(range(10, 99), 4), strict=True))
    key, new = d.pick(keys), d.number(100, 999)
    say = [
        f"In {a}, change {key} from {values[key]} to {new}.",
        f"The value of {key} in {a} should be {new}, not {values[key]}.",
    ]
    steps = [f'sed -i \'s/"{key}": {values[key]}/"{key}": {new}/\' {a}']
    return Made(say, {a: json.dumps(values, indent=2) + "\n"}, steps, [["is_json", a, values | {key: new}]])


@template("medium")
def to_json(d: Draw) -> Made:
    a, out, people = d.file("csv"), d.file("json"), rows(d)
    say = [
        f"Convert {a} to JSON in {out}: a list with an object for each row, keys from the header, all values as text.",
        f"Write {a} as a JSON list of objects to {out}. The header has the keys; every value is a string.",
    ]
    code = f"import csv,json; json.dump(list(csv.DictReader(open('{a}'))), open('{out}','w'))"
    expected = [dict(zip(HEADER, map(str, row), strict=True)) for row in people]
    steps = [f"head -n 3 {a}", f'python3 -c "{code}"', f"head -c 200 {out}"]
    return Made(say, {a: table(people)}, steps, [["is_json", out, expected]])


@template("medium")
def filter_rows(d: Draw) -> Made:
    a, out, people, limit = d.file("csv"), d.file("csv"), rows(d, 9, 14), d.number(20, 70)
    kept = [row for row in people if row[2] > limit]
    say = [
        f"Write the header of {a} and all rows with more than {limit} points to {out}, in the same order.",
        f"{out} should be {a} without the rows that have {limit} points or fewer. Keep the header.",
    ]
    steps = [f"head -n 3 {a}", f"awk -F, 'NR == 1 || $3 > {limit}' {a} > {out}", f"cat {out}"]
    return Made(say, {a: table(people)}, steps, [["same", out, table(kept)]])


@template("medium")
def sum_by_city(d: Draw) -> Made:
    a, out, people = d.file("csv"), d.file("csv"), rows(d, 8, 14)
    sums = {city: sum(row[2] for row in people if row[1] == city) for _, city, _ in people}
    say = [
        f"For each city in {a}, add up the points, and write lines `city,sum` without a header to {out}, sorted by "
        "city.",
        f"How many points does each city in {a} have? Write `city,points` per line to {out}, sorted by city, no "
        "header.",
    ]
    program = 'NR > 1 {s[$2] += $3} END {for (c in s) print c "," s[c]}'
    steps = [f"head -n 3 {a}", f"awk -F, '{program}' {a} | sort > {out}", f"cat {out}"]
    return Made(say, {a: table(people)}, steps, [["same", out, text(f"{city},{sums[city]}" for city in sorted(sums))]])


@template("medium")
def best_row(d: Draw) -> Made:
    a, out, names = d.file("json"), d.file(), d.some(PEOPLE, d.number(5, 9))
    points, high = d.rng.sample(range(1, 99), len(names)), d.pick([True, False])
    people = [{"name": name, "points": number} for name, number in zip(names, points, strict=True)]
    what, tool = ("most", "max") if high else ("fewest", "min")
    best = (max if high else min)(people, key=lambda one: one["points"])
    say = [
        f"{a} is a list of people. Write the name of the one with the {what} points to {out}.",
        f"Who has the {what} points in {a}? Write the name to {out}.",
    ]
    code = f"import json; print({tool}(json.load(open('{a}')), key=lambda p: p['points'])['name'])"
    steps = [f"head -c 150 {a}", f'python3 -c "{code}" > {out}']
    return Made(say, {a: json.dumps(people, indent=1) + "\n"}, steps, [["same", out, best["name"]]])


@template("hard")
def join_tables(d: Draw) -> Made:
    a, b, out, names = d.file("csv"), d.file("csv"), d.file("csv"), d.some(PEOPLE, d.number(4, 6))
    ids = d.rng.sample(range(10, 99), len(names))
    bought = ids[: d.number(2, 3)]  # the others have bought nothing
    orders = [[n, d.pick(bought), d.number(5, 500)] for n in range(1, d.number(8, 12))]
    sums = {name: sum(o[2] for o in orders if o[1] == i) for i, name in zip(ids, names, strict=True)}
    files = {
        a: table(list(zip(ids, names, strict=True)), ["id", "name"]),
        b: table(orders, ["order", "customer", "amount"]),
    }
    code = f"""
import csv
sums = {{row["id"]: [row["name"], 0] for row in csv.DictReader(open("{a}"))}}
for row in csv.DictReader(open("{b}")):
    sums[row["customer"]][1] += int(row["amount"])
for name, amount in sorted(sums.values()):
    print(f"{{name}},{{amount}}")
"""
    say = [
        f"{a} has customers, and {b} has their orders; `customer` there is the `id` of a customer. Write "
        f"`name,total` for every customer to {out}, sorted by name and without a header. The total is the sum of the "
        "amounts, or 0.",
    ]
    steps = [f"head -n 3 {a} {b}", script("/tmp/join.py", code), f"python3 /tmp/join.py > {out}", f"cat {out}"]
    return Made(say, files, steps, [["same", out, text(f"{name},{sums[name]}" for name in sorted(sums))]])


@template("hard")
def flatten(d: Draw) -> Made:
    a, out, groups = d.file("json"), d.file("csv"), d.some(CITIES, d.number(3, 4))
    key, people = d.pick(["team", "group", "club"]), d.some(PEOPLE, 9)
    data = [{key: group, "members": []} for group in groups]
    for n, name in enumerate(people):
        data[n % len(groups)]["members"].append({"name": name, "age": d.number(18, 80)})
    listed = [[group[key], one["name"], one["age"]] for group in data for one in group["members"]]
    expected = table(sorted(listed, key=lambda row: row[1]), [key, "name", "age"])
    code = f"""
import csv, json, sys
rows = [[g["{key}"], m["name"], m["age"]] for g in json.load(open("{a}")) for m in g["members"]]
writer = csv.writer(sys.stdout, lineterminator="\\n")
writer.writerow(["{key}", "name", "age"])
writer.writerows(sorted(rows, key=lambda row: row[1]))
"""
    say = [
        f"{a} has a list of {key}s with their members. Write a CSV table {out} with the header `{key},name,age` and "
        "one row for each member, sorted by name.",
    ]
    steps = [f"head -c 250 {a}", script("/tmp/flatten.py", code), f"python3 /tmp/flatten.py > {out}", f"cat {out}"]
    return Made(say, {a: json.dumps(data, indent=1) + "\n"}, steps, [["same", out, expected]])


@template("hard")
def drop_bad_rows(d: Draw) -> Made:
    a, out, bad_out, people = d.file("csv"), d.file("csv"), d.file(), rows(d, 7, 10)
    bad = [[people[0][0], people[0][1]], [people[1][0], people[1][1], "many"], [people[2][0], people[2][1], ""]]
    bad = bad[: d.number(1, 3)]
    good = [
        [name, f"{city}, {d.pick(['north', 'south'])}" if d.pick([0, 1]) else city, n] for name, city, n in people[3:]
    ]
    say = [
        f"Some rows of {a} are bad: they have not exactly three fields, or their points are no whole number. Fields "
        f"may be quoted. Write the header and the good rows, unchanged and in order, to {out}, and the number of bad "
        f"rows to {bad_out}.",
    ]
    code = f"""
import csv
bad = 0
lines = open("{a}").read().splitlines()
with open("{out}", "w") as out:
    print(lines[0], file=out)
    for line in lines[1:]:
        row = next(csv.reader([line]))
        if len(row) == 3 and row[2].isdigit():
            print(line, file=out)
        else:
            bad += 1
open("{bad_out}", "w").write(str(bad))
"""
    steps = [f"cat {a}", script("/tmp/clean.py", code), "python3 /tmp/clean.py", f"cat {out} {bad_out}"]
    mixed = [d.shuffled([*good, *bad])][0]
    kept = [row for row in mixed if row in good]
    return Made(say, {a: table(mixed)}, steps, [["same", out, table(kept)], ["same", bad_out, str(len(bad))]])
