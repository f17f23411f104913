"""The purposes of code (verl_ext/evaluation/purposes.py) over the steps of training."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from verl_ext.evaluation import purposes
from verl_ext.pages.charts import Chart
from verl_ext.pages.curves import Curve
from verl_ext.pages.curves import charts as _drawn
from verl_ext.runs.metrics import Metrics
from verl_ext.view.data import Run, State, state_of, step_of

RULES = purposes.__doc__
SAMPLE = 64  # responses of a file, chosen by a hash of their names: a share of all to within .06 (a standard error)


def over_training(run: Run) -> Metrics:
    """Return the `summary` of SAMPLE judged responses of each training step."""
    files = {key: path for key, path in run.files().items() if key.startswith("step")}
    found: dict[int, dict[str, float]] = {}
    for key, path in files.items():
        with suppress(LookupError):
            found[step_of(key)] = _of_file(run, key, state_of(path))
    return Metrics(found, set())


@lru_cache(maxsize=20_000)
def _of_file(run: Run, key: str, _: State | None) -> dict[str, float]:
    """Return a file's summary, computed once for each state of the file.

    Raises:
        LookupError: it has no judged response, or cannot be read at the moment: the next call tries again.
    """
    sql = (
        "SELECT acc, response_tokens, tool_use,"
        " list_transform(calls, lambda c: {'turn': c.turn, 'code': c.code, 'status': c.status, 'fault': c.fault})"
        f" AS calls FROM records WHERE acc IS NOT NULL ORDER BY hash(uid, session) LIMIT {SAMPLE}"
    )
    if not (rows := run.ask(sql, keys=[key])):
        raise LookupError(key)
    return purposes.summary(rows)


def charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Return charts as `curves.charts` does: purposes by verdict for each run, then what calls do for a response."""
    shown = [(run.name, run.number, over_training(run)) for run in runs]
    sides = [Curve(f"{side}/.+", f"in {side} responses", "share of calls") for side in ("right", "wrong")]
    found = [_drawn([each], {f"What the code is for: {each[0]}": sides}) for each in shown]
    does = (
        Curve("first call", "position of the first call", "share of the response"),
        Curve("repaired", "errors repaired by a later call", "share of the responses with one"),
    )
    by_run = {title: group for each in found for title, group in each.items()}
    return by_run | _drawn(shown, {"What it does": does})
