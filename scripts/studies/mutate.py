"""Measure how many small faults in the scientific code the unit tests notice (mutation testing). It is not run by CI.

    python -m scripts.studies.mutate                         # 300 mutants over all modules below
    python -m scripts.studies.mutate folder estimators       # only the mutants in these modules
    python -m scripts.studies.mutate --list --show survived  # show earlier results; run nothing

Each mutant is one change (`<` for `<=`, True for a condition, a statement left out) in a copy of the repository, never
in the working tree. The unit tests of its module run, and the first failure kills the mutant. Mutants are drawn by a
hash of the change (file, function, operator, text, its number among equal ones), so an edit leaves most of the draw
unchanged. Results go to `outputs/mutation.jsonl`, keyed by the mutated file and the tests: a second call runs only new
mutants. While you write tests against survivors, `--keep-killed` skips mutants that were killed once, even if file or
tests have changed since. `mutants.py` says what a mutant is.
"""

import contextlib
import difflib
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from scripts.studies.mutants import Mutant, find_mutants
from scripts.studies.shared import REPO, command_line
from verl_ext.runs import durable, jsonl

UNIT = "tests/unit"
SAMPLER = ["trainer/test_sampler.py", "trainer/test_sampler_excluded.py", "trainer/test_sampler_surplus.py"]
TESTS = {  # source -> its unit tests, the fastest first
    "verl_ext/rollout/loop.py": [
        "rollout/test_loop.py",
        "rollout/test_loop_calls.py",
        "rollout/test_loop_errors.py",
        "rollout/test_weight_versions.py",
        "protocols/test_hermes_loop.py",
    ],
    "verl_ext/rollout/response.py": ["rollout/test_loop.py", "rollout/test_loop_calls.py", "rollout/test_stops.py"],
    "verl_ext/rollout/rows.py": ["rollout/test_rows.py", "rollout/test_workers.py"],
    "verl_ext/episode.py": ["test_episode.py", "rollout/test_rows.py", "trainer/test_queue.py"],
    "verl_ext/trainer/queue.py": ["trainer/test_queue.py", *SAMPLER],
    "verl_ext/protocols/base.py": [
        "protocols/test_turns.py",
        "protocols/test_base.py",
        "rollout/test_loop.py",
        "rollout/test_loop_calls.py",
        "rollout/test_loop_errors.py",
    ],
    "verl_ext/protocols/code.py": ["protocols/test_turns.py", "protocols/test_base.py"],
    "verl_ext/protocols/hermes.py": [
        "protocols/test_hermes.py",
        "protocols/test_hermes_loop.py",
        "protocols/test_turns.py",
    ],
    "verl_ext/protocols/call_json.py": [
        "protocols/test_hermes.py",
        "protocols/test_hermes_loop.py",
        "protocols/test_turns.py",
    ],
    "verl_ext/reward/rewarder.py": ["reward/test_manager.py", "reward/test_manager_shaping.py"],
    "verl_ext/trainer/sampler.py": [
        *SAMPLER,
        "trainer/test_sampler_objectives.py",
        "trainer/test_sampler_ledger.py",
        "trainer/test_sampler_staleness.py",
        "trainer/test_exclusions.py",
    ],
    "verl_ext/outcome.py": ["test_outcome.py", "trainer/test_failed_samples.py", *SAMPLER],
    "verl_ext/trainer/step_counts.py": SAMPLER,
    "verl_ext/trainer/exclusions.py": [
        "trainer/test_exclusions.py",
        *SAMPLER,
        "trainer/test_failed_samples.py",
    ],
    "verl_ext/trainer/failed_samples.py": [
        "trainer/test_failed_samples.py",
        "trainer/test_run_trainer.py",
        "trainer/test_run_validation.py",
    ],
    "verl_ext/evaluation/estimators.py": ["evaluation/test_estimators.py"],
    "verl_ext/trainer/validation.py": ["trainer/test_validation.py", "trainer/test_run_trainer.py"],
    "verl_ext/trainer/early_stop.py": ["trainer/test_early_stop.py"],
    "verl_ext/trainer/advantages.py": ["trainer/test_advantages.py", "trainer/test_fillers.py"],
    "verl_ext/trainer/skipped_updates.py": ["trainer/test_skipped_updates.py"],
    "verl_ext/objectives/group_mean.py": ["objectives/test_group_mean.py"],
    "verl_ext/objectives/tir_otb.py": ["objectives/test_tir_otb.py", "trainer/test_objective.py"],
    "verl_ext/objectives/mean.py": ["objectives/test_mean.py"],
    "verl_ext/objectives/terms.py": ["objectives/test_ppo.py", "objectives/test_all.py"],
    "verl_ext/reward/numbers.py": ["reward/test_manager.py", "rollout/test_workers_rewards.py"],
    "verl_ext/runs/journal.py": ["runs/test_journal.py", "checkpoints/test_power_loss.py"],
    "verl_ext/checkpoints/folder.py": [
        "checkpoints/test_folder.py",
        "checkpoints/test_rolling.py",
        "runs/test_durable.py",
        "checkpoints/test_power_loss.py",
    ],
    "verl_ext/checkpoints/rolling.py": ["checkpoints/test_rolling.py", "checkpoints/test_power_loss.py"],
    "verl_ext/checkpoints/manifest.py": [
        "checkpoints/test_manifest.py",
        "checkpoints/test_folder.py",
        "checkpoints/test_rolling.py",
        "checkpoints/test_power_loss.py",
    ],
    "verl_ext/runs/durable.py": [
        "runs/test_durable.py",
        "checkpoints/test_manifest.py",
        "checkpoints/test_power_loss.py",
    ],
    "verl_ext/checkpoints/course.py": ["checkpoints/test_course.py"],
    "verl_ext/checkpoints/hooks.py": [
        "checkpoints/test_hooks.py",
        "checkpoints/test_hooks_rl.py",
        "checkpoints/test_course.py",
        "checkpoints/test_power_loss.py",
    ],
    "verl_ext/datasets/sft.py": ["datasets/test_sft.py"],
    "verl_ext/traces/rerun.py": ["traces/test_rerun.py", "traces/test_check.py"],
    "verl_ext/traces/gate.py": ["traces/test_check.py", "traces/test_from_run.py", "traces/test_convert.py"],
    "verl_ext/traces/select.py": ["traces/test_select.py"],
    "verl_ext/traces/from_records.py": ["traces/test_from_records.py", "traces/test_from_run.py"],
}
PRELOADED = (
    "torch tensordict transformers ray torchdata.stateful_dataloader datasets peft accelerate hydra pytest hypothesis"
)
LEAST_LIMIT_S = 60  # a mutant that takes this long, and four times as long as the tests, hangs and counts as killed


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def draw(number: int, seed: int) -> list[Mutant]:
    """Return the mutants with the smallest hashes, sorted by file and line."""
    sources = {file: (REPO / file).read_text() for file in TESTS}
    everyone = [mutant for file, source in sources.items() for mutant in find_mutants(file, source)]
    everyone.sort(key=lambda mutant: digest(str(seed), *mutant.name))
    drawn = itertools.islice((mutant for mutant in everyone if mutant.is_python(sources[mutant.file])), number)
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.start, mutant.name))


