"""Environments of one's own in the real agent loop: a class in a file, named by `retool.environment`."""

import json
import re
from typing import Any

import pytest

from verl_ext.environments import by_name

STACK = '''
import time

from verl_ext.environments.base import Environment, tool
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable

class Stack(Environment):
    call_s = 0.1

    def __init__(self, config, size=2):  # without the base class's: it needs nothing
        self.items, self.size = [], size

    @tool
    def push(self, item: int) -> str:
        """Put a number on the stack.

        Args:
            item: the number.
        """
        if len(self.items) == self.size:
            raise ToolError("the stack is full")
        if item < 0:
            raise ToolUnavailable("the store is down")
        if item == 13:
            return None
        if item == 99:
            time.sleep(0.5)
        self.items.append(item)
        return str(len(self.items))

class Closed(Stack):
    async def open(self, task):
        raise ToolUnavailable("the store has not opened")
'''


@pytest.fixture
def stack(roll_out, tokenizer, tmp_path, monkeypatch):
    """Roll out in the environment of a user's file."""
    file = tmp_path / "stack.py"
    file.write_text(STACK)
    monkeypatch.setattr("verl_ext.rollout.lives.RETRY_PAUSE_S", 0.01)

    def run(*turns: str, entry: Any = "STACK", **settings: Any) -> Any:
        ids = [tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] for text in turns]
        settings = {"protocol": "hermes", "response_length": 600, "max_tool_calls": 9, "environment": entry} | settings
        settings = json.loads(json.dumps(settings).replace("STACK", f"{file}:Stack"))
        episode, server, _sandbox = roll_out(tokenizer, ids, **settings)
        return episode, "".join(turn.reply.text for turn in episode.turns if turn.reply), server

    run.entry = f"{file}:Stack"
    return run


def push(item: Any, **more: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'push', 'arguments': {'item': item, **more}})}</tool_call>"


def test_an_environment_of_ones_own_is_a_class_with_tools_and_keeps_its_state_over_turns(stack):
    episode, told, _ = stack(push(3), push(4), push(5), push(1, by=2), "done")
    assert re.findall(r"(?<=<\|im_start\|>tool\n).*(?=<\|im_end\|>)", told) == [
        "1",
        "2",
        "ToolError: the stack is full",
        "ToolError: push has no argument 'by'; it has item",
    ]
    assert episode.use.ok == 2 and episode.use.errors == {"ToolError": 2}
    assert by_name.Environments(stack.entry, None).schemas["push"]["function"] == {
        "name": "push",
        "description": "Put a number on the stack.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "integer", "description": "the number."}},
            "required": ["item"],
        },
    }


def test_a_failure_of_an_environments_backend_is_the_infrastructures_and_a_bug_is_raised_by_name(stack):
    episode, _, _ = stack(push(-1))
    assert episode.finish_reason == "sandbox_failure"
    with pytest.raises(TypeError, match="Stack.push returned None"):
        stack(push(13))


def test_an_environment_that_cannot_be_opened_is_the_infrastructures_whatever_tools_the_row_selects(stack):
    row = {"extra_info": {"tool_selection": ["push"]}}
    episode, _, server = stack(push(1), entry=stack.entry.replace(":Stack", ":Closed"), prompt=row)
    assert (episode.finish_reason, episode.exception) == ("sandbox_failure", "the store has not opened")
    assert not server.calls


def test_calls_of_a_turn_that_ran_for_too_long_are_counted(stack):
    episode, _, _ = stack(push(3) + push(99), "done", turn_s=0.01, max_parallel_calls=2)
    assert episode.finish_reason == "timeout" and dict(episode.use.tools) != {}
    assert (episode.use.ok, episode.use.errors) == (1, {"timeout": 1})


def test_a_tool_that_works_for_too_long_is_the_models_error(stack):
    episode, told, _ = stack(push(99), push(1), "done")
    assert "TimeoutError: no answer within 0.1 s" in told and episode.use.errors == {"timeout": 1}
    assert episode.finish_reason == "answer"


def test_without_tools_what_looks_like_a_call_is_an_answer(stack):
    episode, told, _ = stack(push(1), entry=[])
    assert episode.finish_reason == "answer" and not told


def test_settings_stand_next_to_the_name_and_a_list_joins_the_tools(stack):
    episode, told, _ = stack(push(3), push(4), "done", entry=["python", {"name": "STACK", "size": 1}])
    assert "the stack is full" in told and episode.use.ok == 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("no_such", "Expected one of python, notebook"),
        ("verl_ext.environments.base:Opening", "expected a class derived from"),
        ({"name": "STACK", "height": 1}, "got the settings {'height': 1}"),
        (["STACK", "STACK"], "two tools with the name 'push'"),
        ({"name": "python", "size": 1}, "python has no settings"),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused_when_the_run_starts(stack, entry, message):
    with pytest.raises(ValueError, match=message):
        stack("2", entry=entry)


def test_the_code_protocol_refuses_an_environment_whose_tools_it_cannot_call(stack):
    with pytest.raises(ValueError, match="can call only the interpreter, but the environment has push"):
        stack("2", protocol="code")


def test_each_domain_has_its_environment_and_limits(stack):
    domains = {"piles": {"environment": "STACK", "max_tool_calls": 1}, "others": {}}
    of = {"prompt": {"data_source": "piles"}, "entry": "python"}
    episode, _told, _ = stack(push(3), push(4), domains=domains, **of)
    assert episode.finish_reason == "max_turns" and episode.use.ok == 1


TWO = """
from verl_ext.environments.base import Environment, Opening, tool

class First(Environment):
    async def open(self, task):
        return Opening([{"role": "user", "content": "First, then " + task["raw_prompt"][-1]["content"]}], {})

class Second(Environment):
    async def open(self, task):
        opening = await super().open(task)
        return Opening([{"role": "user", "content": "Second, then " + opening.messages[-1]["content"]}], opening.tools)

    @tool
    def weigh(self, things: list[str]) -> str:
        '''Weigh things.

        Args:
            things: what to weigh.
        '''
        return "3"
"""


@pytest.fixture
def opened(roll_out, qwen_tokenizer, tmp_path):
    """Return the prompt of a response in classes of TWO, and the name of each."""
    file = tmp_path / "two.py"
    file.write_text(TWO)

    def run(*names: str) -> tuple[str, list[str]]:
        entry = [f"{file}:{name}" for name in names]
        ids = qwen_tokenizer.encode("done") + [qwen_tokenizer.eos_token_id]
        episode, *_ = roll_out(qwen_tokenizer, [ids], protocol="hermes", environment=entry)
        return qwen_tokenizer.decode(episode.row.prompt_ids), entry

    return run


def test_a_prompt_that_an_environment_made_too_long_is_refused_and_not_cut(roll_out, qwen_tokenizer, tmp_path):
    file = tmp_path / "two.py"
    file.write_text(TWO.replace('"First, then "', '"First, then " * 3000'))
    with pytest.raises(RuntimeError, match="the prompt has .* tokens, above data.max_prompt_length=5000"):
        roll_out(qwen_tokenizer, [[1]], protocol="hermes", environment=f"{file}:First")


def test_each_environment_of_a_list_opens_with_what_the_one_before_said(opened):
    assert "Second, then First, then 1+1?" in opened("First", "Second")[0]


def test_a_prompt_shows_a_schema_as_traces_of_sft_do(opened):
    prompt, entry = opened("Second")
    (schema,) = by_name.Environments(entry, None).schemas.values()
    assert json.dumps(schema) in prompt and "items" in prompt
