"""What the metrics service is made of, started in order and stopped in the opposite one.

A part is an async context manager that is given the `Parts` before it and works while it is entered; `running` is the
one place that names them all. What takes records in is entered last and left first, sinks the other way round.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # Any: what a coroutine is sent

import structlog

from furlong import addresses, logs, rpc
from furlong.config import ConfigError
from furlong.config.errors import Problem
from furlong.folderlock import FolderLock
from furlong.process import ExitCode
from furlong.service import ServiceContext
from services.metrics.alerts.part import Alerts, watching_alerts
from services.metrics.bell import Bell, News
from services.metrics.collector import collect_until
from services.metrics.feed import Feed
from services.metrics.http.app import make_app
from services.metrics.http.server import serve_http
from services.metrics.ingest import SERVER_OPTIONS, SERVICE_NAME, MetricsServicer
from services.metrics.inspection import inspect
from services.metrics.needs import tell_needs
from services.metrics.prometheus import route as prometheus
from services.metrics.queries import Queries
from services.metrics.room import is_there_but_locked
from services.metrics.rows import RowReader
from services.metrics.sinks.flags import specs_of
from services.metrics.sinks.manager import SinkManager
from services.metrics.store import NewerSchema
from services.metrics.tailing.part import following_files
from services.metrics.writer import Committed, Writer

log = structlog.get_logger()

STORE_NAME = "metrics.db"
NUM_THREADS = 32
"""Started when they are needed."""
OPEN_AGAIN_S = 0.5


@dataclass
class Parts:
    """What a part may use of the others."""

    context: ServiceContext
    path: Path
    """The store."""
    writer: Writer
    reader: RowReader
    on_news: list[Callable[[News], object]]
    """Called in the event loop when there are new rows, or new batches."""
    on_commit: list[Callable[[Committed], object]]
    """Called in the writer's thread with what a commit brought; must be quick."""
    sinks: SinkManager
    queries: Queries
    """Questions about the store."""
    feed: Feed
    """What comes into the store, live. Alerts are published to it."""
    alerts: Alerts | None = None
    """What fires; None while the service starts."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the service takes records in and answers."""
    alone: bool = False
    """It belongs to no run."""
    _drain_until: float = 0.0

    def begin_drain(self) -> None:
        """From here on the run's drain budget counts."""
        self._drain_until = time.monotonic() + max(1.0, self.context.config.run.drain_budget_s - 3.0)

    def left_s(self) -> float:
        """Seconds that a part may still take to stop."""
        return max(1.0, self._drain_until - time.monotonic())


@contextlib.asynccontextmanager
async def running(context: ServiceContext, *, alone: bool = False) -> AsyncGenerator[Parts]:
    """The whole service, SERVING while entered."""
    # a name server that hangs, asked by one sink, must not take the threads that the others read and write with
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="worker"))
    async with contextlib.AsyncExitStack() as stack:
        parts = await stack.enter_async_context(_store(context, alone=alone))
        servicer = MetricsServicer(parts.writer, parts.reader, parts.sinks)
        servicer.http = await stack.enter_async_context(_http(parts, servicer))
        await stack.enter_async_context(_sinks(parts))
        stack.push_async_callback(_hand_on_waiting, parts)
        parts.alerts = await stack.enter_async_context(watching_alerts(parts))
        servicer.alerts = parts.alerts.streams
        servicer.following = await stack.enter_async_context(following_files(parts))
        await stack.enter_async_context(
            _in_background(parts, tell_needs(parts.writer, parts.sinks.following), "retention")
        )
        await stack.enter_async_context(_in_background(parts, inspect(parts.path, parts.writer), "inspection"))
        await stack.enter_async_context(_collector(parts))
        await stack.enter_async_context(_grpc(parts, servicer))
        parts.ready.set()
        try:
            yield parts
        finally:
            parts.ready.clear()
            parts.begin_drain()


