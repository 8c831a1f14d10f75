"""Packed bodies that have not ended: what all of them hold together is bounded, in memory and on the disk."""

import asyncio
import gzip
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import Request

from services.metrics.http import body, records
from services.metrics.http.errors import Problem
from services.metrics.http.records import RecordsIntake
from tests.metrics.stores import Store, line, store

KIB = 1024


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path / "m.db") as opened:
        yield opened


class Sender:
    """Posts what it is given, piece by piece."""

    def __init__(self, intake: RecordsIntake) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._given, self._asked = False, asyncio.Event()
        headers = [(b"content-encoding", b"gzip")]
        scope = {"type": "http", "method": "POST", "headers": headers, "client": ("127.0.0.1", 1), "query_string": b""}
        self.answer = asyncio.create_task(intake.take(Request(scope, self._receive), run="r"))

    async def _receive(self) -> dict[str, object]:
        if self._given:
            self._asked.set()
        piece = await self._pieces.get()
        self._given = True
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def send(self, piece: bytes) -> None:
        """Done when it was taken, or the post was answered."""
        self._asked.clear()
        self._pieces.put_nowait(piece)
        asked = asyncio.create_task(self._asked.wait())
        await asyncio.wait({asked, self.answer}, timeout=10, return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.parametrize(("bound", "each_kib"), [("MAX_PACKED_BYTES", 1200), ("MAX_HELD_BYTES", 600)])
async def test_packed_bodies_that_never_end_are_told_to_come_again(
    new: Store, bound: str, each_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, bound, 3 * each_kib * KIB)
    intake = RecordsIntake(new.writer, lambda: True)
    senders = [Sender(intake) for _ in range(4)]
    for sender in senders:
        await sender.send(os.urandom(each_kib * KIB))
    with pytest.raises(Problem, match="half here") as refused:
        await asyncio.wait_for(senders[3].answer, 10)
    assert refused.value.status == 429
    assert not any(sender.answer.done() for sender in senders[:3])
    for sender in senders[:3]:
        sender.answer.cancel()


async def test_packed_body_that_finds_no_room_is_told_to_come_again(
    new: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(packed: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(body.tempfile.SpooledTemporaryFile, "rollover", no_room)
    sender = Sender(RecordsIntake(new.writer, lambda: True))
    await sender.send(os.urandom(1200 * KIB))
    with pytest.raises(Problem, match="no room for a packed body") as refused:
        await asyncio.wait_for(sender.answer, 10)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 5)


async def test_packed_body_is_written_beside_the_event_loop(new: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    file_of = body.tempfile.SpooledTemporaryFile

    def watched(size_bytes: int) -> object:
        file = file_of(size_bytes)
        roll = file.rollover
        monkeypatch.setattr(file, "rollover", lambda: (threads.add(threading.current_thread().name), roll()))
        return file

    monkeypatch.setattr(body.tempfile, "SpooledTemporaryFile", watched)
    sender = Sender(RecordsIntake(new.writer, lambda: True))
    packed = gzip.compress(b"\n".join(line(n, text=os.urandom(400).hex()) for n in range(5000)))
    for start in range(0, len(packed), 64 * KIB):
        await sender.send(packed[start : start + 64 * KIB])
    await sender.send(b"")
    await asyncio.wait_for(sender.answer, 10)
    assert threads and threading.main_thread().name not in threads
    assert len(new.bodies()) == 5000
