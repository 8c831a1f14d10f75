"""Whether the disk of the store has room for records, with all that is still to be written on their account."""

import os
from pathlib import Path

import structlog

log = structlog.get_logger()

WRITTEN_TWICE = 2
"""Records go to the write-ahead log, and from there to the file."""
ENOUGH = 1.25
"""Records are taken again when this many times the reserve is free: no flapping at the edge."""
NOTHING_BYTES = 1024 * 1024
"""With less than so much free a disk counts as full."""


class Room:
    """The reserve that only cursors, rows and alerts may use."""

    def __init__(self, store: Path, min_free_bytes: int) -> None:
        self.short = ""
        """What is short, in words. Empty: there is room."""
        self._store, self._log = store, store.with_name(store.name + "-wal")
        self._min_free_bytes = min_free_bytes

    def is_short(self, num_bytes: int) -> bool:
        """Whether so many bytes of records must be held off. A few microseconds: it is asked before each commit."""
        if not self._min_free_bytes:
            return False
        try:
            disk = os.statvfs(self._store.parent)
            in_log = self._log.stat().st_size if self._log.exists() else 0
        except OSError:  # the write says what is wrong
            return bool(self.short)
        reserve = min(self._min_free_bytes, disk.f_blocks * disk.f_frsize // 4)  # on a disk that is small altogether
        free = disk.f_bavail * disk.f_frsize
        left = free - WRITTEN_TWICE * num_bytes - in_log
        if left < reserve:
            if not self.short:
                log.warning("metrics_disk_full", free_bytes=free, reserve_bytes=reserve)
            self.short = (
                f"the disk of the metrics store has {free} bytes free, {reserve} are kept for what must be written"
            )
        elif self.short and left > reserve * ENOUGH:
            log.info("metrics_disk_has_room", free_bytes=free)
            self.short = ""
        return bool(self.short)


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
