"""Check the tasks of a data set, or score the episodes of a run again. Neither needs a model.

    retool environments validate rl_train.parquet --environment terminal
    retool environments reverify outputs/my_run --domain terminal

`validate` plays each row's reference solution, which must score 1, and nothing at all, which must score less. It prints
a table by domain, kind and difficulty, and each row that is wrong. `reverify` scores stored episodes again, by the
evidence in the records or by their text, and prints each one whose score is another. Both end with exit code 1 if they
find something, and start a sandbox for themselves unless you name one by --sandbox or SANDBOX_URL.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from verl_ext.runs import jsonl, parquet
from verl_ext.runs.folder import training_folder
from verl_ext.settings import CONFIGS, compose_run

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_ext.environments.reverify import Again
    from verl_ext.environments.validation import Checked

SHOWN = 20  # rows that are listed with all that was said; of others one line each
SANDBOX = {"timeout_s": 30, "memory_limit_mb": 1024, "max_concurrency": 64, "queue_timeout_s": 120}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="retool environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    validate = commands.add_parser("validate", help="check that tasks can be solved, and are not solved by nothing")
    validate.add_argument("data", type=Path, nargs="+", metavar="DATA", help="parquet or JSONL files of rows")
    validate.add_argument("--environment", default="terminal", help="name, or YAML as retool.environment (terminal)")
    validate.add_argument("--limit", type=int, help="check only so many rows, evenly spaced")
    validate.add_argument("--repeat", type=int, default=1, help="times to play each reference solution (1)")
    reverify = commands.add_parser("reverify", help="score the episodes of a run again")
    reverify.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, an evaluation or the quickstart")
    reverify.add_argument("--step", type=int, help="all by default")
    reverify.add_argument("--domain", help="all by default")
    for command in (validate, reverify):
        command.add_argument("--config", help="a run's YAML: a name in configs/, or a path")
        command.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of --config")
        command.add_argument("--sandbox", metavar="URL", help="a sandbox server (default: $SANDBOX_URL, or a new one)")
        command.add_argument("--parallel", type=int, default=4 * (os.cpu_count() or 1), help="rows at once")
    arguments = parser.parse_args(argv)
    limit = getattr(arguments, "limit", None)
    if arguments.parallel < 1 or (limit is not None and limit < 1):
        parser.error("--parallel and --limit: expected at least 1")
    try:
        with _sandbox(arguments.sandbox) as url:
            return _validate(arguments, url) if arguments.command == "validate" else _reverify(arguments, url)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _validate(arguments: argparse.Namespace, url: str) -> int:
    from verl_ext.environments.shared_client import shared_client
    from verl_ext.environments.validation import Validator  # verl, 3 s

    config = _config(arguments.config, arguments.set, url, arguments.environment)
    rows = [(f"{path}, row {number}", row) for path in arguments.data for number, row in enumerate(_rows(path))]
    if not rows:
        raise ValueError(f"{', '.join(map(str, arguments.data))} has no rows.")
    if arguments.limit and arguments.limit < len(rows):
        rows = [rows[number * len(rows) // arguments.limit] for number in range(arguments.limit)]
    validator = Validator.of_run(config, _tools(config), repeat=arguments.repeat)

    async def check() -> "list[Checked]":
        found, progress = [], tqdm(total=len(rows), desc="validate", unit=" rows", mininterval=1)
        async for each in validator.check_all(rows, at_once=arguments.parallel):
            found.append(each)
            progress.set_postfix_str(f"{sum(bool(one.wrong) for one in found)} wrong", refresh=False)
            progress.update()
        progress.close()
        await shared_client(config.retool.sandbox).aclose()
        return found

    checked = asyncio.run(check())
    print(table_of(checked))
    wrong = sorted((each for each in checked if each.wrong), key=lambda each: each.where)
    for number, each in enumerate(wrong):
        print(f"{each.where} ({each.name}): {'; '.join(each.wrong)}")
        for kind, said in each.said.items() if number < SHOWN else ():
            print(f"  {kind}: " + said.strip().replace("\n", "\n    "))
    return 1 if wrong else 0


def table_of(checked: "Sequence[Checked]") -> str:
    """Return the counts of checked rows by domain, kind and difficulty."""
    groups = sorted({each.group for each in checked})
    parts = [(group, [each for each in checked if each.group == group]) for group in groups]
    lines = []
    for group, part in [*parts, (("all", "", ""), checked)]:
        unsolved = sum("right" not in each.scores and not each.error for each in part)
        lines.append((*group, *map(str, (len(part), sum(bool(each.wrong) for each in part), unsolved))))
    return _aligned([("domain", "kind", "difficulty", "rows", "wrong", "no reference"), *lines])


def _reverify(arguments: argparse.Namespace, url: str) -> int:
    from verl_ext.environments.reverify import Reverifier, judged  # verl, 3 s
    from verl_ext.environments.shared_client import shared_client

    run = training_folder(arguments.run, "rl", "evaluation")
    config = arguments.config or str(run / "hydra" / "config.yaml")
    config = _config(config, arguments.set, url)
    reverifier = Reverifier(config, _tools(config))

    async def score() -> "list[Again]":
        found, progress = [], tqdm(desc="reverify", unit=" episodes", mininterval=1)
        rows = judged(run, step=arguments.step, domain=arguments.domain)
        while some := list(islice(rows, arguments.parallel)):
            found += await asyncio.gather(*map(reverifier.again, some))
            progress.update(len(some))
        progress.close()
        await shared_client(config.retool.sandbox).aclose()
        return found

    if not (found := asyncio.run(score())):
        raise ValueError(f"{run} has no judged episodes of this step and domain. See retool records show.")
    kinds = ("equal", "changed", "not possible")
    counts = {domain: Counter(each.verdict for each in found if each.domain == domain) for domain in _domains(found)}
    print(
        _aligned(
            [("domain", *kinds), *((name, *(str(count[kind]) for kind in kinds)) for name, count in counts.items())]
        )
    )
    for each in found:
        if each.verdict == "changed":
            print(f"changed: {each.name}: {each.before:g} -> {each.after:g} ({each.why})")
    for why, number in Counter(each.why for each in found if each.after is None).most_common(5):
        print(f"not possible: {number} episodes: {why}")
    return 1 if any(each.verdict == "changed" for each in found) else 0


def _domains(found: "Iterable[Again]") -> list[str]:
    return sorted({each.domain for each in found})


@contextlib.contextmanager
def _sandbox(url: str | None) -> Iterator[str]:
    """Yield the address of the sandbox that is named, or of a new one that lives as long as the block."""
    from verl_ext.sandbox.launch import running_server

    if url := url or os.environ.get("SANDBOX_URL"):
        yield url
        return
    with running_server(workers=os.cpu_count() or 1) as url:
        yield url


def _config(name: str | None, overrides: Sequence[str], url: str, environment: str = "python") -> "DictConfig":
    """Return the config of a run, with one sandbox; without a name, the part of one that environments read.

    Raises:
        ValueError: there is no such YAML, or it is none of an RL run.
    """
    import yaml
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if name is None:
        sandbox = SANDBOX | {"urls": [url], "max_calls_per_s": None, "echo_last_expression": False}
        retool = {"environment": yaml.safe_load(environment), "protocol": "hermes", "traceback": "full"}
        return OmegaConf.create({"reward": {}, "retool": retool | {"sandbox": sandbox}})
    file = Path(name).resolve() if name.endswith(".yaml") else CONFIGS / f"{name}.yaml"
    if not file.is_file():
        raise ValueError(f"{file} does not exist. Name a YAML of configs/ or the path of one (--config).")
    try:
        config = compose_run(file.stem, overrides, folder=file.parent, beside=[CONFIGS])
        config.retool.sandbox.urls = [url]
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{file}: {error}") from error
    return config


def _tools(config: "DictConfig") -> list[Any]:
    from omegaconf import OmegaConf

    from verl_ext.environments.toolbox import load_tools

    multi_turn = OmegaConf.select(config, "actor_rollout_ref.rollout.multi_turn")
    return load_tools(multi_turn, Path()) if multi_turn else []


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    return parquet.stream(path) if path.suffix == ".parquet" else jsonl.read(path)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
