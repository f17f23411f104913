"""RL of a pretrained model until its accuracy rises; RL with separate servers; the GPU memory of a step of RL.

The quickstart runs the first two: its small model on a GPU, its tiny one on a CPU.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path

from scripts.gpu_acceptance.numbers import TINY, build_model
from scripts.gpu_acceptance.runs import COMPARED, REPO, ROLLOUT, launcher, make_inputs, metrics, rl_on_gpu, run
from scripts.gpu_acceptance.stage import Context, NotRun, Row
from verl_ext.memory.shape import read_shape
from verl_ext.memory.words import GIB

STEPS = {"cuda": 96, "cpu": 2}  # of RL at most
EVERY = {"cuda": 8, "cpu": 2}  # steps between two evaluations
SECONDS = 370  # of the stage: a run that is still going is stopped, and what it showed counts
SEPARATE_STEPS = 3
MARGIN = 0.03  # docs/evidence/gpu.md: measured peaks against the doctor's formula
LONGEST = {"cuda": 4096, "cpu": 224}  # tokens of a sequence; random weights write to the end
TOKENS = {"cuda": 8192, "cpu": 1024}  # of a micro-batch
ON_ONE_GPU = (  # Ray is told of two GPUs, both of which are number 0
    "+ray_kwargs.ray_init.num_gpus=2",
    f"{ROLLOUT}.gpu_memory_utilization=0.3",
    f"{ROLLOUT}.checkpoint_engine.backend=shared_file",  # NCCL refuses two ranks on one GPU
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=verl_ext.cpu.checkpoint_engine",
)


def quickstart(context: Context, steps: int, *rl: str, source: Path | None = None, hardware: str = "") -> list[str]:
    """The command of a quickstart in the stage's folder `run`, up to RL.

    Args:
        steps: of RL; the stage `merge` needs a checkpoint of the last.
        rl: further overrides of its RL.
        source: another quickstart, whose data and SFT it takes.
        hardware: a file of configs/hardware for its RL.
    """
    command = [sys.executable, "-m", "verl_ext.quickstart", f"--out={context.folder / 'run'}", "--stage=rl"]
    no_kernels = context.is_cuda and not importlib.util.find_spec("flash_attn")
    if source:
        command.append(f"--from={source}")
    else:
        command += ["--stage=data", "--stage=sft", "--stage=merge", f"--model={'small' if context.is_cuda else 'tiny'}"]
        command += ["--sft=+hardware=no_flash_attn_sft"] if no_kernels else []
        if not context.is_cuda:
            sizes = ("--sft=400", "--rl=256", "--test=32", "--ood=8")
            command += [f"--prepare={size}" for size in sizes] + ["--sft=trainer.total_training_steps=4"]
    files = ",".join(filter(None, [hardware, "no_flash_attn" if no_kernels else ""]))
    if files:  # the tiny run has one already
        command.append(f"--rl={'+' if context.is_cuda else ''}hardware=[{files}]")
    length = (f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}")
    return command + [f"--rl={setting}" for setting in (*length, COMPARED, *rl)]


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """Run a command meanwhile, and end it afterwards with what it started."""
    from tests.processes import kill_tree

    with open(log, "wb") as sink:
        process = subprocess.Popen(command, cwd=REPO, env=os.environ | environment, stdout=sink, stderr=sink)
    try:
        yield process
        process.terminate()  # a quickstart then ends also what is no descendant of its
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass  # it is killed
    finally:
        kill_tree(process.pid)
        process.wait()


def check_learning(context: Context) -> Iterator[Row]:
    """An evaluation before RL and after every few steps, in RL's own process, until the accuracy rises."""
    from verl_ext.evaluation.figures import compare, evaluate, format_estimate
    from verl_ext.evaluation.samples import read_samples
    from verl_ext.quickstart.pipeline import EVALUATION_SAMPLES
    from verl_ext.runs.folder import file_of, judged_files
    from verl_ext.settings.overrides import quoted

    out, start, steps = context.folder / "run", time.monotonic(), STEPS[context.device]
    files = ",".join([quoted(str(out / "data" / "eval.parquet"))] * EVALUATION_SAMPLES)
    rl = [f"data.val_files=[{files}]", "trainer.val_before_train=true", f"trainer.test_freq={EVERY[context.device]}"]
    log = context.folder / "run.log"
    looked, before, low, text = [], [], 0.0, ""
    with running(quickstart(context, steps, *rl), log, DOCTOR="0") as process:
        ended = False
        while not (ended or low > 0 or time.monotonic() > start + SECONDS):
            ended = process.poll() is not None
            for file in judged_files(out / "rl")[len(looked) :]:
                samples, step = read_samples(file), file_of(file).step
                before, looked = before or samples, [*looked, step]
                acc = evaluate(samples)["overall"].metrics["acc/mean@k"]
                seen = f"{format_estimate(acc)}, at {time.monotonic() - start:.0f} s"
                if step:
                    difference = compare(before, samples)["overall"].metrics["acc/mean@k"]
                    low, text = difference.low or 0.0, format_estimate(difference, sign=True)
                    seen += f"; paired difference {text}"
                yield Row(f"acc after {step} steps of RL, 95% interval", "", seen)
            time.sleep(0 if ended else 1)
    if ended and process.returncode:
        raise RuntimeError(
            f"exit code {process.returncode} of the quickstart: {log.read_text(errors='replace')[-300:]}"
        )
    if context.is_cuda:
        what = f"accuracy rises within {steps} steps and {SECONDS} s, looked at every {EVERY['cuda']} steps"
        yield Row(what, "an interval above 0", text or "no evaluation after RL", low > 0)
    done = len(metrics(out / "rl", "actor/pg_loss"))
    yield Row("steps of RL", ">= 1", str(done), done > 0)
    for entry in json.loads((out / "stages.json").read_text()):
        yield Row(entry["stage"], "", f"{entry['wall_s']:.0f} s")
    yield from times(out / "rl")


