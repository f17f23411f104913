"""What rules score that do not understand a word problem: the least that an accuracy must beat to mean anything."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

_NUMBER = re.compile(r"(?<![\d.])\d[\d,]*(?:\.\d+)?")
_CLOSE = Fraction(1, 10**6)


def largest_minus_smallest(numbers: Sequence[Fraction], answer: Fraction) -> float:
    """1.0 where the largest number of the text less the smallest is the answer."""
    return float(abs(max(numbers) - min(numbers) - answer) < _CLOSE)


def sum_of_all(numbers: Sequence[Fraction], answer: Fraction) -> float:
    """1.0 where the numbers of the text add up to the answer."""
    return float(abs(sum(numbers) - answer) < _CLOSE)


def random_pair(numbers: Sequence[Fraction], answer: Fraction) -> float:
    """Probability that two random numbers of the text, in random order, and a random one of + - * / give the answer."""
    hits = tries = 0
    for a, b in itertools.permutations(numbers, 2):
        results = [a + b, a - b, a * b, a / b if b else None]
        tries += len(results)
        hits += sum(result is not None and abs(result - answer) < _CLOSE for result in results)
    return hits / tries


SHORTCUTS = {
    "largest minus smallest": largest_minus_smallest,
    "sum of all numbers": sum_of_all,
    "random pair and operator": random_pair,
}


def shortcut_rates(problems: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Accuracy of each rule over (text, answer); a text with less than two numbers counts as wrong."""
    rates: dict[str, list[float]] = {name: [] for name in SHORTCUTS}
    for text, answer in problems:
        numbers = [Fraction(found.replace(",", "")) for found in _NUMBER.findall(text)]
        for name, rule in SHORTCUTS.items():
            rates[name].append(rule(numbers, Fraction(answer)) if len(numbers) > 1 else 0.0)
    return {name: sum(values) / len(values) for name, values in rates.items()}


def describe_shortcuts(sources: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """A line for each data source: `svamp_ood: largest minus smallest 26.0%, ...`."""
    lines = ["What rules score that do not read the problem:"]
    for source, problems in sources.items():
        rates = ", ".join(f"{name} {rate:.1%}" for name, rate in shortcut_rates(problems).items())
        lines.append(f"  {source}: {rates}")
    return "\n".join(lines)
