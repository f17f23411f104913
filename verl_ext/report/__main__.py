"""Run the command `python -m verl_ext.report`; see page.py."""

from verl_ext.report.page import main

if __name__ == "__main__":
    main()
