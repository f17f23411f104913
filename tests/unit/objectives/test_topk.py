"""Which of equal values torch.topk takes: what sparse attention (GLM-5's indexer) and routers would depend on.

No model of this repository has either. docs/guides/objectives.md reports the findings.
"""

import pytest
import torch

K = 4


def scores(length):
    """Every third value is 1, the others 0: more equal values than are taken."""
    values = torch.zeros(length)
    values[::3] = 1
    return values


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("length", [16, 64, 300, 5000])
def test_the_same_input_gives_the_same_indices_in_every_row_repetition_and_number_of_threads(length, threads):
    first = torch.topk(scores(length), K).indices
    for number in (1, 2, 4):
        threads(number)
        found = torch.topk(scores(length).repeat(8, 1), K).indices
        assert (found == first).all()


def test_but_padding_changes_which_of_the_equal_values_are_taken():
    """64 values, and the same ones before one of -inf, as in a longer row of a batch: not the same four."""
    padded = torch.nn.functional.pad(scores(64), (0, 1), value=-torch.inf)
    assert set(torch.topk(scores(64), K).indices.tolist()) != set(torch.topk(padded, K).indices.tolist())


@pytest.mark.parametrize("length", [16, 64, 300, 5000])
def test_a_stable_sort_takes_the_first_ones_whatever_the_length(length):
    found = torch.sort(scores(length), stable=True, descending=True).indices[:K]
    assert found.tolist() == [0, 3, 6, 9]
