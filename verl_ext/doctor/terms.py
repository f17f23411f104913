"""Whether the run's own terms of the reward can be loaded and give numbers: each is called once, on an example."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.datasets.peek import first_rows
from verl_ext.doctor.finding import Finding, fail, ok
from verl_ext.doctor.run import Run
from verl_ext.episode import CallResult, Episode, EpisodeKey, Reply, Score, TokenRow, ToolUse, Turn, TurnCall
from verl_ext.protocols.base import CODE_TOOL

TERMS = "reward.reward_kwargs.terms"


def check_terms(run: Run) -> Iterator[Finding]:
    """Call each of the run's own terms on an example and say what it returned."""
    table = run.get(TERMS) if run.has_own_reward else None
    if not table:
        return
    from verl_ext.reward.numbers import BrokenReward  # 0.1 s
    from verl_ext.reward.terms import read_terms

    try:
        terms = read_terms(table)
    except ValueError as error:
        yield fail(f"{error} -> Correct {TERMS}, or the file.")
        return
    episode, row = example(), _row(run)
    for term in terms:
        try:
            value = term.value(episode, row)
        except BrokenReward as error:
            yield fail(f"{error} -> The example is a right answer after one call, with the first row of the data.")
        else:
            yield ok(f"""reward_{term.name}: {term.path} says {value:g}, in [{term.low:g}, {term.high:g}], of a right
                answer after one call; it adds {term.weight * value:+g}""")


def example() -> Episode:
    """Return an episode of two turns, with one call that ended well and a right answer, of one token per character."""
    call = TurnCall(CODE_TOOL, {"code": "print(6 * 7)"}, result=CallResult("42", stdout="42\n", stderr="", exit_code=0))
    texts = "<code>\nprint(6 * 7)\n</code>", "\n<interpreter>\n42\n</interpreter>\n", "The answer is \\boxed{42}."
    first, reply, last = map(len, texts)
    ids = [ord(sign) for sign in "".join(texts)]
    row = TokenRow(
        prompt_ids=[0],
        ids=ids,
        mask=[1] * first + [0] * reply + [1] * last,
        log_probs=[-1.0] * len(ids),
        model_spans=[(0, first), (first + reply, len(ids))],
        version_spans=[(0, first, 0), (first + reply, len(ids), 0)],
    )
    server, now = "127.0.0.1:8000", 0.0
    turns = [
        Turn(texts[0], first, 0, server, now, 1.0, calls=[call], reply=Reply(texts[1], reply, first)),
        Turn(texts[2], last, first + reply, server, now, 1.0),
    ]
    return Episode(
        EpisodeKey("doctor", 0),
        rows=[row],
        finish_reason="answer",
        use=ToolUse(ok=1, code_lines=1, first_call_token=0, generate_s=2.0),
        score=Score(1.0, "42", "correct", "integer", "42"),
        turns=turns,
        prompt="What is 6 * 7?",
    )


def _row(run: Run) -> Mapping[str, Any]:
    """Return the first row of the training data as a term gets it; {} if it cannot be read, which others report."""
    for path in run.files("train"):
        for row in first_rows(path, None, 1):
            return {"raw_prompt": row.get(run.text_column), **row}
    return {}
