"""Query and change SQLite databases with the tool ./sql, which is among the files of these tasks."""

import csv
import io
import sqlite3

from terminal.template import Draw, Made, script, template, text
from terminal.words import CITIES, PEOPLE, WORDS

SQL = """\
#!/usr/bin/env python3
import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as db:
    for row in db.execute(sys.argv[2]):
        print(*row, sep=",")
"""


def database(*tables: tuple[str, str, list[tuple]]) -> bytes:
    """Return a database file; a table is its name, its columns and its rows."""
    db = sqlite3.connect(":memory:")
    for name, columns, rows in tables:
        db.execute(f"create table {name} ({columns})")
        db.executemany(f"insert into {name} values ({','.join('?' * len(rows[0]))})", rows)
    db.commit()
    return db.serialize()


def users(d: Draw, low: int = 5, high: int = 9) -> tuple[str, str, list[tuple]]:
    names = d.some(PEOPLE, d.number(low, high))
    cities = d.some(CITIES, 3)
    rows = [(n, name, cities[n % 3] if n < 4 else d.pick(cities)) for n, name in enumerate(names, 1)]
    return "users", "id integer primary key, name text, city text", rows


def items(d: Draw, low: int = 5, high: int = 9) -> tuple[str, str, list[tuple]]:
    names = d.some(WORDS, d.number(low, high))
    prices = d.rng.sample(range(2, 99), len(names))
    rows = [(n, name, price) for n, (name, price) in enumerate(zip(names, prices, strict=True), 1)]
    return "items", "id integer primary key, name text, price integer", rows


def files(name: str, *tables: tuple[str, str, list[tuple]]) -> dict:
    return {name: database(*tables), "sql": (SQL, 0o755)}


def now(name: str, table: str, rows: list[tuple]) -> list:
    return ["sql", name, f"select * from {table} order by id", [list(row) for row in sorted(rows)]]


@template("easy")
def count_rows(d: Draw) -> Made:
    a, out, made = d.file("db"), d.file(), d.pick([users, items])(d, 3, 20)
    table, _, rows = made
    say = [
        f"How many {table} are in {a}? Write the number to {out}. Use ./sql DATABASE QUERY.",
        f"Count the rows of the table {table} in {a} with ./sql and write the number to {out}.",
    ]
    steps = [f'./sql {a} "select count(*) from {table}" > {out}']
    return Made(say, files(a, made), steps, [["same", out, str(len(rows))]])


@template("easy")
def delete_row(d: Draw) -> Made:
    a, made = d.file("db"), d.pick([users, items])(d)
    table, _, rows = made
    row = d.pick(rows)
    say = [
        f"Delete the row with id {row[0]} from the table {table} in {a}. Use ./sql DATABASE QUERY.",
        f"In {a}, remove number {row[0]} from {table} with ./sql.",
    ]
    steps = [f'./sql {a} "delete from {table} where id = {row[0]}"']
    return Made(say, files(a, made), steps, [now(a, table, [one for one in rows if one != row])])


@template("easy")
def update_row(d: Draw) -> Made:
    a, (table, columns, rows), city = d.file("db"), users(d), d.fresh(CITIES)
    number, name, _ = d.pick(rows)
    say = [
        f"{name} moved to {city}. Update the table users in {a} with ./sql DATABASE QUERY.",
        f"In the table users of {a}, set the city of {name} to {city}. Use ./sql.",
    ]
    steps = [f"./sql {a} \"update users set city = '{city}' where name = '{name}'\""]
    expected = [(number, name, city) if row[0] == number else row for row in rows]
    return Made(say, files(a, (table, columns, rows)), steps, [now(a, table, expected)])


@template("easy")
def insert_row(d: Draw) -> Made:
    a, made, name, price = d.file("db"), items(d), d.fresh(WORDS), d.number(2, 99)
    number = d.number(20, 99)
    say = [
        f"Add the item {name} with id {number} and price {price} to the table items in {a}. Use ./sql DATABASE QUERY.",
        f"Insert id {number}, name {name}, price {price} into items in {a} with ./sql.",
    ]
    steps = [f"./sql {a} \"insert into items values ({number}, '{name}', {price})\""]
    return Made(say, files(a, made), steps, [now(a, "items", [*made[2], (number, name, price)])])


@template("medium")
def extreme_price(d: Draw) -> Made:
    a, out, made, high = d.file("db"), d.file(), items(d), d.pick([True, False])
    best = (max if high else min)(made[2], key=lambda row: row[2])
    what, order = ("most expensive", "desc") if high else ("cheapest", "asc")
    say = [
        f"What is the {what} item in the database {a}? Write its name to {out}. ./sql DATABASE QUERY runs a query.",
        f"Write the name of the {what} item in {a} to {out}. You can query it with ./sql DATABASE QUERY.",
    ]
    steps = [
        f'./sql {a} "select sql from sqlite_master"',
        f'./sql {a} "select name from items order by price {order} limit 1" > {out}',
        f"cat {out}",
    ]
    return Made(say, files(a, made), steps, [["same", out, best[1]]])


@template("medium")
def per_city(d: Draw) -> Made:
    a, out, made = d.file("db"), d.file("csv"), users(d, 7, 12)
    counts = {city: sum(row[2] == city for row in made[2]) for _, _, city in made[2]}
    say = [
        f"How many users of each city are in {a}? Write `city,count` per line, sorted by city, to {out}. Use ./sql.",
        f"Count the users in {a} by city with ./sql DATABASE QUERY, and write lines `city,count` to {out}, sorted by "
        "city.",
    ]
    steps = [
        f'./sql {a} "select * from users limit 3"',
        f'./sql {a} "select city, count(*) from users group by city order by city" > {out}',
        f"cat {out}",
    ]
    return Made(say, files(a, made), steps, [["same", out, text(f"{city},{counts[city]}" for city in sorted(counts))]])


