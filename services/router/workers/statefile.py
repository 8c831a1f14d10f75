"""The membership on disk, so that a router that is started again knows its workers.

Written off the event loop, whole and atomically, at most every COALESCE_S and once more at the end; readable by its
owner alone, for it holds the workers' keys. A file that cannot be understood is set aside, never removed; a disk that
cannot be written is told once and costs no request anything.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from furlong.rundir import write_atomically
from services.router.workers.registration import Record, Registration

log = structlog.get_logger()

VERSION = 1
COALESCE_S = 0.2
RETRY_S = 5.0
CLOSE_TIMEOUT_S = 5.0


class StateFile:
    """The file of one router."""

    def __init__(self, path: Path, records: Callable[[], Sequence[Record]]) -> None:
        """records: what is to be kept, as it is when called."""
        self._path = path
        self._records = records
        self._dirty = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="router_state")
        self._written: bytes | None = None
        self._failing = False

    def load(self) -> list[Record]:
        """What the last router left. Blocks; for the start. Never raises for what stands in the file."""
        try:
            content = self._path.read_bytes()
            records = decode(content)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            self._set_aside(error)
            return []
        self._written = content
        return records

    def changed(self) -> None:
        """Write soon."""
        self._dirty.set()

    async def keep(self) -> None:
        """Write after changes; runs until cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if await self._write():
                await asyncio.sleep(COALESCE_S)
            else:
                await asyncio.sleep(RETRY_S)
                self._dirty.set()

    async def close(self) -> None:
        """Write what is not written yet. A disk that hangs is left to itself after CLOSE_TIMEOUT_S."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write()
        except TimeoutError:
            log.error("router_state_not_written", path=str(self._path), error=f"no answer within {CLOSE_TIMEOUT_S:g} s")
        self._thread.shutdown(wait=False)

    async def _write(self) -> bool:
        records, last = self._records(), self._written
        self._written = None  # until it is known what stands there
        try:
            # One thread: a write that was given up ends before the next one begins.
            loop = asyncio.get_running_loop()
            content = await loop.run_in_executor(self._thread, _store, self._path, records, last)
        except OSError as error:
            if not self._failing:
                log.error(
                    "router_state_not_written",
                    path=str(self._path),
                    error=str(error),
                    remedy="free or mend the disk: until then a restart of the router forgets changes of its workers",
                )
            self._failing = True
            return False
        if self._failing:
            log.info("router_state_written_again", path=str(self._path))
        self._failing, self._written = False, content
        return True

    def _set_aside(self, error: Exception) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns()}")
        try:
            self._path.rename(aside)
        except OSError as failure:
            log.error("router_state_unreadable", path=str(self._path), error=repr(error), not_set_aside=str(failure))
            return
        log.error(
            "router_state_damaged",
            path=str(self._path),
            kept_as=str(aside),
            error=repr(error),
            remedy="register the workers again: those of flags and of the rollout service come back by themselves",
        )


def encode(records: Sequence[Record]) -> bytes:
    """The file's content."""
    return json.dumps({"version": VERSION, "workers": [_plain(record) for record in records]}, indent=1).encode()


def decode(content: bytes) -> list[Record]:
    """What stands in a file. Raises ValueError (BadWorker is one), TypeError, KeyError."""
    found = json.loads(content)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, dict) else None
        raise ValueError(f"version must be {VERSION}, got {version!r:.40}")
    records = [_record(entry) for entry in found["workers"]]
    if len({record.worker_id for record in records}) != len(records):
        raise ValueError("worker_id: two workers have the same")
    return records


def _plain(record: Record) -> dict[str, object]:
    said = record.registration
    return {
        "worker_id": record.worker_id,
        "url": record.url,
        "worker_type": said.worker_type,
        "labels": dict(said.labels),
        "priority": said.priority,
        "api_key": said.api_key,
        "self_admitting": record.self_admitting,
        "paused": record.paused,
        "configured": record.configured,
    }


def _record(entry: dict[str, Any]) -> Record:  # Any: what JSON holds, checked here
    for key in ("worker_id", "url"):
        if not isinstance(entry[key], str) or not entry[key]:
            raise ValueError(f"{key} must be a string")
    for key in ("self_admitting", "paused", "configured"):
        if not isinstance(entry[key], bool):
            raise ValueError(f"{key} must be true or false")
    keys = ("worker_type", "labels", "priority", "api_key")
    return Record(
        worker_id=entry["worker_id"],
        url=entry["url"],
        registration=Registration(**{key: entry[key] for key in keys}),
        self_admitting=entry["self_admitting"],
        paused=entry["paused"],
        configured=entry["configured"],
    )


def _store(path: Path, records: Sequence[Record], last: bytes | None) -> bytes:
    """Write them unless the file has been `last` and is to be that still; what stands in it now."""
    content = encode(records)
    if content != last:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, mode=0o600)
    return content
