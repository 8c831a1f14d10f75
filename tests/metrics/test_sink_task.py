"""The task that drives a sink: own cursor, own retries, bounded reads, and a truthful state."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import orjson
import pytest

from furlong.jsonline import NO_SECRETS, Secrets
from services.metrics.bell import News
from services.metrics.intake import RecordsIn
from services.metrics.rows import Row, RowReader
from services.metrics.sinks import places as places_module
from services.metrics.sinks import task as task_module
from services.metrics.sinks.places import Places
from services.metrics.sinks.sink import Cursor, Refused, Sink, TakenInPart
from services.metrics.sinks.source import MAX_BYTES, Bites, RowSource
from services.metrics.sinks.task import SinkTask
from services.metrics.writer import Writer

LIMIT_S = 10.0


class Store:
    """A writer and a reader, and numbers to put in."""

    def __init__(self, folder: Path) -> None:
        self.writer = Writer(
            folder / "metrics.db", row_timeout_s=30, secrets=NO_SECRETS, on_death=lambda reason: None, min_free_bytes=0
        )
        self.writer.start()
        self.reader = RowReader(folder / "metrics.db")
        self._sequence = 1

    def put(self, num_rows: int, *, run: str = "r", text: int = 0) -> None:
        bodies = tuple(
            orjson.dumps(
                {"event": "metrics", "run": run, "axis": "train/step", "step": self._sequence + n}
                | {"values": {"train/loss": 1.0, **{f"train/{'k' * 50}{key}": 1.0 for key in range(text)}}}
            )
            for n in range(num_rows)
        )
        self.writer.submit(RecordsIn("p", 1, self._sequence, bodies)).result(LIMIT_S)
        self._sequence += num_rows

    def close(self) -> None:
        self.reader.close()
        self.writer.close(5.0)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


class Taking(Sink[Row]):
    """Keeps what it is given; does first what `act` says."""

    gather_s = 0.0

    def __init__(self, name: str = "s", act: Callable[["Taking", Sequence[Row]], object] = lambda sink, rows: None):
        self.name, self.act = name, act
        self.rows: list[int] = []
        self.calls: list[str] = []

    async def start(self, durable: Cursor) -> Cursor:
        self.calls.append("start")
        return durable

    async def write(self, rows: Sequence[Row]) -> Cursor:
        self.calls.append("write")
        result = self.act(self, rows)
        if asyncio.iscoroutine(result):
            await result
        self.rows += [row.row_id for row in rows]
        return Cursor(rows[-1].row_id)

    async def finish(self) -> Cursor | None:
        self.calls.append("finish")
        return None

    async def abort(self) -> None:
        self.calls.append("abort")


@contextlib.asynccontextmanager
async def driving(sink: Taking, store: Store, run: str | None = None) -> AsyncIterator[SinkTask[Row]]:
    driven = SinkTask(sink, store.reader, store.writer, RowSource(store.reader, run))
    try:
        yield driven
    finally:
        await driven.close(LIMIT_S)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_rows_come_once_and_in_order_over_a_restart(store: Store) -> None:
    sink = Taking()
    store.put(5)
    async with driving(sink, store) as driven:
        await driven.wait_handed(5)
    store.put(5)
    async with driving(sink, store) as driven:
        await driven.wait_handed(10)
        store.put(1)
        driven.notify()
        await driven.wait_handed(11)
    assert sink.rows == list(range(1, 12))


async def gathering(sink: Taking, store: Store, driven: SinkTask[Row]) -> None:
    """A first row is written at once; those after it, five at a time, gather."""
    sink.gather_s = 10 * LIMIT_S
    store.put(1)
    driven.notify()
    await until(lambda: sink.rows == [1])
    for _ in range(2):
        store.put(5)
        driven.notify()
        await asyncio.sleep(0.1)  # what would be wrong comes within this time
    assert sink.rows == [1]


async def test_rows_gather_until_somebody_waits_for_them(store: Store) -> None:
    sink = Taking()
    async with driving(sink, store) as driven:
        await gathering(sink, store, driven)
        async with asyncio.timeout(LIMIT_S):
            await driven.wait_handed(11)
        assert sink.calls.count("write") == 2


async def test_close_hands_over_what_gathers(store: Store) -> None:
    sink = Taking()
    async with driving(sink, store) as driven:
        await gathering(sink, store, driven)
    assert sink.rows == list(range(1, 12)) and sink.calls[-1] == "finish"


async def test_a_sink_that_has_rows_to_catch_up_with_gathers_nothing(store: Store) -> None:
    sink = Taking()
    sink.gather_s = 10 * LIMIT_S
    store.put(1000)
    async with driving(sink, store):
        await until(lambda: len(sink.rows) > 900)


async def test_refused_row_is_left_out_counted_and_told_and_the_rest_goes_on(store: Store) -> None:
    def refuse(sink: Taking, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.row_id == 3:
                raise Refused(3, "too large")
            sink.rows.append(row.row_id)
        sink.rows = sink.rows[: -len(rows)]

    sink = Taking(act=refuse)
    store.put(5)
    async with driving(sink, store) as driven:
        await driven.wait_handed(5)
        state = await driven.status()
    assert sink.rows == [1, 2, 4, 5]
    assert (state.state, state.num_rows_refused, state.num_rows_behind) == ("healthy", 1, 0)


async def test_failure_is_retried_and_shown_with_its_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "FIRST_BACKOFF_S", 0.01)
    broken = True

    def fail(sink: Taking, rows: Sequence[Row]) -> None:
        if broken:
            raise OSError("no route")

    sink = Taking(act=fail)
    store.put(3)
    async with driving(sink, store) as driven:
        await until(lambda: sink.calls.count("abort") >= 2)
        state = await driven.status()
        assert (state.state, state.last_error, state.num_rows_behind) == ("failing", "OSError: no route", 3)
        assert state.seconds_behind >= 0
        broken = False
        await driven.wait_handed(3)
        await until(lambda: driven.state == "healthy")
        assert (await driven.status()).last_error == ""
    assert sink.rows == [1, 2, 3]


async def test_waits_between_tries_grow_and_differ(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def wait_for(awaitable: object, limit_s: float | None) -> object:
        if limit_s is not None and limit_s < 40:
            waits.append(limit_s)
        awaitable.close()  # type: ignore[attr-defined]
        raise TimeoutError

    driven = SinkTask(Taking(), store.reader, store.writer)
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    for _ in range(10):
        await driven._pause()
    monkeypatch.undo()
    await driven.close(LIMIT_S)
    for number, wait_s in enumerate(waits):
        full_s = min(30.0, 0.5 * 2**number)
        assert full_s / 2 <= wait_s <= full_s
    assert len({round(wait_s / min(30.0, 0.5 * 2**n), 6) for n, wait_s in enumerate(waits)}) == len(waits) == 10


async def test_slow_sink_delays_no_other_and_holds_no_memory(store: Store) -> None:
    held = asyncio.Event()
    slow, fast = Taking("slow", lambda sink, rows: held.wait()), Taking("fast")
    async with driving(slow, store) as driven_slow, driving(fast, store) as driven_fast:
        for _ in range(20):
            store.put(50)
            driven_slow.notify()
            driven_fast.notify()
        await driven_fast.wait_handed(1000)
        assert slow.rows == []
        assert (await driven_slow.status()).num_rows_behind == 1000
        held.set()
        await driven_slow.wait_handed(1000)
    assert slow.rows == fast.rows == list(range(1, 1001))


async def test_rows_are_read_in_bites_of_bounded_size(store: Store) -> None:
    store.put(40, text=6_000)  # about 0.4 MB each
    bites, place, sizes = Bites(RowSource(store.reader)), 0, []
    while items := bites.after(place):
        place = items[-1].row_id
        sizes.append(sum(len(item.body) for item in items))
    assert place == 40
    assert all(size <= MAX_BYTES * 1.1 for size in sizes[1:]) and sizes[0] < 16 * 1024 * 1024


async def test_sink_of_one_run_sees_no_other(store: Store) -> None:
    sink = Taking()
    for run in ("a", "b", "a"):
        store.put(2, run=run)
    async with driving(sink, store, run="a") as driven:
        await until(lambda: sink.rows == [1, 2, 5, 6])
        store.put(3, run="b")  # of no interest to it: they may go
        driven.notify()
        await until(lambda: driven.needed_after == 9)
        assert (await driven.status()).num_rows_behind == 0


async def test_news_of_another_run_is_passed_without_a_look(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    source = RowSource(store.reader, "a")
    monkeypatch.setattr(source, "after", lambda place, limit: looks.append(place) or RowSource.after(source, place, 9))
    store.put(2, run="a")
    driven = SinkTask(Taking(), store.reader, store.writer, source)
    await until(lambda: driven.has_all and driven.handed == 2)
    looked = len(looks)
    store.put(3, run="b")
    driven.notify(News({"b"}, 5))
    assert (await driven.status()).num_rows_behind == 0
    assert driven.needed_after == 5 and len(looks) == looked
    store.put(1, run="a")
    driven.notify(News({"a", "c"}, 6))
    assert not driven.has_all and driven.needed_after == 5
    await driven.wait_handed(6)
    await driven.close(LIMIT_S)


async def test_rough_status_asks_the_store_only_of_one_that_may_lag(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Taking()
    async with driving(sink, store) as driven:
        await gathering(sink, store, driven)
        assert (await driven.status()).num_rows_behind == 10
        assert (await driven.status(exact=False)).num_rows_behind == 0
        sink.lagging_after_s = 0.01
        await until(lambda: not driven._is_recent())
        late = await driven.status(exact=False)
        assert (late.num_rows_behind, late.state) == (10, "lagging")


async def test_rows_that_are_to_be_sent_again_are_needed(store: Store) -> None:
    class Unsafe(Taking):
        tick_s = 0.05

        async def write(self, rows: Sequence[Row]) -> Cursor:
            await super().write(rows)
            return Cursor(rows[-1].row_id if self.calls.count("start") > 1 else 0)

        async def start(self, durable: Cursor) -> Cursor:
            await super().start(durable)
            if self.calls.count("start") == 2:
                raise OSError("not yet")
            return durable

        async def tick(self) -> Cursor | None:
            raise OSError("its process has ended")

    store.put(3, run="a")
    store.put(3, run="b")
    async with driving(Unsafe(), store, run="a") as driven:
        await until(lambda: driven.last_error == "OSError: not yet")
        driven.notify(News({"b"}, 6))
        assert driven.needed_after == 0


async def test_tick_comes_by_the_clock_however_much_there_is_to_do(store: Store) -> None:
    ticked = asyncio.Event()

    class Ticking(Taking):
        tick_s = 0.1

        async def tick(self) -> Cursor | None:
            ticked.set()
            return None

    async with driving(Ticking(), store) as driven, asyncio.timeout(LIMIT_S):
        while not ticked.is_set():
            driven.notify()
            await asyncio.sleep(0.01)


async def test_secret_in_an_error_is_told_to_nobody(store: Store) -> None:
    def fail(sink: Taking, rows: Sequence[Row]) -> None:
        raise OSError("https://x/in?token=hush-hush-1 refused")

    store.put(1)
    driven = SinkTask(Taking(act=fail), store.reader, store.writer, secrets=Secrets(["hush-hush-1"]))
    await until(lambda: driven.last_error)
    said = (await driven.status()).last_error
    await driven.close(LIMIT_S)
    assert "refused" in said and "hush" not in said


async def test_what_was_taken_in_part_is_not_sent_again(store: Store) -> None:
    def take_two(sink: Taking, rows: Sequence[Row]) -> None:
        if sink.calls.count("write") == 1:
            sink.rows += [row.row_id for row in rows[:2]]
            raise TakenInPart(Cursor(rows[1].row_id)) from OSError("the third hung")

    sink = Taking(act=take_two)
    store.put(4)
    async with driving(sink, store) as driven:
        await until(lambda: driven.last_error == "OSError: the third hung" and driven.safe == 2)
        await driven.wait_handed(4)
    assert sink.rows == [1, 2, 3, 4]


async def test_idle_sink_is_started_by_its_first_row_and_finished_after_silence(store: Store) -> None:
    sink = Taking()
    sink.idle_after_s = 0.1
    async with driving(sink, store) as driven:
        await until(lambda: driven.state == "healthy")
        assert sink.calls == []
        store.put(1)
        driven.notify()
        await until(lambda: sink.calls == ["start", "write", "finish"])
        store.put(1)
        driven.notify()
        await until(lambda: sink.rows == [1, 2])


async def test_start_that_hangs_is_cut_and_closing_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Taking):
        start_timeout_s = 0.1

        async def start(self, durable: Cursor) -> Cursor:
            await asyncio.sleep(600)
            return durable

    sink = Hanging()
    store.put(1)
    driven = SinkTask(sink, store.reader, store.writer)
    await until(lambda: driven.last_error == "TimeoutError: start took longer than 0.1 s")
    async with asyncio.timeout(8):
        await driven.close(5.0)
    assert driven.state == "closed"


async def test_sinks_of_many_runs_take_turns_at_few_places(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "IDLE_S", 0.02)
    at_work: list[int] = []

    class Idle(Taking):
        idle_after_s, tick_s = 60.0, 0.05

        async def start(self, durable: Cursor) -> Cursor:
            at_work.append(sum(sink.calls.count("start") - sink.calls.count("finish") for sink in sinks) + 1)
            return await super().start(durable)

    sinks = [Idle(f"s{n}") for n in range(6)]
    places = Places(2)
    for n in range(6):
        store.put(3, run=f"r{n}")
    tasks = [
        SinkTask(sink, store.reader, store.writer, RowSource(store.reader, f"r{n}"), places=places)
        for n, sink in enumerate(sinks)
    ]
    await until(lambda: all(len(sink.rows) == 3 for sink in sinks))
    store.put(1, run="r0")  # one that gave up its place comes back
    tasks[0].notify()
    await until(lambda: len(sinks[0].rows) == 4)
    await asyncio.gather(*(task.close(LIMIT_S) for task in tasks))
    assert max(at_work) == 2
    assert sinks[0].rows == sorted(set(sinks[0].rows))


async def test_a_busy_sink_gives_its_place_to_one_that_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "HOLD_S", 0.05)

    class Idle(Taking):
        idle_after_s, tick_s = 60.0, 0.05

    async def slow(sink: Taking, rows: Sequence[Row]) -> None:
        await asyncio.sleep(0.01)

    busy, other, places = Idle("busy", slow), Idle("other"), Places(1)
    store.put(600, run="busy")
    store.put(1, run="other")
    tasks = [
        SinkTask(sink, store.reader, store.writer, RowSource(store.reader, sink.name), places=places)
        for sink in (busy, other)
    ]
    await until(lambda: other.rows)
    await until(lambda: len(busy.rows) == 600)
    await asyncio.gather(*(task.close(LIMIT_S) for task in tasks))
    assert busy.rows == list(range(1, 601))


async def test_one_that_waits_for_a_place_closes_at_once(store: Store) -> None:
    class Idle(Taking):
        idle_after_s, tick_s = 60.0, 0.05

    store.put(1)
    places = Places(0)
    driven = SinkTask(Idle(), store.reader, store.writer, RowSource(store.reader), places=places)
    await asyncio.wait_for(driven.close(LIMIT_S), 2.0)
    assert driven.state == "closed"
