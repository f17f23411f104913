"""Which version of the weights wrote each token of a response: spans, as `episode.Span` has them.

A version is the training step after which a server was given the weights.
"""

from collections.abc import Iterable, Sequence

from verl_ext.episode import Span


def spans_of(written: Iterable[tuple[int, int | None]], start: int, kept: int) -> list[Span]:
    """Return the spans of a turn that begins at `start` and of which the first `kept` tokens stay."""
    spans, end = [], start
    for tokens, version in written:
        begin, end = end, min(end + tokens, start + kept)
        if end > begin:
            spans.append((begin, end, version))
    return spans


def joined(spans: Sequence[Span], more: Sequence[Span]) -> list[Span]:
    """Return both lists as one, with adjacent spans of the same version merged."""
    result = list(spans)
    for begin, end, version in more:
        if result and result[-1][1:] == (begin, version):
            begin = result.pop()[0]
        result.append((begin, end, version))
    return result
