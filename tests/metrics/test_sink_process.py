"""The process of a sink: whatever the class in it does costs only that sink."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from furlong.rundir import RunDir
from services.metrics.rows import Row, RowReader
from services.metrics.sinks import process as process_module
from services.metrics.sinks.process import ProcessSink, SinkProcessFailed
from services.metrics.sinks.sink import Cursor, SinkContext
from tests.metrics.running import until


@pytest.fixture(autouse=True)
def _quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given less time to end by itself."""
    monkeypatch.setattr(process_module, "_END_S", 0.5)


class Last:
    """A reader that has 1,000 rows."""

    def last_row_id(self) -> int:
        return 1000


def row(row_id: int, **values: object) -> Row:
    body = {"run": "r", "axis": "train/step", "step": row_id, "attempt": 1, "values": values or {"train/loss": 1.5}}
    return Row(
        row_id=row_id, run="r", body=json.dumps(body).encode(), prior=None, is_current=True, emitted_us=1_000_000
    )


def sink(tmp_path: Path, child: str, **options: Any) -> ProcessSink:
    memory = options.pop("memory_bytes", 0)
    context = SinkContext(
        name="s",
        run_dir=RunDir(tmp_path),
        folder=tmp_path / "own",
        log_path=tmp_path / "log",
        drain_budget_s=5.0,
        reader=cast("RowReader", Last()),
        memory_bytes=memory,
    )
    return ProcessSink(f"tests.metrics.sink_children.{child}", {"secret": "s3cr3t-value"}, context, **options)


def taken(tmp_path: Path) -> list[int]:
    path = tmp_path / "own" / "rows"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


async def take(process: ProcessSink, first: int, last: int) -> Cursor:
    return await asyncio.wait_for(process.write([row(n) for n in range(first, last + 1)]), 20)


async def run_through(tmp_path: Path, child: str) -> list[int]:
    """Three rows to a class that fails once; started again as the frame does."""
    process = sink(tmp_path, child)
    cursor = await process.start(Cursor(0))
    try:
        await take(process, 1, 3)
    except SinkProcessFailed:
        await process.abort()
        cursor = await process.start(cursor)
        await take(process, cursor.row_id + 1, 3)
    finished = await process.finish()
    assert finished == Cursor(3)
    return taken(tmp_path)


async def test_rows_are_taken_in_order_and_the_class_is_closed(tmp_path: Path) -> None:
    assert await run_through(tmp_path, "Recording") == [1, 2, 3]
    assert (tmp_path / "own" / "closed").exists()


async def test_what_a_class_prints_or_reads_is_no_part_of_the_conversation(tmp_path: Path) -> None:
    assert await run_through(tmp_path, "Chatty") == [1, 2, 3]
    assert b"garbage" in (tmp_path / "log").read_bytes()


@pytest.mark.parametrize("child", ["Exiting", "Raising", "Mutating", "Async"])
async def test_class_that_misbehaves_gets_its_rows_once(tmp_path: Path, child: str) -> None:
    assert await run_through(tmp_path, child) == [1, 2, 3]


@pytest.mark.parametrize(("child", "how"), [("Leaving", "exit code 7"), ("Dying", "signal 11")])
async def test_class_that_ends_its_process_is_started_anew(tmp_path: Path, child: str, how: str) -> None:
    process = sink(tmp_path, child)
    await process.start(Cursor(0))
    with pytest.raises(SinkProcessFailed, match=how):
        await take(process, 1, 3)
    await process.abort()
    await process.start(Cursor(0))
    await take(process, 1, 3)
    await process.finish()
    assert taken(tmp_path)[-3:] == [1, 2, 3]


