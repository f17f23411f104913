"""Invented documents that lead to each other: by a title, by links in markup, and by a name that two of them share."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

SYLLABLES = "bar del fen gor hal jin kas lor mev nur pol rin sul tam ver wex yor zan".split()
MONTHS = ("January", "March", "April", "June", "September", "October")
PERSON = (
    "{name} is {trade}, and learned it from an aunt. {name} moved often when young, and for {years} years has lived in "
    "the town of {town}. On weekdays the work is done in [an old {room}]({workshop}.md) with thick walls."
)
TOWN = (
    "{town} is a town of granite, and its market is held on Monday. It was founded by [[{founder}]] in a wet spring. "
    "According to the last count, it has {inhabitants} inhabitants. Its oldest bell was cast on {date}."
)
FOUNDER = "{founder} was born on {date}, and came to the valley on the ship {ship} with a mule and two books."
LOG = "Notes of a voyage, in a clerk's hand. The weather was fair when the {ship} left with {barrels} barrels of oil."
WORKSHOP = "It was built in {year}, and was used as a store by the miller {miller}. It has a low roof, and a stove."


def documents(groups: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield the five documents of each group: a person, a town, its founder, a ship's log, a workshop."""
    rng = random.Random(seed)

    def word(syllables: int = 4) -> str:
        return "".join(rng.choices(SYLLABLES, k=syllables)).capitalize()

    def date() -> str:
        return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1200, 1900)}"

    for number in range(groups):
        name, town, founder, ship = f"{word()} {word()}", word(), f"{word()} {word()}", word()
        trade, room = rng.choice(["a baker", "a potter"]), rng.choice(["barn", "mill", "chapel"])
        person = {"name": name, "trade": trade, "room": room, "years": rng.randint(2, 40), "town": town}
        inhabitants, barrels = 1000 + 7 * number + rng.randrange(7), rng.randint(100, 10**6)
        town_text = TOWN.format(town=town, founder=founder, inhabitants=inhabitants, date=date())
        workshop = WORKSHOP.format(year=rng.randint(1200, 1900), miller=f"{word()} {word()}")
        texts = {
            "person": (name, PERSON.format(**person, workshop=f"workshop-{number}")),
            "town": (town, town_text),
            "founder": (founder, FOUNDER.format(founder=founder, date=date(), ship=ship)),
            "log": (f"Log {number}", LOG.format(ship=ship, barrels=barrels)),
            "workshop": (f"Workshop {number}", workshop),
        }
        for kind, (title, text) in texts.items():
            yield {"id": f"{kind}-{number}", "title": title, "text": text}


def write(path: Path, groups: int, seed: int = 0) -> Path:
    """Write a corpus."""
    with open(path, "w") as file:
        file.writelines(f"{json.dumps(document)}\n" for document in documents(groups, seed))
    return path
