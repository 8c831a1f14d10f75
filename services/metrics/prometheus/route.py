"""The route /metrics. Reads the rows that came since the last scrape when it is scraped: unasked, it costs nothing."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
from fastapi import APIRouter, Request, Response

from furlong import __version__
from services.metrics.prometheus.exposition import Buckets, Health, encode, of_alerts, of_health, of_values
from services.metrics.prometheus.gauges import Gauges
from services.metrics.rows import RowReader
from services.metrics.sinks.drawn import drawn
from services.metrics.sinks.task import SinkState

if TYPE_CHECKING:
    from services.metrics.parts import Parts

READ_ROWS = 256
MAX_ROWS = 5_000
"""Between two scrapes; of more, the newest count."""
_STATES = ("starting", "healthy", "lagging", "failing", "closed")


class Scraped:
    """The rows read so far, as gauges."""

    def __init__(self, reader: RowReader, *, stale_after_s: float) -> None:
        self.gauges = Gauges(stale_after_s=stale_after_s)
        self._reader = reader
        self._row_id = 0

    def catch_up(self) -> None:
        """Read what is new. Blocks; one at a time."""
        last = self._reader.last_row_id()
        self._row_id = max(self._row_id if self._row_id <= last else 0, last - MAX_ROWS)
        while self._row_id < last:
            rows = self._reader.after(self._row_id, READ_ROWS)
            if not rows:
                break
            self.gauges.take(one for row in rows if (one := drawn(row)) is not None)
            self._row_id = rows[-1].row_id
        self.gauges.forget_stale(time.time())


def router(parts: "Parts") -> APIRouter:
    """For make_app."""
    routes = APIRouter(tags=["state"])
    scraped = Scraped(parts.reader, stale_after_s=parts.context.config.metrics.prometheus_stale_s)
    busy = asyncio.Lock()

    @routes.get("/metrics", summary="For Prometheus to scrape", response_class=Response)
    async def metrics(request: Request) -> Response:
        states = await parts.sinks.states()
        firing = [(alert.run, alert.rule) for alert in parts.alerts.firing()] if parts.alerts else []
        accept = request.headers.get("accept", "")
        gzipped = "gzip" in request.headers.get("accept-encoding", "")

        def make() -> tuple[bytes, str]:
            scraped.catch_up()
            health = [*of_service(parts, scraped.gauges), *of_sinks(states)]
            families = [*of_values(scraped.gauges), *of_health(health), of_alerts(firing)]
            return encode(families, accept=accept, gzipped=gzipped)

        async with busy:
            body, content_type = await asyncio.to_thread(make)
        headers = {"Content-Encoding": "gzip"} if gzipped else {}
        return Response(body, media_type=content_type, headers={**headers, "Vary": "Accept, Accept-Encoding"})

    return routes


def of_service(parts: "Parts", gauges: Gauges) -> Iterator[Health | Buckets]:
    """How the store and the process are. Blocks a little."""
    writer, reader = parts.writer, parts.reader
    yield _one("build_info", "The version of the service.", 1, ("version", __version__))
    yield _one("records", "Records on disk.", reader.num_records())
    yield _one("rows", "Rows handed on since the store was made.", reader.last_row_id(), counts=True)
    yield _one("rows_waiting", "Rows that wait for some of their parts.", writer.rows.num_waiting)
    for name, value in writer.counts.shown().items():
        text = "Since the service started; see the counts in the documentation."
        yield _one(name.removeprefix("num_") + "_events", text, value, counts=True)
    yield _one("store_failing", "1 while the store cannot be written.", bool(writer.failing))
    yield _one("store_holding", "1 while records are held off for want of room.", bool(writer.holding))
    yield _one("store_bytes", "Size of the store's files.", _store_bytes(parts))
    yield _one("disk_free_bytes", "Free bytes of the store's disk.", shutil.disk_usage(parts.path.parent).free)
    yield _one("jobs_waiting", "Jobs in the writer's queue.", writer.num_waiting)
    times = writer.commit_times
    bounds, counts, total = times.bounds, times.counts, times.sum_s
    yield Buckets("commit_seconds", "How long commits took, with their fsync.", bounds, tuple(counts), total)
    yield _one("series", "Values shown here.", gauges.num_series)
    yield _one("series_left_out", "Values not shown as there are too many.", gauges.num_left_out, counts=True)
    process = psutil.Process()
    yield _one("resident_bytes", "Memory of the service's process.", process.memory_info().rss)
    yield _one("cpu_seconds", "Processor time of the service's process.", sum(process.cpu_times()[:2]), counts=True)


def of_sinks(states: list[SinkState]) -> Iterator[Health]:
    """How far each sink is."""
    named = [((("sink", state.name), ("kind", state.kind)), state) for state in states]
    yield Health("sink_rows_behind", "Rows that a sink has yet to take.", [(n, s.num_rows_behind) for n, s in named])
    yield Health("sink_seconds_behind", "Age of the oldest of them.", [(n, s.seconds_behind) for n, s in named])
    refused = [(n, float(s.num_rows_refused)) for n, s in named]
    yield Health("sink_rows_refused", "Rows that a sink's other side never takes.", refused, counts=True)
    left_out = [(n, float(s.num_values_left_out)) for n, s in named]
    yield Health("sink_values_left_out", "Values that a sink's other side has no place for.", left_out, counts=True)
    one_of = [
        ((*n, ("state", state)), float(s.state == state)) for n, s in named for state in (*_STATES, *_odd(s.state))
    ]
    yield Health("sink_state", "1 for the state that a sink is in.", one_of)


def _odd(state: str) -> tuple[str, ...]:
    return () if state in _STATES else (state,)


def _one(name: str, text: str, value: float, *labels: tuple[str, str], counts: bool = False) -> Health:
    return Health(name, text, [(labels, float(value))], counts=counts)


def _store_bytes(parts: "Parts") -> int:
    size = 0
    for suffix in ("", "-wal", "-shm"):
        try:
            size += os.stat(f"{parts.path}{suffix}").st_size
        except FileNotFoundError:  # no write-ahead file at the moment
            continue
    return size
