"""Answers questions about the store beside its writer: on threads of its own, few at once, each with a time limit.

Every thread has a read-only connection of its own, so that no question waits for another's, nor holds back the writer.
"""

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from furlong.asking.store import NoStore, StoreReader, TookTooLong

Result = TypeVar("Result")

NUM_THREADS = 4
LIMIT_S = 10.0
MAX_WAITING = 64


class Busy(Exception):
    """Too many questions wait."""


class Queries:
    """Questions go through `ask`."""

    def __init__(self, path: Path, *, limit_s: float = LIMIT_S) -> None:
        self._path, self._limit_s = path, limit_s
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="query")
        self._mine = threading.local()
        self._num_waiting = 0

    async def ask(self, question: Callable[[StoreReader], Result]) -> Result:
        """The answer. Raises Busy, TookTooLong, NoStore, and what the question raises."""
        if self._num_waiting >= MAX_WAITING:
            raise Busy
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, question)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """No more questions; those that run end by their limit."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, question: Callable[[StoreReader], Result]) -> Result:
        try:
            return self._once(question)
        except sqlite3.DatabaseError:  # the file was set aside and made anew meanwhile
            self._forget()
            try:
                return self._once(question)
            except sqlite3.DatabaseError as error:
                self._forget()
                raise NoStore(f"the store cannot be read now: {error}") from error

    def _once(self, question: Callable[[StoreReader], Result]) -> Result:
        reader, file = getattr(self._mine, "reader", None), self._file()
        if reader is None or file != self._mine.file:  # a damaged store was set aside: ours is the old file
            self._forget()
            reader, self._mine.file = StoreReader(self._path), file
            self._mine.reader = reader
        reader.limit(self._limit_s)
        return question(reader)

    def _file(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path)
        except OSError:
            return (0, 0)
        return (found.st_dev, found.st_ino)

    def _forget(self) -> None:
        reader = getattr(self._mine, "reader", None)
        if reader is not None:
            with contextlib.suppress(sqlite3.Error):
                reader.close()
        self._mine.reader = None


__all__ = ["Busy", "NoStore", "Queries", "TookTooLong"]
