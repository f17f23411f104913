"""Verifiers of responses by domain, and the registry that finds the one for a row by its `data_source` or `ability`.

A verifier is a class, named by its dotted path in a YAML:

    reward_kwargs:
      verifiers:                # shell patterns, case ignored; first match wins, before the built-in ones below
        "my_essays/*": {path: verl_ext.reward.verifiers.judge.JudgeVerifier, base_url: "http://127.0.0.1:8000/v1"}
        trivia: verl_ext.reward.verifiers.exact.ExactVerifier

The settings next to `path` go to its constructor. `path` may also be a name of NAMES, FILE.py:NAME or
package.module:NAME. A domain of `retool.domains` names its verifier in the same way.

Rows that nothing matches are mathematics (`mathematics.py`). Of the other verifiers, `code/` runs tests in the sandbox,
`ifeval.py` checks constraints, `exact.py` checks texts and choices, and `judge.py` asks a model.
In: a response, a ground truth, the row. Out: a `Score`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

from verl_ext.reward.numbers import BrokenReward, finite
from verl_ext.reward.score import Score
from verl_ext.settings.domains import read_domains
from verl_ext.settings.objects import load_object

logger = logging.getLogger(__name__)

MATH = "verl_ext.reward.verifiers.mathematics.MathVerifier"
BUILT_IN = {
    "code": "verl_ext.reward.verifiers.code.CodeVerifier",
    "ifeval": "verl_ext.reward.verifiers.ifeval.IfevalVerifier",
    "instruction_following": "verl_ext.reward.verifiers.ifeval.IfevalVerifier",
    "exact": "verl_ext.reward.verifiers.exact.ExactVerifier",
    "multiple_choice": "verl_ext.reward.verifiers.exact.ChoiceVerifier",
}


NAMES = BUILT_IN | {"mathematics": MATH, "judge": "verl_ext.reward.verifiers.judge.JudgeVerifier"}


class Verifier(Protocol):
    """A verifier, built once per worker process as `Verifier(config, **settings)` with the run's whole config.

    It may have `gold` of `HasGold` as well.
    """

    async def verify(self, response_text: str, ground_truth: Any, sample: Mapping[str, Any]) -> Score:
        """Score what the model itself wrote.

        Args:
            response_text: without the tools' output.
            ground_truth: the row's `reward_model.ground_truth`.
            sample: the other fields of the row.
        Raises:
            ValueError: the row is broken (no test cases, an unknown constraint): an error of the data, not of the
                model. An infrastructure failure (a server, say) raises nothing and gives the verdict "unknown". A
                failure that the response itself causes is neither: see `verify_response`.
        """
        ...


@runtime_checkable
class HasGold(Protocol):
    def gold(self, ground_truth: Any) -> str:
        """Return a response that is right, which the doctor tries."""
        ...


def problem_text(sample: Mapping[str, Any]) -> str:
    """Return what a row asks, its messages in `raw_prompt` or `prompt` without the system's; "" if it has none."""
    prompt = sample.get("raw_prompt", sample.get("prompt"))
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return "\n\n".join(str(message["content"]) for message in prompt if message["role"] != "system")


# A response that no verifier has trouble with. A failure that it meets as well is not the fault of another response.
CONTROL_RESPONSE = "```python\npass\n```\nThe answer is \\boxed{0}."
# The exceptions that text can cause in code. OSError and RuntimeError are left out: they say that a worker or a server
# could not be reached.
RAISED_BY_TEXT = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError, RecursionError)


async def verify_response(
    verifier: Verifier, response_text: str, ground_truth: Any, sample: Mapping[str, Any]
) -> Score:
    """Verify as `verifier.verify`, with `acc` as a float; an exception that only this response causes makes it wrong.

    Raises:
        BrokenReward: the verifier gives no `Score`, or one whose `acc` is no finite number in [0, 1].
        Exception: the verifier's, if it raises on a plain response to the same row as well.
    """
    try:
        return checked_score(type(verifier).__name__, await verifier.verify(response_text, ground_truth, sample))
    except BrokenReward:
        raise
    except RAISED_BY_TEXT as error:
        try:
            await verifier.verify(CONTROL_RESPONSE, ground_truth, sample)
        except Exception:
            raise error from None
        logger.warning("%s raised on a response, which is scored as wrong", type(verifier).__name__, exc_info=error)
        return Score(0.0, "", "wrong", f"error: {type(error).__name__}")


