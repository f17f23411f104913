"""Benchmarks and tests under load behind docs/evidence: what parts cost, and what a run survives.

Run them from the repository's root: `python -m scripts.bench.NAME`; `--help` says what each does.
Times: `speedups`, `vs_trl` (`trl_side`), `gateway`, `raw_parts`, `records`, `reward`, `sandbox`, `view`.
Faults: `chaos` (`chaos_faults`, `chaos_measure`; `chaos_others` and `stock/` for verl and TRL), `soak`.
Load: `stress_sandbox`, `fuzz_reward`.
In: quickstarts and their runs. Out: tables; the exit status is 1 if a limit is missed.
"""
