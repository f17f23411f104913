"""The calls of a trace run once more, in the environment of the run."""

import json

import pytest

from verl_ext.protocols.base import cut_output, cut_reply
from verl_ext.settings import REPO
from verl_ext.traces.rerun import is_shown

LONG = "\n".join(f"line {number} of many" for number in range(400))


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("12", "12"),
        ("\n12 \n", "12"),
        ("a  \nb", "a\nb"),
        ("(no output)", "(no output)"),
        ("", "(no output)"),
        ("<object at 0x7f0012345678>", "<object at 0x7f00deadbeef>"),
        ("[... 0 characters cut ...]", "[... 0 characters cut ...]"),
    ],
)
def test_an_output_is_the_same_without_blanks_and_addresses(stored, said):
    assert is_shown(stored, said)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("12", "13"),
        ("12", "1 2"),
        ("12", "12\n3"),
        ("", "0"),
        ("0x12", "0x13"),  # a number
        (" a", "b"),
        ("a\n[... 5 characters cut ...]\nb", "ab"),
        ("a\n[... 5 characters cut ...]\nb", "a12345c"),
        ("a\n[... 5 characters cut ...]\nb", "a1234b"),
        ("a\n[... 5 characters cut ...]\nb", "a12345bb"),
    ],
)
def test_another_output_is_not(stored, said):
    assert not is_shown(stored, said)


@pytest.mark.parametrize("limit", [0, 1, 9, 48])
def test_an_output_may_be_cut_as_a_rollout_cuts_it(limit, qwen_tokenizer):
    def encode(text: str) -> list[int]:
        return qwen_tokenizer.encode(text, add_special_tokens=False)

    cut = cut_output(qwen_tokenizer, LONG, limit, encode)
    assert len(cut) < len(LONG) and is_shown(cut, LONG)
    assert not is_shown(cut, LONG + "x") and not is_shown(cut, LONG[:1000] + LONG[1001:])
    error = f"ValueError: {LONG[:3000]!r}"
    both = cut_reply(qwen_tokenizer, f"{LONG}\n{error}", error, limit=limit, share=200, encode=encode)
    assert both.count("characters cut") == 2 and is_shown(both, f"{LONG}\n{error}")


OWN = """
from verl_ext.environments.base import Environment, tool
from verl_ext.episode import CallResult
from verl_ext.outcome import RolloutEnd

class Counter(Environment):
    async def open(self, task):
        self.count = task["extra_info"]["start"]
        return await super().open(task)

    @tool
    def add(self, by: int) -> str:
        '''Count on.

        Args:
            by: how far.
        '''
        self.count += by
        return str(self.count)

    @tool
    def submit(self) -> CallResult:
        '''End the count.'''
        return CallResult("submitted", ends=RolloutEnd.ANSWER)
"""


def asks(*calls: tuple[str, dict]) -> dict:
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "Let me see.", "tool_calls": made}


def tools_say(*texts: str) -> list[dict]:
    return [{"role": "tool", "content": text} for text in texts]


def test_calls_run_in_the_environment_of_the_run(check, tmp_path):
    """A notebook remembers, the row's setup comes first, and an own tool has the state of its episode."""
    (tmp_path / "own.py").write_text(OWN)
    user = {"role": "user", "content": "How many?"}
    row = {"data_source": "counts", "ability": "math", "reward_model": {"ground_truth": "9"}}
    row["extra_info"] = {"setup_code": "start = 5", "start": 5}
    code = "code_interpreter"
    good = [user, asks((code, {"code": "x = start + 2"}), ("add", {"by": 2})), *tools_say("(no output)", "7")]
    good += [asks((code, {"code": "x + 2"})), *tools_say("9"), asks(("add", {"by": 2})), *tools_say("9")]
    good.append({"role": "assistant", "content": "\\boxed{9}"})
    wrong = json.loads(json.dumps(good).replace('"content": "7"', '"content": "8"'))
    submitted = [*good[:-1], asks(("submit", {})) | {"content": "\\boxed{9}"}]  # nothing answers it
    unknown = [user, asks(("sub", {"by": 2})), *tools_say("3"), good[-1]]
    tools = [
        {"type": "function", "function": {"name": code, "description": "Run.", "parameters": OF_CODE}},
        *[
            {"type": "function", "function": {"name": name, "description": "Count.", "parameters": OF_ADD}}
            for name in ("add", "sub")
        ],
        {"type": "function", "function": {"name": "submit", "description": "End.", "parameters": {"type": "object"}}},
    ]
    messages = (good, wrong, unknown, submitted)
    rows = [row | {"id": str(number), "messages": each} for number, each in enumerate(messages)]
    environment = f"retool.environment=[notebook,'{tmp_path}/own.py:Counter']"
    settings = [environment, "retool.protocol=hermes", "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2"]
    options = [part for each in settings for part in ("--set", each)]
    kept, left, _ = check([each | {"tools": tools} for each in rows], *options)
    assert [row["id"] for row in kept] == ["0", "3"]
    assert [(line["id"], line["reason"]) for line in left] == [("1", "output_differs"), ("2", "not_a_trace")]
    assert left[0]["detail"] == "call 2 says '7', the trace has '8'"
    assert "a call of 'sub'; the tools of the run are" in left[1]["detail"]


ANSWER = {"role": "assistant", "content": "\\boxed{7}"}
OF_CODE = {"type": "object", "properties": {"code": {"type": "string", "description": "A program."}}}
OF_CODE["required"] = ["code"]
OF_ADD = {"type": "object", "properties": {"by": {"type": "integer", "description": "How far."}}, "required": ["by"]}


def test_a_program_runs_without_its_fence_and_a_long_output_is_named_in_short(check):
    call = asks(("code_interpreter", {"code": "```python\nprint('7' * 999)\n```"}))
    rows = [
        {"id": said[:1], "messages": [{"role": "user", "content": "?"}, call, *tools_say(said * 999), ANSWER]}
        for said in ("7", "8")
    ]
    kept, (left,), _ = check(rows, "--without-gold")
    assert [row["id"] for row in kept] == ["7"]
    assert left["reason"] == "output_differs" and "says '777" in left["detail"] and len(left["detail"]) < 300


def test_public_traces_of_a_notebook_say_what_they_have_stored(check):
    """MathCoder's interpreter remembers and shows the last expression; one trace was wrapped by another printer."""
    options = ["--without-gold", "--set", "retool.environment=notebook"]
    kept, left, _ = check(REPO / "tests" / "data" / "traces.jsonl", *options, config="qwen2-32b_dapo")
    ran = [row for row in kept if "MathCoder" in row["source"] and '"tool_calls"' in row["messages"]]
    assert len(ran) == 22
    assert [line["id"] for line in left if line["reason"] != "not_a_trace"] == ["240fe0cf45ae"]
