"""Checks of a run before it starts: `retool doctor --config-name qwen2-32b_dapo [overrides]`.

There is one module per topic, with a few functions from a run, and if needed the machine, to findings. The launchers
run the quick ones, which look at settings, files and the machine; the rest need tokenizer, data and sandbox.
In: a YAML and overrides. Out: findings, the worst of which decides the exit status.
"""
