"""The command `python -m verl_ext.checkpoints`; see folder.py."""

from verl_ext.checkpoints.folder import main

if __name__ == "__main__":
    main()
