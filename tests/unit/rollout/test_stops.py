"""The loop if the engine stops at a tag that ends no call: within thinking, or in a mention."""

import pytest

from tests.unit.protocols.test_hermes import call_text
from tests.unit.rollout.test_loop import BLOCK_2, CALL


def texts(episode, tokenizer):
    """(what the model wrote, what the tools said), by the mask."""
    pairs = list(zip(episode.row.ids, episode.row.mask, strict=True))
    return tuple(tokenizer.decode([i for i, own in pairs if own == wanted]) for wanted in (1, 0))


@pytest.mark.parametrize(
    ("parts", "stops"),
    [
        (["<think>or <code>9</code>", " no</think>", CALL], ["</code>", "</think>", "</code>"]),
        (["<think>or <code>9</code>", f" no</think>{CALL}"], ["</code>", "</think>"]),  # a server that missed the stop
        (
            ["<think>1 </code>", "</think>", "<think><code>2</code>", "</think>", CALL],
            ["</code>", "</think>", "</code>", "</think>", "</code>"],
        ),
        (["in `<code>` and `</code>", f"` {CALL}"], ["</code>", "</code>"]),
    ],
)
def test_a_turn_that_stops_at_a_draft_continues(roll_out, tokenizer, encode, answer, parts, stops):
    episode, server, sandbox = roll_out(tokenizer, [*map(encode, parts), answer], ["2"], response_length=200)
    call = [i for part in parts for i in encode(part)]
    assert sandbox.codes == ["print(1+1)"]
    assert episode.row.ids == call + encode(BLOCK_2) + answer
    assert [request["stop"] for request in server.calls] == [[stop] for stop in [*stops, "</code>"]]
    assert server.calls[1]["prompt_ids"] == episode.row.prompt_ids + encode(parts[0])
    assert server.calls[1]["max_tokens"] == 200 - len(encode(parts[0]))
    # It is one turn for all who count turns, and no error.
    assert episode.row.model_spans == [(0, len(call)), (len(call) + len(encode(BLOCK_2)), len(episode.row.ids))]
    assert episode.row.num_turns == 4 and episode.finish_reason == "answer"
    assert (episode.use.calls, episode.use.malformed, episode.use.void_turns) == (1, {}, 0)
    assert episode.row.log_probs[: len(call)] == [-(i + 1) / 1000 for i in range(len(call))]


def test_a_turn_that_names_a_tag_again_and_again_stops_at_its_end(roll_out, tokenizer, encode, answer):
    mentions, rest = encode("`</code>` " * 40), encode(f"now {CALL} and on") + [tokenizer.eos_token_id]
    episode, server, sandbox = roll_out(tokenizer, [mentions, rest, answer], ["2"], response_length=900)
    assert [request["stop"] for request in server.calls] == [["</code>"], [tokenizer.eos_token], ["</code>"]]
    assert sandbox.codes == ["print(1+1)"] and episode.finish_reason == "answer"
    assert texts(episode, tokenizer)[0].startswith("`</code>` " * 40 + f"now {CALL}\\boxed")


def test_the_records_have_such_a_turn_once(roll_out, tokenizer, encode, answer):
    parts = [encode("<think><code>9</code>"), encode("</think>"), encode(CALL)]
    episode, *_ = roll_out(
        tokenizer,
        [*parts, answer],
        ["2"],
        response_length=200,
        recorder={"enable": True, "token_share": 0.0, "keep_steps": 1, "max_gb": 1},
        max_tool_calls=1,
    )
    first, last = episode.turns
    assert first.text == f"<think><code>9</code></think>{CALL}" and first.tokens == sum(map(len, parts))
    assert (first.start, len(first.calls), first.reply.start) == (0, 1, first.tokens)
    assert last.text == "\\boxed{2}<|im_end|>"


