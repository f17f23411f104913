"""Show what became of every prompt of an RL run, by `prompts.jsonl` in the run's folder.

    retool ledger outputs/qwen2-32b_dapo

If the run's servers were watched (`retool.fleet.health`), `servers.jsonl` says what became of them.

Every prompt that a run draws from its data has one end (`outcome.PromptEnd`) or is open, and the same holds for each of
its rollouts (`outcome.RolloutFate`). The command exits with 1 unless the ledger sums: no prompt was drawn, ended or
trained twice, as many are open as the queue holds, and each ended prompt has as many ended rollouts as were submitted.
"""

import argparse
import sys
from pathlib import Path

from verl_ext.ledger.prompts import FILE, read_tally
from verl_ext.ledger.servers import read_servers
from verl_ext.runs.folder import NoRun, training_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, or of a quickstart")
    folder = parser.parse_args().run
    try:
        folder = folder if (folder / FILE).exists() else training_folder(folder, "rl")
        tally, servers = read_tally(folder), read_servers(folder)
    except NoRun as error:
        sys.exit(str(error))
    except FileNotFoundError:
        sys.exit(f"{folder} has no {FILE}: expected the folder of an RL run that has finished a step. SFT has none.")
    except ValueError as error:
        sys.exit(str(error))
    print(tally.table())
    faults = tally.faults()
    if servers:
        print(servers.line())
        faults += servers.faults(tally.retries)
    print(*(faults or ["The books balance: every prompt has exactly one end or is still open."]), sep="\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
