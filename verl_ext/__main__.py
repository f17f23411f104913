"""The command `retool`: `retool doctor` is `python -m verl_ext.doctor`, and so on for every room with a command."""

import os
import sys
from importlib.util import find_spec

from verl_ext import __version__

# By what they are for: name -> (module, what it does). Only the sandbox needs nothing but the base installation.
COMMANDS = {
    "quickstart": ("verl_ext.quickstart", "teach a small model to use a tool on this machine, from data to evaluation"),
    "doctor": ("verl_ext.doctor", "check a run before it starts"),
    "view": ("verl_ext.view", "show runs and their responses in a browser"),
    "report": ("verl_ext.report", "write a run's report as one HTML page"),
    "records": ("verl_ext.records", "print what a run has kept of its responses"),
    "ledger": ("verl_ext.ledger", "show what became of every prompt of an RL run"),
    "checkpoints": ("verl_ext.checkpoints", "show a run's checkpoints, and where it would resume"),
    "evaluate": ("verl_ext.evaluation", "evaluate a model with tools, with intervals"),
    "grade": ("verl_ext.reward", "grade responses in a file"),
    "traces": ("verl_ext.traces", "make, check and select traces for SFT"),
    "environments": ("verl_ext.environments", "check the tasks of a data set, score episodes again"),
    "sandbox": ("verl_ext.sandbox.server", "serve the sandbox that runs a model's code"),
    "gateway": ("verl_ext.gateway", "try a model's chat template before an agent trains on it"),
    "fleet": ("verl_ext.fleet", "list, add or remove the rollout servers of a run"),
}


def main() -> None:
    """Run the command that the first argument names, in this process's place."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: retool NAME [ARGUMENT...]\n")
        print("\n".join(f"  {each:<13} {what}" for each, (_, what) in COMMANDS.items()))
        print("\nretool NAME --help says more; retool --version. Each is also a module: python -m verl_ext.doctor")
    elif name == "--version":
        print(f"verl-retool {__version__}")
    elif name not in COMMANDS:
        sys.exit(f"retool: there is no command {name!r}; expected one of {', '.join(COMMANDS)}")
    elif name != "sandbox" and not find_spec("omegaconf"):
        sys.exit(
            f"retool {name} needs the training stack, and only the sandbox is installed here. In a clone of the "
            "repository `bash scripts/setup_env.sh` installs it into .venv."
        )
    else:
        command = [sys.executable, "-m", COMMANDS[name][0], *arguments]
        os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
