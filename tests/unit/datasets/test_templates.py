"""Chat templates that refuse a conversation, open the thinking, have no generation prompt, or write today's date."""

import copy
import re

import pytest

from verl_ext.protocols.base import TEMPLATE_DAY, checked_kwargs, render

USER = [{"role": "user", "content": "1+1?"}]
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
ALTERNATE = (
    "{% for m in messages %}{% if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
)
NEEDS_USER = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user') }}{% endif %}"
)
BREAKS = "{% for m in messages %}{{ 'x' * (m.content + 1) }}{% endfor %}"  # a TypeError of the template's author


@pytest.fixture
def with_template(tokenizer):
    def make(change):
        other = copy.deepcopy(tokenizer)
        other.chat_template = change(tokenizer.chat_template)
        return other

    return make


@pytest.mark.parametrize(
    ("refusal", "messages", "told"),
    [
        (NO_SYSTEM, [{"role": "system", "content": "?"}, *USER], "roles system, user: System role not supported"),
        (ALTERNATE, USER * 2, "roles user, user: Conversation roles must alternate"),
        (NEEDS_USER, [{"role": "system", "content": "?"}], "roles system: No user"),
        (BREAKS, USER, "roles user: "),
    ],
)
def test_a_template_that_refuses_a_conversation_says_which_roles(with_template, refusal, messages, told):
    other = with_template(lambda template: refusal + template)
    with pytest.raises(ValueError, match=f"the chat template refuses messages of the {told}"):
        render(other, messages)


def test_a_template_without_a_generation_prompt_is_refused(with_template, tokenizer, qwen_tokenizer):
    assert checked_kwargs(tokenizer, {"a": 1}) == {"a": 1} and checked_kwargs(qwen_tokenizer) == {}
    other = with_template(lambda template: template.replace("add_generation_prompt", "false"))
    with pytest.raises(
        ValueError, match="no generation prompt: after a question it has '<.im_end.>', before an answer"
    ):
        checked_kwargs(other)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}",  # Mistral's: the user's end begins the assistant's turn
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<|final|>{% endif %}{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",  # gpt-oss: the model chooses a channel
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    ],
)
def test_other_ways_to_begin_an_answer_are_taken(with_template, template):
    assert checked_kwargs(with_template(lambda _: template)) == {}


DATED = "{{ strftime_now('%d %b %Y') }}{% if date_string is defined %}{{ date_string }}{% endif %}"


def test_a_template_that_asks_for_the_day_gets_the_same_in_sft_and_rollout(
    with_template, roll_out, make_dataset, encode
):
    """It reads the clock through transformers: a day later the prompt would be different."""
    other = with_template(lambda template: DATED + template)
    assert render(other, USER, {"date_string": "!"}).startswith(TEMPLATE_DAY.strftime("%d %b %Y") + "!")
    episode, *_ = roll_out(other, [encode("\\boxed{2}") + [other.eos_token_id]])
    row = [*USER, {"role": "assistant", "content": "\\boxed{2}"}]
    item = make_dataset([row], using=other)[0]
    assert item["input_ids"].tolist() == episode.row.prompt_ids + episode.row.ids
    assert re.match("26 Jul 2024<", other.decode(episode.row.prompt_ids))


def test_a_prompt_that_the_template_refuses_is_named_by_the_rollout(with_template, roll_out):
    other = with_template(lambda template: ALTERNATE + template)
    with pytest.raises(ValueError, match="the chat template rejects the prompt prompt-0, .*must alternate"):
        roll_out(other, [], prompt={"raw_prompt": USER * 2})


@pytest.fixture
def opening(with_template):
    return with_template(lambda template: template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))


def called(content, answer):
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "1"}}}
    return [
        *USER,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": answer},
    ]


