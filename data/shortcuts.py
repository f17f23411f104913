"""Score rules that do not understand a word problem: an accuracy must beat them to mean anything."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\d.])\d[\d,]*(?:\.\d+)?")
_CLOSE = Fraction(1, 10**6)

Rule = Callable[[Sequence[Fraction]], Fraction]  # numbers of a text, in its order -> answer


def _range(numbers: Sequence[Fraction]) -> Fraction:
    return max(numbers) - min(numbers)


def _quotient_or(otherwise: Rule) -> Rule:
    """Return the rule "largest over smallest if that is whole, else `otherwise`"."""

    def rule(numbers: Sequence[Fraction]) -> Fraction:
        low, high = min(numbers), max(numbers)
        return high / low if low and (high / low).denominator == 1 else otherwise(numbers)

    return rule


RULES: dict[str, Rule] = {
    "largest minus smallest": _range,
    "sum of all numbers": sum,
    "product of all numbers": math.prod,
    "largest over smallest if whole, else their difference": _quotient_or(_range),
    "largest over smallest if whole, else the product of all": _quotient_or(math.prod),
}
RANDOM_PAIR = "random pair and operator"


def random_pair(numbers: Sequence[Fraction], answer: Fraction) -> float:
    """Return the chance that two random numbers of the text, in random order, and a random + - * / give the answer."""
    hits = tries = 0
    for a, b in itertools.permutations(numbers, 2):
        results = [a + b, a - b, a * b, a / b if b else None]
        tries += len(results)
        hits += sum(result is not None and abs(result - answer) < _CLOSE for result in results)
    return hits / tries


def shortcut_rates(problems: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return the accuracy of each rule over (text, answer); a text with fewer than two numbers counts as wrong."""
    rates: dict[str, list[float]] = {name: [] for name in (*RULES, RANDOM_PAIR)}
    for text, said in problems:
        numbers, answer = [Fraction(found.replace(",", "")) for found in _NUMBER.findall(text)], Fraction(said)
        applies = len(numbers) > 1
        for name, rule in RULES.items():
            rates[name].append(float(applies and abs(rule(numbers) - answer) < _CLOSE))
        rates[RANDOM_PAIR].append(random_pair(numbers, answer) if applies else 0.0)
    return {name: sum(values) / len(values) for name, values in rates.items()}


def describe_shortcuts(sources: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """Return a line for each data source that has problems: `svamp_ood: largest minus smallest 26.0%, ...`."""
    lines = ["Accuracy of rules that do not read the problem:"]
    for source, problems in sources.items():
        if not (given := list(problems)):
            continue
        rates = ", ".join(f"{name} {rate:.1%}" for name, rate in shortcut_rates(given).items())
        lines.append(f"  {source}: {rates}")
    return "\n".join(lines)
