"""Build a tiny model for your own data: a tokenizer of the data's own text, and random weights.

    python data/own/build_model.py --data outputs/mine/data --out outputs/mine/model

Like data/tiny_tools/build_model.py, whose parts it uses, with a larger vocabulary, as many positions as the data needs,
and, with --protocol hermes, a chat template that shows tools in one line each.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
from transformers import GenerationConfig

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tiny_tools")]
from build_model import build_model, train_tokenizer  # noqa: E402

VOCABULARY = 4096
TAGS = {"code": ["<code>", "</code>", "<interpreter>", "</interpreter>"], "hermes": ["<tool_call>", "</tool_call>"]}
TAGS["text"] = []
TOOLS = (  # one line for each tool: name(argument: type, ...): description
    "{%- if tools %}<|im_start|>tools\n{% for tool in tools %}{% set f = tool.function %}{{ f.name }}("
    "{% for name, of in f.parameters.properties.items() %}"
    "{{ name }}: {{ of.type }}{{ ', ' if not loop.last }}{% endfor %}"
    "): {{ f.description }}\n{% endfor %}<|im_end|>\n{% endif %}"
)


def texts(folder: Path) -> Iterator[str]:
    """Yield what stands in the problems and the traces of a folder of data/own/prepare.py."""
    yield from ["system user assistant interpreter tool tools\n"] * 200
    for row in pq.read_table(folder / "rl_train.parquet").to_pylist():
        for message in row["prompt"]:
            yield message["content"]
    for row in pq.read_table(folder / "sft_train.parquet").to_pylist():
        for message in json.loads(row["messages"]):
            yield str(message.get("content") or "")
            for call in message.get("tool_calls") or []:
                function = call.get("function") or call
                if isinstance(function["arguments"], str):  # as OpenAI's API has them
                    function = function | {"arguments": json.loads(function["arguments"])}
                yield json.dumps(function, ensure_ascii=False)
                yield str(function["arguments"].get("code", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that data/own/prepare.py wrote, with traces")
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--protocol", choices=TAGS, default="code", help="retool.protocol (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=4096, help="tokens that fit (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    args = parser.parse_args()
    if not (args.data / "sft_train.parquet").is_file():
        raise SystemExit(f"{args.data} has no traces; a model with random weights cannot learn from rewards alone.")
    tokenizer = train_tokenizer(texts(args.data), VOCABULARY, TAGS[args.protocol])
    tokenizer.model_max_length = args.positions
    if args.protocol == "hermes":
        tokenizer.chat_template = TOOLS + tokenizer.chat_template
    model = build_model(tokenizer, args.seed, positions=args.positions)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(args.out)
    print(f"{args.out}: {len(tokenizer)} tokens, {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
