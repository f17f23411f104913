"""Build the tokenizer and the random initial model of the tiny tool task, with no hub.

    python data/tiny_tools/build_model.py --out outputs/quickstart/model --seed 0

The tokenizer is a byte-level BPE in which every digit and operator is a separate token, so that numbers are copied
digit by digit. The model is a Qwen2 of two layers with about 390,000 parameters in fp32.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from task import TRACE_MIX, make_problem, make_trace
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PROTOCOL_TOKENS = ["<code>", "</code>", "<interpreter>", "</interpreter>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(vocab_size: int = 512, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the task's own text; it has at most `vocab_size` tokens."""
    rng = random.Random(seed)
    corpus = ["system user assistant interpreter\n"] * 200
    for _ in range(3000):
        problem = make_problem(rng, split="train")
        kind = rng.choice(list(TRACE_MIX))
        corpus += [message["content"] for message in make_trace(problem, kind, rng)]
    return train_tokenizer(corpus, vocab_size, PROTOCOL_TOKENS)


def train_tokenizer(corpus: Iterable[str], vocab_size: int, tags: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens, among them `tags`, on a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]|[()+*/%{}\-]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(tags),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, *, positions: int = 1024) -> Qwen2ForCausalLM:
    """Build a Qwen2 with random weights, for at most `positions` tokens.

    Heads are 32 wide because vLLM's CPU attention refuses 16 (0.28.0).
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(args.out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.out}: {len(tokenizer)} tokens, {parameters:,} parameters")


if __name__ == "__main__":
    main()
