"""Try a model's chat template before an agent is trained with it.

    retool gateway audit MODEL_FOLDER
    retool gateway audit MODEL_FOLDER --template FILE.jinja

Prints for each kind of conversation how many rows three turns of the model make: one if the template shows earlier
turns as the model wrote them. Exit code: 0, or 1 if a check fails, because the model would not read what an agent says.
"""

import argparse
import json
import sys
from pathlib import Path

from verl_ext.gateway.audit import audit


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="retool gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("audit", help="try a chat template", description=(__doc__ or "").partition("\n")[0])
    one.add_argument("model", metavar="MODEL_FOLDER", help="a folder with a tokenizer, or a name of the hub")
    one.add_argument(
        "--template", type=Path, metavar="FILE.jinja", help="try this chat template instead of the model's"
    )
    one.add_argument(
        "--kwargs",
        type=json.loads,
        default={},
        metavar="JSON",
        help="data.apply_chat_template_kwargs, such as '{\"enable_thinking\": false}'",
    )
    one.add_argument("--no-tools", dest="tools", action="store_false", help="the agent sends no tools")
    args = parser.parse_args()

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        if args.template:
            tokenizer.chat_template = args.template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(f"{args.model}: {error}")
    if not tokenizer.chat_template:
        parser.error(f"{args.model} has no chat template. Use the tokenizer of a chat model, or --template.")
    findings = audit(tokenizer, args.kwargs, tools=args.tools)
    print(*findings, sep="\n")
    return int(any(finding.level == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
