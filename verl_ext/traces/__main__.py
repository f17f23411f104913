"""Make, check and select traces for SFT: the cold start.

retool traces sample --model TEACHER --config tiny_dapo --data problems.parquet --n 4 --out samples
retool traces check FILE --config tiny_dapo --out kept.parquet
retool traces convert reasoning.jsonl --chat URL --config tiny_dapo --out kept.parquet
retool traces questions corpus.jsonl --out questions.parquet
retool traces from-run RUN --out kept.parquet
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

COMMANDS = {  # name -> (module, what it does); a module is imported when its command is given
    "sample": ("sample", "let a teacher solve problems with the tools and limits of a run"),
    "convert": ("convert", "let a teacher put programs into text reasoning, run them, and check the traces"),
    "check": ("check", "keep the traces of files that SFT may learn from, and say why not the others"),
    "questions": ("questions", "make questions for the environment search that need several documents of a corpus"),
    "from-run": ("from_run", "make traces of the records of a finished run, and check them"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="retool traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lines = "\n".join(f"{name}: {what}" for name, (_, what) in COMMANDS.items())
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=f"{lines}; COMMAND --help says more")
    argv = sys.argv[1:] if argv is None else list(argv)
    known, rest = parser.parse_args(argv[:1]), argv[1:]
    module = importlib.import_module(f"verl_ext.traces.{COMMANDS[known.command][0]}")
    own = argparse.ArgumentParser(
        prog=f"retool traces {known.command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(own)
    args = own.parse_intermixed_args(rest)
    if hasattr(args, "check_options"):
        args.check_options(own, args)
    try:
        module.run(args)
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"traces: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("traces: interrupted; the same command continues with what a teacher has said") from None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what this process started, like Ctrl-C
    main()