def tests_of(file: str) -> list[str]:
    return [f"{UNIT}/{name}" for name in TESTS[file]]


def key_of(file: str, source: str) -> str:
    return digest(source, *((REPO / test).read_text() for test in [*tests_of(file), f"{UNIT}/conftest.py"]))


class Journal:
    """Results by key, in a file of JSON lines; a line that a kill cut short is not read."""

    def __init__(self, path: Path):
        self.path, self.results, self.killed = path, {}, set()
        for record in jsonl.read(path) if path.exists() else ():
            self.results[record["key"]] = record["result"]
            if record["result"] == "killed":
                self.killed.add(tuple(record["mutant"]))

    def add(self, **record: object) -> None:
        self.results[record["key"]] = record["result"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        jsonl.cut_half_line(self.path)  # left by a kill
        durable.append_line(self.path, jsonl.dumps(record))


def copy_repository(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (REPO / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, target / name)


SERVER = """
import gc, importlib, importlib.metadata, os, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
for plugin in importlib.metadata.entry_points(group="pytest11"):
    plugin.load()
gc.freeze()
sys.path[:] = [os.getcwd(), *(path for path in sys.path if path)]
print("ready", flush=True)
for line in sys.stdin:
    log, *tests = line.split()
    pid = os.fork()
    if not pid:
        os.setsid()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        import pytest
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", *tests])
        import verl_ext
        assert verl_ext.__file__.startswith(os.getcwd()), verl_ext.__file__
        sys.stdout.flush()
        os._exit(status)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Worker:
    """A copy of the repository, and a process that has the heavy packages loaded and forks for each mutant."""

    def __init__(self, folder: Path):
        self.tree, self.scratch = folder / "tree", Path(tempfile.mkdtemp(prefix="mutate-", dir=memory_folder()))
        copy_repository(self.tree)
        environment = os.environ | {
            "PYTHONPATH": str(self.tree),  # before the editable install, for what the tests start
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may be as long and as old as the one before
            "VERL_USE_EXTERNAL_MODULES": "verl_ext",
            "TMPDIR": str(self.scratch),
            "OMP_NUM_THREADS": "1",
        }
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, PRELOADED],
            **{"cwd": self.tree, "env": environment, "text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
            stderr=subprocess.DEVNULL,
        )
        if self.server.stdout.readline() != "ready\n":
            raise SystemExit("The test process did not start. Run this script with the repository's .venv/bin/python.")

    def run(self, file: str, source: str | None, limit_s: float) -> tuple[int | None, float]:
        """Run a file's tests and return (pytest's exit status or None for a hang, seconds). No source: unchanged."""
        import psutil

        original = (self.tree / file).read_text()
        (self.tree / file).write_text(original if source is None else source)
        began = time.monotonic()
        self.server.stdin.write(f"{self.log} {' '.join(tests_of(file))}\n")
        self.server.stdin.flush()
        child = psutil.Process(int(self.server.stdout.readline()))
        with ThreadPoolExecutor(1) as reader:
            status = reader.submit(self.server.stdout.readline)
            while not status.done() and time.monotonic() - began < limit_s:
                time.sleep(0.05)
            hangs = not status.done()
            if hangs:
                for process in [*child.children(recursive=True), child]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        with contextlib.suppress(ProcessLookupError):  # what the tests left in their session
            os.killpg(child.pid, signal.SIGKILL)
        (self.tree / file).write_text(original)  # the copy's text: the working tree may have been edited since
        shutil.rmtree(self.scratch)
        self.scratch.mkdir()
        return None if hangs else int(status.result()), time.monotonic() - began

    @property
    def log(self) -> Path:
        return self.tree.parent / "pytest.log"

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


def memory_folder() -> str | None:
    """Return a folder in which an fsync costs nothing; None for the default place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def limits(worker: Worker, files: list[str]) -> dict[str, float]:
    """Return the time limit of each file's mutants in seconds, from its tests without a mutant.

    Raises:
        SystemExit: the tests fail without a mutant; every mutant would seem to be killed.
    """
    found = {}
    for file in files:
        status, seconds = worker.run(file, None, 600)
        if status != 0:
            tail = "\n".join(worker.log.read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(f"The tests of {file} fail without a mutant (status {status}). Repair them first:\n{tail}")
        found[file] = max(LEAST_LIMIT_S, 4 * seconds)
        print(f"{file}: its tests pass, {seconds:.0f} s", flush=True)
    return found


def run_all(pending: list[tuple[Mutant, str, str]], jobs: int, journal: Journal) -> None:
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        workers: Queue[Worker] = Queue()
        started = [Worker(Path(folder, str(number))) for number in range(jobs)]
        try:
            limit_s = limits(started[0], sorted({mutant.file for mutant, _, _ in pending}))
            for worker in started:
                workers.put(worker)

            def run(case: tuple[Mutant, str, str]) -> None:
                mutant, source, key = case
                worker = workers.get()
                try:
                    status, seconds = worker.run(mutant.file, source, limit_s[mutant.file])
                finally:
                    workers.put(worker)
                result = "survived" if status == 0 else "killed"
                if status in (4, 5):
                    raise SystemExit(f"pytest found no tests for {mutant.file}: {tests_of(mutant.file)}")
                journal.add(key=key, result=result, status=status, seconds=round(seconds, 1), mutant=mutant.name)
                hangs = " (hangs)" if status is None else ""
                print(f"{result:8} {seconds:5.1f} s  {mutant}{hangs}", flush=True)

            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(run, pending))
        finally:
            for worker in started:
                worker.close()


def report(cases: list[tuple[Mutant, str, str]], journal: Journal, show: str) -> None:
    """Print the rate of each module, and a diff of each mutant with the requested result."""
    by_file: dict[str, list[str]] = {}
    for mutant, source, key in cases:
        result = journal.results.get(key, "not run")
        by_file.setdefault(mutant.file, []).append(result)
        if result == show:
            old = (REPO / mutant.file).read_text().splitlines()
            lines = difflib.unified_diff(old, source.splitlines(), n=0, lineterm="")
            print(f"\n{mutant}")
            print("\n".join(line for line in lines if line[:1] in "-+" and line[:3] not in ("---", "+++")))
    print(f"\n{'module':40} mutants  killed    rate")
    for name, results in [*by_file.items(), ("all", [result for group in by_file.values() for result in group])]:
        run = [result for result in results if result != "not run"]
        rate = f"{run.count('killed') / len(run):7.1%}" if run else "      -"
        print(f"{name:40} {len(run):3}/{len(results):3} {run.count('killed'):7} {rate}")


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("modules", nargs="*", help="names of files, such as folder (default: all)")
    parser.add_argument("--number", type=int, default=300, help="mutants drawn over all modules (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="mutants tested at a time (default 1)")
    parser.add_argument("--keep-killed", action="store_true", help="skip mutants that were killed once")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--show", default="survived", help="mutants to print: survived (default), killed, not run")
    parser.add_argument("--journal", type=Path, default=REPO / "outputs" / "mutation.jsonl")
    args = parser.parse_args()
    if unknown := set(args.modules) - {Path(file).stem for file in TESTS}:
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(Path(file).stem for file in TESTS)}")
    cases = []
    for mutant in draw(args.number, args.seed):
        if not args.modules or Path(mutant.file).stem in args.modules:
            source = mutant.apply((REPO / mutant.file).read_text())
            cases.append((mutant, source, key_of(mutant.file, source)))
    journal = Journal(args.journal)
    if args.keep_killed:
        journal.results |= {key: "killed" for mutant, _, key in cases if mutant.name in journal.killed}
    pending = [case for case in cases if case[2] not in journal.results]
    if pending and not args.list:
        os.nice(10)
        run_all(pending, args.jobs, journal)
    report(cases, journal, args.show)


if __name__ == "__main__":
    main()
