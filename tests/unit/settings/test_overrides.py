"""What `quoted` writes, Hydra reads back."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_ext.settings.overrides import quoted


@pytest.mark.parametrize("text", ["a b", "it's", "x\\", "a\\'b", "a\\b", "{a, b}", "a=b:c", "~/über [1]", "$HOME", ""])
def test_a_quoted_text_is_read_as_it_was(text):
    parser = OverridesParser.create()
    assert parser.parse_override(f"key={quoted(text)}").value() == text
    assert parser.parse_override(f"key={{name: search, corpus: {quoted(text)}}}").value()["corpus"] == text
