"""Commands of this repository. `studies` and `bench` are run as modules: `python -m scripts.studies.NAME`."""
