"""The store: what is put in is read out; an older one is converted; attempts, marks and curves."""

import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from services.metrics.intake import RecordsIn, Taken
from services.metrics.rows import Row, StoredBatch
from services.metrics.writer import Committed, Sending, StoreFailed
from tests.metrics.running import part, until
from tests.metrics.stores import ask, line, store

SCHEMA_1 = Path(__file__).with_name("schema_1.sql")


def make_schema_1(path: Path, *, num_more_records: int = 0) -> None:
    """What the first version of the store left, and more records."""
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.executescript(SCHEMA_1.read_text())
        old.execute("BEGIN")
        more = ((n, 1, n, 1, line(n)) for n in range(1000, 1000 + num_more_records))
        old.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", more)
        old.execute("COMMIT")
        old.execute("PRAGMA application_id = 1179996748")
        old.execute("PRAGMA user_version = 1")


def test_store_of_schema_1_is_converted_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.db"
    make_schema_1(path)
    before = ask(path, "SELECT id, body FROM rows ORDER BY id")
    with store(path) as new:
        assert [(row.row_id, row.body) for row in new.reader.after(0, 100)] == before
        assert new.reader.num_records() == len(new.bodies()) == 9
        assert {run.name for run in new.reader.runs()} == {"r", "s"}
        assert new.reader.points("r", "train/loss")[:2] == ([1, 2], [1, 2])  # attempt 2 came back to step 2
        assert math.isnan(new.reader.points("r", "train/bad", attempt=1)[2][0])
        assert new.reader.cursor("jsonl") == (2, 100)
        again = new.writer.submit(RecordsIn("r/trainer-0", 11, 7, (b"{}", b"{}"))).result(10)
        assert again.through_sequence == 8
        new.take(part(0, {"perf/a": ["last", 1]}, axis="rollout/step", parts=["rollout", "trainer"]))
        assert (new.rows()[-1]["complete"], new.rows()[-1]["values"]) == (True, {"perf/a": 1, "rollout/x": 1})
    assert ask(path, "PRAGMA auto_vacuum") == [(2,)]


@pytest.mark.parametrize("moment", ["_copy_records", "_copy_rows", "fill_points", "_let_shrink"])
def test_conversion_that_is_killed_is_done_anew(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "metrics.db"
    make_schema_1(path, num_more_records=3000)
    dying = (
        "import os, pathlib, signal, sys\n"
        "from services.metrics import migration, store\n"
        f"migration.{moment} = lambda connection: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.open_store(pathlib.Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", dying, str(path)], timeout=20).returncode == -signal.SIGKILL
    with store(path) as new:
        assert new.reader.num_records() == len(new.bodies()) == 3009
        assert len(new.rows()) == 5


def test_listeners_get_what_a_commit_brought(tmp_path: Path) -> None:
    batches: list[StoredBatch] = []
    rows: list[Row] = []
    notable: list[tuple[str, str]] = []

    def listen(committed: Committed) -> None:
        batches.extend(committed.batches)
        rows.extend(committed.rows)

    phase = orjson.dumps({"event": "phase", "run": "r", "phase": "train", "state": "open"})
    with store(tmp_path / "m.db", on_commit=listen, on_notable=lambda run, r: notable.append((run, r["phase"]))) as new:
        new.take(part(1, {"train/a": ["last", 1]}), phase, orjson.dumps({"event": "x", "run": "s", "level": "error"}))
        new.writer.barrier().result(10)
        assert [(b.run, len(b.bodies), b.top_level) for b in batches] == [("r", 2, 20), ("s", 1, 40)]
        assert batches == new.reader.batches_after(0, 10)
        assert rows == new.reader.after(0, 10)
        assert notable == [("r", "train")]
        assert [b.run for b in new.reader.batches_after(0, 10, min_level=30)] == ["s"]


def test_error_of_a_listener_stops_nothing(tmp_path: Path) -> None:
    def fail(committed: Committed) -> None:
        raise RuntimeError("a listener's")

    with store(tmp_path / "m.db", on_commit=fail) as new:
        assert new.take(b"{}").through_sequence == 1
        assert new.take(b"{}").through_sequence == 2


def test_marks_come_with_their_batch_and_others_work_fails_alone(tmp_path: Path) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO marks VALUES ('half', x'00')")
        raise ValueError("somebody's own")

    with store(tmp_path / "m.db") as new:
        taken = new.writer.submit(RecordsIn("r/p", 1, 1, (b"{}",), marks={"tail/a": b"17"}))
        failed = new.writer.execute(half)
        put = new.writer.put_marks({"b": b"1"})
        with pytest.raises(ValueError, match="somebody"):
            failed.result(10)
        assert taken.result(10).through_sequence == 1
        put.result(10)
        assert [new.reader.mark(name) for name in ("tail/a", "half", "b")] == [b"17", None, b"1"]
        new.writer.put_marks({"b": None}).result(10)
        new.writer.set_cursor("x", 3, 4).result(10)
        assert (new.reader.mark("b"), new.reader.cursor("x")) == (None, (3, 4))