@contextlib.asynccontextmanager
async def _store(context: ServiceContext, *, alone: bool) -> AsyncGenerator[Parts]:
    """Raises ConfigError when it is another's, or cannot be used."""
    folder = context.run_dir.metrics_store
    on_news: list[Callable[[News], object]] = []
    on_commit: list[Callable[[Committed], object]] = []
    bell = Bell(lambda news: [act(news) for act in on_news])
    remedy = "Post to that one, stop it, or give another folder."
    with FolderLock(folder, service="metrics", remedy=remedy):
        path = folder / STORE_NAME
        writer = await _open_writer(context, path, lambda committed: _tell(committed, on_commit, bell))
        writer.start()
        reader = RowReader(path)
        try:
            sinks = SinkManager(
                run_dir=context.run_dir,
                reader=reader,
                writer=writer,
                config=context.config,
                secrets=logs.secrets(),
                own_run=None if alone else context.config.run.name,
            )
            feed = Feed()
            on_commit.append(feed.publish)
            yield Parts(context, path, writer, reader, on_news, on_commit, sinks, Queries(path), feed, alone=alone)
        finally:
            reader.close()
            await asyncio.to_thread(writer.close, 5.0)  # the last connection to close tidies the store's files


@contextlib.asynccontextmanager
async def _http(parts: Parts, servicer: MetricsServicer) -> AsyncGenerator[str]:
    config = parts.context.config
    app = make_app(parts, status=servicer.status, more=[prometheus.router(parts)])
    async with serve_http(app, host=config.run.host, port=config.metrics.metrics_port) as http:
        try:
            yield http
        finally:
            parts.feed.close()
            parts.queries.close()


@contextlib.asynccontextmanager
async def _sinks(parts: Parts) -> AsyncGenerator[None]:
    parts.on_news.append(parts.sinks.notify)  # before they start: what comes while they do is news to the first ones
    try:
        await parts.sinks.start(specs_of(parts.context.config))
        yield
    finally:
        await parts.sinks.close(parts.left_s())


async def _hand_on_waiting(parts: Parts) -> None:
    """No more parts will come: rows that wait are handed on as they are."""
    await asyncio.wrap_future(parts.writer.emit_waiting())


@contextlib.asynccontextmanager
async def _in_background(parts: Parts, work: Coroutine[Any, Any, object], name: str) -> AsyncGenerator[None]:
    task = parts.context.watch(asyncio.create_task(work, name=name))
    try:
        yield
    finally:
        task.cancel()


@contextlib.asynccontextmanager
async def _collector(parts: Parts) -> AsyncGenerator[None]:
    stopping = asyncio.Event()
    work = collect_until(stopping, parts.context.run_dir.spool, parts.writer)
    collecting = parts.context.watch(asyncio.create_task(work, name="collector"))
    try:
        yield
    finally:
        stopping.set()
        await asyncio.wait({collecting}, timeout=parts.left_s() / 2)  # the rest of the time is the sinks'
        collecting.cancel()


@contextlib.asynccontextmanager
async def _grpc(parts: Parts, servicer: MetricsServicer) -> AsyncGenerator[None]:
    """Also publishes where the service is, and says SERVING."""
    context = parts.context
    server = await rpc.start_server(
        servicer.register,
        names=[SERVICE_NAME],
        host=context.config.run.host,
        port=context.config.metrics.metrics_grpc_port,
        options=SERVER_OPTIONS,
    )
    addresses.publish(context.run_dir, context.instance, grpc=server.address, http=servicer.http)
    await server.set_serving(serving=True)
    try:
        yield
    finally:
        await server.set_serving(serving=False)
        await asyncio.to_thread(context.telemetry.flush, 1.0)
        servicer.stop()
        await server.drain(2.0)


async def _open_writer(context: ServiceContext, path: Path, on_commit: Callable[[Committed], None]) -> Writer:
    """On a disk that is full or read-only it waits, and says so: meanwhile producers keep what they have.

    Raises ConfigError when the store cannot be used for another reason.
    """
    config = context.config.metrics
    said = False
    while True:
        try:
            return Writer(
                path,
                row_timeout_s=config.metrics_row_timeout_s,
                secrets=logs.secrets(),
                min_free_bytes=config.metrics_min_free_bytes,
                max_age_s=config.metrics_retention_days * 86_400,
                max_bytes=config.metrics_retention_bytes,
                on_commit=on_commit,
                on_death=lambda reason: context.stop.request(reason, code=ExitCode.CRASHED),
            )
        except (NewerSchema, OSError) as error:
            if isinstance(error, NewerSchema) or not is_there_but_locked(path):
                rule = f"must hold a usable store: {error}"
                raise ConfigError([Problem("run.run_dir", str(context.run_dir.root), rule)]) from error
            if not said:
                log.warning("metrics_store_waits_for_disk", error=str(error))
            said = True
            await asyncio.sleep(OPEN_AGAIN_S)


def _tell(committed: Committed, on_commit: Sequence[Callable[[Committed], object]], bell: Bell) -> None:
    for act in on_commit:
        act(committed)
    bell.ring(committed)
