"""How many responses a prompt gets, by the phase of training and by how often its problem has been solved so far.

The rule and its numbers are those that the write-up of the published run recommends ("Intelligent Dynamic Sampling
Strategy", bojieli/ai-agent-book@99cee91, chapter7/retool/README.md). Neither that text nor this project reports a run
with them.
"""

import math
from collections.abc import Sequence

import numpy as np

from verl_ext.events import Ended, Observer, Started
from verl_ext.runs.journal import StepJournal
from verl_ext.settings import AdaptiveN
from verl_ext.settings.checks import in_phase

PASS_RATE_COLUMN = "pass_rate"  # of a data file (scripts/filter_by_pass_rate.py); null if it is unknown


def difficulty(rates: Sequence[float], settings: AdaptiveN) -> str:
    """Return "easy", "hard" or "" for a problem's pass rates, oldest first, as the settings define them."""
    if len(rates) >= settings.easy_visits and min(rates[-settings.easy_visits :]) > settings.easy_above:
        return "easy"
    return "hard" if rates and rates[-1] < settings.hard_below else ""


def number_of_responses(step: int, rates: Sequence[float], settings: AdaptiveN) -> int:
    """Return the number of responses of one prompt at a training step (from 1)."""
    n = in_phase(settings.phases, step)
    bounds = {"easy": min(n, settings.easy_n), "hard": max(n, settings.hard_n)}
    return bounds.get(difficulty(rates, settings), n)


class AdaptiveSampling(Observer):
    """Decides on each prompt that is submitted, and learns from each group that ends.

    A problem that this run has not seen yet is judged by the pass rate in its data row, if there is one, as if it had
    been measured `easy_visits` times.
    """

    def __init__(self, settings: AdaptiveN, journal: StepJournal):
        self.settings = settings
        self._journal = journal
        self._rates: dict[str, list[float]] = {}  # problem -> its last `easy_visits` pass rates in this run
        self._problems: dict[str, str] = {}  # uid of a group in flight -> problem
        self._observed: list[tuple[str, float]] = []  # since the last step
        self._given: list[tuple[int, str]] = []  # likewise: (responses, difficulty) of each prompt

    def on_started(self, event: Started) -> None:
        for record in self._journal.resume(event.step):
            for problem, rate in record["rates"]:
                self._remember(problem, rate)
            self._problems = dict(record.get("in_flight", {}))  # of the newest step

    def assign(
        self, step: int, uids: Sequence[str], problems: Sequence[str], known_rates: Sequence[float | None]
    ) -> list[int]:
        """Return the number of responses for each prompt.

        Args:
            step: training step, from 1.
            uids: one per group.
            problems: the problem of each (records/problem.py).
            known_rates: pass rate of each from its data row; None or NaN if it has none.
        """
        numbers = []
        for uid, problem, known in zip(uids, problems, known_rates, strict=True):
            self._problems[uid] = problem
            before = [] if known is None or math.isnan(known) else [known] * self.settings.easy_visits
            rates = before + self._rates.get(problem, [])
            numbers.append(number_of_responses(step, rates, self.settings))
            self._given.append((numbers[-1], difficulty(rates, self.settings)))
        return numbers

    def on_ended(self, event: Ended) -> dict[str, float]:
        """Learn from the groups that ended; return metrics of the prompts submitted since the last step, if any."""
        for uid, accs in event.accs.items():
            problem = self._problems.pop(uid, None)  # None: the run noted no prompts in flight
            if problem is not None and len(accs) > 0:
                rate = round(float(np.mean(accs)), 4)
                self._remember(problem, rate)
                self._observed.append((problem, rate))
        self._journal.append(event.step, rates=self._observed, in_flight=self._problems)
        given, self._given, self._observed = self._given, [], []
        if not given:
            return {}
        numbers = [n for n, _ in given]
        return {
            "rollout_n/mean": float(np.mean(numbers)),
            "rollout_n/min": float(min(numbers)),
            "rollout_n/max": float(max(numbers)),
            "rollout_n/easy": float(np.mean([kind == "easy" for _, kind in given])),  # share of the prompts
            "rollout_n/hard": float(np.mean([kind == "hard" for _, kind in given])),
        }

    def _remember(self, problem: str, rate: float) -> None:
        rates = self._rates.setdefault(problem, [])
        rates.append(rate)
        del rates[: -self.settings.easy_visits]
