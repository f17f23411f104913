"""Run the command `retool grade`; see grade.py."""

import sys

from verl_ext.reward.grade import main

if __name__ == "__main__":
    sys.exit(main())
