"""Studies behind docs/evidence, and questions to answer on a CPU before you spend GPUs.

Run them from the repository's root: `python -m scripts.studies.NAME`; `--help` says what each does.
Learning: `seeds`, `small_study`, `compare_objectives`, `compare_with_published`.
Asynchrony: `compare_modes`, `ablation` (with `static_batches`, `slow_sandbox`); `step_time` predicts a step's time:
`workload` draws responses, `events` and `schedules` simulate, `calibration` finds a machine's speeds.
Objectives: `stability_map` (`tiny_model`, `cell`, `stability`), `correction_lab`; `preset` applies one to a batch.
Checks: `check_reward`, `gateway_exactness`, `mutate` (`mutants`).
`shared` has what all need, `drawing` makes SVG files.
In: folders of runs and quickstarts. Out: tables, pictures, JSON lines.
"""