@pytest.mark.parametrize("protocol", ["code", "hermes"])
def test_a_trace_behind_a_prompt_that_opens_the_thinking_does_not_open_it_again(
    opening, make_dataset, roll_out, protocol
):
    def tokens(content, answer):
        item = make_dataset([called(content, answer)], using=opening, protocol=protocol, max_length=900)[0]
        return item["input_ids"].tolist(), item["loss_mask"].tolist()

    # Between <code> tags, all of a response is one turn, which has closed the thinking of its prompt.
    answer = "\nb\n</think>\n\\boxed{2}" if protocol == "hermes" else "\\boxed{2}"
    ids, mask = tokens("<think>\na\n</think>\n", f"<think>{answer}" if protocol == "hermes" else answer)
    assert (ids, mask) == tokens("a\n</think>\n", answer.lstrip("\n"))
    assert opening.decode(ids).count("<think>") == opening.decode(ids).count("</think>") == 1 + (protocol == "hermes")
    turns, at = [[]], None
    for token, own in zip(ids, mask, strict=True):
        turns += [[]] if own != at and own else []
        turns[-1] += [token] if own else []
        at = own
    episode, *_ = roll_out(opening, turns[1:], ["1"], protocol=protocol, response_length=900)
    assert ids == episode.row.prompt_ids + episode.row.ids and episode.use.calls == 1


@pytest.mark.parametrize("protocol", ["code", "hermes"])
def test_a_trace_without_thinking_behind_such_a_prompt_is_refused(opening, make_dataset, protocol):
    with pytest.raises(ValueError, match="SFT row 0 .*the chat template opens <think>, but the turn has no </think>"):
        make_dataset([called("", "\\boxed{2}")], using=opening, protocol=protocol, max_length=900)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("which", ["tokenizer", "opening"])
def test_thinking_in_a_key_of_its_own_is_trained_on(make_dataset, opening, tokenizer, key, which):
    using = {"tokenizer": tokenizer, "opening": opening}[which]
    row = called(None, "\\boxed{2}")
    row[1][key], row[3][key] = "I compute.\n", "So 2."
    item = make_dataset([row], using=using, protocol="hermes", max_length=900)[0]
    trained = using.decode(item["input_ids"][item["loss_mask"] == 1])
    opened = "<think>\n" if which == "tokenizer" else ""
    call = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "1"}}\n</tool_call>'
    assert trained == (
        f"{opened}I compute.\n</think>\n\n{call}<|im_end|>{opened}So 2.\n</think>\n\n\\boxed{{2}}<|im_end|>"
    )


def test_thinking_that_the_content_has_too_stands_there_once(make_dataset, tokenizer):
    row = [*USER, {"role": "assistant", "content": "<think>a</think>2", "reasoning_content": "a"}]
    item = make_dataset([row])[0]
    assert tokenizer.decode(item["input_ids"][item["loss_mask"] == 1]) == "<think>a</think>2<|im_end|>"


@pytest.mark.parametrize(
    ("refusal", "first", "told"),
    [
        (NO_SYSTEM, [{"role": "system", "content": "?"}, *USER], "System role not supported"),
        (ALTERNATE, USER * 2, "must alternate"),
        (NEEDS_USER, [{"role": "system", "content": "?"}], "No user"),
    ],
)
def test_a_row_that_the_template_refuses_is_named_or_left_out(
    with_template, make_dataset, refusal, first, told, caplog
):
    other, good = with_template(lambda template: refusal + template), [*USER, {"role": "assistant", "content": "2"}]
    rows = [good, [*first, good[-1]], good]
    with pytest.raises(ValueError, match=f"SFT row 1 is not a ReTool trace: the chat template refuses.*{told}"):
        make_dataset(rows, using=other)
    assert len(make_dataset(rows, using=other, bad_rows="drop")) == 2
    assert "left out 1 of 3 SFT rows: row 1: the chat template refuses" in caplog.text


def test_a_row_without_messages_is_named_and_one_of_json_text_is_read(make_dataset):
    import json

    good = json.dumps([*USER, {"role": "assistant", "content": "2"}])
    assert make_dataset([good])[0]["input_ids"].tolist() == make_dataset([json.loads(good)])[0]["input_ids"].tolist()
    for bad, told in (
        (None, "expected a list of messages, each with a role and a content, but found None"),
        ("[1]", "expected a list of messages"),
        ("{}", "expected a list of messages"),
        ("[{]", "the messages are no JSON"),
    ):
        with pytest.raises(ValueError, match=f"SFT row 1 is not a ReTool trace: {told}"):
            make_dataset([good, bad])
        assert len(make_dataset([good, bad], bad_rows="drop")) == 1


ASK = {
    "name": "ask",
    "description": "?",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": kind, "description": "?"} for name, kind in (("n", "integer"), ("s", "string"))},
        "required": ["n"],
    },
}


