"""The real loop with the hermes protocol between scripted server, sandbox and tools."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.protocols.test_hermes import ADD_SCHEMA, call_text
from verl_ext.sandbox.client import RunResult


def test_a_lone_surrogate_is_shown_and_not_raised(roll_out, tokenizer, turn):
    """JSON can spell a character that no text can have, and no tokenizer takes."""
    texts = ['<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', call_text(code="print(1)"), "\\boxed{1}"]
    episode, *_ = roll_out(
        tokenizer,
        [turn(text) for text in texts],
        ["1 \ud800"],
        protocol="hermes",
        response_length=500,
        max_tool_response_tokens=100,
    )
    shown = tokenizer.decode(episode.row.ids)
    assert 'unknown tool "\\ud800"' in shown and reply("1 \\ud800") in shown
    assert episode.finish_reason == "answer"


class Add:
    """A tool as verl's BaseTool has it; `fail` is what `execute` raises."""

    name = "add"
    fail = None
    log: list

    def __init__(self):
        from verl.tools.schemas import OpenAIFunctionToolSchema

        self.tool_schema = OpenAIFunctionToolSchema.model_validate(ADD_SCHEMA)
        self.log = []

    async def create(self, instance_id=None, **kwargs):
        self.log.append(("create", kwargs))
        return "instance", None

    async def execute(self, instance_id, parameters, **kwargs):
        from verl.tools.schemas import ToolResponse

        self.log.append((instance_id, parameters))
        if self.fail is not None:
            raise self.fail
        return ToolResponse(text=str(parameters["a"] + parameters["b"])), 0.5, {}

    async def release(self, instance_id, **kwargs):
        self.log.append(("release", instance_id))


@pytest.fixture
def turn(encode, tokenizer):
    return lambda text: encode(text) + [tokenizer.eos_token_id]


def reply(*outputs):
    """What the tiny tokenizer's template puts after the model's end token."""
    return "\n" + "".join(f"<|im_start|>tool\n{text}<|im_end|>\n" for text in outputs) + "<|im_start|>assistant\n"


def test_code_runs_in_the_sandbox_and_further_tools_by_themselves(roll_out, tokenizer, turn, encode):
    tool = Add()
    turns = [turn(call_text(code="print(1+1)") + "\n" + call_text("add", a=1, b=2)), turn("\\boxed{2}")]
    episode, server, sandbox = roll_out(
        tokenizer,
        turns,
        ["2\n"],
        protocol="hermes",
        tools=[tool],
        max_parallel_calls=2,
        response_length=400,
        prompt={"tools_kwargs": {"add": {"create_kwargs": {"seed": 1}}}},
    )
    assert episode.row.ids == turns[0] + encode(reply("2", "3")) + turns[1]
    assert episode.row.mask == [1] * len(turns[0]) + [0] * len(encode(reply("2", "3"))) + [1] * len(turns[1])
    assert sandbox.codes == ["print(1+1)"]
    assert tool.log == [
        ("create", {"create_kwargs": {"seed": 1}}),
        ("instance", {"a": 1, "b": 2}),
        ("release", "instance"),
    ]
    assert episode.use.calls == 2
    assert episode.finish_reason == "answer"
    assert "stop" not in server.calls[0] and episode.row.num_turns == 4


def test_malformed_calls_are_answered_beside_those_that_ran(roll_out, tokenizer, turn):
    text = call_text(code="print(1+1)") + call_text("sin", x=1)
    episode, *_ = roll_out(
        tokenizer,
        [turn(text), turn("\\boxed{2}")],
        ["2"],
        protocol="hermes",
        max_parallel_calls=2,
        response_length=400,
        max_tool_response_tokens=100,
    )
    told = 'FormatError: unknown tool "sin"; the tools are code_interpreter'
    assert reply("2", told) in tokenizer.decode(episode.row.ids)
    assert episode.use.malformed == {"unknown_tool": 1}
    assert episode.use.calls == 1


def test_calls_beyond_those_that_run_are_answered_and_no_malformed_ones(roll_out, tokenizer, turn):
    """verl silently leaves them out, and the published run continued."""
    turns = [turn(call_text(code="print(1+1)") * 5), turn("\\boxed{2}")]
    settings = {"protocol": "hermes", "response_length": 900, "max_malformed_calls": 0}
    episode, _, sandbox = roll_out(tokenizer, turns, ["2"], **settings)
    assert len(sandbox.codes) == 1 and episode.finish_reason == "answer"
    assert episode.use.malformed == {"two_blocks": 4}
    bad = [turn(call_text(code="print(1+1)") + call_text("sin", x=1)), turn("\\boxed{2}")]
    episode, *_ = roll_out(tokenizer, bad, ["2"], **settings | {"max_parallel_calls": 2})
    assert episode.finish_reason == "malformed_limit"


