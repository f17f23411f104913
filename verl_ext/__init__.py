"""Extensions of verl for tool-integrated math RL (ReTool, arXiv:2504.11536).

`VERL_USE_EXTERNAL_MODULES=verl_ext` makes verl import this package at the end of `import verl`, in every process. It
must stay cheap: all it does is to switch on the CPU platform if torch was built without an accelerator
(verl_ext/cpu), to let YAMLs calculate, to make checkpoints complete or absent (verl_ext/checkpoints), to register our
objectives, to extend verl's trainers by the options of `retool.*` (verl_ext/trainer), to keep warnings in the log
(verl_ext/rollout), and to let requests name ranks of servers (verl_ext/fleet).
Agent loop, reward manager, sampler and SFT data set are loaded by verl from the paths that the YAMLs in configs/ name.
If verl is not installed, only the sandbox is in use, and this package does nothing.
"""

import math
from importlib.util import find_spec
from types import ModuleType

__version__ = "0.1.0"


def _let_yamls_calculate(omegaconf: ModuleType) -> None:
    """Register `${retool.sum:a,b}`, `${retool.product:a,b}` and `${retool.quotient:a,b}`, which rounds down.

    Ray's task runner resolves a run (verl's main_ppo.py:145).
    """
    register = omegaconf.OmegaConf.register_new_resolver
    register("retool.sum", lambda *numbers: sum(numbers), replace=True)
    register("retool.product", lambda *numbers: math.prod(numbers), replace=True)
    register("retool.quotient", lambda whole, part: whole // part, replace=True)


if find_spec("verl"):
    import wrapt

    from verl_ext.cpu import activate_if_needed
    from verl_ext.trainer import extend_trainers

    wrapt.register_post_import_hook(_let_yamls_calculate, "omegaconf")
    # At once where verl is being imported already; without verl in the process (sandbox server, report) never.
    wrapt.register_post_import_hook(activate_if_needed, "verl")
    wrapt.register_post_import_hook("verl_ext.checkpoints.hooks:install", "verl")
    wrapt.register_post_import_hook(extend_trainers, "verl.trainer.ppo.v1")
    wrapt.register_post_import_hook("verl_ext.trainer.objective:register", "verl.trainer.ppo.core_algos")
    wrapt.register_post_import_hook("verl_ext.trainer.advantages:register", "verl.trainer.ppo.core_algos")
    wrapt.register_post_import_hook(
        "verl_ext.trainer.rollout_weights:bear_zeros", "verl.trainer.ppo.rollout_corr_helper"
    )
    wrapt.register_post_import_hook("verl_ext.trainer.token_notes:extend_loss", "verl.workers.utils.losses")
    wrapt.register_post_import_hook(
        "verl_ext.trainer.gradient_accumulation:keep_weights", "verl.workers.engine.fsdp.transformer_impl"
    )
    wrapt.register_post_import_hook("verl_ext.trainer.tracking:extend", "verl.utils.tracking")
    wrapt.register_post_import_hook("verl_ext.trainer.limits:obey_nccl_timeout", "verl.workers.engine_workers")
    vllm = "verl.workers.rollout.vllm_rollout"
    wrapt.register_post_import_hook("verl_ext.rollout.weight_sockets:name_senders", f"{vllm}.vllm_rollout")
    wrapt.register_post_import_hook("verl_ext.rollout.weight_sockets:name_receivers", f"{vllm}.vllm_async_server")
    wrapt.register_post_import_hook("verl_ext.rollout.weight_sockets:bound_waits", f"{vllm}.bucketed_weight_transfer")
    wrapt.register_post_import_hook(
        "verl_ext.rollout.logs:keep_warnings", "model_hosting_container_standards.logging_config"
    )
    wrapt.register_post_import_hook("verl_ext.rollout.logs:ignore_flush", "verl.trainer.ppo.v1.trainer_separate_async")
    wrapt.register_post_import_hook(
        "verl_ext.fleet.ranks:obey_rank", "verl.workers.rollout.vllm_rollout.vllm_async_server"
    )
    wrapt.register_post_import_hook(
        "verl_ext.trainer.shared_prompt:add_backend", "verl.models.transformers.monkey_patch"
    )
