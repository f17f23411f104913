"""The last turn of most responses."""

import pytest


@pytest.fixture
def answer(encode, tokenizer):
    """The last turn, with its end token."""
    return encode("\\boxed{2}") + [tokenizer.eos_token_id]
