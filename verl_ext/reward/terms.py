"""A run's own terms of the reward: functions that `reward.reward_kwargs.terms` names, each with a weight and a range.

    reward_kwargs:
      terms:
        one_call: {path: reward.py:one_call, weight: 0.2, range: [0, 1]}

`one_call(episode, row)` returns a number. `episode` (verl_ext/episode.py) holds turns, calls and what the verifier said
(`episode.score.acc`); `row` is the data's row. What is not a number in the range stops the run: the function is ours.
In: an episode, a row. Out: a finite number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_ext.episode import Episode
from verl_ext.reward.numbers import BrokenReward, finite
from verl_ext.settings.checks import check, key
from verl_ext.settings.objects import load_object

BUILT_IN = ("base", "overlong", "length", "tool_bonus")  # parts of the reward, `reward_NAME`, that are not own terms
WHERE = "reward.reward_kwargs.terms"


@dataclass(frozen=True, kw_only=True)
class TermSettings:
    """A row of the table: the function, the weight of its value in the reward, and the range of its value."""

    path: str
    weight: float = key(1.0, within="(-inf, inf)", about="the factor of the function's value in the reward")
    range: list = key((-1.0, 1.0))

    def __post_init__(self) -> None:
        ends = [end for each in self.range if (end := finite(each)) is not None]
        if not (len(self.range) == len(ends) == 2 and ends[0] < ends[1]):
            raise ValueError(f"the range of {self.path} is {list(self.range)}: expected [lowest, highest]")


@dataclass(frozen=True)
class Term:
    """A term of the reward; `low` and `high` bound what `function` returns, before the weight."""

    name: str
    path: str
    function: Callable[[Episode, Mapping[str, Any]], object]
    weight: float
    low: float
    high: float

    def value(self, episode: Episode, row: Mapping[str, Any]) -> float:
        """Return what the function says of an episode, in [low, high].

        Raises:
            BrokenReward: it raises, or returns something else; the message names the term and the episode.
        """
        what = f"The reward term {self.name} ({self.path})"
        try:
            returned = self.function(episode, row)
        except Exception as error:  # whatever the function's author wrote
            raise BrokenReward(f"{what} raised {error!r:.200} on episode {episode.key}. Correct it.") from error
        number = finite(returned)
        if number is None or not self.low <= number <= self.high:
            raise BrokenReward(
                f"{what} returned {returned!r:.200} for episode {episode.key}: expected a number in "
                f"[{self.low:g}, {self.high:g}]. Correct it, or its range in {WHERE}.{self.name}."
            )
        return number


def read_terms(table: Mapping[str, Any] | None) -> tuple[Term, ...]:
    """Return the terms of a run in the table's order.

    Args:
        table: name -> `FILE.py:NAME` or `package.module:NAME`, or a section with `path`, `weight` and `range`.
    Raises:
        ValueError: a name is taken, a setting is wrong, or a function cannot be imported or called.
    """
    terms = []
    for name, row in (table or {}).items():
        where = f"{WHERE}.{name}"
        if not str(name).isidentifier() or name in BUILT_IN:
            raise ValueError(f"{where}: expected a name of letters, digits and _ that is not {', '.join(BUILT_IN)}.")
        given: Mapping[str, Any] = {"path": row} if isinstance(row, str) else row
        check(given, TermSettings, where)
        settings = TermSettings(**given)
        try:
            function = load_object(settings.path)
        except Exception as error:  # whatever the file raises
            raise ValueError(
                f"{where}: {settings.path!r} cannot be imported ({type(error).__name__}: {error}). Expected "
                "FILE.py:NAME, relative to the folder that the run starts in, or package.module:NAME."
            ) from error
        if not callable(function):
            raise ValueError(f"{where}: {settings.path} is {function!r:.200}, expected a function.")
        terms.append(Term(str(name), settings.path, function, settings.weight, *map(float, settings.range)))
    return tuple(terms)