def test_a_sample_may_select_its_tools(roll_out, tokenizer, turn):
    turns = [turn(call_text(code="1")), turn("\\boxed{2}")]

    def roll(protocol, selection):
        prompt = {"extra_info": {"tool_selection": selection}}
        return roll_out(tokenizer, turns, ["1"], protocol=protocol, tools=[Add()], response_length=400, prompt=prompt)

    episode, *_ = roll("hermes", ["add"])
    assert episode.use.malformed == {"unknown_tool": 1}
    episode, *_ = roll("hermes", [])  # none named: all
    assert episode.use.ok == 1
    with pytest.raises(ValueError, match=r"names \['sin'\], but the tools are \['add', 'code_interpreter'\]"):
        roll("hermes", ["sin"])
    with pytest.raises(ValueError, match=r"tool_selection names \['add'\].*only the hermes protocol"):
        roll("code", ["add"])


TWO_CALLS = call_text(code="print(1)") + call_text(code="print(2)")
DOWN = RunResult("sandbox_failure", "", "", None, queue_s=0.0, run_s=0.0, attempts=4, message="connection refused")
WRONG = RunResult("code_error", "", "NameError: x", 1, queue_s=0.0, run_s=0.0, attempts=1, message="")


def roll_two(roll_out, tokenizer, turn, results, **settings):
    turns = [turn(TWO_CALLS), turn("\\boxed{2}")]
    settings = {"max_parallel_calls": 2, "response_length": 400} | settings
    episode, _, sandbox = roll_out(tokenizer, turns, results, protocol="hermes", **settings)
    return episode, sandbox


@pytest.mark.parametrize("results", [["1", DOWN], [DOWN, "2"], [WRONG, DOWN]])
def test_any_of_parallel_calls_that_the_sandbox_fails_ends_the_rollout(roll_out, tokenizer, turn, results):
    episode, sandbox = roll_two(roll_out, tokenizer, turn, results)
    assert episode.finish_reason == "sandbox_failure" and len(sandbox.codes) == 2
    assert episode.use.errors == {} and episode.use.calls == 0
    assert episode.row.ids == turn(TWO_CALLS)


@pytest.mark.parametrize(
    ("results", "said"), [(["1", WRONG], ("1", "NameError: x")), ([WRONG, "2"], ("NameError: x", "2"))]
)
def test_the_error_of_one_of_parallel_calls_is_counted_and_shown_in_its_place(roll_out, tokenizer, turn, results, said):
    episode, _ = roll_two(roll_out, tokenizer, turn, results)
    assert episode.use.errors == {"NameError": 1}
    assert episode.use.ok == 1 and episode.use.calls == 2
    assert reply(*said) in tokenizer.decode(episode.row.ids)


def test_parallel_calls_count_each_against_max_tool_calls(roll_out, tokenizer, turn):
    episode, sandbox = roll_two(roll_out, tokenizer, turn, ["1", "2"], max_tool_calls=2)
    assert episode.finish_reason == "answer" and sandbox.codes == ["print(1)", "print(2)"]

    episode, sandbox = roll_two(roll_out, tokenizer, turn, ["1", "2"], max_tool_calls=1)
    assert episode.finish_reason == "max_turns" and sandbox.codes == []
    assert episode.row.ids == turn(TWO_CALLS) and episode.use.calls == 0

    episode, sandbox = roll_two(roll_out, tokenizer, turn, ["1", "2"], max_tool_calls=1, run_last_code=True)
    assert episode.finish_reason == "max_turns" and sandbox.codes == ["print(1)", "print(2)"]
    assert episode.use.calls == 2 and episode.row.mask[-1] == 0

    turns = [turn(call_text(code="print(0)")), turn(TWO_CALLS), turn("\\boxed{2}")]
    settings = {"protocol": "hermes", "max_parallel_calls": 2, "response_length": 400}
    episode, _, sandbox = roll_out(tokenizer, turns, ["0", "1", "2"], max_tool_calls=2, **settings)
    assert episode.finish_reason == "max_turns" and sandbox.codes == ["print(0)"]
    episode, _, sandbox = roll_out(tokenizer, turns, ["0", "1", "2"], max_tool_calls=3, **settings)
    assert episode.finish_reason == "answer" and len(sandbox.codes) == 3


def test_an_unclosed_call_is_answered_to_the_model(roll_out, tokenizer, turn):
    unclosed = turn('\\boxed{1}, or: <tool_call>\n{"name": "code_interpreter"')
    episode, _, sandbox = roll_out(
        tokenizer, [unclosed, turn("\\boxed{2}")], protocol="hermes", response_length=400, max_tool_response_tokens=100
    )
    told = "FormatError: <tool_call> without </tool_call>; nothing was run"
    assert episode.row.ids[: len(unclosed)] == unclosed and sandbox.codes == []
    assert reply(told) in tokenizer.decode(episode.row.ids)
    assert episode.use.malformed == {"unclosed_tag": 1}
    assert episode.finish_reason == "answer"