def checked_score(name: str, score: Any) -> Score:
    """Return the score of a verifier or an environment, with `acc` as a float.

    Raises:
        BrokenReward: it is no `Score`, or `acc` is no finite number in [0, 1]; the message has the class's `name`.
    """
    if not isinstance(score, Score):
        raise BrokenReward(
            f"{name} returned {score!r:.200}: expected a Score (verl_ext/reward/score.py). Correct {name}."
        )
    if score.is_unverified and score.acc is None:
        return score
    acc = finite(score.acc)
    if acc is None or not 0.0 <= acc <= 1.0:
        raise BrokenReward(
            f"{name} returned acc={score.acc!r:.200} with the verdict {score.verdict!r}: expected a finite number "
            f"in [0, 1], or None with 'unknown' for a response that it cannot judge. Correct {name}."
        )
    return replace(score, acc=acc)


class Verifiers:
    """The verifiers of one run: finds them, and builds each when the first row asks for it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        entries: Mapping[str, Any] | None = None,
        of_domains: Mapping[str, Any] | None = None,
    ):
        """
        Args:
            config: the whole run's; verifiers may read their servers from it.
            entries: pattern -> dotted path, or {path: dotted path, setting: value, ...}.
            of_domains: the same for names of data sources, which are no patterns and come first.
        Raises:
            ValueError: an entry has no path, or the path leads nowhere.
        """
        own = dict(entries or {})

        def made(pattern: str, entry: Any) -> tuple[str, type[Verifier], Callable[[], Verifier]]:
            settings = {"path": entry} if isinstance(entry, str) else dict(entry)
            kind = _import_class(settings.pop("path", None), pattern)
            return pattern.lower(), kind, cache(partial(kind, config, **settings))

        self._of_domain = {name: made(name, entry) for name, entry in (of_domains or {}).items()}
        others = [item for item in BUILT_IN.items() if item[0] not in own]
        self._entries = [made(*item) for item in [*own.items(), *others]]
        self._maths = made("", MATH)

    @classmethod
    def of_run(cls, config: Any) -> "Verifiers":
        """Return the verifiers of a run: those of its domains, then `reward.reward_kwargs.verifiers`.

        Raises:
            ValueError: as the constructor, or the table of domains is wrong.
        """
        of_domains = {name: domain.verifier for name, domain in read_domains(config).items() if domain.verifier}
        entries = ((config.get("reward") or {}).get("reward_kwargs") or {}).get("verifiers")
        return cls(config, entries, of_domains)

    def find(self, data_source: str, ability: str) -> Verifier:
        """Return the verifier of the first pattern that fits the data source, else the ability, else that for maths."""
        return self._entry(data_source, ability)[2]()

    def find_class(self, data_source: str, ability: str) -> type[Verifier]:
        """Return the class of the verifier that `find` would return, without building it."""
        return self._entry(data_source, ability)[1]

    def _entry(self, data_source: str, ability: str) -> tuple[str, type[Verifier], Callable[[], Verifier]]:
        if data_source in self._of_domain:
            return self._of_domain[data_source]
        for name in (data_source, ability):
            for entry in self._entries:
                if fnmatchcase(name.lower(), entry[0]):
                    return entry
        return self._maths


def _import_class(path: Any, pattern: str) -> type[Verifier]:
    text = NAMES.get(path, str(path or ""))
    try:
        return load_object(text if ":" in text else ":".join(text.rsplit(".", 1)))
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise ValueError(
            f"The verifier for {pattern!r} is {path!r}, which cannot be imported ({error}). Expected one of "
            f"{', '.join(NAMES)}, the dotted path of a class, such as verl_ext.reward.verifiers.code.CodeVerifier, or "
            "FILE.py:NAME, under reward.reward_kwargs.verifiers or as the verifier of a domain."
        ) from error
