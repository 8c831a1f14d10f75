"""Starts a run, with the flags of `furlong up`; for launchers that want a script: `python3 train.py --config FILE`."""

import sys

from furlong.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["up", *sys.argv[1:]]))
