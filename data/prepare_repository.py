"""Make repository tasks: issues of a git repository, whose hidden tests fail before the fix and pass after it.

    python data/prepare_repository.py from-sdists parse --last 8 --out outputs/repository
    python data/prepare_repository.py from-git REPOSITORY --out outputs/repository
    python data/prepare_repository.py from-json INSTANCES.jsonl --repo REPOSITORY --out outputs/repository

    retool.environment: {name: repository, folder: outputs/repository/repos}

`from-git` takes each commit that changes Python sources and tests, `from-sdists` each release of a package as one
commit, and `from-json` instances in SWE-bench's fields. The tests of a fix run three times before and three times after
it, in boxes of a sandbox whose Python has pytest and does not have the package. What fails always before and passes
always after it is FAIL_TO_PASS, what passes always PASS_TO_PASS. A change is dropped, with the reason, if no test is
FAIL_TO_PASS, or if the fix could be read in the sandbox or in what is left of the repository's history.
"""

import argparse
import asyncio
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
from repositories import Measure, Outcome, changes
from sdists import NotDownloaded, commit_releases, releases, sdist

from verl_ext.runs import parquet
from verl_ext.sandbox.client import SandboxClient
from verl_ext.sandbox.launch import running_server
from verl_ext.tasks.instance import Instance
from verl_ext.tasks.repository import to_row


def from_git(args: argparse.Namespace) -> tuple[Path, list[Instance]]:
    """Return the repository and its changes."""
    return args.repo, changes(args.repo, args.name or args.repo.resolve().name, args.last)


def from_sdists(args: argparse.Namespace) -> tuple[Path, list[Instance]]:
    """Download releases and commit each, unless an earlier call did; return the repository and its changes."""
    repo = args.out / "histories" / args.package
    if repo.exists():
        print(f"{repo}: the releases of an earlier call; remove it for others", flush=True)
        return repo, changes(repo, args.package, None)
    versions = args.versions.split(",") if args.versions else releases(args.package, args.last or 8)
    trees = []
    for version in versions:
        print(f"{args.package} {version}: downloading", flush=True)
        trees.append((version, *sdist(args.package, version)))
    part = repo.with_name(f"{repo.name}.part")  # so that an interruption leaves no half of it
    shutil.rmtree(part, ignore_errors=True)
    commit_releases(part, args.package, trees)
    part.rename(repo)
    return repo, changes(repo, args.package, None)


def from_json(args: argparse.Namespace) -> tuple[Path, list[Instance]]:
    """Return the repository and the instances of a file with one in each line, or with a list of them."""
    text = args.instances.read_text(encoding="utf-8")
    values = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    return args.repo, [Instance.from_json(each) for each in values]


async def measure(
    repo: Path, instances: list[Instance], url: str, folder: Path, args: argparse.Namespace
) -> list[Outcome]:
    """Return what becomes of each instance, in order, and print it as it is known."""
    client = SandboxClient([url])
    measure = Measure(client, folder, memory_mb=args.memory_mb, all_s=args.tests_s)

    async def one(instance: Instance) -> Outcome:
        outcome = await measure.task(repo, instance)
        print(line_of(outcome), flush=True)
        return outcome

    try:
        return await asyncio.gather(*map(one, instances))
    finally:
        await client.aclose()


def line_of(outcome: Outcome) -> str:
    """Return one line of the table."""
    flaky = f", {outcome.flaky} flaky tests left out" if outcome.flaky else ""
    if outcome.task is None:
        return f"  {outcome.instance.instance_id:<32} dropped: {outcome.dropped}{flaky}"
    fixed, kept = len(outcome.task.instance.FAIL_TO_PASS), len(outcome.task.instance.PASS_TO_PASS)
    return f"  {outcome.instance.instance_id:<32} {fixed} fail to pass, {kept} pass to pass{flaky}"


def write_tables(outcomes: list[Outcome], args: argparse.Namespace) -> None:
    """Write rows, the newest `--eval` of them for evaluation, and the instances as JSON."""
    tasks = [outcome.task for outcome in outcomes if outcome.task is not None]
    count = min(args.eval, max(0, len(tasks) - 1))
    parts = {"rl_train": ("train", tasks[: len(tasks) - count]), "eval": ("test", tasks[len(tasks) - count :])}
    for name, (split, chosen) in parts.items():
        if chosen:
            rows = [to_row(task, index=i, split=split) for i, task in enumerate(chosen)]
            path = args.out / f"{name}.parquet"
            print(f"{path}: {parquet.write(path, pa.Table.from_pylist(rows))} rows")
    lines = [json.dumps(task.instance.to_json()) + "\n" for task in tasks]
    (args.out / "instances.jsonl").write_text("".join(lines), encoding="utf-8")
    if tasks:
        print("", to_row(tasks[0], index=0, split="train")["prompt"][0]["content"], sep="\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    git = commands.add_parser("from-git", help="commits of a local repository")
    git.add_argument("repo", type=Path)
    git.add_argument("--name", help="of the repository in the rows (default: its folder's)")
    git.add_argument("--last", type=int, help="look only at so many newest commits")
    git.set_defaults(read=from_git)
    sdists = commands.add_parser("from-sdists", help="releases of a package of pip's registry")
    sdists.add_argument("package")
    sdists.add_argument("--versions", help="separated by commas, the oldest first")
    sdists.add_argument("--last", type=int, help="so many newest versions (default: 8)")
    sdists.set_defaults(read=from_sdists)
    instances = commands.add_parser("from-json", help="instances in SWE-bench's fields")
    instances.add_argument("instances", type=Path)
    instances.add_argument("--repo", type=Path, required=True, help="local repository that has their base commits")
    instances.set_defaults(read=from_json)
    for each in (git, sdists, instances):
        each.add_argument("--out", type=Path, required=True, help="folder for the parquet files, and for repos/")
        each.add_argument("--eval", type=int, default=0, help="so many of the newest tasks are for evaluation")
        each.add_argument("--sandbox", help="URL of a sandbox server (default: one is started)")
        each.add_argument("--memory-mb", type=int, default=1024, help="of a box (default: %(default)s)")
        each.add_argument("--tests-s", type=float, default=300, help="for all tests of a side (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        repo, instances = args.read(args)
    except (NotDownloaded, OSError, ValueError) as error:
        raise SystemExit(f"{args.command}: {error}") from None
    print(f"{repo}: {len(instances)} changes of sources and tests", flush=True)
    with nullcontext(args.sandbox) if args.sandbox else running_server() as url:
        outcomes = asyncio.run(measure(repo, instances, url, args.out / "repos", args))
    write_tables(outcomes, args)
    kept = sum(outcome.task is not None for outcome in outcomes)
    print(f"{kept} of {len(outcomes)} changes are tasks")
    if not kept:
        raise SystemExit("So there is nothing to train on. The lines above say why each change was left out.")


if __name__ == "__main__":
    main()
