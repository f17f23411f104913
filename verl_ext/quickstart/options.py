"""The options of the quickstart, checked before anything is installed. Standard library only, Python 3.8 or newer.

scripts/quickstart.sh runs this file with whatever Python is there, so that a wrong option does not first install 2.7
GB; `verl_ext/quickstart/pipeline.py` then reads the same options with it.
"""

import argparse
import json
from pathlib import Path
from typing import List, Optional  # noqa: UP035  a Python that is older than .venv's may run this file

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = (ROOT if (ROOT / "configs").is_dir() else Path.cwd()) / "outputs"  # an installed wheel has no such root
DEFAULT_OUT = {"tiny": OUTPUTS / "quickstart", "small": OUTPUTS / "small"}  # by --model
STAGES = ("data", "sft", "merge", "rl", "eval", "report")
JOURNAL = "stages.json"  # in a quickstart's folder


def parse_options(argv: Optional[List[str]] = None) -> argparse.Namespace:  # noqa: UP006, UP045
    """Parse the options; `out` and `source` become absolute, `out` is None if it follows from `source` (--from)."""
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        description="Teach a language model to use a code interpreter: SFT, DAPO RL, evaluation and report, "
        "with the real verl and vLLM, on a CPU. A second call keeps finished stages and resumes the interrupted one.",
    )
    parser.add_argument(
        "--model",
        default="tiny",
        help="tiny (default): 390,000 random parameters, takes minutes; small: SmolLM2-135M-Instruct with weights "
        "from 4 bits, takes about an hour; or a Hugging Face folder or hub name",
    )
    own = parser.add_argument_group("what is yours").add_argument
    own("--data", type=Path, metavar="FILE", help="your problems with answers: JSONL or parquet")
    own("--traces", type=Path, metavar="FILE", help="traces for SFT; the tiny model needs them with --data")
    own("--tools", type=Path, metavar="FILE.py", help="functions that the model can call; needs --data and traces")
    what = "function of (episode, row), added to the reward; FILE.py alone means all of its public functions"
    own("--reward", action="append", default=[], metavar="FILE.py:NAME[=WEIGHT]", help=what)
    parser.add_argument("--stage", choices=STAGES, action="append", help="run only this stage (may be repeated)")
    parser.add_argument("--fresh", action="store_true", help="delete the output folder first")
    parser.add_argument(
        "--out",
        type=Path,
        help="default: outputs/quickstart; with --model small: outputs/small; with --from: FOLDER-2, FOLDER-3, ...",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="start another RL run, in a separate folder, from the data and the SFT of this quickstart",
    )
    parser.add_argument(
        "--compare",
        choices=("text",),
        help="text: the same without the tool as well, from its own SFT, in OUT-text, and a page with both",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data, initial weights and sampling (default: 0)")
    for option, metavar, what in (
        ("--prepare", "ARG", "argument of data/tiny_tools/prepare.py or data/small/prepare.py"),
        ("--sft", "KEY=VALUE", "Hydra override of configs/tiny_sft.yaml or smollm2_sft.yaml"),
        ("--rl", "KEY=VALUE", "Hydra override of configs/tiny_dapo.yaml or smollm2_dapo.yaml"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=what)
    args = parser.parse_args(argv)
    for option in ("sft", "rl"):
        for override in getattr(args, option):
            if "=" not in override and not override.startswith("~"):
                parser.error(f"--{option} {override}: expected a Hydra override of the form KEY=VALUE")
    args.model_path = "" if args.model in DEFAULT_OUT else args.model
    if args.model_path:
        args.model = "small"  # whose settings an existing model gets
    args.out = args.out.resolve() if args.out else None
    _check_own(parser, args)
    if args.source:
        _check_source(parser, args)
    elif not args.out:
        args.out = OUTPUTS / args.data.stem if args.data else DEFAULT_OUT[args.model]
    return args


def _check_source(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command if there is nothing to start from, or another option contradicts it."""
    args.source = args.source.resolve()
    if not (args.source / JOURNAL).is_file():
        parser.error(f"--from {args.source}: expected the folder of a quickstart, but it has no {JOURNAL}")
    if args.compare:
        parser.error("--from starts from an SFT with the tool, but --compare text needs another SFT; use --out")
    if args.data or args.prepare or args.sft:
        parser.error("--from reuses data and SFT as they are: --data, --prepare and --sft cannot be set with it")
    if args.out == args.source:
        parser.error(f"--from {args.source} and --out are the same folder; the new run needs another one")
    if args.out in args.source.parents:
        parser.error(f"--out {args.out} contains the folder of --from; the new run needs another one")


def _check_own(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command if the user's files are missing, or do not go together."""
    for name in ("data", "traces", "tools"):
        path = getattr(args, name)
        if path and not path.exists():
            parser.error(f"--{name} {path}: there is no such file as {path.absolute()}")
        setattr(args, name, path.resolve() if path else None)
    for each in args.reward:
        file, colon, _ = each.partition(".py:")
        if not Path(f"{file}.py" if colon else file).is_file():
            parser.error(f"--reward {each}: there is no such file; expected FILE.py or FILE.py:NAME")
    if not args.data:
        if args.traces or (args.tools and not args.source):
            parser.error("--traces and --tools need --data, the problems that they are for")
        return
    if args.source:  # `_check_source` says why not
        return
    if args.compare:
        parser.error("--compare text has no SFT without the tool for your own data. Run RL twice, once with +tool=none")
    needs = "what a model must have seen before rewards can teach it. A teacher makes them of your problems: "
    needs += "retool traces sample --help"
    if args.model == "tiny" and not args.traces:
        parser.error(f"the tiny model starts from random weights: give --traces, {needs}. Or take --model small")
    if args.tools and not args.traces and not args.model_path:
        parser.error(f"the small model has never called your tools: give --traces, {needs}")


def model_of(args: argparse.Namespace) -> str:
    """Return `--model`, or that of the run that `--from` names; "" if that has no SFT, which the pipeline reports."""
    if not args.source:
        return args.model
    entries = json.loads((args.source / JOURNAL).read_text())
    return next((each["settings"].get("model", "tiny") for each in entries if each["stage"] == "sft"), "")


if __name__ == "__main__":
    print(model_of(parse_options()))
