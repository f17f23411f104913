"""What environments and domains do to the tiny model: a notebook against an interpreter, and three domains at once.

    python -m scripts.studies.domains [--out outputs/domains]

One SFT model is trained on three tiny domains (data/tiny_tools/prepare_domains.py), of which `draws` needs variables
that last. From it start four RL runs: `draws` in a notebook; `draws` in an interpreter without a memory; all three with
the weights of configs/task/tiny_domains.yaml, killed on the way and resumed; and all three, with a judge for `choices`
that is stopped and started again. Prints accuracies on held-out problems before and after, with 95% intervals over
problems, and the shares of the batches that were trained. A part that is there is not made again; half an hour on two
cores.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripts.studies.shared import REPO, command_line, markdown, metrics_of
from verl_ext.evaluation.checkpoint import merge_command
from verl_ext.evaluation.figures import evaluate, format_estimate
from verl_ext.evaluation.samples import read_samples
from verl_ext.runs.folder import path_of
from verl_ext.sandbox.launch import running_server

TOOLS = REPO / "data" / "tiny_tools"
SFT_STEPS, STEPS, KILLED_AFTER = 600, 30, 12
JUDGE_STEPS, JUDGE_DOWN = 16, (4, 10)  # the judge is down after the first of these steps until the second
DOMAINS = ("sums", "draws", "choices")


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "domains", help="default: outputs/domains")
    parser.add_argument(
        "--only", nargs="*", default=["notebook", "python", "mixed", "judge"], help="runs; default: all"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    make_model(out)
    with running_server(options=("--preload", "sympy")) as sandbox:
        study = Study(out, sandbox)
        runs = {"notebook": study.draws, "python": study.draws, "mixed": study.mixed, "judge": study.judged}
        for name in args.only:
            if not (out / name / "done").exists():
                runs[name](name)
                (out / name / "done").touch()
    print(accuracies(out, [name for name in args.only if name != "judge"]))
    for name in args.only:
        if name in ("mixed", "judge"):
            print(f"\n{name}\n{shares(out / name)}")
    return 0


def make_model(out: Path) -> None:
    """Make the data, the model, and the SFT model, unless they are there."""
    data, model, sft = out / "data", out / "model", out / "sft"
    if not (data / "choices_test.parquet").exists():
        run([sys.executable, TOOLS / "prepare_domains.py", "--out", data])
    if not (model / "config.json").exists():
        run([sys.executable, TOOLS / "build_model.py", "--out", model])
    if not (sft / "merged" / "config.json").exists():
        env = {"DATA_DIR": data, "MODEL_PATH": model, "OUTPUT_DIR": sft, "DOCTOR": "0"}
        launch("sft", [f"trainer.total_training_steps={SFT_STEPS}", f"trainer.save_freq={SFT_STEPS}"], env, sft)
        shards = sft / f"global_step_{SFT_STEPS}"
        run(merge_command(shards, sft / "merged"))


class Study:
    """The RL runs, which use one sandbox server."""

    def __init__(self, out: Path, sandbox: str):
        self._out = out
        self._env = {
            "DATA_DIR": out / "data",
            "MODEL_PATH": out / "sft" / "merged",
            "SANDBOX_URL": sandbox,
            "DOCTOR": "0",
        }

    def _rl(self, name: str, steps: int, *overrides: str, meanwhile: Callable[[Path], bool] = lambda _: False) -> None:
        """Run RL to its end; `meanwhile` looks at its folder every second, and kills it by returning True."""
        folder = self._out / name
        own = [
            "trainer.val_before_train=true",
            "trainer.test_freq=10",
            "trainer.save_freq=5",
            "retool.adaptive_n.enable=false",
        ]
        own += ["retool.validation_schedule.enable=false", "retool.light_validation.enable=false"]
        launch(
            "dapo",
            [*own, f"trainer.total_training_steps={steps}", *overrides],
            self._env | {"OUTPUT_DIR": folder},
            folder,
            meanwhile,
        )

    def draws(self, environment: str) -> None:
        """Train on the draws in a notebook, or in an interpreter that remembers nothing."""
        files = [
            f"data.{key}_files=[{self._out}/data/draws_{split}.parquet]"
            for key, split in (("train", "train"), ("val", "test"))
        ]
        self._rl(environment, STEPS, *files, f"retool.environment={environment}")

    def mixed(self, name: str) -> None:
        """Train on all three, in a run that is killed on the way and resumed by the same command."""
        self._rl(name, STEPS, "+task=tiny_domains", meanwhile=lambda folder: last_step(folder) >= KILLED_AFTER)
        self._rl(name, STEPS, "+task=tiny_domains")

    def judged(self, name: str) -> None:
        """Train on all three; `choices` has a judge that is away for some steps."""
        judge = Judge()
        verifier = f"+retool.domains.choices.verifier={{path:judge,base_url:'{judge.url}',max_attempts:1,timeout_s:5}}"
        down, up = JUDGE_DOWN

        def stop_and_start(folder: Path) -> bool:
            judge.is_up = not down <= last_step(folder) < up
            return False

        try:
            overrides = ("+task=tiny_domains", verifier.replace("+", "", 1))
            self._rl(
                name,
                JUDGE_STEPS,
                *overrides,
                "trainer.val_before_train=false",
                "trainer.test_freq=-1",
                meanwhile=stop_and_start,
            )
        finally:
            judge.close()


class Judge:
    """An OpenAI-compatible endpoint that compares the boxed letter with the reference; while down it answers 503."""

    def __init__(self) -> None:
        self.is_up = True
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"data": [{"id": "judge"}]})

            def do_POST(self) -> None:
                prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
                reference = re.search(r"<reference_answer>\s*(\w)", prompt)[1]
                boxed = re.findall(r"boxed\{(\w)\}", prompt)
                score = f"Score: {int(boxed[-1:] == [reference])}"
                self._answer({"choices": [{"message": {"content": score}, "finish_reason": "stop"}]})

            def _answer(self, body: Mapping[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(200 if judge.is_up else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def run(command: Sequence[Any]) -> None:
    print("==", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=REPO, check=True)


def launch(
    stage: str,
    overrides: Sequence[str],
    env: Mapping[str, Any],
    folder: Path,
    meanwhile: Callable[[Path], bool] = lambda _: False,
) -> None:
    """Run a launcher of the tiny model in its own session, with its output in `folder`/log.txt.

    Raises:
        CalledProcessError: it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(REPO / "recipe" / "retool" / f"run_tiny_{stage}.sh"), *overrides]
    print("==", folder.name, *command, flush=True)
    variables = os.environ | {"PYTHON": sys.executable} | {name: str(value) for name, value in env.items()}
    with open(folder / "log.txt", "ab") as log:
        process = subprocess.Popen(command, cwd=REPO, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(1)
                if meanwhile(folder):
                    print(f"== {folder.name} is killed after step {last_step(folder)}", flush=True)
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def last_step(folder: Path) -> int:
    return max((step for step, values in metrics_of(folder).steps.items() if "timing_s/step" in values), default=0)


def accuracies(out: Path, runs: Sequence[str]) -> str:
    """Tabulate the accuracy on held-out problems before and after RL."""
    rows = []
    for name in runs:
        sides = [
            evaluate(read_samples(path_of(out / name, "trajectories", step, validate=True))) for step in (0, STEPS)
        ]
        for domain in DOMAINS:
            if domain in sides[0]:
                figures = [format_estimate(side[domain].metrics["acc/mean@k"]) for side in sides]
                rows.append([name, domain, *figures, str(sides[1][domain].num_problems)])
    return markdown(["run", "domain", "before RL", f"after {STEPS} steps", "problems"], rows)


def shares(folder: Path, domains: Sequence[str] = DOMAINS) -> str:
    """Tabulate what each domain got of the trained batches, and when it was paused."""
    metrics = metrics_of(folder)
    steps = sorted(step for step, values in metrics.steps.items() if "timing_s/step" in values)
    rows = []
    for domain in domains:
        of = {
            key: dict(zip(*metrics.curve(f"domain/{domain}/{key}"), strict=True)) for key in ("share", "acc", "paused")
        }
        shares_of_run = [of["share"].get(step, 0.0) for step in steps]
        paused = [step for step in steps if of["paused"].get(step)]
        acc = [of["acc"][step] for step in steps if step in of["acc"]]
        row = [domain, f"{sum(shares_of_run) / len(steps):.1%}", f"{acc[0]:.0%} -> {acc[-1]:.0%}"]
        rows.append([*row, f"{paused[0]} to {paused[-1]}" if paused else "never"])
    starts = ", ".join(f"{start.resumed_from + 1} to {start.last}" for start in metrics.starts)
    table = markdown(["domain", "share of the trained groups", "accuracy in training", "paused in steps"], rows)
    return f"{table}\nsteps of each start: {starts}"


if __name__ == "__main__":
    sys.exit(main())
