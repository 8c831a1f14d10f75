"""The live stream: everything wanted, once, in order; from any place on; a slow client is told."""

import asyncio
import json
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from furlong.asking.client import LiveEvent, MetricsClient, Unreachable
from furlong.asking.filters import LogFilter
from furlong.asking.following import Follower, Place, Wanted
from furlong.records import Last
from services.metrics import feed
from services.metrics.feed import Feed, TooManyListeners
from services.metrics.rows import StoredBatch
from services.metrics.writer import Committed
from tests.metrics.asking import get, post
from tests.metrics.running import MetricsProcess, until

Make = Callable[..., MetricsProcess]


class Listening:
    """A client in a thread; gives events as they come."""

    def __init__(self, http: str, place: str | None = None, **params: str) -> None:
        self._came: queue.Queue[LiveEvent] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(http, place, params), daemon=True)
        self._thread.start()
        self.place = self.next().place  # hello: from here on nothing is missed

    def _run(self, http: str, place: str | None, params: dict[str, str]) -> None:
        try:
            for event in MetricsClient(http).live(params, place):
                self._came.put(event)
        except Unreachable:
            self._came.put(LiveEvent("end", "", b""))

    def next(self) -> LiveEvent:
        event = self._came.get(timeout=15)
        if event.place:
            self.place = event.place
        return event

    def numbers(self, count: int) -> list[Any]:
        return [number_of(self.next()) for _ in range(count)]


def number_of(event: LiveEvent) -> Any:
    tree = json.loads(event.data)
    return tree["record"]["number"] if event.name == "record" else tree["step"]


def say(service: MetricsProcess, run: str, *nums: int, **fields: object) -> None:
    lines = [json.dumps({"event": "e", "run": run, "number": n, **fields}).encode() for n in nums]
    assert post(service.http, b"\n".join(lines))["taken"] == len(nums)


def test_records_rows_and_only_what_is_wanted_come_live(service: MetricsProcess) -> None:
    wide, narrow = Listening(service.http, run="wide"), Listening(service.http, run="wide", level="error")
    say(service, "other", 9)
    say(service, "wide", 1, 2)
    say(service, "wide", 3, level="error")
    telemetry = service.telemetry("live-0")
    telemetry.identify({"run": "wide", "service": "x", "instance": "live-0"})
    telemetry.metrics("train/step", 4, {"train/loss": Last(1)}, part="t", parts=["t"])
    assert telemetry.close(10)
    assert wide.numbers(4) == [1, 2, 3, 4]
    assert narrow.numbers(2) == [3, 4]


def test_rows_alone_and_of_one_axis(service: MetricsProcess) -> None:
    listening = Listening(service.http, run="axis", kinds="row", axis="b/step")
    say(service, "axis", 1)
    for axis, step in (("a/step", 2), ("b/step", 3)):
        record = {"event": "metrics", "run": "axis", "axis": axis, "step": step, "values": {"x": 1}}
        post(service.http, json.dumps(record).encode())
    assert listening.numbers(1) == [3]


def test_client_that_comes_back_misses_and_repeats_nothing(service: MetricsProcess) -> None:
    first = Listening(service.http, run="back")
    say(service, "back", *range(10))
    assert first.numbers(4) == [0, 1, 2, 3]  # it goes in the middle of a batch
    say(service, "back", *range(10, 20))
    again = Listening(service.http, place=first.place, run="back")
    say(service, "back", *range(20, 25))
    assert again.numbers(21) == list(range(4, 25))


def test_restart_of_the_service_loses_and_repeats_nothing(make: Make) -> None:
    service = make().start()
    first = Listening(service.http, run="kill")
    say(service, "kill", 1, 2)
    assert first.numbers(2) == [1, 2]
    say(service, "kill", 3)
    service.signal(signal.SIGKILL)
    service.kill()
    service.start()
    say(service, "kill", 4)
    seen = first.place
    more = [number_of(event) for event in iter(first.next, LiveEvent("end", "", b""))]
    again = Listening(service.http, place=first.place if more else seen, run="kill")
    say(service, "kill", 5)
    assert more + again.numbers(5 - 2 - len(more)) == [3, 4, 5]


def test_place_in_another_store_is_reset(service: MetricsProcess) -> None:
    answer = MetricsClient(service.http).live({"run": "none"}, "999999999999.1.1")
    assert [next(answer).name, next(answer).name] == ["reset", "hello"]


def test_stop_of_the_service_ends_streams_at_once(make: Make) -> None:
    service = make().start()
    listening = Listening(service.http, run="r")
    assert service.stop() == 3
    until(lambda: listening.next().name == "end", "the stream's end")


def test_replay_of_many_records_is_whole(service: MetricsProcess) -> None:
    place = str(get(service.http, "/api/place")["place"])
    for begin in range(0, 20_000, 5_000):
        say(service, "many", *range(begin, begin + 5_000))
    assert Listening(service.http, place=place, run="many").numbers(20_000) == list(range(20_000))


def test_client_that_does_not_read_slows_nobody(service: MetricsProcess) -> None:
    address = urlsplit(service.http)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as deaf:
        deaf.sendall(b"GET /api/live?run=deaf HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"200" in deaf.recv(64)
        live = Listening(service.http, run="deaf")
        for n in range(40):
            say(service, "deaf", n, text="x" * 200_000)
        assert live.numbers(40) == list(range(40))


# -- the queue of one listener


def stored(batch_id: int, *bodies: bytes) -> StoredBatch:
    return StoredBatch(batch_id, "r", "p", 1, 0, bodies, 20)


@pytest.fixture
def small_queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(feed, "MAX_QUEUED_ITEMS", 3)
    monkeypatch.setattr(feed, "MAX_LISTENERS", 1)
    yield


async def test_slow_listener_loses_the_oldest_and_is_told_how_many(small_queue: None) -> None:
    published = Feed()
    listener = published.listen()
    for batch_id in range(1, 6):
        published.publish(Committed([stored(batch_id, b"{}", b"{}")], []))
    await asyncio.sleep(0)
    num_lost, items = await listener.next(1.0)
    assert (num_lost, [item.batch_id for item in items if isinstance(item, StoredBatch)]) == (4, [3, 4, 5])
    assert (await listener.next(0.01)) == (0, [])


async def test_feed_has_room_for_so_many_listeners(small_queue: None) -> None:
    published = Feed()
    published.leave(published.listen())
    published.listen()
    with pytest.raises(TooManyListeners):
        published.listen()


def test_follower_takes_up_in_the_middle_of_a_batch() -> None:
    bodies = [json.dumps({"event": n}).encode() for n in range(4)]
    follower = Follower(Wanted(LogFilter()), Place((5 << 16) + 1))
    given = {"batch_id": 5, "run": "r", "received_us": 0, "top_level": 20, "bodies": bodies}
    events = list(follower.batch(**given))  # type: ignore[arg-type]
    assert [json.loads(event.data)["record"]["event"] for event in events] == [2, 3]
    assert list(follower.batch(**given)) == []  # type: ignore[arg-type]
