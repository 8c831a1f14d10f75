"""Whether the disk of the store has room for records. Looks at it at most every CHECK_S seconds."""

import os
import time
from pathlib import Path

import structlog

log = structlog.get_logger()

CHECK_S = 0.1
NOTHING_BYTES = 1024 * 1024
"""With less than so much free a disk counts as full."""
ENOUGH = 1.25
"""Records are taken again when this many times the reserve is free: no flapping at the edge."""


class Room:
    """The reserve that only cursors, rows and alerts may use."""

    def __init__(self, folder: Path, min_free_bytes: int) -> None:
        self.short = ""
        """What is short, in words. Empty: there is room."""
        self._folder, self._min_free_bytes = folder, min_free_bytes
        self._looked_at = 0.0

    def is_short(self) -> bool:
        """Whether records must be held off."""
        now = time.monotonic()
        if self._min_free_bytes and now - self._looked_at > CHECK_S:
            self._looked_at = now
            self._look()
        return bool(self.short)

    def _look(self) -> None:
        try:
            disk = os.statvfs(self._folder)
        except OSError:  # the write says what is wrong
            return
        free = disk.f_bavail * disk.f_frsize
        reserve = min(self._min_free_bytes, disk.f_blocks * disk.f_frsize // 4)  # on a disk that is small altogether
        if free < reserve:
            if not self.short:
                log.warning("metrics_disk_full", free_bytes=free, reserve_bytes=reserve)
            self.short = (
                f"the disk of the metrics store has {free} bytes free, {reserve} are kept for what must be written"
            )
        elif self.short and free > reserve * ENOUGH:
            log.info("metrics_disk_has_room", free_bytes=free)
            self.short = ""


def cannot_be_written(folder: Path) -> bool:
    """Whether the disk is full, or mounted to be read only."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return True
    return bool(disk.f_flag & os.ST_RDONLY) or disk.f_bavail * disk.f_frsize < NOTHING_BYTES


def is_there_but_locked(path: Path) -> bool:
    """Whether a store exists, on a disk that cannot be written now."""
    return path.exists() and cannot_be_written(path.parent)