@pytest.fixture
def written_calls(tokenizer, tmp_path):
    """The calls that the model writes in traces, a row for each of the arguments."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq
    from omegaconf import OmegaConf

    from verl_ext.datasets.sft import RetoolSFTDataset

    def calls(*arguments, schema=ASK, as_text=False):
        rows = []
        for each in arguments:
            call = {"type": "function", "function": {"name": "ask", "arguments": each}}
            messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
            messages += [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "1"}]
            rows.append({"messages": json.dumps(messages) if as_text else messages, "tools": json.dumps([schema])})
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        config = {"messages_key": "messages", "max_length": 900, "truncation": "error"}
        config |= {"retool": {"protocol": "hermes", "bad_rows": "error"}}
        dataset = RetoolSFTDataset(str(tmp_path / "rows.parquet"), tokenizer, OmegaConf.create(config))
        texts = [tokenizer.decode(item["input_ids"]) for item in dataset]
        return [text.partition('"arguments": ')[2].partition("}\n</tool_call>")[0] for text in texts]

    return calls


def test_integers_of_a_struct_stay_integers_beside_a_null(written_calls):
    """In pandas, 2 in a column with a null is 2.0, which the tool does not accept as an integer either."""
    assert written_calls({"n": 2, "s": None}, {"n": 2**60 + 1, "s": "a"}) == [
        '{"n": 2}',
        f'{{"n": {2**60 + 1}, "s": "a"}}',
    ]
    optional = ASK | {"parameters": ASK["parameters"] | {"required": []}}
    assert written_calls({"n": 2, "s": None}, {"n": None, "s": "a"}, schema=optional) == ['{"n": 2}', '{"s": "a"}']


def test_a_null_that_is_meant_stays(written_calls):
    """In JSON text each null is meant; in a struct, which has every key of its column, only one that the tool needs."""
    import json

    free = {"n": {"type": "null", "description": "?"}, "s": {"type": "any", "description": "?"}}
    needs = ASK | {"parameters": ASK["parameters"] | {"properties": free}}
    null = {"n": None, "s": None}
    assert written_calls(json.dumps(null), schema=needs) == ['{"n": null, "s": null}']
    assert written_calls(null, schema=needs, as_text=True) == ['{"n": null, "s": null}']
    assert written_calls(null, null | {"s": "a"}, schema=needs) == ['{"n": null}', '{"n": null, "s": "a"}']
    with pytest.raises(ValueError, match="SFT row 0 .*'n' must be integer, got null"):
        written_calls(null, {"n": 1, "s": "a"})
    with pytest.raises(ValueError, match="SFT row 0 .*'s' must be string, got null"):  # as a rollout would raise
        written_calls(json.dumps({"n": 1, "s": None}))


def test_rows_that_a_cut_leaves_without_a_token_to_train_on_are_left_out(make_dataset, caplog):
    """A batch of such rows has no loss: 0 of 0 tokens is NaN."""
    good, long = [*USER, {"role": "assistant", "content": "2"}], [{"role": "user", "content": "1+" * 60}, USER[0]]
    long[1] = {"role": "assistant", "content": "2"}
    prompt = int((make_dataset([long])[0]["loss_mask"] == 0).sum())
    dataset = make_dataset([good, long, long], truncation="right", max_length=prompt)
    assert len(dataset) == 1 and all(item["loss_mask"].any() for item in dataset)
    assert "left out 2 of 3 SFT rows: row 1: has a prompt of" in caplog.text
    assert (
        dataset.dropped[0][1] == f"has a prompt of {prompt} tokens: data.max_length={prompt} leaves no room to answer"
    )
    dataset = make_dataset([good, long], truncation="right", max_length=prompt + 1)
    assert len(dataset) == 2 and dataset.dropped == [] and int(dataset[1]["loss_mask"].sum()) == 1
    with pytest.raises(ValueError, match="None of 1 SFT rows"):
        make_dataset([long], truncation="right", max_length=prompt)


def test_a_trace_that_fits_by_its_bytes_is_not_tokenised_to_know_it(make_dataset, monkeypatch):
    from verl_ext.protocols.base import SegmentEncoder

    row = [*USER, {"role": "assistant", "content": "2"}]
    length = sum(len(part) for segment in make_dataset([row]).segments[0] for part in segment.parts)
    encoded, real = [], SegmentEncoder.encode
    monkeypatch.setattr(SegmentEncoder, "encode", lambda self, parts: encoded.append(parts) or real(self, parts))
    make_dataset([row], max_length=length)
    assert encoded == []
    make_dataset([row], max_length=length - 1)
    assert encoded
