"""The real RetoolAgentLoop between a scripted LLM server and a scripted sandbox (tests/unit/conftest.py)."""

import asyncio
import copy
import itertools
import math
import pickle
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.episode import Reward
from verl_ext.rollout.encoded_prompts import EncodedPrompts
from verl_ext.rollout.rows import to_outputs
from verl_ext.sandbox.client import RunResult

CALL = "<code>print(1+1)</code>"
BLOCK_2 = "\n<interpreter>\n2\n</interpreter>\n"  # what the interpreter's "2" becomes
FAILURE = RunResult("sandbox_failure", "", "", None, queue_s=0.0, run_s=0.0, attempts=4, message="connection refused")


def test_tool_output_goes_between_the_models_turns_with_mask_0(roll_out, tokenizer, encode, answer):
    call = encode(CALL)
    episode, _server, sandbox = roll_out(tokenizer, [call, answer], ["2\n"])

    block = encode(BLOCK_2)
    assert episode.row.ids == call + block + answer
    assert episode.row.mask == [1] * len(call) + [0] * len(block) + [1] * len(answer)
    assert episode.row.log_probs == (
        [-(i + 1) / 1000 for i in range(len(call))]
        + [0.0] * len(block)
        + [-(len(call) + i + 1) / 1000 for i in range(len(answer))]
    )
    assert sandbox.codes == ["print(1+1)"]
    assert episode.finish_reason == "answer" and not episode.is_truncated
    assert (episode.use.calls, episode.use.failed, episode.use.errors["timeout"]) == (1, 0, 0)
    assert episode.num_model_tokens == len(call) + len(answer)
    assert episode.row.model_spans == [(0, len(call)), (len(call) + len(block), len(episode.row.ids))]


def test_each_turn_is_asked_for_what_is_left_and_stops_at_the_tag(roll_out, tokenizer, encode, answer):
    call = encode(CALL)
    episode, server, _ = roll_out(tokenizer, [call, answer], ["2"], response_length=60)

    first, second = server.calls
    assert first["prompt_ids"] == episode.row.prompt_ids
    assert tokenizer.decode(episode.row.prompt_ids) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert second["prompt_ids"] == episode.row.prompt_ids + call + encode(BLOCK_2)
    assert [first["max_tokens"], second["max_tokens"]] == [60, 60 - len(call) - len(encode(BLOCK_2))]
    assert first["request_id"] == second["request_id"]  # the router keeps it on the server with its prefix
    for call in server.calls:
        assert call["stop"] == ["</code>"] and call["include_stop_str_in_output"] is True
        assert call["temperature"] == 1.0 and call["logprobs"] is True


def test_the_server_is_asked_for_one_message_per_request_without_importing_vllm_here(
    roll_out, tokenizer, answer, monkeypatch
):
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have imported it
    _, server, _ = roll_out(tokenizer, [answer])
    sent = pickle.dumps(server.calls[0]["output_kind"])

    enum = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(sampling_params=enum))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", enum)
    assert pickle.loads(sent) == "final only"


def test_the_engine_stops_by_token_if_the_tag_is_one(roll_out, tokenizer, qwen_tokenizer, encode, answer):
    _, server, _ = roll_out(tokenizer, [encode(CALL), answer], ["2"])
    assert [call["stop_token_ids"] for call in server.calls] == [encode("</code>")] * 2
    assert len(encode("</code>")) == 1

    ids = qwen_tokenizer.encode("\\boxed{2}<|im_end|>", add_special_tokens=False)
    _, server, _ = roll_out(qwen_tokenizer, [ids])  # if it is several
    assert server.calls[0]["stop_token_ids"] == [] and server.calls[0]["stop"] == ["</code>"]


def test_in_the_servers_own_process_it_is_the_enum_itself(roll_out, tokenizer, answer, monkeypatch):
    enum = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(sampling_params=enum))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", enum)
    _, server, _ = roll_out(tokenizer, [answer])
    assert server.calls[0]["output_kind"] == "final only"


def test_the_samples_of_a_group_share_one_encoding_of_their_prompt():
    encoded = []

    async def encode(messages, tools):
        await asyncio.sleep(0.01)
        encoded.append((messages, tools))
        return [len(messages)]

    async def both():
        encoder = EncodedPrompts(encode)
        prompts = (["hi"], None), (["hi"], None), (["hi", "ho"], None), (["hi"], ["a tool"])  # all of one group
        first, second, other, _ = await asyncio.gather(*(encoder.ids("a", *prompt) for prompt in prompts))
        first.append("the rollout's own tokens")
        return second, other

    assert asyncio.run(both()) == ([1], [2])
    assert encoded == [(["hi"], None), (["hi", "ho"], None), (["hi"], ["a tool"])]


