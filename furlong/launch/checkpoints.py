"""Finds the newest complete checkpoint of a run directory, without reading what is in it."""

import re
from dataclasses import dataclass
from pathlib import Path

from furlong.rundir import RunDir

NAME = re.compile(r"^rollout_(\d+)$")
LAST_FILE = "meta.json"  # the trainer writes it last


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    rollout_id: int
    """The last rollout that it holds."""
    path: Path


def newest_checkpoint(run_dir: RunDir) -> Checkpoint | None:
    """The one that a start would go on from; None: a start begins anew."""
    try:
        folders = [entry for entry in run_dir.checkpoints.iterdir() if (entry / LAST_FILE).is_file()]
    except OSError:
        return None
    found = [Checkpoint(int(match[1]), entry) for entry in folders if (match := NAME.match(entry.name))]
    return max(found, key=lambda checkpoint: checkpoint.rollout_id, default=None)
