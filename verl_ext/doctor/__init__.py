"""Checks of a run before it starts: `python -m verl_ext.doctor --config-name qwen2-32b_dapo [overrides]`.

One module a topic, each a few functions from a run, and where it matters the machine, to findings. The launchers run
the quick ones, which look at settings, files and the machine; the rest needs tokenizer, data and sandbox.
In: a YAML and overrides. Out: findings, the worst of which is the exit status.
"""
