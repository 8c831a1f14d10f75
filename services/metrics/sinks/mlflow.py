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
from services.metrics.rows import Row
from services.metrics.sinks.mlflow_names import params_of
from services.metrics.sinks.run_process import RunProcessSink
from services.metrics.sinks.shown_config import shown_config
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, option_of

LOOK_S = 5.0
CALL_LIMIT_S = 40.0
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
    """Hands over rows, and how runs end."""

    tick_s = LOOK_S
    _looked_at = 0.0
    _through = -1

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Rows, then endings, if it is time."""
        cursor = await super().write(rows)
        if time.monotonic() - self._looked_at > LOOK_S:
            await self._tell_endings()
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
        if not self._told:
            return
        path = self._context.folder / "looked_through"
        through, found = await asyncio.to_thread(self._endings, path)
        if found:
            await self.call("ended", found, timeout_s=CALL_LIMIT_S)
        if through != self._through:
            await asyncio.to_thread(path.write_text, str(through))
            self._through = through

    def _endings(self, path: Path) -> tuple[int, dict[str, str]]:
        """The last batch that was looked at, and the newest word on each run since."""
        if self._through < 0:
            self._through = _number_in(path)
        reader = self._context.reader
        last = reader.last_batch_id()
        found = reader.query(
            "SELECT r.name, b.body FROM batches b JOIN runs r ON r.id = b.run_id WHERE b.id > ? AND b.id <= ?"
            " AND (instr(b.body, 'run_started') OR instr(b.body, 'run_ended')) ORDER BY b.id",
            (min(self._through, last), last),
        )
        statuses = {run: status for run, body in found for status in map(_status, bytes(body).split(b"\n")) if status}
        return last, {run: status for run, status in statuses.items() if run in self._told}


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


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
