"""Evaluate a model with tools, through the agent loop and the reward manager of training.

    # a Hugging Face folder, by vLLM in this process
    retool evaluate --model outputs/qwen2-32b_dapo/merged_step_400 --out outputs/evaluation/dapo
    # the model of an OpenAI-compatible server
    retool evaluate --server http://127.0.0.1:8000/v1 --out outputs/evaluation/served
    # any chat model, with the tools and limits of a run of yours
    retool evaluate --chat https://api.example.org/v1 --served-model NAME --api-key-env KEY \\
        --tokenizer MODEL_FOLDER --concurrency 16 --out outputs/evaluation/other
    # a checkpoint of an SFT or RL run, merged first
    retool evaluate --checkpoint outputs/qwen2-32b_dapo --compare outputs/evaluation/sft
    # only the figures of samples that exist: those of an evaluation, or of a run's last validation
    retool evaluate --samples outputs/run --compare outputs/other_run

The settings come from a run's YAML: protocol and limits from `retool`, lengths from `data`, sampling from `val_kwargs`,
vLLM's from `rollout`. Without --config, this is the run that the model's folder belongs to. For a model without a run
it is {BASE}, fitted to the GPUs of this machine, and you must give --protocol unless the model's chat template shows a
call.

The folder --out gets records/ (each sample when it ends), settings.json, result.json and result.md. The same command
continues an interrupted evaluation. A sample with an infrastructure failure (sandbox, server, verifier) is in
no figure, and the same command tries it again. The exit status is 0 if all samples are judged.
"""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from verl_ext.evaluation.defaults import BASE
from verl_ext.evaluation.options import add_sampling, check_sampling
from verl_ext.evaluation.problems import NAMES
from verl_ext.evaluation.result import make_result, write_result
from verl_ext.evaluation.samples import NoSamples, find_samples
from verl_ext.evaluation.take import KNOWN as KNOWN_OF_SAMPLING
from verl_ext.evaluation.take import take_samples

KNOWN = (*KNOWN_OF_SAMPLING, NoSamples)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        if args.compare:
            find_samples(args.compare)  # if there are none, fail at once and not after hours
        folder = args.samples or take_samples(args)
        result, text = make_result(folder, compared_with=args.compare, draws=args.draws, seed=args.seed)
        out = args.out or (None if args.samples else folder)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            write_result(out, result, text)
    except KNOWN as error:
        raise SystemExit(f"evaluate: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("evaluate: interrupted; the same command continues from here") from None
    print(text)
    if out:
        print(f"{out / 'result.md'}, result.json")
    if not args.samples and result["samples"]["judged"] < result["samples"]["wanted"]:
        raise SystemExit("evaluate: some samples are not judged; the same command tries them again")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="retool evaluate",
        description=(__doc__ or "").replace("{BASE}", BASE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = add_sampling(parser)
    source.add_argument("--samples", type=Path, metavar="PATH", help="existing samples; nothing is generated")
    out = "output folder (default with --checkpoint: RUN/evaluation/global_step_N)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="result or samples to compare with")
    parser.add_argument("--draws", type=int, default=10_000, metavar="N", help="bootstrap resamples (default: 10000)")
    args = parser.parse_intermixed_args(argv)
    args.data = args.data or list(NAMES)
    if not (args.out or args.checkpoint or args.samples):
        parser.error("give --out, the folder for samples and result")
    if args.overrides and args.samples:
        parser.error(f"{args.overrides[0]}: nothing is generated with --samples")
    if args.draws < 1:
        parser.error(f"--draws is {args.draws}: expected at least 1")
    check_sampling(parser, args)
    return args


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what this process started, like Ctrl-C
    main()