def test_the_models_tokens_stay_as_sampled_if_their_text_would_be_tokenised_differently(roll_out, tokenizer, answer):
    from tokenizers import AddedToken

    odd = copy.deepcopy(tokenizer)
    odd.add_tokens([AddedToken(">#", special=False, normalized=False)])  # ends the tag and carries a character past it
    pieces = ["<code>", *"print(12+34)", "<", "/", "c", "o", "d", "e", ">#"]
    call = odd.convert_tokens_to_ids(pieces)
    assert None not in call and odd.decode(call) == "<code>print(12+34)</code>#"
    assert len(odd.encode(odd.decode(call), add_special_tokens=False)) < len(call)

    episode, server, sandbox = roll_out(odd, [call, answer], ["46"])

    assert sandbox.codes == ["print(12+34)"]
    assert episode.row.ids[: len(call)] == call
    assert server.calls[1]["prompt_ids"][len(episode.row.prompt_ids) :][: len(call)] == call
    assert episode.row.model_spans[0] == (0, len(call))


@pytest.mark.parametrize("at_budget", [False, True], ids=["early", "with the last token of the budget"])
def test_an_end_token_means_answer(roll_out, tokenizer, answer, at_budget):
    response_length = len(answer) + (not at_budget)
    episode, *_ = roll_out(tokenizer, [answer], response_length=response_length)
    assert episode.finish_reason == "answer"
    assert not episode.is_truncated


def test_any_special_token_ends_an_answer(roll_out, tokenizer, encode):
    """Qwen2.5's generation_config has two end tokens; tokenizer.eos_token_id is one of them."""
    episode, *_ = roll_out(tokenizer, [encode("\\boxed{2}") + [tokenizer.pad_token_id]])
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert episode.finish_reason == "answer"


@pytest.mark.parametrize("split", ["one token", "pieces"])
def test_a_stop_that_an_abort_has_split_is_found_again(roll_out, tokenizer, encode, answer, split):
    """The server looks for stops within a request; here it continued past the stop, to the end token."""
    tag = encode("</code>") if split == "one token" else [i for c in "</code>" for i in encode(c)]
    call = encode("<code>print(1+1)") + tag
    episode, server, sandbox = roll_out(tokenizer, [call + encode("so it is 3") + answer, answer], ["2"])
    assert sandbox.codes == ["print(1+1)"]
    assert episode.row.ids == call + encode(BLOCK_2) + answer
    assert episode.row.log_probs[: len(call)] == [-(i + 1) / 1000 for i in range(len(call))]
    block = slice(len(call), len(call) + len(encode(BLOCK_2)))
    assert episode.row.log_probs[block] == [0.0] * len(encode(BLOCK_2)), "those after the stop went with its tokens"
    assert len(episode.row.log_probs) == len(episode.row.ids)
    assert episode.finish_reason == "answer"
    assert server.calls[1]["prompt_ids"] == episode.row.prompt_ids + call + encode(BLOCK_2)


def test_a_stop_with_one_token_after_it_is_found_again(roll_out, tokenizer, encode, answer):
    call = encode(CALL)
    episode, *_ = roll_out(tokenizer, [call + encode("3"), answer], ["2"])
    assert episode.row.ids == call + encode(BLOCK_2) + answer


@pytest.mark.parametrize("rest", ["so it is 3. ", "", "<code>1</code>"])
def test_a_stop_that_an_abort_has_split_counts_before_a_later_one(roll_out, tokenizer, encode, answer, rest):
    """The resumed request continued and wrote another call, at whose stop the server did stop."""
    call = encode("<code>print(1+1)") + [i for c in "</code>" for i in encode(c)]
    later = encode(f"{rest}<code>print(9)</code>")
    episode, _server, sandbox = roll_out(tokenizer, [call + later, answer], ["2"])
    assert sandbox.codes == ["print(1+1)"]
    assert episode.row.ids == call + encode(BLOCK_2) + answer


def test_a_special_token_without_a_name_ends_an_answer_before_the_budget_does(roll_out, tokenizer, encode):
    """Llama 3 ends turns with tokens that its tokenizer names nowhere: the server stopped there, so it is one."""
    nameless = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert nameless not in tokenizer.all_special_ids
    turn = encode("\\boxed{2}") + [nameless]
    episode, *_ = roll_out(tokenizer, [turn], response_length=len(turn) + 1)
    assert episode.finish_reason == "answer" and not episode.is_truncated
    episode, *_ = roll_out(tokenizer, [turn], response_length=len(turn))  # the budget's end, for all one knows
    assert episode.finish_reason == "max_tokens"