def test_late_row_of_a_killed_attempt_is_not_current(tmp_path: Path) -> None:
    with store(tmp_path / "m.db", row_timeout_s=0.3) as new:
        new.take(*(part(step, {"train/a": ["last", 1]}) for step in (4, 5)))
        new.take(part(6, {"train/a": ["last", 1]}, parts=["trainer", "other"]))  # killed before the other part
        new.take(part(5, {"train/a": ["last", 2]}, attempt=2, parts=["trainer", "other"]))  # not complete yet either
        deadline = time.monotonic() + 10
        while len(new.rows()) < 4:
            assert time.monotonic() < deadline
        shown = {
            (row["step"], row["attempt"]): r.is_current
            for r in new.reader.after(0, 9)
            for row in [orjson.loads(r.body)]
        }
        assert shown == {(4, 1): True, (5, 1): False, (6, 1): False, (5, 2): True}
        assert new.reader.points("r", "train/a")[:2] == ([4, 5], [1, 2])
        assert new.reader.points("r", "train/a", attempt=1)[0] == [4, 5, 6]


def test_amended_row_has_its_points_changed(tmp_path: Path) -> None:
    with store(tmp_path / "m.db") as new:
        new.take(part(1, {"train/a": ["sum", 1], "train/gone": ["last", 1]}))
        new.take(part(1, {"train/a": ["sum", 4], "train/b": ["last", "Infinity"]}), incarnation=2)
        assert new.reader.points("r", "train/a")[2] == [4.0]
        assert new.reader.points("r", "train/b")[2] == [math.inf]
        assert new.reader.points("r", "train/gone") == ([], [], [])


def test_names_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    with store(tmp_path / "m.db") as new:
        new.take(part(1, {"train/a-b": ["last", 1], "train/a_b": ["last", 2], "train/a@b": 3}))
        assert {one.key for one in new.reader.series("r")} == {"train/a-b", "train/a_b", "train/a@b"}
        assert [new.reader.points("r", key)[2] for key in ("train/a-b", "train/a_b", "train/a@b")] == [[1], [2], [3]]


def test_records_of_others_make_rows_and_bad_values_cost_only_themselves(tmp_path: Path) -> None:
    values = {"a": 1, "b": "NaN", "c": None, "d": "x", "e": [1, 2], "f": True, "h": ["histogram", [0, 1, 2], [3, 4]]}
    record = {"event": "metrics", "run": "their/run 1", "axis": "my.axis-1/step", "step": 7, "values": values}
    with store(tmp_path / "m.db") as new:
        new.take(orjson.dumps(record), orjson.dumps({**record, "values": {"h": ["histogram", [0, 1, 2], [1, 1]]}}))
        (row,) = new.rows()
        assert row["values"] == {"a": 1, "b": "NaN", "b/nonfinite": 1, "f": 1}
        assert row["histograms"] == {"h": {"edges": [0, 1, 2], "counts": [4, 5]}}
        assert (row["attempt"], row["complete"]) == (1, True)
        assert new.writer.counts.num_values_skipped == 3


@pytest.mark.parametrize(
    ("ts", "counted"),
    [
        ("now", ""),
        ("now+4min", ""),
        ("now-27h", "num_skewed"),
        ("now+10min", "num_skewed"),
        (None, "num_without_ts"),
        ("yesterday", "num_skewed"),
        (True, "num_skewed"),
        ("seconds", ""),
        ("ms", "num_skewed"),
        ("ns", "num_skewed"),
        ("other offset", ""),
    ],
)
def test_record_with_an_odd_time_is_taken_and_counted(tmp_path: Path, ts: object, counted: str) -> None:
    now = time.time()

    def text(moment: float, offset: str = "Z") -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".000000{offset}"

    given = {
        "now": text(now),
        "now+4min": text(now + 240),
        "now-27h": text(now - 27 * 3600),
        "now+10min": text(now + 600),
        "seconds": now,
        "ms": int(now * 1000),
        "ns": int(now * 1e9),
        "other offset": text(now + 2 * 3600, "+02:00"),
    }.get(str(ts), ts)
    record = {"event": "x", "run": "r", **({} if given is None else {"ts": given})}
    with store(tmp_path / "m.db") as new:
        new.take(orjson.dumps(record))
        (batch,) = new.reader.batches_after(0, 9)
        assert abs(batch.received_us / 1e6 - now) < 60
        counts = new.writer.counts
        assert [name for name in ("num_skewed", "num_without_ts") if getattr(counts, name)] == (
            [counted] if counted else []
        )


def test_readers_do_not_hold_back_the_write_ahead_log(tmp_path: Path) -> None:
    with store(tmp_path / "m.db") as new:
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set():
                new.reader.batches_after(0, 64)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(120):
            new.take(*(line(n, text="y" * 1000) for n in range(number * 128, number * 128 + 128)))
        ended.set()
        for thread in threads:
            thread.join(10)
        assert new.reader.num_records() == 120 * 128
        assert os.stat(f"{new.path}-wal").st_size < 64 * 1024 * 1024


