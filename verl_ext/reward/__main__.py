"""Run the command `python -m verl_ext.reward`; see grade.py."""

import sys

from verl_ext.reward.grade import main

if __name__ == "__main__":
    sys.exit(main())
