"""The membership on disk."""

import asyncio
import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.router.workers.registration import Record, Registration
from services.router.workers.statefile import StateFile, decode, encode
from tests.router.waiting import eventually

RECORD = Record(
    worker_id="3a3c9e3e-0000-4000-8000-000000000001",
    url="http://127.0.0.1:30000",
    registration=Registration(labels={"pool": "eval"}, priority=50, api_key="the-key"),
    self_admitting=True,
    paused=False,
    configured=False,
)


def test_what_is_written_is_read_again() -> None:
    records = [RECORD, replace(RECORD, worker_id="another", paused=True, self_admitting=False)]
    assert decode(encode(records)) == records


async def test_it_is_for_its_owner_alone_and_written_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "router" / "workers.json"
    records: list[Record] = []
    file = StateFile(path, lambda: records)
    keeping = asyncio.create_task(file.keep())
    records.append(RECORD)
    file.changed()
    await eventually(path.exists, "the file is written")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keeping.cancel()
    await file.close()
    assert StateFile(path, list).load() == [RECORD]


async def test_changes_close_together_are_one_write_and_the_last_one_counts(tmp_path: Path) -> None:
    asked = 0

    def records() -> list[Record]:
        nonlocal asked
        asked += 1
        return [replace(RECORD, worker_id=f"worker-{asked}")]

    file = StateFile(tmp_path / "workers.json", records)
    keeping = asyncio.create_task(file.keep())
    for _ in range(1000):
        file.changed()
        await asyncio.sleep(0)
    keeping.cancel()
    await file.close()
    assert asked <= 3
    assert [record.worker_id for record in StateFile(tmp_path / "workers.json", list).load()] == [f"worker-{asked}"]


DAMAGED = [
    b"",
    b'{"version": 1, "wor',
    b"\xff\xfe",
    b"[]",
    b'{"version": 2, "workers": []}',
    b'{"version": 1}',
    b'{"version": 1, "workers": [{"url": "http://127.0.0.1:1"}]}',
    b'{"version": 1, "workers": [7]}',
    encode([RECORD]).replace(b'"eval"', b"[1]"),
    encode([RECORD]).replace(b"true", b'"yes"'),
    b"[" * 100_000,
    encode([RECORD, replace(RECORD, url="http://127.0.0.1:2")]),
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_set_aside_and_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        assert StateFile(path, list).load() == []
    [line] = [entry for entry in logs if entry["event"] == "router_state_damaged"]
    assert Path(line["kept_as"]).read_bytes() == content and not path.exists()
    assert "the-key" not in json.dumps(logs, default=str)


async def test_a_disk_that_cannot_be_written_is_told_once_and_costs_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    file = StateFile(blocked / "workers.json", lambda: [RECORD])
    with capture_logs() as logs:
        assert not await file._write() and not await file._write()
        blocked.unlink()
        assert await file._write()
    assert [entry["event"] for entry in logs] == ["router_state_not_written", "router_state_written_again"]


async def test_a_file_that_is_as_it_should_be_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    await StateFile(path, lambda: [RECORD]).close()
    first = path.stat().st_ino
    file = StateFile(path, lambda: [RECORD])
    file.load()
    await file.close()
    assert path.stat().st_ino == first