def times(folder: Path) -> Iterator[Row]:
    """Rows of the steps' seconds, and of what those after the first were spent on."""
    steps = metrics(folder, "timing_s/step")
    if not steps:
        return
    yield Row("seconds of each step", "", ", ".join(f"{seconds:.2f}" for seconds in steps.values()))
    total = sum(seconds for step, seconds in steps.items() if step > 1)
    if not total:
        return
    parts = {}
    for name in ("gen", "old_log_prob", "adv", "update_actor", "update_weights"):
        seconds = sum(each for step, each in metrics(folder, f"timing_s/{name}").items() if step > 1)
        parts[name] = f"{name} {seconds / total:.0%}"
    yield Row("where the time goes after the first step", "", ", ".join(parts.values()))


def check_separate(context: Context) -> Iterator[Row]:
    """RL with `hardware=gpu_separate`: the actor on one GPU, a rollout server on another.

    verl asks Ray for a whole GPU for each (workers/rollout/replica.py:199, single_controller/ray/base.py:240), and NCCL
    refuses two ranks on one. A machine with one GPU therefore tells Ray of two, and sends the weights by a file.
    """
    import torch

    from verl_ext.ledger.servers import read_servers

    gpus = torch.cuda.device_count() if context.is_cuda else 0
    if context.is_cuda and not gpus:
        raise NotRun("hardware=gpu_separate needs two GPUs, or one that both share; torch sees none")
    out, settings, environment = context.folder / "run", (), {}
    if gpus == 1:
        yield Row("GPUs", "2", "1, which actor and server share; weights go by a file in shared memory, not by NCCL")
        settings = ON_ONE_GPU
        only = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        environment["CUDA_VISIBLE_DEVICES"] = f"{only},{only}"
    hardware = "gpu_separate" if context.is_cuda else "cpu_separate"
    learned = context.folder.parent / "learning" / "run"
    source = learned if (learned / "sft" / "merged").is_dir() else None
    yield Row("SFT", "", "of the stage learning" if source else "of its own")
    start = time.monotonic()
    command = quickstart(context, SEPARATE_STEPS, *settings, source=source, hardware=hardware)
    run(command, context.folder / "run.log", DOCTOR="0", **environment)
    done = len(metrics(out / "rl", "actor/pg_loss"))
    text = f"{done}, {time.monotonic() - start:.0f} s with the start"
    yield Row(f"steps of RL, {hardware}", str(SEPARATE_STEPS), text, done == SEPARATE_STEPS)
    servers = read_servers(out / "rl")
    text = f"{servers.started}, {servers.died}, {servers.replaced}"
    yield Row("servers started, died, replaced", "1, 0, 0", text, text == "1, 0, 0")
    told = ("training/rollout_actor_probs_pearson_corr", "training/off_policy/trajectory_staleness/mean")
    for key in told:
        yield Row(key, "", ", ".join(f"{value:.4f}" for value in metrics(out / "rl", key).values()))
    yield from times(out / "rl")


