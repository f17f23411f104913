"""What accepts a machine with a GPU: stages, each a few rows of what was expected and what was seen.

`bash scripts/gpu_acceptance.sh` runs them. Those that come first need only torch; a stage whose packages are missing
says so and does not run. With `--device cpu` they run in small. Five stages share helpers with tests/e2e.
"""
