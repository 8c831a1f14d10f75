"""Runs the metrics service of a run directory: `python -m tests.metrics.serve CONFIG`."""

import os
import sys
from pathlib import Path

from furlong.config import RunConfig
from services.metrics.main import main
from services.metrics.sinks import wandb_sink

wandb_sink.LOOK_S = float(os.environ.get("TEST_WANDB_LOOK_S", wandb_sink.LOOK_S))
wandb_sink.STUCK_S = float(os.environ.get("TEST_WANDB_STUCK_S", wandb_sink.STUCK_S))

ALONE = os.environ.get("TEST_ALONE") == "1"

if __name__ == "__main__":
    sys.exit(main(RunConfig.model_validate_json(Path(sys.argv[1]).read_bytes()), rank=0, foreground=False, alone=ALONE))