@template("medium")
def raise_prices(d: Draw) -> Made:
    a, made, limit, more = d.file("db"), items(d, 6, 9), d.number(20, 70), d.number(2, 30)
    rows = [(n, name, price + more if price < limit else price) for n, name, price in made[2]]
    if rows == made[2]:
        rows, limit = [(n, name, price + more) for n, name, price in made[2]], 100
    say = [
        f"In the database {a}, add {more} to the price of every item that costs less than {limit}. Use ./sql.",
        f"Raise all prices below {limit} in the table items of {a} by {more}. ./sql DATABASE QUERY runs a query.",
    ]
    steps = [
        f'./sql {a} "select * from items"',
        f'./sql {a} "update items set price = price + {more} where price < {limit}"',
        f'./sql {a} "select * from items"',
    ]
    return Made(say, files(a, made), steps, [now(a, "items", rows)])


def orders(d: Draw, people: int) -> tuple[str, str, list[tuple]]:
    columns = "id integer primary key, user integer, amount integer"
    return "orders", columns, [(n, d.number(1, people - 1), d.number(5, 300)) for n in range(1, d.number(8, 14))]


@template("hard")
def totals(d: Draw) -> Made:
    a, out, made = d.file("db"), d.file("csv"), users(d, 4, 6)
    bought = orders(d, len(made[2]))
    sums = {name: sum(amount for _, user, amount in bought[2] if user == n) for n, name, _ in made[2]}
    say = [
        f"The database {a} has users and their orders. Write `name,total` for every user to {out}, sorted by name; the "
        "total is the sum of the amounts of the user's orders, 0 without any. ./sql DATABASE QUERY runs a query.",
    ]
    query = (
        "select name, coalesce(sum(amount), 0) from users left join orders on user = users.id "
        "group by users.id order by name"
    )
    steps = [
        f'./sql {a} "select sql from sqlite_master"',
        f'./sql {a} "select * from orders limit 3"',
        f'./sql {a} "{query}" > {out}',
        f"cat {out}",
    ]
    return Made(
        say, files(a, made, bought), steps, [["same", out, text(f"{name},{sums[name]}" for name in sorted(sums))]]
    )


@template("hard")
def split_city(d: Draw) -> Made:
    a, made = d.file("db"), users(d, 5, 8)
    table, column = (
        d.pick(["cities", "places", "towns", "homes"]),
        d.pick(["city_id", "place_id", "home_id", "town_id"]),
    )
    cities = sorted({row[2] for row in made[2]})
    say = [
        f"In the database {a}, move the cities of the users to a table of their own: {table}(id, name), numbered "
        f"from 1 in alphabetical order. Add a column {column} to users that refers to it. The column city may stay. "
        "Use ./sql DATABASE QUERY.",
        f"The table users of {a} repeats the names of cities. Make a table {table}(id, name) of them, with ids from "
        f"1 in alphabetical order, and fill a new column {column} of users with these ids. Use ./sql DATABASE QUERY.",
    ]
    fill = f"insert into {table} (name) select distinct city from users order by city"
    steps = [
        f'./sql {a} "select * from users"',
        f'./sql {a} "create table {table} (id integer primary key, name text)"; ./sql {a} "{fill}"',
        f'./sql {a} "alter table users add column {column} integer"',
        f'./sql {a} "update users set {column} = (select id from {table} where {table}.name = city)"',
        f'./sql {a} "select * from users"',
    ]
    rows = [[n, name, cities.index(city) + 1] for n, name, city in made[2]]
    checks = [["sql", a, f"select id, name from {table} order by id", [[n, city] for n, city in enumerate(cities, 1)]]]
    return Made(
        say, files(a, made), steps, [*checks, ["sql", a, f"select id, name, {column} from users order by id", rows]]
    )


@template("hard")
def import_csv(d: Draw) -> Made:
    a, b, made = d.file("db"), d.file("csv"), items(d, 4, 6)
    new, changed = items(d, 2, 4), d.rng.sample(made[2], 2)
    rows = {row[1]: row[2] for row in made[2]}
    update = [(name, price) for _, name, price in new[2]] + [
        (name, price + d.number(1, 9)) for _, name, price in changed
    ]
    update = d.shuffled(update)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([("name", "price"), *update])
    say = [
        f"{b} lists items with prices. For names that the table items of {a} already has, update the price; insert the "
        "others. Python has sqlite3, and ./sql DATABASE QUERY runs a query.",
    ]
    code = f"""
import csv, sqlite3
with sqlite3.connect("{a}") as db:
    for row in csv.DictReader(open("{b}")):
        values = (row["price"], row["name"])
        if not db.execute("update items set price = ? where name = ?", values).rowcount:
            db.execute("insert into items (price, name) values (?, ?)", values)
"""
    steps = [
        f'cat {b}; ./sql {a} "select * from items"',
        script("/tmp/load.py", code),
        "python3 /tmp/load.py",
        f'./sql {a} "select * from items"',
    ]
    expected = [list(pair) for pair in sorted((rows | dict(update)).items())]
    checks = [["sql", a, "select name, price from items order by name", expected]]
    return Made(say, files(a, made) | {b: out.getvalue()}, steps, checks)
