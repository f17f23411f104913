"""The real commands on the tiny task: SFT, killed, resumed and merged; RL with vLLM and tool calls; evaluation."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu_acceptance.stage import Context, Row

REPO = Path(__file__).resolve().parents[2]
STEPS = 6
LEAST = {  # of every step of RL
    "training/rollout_actor_probs_pearson_corr": 0.99,
    "tool/code_ratio": 0.3,
    "train/acc": 0.1,
}
# Of the first steps of SFT on a CPU, written by `bash scripts/gpu_acceptance.sh sft --device cpu` (sft/losses.json)
CPU_LOSSES = Path(__file__).with_name("sft_losses.json")
ROLLOUT = "actor_rollout_ref.rollout"
COMPARED = "algorithm.rollout_correction.bypass_mode=false"  # the actor's log-probs are computed, too
SMALL_STEPS = 16  # of RL
SMALL_TIMES = ("timing_s/step", "timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor")
LEARNED_STEPS = 500  # of SFT, configs/tiny_sft.yaml's: the model then writes code


def rl_on_gpu() -> list[str]:
    """configs/tiny_dapo.yaml on one GPU: verl's and vLLM's own settings instead of hardware/cpu.yaml's."""
    hardware = "~hardware" if importlib.util.find_spec("flash_attn") else "hardware=no_flash_attn"
    return [
        *(hardware, "trainer.device=cuda", "trainer.n_gpus_per_node=1", "trainer.nnodes=1"),
        *(f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.gpu_memory_utilization=0.3"),
        *(f"{ROLLOUT}.agent.num_workers=1", "reward.num_workers=1"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]


def run(command: list[str], log: Path, **environment: str) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as sink:
        code = subprocess.run(command, cwd=REPO, env=os.environ | environment, stdout=sink, stderr=sink).returncode
    if code:
        raise RuntimeError(f"exit code {code} of {' '.join(command[:3])}: {log.read_text(errors='replace')[-300:]}")


def launcher(name: str, *overrides: str) -> list[str]:
    return ["bash", str(REPO / "recipe" / "retool" / name), *overrides]


def make_inputs(folder: Path, traces: int = 2000) -> dict[str, str]:
    """Data, tokenizer and random model, equal on every machine; as the launchers' variables."""
    tools = REPO / "data" / "tiny_tools"
    sizes = [f"--sft={traces}", "--rl=256", "--test=16", "--ood=8"]
    run([sys.executable, str(tools / "prepare.py"), "--out", str(folder / "data"), *sizes], folder / "inputs.log")
    run([sys.executable, str(tools / "build_model.py"), "--out", str(folder / "model")], folder / "inputs.log")
    inputs = {"DATA_DIR": str(folder / "data"), "MODEL_PATH": str(folder / "model")}
    return inputs | {"PYTHON": sys.executable, "DOCTOR": "0", "NPROC_PER_NODE": "1"}


def sft_command(context: Context, steps: int) -> list[str]:
    """In fp32, which flash-attn does not compute: a GPU takes traces one by one, a CPU packs them (verl_ext/cpu)."""
    settings = [
        f"trainer.total_training_steps={steps}",
        "data.val_files=null",
        "trainer.test_freq=-1",
        f"trainer.device={context.device}",
    ]
    return launcher("run_tiny_sft.sh", *settings, *(["+hardware=no_flash_attn_sft"] if context.is_cuda else []))


def metrics(folder: Path, key: str) -> dict[int, float]:
    """Step -> value of a metric, of all starts of a run; the last start counts."""
    found = {}
    for path in sorted(folder.glob("metrics*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if key in entry["data"]:
                found[entry["step"]] = entry["data"][key]
    return found


def first_step(folder: Path) -> int | None:
    """The first step of the last start of a run."""
    lines = [*folder.glob("metrics*.jsonl")] and max(folder.glob("metrics*.jsonl")).read_text().splitlines()
    return json.loads(lines[0])["step"] if lines else None


def check_sft(context: Context) -> Iterator[Row]:
    """One run to its end, another killed after its checkpoint and started again; both against a CPU's losses; merge.

    On a CPU the first is left out: its losses are those that were recorded.
    """
    from tests.processes import kill_tree, stop_at
    from verl_ext.checkpoints import folder as checkpoints
    from verl_ext.cpu.warm_python import EXECUTABLE_VARIABLE
    from verl_ext.evaluation.checkpoint import merge_command

    inputs = make_inputs(context.folder)
    script = [*sft_command(context, STEPS), "trainer.save_freq=3", "optim.lr_warmup_steps_ratio=0"]
    recorded = {int(step): loss for step, loss in json.loads(CPU_LOSSES.read_text()).items()}
    whole, broken = context.folder / "whole", context.folder / "broken"
    if context.is_cuda:
        run(script, whole / "log.txt", **inputs, OUTPUT_DIR=str(whole))
        losses = metrics(whole, "train/loss")
        yield from against_recorded(losses, recorded)

    moment, stopped = stop_at("update:5", broken)  # in step 5, in every process that steps
    with open(broken / "log.txt", "wb") as sink:
        environment = os.environ | inputs | moment | {"OUTPUT_DIR": str(broken)}
        environment[EXECUTABLE_VARIABLE] = ""  # processes that a shared server forks are no descendants, and live on
        first = subprocess.Popen(script, cwd=REPO, env=environment, stdout=sink, stderr=sink)
        while first.poll() is None and not stopped.exists():
            time.sleep(0.05)
        kill_tree(first.pid)
    saved = checkpoints.tracked_step(broken)
    yield Row("killed after the checkpoint of step", "3", str(saved), saved == 3)
    time.sleep(1.1)  # files of metrics are named by the second
    run(script, broken / "log.txt", **inputs, OUTPUT_DIR=str(broken))
    again, begun = metrics(broken, "train/loss"), first_step(broken)
    yield Row("first step of the resumed run", "4", str(begun), begun == 4)
    yield from against_recorded(again, recorded, "of the resumed run")
    if context.is_cuda:
        worst = max(abs(again.get(step, 0) - loss) for step, loss in losses.items())
        yield Row("losses of the resumed run", "equal to 1e-5", f"differ by {worst:.2e}", worst < 1e-5)
    else:
        (context.folder / "losses.json").write_text(json.dumps(again) + "\n")
    target = context.folder / "merged"
    run(merge_command(checkpoints.path_of(broken, STEPS), target), context.folder / "merge.log")
    yield Row("merged", "a model that loads", load(target, context), True)


def against_recorded(losses: dict[int, float], recorded: dict[int, float], whose: str = "") -> Iterator[Row]:
    text = f"{len(losses)}, loss {losses.get(1, 0):.4f} to {losses.get(STEPS, 0):.4f}"
    yield Row(f"steps of SFT {whose}".rstrip(), str(STEPS), text, len(losses) == STEPS)
    worst = max(abs(losses.get(step, 0) / loss - 1) for step, loss in recorded.items())
    yield Row(f"losses {whose} against a CPU's".replace("  ", " "), "within 0.1%", f"{worst:.2e}", worst < 1e-3)


def load(folder: Path, context: Context) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").to(context.device)
    with torch.no_grad():
        logits = model(input_ids=torch.ones(1, 8, dtype=torch.long, device=context.device)).logits
    assert torch.isfinite(logits).all()
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def check_rl(context: Context) -> Iterator[Row]:
    """SFT until the model writes code; then RL on one GPU: vLLM wakes and sleeps, weights are sent, programs run.

    Three steps with loops in Ray actors, as the large runs have; the same command with loops in vLLM's server goes on.
    There is one server: verl starts as many as the actor's workers suffice for (workers/rollout/llm_server.py:455-460),
    and each worker has a GPU of its own (single_controller/ray/base.py:148). Two servers need two GPUs.
    """
    from verl_ext.checkpoints import folder as checkpoints
    from verl_ext.evaluation.checkpoint import merge_command
    from verl_ext.sandbox.launch import running_server

    inputs, sft, out = (
        make_inputs(context.folder, traces=64 * LEARNED_STEPS),
        context.folder / "sft",
        context.folder / "rl",
    )
    start = time.monotonic()
    run(sft_command(context, LEARNED_STEPS), sft / "log.txt", **inputs, OUTPUT_DIR=str(sft))
    losses = metrics(sft, "train/loss")
    text = f"{losses.get(LEARNED_STEPS, 9):.3f} after {LEARNED_STEPS} steps, {time.monotonic() - start:.0f} s"
    yield Row("loss of SFT", "< 0.35", text, losses.get(LEARNED_STEPS, 9) < 0.35)
    policy = context.folder / "policy"
    run(merge_command(checkpoints.path_of(sft, LEARNED_STEPS), policy), context.folder / "merge.log")
    inputs["MODEL_PATH"] = str(policy)
    settings = ["trainer.save_freq=3", COMPARED, *(rl_on_gpu() if context.is_cuda else [])]
    managers = {3: "LeanAgentLoopManager", 5: "InServerAgentLoopManager"}
    with running_server() as url:
        for steps, manager in managers.items():
            last, start = [f"trainer.total_training_steps={steps}"], time.monotonic()
            last.append(f"{ROLLOUT}.agent.agent_loop_manager_class=verl_ext.rollout.workers.{manager}")
            script = launcher("run_tiny_dapo.sh", *settings, *last)
            run(script, out / "log.txt", **inputs, OUTPUT_DIR=str(out), SANDBOX_URL=url)
            done = len(metrics(out, "actor/pg_loss"))
            yield Row(f"steps of RL, {manager}", str(steps), f"{done}, {time.monotonic() - start:.0f} s", done == steps)
            time.sleep(1.1)  # files of metrics are named by the second
    servers = servers_in(out / "log.txt")
    yield Row("vLLM servers", "1: each takes a whole GPU (verl, llm_server.py:460)", str(servers), servers == 1)
    for key, least in LEAST.items():
        seen = metrics(out, key)
        text = ", ".join(f"{value:.4f}" for value in seen.values())
        yield Row(key, f">= {least:g}", text, bool(seen) and min(seen.values()) >= least)
    for key in ("tool/calls", "tool/ok_rate", "timing_s/step"):
        yield Row(key, "", ", ".join(f"{value:.3f}" for value in metrics(out, key).values()))


def servers_in(log: Path) -> int:
    """How many servers verl named at the last start of a run."""
    named = re.findall(r"LLMServerManager: \[([^]]*)\]", log.read_text(errors="replace"))
    return named[-1].count("'") // 2 if named else 0


def check_small(context: Context) -> Iterator[Row]:
    """The quickstart's small rung, a pretrained model: data, model, SFT, merge and the first steps of RL.

    build_model.py fetches the model's package. Without an index, PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER name a folder.
    """
    out, start = context.folder / "small", time.monotonic()
    stages = ["--stage=data", "--stage=sft", "--stage=merge", "--stage=rl"]
    steps = SMALL_STEPS if context.is_cuda else 2
    no_kernels = context.is_cuda and not importlib.util.find_spec("flash_attn")
    hardware = ["--sft=+hardware=no_flash_attn_sft", "--rl=+hardware=no_flash_attn"] if no_kernels else []
    rl = [f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}", COMPARED]
    command = [sys.executable, "-m", "verl_ext.quickstart", "--model=small", f"--out={out}", *stages, *hardware]
    # The doctor would end the run where packages are not the lock's: the stage `machine` tells these.
    run([*command, *(f"--rl={setting}" for setting in rl)], context.folder / "small.log", DOCTOR="0")
    yield Row("data, SFT and RL", "", f"{time.monotonic() - start:.0f} s")
    for entry in json.loads((out / "stages.json").read_text()):
        yield Row(entry["stage"], "", f"{entry['wall_s']:.0f} s")
    losses = [*metrics(out / "sft", "train/loss").values()]
    yield Row("loss of SFT", "falls", f"{losses[0]:.3f} to {losses[-1]:.3f}", losses[-1] < losses[0])
    seconds = metrics(out / "rl", "timing_s/step")
    yield Row("steps of RL", str(steps), f"{len(seconds)}", len(seconds) == steps)
    least = {"training/rollout_actor_probs_pearson_corr": 0.99, "tool/code_ratio": 0.9}
    for key, limit in least.items():
        seen = metrics(out / "rl", key).values()
        yield Row(key, f">= {limit:g}", f"{min(seen, default=0):.4f} at the least", min(seen, default=0) >= limit)
    told = ("training/rollout_probs_diff_mean", "train/acc", "response_length/mean", *SMALL_TIMES)
    for key in told:
        yield Row(key, "", ", ".join(f"{value:.3g}" for value in metrics(out / "rl", key).values()))


def check_sleep(context: Context) -> Iterator[Row]:
    """vLLM's sleep gives the GPU's memory back, and it wakes with the same answers."""
    import torch
    from vllm import LLM, SamplingParams

    make_inputs(context.folder)
    engine = LLM(str(context.folder / "model"), enable_sleep_mode=True, gpu_memory_utilization=0.5, enforce_eager=True)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    before, awake = engine.generate("1+1", greedy)[0].outputs[0].token_ids, used()
    engine.sleep(level=1)
    asleep = used()
    engine.wake_up()
    after = engine.generate("1+1", greedy)[0].outputs[0].token_ids
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    freed = awake - asleep
    yield Row("sleep gives back", f">= {0.4 * total:.0f} GiB of {awake:.0f}", f"{freed:.1f} GiB", freed >= 0.4 * total)
    yield Row(
        "greedy answer before and after", "equal", f"{list(before)[:4]}..., {list(after)[:4]}...", before == after
    )


def used() -> float:
    """GiB of the GPU that are taken, by whatever process."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def check_evaluation(context: Context) -> Iterator[Row]:
    """Run `retool evaluate`: vLLM in the command's process, tools on.

    It takes the model that the stage `rl` left after its SFT, or else a random one, which writes no program.
    """
    from verl_ext.sandbox.launch import running_server

    inputs, out = make_inputs(context.folder), context.folder / "evaluation"
    policy = context.folder.parent / "rl" / "policy"
    learned = policy.is_dir()
    yield Row(
        "model", "", "of the stage rl, after its SFT" if learned else "random weights: run rl before to see calls"
    )
    model = str(policy) if learned else inputs["MODEL_PATH"]
    command = [sys.executable, "-m", "verl_ext.evaluation", "--model", model, "--out", str(out)]
    command += ["--config=tiny_dapo", f"--data={inputs['DATA_DIR']}/eval.parquet", "--n=2"]
    if context.is_cuda:
        command += rl_on_gpu()
    with running_server() as url:
        run([*command, f"retool.sandbox.urls=[{url}]"], context.folder / "evaluation.log")
    result = json.loads((out / "result.json").read_text())
    samples, tools = result["samples"], result["tools"]
    judged, wanted = samples["judged"], samples["wanted"]
    yield Row("samples judged", str(wanted), str(judged), judged == wanted > 0)
    text = f"{tools['tool/calls'] * judged:.0f}, {tools['tool/ok_rate']:.0%} of them ran well"
    yield Row("tool calls", ">= 1" if learned else "", text, tools["tool/calls"] > 0 if learned else None)
