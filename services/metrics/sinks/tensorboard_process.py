"""What runs in the process of the TensorBoard sink: sorts rows into folders, DIR/RUN/AXIS.

An axis has a folder of its own below its run's, since TensorBoard purges a folder as a whole: going back to rollout 10
must not take the training steps after 10 with it. A folder of a run that has our run's name, but is another's, is left
alone: ours then has a mark behind its name.
"""

import fcntl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any  # Any: what JSON holds
from urllib.parse import quote

from services.metrics.sinks.tensorboard_events import Place, values_of
from services.metrics.sinks.tensorboard_folder import AxisFolder

MAX_OPEN_FOLDERS = 256
_OWNER = ".furlong-owner"


class TensorBoard:
    """Writes rows in order; one process at a time."""

    def __init__(self) -> None:
        self._root = Path()
        self._identities: dict[str, str] = {}
        self._runs: dict[str, tuple[Path, IO[str]]] = {}
        self._folders: dict[tuple[str, str], AxisFolder] = {}
        self._touched: set[tuple[str, str]] = set()

    def start(self, settings: Mapping[str, Any]) -> None:
        """Settings: dir. What is in the files is found out folder by folder, when a row comes for it."""
        self._root = Path(settings["dir"])
        self._root.mkdir(parents=True, exist_ok=True)

    def identify(self, given: Mapping[str, str]) -> None:
        """Which runs are which."""
        self._identities |= given

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add them to their folders."""
        for row in rows:
            body = row["body"]
            if not row["current"]:
                continue  # a newer attempt took its place
            values = values_of(row)
            if not values:
                continue
            folder = self._folder(body["run"], body["axis"])
            folder.add(Place(row["row"], body["attempt"], body["step"], row["ts"]), values)
            self._touched.add((body["run"], body["axis"]))

    def flush(self) -> None:
        """What was added is on the disk."""
        for key in self._touched:
            self._folders[key].flush()
        self._touched.clear()

    def close(self) -> None:
        """The same, for good."""
        self.flush()
        for folder in self._folders.values():
            folder.close()

    def _folder(self, run: str, axis: str) -> AxisFolder:
        key = (run, axis)
        folder = self._folders.pop(key, None) or AxisFolder(self._run_path(run) / axis_folder(axis))
        self._folders[key] = folder  # the newest last
        if len(self._folders) > MAX_OPEN_FOLDERS:
            oldest = next(iter(self._folders))
            self._folders[oldest].flush()
            self._touched.discard(oldest)
            self._folders.pop(oldest).close()
        return folder

    def _run_path(self, run: str) -> Path:
        if run not in self._runs:
            identity = self._identities[run]
            plain = self._root / folder_name(run)
            for path in (plain, plain.with_name(f"{plain.name}-{identity}")):
                path.mkdir(parents=True, exist_ok=True)
                lock = _own(path / _OWNER, identity)
                if lock is not None:
                    self._runs[run] = path, lock
                    break
            else:
                raise RuntimeError(f"{plain} is written by another service; name another folder")
        return self._runs[run][0]


def folder_name(run: str) -> str:
    """A run's folder: its name, with what a file's name cannot hold percent-encoded. Two runs never share one."""
    name = quote(run, safe=" @+=,")
    return "%2E" + name[1:] if name.startswith(".") else name or "%"


def axis_folder(axis: str) -> str:
    """`train` for train/step, `engine.time` for engine/time."""
    parts = [quote(part, safe="").replace(".", "%2E") for part in axis.split("/")]
    return parts[0] if len(parts) == 2 and parts[1] == "step" else ".".join([*parts, *([""] * (len(parts) == 1))])


def _own(path: Path, identity: str) -> IO[str] | None:
    """The lock of a folder that is ours. None: another's, or one that another service writes to now."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    file.seek(0)
    owner = file.read()
    if owner not in ("", identity):
        file.close()
        return None
    if not owner:
        file.write(identity)
        file.flush()
    return file
