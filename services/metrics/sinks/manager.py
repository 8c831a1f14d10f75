"""All sinks of the service: those of flags, those added while it runs, and one a run where the kind wants that.

Event loop only. Owns the table `sinks` of the store and the folders that sinks keep their own state in.
"""

import asyncio
import hashlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any  # Any: sinks of rows and of batches

import orjson
import structlog

from furlong.config import ConfigError, RunConfig
from furlong.config.errors import Problem
from furlong.jsonline import Secrets
from furlong.rundir import RunDir
from services.metrics.bell import News
from services.metrics.rows import RowReader
from services.metrics.sinks.kinds import KINDS, Kind, kind_of, make_sink
from services.metrics.sinks.places import Places
from services.metrics.sinks.post import shown
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, SinkSpec
from services.metrics.sinks.source import BatchSource, RowSource
from services.metrics.sinks.task import SinkState, SinkTask
from services.metrics.writer import Writer

log = structlog.get_logger()

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
TAKEN_NAMES = frozenset({"alerts"})
"""Cursors of others. A name with `--` in it is that of a run's own sink."""
MAX_LIVE_SINKS = 64
MAX_OPTIONS_BYTES = 64 * 1024
LOOK_FOR_RUNS_S = 1.0
REMOVE_TIMEOUT_S = 30.0
LEAVE_S = 2.0
"""A sink that is being removed when the service stops has so long."""


class UnknownSink(KeyError):
    """There is no sink of that name."""


@dataclass(frozen=True)
class ListedSink:
    """What is known of a sink that was asked for."""

    name: str
    kind: str
    options: Mapping[str, object]
    live: bool
    """Added while the service ran."""
    tasks: tuple[SinkState, ...]
    """One; of a kind that has one a run, one for each run seen."""


