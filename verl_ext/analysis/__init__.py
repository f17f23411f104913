"""Questions to answer on a CPU before you spend GPUs: how long a step takes in another mode, what an objective bears.

`workload.py` draws the responses of a step from its metrics; `events.py` simulates servers, a sandbox and time;
`schedules.py` simulates the trainer's modes over them; `calibration.py` finds a machine's speeds; `step_time.py` is the
command. `tiny_model.py` is the tiny task's model in plain PyTorch, `preset.py` a preset on a batch, `cell.py` a run
with exact staleness, `stability.py` the summary of many runs; their command is scripts/stability_map.py.
`correction_lab.py` is the command that looks at a recorded batch under every preset.
In: metrics and batches of a run; the quickstart's model and data. Out: tables, and pictures by verl_ext/report.
"""
