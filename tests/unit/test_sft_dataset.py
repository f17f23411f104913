import random

import pytest


@pytest.fixture
def make_dataset(tokenizer, tmp_path):
    import pandas as pd
    from omegaconf import OmegaConf

    from verl_ext.sft_dataset import RetoolSFTDataset

    def make(*files_of_rows, max_samples=-1, **settings):
        paths = []
        for rows in files_of_rows:
            paths.append(str(tmp_path / f"{len(paths)}.parquet"))
            pd.DataFrame({"messages": rows}).to_parquet(paths[-1])
        config = {"messages_key": "messages", "max_length": 200, "truncation": "error"} | settings
        files = OmegaConf.create(paths) if len(paths) > 1 else paths[0]
        return RetoolSFTDataset(files, tokenizer, OmegaConf.create(config), max_samples=max_samples)

    return make


def user(text="1+1?"):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def interpreter(text):
    return {"role": "interpreter", "content": text}


TRACE = [user(), assistant("<code>print(1+1)</code>"), interpreter("2"), assistant("\\boxed{2}")]


@pytest.mark.parametrize("kind", ["mental", "tool", "wrong_formula", "repair", "give_up"])
def test_sft_trains_on_the_very_tokens_of_a_rollout(make_dataset, roll_out, tiny_tools, tokenizer, kind):
    rng = random.Random(kind)
    trace = tiny_tools.task.make_trace(tiny_tools.task.make_problem(rng, split="train"), kind, rng)
    turns = [tokenizer.encode(m["content"], add_special_tokens=False) for m in trace if m["role"] == "assistant"]
    turns[-1].append(tokenizer.eos_token_id)
    printed = [m["content"] for m in trace if m["role"] == "interpreter"]
    rollout, *_ = roll_out(tokenizer, turns, printed, question=trace[0]["content"], response_length=160)

    item = make_dataset([trace])[0]
    assert item["input_ids"].tolist() == rollout.prompt_ids + rollout.response_ids
    assert item["loss_mask"].tolist() == [0] * len(rollout.prompt_ids) + rollout.response_mask
    assert item["position_ids"].tolist() == list(range(len(item["input_ids"])))


def test_loss_is_on_the_models_own_text_and_its_end_token_only(make_dataset, tokenizer):
    import torch

    item = make_dataset([TRACE])[0]
    assert {name: value.dtype for name, value in item.items()} == dict.fromkeys(item, torch.int64)
    trained = tokenizer.decode(item["input_ids"][item["loss_mask"] == 1])
    assert trained == "<code>print(1+1)</code>\\boxed{2}<|im_end|>"
    rest = tokenizer.decode(item["input_ids"][item["loss_mask"] == 0])
    assert rest == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n\n<interpreter>\n2\n</interpreter>\n"


def test_a_system_message_belongs_to_the_prompt(make_dataset, tokenizer):
    item = make_dataset([[{"role": "system", "content": "Use code."}, *TRACE]])[0]
    assert tokenizer.decode(item["input_ids"]).startswith("<|im_start|>system\nUse code.<|im_end|>\n<|im_start|>user\n")
    assert int(item["loss_mask"].sum()) == int(make_dataset([TRACE])[0]["loss_mask"].sum())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([user()], r"expected roles assistant.*found \[\]"),
        ([user(), assistant("<code>1</code>"), interpreter("1")], r"found \['assistant', 'interpreter'\]"),
        ([user(), assistant("a"), assistant("b")], r"found \['assistant', 'assistant'\]"),
        ([user(), interpreter("1"), assistant("b")], r"found \['interpreter', 'assistant'\]"),
        ([user(), assistant("a"), user("b"), assistant("c")], r"found \['assistant', 'user', 'assistant'\]"),
        ([assistant("a")], "expected a system or user message first"),
        ([user(), assistant("<code>1</code>"), interpreter(None), assistant("b")], "text from the interpreter.*None"),
        ([user(None), assistant("b")], "text from the user.*None"),
    ],
)
def test_a_bad_row_is_refused_with_its_number_and_the_reason(make_dataset, row, reason):
    with pytest.raises(ValueError, match=f"^SFT row 2 is not a ReTool trace: .*{reason}"):
        make_dataset([TRACE, TRACE], [row, TRACE])  # rows count on over the files


def test_rows_of_all_files_are_there_up_to_max_samples(make_dataset):
    other = [user("2+2?"), assistant("4")]
    assert len(make_dataset([TRACE], [other, other])) == 3
    dataset = make_dataset([TRACE], [other, other], max_samples=2)
    assert len(dataset) == 2 and len(dataset[1]["input_ids"]) < len(dataset[0]["input_ids"])


def test_a_row_that_is_too_long_is_an_error_or_cut_on_the_right(make_dataset):
    whole = make_dataset([TRACE])[0]
    tokens = len(whole["input_ids"])
    assert len(make_dataset([TRACE], max_length=tokens)[0]["input_ids"]) == tokens

    dataset = make_dataset([TRACE, TRACE], max_length=tokens - 3)
    with pytest.raises(ValueError, match=f"SFT row 1 has {tokens} tokens, more than data.max_length={tokens - 3}"):
        dataset[1]

    cut = make_dataset([TRACE], max_length=tokens - 3, truncation="right")[0]
    for name, value in cut.items():
        assert value.tolist() == whole[name].tolist()[:-3]


def test_a_truncation_that_would_cut_the_prompt_is_refused(make_dataset):
    with pytest.raises(ValueError, match="data.truncation is 'left'"):
        make_dataset([TRACE], truncation="left")
