"""Evaluation with tools: `retool evaluate` runs it.

`problems`, `servers` and `sampling` take samples, `store` keeps them as records. `samples` reads them, and those of a
run's validations; `figures` and `result` say what they show.
`checkpoint` finds and merges a run's checkpoint, `defaults` chooses settings if none are named.
In: a model, a server, a checkpoint or records. Out: `records/`, `settings.json`, `result.json`, `result.md`.
"""