def test_a_stop_tag_that_is_a_special_token_does_not_end_the_assistants_turn(roll_out, tokenizer, encode, answer):
    from tokenizers import AddedToken

    special = copy.deepcopy(tokenizer)
    special.add_tokens([AddedToken("</code>", special=True)], special_tokens=True)
    episode, *_ = roll_out(special, [encode(CALL), answer], ["2"])
    assert episode.row.ids == encode(CALL) + encode(BLOCK_2) + answer


def test_a_turn_cut_by_the_budget_ends_with_max_tokens(roll_out, tokenizer, encode):
    episode, *_ = roll_out(tokenizer, [encode("<code>print(1+1)")], response_length=4)
    assert len(episode.row.ids) == 4
    assert episode.finish_reason == "max_tokens" and episode.is_truncated


@pytest.mark.parametrize(("stop_reason", "finish_reason"), [("completed", "max_tokens"), ("aborted", "aborted")])
def test_a_response_without_any_token_gets_one_that_is_not_trained_on(roll_out, tokenizer, stop_reason, finish_reason):
    episode, *_ = roll_out(tokenizer, [([], stop_reason, {})])
    assert episode.finish_reason == finish_reason
    assert episode.row.ids == [tokenizer.eos_token_id]
    assert episode.row.mask == [0] and episode.row.log_probs == [0.0]
    assert episode.row.model_spans == [(0, 0)] and episode.row.num_turns == 2
    episode.reward = Reward(-1.0, {"acc": 0.0})
    (output,) = to_outputs(episode)
    assert output.as_dict()["rm_scores"].tolist() == [-1.0]


@pytest.mark.parametrize("stop_reason", ["aborted", "error"])
def test_an_aborted_turn_keeps_what_was_sampled_and_is_not_the_models_doing(roll_out, tokenizer, encode, stop_reason):
    call = encode(CALL)
    episode, _, sandbox = roll_out(tokenizer, [(call, stop_reason, {})], ["2"])
    assert episode.finish_reason == "aborted"
    assert episode.row.ids == call and sandbox.codes == []


def test_a_wrong_setting_of_retool_stops_the_loop(roll_out, tokenizer):
    with pytest.raises(ValueError, match="max_tool_cals is not a setting .* Did you mean retool.max_tool_calls?"):
        roll_out(tokenizer, [], max_tool_cals=3)
    with pytest.raises(
        ValueError, match=r"retool.max_tool_response_tokens is 0, expected a whole number in \[1, inf\)"
    ):
        roll_out(tokenizer, [], max_tool_response_tokens=0)


def test_num_turns_counts_user_model_and_tool_turns(roll_out, tokenizer, encode, answer):
    assert roll_out(tokenizer, [answer])[0].row.num_turns == 2  # user, model
    assert roll_out(tokenizer, [encode(CALL), answer], ["2"])[0].row.num_turns == 4
    assert roll_out(tokenizer, [encode(CALL)] * 2 + [answer], ["2"] * 2)[0].row.num_turns == 6
    assert roll_out(tokenizer, [encode(CALL)], [FAILURE])[0].row.num_turns == 2  # the tool did not answer


def test_log_probs_are_absent_if_none_were_requested(roll_out, tokenizer, encode, answer):
    episode, *_ = roll_out(tokenizer, [encode(CALL), answer], ["2"], logprobs=False)
    assert episode.row.log_probs is None


def test_log_probs_that_do_not_fit_the_tokens_raise(roll_out, tokenizer, answer, monkeypatch):
    from verl.workers.rollout.replica import TokenOutput

    real = TokenOutput.__init__
    monkeypatch.setattr(TokenOutput, "__init__", lambda self, **kw: real(self, **kw | {"log_probs": [-0.1]}))
    with pytest.raises(ValueError, match=f"1 log-probs for {len(answer)} tokens"):
        roll_out(tokenizer, [answer])


@pytest.mark.parametrize("asked", [True, 0])
@pytest.mark.parametrize("stop_reason", ["completed", "aborted"])
@pytest.mark.parametrize("sent", [None, math.nan])
def test_a_server_that_sends_no_log_probs_when_asked_raises(
    roll_out, tokenizer, answer, monkeypatch, asked, stop_reason, sent
):
    """Zeros instead would mean that the policy had been certain of every token."""
    from verl.workers.rollout.replica import TokenOutput

    real, log_probs = TokenOutput.__init__, sent and [sent] * len(answer)
    monkeypatch.setattr(TokenOutput, "__init__", lambda self, **kw: real(self, **kw | {"log_probs": log_probs}))
    with pytest.raises(ValueError, match="sent 0 log-probs for" if sent is None else "not finite, such as nan"):
        roll_out(tokenizer, [(answer, stop_reason, {})], logprobs=asked)