def check_peak(context: Context) -> Iterator[Row]:
    """Two steps of RL of random weights of Qwen3-0.6B's shape (a tiny one on a CPU), which fill their micro-batches."""
    from verl_ext.doctor.memory import plan_of
    from verl_ext.doctor.run import Run
    from verl_ext.memory.estimate import estimate
    from verl_ext.sandbox.launch import running_server
    from verl_ext.settings import compose_run
    from verl_ext.trainer.simulate import simulate

    inputs, out, model = make_inputs(context.folder), context.folder / "run", context.folder / "random"
    tiny = Path(inputs["MODEL_PATH"])
    shape = read_shape("Qwen/Qwen3-0.6B") if context.is_cuda else replace(TINY, vocabulary=2048)
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))  # its tokenizer
    build_model(shape, replace(context, device="cpu")).bfloat16().save_pretrained(model)
    settings = [
        *("trainer.total_training_steps=2", "trainer.save_freq=-1", "algorithm.filter_groups.enable=false"),
        *("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
        f"data.max_response_length={LONGEST[context.device] - 96}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={TOKENS[context.device]}",
        "actor_rollout_ref.actor.calculate_entropy=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        *(rl_on_gpu() if context.is_cuda else []),
    ]
    environment = inputs | {"MODEL_PATH": str(model), "OUTPUT_DIR": str(out)}
    with running_server() as url, ThreadPoolExecutor() as threads:
        command = launcher("run_tiny_dapo.sh", *settings)
        ran = threads.submit(run, command, out / "log.txt", **environment, SANDBOX_URL=url)
        config = compose_run("tiny_dapo", [*settings, f"actor_rollout_ref.model.path={model}"])
        plan = plan_of(Run("tiny_dapo", config))
        figures = {"the doctor": estimate(plan).training}
        if not plan.padded:
            figures["doctor --simulate"] = simulate(plan).peak.total
        ran.result()
    total = max(metrics(out, "perf/total_num_tokens").values())
    filled = f"{total / ceil(total / plan.tokens):,.0f} of {plan.tokens:,}"
    yield Row("model; tokens of a micro-batch", "", f"{shape.parameters / 1e9:.2g}B random weights; {filled}")
    allocated, reserved = (
        max(metrics(out, f"actor/perf/max_memory_{kind}_gb").values()) for kind in ("allocated", "reserved")
    )
    for whose, figure in figures.items():
        yield against(whose, figure / GIB, allocated)
    if plan.padded:
        yield Row("peak against doctor --simulate", "", "not simulated: without flash-attn, batches have padding")
    yield Row("reserved by torch", "", f"{reserved:.2f} GiB")
    yield from times(out)


def against(whose: str, figure: float, seen: float) -> Row:
    """Compare a peak that verl logged with what was said before, both in GiB; 0 is what verl logs on a CPU."""
    what = f"peak of a step against {whose}"
    if not seen:
        return Row(what, f"{figure:.3g} GiB", "torch does not count a CPU's memory")
    off = seen / figure - 1
    return Row(what, f"{figure:.3g} GiB, within {MARGIN:.0%}", f"{seen:.3g} GiB, {off:+.1%}", abs(off) <= MARGIN)
