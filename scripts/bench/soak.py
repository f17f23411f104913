"""Check that all still adds up in a long run whose sandbox dies ten times and whose rollout servers die five times.

    python -m scripts.bench.soak [--steps 130] [--calls 24000] [--from outputs/quickstart] [--out outputs/soak]

The run is the tiny task in `separate_async`, with two watched vLLM servers. Deaths are spread evenly over the steps:
the sandbox is killed, and started again 2 s later; one of the servers' engines gets SIGKILL. The exit status is 1
unless the run ends without being started again and has made that many tool calls, its ledger adds up, no trained
rollout has a wrong reward (as chaos.py judges it), and the number of its processes, their open files and their
memory stay flat. These are noted every 20 s in a file next to --out (outputs/soak-usage.jsonl).
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from scripts.bench.chaos import SIDES, has_step, measure
from scripts.bench.chaos_faults import TWO_ENGINES, Fault, Missed, Scene, engine_killed, kill_sandbox
from scripts.studies.shared import REPO, command_line, make_sft
from verl_ext.ledger.prompts import read_tally
from verl_ext.ledger.servers import read_servers
from verl_ext.quickstart.supervise import CommandFailed
from verl_ext.records import store
from verl_ext.runs import jsonl
from verl_ext.runs.durable import append_line

SANDBOX_DEATHS, SERVER_DEATHS = 10, 5
AWAY_S = 2.0  # how long the sandbox is away
EVERY_S = 20.0  # between two looks at what the run holds
STEP_S = 30.0  # at most, all deaths included
MAX_MORE = {"processes": 0, "files": 0.05, "memory_mb": 0.1}  # growth from the second to the last fifth, as a share


@dataclass(frozen=True)
class Usage:
    """What the processes of a run hold in all, except the sandbox."""

    processes: int
    files: int  # open
    memory_mb: float  # unique to each process, summed

    @classmethod
    def of(cls, processes: Sequence[psutil.Process]) -> "Usage":
        found = [each for each in map(_held, processes) if each]
        files, memory = (sum(each) for each in zip(*found, strict=True)) if found else (0, 0)
        return cls(len(found), files, round(memory / 2**20, 1))


def _held(process: psutil.Process) -> tuple[int, int] | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:  # of a killed server: this process adopts them
            return None
        return process.num_fds(), process.memory_full_info().uss
    except psutil.Error:  # it has ended
        return None


def die_again_and_again(scene: Scene, steps: int, usage_to: Path, died: Counter) -> None:
    """Kill something at regular steps, a server after two sandboxes; meanwhile note what the run holds.

    Args:
        died: counts "sandbox" and "server".
    """
    of_sandbox = [("sandbox", partial(kill_sandbox, away_s=AWAY_S))] * (SANDBOX_DEATHS // SERVER_DEATHS)
    deaths = [*of_sandbox, ("server", engine_killed)] * SERVER_DEATHS
    watch = threading.Thread(target=_note_usage, args=(scene, usage_to), daemon=True)
    watch.start()
    for number, (what, death) in enumerate(deaths, 1):
        while not has_step(scene, max(2, number * steps // (len(deaths) + 2))):
            if scene.ended.wait(0.2):
                return
        death(scene)
        died[what] += 1
    scene.ended.wait()
    watch.join()


def _note_usage(scene: Scene, path: Path) -> None:
    began = time.monotonic()
    while True:
        usage = asdict(Usage.of(scene.processes()))
        append_line(path, jsonl.dumps({"s": round(time.monotonic() - began), **usage}))
        if scene.ended.wait(EVERY_S):
            return


def growth(usages: Sequence[dict], key: str) -> tuple[float, float]:
    """Return the medians of the second fifth of a run, after its start, and of its last. Medians, because a server that
    is replaced holds less for a while, both together hold more, and at the very end the run shuts down.
    """
    fifth = max(1, len(usages) // 5)
    return median(each[key] for each in usages[fifth : 2 * fifth]), median(each[key] for each in usages[-fifth:])


def count_calls(run: Path) -> int:
    """Count the calls that were run, of rollouts that did not raise."""
    rows = store.rows(run, columns=["calls"])
    return sum(call["attempts"] is not None for row in rows for call in row["calls"] or ())


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--calls", type=int, default=24000, help="tool calls that the run must make (default: 24000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="source", type=Path, default=Path("outputs/quickstart"), help="a quickstart")
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "soak")
    args = parser.parse_args(argv)
    make_sft(args.source)
    out = args.out.resolve()
    usage_to = out.with_name(f"{out.name}-usage.jsonl")  # `out` is emptied
    usage_to.unlink(missing_ok=True)
    died: Counter = Counter()
    deaths = partial(die_again_and_again, steps=args.steps, usage_to=usage_to, died=died)
    fault = Fault(deaths, TWO_ENGINES, steps=args.steps)
    try:
        result = measure(SIDES["ours"], fault, out, args.source.resolve(), args.seed, limit_s=STEP_S * args.steps)
    except (CommandFailed, Missed) as error:
        sys.exit(f"soak.py: {error}")
    calls = count_calls(out / "run")
    servers, retries = read_servers(out / "run"), read_tally(out / "run").retries
    checks = {
        f"deaths of the sandbox: {died['sandbox']}": died["sandbox"] == SANDBOX_DEATHS,
        f"{servers.line()} (expected {SERVER_DEATHS} deaths)": servers.died == servers.replaced == SERVER_DEATHS
        and not servers.faults(retries),
        f"tool calls: {calls:,} (expected {args.calls:,})": calls >= args.calls,
        f"the run ends: {result['ends']}": result["ends"] == "yes",
        f"prompts lost: {result['lost']}, doubled: {result['doubled']}": not (result["lost"] or result["doubled"]),
        f"trained rollouts: {result['trained']:,}, with a wrong reward: {result['wrong']}": not result["wrong"],
    }
    usages = list(jsonl.read(usage_to))
    for key, most in MAX_MORE.items():
        before, after = growth(usages, key)
        checks[f"{key}: {before:g} at the start, {after:g} at the end"] = after <= before * (1 + most)
    print(f"rollouts lost to infrastructure failures: {result['excluded'] or 'none'}")
    for text, holds in checks.items():
        print(f"{'ok' if holds else 'NOT OK':6}  {text}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
