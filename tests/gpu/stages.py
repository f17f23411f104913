"""The stages in the order in which they run: those on torch alone first."""

from tests.gpu import attention, fleet, machine, runs, sharing, training, weights
from tests.gpu.stage import Stage

TORCH = ("torch", "transformers", "psutil", "packaging")
VERL = (
    *TORCH,
    "verl==0.9.1",
    "transformers<5.11",
    "ray",
    "tensordict",
    "hydra-core",
    "wrapt",
    "pyzmq",
    "TransferQueue",
)
RUN = (*VERL, "datasets", "pyarrow", "pandas", "accelerate")
RL = (*RUN, "vllm", "aiohttp", "pydantic", "math-verify")

STAGES = [
    Stage("machine", "driver, versions, compiler, arithmetic", TORCH, machine.check_machine, limit_s=60),
    Stage("log_probs", "bf16 against fp32, GPU against CPU", TORCH, attention.check_log_probs, limit_s=120),
    Stage("weights", "3 GB to another process", TORCH, weights.check_weights, limit_s=180),
    Stage("sft_step", "a step of the 4B's SFT: memory", TORCH, training.check_sft_step, limit_s=240),
    Stage("actor_step", "a step of the 4B's actor: memory", TORCH, training.check_actor_step, limit_s=240),
    Stage("flash_attn", "flash-attn, or a wheel, is there", TORCH, machine.check_flash_attention, cuda_only=True),
    Stage("packing", "packed sequences against separate ones", TORCH, attention.check_packing, limit_s=60),
    Stage("sharing", "a group's prompt computed once: gradient, time", TORCH, sharing.check_sharing, limit_s=180),
    Stage("buckets", "3 GB by verl's own transfer", VERL, weights.check_buckets, limit_s=240),
    Stage("sft", "SFT: killed, resumed, merged, against a CPU's losses", RUN, runs.check_sft),
    Stage("rl", "three steps of RL with vLLM and tool calls", RL, runs.check_rl),
    Stage("small", "the small rung: SFT and steps of RL", RL, runs.check_small),
    Stage("sleep", "vLLM gives memory back", RL, runs.check_sleep, limit_s=240, cuda_only=True),
    Stage("fleet", "weights that change in flight, an engine that dies", RL, fleet.check_fleet),
    Stage("evaluation", "evaluation with vLLM in its process", RL, runs.check_evaluation, limit_s=300),
]
