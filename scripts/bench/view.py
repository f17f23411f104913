"""Measure how fast the viewer answers on a large run (seconds to the last byte, over HTTP), and its memory.

    python -m scripts.bench.view  # 102,400 rollouts: 200 steps x 32 prompts x 16 samples
    python -m scripts.bench.view --steps 20 --folder /tmp/run --words 400

The run is a synthetic one (tests/unit/view/synthetic.py), written first and kept in --folder. Each page is requested
once with nothing cached by the viewer, then --repeats times, or once if it takes longer than REPEATED_S; the budgets
apply to the slowest request. The memory is the peak of the process, shared libraries included. Exits with 1 if a budget
is missed.
"""

import re
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from scripts.studies.shared import REPO, command_line
from tests.unit.view.synthetic import write_run
from verl_ext.records import store

BUDGETS = {  # page -> (address, seconds)
    "run page": ("/", 1.0),
    "step page": ("/run/0/step_{last:06d}", 1.0),
    "group page": ("/run/0/step_{last:06d}/group?uid=s{last}-p1", 0.3),
    "group page of long programs": ("/run/0/step_{last:06d}/group?uid=s{last}-p2", 0.3),
    "transcript with its tokens": ("/run/0/step_{last:06d}/sample?uid=s{last}-p{trained}&session=1&colour=ratio", 1.0),
    "filter one step by text": ("/run/0/step_{last:06d}?text=bana+dora", 2.0),
    "filter all steps by outcome": ("/run/0/all?outcome=equal", 2.0),
    "filter all steps by text": ("/run/0/all?text=NameError", 2.0),
    "timeline of the first step": ("/run/0/step_000001/timeline", 1.0),
    "compare problems": ("/problems?a=0:first&b=0:last", 10.0),
    "the run as .eval": ("/run/0/export.eval", 600.0),
}
MEMORY_GB = 1.0
REPEATED_S = 20.0
CALLS, CODE_CHARACTERS = 8, 1500


def lengthened(uid: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every sample of a group CALLS programs of about CODE_CHARACTERS."""
    for row in (row for row in rows if row["uid"] == uid):
        code = "total = 0\nfor i in range(1, 100):\n    total += i * f(i)  # all of them\nprint(f'{total:,}')\n"
        own = {"turn": 0, "tool": "python", "code": code * (CODE_CHARACTERS // len(code)), "stdout": "332,833,500\n"}
        row["calls"] = [own | {"status": "ok", "attempts": 1, "run_s": 0.1, "queue_s": 0.1, "exit_code": 0}] * CALLS
    return rows


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench_view"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--words", type=int, default=600, help="words per turn of a response")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if not args.folder.is_dir():
        shape = {"steps": args.steps, "prompts": args.prompts, "samples": args.samples, "words": args.words}
        write_run(args.folder, **shape, last_token_share=0.05)
    store.rewrite(store.path_of(args.folder, "trajectories", args.steps), partial(lengthened, f"s{args.steps}-p2"))
    size = sum(path.stat().st_size for path in args.folder.rglob("*.parquet"))
    print(f"{args.steps * args.prompts * args.samples:,} training rollouts, {size / 2**20:.0f} MiB of records")
    command = [sys.executable, "-m", "verl_ext.view", str(args.folder), "--port", "0"]
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # through no proxy of the environment
    missed = []
    try:
        rows = store.read(store.path_of(args.folder, "tokens", args.steps), ["uid"]).to_pylist()
        trained = rows[0]["uid"].rpartition("p")[2]  # a prompt whose tokens are recorded
        process = psutil.Process(viewer.pid)
        address = re.match(r"(http://\S+?)/ ", viewer.stdout.readline())[1]
        for name, (path, budget) in BUDGETS.items():
            seconds, busy = [], sum(process.cpu_times()[:2])
            while len(seconds) < (2 if seconds and seconds[0] > REPEATED_S else 1 + args.repeats):
                start = time.perf_counter()
                with directly.open(address + path.format(last=args.steps, trained=trained)) as answer:
                    kilobytes = sum(map(len, iter(lambda: answer.read(2**20), b""))) / 1000
                seconds.append(time.perf_counter() - start)
            first, *warm = seconds
            busy = (sum(process.cpu_times()[:2]) - busy) / len(seconds)
            missed += [name] * (max(seconds) > budget)
            times = f"first {first:6.3f} s, then at most {max(warm):6.3f} s, budget {budget:g} s"
            print(f"{name:28} {times}, {busy:.3f} CPU-s each, {kilobytes:,.0f} kB")
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{viewer.pid}/status").read_text())[1]
        memory = int(peak) * 1024 / 1e9
        missed += ["memory"] * (memory > MEMORY_GB)
        print(f"{'most memory of the viewer':28} {memory:.2f} GB, budget {MEMORY_GB:g} GB")
    finally:
        viewer.terminate()
        viewer.wait()
    if missed:
        sys.exit(f"Over budget: {', '.join(missed)}.")


if __name__ == "__main__":
    main()
