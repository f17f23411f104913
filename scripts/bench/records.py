"""Measure what the records of a step cost in CPU time: as a run noted it, or part by part, without a model.

    python -m scripts.bench.records --run outputs/quickstart/rl    # exit code 1 above 1% of the cores of this machine
    python -m scripts.bench.records                                # a step of the tiny run: 256 short rollouts
    python -m scripts.bench.records --rollouts 512 --words 1500    # longer ones
    python -m scripts.bench.records --ray --step-s 2.5 --steps 10  # as a Ray actor, with what Ray takes in its process

The rows are those of an agent loop's rollouts; the code of a run makes, packs and writes them. Each figure is the
median over --steps steps, after two warm-up steps.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.shared import command_line, metrics_of
from verl_ext.episode import (
    CallResult,
    Episode,
    EpisodeKey,
    Reply,
    Reward,
    TokenRow,
    ToolUse,
    Turn,
    TurnCall,
)
from verl_ext.outcome import PromptEnd
from verl_ext.records import store
from verl_ext.records.recorder import Fates, Group, Recorder, pack
from verl_ext.records.trajectories import problem_columns, to_record
from verl_ext.rollout import recorder_actor
from verl_ext.settings import RecorderSettings

WARM_UP = 2
IDLE_S = 20
LIMIT = 0.01  # of the CPU time of a step
TOGETHER = 16  # groups per message: in the mode `sync` those of a wave; dynamic sampling makes two waves for 32
WORDS = [a + b for a in ("ba", "do", "ki", "lu", "me", "no") for b in ("n", "r", "sing", "ted", "ver", "x")]
CODE = "total = 0\nfor i in range({n}):\n    total += i * {n}\nprint(total)"


def rollout(rng: random.Random, words: int, key: EpisodeKey) -> Episode:
    """Make a scored episode with one call, as an agent loop and a reward manager do."""
    n, text, server = rng.randrange(100), " ".join(rng.choices(WORDS, k=words)), "127.0.0.1:8000"
    code = CODE.format(n=n)
    said = CallResult(f"{n * n}\n", run_s=0.02, stdout=f"{n * n}\n", stderr="", exit_code=0)
    call = TurnCall("code_interpreter", {"code": code}, result=said, started_s=1e9, queue_s=0.01)
    first = Turn(f"{text}\n<code>\n{code}\n</code>", words + 20, 0, server, 1e9, 0.5, [call])
    first.reply = Reply(f"\n<interpreter>\n{n * n}\n</interpreter>\n", 8, words + 20)
    last = Turn(f"{text} \\boxed{{{n}}}", words + 4, words + 28, server, 1e9, 0.5)
    info = {"acc": float(n % 2), "train_acc": float(n % 2), "reward_base": 1.0, "reward_overlong": 0.0}
    info |= {"reward_length": 0.0, "reward_tool_bonus": 0.0, "unverified": 0.0, "sandbox_failure": 0.0}
    info |= {"response_tokens": 2.0 * words, "tool_calls": 1.0, "tool_errors": 0.0, "tool_timeouts": 0.0}
    info |= {"model_turns": 2.0, "truncated": 0.0, "pred": str(n), "verdict": "correct", "method": "integer"}
    info |= {"data_source": "tiny_tools", "id": "", "finish_reason": "answer"}
    spans = [(turn.start, turn.start + turn.tokens) for turn in (first, last)]
    return Episode(
        key,
        rows=[TokenRow(model_spans=spans, version_spans=[(*span, 3) for span in spans])],
        finish_reason="answer",
        use=ToolUse(ok=1, code_lines=4, first_call_token=words, generate_s=1.0, tool_s=0.1, run_s=0.1),
        reward=Reward(1.0, info),
        turns=[first, last],
        prompt="<|im_start|>user\nWhat is the answer?<|im_end|>\n<|im_start|>assistant\n",
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        **{"started_s": 1e9, "ended_s": 1e9 + 2, "score_s": 0.001},
    )


def token_columns(keys: list[tuple[str, int]], tokens: int, step: int) -> dict[str, Any]:
    """Make columns as trainer/run_records.py sends them; every value is different, as log-probs are."""
    total, rng = len(keys) * tokens, np.random.default_rng(step)
    numbers = {name: rng.normal(size=total).astype(np.float32) for name in ("rollout_log_prob", "advantage")}
    own = np.arange(total) % tokens < tokens - 8
    return numbers | {
        "record": np.arange(len(keys)),
        "lengths": np.full(len(keys), tokens),
        "uid": [uid for uid, _ in keys],
        "session": [session for _, session in keys],
        "id": rng.integers(1000, size=total),
        "mask": own,
        "sampled": own,
        "turn": np.arange(total) % tokens * 2 // tokens,
        "version": np.where(own, step - 1, -1),
        "old_log_prob": numbers["rollout_log_prob"],
        "spelled": {},
    }


class Clock:
    """CPU seconds of this process, by part of a step."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.parts[part].append(time.process_time() - began)


class Actor:
    """A recorder that receives its records through Ray: nobody waits for it."""

    def __init__(self, run: Path, settings: RecorderSettings):
        self.handle = recorder_actor.start(run, settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name).remote