def test_a_repeatable_run_seeds_each_turn_by_its_place(roll_out, tokenizer, encode, answer):
    def seeds(uid, session, **settings):
        settings = {"prompt": {"uid": uid, "session_id": session}, "repeatable": True} | settings
        _, server, _ = roll_out(tokenizer, [encode(CALL), answer], ["2"], **settings)
        return [call.get("seed") for call in server.calls]

    first = seeds("a", 0)
    assert seeds("a", 0) == first and all(0 <= seed < 2**63 for seed in first)
    assert len({*first, *seeds("a", 1), *seeds("b", 0), *seeds("a", 0, seed=1)}) == 8  # `rollout.seed` counts as well
    assert seeds("a", 0, repeatable=False) == [None, None]


RESULTS = st.one_of(
    st.text(max_size=40),
    st.builds(
        lambda status, out, err: RunResult(status, out, err, None, 0.0, 0.0, 1, "x"),
        st.sampled_from(["ok", "code_error", "timeout"]),
        st.text(max_size=40),
        st.text(max_size=40),
    ),
    st.just(FAILURE),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    bodies=st.lists(st.lists(st.integers(3, 464), max_size=12), min_size=1, max_size=6),
    ends=st.lists(st.sampled_from(["call", "call", "stop only", "end token", "nothing"]), min_size=6, max_size=6),
    results=st.lists(RESULTS, min_size=6, max_size=6),
    response_length=st.integers(1, 90),
    max_tool_calls=st.integers(0, 4),
    max_tool_response_tokens=st.integers(1, 20),
)
def test_whatever_happens_tokens_mask_and_log_probs_stay_true(
    roll_out, tokenizer, bodies, ends, results, response_length, max_tool_calls, max_tool_response_tokens
):
    start, stop = tokenizer.convert_tokens_to_ids(["<code>", "</code>"])
    finish = {"call": [stop], "stop only": [stop], "end token": [tokenizer.eos_token_id]}
    turns = []
    for body, end in zip(bodies, ends, strict=False):
        tail = finish.get(end, [20] * response_length)  # without a stop, vLLM continues to max_tokens
        turns.append([start] * (end == "call") + body + tail)
    turns.append([20] * response_length)

    episode, server, sandbox = roll_out(
        tokenizer,
        turns,
        results,
        response_length=response_length,
        max_tool_calls=max_tool_calls,
        max_tool_response_tokens=max_tool_response_tokens,
    )

    ids, mask, log_probs = episode.row.ids, episode.row.mask, episode.row.log_probs
    spans = episode.row.model_spans
    assert len(ids) == len(mask) == len(log_probs) <= response_length
    # What the model sampled is there as it was sent, in order, and nothing else has mask 1.
    assert [ids[a:b] for a, b in spans] == server.sent
    covered = [i for a, b in spans for i in range(a, b)]
    assert covered == [i for i, m in enumerate(mask) if m == 1]
    assert [log_probs[i] for i in covered] == [-(k + 1) / 1000 for k in range(len(covered))]
    assert all(p == 0.0 for p, m in zip(log_probs, mask, strict=True) if m == 0)
    # Between the spans stand whole interpreter blocks.
    for (_, end), (begin, _) in itertools.pairwise(spans):
        block = tokenizer.decode(ids[end:begin])
        assert block.startswith("\n<interpreter>\n") and block.endswith("\n</interpreter>\n")
    # Every turn saw all that came before, and was asked for no more than what was left.
    for call, (begin, _) in zip(server.calls, spans, strict=True):
        assert call["prompt_ids"] == episode.row.prompt_ids + ids[:begin]
        assert call["max_tokens"] == response_length - begin
    failed = episode.finish_reason == "sandbox_failure"
    assert len(sandbox.codes) == episode.use.calls + failed <= max_tool_calls
    assert episode.use.errors["timeout"] <= episode.use.failed <= episode.use.calls
    assert episode.finish_reason in ("answer", "max_turns", "max_tokens", "malformed_limit", "sandbox_failure")
    assert episode.is_truncated == (episode.finish_reason == "max_tokens")
    assert (episode.finish_reason == "answer") == (ids[-1] == tokenizer.eos_token_id and mask[-1] == 1)
    assert episode.row.num_turns == 2 * len(spans)  # user, then model and tool alternately
