"""Commands of this repository. Those in folders are run as modules: `python -m scripts.studies.NAME`."""