def test_an_unknown_protocol_is_refused(roll_out, tokenizer):
    with pytest.raises(ValueError, match="retool.protocol is 'xml'; expected one of code, hermes"):
        roll_out(tokenizer, [], protocol="xml")


def test_a_template_that_drops_tool_turns_is_refused(roll_out, tokenizer, turn):
    import copy

    deaf = copy.deepcopy(tokenizer)
    deaf.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>{{ message.role }}", "{% if message.role == 'tool' %}{% continue %}{% endif %}<|im_start|>x"
    )
    with pytest.raises(ValueError, match="drops messages with the role 'tool'"):
        roll_out(deaf, [turn(call_text(code="1"))], ["1"], protocol="hermes", response_length=400)


FRAGMENTS = ["<tool_call>", "</tool_call>", "<code>", "</code>", "print(1)", "\\boxed{1}", "</", "<|im_end|>", " hm "]
FRAGMENTS += [call_text(code="print(1)"), call_text("add", a=1, b=2), call_text("sin", a=1), '{"name": 1}', "\n"]
OUTPUTS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(["code_error", "timeout", "sandbox_failure"]).map(
        lambda status: RunResult(status, "o", "NameError: x", None, 0.0, 0.0, 1, "down")
    ),
)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    protocol=st.sampled_from(["code", "hermes"]),
    streams=st.lists(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(3, 474)), max_size=6), max_size=6),
    stops=st.lists(st.sampled_from(["completed", "completed", "completed", "aborted"]), min_size=7, max_size=7),
    outputs=st.lists(OUTPUTS, min_size=40, max_size=40),
    response_length=st.integers(1, 300),
    limits=st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 40), st.booleans(), st.integers(1, 3)),
)
def test_tokens_stay_true_for_any_model_tools_and_budget(
    roll_out, tokenizer, protocol, streams, stops, outputs, response_length, limits
):
    turns = []
    for stream, stop in zip(streams, stops, strict=False):
        ids = [i for part in stream for i in ([part] if isinstance(part, int) else tokenizer.encode(part))]
        end = [tokenizer.eos_token_id] if stop == "completed" else []
        turns.append((ids + end, stop, {}))
    turns.append(([20] * response_length, "completed", {}))
    turns += turns[-1:] * 8
    max_tool_calls, max_malformed_calls, max_tool_response_tokens, run_last_code, max_parallel_calls = limits
    episode, server, _sandbox = roll_out(
        tokenizer,
        turns,
        outputs,
        protocol=protocol,
        tools=[Add()],
        response_length=response_length,
        max_tool_calls=max_tool_calls,
        max_malformed_calls=max_malformed_calls,
        max_tool_response_tokens=max_tool_response_tokens,
        run_last_code=run_last_code,
        max_parallel_calls=max_parallel_calls,
    )

    ids, mask, log_probs = episode.row.ids, episode.row.mask, episode.row.log_probs
    spans = episode.row.model_spans
    assert len(ids) == len(mask) == len(log_probs) <= response_length
    position = 0  # in all that the server sampled
    for (start, end), sampled in zip(spans, server.sent, strict=True):
        assert ids[start:end] == sampled[: end - start]  # decodes to what was sampled, up to a stop that was missed
        assert tokenizer.decode(ids[start:end]) == tokenizer.decode(sampled[: end - start])
        if end - start < len(sampled):
            assert protocol == "code" and tokenizer.decode(ids[start:end]).count("</code>") == 1
        assert log_probs[start:end] == [-(position + i + 1) / 1000 for i in range(end - start)]
        position += len(sampled)
    by_model = {i for start, end in spans for i in range(start, end)}
    assert by_model == {i for i, m in enumerate(mask) if m == 1}  # no token of a tool has mask 1
    assert all(log_probs[i] == 0.0 for i in range(len(ids)) if i not in by_model)
    for call, (start, _) in zip(server.calls, spans, strict=True):
        assert call["prompt_ids"] == episode.row.prompt_ids + ids[:start]
        assert call["max_tokens"] == response_length - start
    malformed = sum(number for kind, number in episode.use.malformed.items() if kind != "two_blocks")
    # A turn of calls in parallel may pass the limit when it is the last and is run still.
    assert episode.use.calls <= max_tool_calls + run_last_code * max_parallel_calls
    assert (malformed > max_malformed_calls) == (episode.finish_reason == "malformed_limit")
    assert episode.finish_reason != "answer" or (ids[-1] == tokenizer.eos_token_id and mask[-1] == 1)
