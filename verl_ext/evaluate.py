"""`python -m verl_ext.evaluate`, the name of the command that is verl_ext/evaluation/__main__.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("verl_ext.evaluation", run_name="__main__", alter_sys=True)