async def test_class_that_hangs_is_killed(tmp_path: Path) -> None:
    process = sink(tmp_path, "Hanging")
    await process.start(Cursor(0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.write([row(1)]), 0.5)
    pid = process._process.pid  # type: ignore[union-attr]
    await process.abort()
    assert not psutil.pid_exists(pid)
    await process.start(Cursor(0))
    assert await take(process, 1, 2) == Cursor(2)
    await process.abort()


async def test_memory_has_a_limit(tmp_path: Path) -> None:
    process = sink(tmp_path, "Greedy", memory_bytes=512 * 1024 * 1024)
    await process.start(Cursor(0))
    cursor = await take(process, 1, 2)
    assert cursor == Cursor(2)
    assert b"MemoryError" in (tmp_path / "log").read_bytes()
    await process.finish()


async def test_refused_rows_are_left_out_and_the_rest_taken(tmp_path: Path) -> None:
    process = sink(tmp_path, "Choosy")
    await process.start(Cursor(0))
    cursor = await take(process, 1, 7)
    assert cursor.row_id == 7
    assert [refused.row_id for refused in cursor.refused] == [3, 6]
    assert taken(tmp_path) == [1, 2, 4, 5, 7]
    await process.finish()


async def test_rows_before_a_refused_one_are_taken_once_though_the_next_fails(tmp_path: Path) -> None:
    process = sink(tmp_path, "ChoosyAndRaising")
    await process.start(Cursor(0))
    cursor = await take(process, 1, 5)
    assert (cursor.row_id, [refused.row_id for refused in cursor.refused]) == (5, [3])
    assert taken(tmp_path) == [1, 2, 4, 5]
    assert (await take(process, 6, 6)).refused[0].row_id == 6  # and the third is not told again
    await process.finish()


async def test_row_that_was_not_given_cannot_be_refused(tmp_path: Path) -> None:
    assert await run_through(tmp_path, "Absurd") == [1, 2, 3]


async def test_start_that_fails_says_why(tmp_path: Path) -> None:
    process = sink(tmp_path, "Unstartable")
    with pytest.raises(SinkProcessFailed, match="OSError: no route"):
        await process.start(Cursor(0))
    await process.abort()


async def test_class_that_knows_what_it_has_decides_where_to_go_on(tmp_path: Path) -> None:
    process = sink(tmp_path, "Knowing")
    await process.start(Cursor(0))
    await take(process, 1, 5)
    await process.abort()
    assert await process.start(Cursor(2)) == Cursor(5)
    await process.abort()


async def test_nan_reaches_the_class_as_a_number_and_settings_stand_in_no_argument(tmp_path: Path) -> None:
    process = sink(tmp_path, "Recording")
    await process.start(Cursor(0))
    arguments = psutil.Process(process._process.pid).cmdline()  # type: ignore[union-attr]
    assert "s3cr3t" not in " ".join(arguments)
    assert json.loads((tmp_path / "own" / "starts").read_text())["secret"] == "s3cr3t-value"
    await process.write([row(1, a="NaN")])
    await process.finish()


HELD = """
import asyncio, sys
from pathlib import Path
from services.metrics.sinks.sink import Cursor
from tests.metrics.test_sink_process import row, sink
async def main():
    process = sink(Path(sys.argv[1]), sys.argv[2], finish_timeout_s=1.0)
    await process.start(Cursor(0))
    await process.write([row(1), row(2)])
    print(process._process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def killed_service(tmp_path: Path, child: str) -> int:
    """A process that had a sink's, and was killed: the pid of the sink's."""
    held = subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path), child], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert held.stdout is not None
    pid = int(held.stdout.readline())
    held.kill()
    held.wait(10)
    return pid


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_process_whose_service_is_killed_finishes_and_leaves_word(tmp_path: Path) -> None:
    pid = killed_service(tmp_path, "Recording")
    until(lambda: is_gone(pid), "the end of the sink's process")
    assert (tmp_path / "own" / "closed").exists()
    process = sink(tmp_path, "Recording")
    assert await process.start(Cursor(0)) == Cursor(2)
    await process.abort()


def test_process_whose_service_is_killed_does_not_outlive_it_when_it_hangs(tmp_path: Path) -> None:
    pid = killed_service(tmp_path, "Stubborn")
    until(lambda: is_gone(pid), "the end of the sink's process")


async def test_log_has_a_bound(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * (17 * 1024 * 1024))
    process = sink(tmp_path, "Recording")
    await process.start(Cursor(0))
    assert (tmp_path / "log").stat().st_size < 1024
    os.kill(process._process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    await asyncio.wait_for(process.abort(), 10)
