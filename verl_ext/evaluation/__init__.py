"""Evaluation with tools: `python -m verl_ext.evaluation` runs it.

`problems`, `servers` and `sampling` take samples, `store` keeps them. `samples` reads them, and also those of records
and of verl's dumps; `figures` and `result` say what they show,
and `blocks` finds calls in their text.
`checkpoint` finds and merges a run's checkpoint, `defaults` chooses settings if none are named. `past_samples` and
`pass_rates` say how hard problems are.
In: a model, a server, a checkpoint or samples. Out: `samples.jsonl`, `result.json`, `result.md`.
"""
