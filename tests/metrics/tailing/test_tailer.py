"""The tailer's thread over a store in memory: what is not taken is sent again, and the numbers of engines are exact."""

import datetime
from pathlib import Path

import pytest

from furlong.records import Mean, Value
from services.metrics.engines.rows import MAX_SERIES, EngineRows
from services.metrics.tailing import tailer as tailer_module
from services.metrics.tailing.tailer import ENGINES_MARK, Sample, Tailer
from tests.metrics.running import until
from tests.metrics.tailing.fake_store import FakeStore

LINE = "[2026-11-29 17:03:41] Decode batch, #running-req: 3, token usage: 0.50, gen throughput (token/s): {}"


def tailer(store: FakeStore, *paths: Path) -> Tailer:
    return Tailer(store, run="r", patterns=[str(path) for path in paths], interval_s=10.0)


def run_once(store: FakeStore, *paths: Path) -> None:
    """A service that starts and is stopped at once: it reads all there is."""
    made = tailer(store, *paths)
    made.start()
    assert made.close(20)


def test_all_that_is_there_is_read_before_the_end(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "a.log"
    log.write_text("".join(f"line {n}\n" for n in range(30_000)) + "half")
    run_once(store, log)
    assert store.texts == [*(f"line {n}" for n in range(30_000)), "half"]
    assert store.num_saved == 30_001
    run_once(store, log)
    assert len(store.bodies) == 30_001


def test_backlog_that_is_too_long_for_the_end_waits_for_the_next_start(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "a.log"
    log.write_text("".join(f"line {n}\n" for n in range(300_000)) + "half")
    made = tailer(store, log)
    made.start()
    assert made.close(1.0)
    assert len(store.bodies) < 300_001
    assert "half" not in store.texts
    log.write_bytes(log.read_bytes()[: sum(len(text) + 1 for text in store.texts)])
    run_once(store, log)
    assert store.texts == [f"line {n}" for n in range(len(store.bodies))]


def test_what_the_store_did_not_take_is_sent_again(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "a.log"
    store.num_failures = 3
    log.write_text("1\n2\n")
    made = tailer(store, log)
    made.start()
    until(lambda: store.num_saved == 2, "both lines saved")
    assert made.close(20)
    assert store.texts == ["1", "2"]


def test_what_a_dead_store_did_not_take_is_read_again_next_time(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "a.log"
    store.num_failures = 10**9
    log.write_text("1\n2\n")
    made = tailer(store, log)
    made.start()
    until(lambda: store.num_failures < 10**9, "a try")
    assert made.close(20)
    store.num_failures = 0
    run_once(store, log)
    assert store.texts == ["1", "2"]


def rows(store: FakeStore) -> list[dict[str, list[object]]]:
    return [record["values"] for record in store.records if record["event"] == "metrics"]


def test_lines_of_one_interval_are_one_row(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "engine-0.out"
    log.write_text(f"{LINE.format(100)}\n{LINE.format(300)}\n")
    run_once(store, log)
    (row,) = rows(store)
    assert row["engine/engine-0/gen_throughput"] == ["mean", 400.0, 2]
    assert ENGINES_MARK not in store.marks


def test_numbers_that_a_killed_service_had_not_handed_on_are_in_the_row(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "engine-0.out"
    before = EngineRows(run="r", interval_s=10.0)
    before.add("engine-0", 1795971821.0, {"gen_throughput": Mean(100.0, 1)}, now_s=1795971822.0)
    store.marks = {ENGINES_MARK: before.dump()}
    log.write_text(f"{LINE.format(300)}\n".replace("17:03:41", local_time(1795971825)))
    run_once(store, log)
    assert [row["engine/engine-0/gen_throughput"] for row in rows(store)] == [["mean", 400.0, 2]]


def local_time(at_s: int) -> str:
    return datetime.datetime.fromtimestamp(at_s).strftime("%H:%M:%S")


def test_readings_of_endpoints_and_lines_make_one_row(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "engine-0.out"
    log.write_text(f"{LINE.format(300)}\n")
    made = tailer(store, log)
    at_s = datetime.datetime(2026, 11, 29, 17, 3, 42).astimezone().timestamp()
    made.add_sample(Sample("router", at_s, {"num_workers": Mean(2.0, 1)}))
    made.start()
    assert made.close(20)
    (row,) = rows(store)
    assert {"engine/engine-0/gen_throughput", "engine/router/num_workers"} <= set(row)


def test_numbers_that_are_left_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer_module, "MAX_SAMPLES", 1)
    told: list[int] = []
    made = Tailer(FakeStore(), run="r", patterns=[], interval_s=10.0, on_left_out=told.append)
    many: dict[str, Value] = {f"k{number}": Mean(1.0, 1) for number in range(MAX_SERIES + 5)}
    made.add_sample(Sample("engine-0", 0.0, many))
    made.add_sample(Sample("engine-1", 0.0, {"a": Mean(1.0, 1)}))  # no room to wait
    made.start()
    assert made.close(20)
    assert told[-1] == 6


def test_engines_that_ray_prints_into_one_file_are_told_apart(tmp_path: Path) -> None:
    store, log = FakeStore(), tmp_path / "job.log"
    log.write_text("".join(f"(SGLangEngine pid={pid}) {LINE.format(pid)}\n" for pid in (7, 8)))
    run_once(store, log)
    (row,) = rows(store)
    assert row["engine/SGLangEngine-7/gen_throughput"] == ["mean", 7.0, 1]
    assert row["engine/SGLangEngine-8/gen_throughput"] == ["mean", 8.0, 1]
