"""The command `retool quickstart`; see pipeline.py."""

from verl_ext.quickstart.pipeline import main

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("quickstart: interrupted; the same command continues from here") from None
