"""Extensions of verl for tool-integrated math RL (ReTool, arXiv:2504.11536).

`VERL_USE_EXTERNAL_MODULES=verl_ext` makes verl import this package at the end of `import verl`, in every process. It
must stay cheap: all it does is to switch on the CPU platform where torch was built without an accelerator
(verl_ext/cpu), to make checkpoints whole or absent (verl_ext/checkpoints), and to extend verl's trainers by the
options of `retool.*` (verl_ext/trainer).
Agent loop, reward manager, sampler and SFT data set are loaded by verl from the paths that the YAMLs in configs/ name.
Where verl is not installed, the sandbox is alone and this package does nothing.
"""

from importlib.util import find_spec

from verl_ext import moved

moved.install()  # old names of modules, as users' YAMLs and runs of before have them
if find_spec("verl"):
    import wrapt

    from verl_ext.cpu import activate_if_needed
    from verl_ext.trainer import extend_trainers

    # At once where verl is being imported already; without verl in the process (sandbox server, report) never.
    wrapt.register_post_import_hook(activate_if_needed, "verl")
    wrapt.register_post_import_hook("verl_ext.checkpoints.hooks:install", "verl")
    wrapt.register_post_import_hook(extend_trainers, "verl.trainer.ppo.v1")
