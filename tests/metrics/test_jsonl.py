"""The file sink writes each row once, whatever happened to the file meanwhile."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.metrics.rows import Row
from services.metrics.sinks.jsonl import JsonlSink
from services.metrics.sinks.sink import Cursor
from tests.metrics.running import MetricsProcess, batch, part, send
from tests.metrics.stores import store

ROWS = [Row(n, "r", b'{"step":%d}' % n, None, True, 0) for n in range(1, 6)]
LINES = [row.body + b"\n" for row in ROWS]
WHOLE = b"".join(LINES)


class Rows:
    """The durable log's rows."""

    def after(self, row_id: int, limit: int) -> list[Row]:
        return [row for row in ROWS if row.row_id > row_id][:limit]

    def query(self, query: str, values: Sequence[int]) -> list[tuple[int]]:
        return [(sum(row.row_id <= values[0] for row in ROWS),)]


def catch_up(path: Path, durable: Cursor) -> Cursor:
    async def run() -> Cursor:
        sink = JsonlSink(path, Rows())  # type: ignore[arg-type]
        cursor = await sink.start(durable)
        rows = Rows().after(cursor.row_id, 100)
        return await sink.write(rows) if rows else cursor

    return asyncio.run(run())


@pytest.mark.parametrize("there", range(len(WHOLE) + 1))
def test_killed_after_any_byte_it_goes_on_without_gap_or_double(tmp_path: Path, there: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE[:there])
    remembered = min(1, there // len(LINES[0]))  # the cursor lags behind the file
    cursor = catch_up(path, Cursor(remembered, remembered * len(LINES[0])))
    assert path.read_bytes() == WHOLE
    assert cursor == Cursor(5, len(WHOLE))


def test_file_that_was_cut_is_written_anew_and_what_was_left_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"cut")
    catch_up(path, Cursor(4, 4 * len(LINES[0])))
    assert path.read_bytes() == WHOLE
    (kept,) = tmp_path.glob("metrics.jsonl.cut-*")
    assert kept.read_bytes() == b"cut"


def test_file_that_was_removed_is_written_anew(tmp_path: Path) -> None:
    catch_up(tmp_path / "metrics.jsonl", Cursor(4, 4 * len(LINES[0])))
    assert (tmp_path / "metrics.jsonl").read_bytes() == WHOLE


async def test_file_that_is_written_anew_says_how_many_rows_are_gone(tmp_path: Path) -> None:
    with store(tmp_path / "x.db") as stored:
        stored.take(*(part(n, {"train/loss": ["last", n]}) for n in range(1, 6)))
        stored.writer.execute(lambda to: to.execute("DELETE FROM rows WHERE id <= 2")).result(20)
        with capture_logs() as logs:
            sink = JsonlSink(tmp_path / "metrics.jsonl", stored.reader)
            assert await sink.start(Cursor(4, 999)) == Cursor(0, 0)
        await sink.abort()
    (said,) = logs
    assert (said["event"], said["num_rows_gone"]) == ("metrics_file_rewritten", 2)


def test_lines_that_are_not_ours_stay_on_lines_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 4, "lo')
    catch_up(path, Cursor(0, 0))
    assert path.read_bytes() == b'{"step": 4, "lo\n' + WHOLE


def test_eight_producers_of_large_rows_weld_no_line(make: Callable[..., MetricsProcess]) -> None:
    """Of a file that eight writers append to, one bad line would cost every later read: here one alone writes."""
    service = make().start()
    large: dict[str, object] = {
        f"train/{'k' * 200}{number}": ["last", 0.5] for number in range(500)
    }  # over 100 KB a row

    def produce(number: int) -> None:
        rows = [part(1000 * number + n, large, axis="train/step") for n in range(10)]
        send(service, batch(rows, producer=f"r/trainer-{number}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(produce, range(8)))
    service.flush()
    assert service.stop() == 3
    found = sorted(row["step"] for row in service.rows())  # each line is read as JSON
    assert found == [1000 * number + n for number in range(8) for n in range(10)]


def test_service_alone_keeps_all_runs_in_one_file(make: Callable[..., MetricsProcess]) -> None:
    service = make(environment={"TEST_ALONE": "1"}).start()
    for name in ("one", "two"):
        record = {"run": name, "event": "metrics", "axis": "train/step", "step": 1, "values": {"train/loss": 1}}
        send(service, batch([json.dumps(record).encode()], producer=f"{name}/x"))
    assert sorted(row["run"] for row in service.wait_rows(2)) == ["one", "two"]
