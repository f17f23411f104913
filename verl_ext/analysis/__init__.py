"""What may be asked before GPUs are spent, and of one batch afterwards: simulations and comparisons, on a CPU.

`workload.py` draws the responses of a step from its metrics; `events.py` plays servers, a sandbox and time;
`schedules.py` plays the trainer's modes over them; `calibration.py` finds a machine's speeds; `step_time.py` is the
command. In: metrics of a run. Out: tables, and pictures by verl_ext/report.
"""
