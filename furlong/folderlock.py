"""One service a folder: the kernel's file lock, which goes with its holder however that ends."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from furlong.config import ConfigError
from furlong.config.errors import Problem

TAKE_S = 1.0
"""A service that is being stopped may still hold it."""


class FolderLock:
    """Held while entered."""

    def __init__(self, folder: Path, *, service: str, remedy: str, take_s: float = TAKE_S) -> None:
        """service, remedy: for the error of who comes second."""
        self._folder, self._service, self._remedy, self._take_s = folder, service, remedy, take_s
        self._file: IO[str] | None = None

    def __enter__(self) -> "FolderLock":
        """Raises ConfigError naming the process that has it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._folder / ".lock", "a+")
        deadline = time.monotonic() + self._take_s
        while not self._try():
            if time.monotonic() > deadline:
                self._file.seek(0)
                holder = self._file.read().strip() or "unknown"
                self._file.close()
                rule = f"is in use by another {self._service} service (pid {holder})"
                raise ConfigError([Problem(f"{self._service} folder", str(self._folder), rule, self._remedy)])
            time.sleep(0.05)
        self._file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only its holder's id is not known
            os.write(self._file.fileno(), str(os.getpid()).encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _try(self) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
