"""How long a prompt is, by the loop, the domain and the tools of its row."""

import pytest

from verl_ext.datasets.prompts import PromptLengths
from verl_ext.environments.by_name import shown_tools
from verl_ext.settings import compose_run


@pytest.fixture
def length(qwen_tokenizer):
    domains = "+retool.domains={talk: {protocol: hermes}, sums: {}}"
    shown = shown_tools(compose_run("tiny_dapo", [domains]), [])
    loops = {"retool": "", "retool_hermes": "hermes", "tool_agent": None}
    count = PromptLengths(qwen_tokenizer, loops, "retool", shown, {}, {}, limit=1)
    messages = [{"role": "user", "content": "What is 2+3?"}]
    return lambda **row: count(messages, row)


def test_the_protocol_of_the_domain_says_whether_the_prompt_shows_tools(length):
    bare, shown = length(data_source="sums"), length(data_source="talk")
    assert shown > bare + 50
    assert length(data_source="no domain") == length() == bare
    assert length(data_source="sums", agent_name="retool_hermes") == shown, "the row's own loop comes first"
    assert length(data_source="talk", agent_name="tool_agent") == bare, "verl's loop shows the tools of the files"


def test_a_row_selects_tools(length):
    assert length(data_source="talk", extra_info={"tool_selection": ["code_interpreter"]}) == length(data_source="talk")