@pytest.mark.parametrize("length", [9, 10, 11])
def test_thinking_that_is_never_closed_ends_with_its_tokens(roll_out, tokenizer, encode, length):
    draft = encode("<think><code>9</code>")
    turns = [draft, *[encode("<code>9</code>")] * 30]
    episode, _server, sandbox = roll_out(tokenizer, turns, response_length=len(draft) + length)
    assert len(episode.row.ids) == len(draft) + length and sandbox.codes == []
    assert episode.finish_reason == "max_tokens" and episode.row.num_turns == 2
    assert episode.use.malformed == {}


def test_thinking_that_ends_with_the_turn_is_an_answer_without_a_call(roll_out, tokenizer, encode):
    end = [tokenizer.eos_token_id]
    episode, _, sandbox = roll_out(tokenizer, [encode("<think><code>9</code>"), encode(" no") + end])
    assert episode.finish_reason == "answer" and sandbox.codes == [] and episode.row.num_turns == 2


def test_a_continued_turn_that_is_aborted_is_aborted(roll_out, tokenizer, encode):
    turns = [encode("<think><code>9</code>"), (encode(f"</think>{CALL}"), "aborted", {})]
    episode, _, sandbox = roll_out(tokenizer, turns)
    assert episode.finish_reason == "aborted" and sandbox.codes == []
    assert texts(episode, tokenizer) == (f"<think><code>9</code></think>{CALL}", "")


def test_tags_that_an_abort_has_split_are_thinking_too(roll_out, tokenizer, encode, answer):
    """The resumed request continued after the stops, which no engine saw whole; the tags are in pieces."""
    pieces = [i for tag in ("<think>", "<code>", "9", "</code>", "</think>") for c in tag for i in encode(c)]
    call, later = encode(CALL), encode("so 3. <code>print(9)</code>")
    episode, _, sandbox = roll_out(tokenizer, [pieces + call + later, answer], ["2"], response_length=200)
    assert sandbox.codes == ["print(1+1)"]
    assert episode.row.ids == pieces + call + encode(BLOCK_2) + answer


@pytest.fixture
def opening(tokenizer):
    """A tokenizer whose chat template opens the thinking of each turn."""
    import copy

    opening = copy.deepcopy(tokenizer)
    opening.chat_template = tokenizer.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert opening.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False)[
        -8:
    ] == ("<think>\n")
    return opening


def test_thinking_that_the_prompt_opened_runs_no_code(roll_out, opening, encode, answer):
    parts = ["or <code>9</code>", "</think>", CALL]
    episode, server, sandbox = roll_out(opening, [*map(encode, parts), answer], ["2"], response_length=200)
    assert sandbox.codes == ["print(1+1)"] and [call["stop"] for call in server.calls][1] == ["</think>"]
    assert texts(episode, opening) == ("".join(parts) + "\\boxed{2}<|im_end|>", BLOCK_2)


def test_thinking_that_a_reply_opened_runs_no_call(roll_out, opening, encode, tokenizer):
    end = [tokenizer.eos_token_id]
    turns = [f"{call_text(code='9')}</think>{call_text(code='1')}"] * 2 + ["</think>\\boxed{2}"]
    turns = [encode(turn) + end for turn in turns]
    episode, _, sandbox = roll_out(opening, turns, ["1", "1"], protocol="hermes", response_length=900)
    assert sandbox.codes == ["1", "1"] and episode.use.malformed == {}
    assert episode.finish_reason == "answer"


def test_a_draft_before_a_hermes_call_runs_once(roll_out, tokenizer, encode):
    end = [tokenizer.eos_token_id]
    first = encode(f"<think>{call_text(code='9')}</think>{call_text(code='1')}") + end
    episode, _, sandbox = roll_out(
        tokenizer, [first, encode("\\boxed{2}") + end], ["1"], protocol="hermes", response_length=400
    )
    assert sandbox.codes == ["1"] and episode.use.malformed == {}


def test_each_request_of_a_repeatable_turn_has_its_own_seed(roll_out, tokenizer, encode, answer):
    turns = [encode("<think><code>9</code>"), encode("</think>"), encode(CALL), answer]
    _, server, _ = roll_out(
        tokenizer, turns, ["2"], response_length=200, repeatable=True, prompt={"uid": "a", "session_id": 0}
    )
    assert len({call["seed"] for call in server.calls}) == 4
