"""Runs the metrics service of a run directory: `python -m tests.metrics.serve CONFIG`."""

import sys
from pathlib import Path

from furlong.config import RunConfig
from services.metrics.main import main

if __name__ == "__main__":
    sys.exit(main(RunConfig.model_validate_json(Path(sys.argv[1]).read_bytes()), rank=0, foreground=False))
