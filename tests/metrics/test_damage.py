"""Bytes go bad on the disk: it is noticed, said, set aside; what is left is whole, and nothing is counted twice."""

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from services.metrics.inspection import inspect
from services.metrics.intake import RecordsIn
from services.metrics.retention import Needs
from tests.metrics.running import part, until
from tests.metrics.said import Said, events
from tests.metrics.stores import Store, ask, line, store

NUM_STEPS = 150
NUM_WAITING = 15
VALUES: dict[str, object] = {f"train/key_{n}": ["sum", n] for n in range(40)}


def fill(path: Path) -> list[bytes]:
    """A store of some MB with rows whose parts came one by one, and some that wait for theirs; its rows."""
    with store(path) as new:
        for step in range(NUM_STEPS):
            new.take(*(line(n, text="y" * 300) for n in range(20)))
            new.take(part(step, VALUES, parts=["trainer", "b"]), producer="r/a")
            new.take(part(step, {"train/b": ["sum", step]}, part="b", parts=["trainer", "b"]), producer="r/b")
            if step % (NUM_STEPS // NUM_WAITING) == 0:
                new.take(part(step, {"perf/w": 1}, axis="rollout/step", parts=["trainer", "never"]), producer="r/w")
        new.writer.set_cursor("jsonl", NUM_STEPS - 10, 1).result(20)
        return [row.body for row in new.reader.after(0, 10_000)]


def pages_of(path: Path, table: str) -> list[int]:
    """Numbers of the pages of a table, by looking for what stands in it."""
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    content = path.read_bytes()
    page = content[(root - 1) * size : root * size]
    if page[0] not in (2, 5):  # a leaf
        return [root]
    cells = int.from_bytes(page[3:5])
    pointers = [int.from_bytes(page[12 + 2 * n : 14 + 2 * n]) for n in range(cells)]
    return [int.from_bytes(page[at : at + 4]) for at in pointers]


def spoil(path: Path, page: int) -> None:
    """Overwrite a page."""
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xaa" * size)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("seen_at", ["start", "inspection"])
@pytest.mark.parametrize(
    "table",
    [
        "rows",
        "contributions",
        "steps",
        *(pytest.param(t, marks=SLOW) for t in ("points", "cursors", "runs", "producers")),
    ],
)
def test_rows_are_whole_after_a_page_went_bad(
    tmp_path: Path, table: str, seen_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seen_at == "inspection":
        monkeypatch.setattr("services.metrics.salvage.CHECKED_WHOLE_BYTES", 0)
    path = tmp_path / "m.db"
    before = fill(path)
    pages = pages_of(path, table)
    spoil(path, pages[len(pages) // 2])
    with store(path) as new:
        if not list(tmp_path.glob("m.db.damaged-*")):  # not noticed at the start: the check in the background does
            asyncio.run(inspect(path, new.writer))
            new.writer.barrier().exception(20)
        assert len(list(tmp_path.glob("m.db.damaged-*Z"))) == 1
        new.writer.barrier().result(20)  # with which every row comes whose time is up
        after = [row.body for row in new.reader.after(0, 10_000)]
        assert sorted(after) == sorted(before) and new.writer.rows.num_waiting == NUM_WAITING
        assert new.reader.cursor("jsonl")[0] <= NUM_STEPS * 2
        new.take(part(NUM_STEPS, {"train/key_1": ["sum", 1]}), producer="r/new")
        assert new.reader.last_row_id() > 1_000_000  # no id twice: sinks remember them
        assert new.reader.points("r", "train/b")[2][:NUM_STEPS] == list(range(NUM_STEPS))


@pytest.mark.parametrize(
    ("table", "byte"),
    [
        pytest.param("rows", b"7", id="another number in a row"),
        pytest.param("contributions", b"\x01", id="no JSON in a contribution"),
        pytest.param("contributions", b"7", id="another number in a contribution", marks=pytest.mark.slow),
        pytest.param("rows", b"\x01", id="no JSON in a row", marks=pytest.mark.slow),
        pytest.param("rows", b"\xff", id="no UTF-8 in a row", marks=pytest.mark.slow),
        pytest.param("contributions", b"\xff", id="no UTF-8 in a contribution", marks=pytest.mark.slow),
    ],
)
def test_row_is_right_after_a_byte_changed(tmp_path: Path, table: str, byte: bytes, said: Said) -> None:
    """The page is well, what stands on it is not: a number that nobody sent is shown to nobody."""
    path = tmp_path / "m.db"
    before = fill(path)
    mark = b'"train/b":' if table == "rows" else b'{"train/b":["sum",'
    content = path.read_bytes()
    (found,) = re.finditer(b"(?<!:)" + re.escape(mark) + b"140", content)  # in a batch a colon is before it
    at = found.end() - 3
    path.write_bytes(content[:at] + byte + content[at + 1 :])
    with store(path) as new:
        asyncio.run(inspect(path, new.writer))
        new.writer.barrier().exception(20)
        assert sorted(row.body for row in new.reader.after(0, 10_000)) == sorted(before)
        new.take(part(140, {"train/late": ["sum", 1]}, part="late"), producer="r/late")
        assert new.rows()[-1]["values"]["train/b"] == 140
        assert new.reader.points("r", "train/b")[2][:NUM_STEPS] == list(range(NUM_STEPS))
    assert "metrics_store_damaged" in events(said)


def test_batch_whose_text_changed_is_marked_and_no_number_is_taken_from_it(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    with store(path) as new:
        for number in range(50):
            new.take(*(line(n, text="y" * 300) for n in range(50)), producer=f"r/{number}")
        new.take(line(1, text="MARKED" * 100))
    content = path.read_bytes()
    at = content.index(b"MARKEDMARKED")
    path.write_bytes(content[:at] + b"nothing" + content[at + 7 :])
    with store(path) as new:
        asyncio.run(inspect(path, new.writer))
        assert new.reader.query("SELECT count(*) FROM batches WHERE crc = -1") == [(1,)]
        assert new.reader.num_records() == 2501


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE contributions SET body = x'01'",
        "UPDATE contributions SET body = CAST(body AS TEXT)",
        "UPDATE steps SET expected = x'01'",
        "UPDATE rows SET body = x'01'",
        "UPDATE rows SET body = CAST(body AS TEXT)",
    ],
)
def test_late_part_of_a_step_that_went_bad_is_taken(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "m.db"
    with store(path) as new:
        new.take(part(1, {"train/a": ["sum", 1]}))
    change(path, statement)
    with store(path) as new:
        late = part(1, {"train/b": ["sum", 2]}, part="late")
        assert new.send_until_taken(RecordsIn("r/late", 1, 1, (late,))).num_known == 0
        assert new.rows()[-1]["values"] == {"train/a": 1, "train/b": 2}


def test_row_that_is_no_json_is_removed_with_its_points_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    with store(path) as new:
        new.take(*(part(step, {"train/a": 1}) for step in range(3)), part(1, {"train/a": 1}, axis="other"))
    change(path, "UPDATE rows SET body = x'01' WHERE id = 2")
    with store(path, max_age_s=0.1) as new:
        new.writer.retention.needs = Needs()
        until(lambda: not new.reader.last_row_id(), "the rows removed")
        assert ask(path, "SELECT count(*) FROM points") == [(0,)]
        assert new.writer.is_alive() and not new.writer.failing


def test_batch_that_became_text_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    with store(path) as new:
        new.take(line(1))
    change(path, "UPDATE batches SET body = CAST(body AS TEXT)")
    with store(path) as new:
        asyncio.run(inspect(path, new.writer))
        assert new.reader.query("SELECT crc FROM batches") == [(-1,)]


def copy_of_a_running(path: Path, to: Path) -> Store:
    """What a power cut would leave of a store that works."""
    running = Store(path)
    for number in range(50):
        running.take(*(line(number * 10 + n) for n in range(10)))
    for suffix in ("", "-wal"):
        to.with_name(to.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    return running


@pytest.mark.parametrize("num_bytes", [8192 + 24, 24, 10], ids=["a frame that ends no commit", "a head", "half a head"])
def test_torn_end_of_the_log_costs_nothing_acknowledged(tmp_path: Path, num_bytes: int) -> None:
    copy = tmp_path / "copy.db"
    copy_of_a_running(tmp_path / "m.db", copy).close()
    log = copy.with_name("copy.db-wal")
    frame = bytearray(log.read_bytes()[-8192 - 24 :])
    if num_bytes > 24:
        frame[4:8] = bytes(4)
    with log.open("ab") as file:  # a commit that was being written
        file.write(frame[:num_bytes])
    with store(copy) as new:
        assert new.reader.num_records() == 500
    assert not list(tmp_path.glob("*damaged*"))


def test_log_whose_last_bytes_are_gone_is_said(tmp_path: Path, said: Said) -> None:
    copy = tmp_path / "copy.db"
    copy_of_a_running(tmp_path / "m.db", copy).close()
    log = copy.with_name("copy.db-wal")
    log.write_bytes(log.read_bytes()[:-7])
    with store(copy) as new:
        assert new.reader.num_records() == len(new.bodies()) == 490
    assert "metrics_store_damaged" in events(said)
    assert list(tmp_path.glob("copy.db-wal.damaged-*Z"))


def test_bad_bytes_in_the_log_are_said_and_kept(tmp_path: Path, said: Said) -> None:
    copy = tmp_path / "copy.db"
    copy_of_a_running(tmp_path / "m.db", copy).close()
    log = copy.with_name("copy.db-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0xFF
    log.write_bytes(content)
    with store(copy) as new:
        left = new.reader.num_records()
        assert 0 < left < 500
        assert len(new.bodies()) == left
        assert any("num_lost_commits" in line for line in said if line["event"] == "metrics_store_damaged")
        (aside,) = tmp_path.glob("copy.db-wal.damaged-*Z")
        assert aside.read_bytes() == bytes(content)
        new.take(b"{}", producer="r/new")
        assert new.reader.last_batch_id() > 1_000_000


def test_rescue_that_is_killed_is_done_anew(tmp_path: Path) -> None:
    import signal
    import subprocess
    import sys

    path = tmp_path / "m.db"
    before = fill(path)
    spoil(path, pages_of(path, "rows")[0])
    for moment in ("salvage.rebuild", "salvage.set_aside"):
        dying = (
            "import os, pathlib, signal, sys\nfrom services.metrics import salvage, store\n"
            f"{moment} = lambda *of, **more: os.kill(os.getpid(), signal.SIGKILL)\n"
            "store.open_store(pathlib.Path(sys.argv[1]), damage='known')"
        )
        assert subprocess.run([sys.executable, "-c", dying, str(path)], timeout=30).returncode == -signal.SIGKILL
    with store(path) as new:
        new.writer.report_damage("known")
        new.writer.barrier().exception(20)
        assert sorted(row.body for row in new.reader.after(0, 10_000)) == sorted(before)
    assert ask(path, "SELECT count(*) FROM rows") == [(len(before),)]


def test_kill_between_the_renames_of_a_rescue_costs_nothing(tmp_path: Path) -> None:
    """The damaged store without its log, which has another name by then, is not taken for the store."""
    path, copy = tmp_path / "m.db", tmp_path / "copy.db"
    copy_of_a_running(path, copy).close()
    copy.with_name("copy.db-wal").rename(tmp_path / "copy.db.damaged-20260101T000000Z-wal")
    path.rename(tmp_path / "copy.db.whole")
    with store(copy) as new:
        assert len(new.bodies()) == 500
    assert len(list(tmp_path.glob("copy.db.damaged-*Z"))) == 1 and not list(tmp_path.glob("*.whole"))
