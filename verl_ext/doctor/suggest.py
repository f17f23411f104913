"""Guess which key or name was meant: by what other libraries call it, by its parts, or by its letters."""

import difflib
import os
import re
from collections.abc import Iterable

NEAR = 0.7  # similarity of the last parts; 1: equal
# What a key is called elsewhere (TRL, transformers, OpenRLHF, Megatron, the papers) -> the ends of verl's keys or ours.
OTHER_WORDS = {
    "data.train_batch_size": "batch_size global_batch_size rollout_batch_size train_bs prompts_per_step",
    "ppo_mini_batch_size": "mini_batch_size minibatch_size ppo_batch_size",
    "micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu": "micro_batch_size micro_train_batch_size "
    "per_device_train_batch_size gradient_accumulation gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "data.max_response_length data.max_length": "max_tokens max_new_tokens max_completion_length max_response_len "
    "generate_max_len response_length max_output_length",
    "data.max_prompt_length": "prompt_length max_prompt_len prompt_max_len max_input_length",
    "data.max_length rollout.max_model_len": "max_seq_len max_seq_length max_sequence_length seq_length cutoff_len",
    "trainer.total_epochs": "epochs num_epochs num_train_epochs max_epochs n_epochs",
    "trainer.total_training_steps": "max_steps num_steps total_steps num_train_steps train_steps max_train_steps",
    "optim.lr": "learning_rate lr_rate learningrate actor_learning_rate base_lr",
    "optim.lr_warmup_steps": "warmup warmup_steps num_warmup_steps lr_warmup",
    "optim.lr_warmup_steps_ratio": "warmup_ratio lr_warmup_ratio",
    "optim.lr_scheduler_type": "scheduler lr_scheduler lr_schedule",
    "optim.min_lr_ratio": "min_lr min_learning_rate",
    "optim.weight_decay": "wd l2",
    "optim.betas": "adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "optim.clip_grad": "max_grad_norm grad_norm gradient_clip gradient_clipping clip_grad_norm",
    "data.seed": "seed random_seed rng_seed",
    "trainer.n_gpus_per_node": "n_gpus num_gpus gpus ngpus gpus_per_node nproc_per_node",
    "trainer.nnodes": "num_nodes n_nodes nodes",
    "actor.kl_loss_coef": "kl_coef kl_beta beta init_kl_coef kl_coeff",
    "actor.clip_ratio_low": "clip_range cliprange clip_eps clip_epsilon eps_clip epsilon epsilon_low eps_clip_low",
    "actor.clip_ratio_high": "epsilon_high eps_clip_high clip_high clip_higher",
    "actor.clip_ratio_c": "dual_clip delta",
    "actor.entropy_coeff": "entropy_coef ent_coef entropy_bonus entropy_beta",
    "policy_loss.loss_mode": "loss_type policy_loss_type",
    "algorithm.adv_estimator": "advantage_estimator advantage adv_type",
    "rollout.n": "num_generations num_samples n_samples n_samples_per_prompt samples_per_prompt group_size "
    "num_rollouts num_return_sequences rollouts_per_prompt",
    "rollout.temperature": "temp sampling_temperature",
    "trainer.test_freq": "eval_steps eval_freq eval_every eval_interval evaluation_steps val_freq val_interval",
    "trainer.save_freq": "save_steps save_interval save_every checkpoint_freq checkpoint_interval ckpt_freq",
    "trainer.default_local_dir": "output_dir out_dir save_dir save_path ckpt_dir ckpt_path checkpoint_dir output_path",
    "trainer.experiment_name": "run_name exp_name experiment wandb_run_name",
    "trainer.project_name": "project wandb_project",
    "trainer.logger": "report_to loggers log_with",
    "trainer.resume_mode": "resume resume_from_checkpoint",
    "trainer.val_before_train": "eval_on_start eval_at_start",
    "retool.checkpoints.keep_last": "save_total_limit max_ckpt_num max_checkpoints keep_checkpoints",
    "retool.max_tool_calls": "max_turns max_tool_turns max_code_runs",
    "retool.sandbox.urls": "sandbox_url sandbox_urls sandbox_fusion_url",
    "retool.sandbox.timeout_s": "code_timeout sandbox_timeout run_timeout",
    "model.path": "model_name_or_path model_path model_name pretrain pretrained base_model",
    "model.enable_gradient_checkpointing": "gradient_checkpointing activation_checkpointing",
    "model.lora_rank": "lora_r",
    "data.train_files": "train_file train_data dataset dataset_name prompt_data train_path",
    "data.val_files": "val_file val_data eval_file eval_dataset eval_data test_files",
    "tensor_model_parallel_size": "tp tp_size tensor_parallel tensor_parallel_size vllm_tensor_parallel_size",
    "ulysses_sequence_parallel_size": "sp sp_size ulysses sequence_parallel_size context_parallel_size ring_attn_size",
    "rollout.gpu_memory_utilization": "gpu_mem gpu_memory vllm_gpu_memory_utilization",
}
ENDS = {word: ends.split() for ends, words in OTHER_WORDS.items() for word in words.split()}
ASIDE = (
    "critic.",
    "distillation.",
    "reward_model.",
    "reward.reward_model.",
    "actor_rollout_ref.ref.",
)  # few runs have these


def did_you_mean(word: str, known: Iterable[str], fallback: str = "") -> str:
    """Return `Did you mean grpo?`, else `fallback`."""
    names = sorted(known)
    best = _by_other_word(word, names) or _by_parts(word, names) or _by_letters(word, names)
    return f"Did you mean {best}?" if best else fallback


def _by_other_word(word: str, names: list[str]) -> str:
    """Return a key that has the word as another name: preferably one in its own section, else the most common one."""
    for end in ENDS.get(word.rpartition(".")[2].lower().replace("-", "_"), []):
        if found := [name for name in names if name == end or name.endswith(f".{end}")]:
            return max(found, key=lambda name: (_shared(name, word), not name.startswith(ASIDE), -len(name)))
    return ""


def _by_parts(word: str, names: list[str]) -> str:
    """Return a key of the word's own section that has all its parts: `data.max_length` for `data.max_len`."""
    section, _, last = word.rpartition(".")
    pattern = re.compile("(.*_)?" + ".*_".join(map(re.escape, last.split("_"))), re.IGNORECASE)
    own = (name for name in names if name.rpartition(".")[0] == section and pattern.match(name.rpartition(".")[2]))
    return min(own, key=len, default="") if len(last) > 2 else ""  # almost any key has one or two letters


def _shared(name: str, word: str) -> int:
    """Return the number of leading parts that both paths share."""
    return len(os.path.commonprefix([name.split(".")[:-1], word.split(".")[:-1]]))


def _by_letters(word: str, names: list[str]) -> str:
    """Return the name with the most similar last part, and among several the most similar path."""

    def likeness(name: str) -> tuple[float, float]:
        pairs = ((name.rpartition(".")[2], word.rpartition(".")[2]), (name, word))
        last, whole = (difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() for a, b in pairs)
        return round(last, 2), whole

    best = max(names, key=likeness, default="")
    return best if best and likeness(best)[0] >= NEAR else ""
