"""What accepts a machine with a GPU: stages, each a few rows of what was expected against what was seen.

`bash scripts/gpu_acceptance.sh` and `pytest -m gpu` run the same stages (`stages.py` lists them). Those that come first
need torch alone; a stage whose packages are missing says so and does not run. With `--device cpu` they run in small.
"""
