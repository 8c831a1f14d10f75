"""The rows at an MLflow server, through a process of its own (mlflow_process.py). Imports no mlflow.

Also tells how a run ended, from what its trainer said: finished, failed, or killed when it was asked to stop. A run of
which nobody said so stays running, as far as anybody knows.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from furlong.config.destinations import url_problem
from furlong.process import ExitCode
from furlong.rundir import write_atomically
from services.metrics.rows import Row
from services.metrics.sinks.mlflow_names import params_of
from services.metrics.sinks.process import SinkProcessFailed
from services.metrics.sinks.run_process import RunProcessSink
from services.metrics.sinks.shown_config import shown_config
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, TakenInPart, option_of

LOOK_S = 5.0
CALL_LIMIT_S = 40.0
MAX_TOLD_AT_ONCE = 10
_CHILD = "services.metrics.sinks.mlflow_process.Mlflow"


def make(options: Mapping[str, object], context: SinkContext) -> Sink[Row]:
    """Options: uri, experiment."""
    uri = option_of(options, context, "uri", str)
    if uri.startswith(("http://", "https://")):
        if problem := url_problem(uri):
            raise context.refuse("uri", "[not shown]", problem)
        if urlsplit(uri).password or urlsplit(uri).username:
            remedy = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            raise context.refuse("uri", "[not shown]", "must name no user and no password", remedy)
    elif context.live:
        raise context.refuse("uri", "[not shown]", "must be a URL such as http://host:5000", "A flag may name any.")
    config = shown_config(context)
    run = config.get("run")
    settings = {
        "uri": uri,
        "experiment": option_of(options, context, "experiment", str, "furlong"),
        "params": params_of(config),
        "own_run": run.get("name", "") if isinstance(run, dict) else "",
    }
    return MlflowSink(_CHILD, settings, context, start_timeout_s=60.0, write_timeout_s=180.0)


class MlflowSink(RunProcessSink):
    """Hands over rows, and how runs end: each run's word once it has a row there, until it was taken."""

    tick_s = LOOK_S
    _looked_at = 0.0
    _reached = 0
    """The last row that is there."""
    _through = 0
    """The last batch that was looked at."""

    async def start(self, durable: Cursor) -> Cursor:
        """Also finds the words that were not told yet."""
        self._path = self._context.folder / "endings.json"
        self._through, self._waiting = await asyncio.to_thread(_read, self._path)
        cursor = await super().start(durable)
        self._reached = cursor.row_id
        return cursor

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Rows, then endings, if it is time."""
        cursor = await super().write(rows)
        self._reached = cursor.row_id
        if time.monotonic() - self._looked_at > LOOK_S:
            try:
                await self._tell_endings()
            except (SinkProcessFailed, TimeoutError) as error:
                raise TakenInPart(cursor) from error
        return cursor

    async def tick(self) -> Cursor | None:
        """Endings."""
        await self._tell_endings()
        return None

    async def finish(self) -> Cursor | None:
        """The last ones too."""
        await self._tell_endings()
        return await super().finish()

    async def _tell_endings(self) -> None:
        self._looked_at = time.monotonic()
        before = self._through
        due = await asyncio.to_thread(self._look)
        for at in range(0, len(due), MAX_TOLD_AT_ONCE):
            piece = {run: self._waiting[run] for run in due[at : at + MAX_TOLD_AT_ONCE]}
            await self._identify(piece.keys())
            await self.call("ended", piece, timeout_s=CALL_LIMIT_S)
            for run in piece:
                del self._waiting[run]
            await asyncio.to_thread(self._save)
        if self._through != before:
            await asyncio.to_thread(self._save)

    def _look(self) -> list[str]:
        """Gather the newest word on each run; those that have a row there and were not told theirs."""
        reader = self._context.reader
        last = reader.last_batch_id()
        found = reader.query(
            "SELECT r.name, b.body FROM batches b JOIN runs r ON r.id = b.run_id WHERE b.id > ? AND b.id <= ?"
            " AND (instr(b.body, 'run_started') OR instr(b.body, 'run_ended')) ORDER BY b.id",
            (min(self._through, last), last),
        )
        self._waiting |= {
            run: status for run, body in found for status in map(_status, bytes(body).split(b"\n")) if status
        }
        self._through = last
        if not self._waiting:
            return []
        there = "SELECT 1 FROM rows w WHERE w.run_id = r.id AND w.id <= ?"
        known = reader.query(f"SELECT r.name FROM runs r WHERE EXISTS ({there})", (self._reached,))
        return [run for (run,) in known if run in self._waiting]

    def _save(self) -> None:
        write_atomically(self._path, orjson.dumps({"through": self._through, "waiting": self._waiting}))


def _status(body: bytes) -> str:
    """In MLflow's words. Empty: the record says nothing of it."""
    if b"run_" not in body:
        return ""
    record = orjson.loads(body)
    event, code = record.get("event"), record.get("exit_code")
    if event == "run_started":
        return "RUNNING"
    if event != "run_ended":
        return ""
    if code == ExitCode.DONE:
        return "FINISHED"
    return "KILLED" if code in (ExitCode.DRAINED, ExitCode.KILLED) else "FAILED"


def _read(path: Path) -> tuple[int, dict[str, str]]:
    """Nothing, when there is no such file: all is then looked at again, and told as it was."""
    try:
        kept = orjson.loads(path.read_bytes())
        return int(kept["through"]), dict(kept["waiting"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, {}
