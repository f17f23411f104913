"""Make word problems in natural language from the templates of templates.txt, each with the program that solves it."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from arithmetic import evaluate, plain, run  # of data/, as `worked`
from worked import Worked

TEMPLATES = Path(__file__).with_name("templates.txt")
SETS = ("sft", "rl", "test")
NAMES = {
    "he": ["Adam", "Ben", "Carlos", "David", "Emil", "Farid", "George", "Hugo", "Ivan", "Jamal", "Kenji", "Leo"],
    "she": ["Alice", "Bella", "Chen", "Dora", "Elif", "Fatima", "Grace", "Hanna", "Irene", "Julia", "Kira", "Maria"],
}
PRONOUNS = {"he": {"p": "he", "h": "his", "o": "him"}, "she": {"p": "she", "h": "her", "o": "her"}}
WORDS = {
    "things": [
        "marbles",
        "stickers",
        "pencils",
        "stamps",
        "coins",
        "shells",
        "beads",
        "buttons",
        "toy cars",
        "postcards",
    ],
    "food": ["apples", "cookies", "pears", "muffins", "plums", "sandwiches", "peaches", "pancakes"],
    "boxes": ["boxes", "bags", "jars", "baskets", "drawers"],
}
GOODS = [
    *(("notebook", "notebooks"), ("lamp", "lamps"), ("scarf", "scarves"), ("toy", "toys"), ("mug", "mugs")),
    *(("hat", "hats"), ("plant", "plants"), ("poster", "posters"), ("ball", "balls"), ("basket", "baskets")),
]
DRAWS = 100  # without a new problem, after which a template counts as exhausted
_NUMBER = re.compile(r"([a-z])=(?:(.+?)\.\.)?(.+)")


@dataclass(frozen=True)
class Template:
    """A line of templates.txt; `numbers` are (name, lowest, highest), or (name, "", value)."""

    set: str
    kind: str
    numbers: tuple[tuple[str, str, str], ...]
    formula: str
    text: str
    line: int


def read_templates(path: Path = TEMPLATES) -> list[Template]:
    """Read all templates, in the file's order.

    Raises:
        ValueError: a line is not a template; the message names it.
    """
    templates = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|")]
        drawn = [_NUMBER.fullmatch(word) for word in parts[2].split()] if len(parts) == 5 else [None]
        if None in drawn or parts[0] not in SETS:
            raise ValueError(
                f"{path}, line {number}: expected set | kind | a=2..9 b=a*2 | formula | text, found {line!r}"
            )
        numbers = tuple((match[1], match[2] or "", match[3]) for match in drawn)
        templates.append(Template(parts[0], parts[1], numbers, parts[3], parts[4], number))
    return templates


def make_problem(template: Template, rng: random.Random) -> Worked:
    """Draw numbers, names and things; the program prints the formula over the numbers."""
    numbers = _draw(template, rng)
    while numbers is None:
        numbers = _draw(template, rng)
    genders = [rng.choice(["he", "she"]) for _ in range(2)]
    first = rng.choice(NAMES[genders[0]])
    second = rng.choice([name for name in NAMES[genders[1]] if name != first])
    words = {slot: rng.choice(choices) for slot, choices in WORDS.items()} | {"n": first, "m": second}
    words["x"], words["xs"] = rng.choice(GOODS)
    for slot, pronoun in PRONOUNS[genders[0]].items():
        words[slot], words[slot.upper()] = pronoun, pronoun.capitalize()
    text = template.text.format(**words | numbers)
    code = f"print({re.sub(r'[a-z]', lambda name: str(numbers[name[0]]), template.formula)})"
    output = run(code)
    return Worked(text, code, output, plain(float(output)), f"{template.kind}-{template.line}")


def make_problems(which: str, count: int, rng: random.Random) -> list[Worked]:
    """Make `count` different problems of a set, in random order, evenly from all templates that still have new ones.

    Raises:
        ValueError: the templates of the set have fewer than `count` problems.
    """
    templates = [template for template in read_templates() if template.set == which]
    problems: dict[str, Worked] = {}
    while len(problems) < count and templates:
        for template in rng.sample(templates, min(len(templates), count - len(problems))):
            drawn = (make_problem(template, rng) for _ in range(DRAWS))
            if new := next((problem for problem in drawn if problem.text not in problems), None):
                problems[new.text] = new
            else:
                templates.remove(template)
    if len(problems) < count:
        raise ValueError(f"The templates of the set {which} gave {len(problems)} problems; expected {count}.")
    return rng.sample(list(problems.values()), count)


def _draw(template: Template, rng: random.Random) -> dict[str, int] | None:
    """Draw the template's numbers; None if those drawn first leave nothing for a later one."""
    numbers: dict[str, int] = {}
    for name, low, high in template.numbers:
        if not low:
            numbers[name] = int(evaluate(high, numbers))
            continue
        lowest, highest = int(evaluate(low, numbers)), int(evaluate(high, numbers))
        if lowest > highest:
            return None
        numbers[name] = rng.randint(lowest, highest)
    return numbers