class SinkManager:
    """Makes, starts, lists and stops them."""

    def __init__(
        self,
        *,
        run_dir: RunDir,
        reader: RowReader,
        writer: Writer,
        config: RunConfig,
        secrets: Secrets,
        own_run: str | None,
    ) -> None:
        """own_run: the run whose configuration is known; None: the service keeps runs of others only."""
        self._run_dir, self._reader, self._writer = run_dir, reader, writer
        self._config, self._secrets, self._own_run = config, secrets, own_run
        self._specs: dict[str, SinkSpec] = {}
        self._removed: dict[str, tuple[SinkSpec, list[SinkTask[Any]]]] = {}
        """Those of flags that were removed, with what drove them: each can be restored."""
        self._tasks: dict[str, dict[str | None, SinkTask[Any]]] = {}
        self._changing = asyncio.Lock()
        self._places = Places()
        self._leaving: dict[str, list[SinkTask[Any]]] = {}
        self._closed = False
        self._looked_at = 0.0
        self._unseen: set[str] = set()
        """Runs that have rows and may have no sink where each is to have one."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self, specs: Sequence[SinkSpec]) -> None:
        """Start those of the flags and those of the store. Raises ConfigError for a flag's."""
        async with self._changing:
            for spec in specs:
                await self._begin(spec)
            for spec in await asyncio.to_thread(self._stored):
                if spec.name in self._specs:
                    log.warning("sink_name_taken_by_flag", sink=spec.name)
                    continue
                try:
                    await self._begin(spec)
                except ConfigError as error:  # what it needs is gone: said, shown, and it holds up nothing
                    self._start_task(spec, None, _Unusable(spec.name, str(error)))
            await self._begin_runs()

    async def add(self, spec: SinkSpec) -> None:
        """Add one that survives a restart, and bring it up to date from the first row. Raises ConfigError."""
        spec = replace(spec, live=True)
        async with self._changing:
            self._check_open(spec.name)
            self._check_new(spec)
            await self._begin(spec)
            try:
                await asyncio.wrap_future(self._writer.execute(lambda to: _insert(to, spec)))
            except BaseException:
                del self._specs[spec.name]
                tasks = self._tasks.pop(spec.name, {})
                await asyncio.gather(*(task.close(1.0) for task in tasks.values()))
                raise
            await self._begin_runs()
        log.info("sink_added", sink=spec.name, kind=spec.kind)

    async def restore(self, name: str) -> None:
        """Start one again that a flag names and that was removed; it goes on where it was. Raises UnknownSink, and
        ConfigError when it has not left yet or cannot start."""
        async with self._changing:
            self._check_open(name)
            if name not in self._removed:
                raise UnknownSink(name)
            spec, _ = self._removed[name]
            if name in self._leaving:
                raise ConfigError([Problem("name", name, "has not finished yet", "Try again in a moment.")])
            await self._begin(spec)
            del self._removed[name]
            await self._begin_runs()
        log.info("sink_restored", sink=name, kind=spec.kind)

    async def remove(self, name: str, *, keep_cursor: bool = False, timeout_s: float = REMOVE_TIMEOUT_S) -> None:
        """Hand over what is there, finish, and forget it. Raises UnknownSink.

        keep_cursor: added again under its name, it goes on where it was; else from the first row. One that a flag
        names keeps it always, and comes back with `restore` or the next start.
        """
        async with self._changing:  # not while it takes its leave: one that hangs must not keep others waiting
            spec = self._specs.pop(name, None)
            if spec is None:
                raise UnknownSink(name)
            tasks = self._tasks.pop(name, {})
            self._leaving[name] = list(tasks.values())
            if not spec.live:
                self._removed[name] = spec, self._leaving[name]
        kept = keep_cursor or not spec.live
        try:
            await asyncio.gather(*(task.close(timeout_s) for task in tasks.values()))
            await self._forget(spec, {} if kept else tasks)
        finally:
            del self._leaving[name]
        log.info("sink_removed", sink=name, kept_cursor=kept)

    def following(self) -> Iterator[SinkTask[Any]]:
        """All that still need what they have not taken: also those that are leaving, or that may be restored."""
        yield from self
        for tasks in self._leaving.values():
            yield from tasks
        for _, tasks in self._removed.values():
            yield from tasks

    async def listed(self) -> list[ListedSink]:
        """Every sink that was asked for, and how it is."""
        listed = []
        for name, spec in list(self._specs.items()):
            states = [await task.status() for task in list(self._tasks.get(name, {}).values())]
            shown = {key: self._shown(value) for key, value in spec.options.items()}
            listed.append(ListedSink(name, spec.kind, shown, spec.live, tuple(states)))
        return listed

    async def states(self, *, exact: bool = True) -> list[SinkState]:
        """Of every task. exact: as of its status."""
        return list(await asyncio.gather(*(task.status(exact=exact) for task in self)))

    def __iter__(self) -> Iterator[SinkTask[Any]]:
        return iter([task for tasks in self._tasks.values() for task in tasks.values()])

    def notify(self, news: News) -> None:
        """There are new rows or batches. Costs little, whatever there is: only those that it concerns look."""
        for tasks in self._tasks.values():
            for task in tasks.values():
                task.notify(news)
        for name in self._specs:
            if self._kind(name).per_run:
                self._unseen |= news.runs - self._tasks[name].keys()
        if self._unseen and self._looking is None and not self._closed:
            self._looking = asyncio.create_task(self._look_for_runs(), name="sinks-look-for-runs")

    async def wait_handed(self, timeout_s: float) -> list[str]:
        """Wait until every sink has taken what there is now; the names of those that have not, after the time."""
        waits = {asyncio.create_task(self._wait_one(task)): task.sink.name for task in self}
        if not waits:
            return []
        _, pending = await asyncio.wait(waits, timeout=max(0.0, timeout_s))
        for wait in pending:
            wait.cancel()
        return [waits[wait] for wait in pending]

    async def close(self, timeout_s: float) -> None:
        """Hand over what is left everywhere, at once, within timeout_s seconds."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        async with self._changing:
            leaving = [task.close(min(LEAVE_S, timeout_s)) for tasks in self._leaving.values() for task in tasks]
            await asyncio.gather(*leaving, *(task.close(timeout_s) for task in self))

    # -- inside

    async def _begin(self, spec: SinkSpec) -> None:
        kind = kind_of(spec.kind, key=f"sinks.{spec.name}.kind")
        if kind.per_run:
            self._context(spec, self._own_run)
            self._specs[spec.name] = spec
            self._tasks[spec.name] = {}
            if self._own_run is not None:
                try:
                    await self._begin_run(spec, self._own_run)
                except ConfigError:
                    del self._specs[spec.name], self._tasks[spec.name]
                    raise
            return
        sink = await asyncio.to_thread(make_sink, spec.kind, spec.options, self._context(spec, None))
        self._start_task(spec, None, sink)

    async def _begin_run(self, spec: SinkSpec, run: str) -> None:
        sink = await asyncio.to_thread(make_sink, spec.kind, spec.options, self._context(spec, run))
        self._start_task(spec, run, sink)

    def _start_task(self, spec: SinkSpec, run: str | None, sink: Sink[Any]) -> None:
        batches = kind_of(spec.kind).follows == "batches"
        source: Any = BatchSource(self._reader) if batches else RowSource(self._reader, run)
        self._specs[spec.name] = spec
        tasks = self._tasks.setdefault(spec.name, {})
        tasks[run] = SinkTask(
            sink, self._reader, self._writer, source, kind=spec.kind, places=self._places, secrets=self._secrets
        )

    async def _begin_runs(self) -> None:
        """One sink for each run that the store knows, of kinds that want it so."""
        specs = [spec for spec in self._specs.values() if self._kind(spec.name).per_run]
        if not specs or self._closed:
            return
        known = await asyncio.to_thread(self._runs_with_rows, specs)
        for spec in specs:
            for run in known:
                if run not in self._tasks[spec.name]:
                    try:
                        await self._begin_run(spec, run)
                    except ConfigError as error:
                        self._start_task(spec, run, _Unusable(self._task_name(spec, run), str(error)))

    def _runs_with_rows(self, specs: Sequence[SinkSpec]) -> list[str]:
        """Runs that want a sink and may not have one yet."""
        names = [run.name for run in self._reader.runs()]
        new = [name for name in names if any(name not in self._tasks[spec.name] for spec in specs)]
        return [name for name in new if self._reader.after(0, 1, run=name)]

    async def _look_for_runs(self) -> None:
        """At most once a second: the first rows of a run may wait that long for its sink."""
        try:
            while self._unseen and not self._closed:
                await asyncio.sleep(max(0.0, self._looked_at + LOOK_FOR_RUNS_S - time.monotonic()))
                self._looked_at = time.monotonic()
                async with self._changing:
                    seen = set(self._unseen)
                    await self._begin_runs()
                    self._unseen -= seen
        finally:
            self._looking = None

    async def _forget(self, spec: SinkSpec, tasks: Mapping[str | None, SinkTask[Any]]) -> None:
        """At once, that it was added and how far it was: one that is there without its cursor would begin anew."""
        cursors = [task.cursor_name for task in tasks.values()]
        if spec.live:
            await asyncio.wrap_future(self._writer.execute(lambda to: _delete(to, spec.name, cursors)))
        for run in tasks:
            await asyncio.to_thread(shutil.rmtree, self._context(spec, run).folder, ignore_errors=True)

    async def _wait_one(self, task: SinkTask[Any]) -> None:
        await task.wait_handed(await asyncio.to_thread(task.source.last_id))

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise ConfigError([Problem("name", name, "comes too late: the service stops", "Try again once it is up.")])

    def _check_new(self, spec: SinkSpec) -> None:
        key = f"sinks.{spec.name[:128]}"
        if not NAME.match(spec.name):
            rule = "must be letters, digits, dot, dash and underscore, at most 128, the first a letter or digit"
            raise ConfigError([Problem("name", spec.name[:200], rule)])
        if spec.name in self._removed:
            rule = "is the name of a sink of a flag, which was removed and keeps its place"
            raise ConfigError([Problem("name", spec.name, rule, "Restore it, or give another name.")])
        if {spec.name} & {*self._specs, *self._leaving, *TAKEN_NAMES} or "--" in spec.name:
            remedy = "Remove it first, or give another name."
            raise ConfigError([Problem("name", spec.name, "is taken by another sink", remedy)])
        kind = kind_of(spec.kind)
        if kind.refused_live:
            raise ConfigError(
                [Problem("kind", spec.kind, f"cannot be added while the service runs: {kind.refused_live}")]
            )
        if sum(other.live for other in self._specs.values()) >= MAX_LIVE_SINKS:
            raise ConfigError([Problem(key, spec.kind, f"is one too many: at most {MAX_LIVE_SINKS} can be added")])
        if len(orjson.dumps(spec.options)) > MAX_OPTIONS_BYTES:
            raise ConfigError([Problem(f"{key}.options", "...", f"must be at most {MAX_OPTIONS_BYTES} bytes of JSON")])

    def _context(self, spec: SinkSpec, run: str | None) -> SinkContext:
        name = self._task_name(spec, run)
        own = run is not None and run == self._own_run
        return SinkContext(
            name=name,
            run_dir=self._run_dir,
            folder=self._run_dir.metrics_store / "sinks" / name,
            log_path=self._run_dir.log("x").with_name(f"sink-{name}.log"),
            drain_budget_s=self._config.run.drain_budget_s,
            reader=self._reader,
            secrets=self._secrets,
            run=run,
            run_config=self._config.model_dump(mode="json") if own or (self._own_run and run is None) else None,
            live=spec.live,
            memory_bytes=self._config.metrics.metrics_sink_memory_bytes,
        )

    def _task_name(self, spec: SinkSpec, run: str | None) -> str:
        """The sink's name; of another run than our own, with that run's. Fit for a file's name."""
        if run is None or run == self._own_run:
            return spec.name
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", run)[:64]
        mark = "" if plain == run else "-" + hashlib.blake2s(run.encode(), digest_size=4).hexdigest()
        return f"{spec.name}--{plain}{mark}"

    def _kind(self, name: str) -> Kind:
        return KINDS[self._specs[name].kind]

    def _shown(self, value: object) -> object:
        """An option without what may be secret in it: of a URL all but scheme, host and port."""
        if isinstance(value, str) and "://" in value:
            value = shown(value)
        return self._secrets.redact_tree(value)

    def _stored(self) -> list[SinkSpec]:
        find = "SELECT name, kind, options FROM sinks ORDER BY rowid"
        found = self._reader.query(find)
        return [
            SinkSpec(name, kind, orjson.loads(options), live=True) for name, kind, options in found if kind in KINDS
        ]


class _Unusable(Sink[Any]):
    """Stands for a sink that could not be made; it says why at every try."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self._reason = name, reason

    async def start(self, durable: Cursor) -> Cursor:
        raise RuntimeError(self._reason)

    async def write(self, rows: Sequence[Any]) -> Cursor:
        raise RuntimeError(self._reason)

    async def finish(self) -> Cursor | None:
        return None

    async def abort(self) -> None:
        pass


def _insert(to: Any, spec: SinkSpec) -> None:
    to.execute(
        "INSERT INTO sinks (name, kind, options) VALUES (?, ?, ?)",
        (spec.name, spec.kind, orjson.dumps(spec.options).decode()),
    )


def _delete(to: Any, name: str, cursors: Sequence[str]) -> None:
    to.execute("DELETE FROM sinks WHERE name = ?", (name,))
    to.executemany("DELETE FROM cursors WHERE sink = ?", [(cursor,) for cursor in cursors])