def one_step(writer: Recorder | Actor, clock: Clock, step: int, args: argparse.Namespace) -> None:
    rng = random.Random(step)
    uids = [f"{step:08d}-{number:04d}-4c1c-9d3e-5f0a1b2c3d4e" for number in range(args.rollouts // args.samples)]
    said = {uid: [rollout(rng, args.words, EpisodeKey(uid, i)) for i in range(args.samples)] for uid in uids}
    groups = []
    with clock("rows, in the agent loops"):
        for number, uid in enumerate(uids):
            sample = {"uid": uid, "global_steps": step, "index": number, "data_source": "tiny_tools"}
            sample |= {"reward_model": {"ground_truth": str(number)}}
            sample |= {"raw_prompt": [{"role": "user", "content": "What is the answer?"}]}
            problem = problem_columns(sample, validate=False)
            packed = pack([problem | to_record(episode) for episode in said[uid]])
            groups.append(Group(uid, step, False, packed))
    trained = uids[: len(uids) // 2]
    keys = [(uid, session) for uid in trained for session in range(args.samples)][: round(args.tokens * args.rollouts)]
    columns = token_columns(keys, 2 * args.words + 32, step)
    told = {name: columns[name] for name in ("record", "lengths")} | {"correction": ""}
    told |= {"log_prob": columns["old_log_prob"], "decision": np.ones(len(columns["id"]), np.int8)}
    taken = {EpisodeKey(uid, session): 0.5 for uid in trained for session in range(args.samples)}
    ends = {uid: PromptEnd.TRAINED if uid in set(trained) else PromptEnd.EQUAL for uid in uids}
    ends_at = time.monotonic() + args.step_s
    with clock("telling, in the agent loops" if args.ray else "files, in the recorder"):
        for first in range(0, len(groups), TOGETHER):
            writer.groups(groups[first : first + TOGETHER], 0.0)
            time.sleep(args.step_s / 2 * TOGETHER / len(groups))
        of_step: list[tuple[str, tuple]] = []
        if len(keys):
            of_step.append(
                ("tokens", (step, columns, {int(token): f"<{token}>" for token in set(columns["id"].tolist())}))
            )
            writer.loss(step, told, 0.0)
        of_step.append(("end_step", (Fates(step, ends, taken), 0.0)))
        whats = ("wait", "log_probs", "update", "save", "weight_sync")
        of_step.append(("times", (step, [{"what": each, "start_s": 1e9, "end_s": 1e9 + 1} for each in whats])))
        writer.tell(of_step)
    time.sleep(max(0.0, ends_at - time.monotonic()))


def share_of(run: Path) -> str:
    """Say what share of a run's steps its records took, as medians.

    Raises:
        SystemExit: the run has no records, or they took more than LIMIT.
    """
    cpu_s, metrics = store.cpu_seconds(run), metrics_of(run)
    step_s = {step: seconds for step, seconds in zip(*metrics.curve("timing_s/step"), strict=True) if step in cpu_s}
    for step in step_s:  # its records include those of the validation after it
        step_s[step] += metrics.steps[step].get("timing_s/testing", 0.0)
    if not step_s:
        sys.exit(f"{run} has no records of a step with timing_s/step. Expected the folder of an RL run.")
    cores = os.cpu_count() or 1
    share = statistics.median(cpu_s[step] / (cores * seconds) for step, seconds in step_s.items())
    said = f"{len(step_s)} steps of {statistics.median(step_s.values()):.2f} s, {cores} cores: records took "
    said += f"{1000 * statistics.median(cpu_s[step] for step in step_s):.1f} CPU-ms per step, {share:.2%} of the cores"
    return said if share < LIMIT else sys.exit(f"{said}, more than {LIMIT:.0%}")


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--rollouts", type=int, default=256, help="rollouts per step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="rollouts per prompt (default: %(default)s)")
    parser.add_argument("--words", type=int, default=20, help="words per turn, one token each (default: %(default)s)")
    parser.add_argument("--tokens", type=float, default=0.03125, help="share of the rollouts whose tokens are recorded")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ray", action="store_true", help="start Ray on this machine and run the recorder as an actor")
    parser.add_argument("--step-s", type=float, default=0.0, help="least seconds of a step (default: %(default)s)")
    parser.add_argument("--run", type=Path, help="measure this run on this machine instead of a synthetic step")
    args = parser.parse_args()
    if args.run:
        print(share_of(args.run))
        return
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        settings = RecorderSettings(token_share=0.0, keep_steps=1000, max_gb=8)
        if args.ray:
            import ray

            ray.init(address="local", num_cpus=1, include_dashboard=False)
        writer = Actor(run, settings) if args.ray else Recorder(run, settings)
        for kind in ("trajectories", "tokens", "timeline"):
            (run / store.FOLDER / kind).mkdir(parents=True)
        write = store.write

        def timed(path: Path, kind: str, *rest: Any) -> int:
            with clock(f"of these: {kind}"):
                return write(path, kind, *rest)

        store.write = timed
        for step in range(1, args.steps + WARM_UP + 1):
            one_step(writer, clock, step, args)
        if args.ray:
            own = []
            for pause_s in (0, IDLE_S):
                time.sleep(pause_s)
                own.append(ray.get(writer.handle.__ray_call__.remote(lambda _: time.process_time())))
            print(f"the recorder's process takes {1000 * (own[1] - own[0]) / IDLE_S:.1f} CPU-ms per second when idle")
            ray.get(writer.close())
            clock.parts["all, in the recorder"] = list(store.cpu_seconds(run).values())
        written = len(store.files_of(run))
        if written != args.steps + WARM_UP:
            sys.exit(
                f"{written} of {args.steps + WARM_UP} files were written, so no figure is valid. See the warnings."
            )
        sizes = [path.stat().st_size for path in run.rglob("*.parquet")]
    print(f"{args.rollouts} rollouts per step, {sum(sizes) / (args.steps + WARM_UP) / 1000:.0f} kB of files")
    for part, seconds in sorted(clock.parts.items(), key=lambda item: item[0].startswith("of")):
        print(f"{part:26} {1000 * statistics.median(seconds[WARM_UP:]):6.1f} CPU-ms per step")


if __name__ == "__main__":
    main()