def test_batches_are_cut_and_ids_never_overlap(tmp_path: Path) -> None:
    with store(tmp_path / "m.db") as new:
        new.take(*(b"{}" for _ in range(10_000)))
        new.take(*(line(n, text="y" * 1024 * 1024) for n in range(9)))
        batches = new.reader.batches_after(0, 100)
        assert [len(b.bodies) for b in batches] == [4096, 4096, 1808, 3, 3, 3]
        assert [b.first_sequence for b in batches] == [1, 4097, 8193, 10_001, 10_004, 10_007]


@pytest.mark.parametrize("fault", ["full", "failing"])
def test_batch_behind_one_that_was_not_stored_waits_for_it(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender sends on while the disk is full for a moment, and sends all again then: none is passed over."""
    monkeypatch.setattr("services.metrics.writer.MAX_GROUP_JOBS", 1)
    with store(tmp_path / "m.db") as new:
        faults = iter([True])
        if fault == "full":
            monkeypatch.setattr(new.writer._room, "is_short", lambda _: next(faults, False))
        else:
            take = new.writer.intake.take
            broken = lambda batch: take(batch if not next(faults, 0) else None)  # type: ignore[arg-type]  # noqa: E731
            monkeypatch.setattr(new.writer.intake, "take", broken)
        sending = Sending()
        batches = [RecordsIn("r/p", 1, first, (line(first),)) for first in (1, 2, 3)]
        done = [new.writer.submit(batch, sending) for batch in batches]
        assert [type(one.exception(10)) for one in done[1:]] == [StoreFailed, StoreFailed]
        again = Sending()
        for batch in batches:
            assert new.writer.submit(batch, again).result(10).num_known == 0
        assert len(new.bodies()) == 3


def test_batch_that_nobody_thought_of_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store(tmp_path / "m.db") as new:
        take = new.writer.intake.take

        def broken(batch: RecordsIn) -> Taken:
            if batch.producer == "r/odd":
                raise ZeroDivisionError
            return take(batch)

        monkeypatch.setattr(new.writer.intake, "take", broken)
        held = threading.Event()
        new.writer.execute(lambda connection: held.wait(10))  # so that the next ones come together
        done = [new.writer.submit(RecordsIn(f"r/{who}", 1, 1, (line(1),))) for who in ("a", "odd", "b")]
        held.set()
        assert [type(one.exception(10)) for one in done] == [type(None), StoreFailed, type(None)]
        assert len(new.bodies()) == 2


def waiting(step: int) -> bytes:
    return part(step, {"train/a": 1}, parts=["trainer", "never"])


def test_rows_that_wait_are_handed_on_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many: no commit takes long, and they take no more room than some."""
    monkeypatch.setattr("services.metrics.rowstore.MAX_WAITING", 20)
    monkeypatch.setattr("services.metrics.rowstore.MAX_CHANGED", 8)
    monkeypatch.setattr("services.metrics.rowstore.MAX_DUE", 4)
    sizes: list[int] = []
    with store(tmp_path / "m.db", on_commit=lambda new: sizes.append(len(new.rows))) as new:
        new.take(*(waiting(step) for step in range(30)))
        until(lambda: len(new.rows()) == 10, "those beyond what may wait")
        assert [row["step"] for row in new.rows()] == list(range(10)) and not new.rows()[0]["complete"]
        new.writer.emit_waiting().result(10)
        until(lambda: len(new.rows()) == 30, "all of them")
        assert max(sizes) == 4
        new.take(*(part(step, {"train/a": 1}) for step in range(100, 130)))
        assert len(new.rows()) == 60


@pytest.mark.parametrize("moved_s", [-3600, 3600])
def test_clock_that_is_set_holds_no_row_back(tmp_path: Path, moved_s: int) -> None:
    path = tmp_path / "m.db"
    with store(path) as new:
        new.take(waiting(1))
    with closing(sqlite3.connect(path)) as connection:  # as if it had been begun before the clock was set
        connection.execute("UPDATE steps SET opened_us = opened_us - ? * 1000000", (moved_s,))
        connection.commit()
    with store(path, row_timeout_s=0.5) as new:
        new.take(waiting(2), producer="r/q")
        until(lambda: len(new.rows()) == 2, "both rows", limit_s=5)


@pytest.mark.parametrize("levels", [["ERROR"], ["err"], [50], ["Fatal", "info"], [["odd"], "error"]])
def test_search_by_level_finds_a_batch_whatever_its_writer_calls_an_error(tmp_path: Path, levels: list[object]) -> None:
    with store(tmp_path / "m.db") as new:
        new.take(*(orjson.dumps({"event": "x", "level": level}) for level in levels))
        assert new.reader.query("SELECT count(*) FROM batches WHERE top_level >= 40") == [(1,)]
