"""A sink whose work is done in a process of its own (process_main.py), so that nothing it does can hurt the service:
it may block, crash, eat memory, print or exit. Owns the process; knows nothing of what it does.

The process lives as long as its stdin: when the service is killed, it finishes what it has and ends. No setting stands
in its arguments; what it prints goes to a log of bounded size.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: what JSON holds

import orjson

from services.metrics.rows import Row
from services.metrics.sinks.drawn import changed
from services.metrics.sinks.sink import Cursor, Refused, Sink, SinkContext

_ANSWER_BYTES = 1024 * 1024
_LOG_BYTES = 16 * 1024 * 1024
_LOOK_AT_LOG_S = 5.0
_TRIES_IN_PLACE = 4
"""An error of `write` is tried again in the same process so often, before the process is given up."""
_END_S = 2.0


class SinkProcessFailed(Exception):
    """The process ended, or said that it failed."""


class ProcessSink(Sink[Row]):
    """Starts the process, hands it rows, ends it."""

    def __init__(
        self,
        child: str,
        settings: Mapping[str, object],
        context: SinkContext,
        *,
        start_timeout_s: float = 60.0,
        write_timeout_s: float = 60.0,
        finish_timeout_s: float = 10.0,
    ) -> None:
        """child: dotted path of the class that does the work. settings: for its `start`; `folder`, `durable_row` and
        `last_row` are added."""
        self.name = context.name
        self.start_timeout_s, self.write_timeout_s = start_timeout_s + 10.0, write_timeout_s
        self.finish_timeout_s = finish_timeout_s + 2.0
        self._child, self._settings, self._context = child, settings, context
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._asked = 0
        self._looked_at_log = 0.0
        self.is_finished = False
        """It was finished in order, and not started since."""

    async def start(self, durable: Cursor) -> Cursor:
        """Start the process and have it get ready."""
        context = self._context
        self.trouble, self.is_finished = "", False
        await asyncio.to_thread(context.folder.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(_bound, context.log_path)
        last_row = await asyncio.to_thread(context.reader.last_row_id)
        places = {"folder": str(context.folder), "durable_row": durable.row_id, "last_row": last_row}
        self._process = await self._spawn()
        limits = {"memory_bytes": context.memory_bytes, "finish_s": self.finish_timeout_s}
        answer = await self._ask(
            {"start": {**self._settings, **places}, "child": self._child, "parent": os.getpid(), **limits}
        )
        return Cursor(int(answer["ready"]))

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Hand rows over. An error is tried again with pauses, then the process is given up."""
        answer = await self._ask_patiently(await asyncio.to_thread(_encode, rows))
        self.trouble = str(answer.get("trouble", ""))
        await self._look_at_log()
        return Cursor(int(answer["safe"]), refused=tuple(Refused(row, why) for row, why in answer.get("refused", ())))

    async def tick(self) -> Cursor | None:
        """Have it make safe what it holds."""
        answer = await self._ask({"flush": True})
        self.trouble = str(answer.get("trouble", ""))
        return Cursor(int(answer["safe"]))

    async def call(self, method: str, given: Mapping[str, object], *, timeout_s: float) -> None:
        """Call one of its other methods, between two writes. Raises SinkProcessFailed, TimeoutError."""
        await asyncio.wait_for(self._ask({"call": method, "given": given}), timeout_s)

    async def finish(self) -> Cursor | None:
        """Have it close, and wait for its end."""
        process = self._process
        if process is None:
            return None
        answer = await self._ask({"finish": True})
        await process.wait()
        self._process, self.is_finished = None, True
        return Cursor(int(answer["finished"]))

    async def abort(self) -> None:
        """End the process; it may finish by itself for a moment, then it is killed with all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its own group: also what it left behind
        await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        environment = {
            key: value
            for key, value in {**os.environ, **self._context.environment}.items()
            if key != "WANDB_SERVICE" and (value or not key.startswith("WANDB_"))  # wandb refuses an empty one
        }
        with self._context.log_path.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.metrics.sinks.process_main",
                self.name,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=environment,
                limit=_ANSWER_BYTES,
                start_new_session=True,  # a Ctrl-C is for the service, which then has it finish
            )

    async def _ask_patiently(self, question: bytes) -> dict[str, Any]:
        pause_s = 0.2
        for _ in range(_TRIES_IN_PLACE - 1):
            try:
                return await self._ask(question)
            except SinkProcessFailed:
                if self._process is None or self._process.returncode is not None:
                    raise
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return await self._ask(question)

    async def _ask(self, question: Mapping[str, object] | bytes) -> dict[str, Any]:
        """One question, its answer. One at a time; answers to questions that nobody waits for any more are skipped."""
        async with self._asking:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise SinkProcessFailed("the process is not running")
            self._asked += 1
            body = question if isinstance(question, bytes) else orjson.dumps(question)
            try:
                process.stdin.write(b"%d %s\n" % (self._asked, body))
                await process.stdin.drain()
                answer = await self._answer(process, process.stdout)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise SinkProcessFailed(self._ended(process)) from error
            if "error" in answer:
                raise SinkProcessFailed(str(answer["error"]))
            return answer

    async def _answer(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader) -> dict[str, Any]:
        while True:
            line = await self._line(process, answers)
            number, _, body = line.partition(b" ")
            try:
                if int(number) == self._asked:
                    answer: dict[str, Any] = orjson.loads(body)
                    return answer
            except ValueError as error:
                raise SinkProcessFailed(f"the process said what is no answer: {line[:80]!r}") from error

    async def _line(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader) -> bytes:
        """The next line; also when the process has left others behind that hold its pipe open."""
        reading = asyncio.ensure_future(answers.readline())
        ending = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=0.2)
            line = reading.result() if reading.done() else b""
        except ValueError as error:
            raise SinkProcessFailed(f"the process answered with more than {_ANSWER_BYTES} bytes") from error
        finally:
            reading.cancel()
            ending.cancel()
        if not line.endswith(b"\n"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
            raise SinkProcessFailed(self._ended(process))
        return line

    def _ended(self, process: asyncio.subprocess.Process) -> str:
        code = process.returncode
        how = (
            "is gone"
            if code is None
            else f"ended with exit code {code}"
            if code >= 0
            else f"was killed by signal {-code}"
        )
        return f"the process {how}; see {self._context.log_path.name}"

    async def _look_at_log(self) -> None:
        now = time.monotonic()
        if now - self._looked_at_log > _LOOK_AT_LOG_S:
            self._looked_at_log = now
            await asyncio.to_thread(_bound, self._context.log_path)


def _encode(rows: Sequence[Row]) -> bytes:
    return b'{"rows":[' + b",".join(map(_row, rows)) + b"]}"


def _row(row: Row) -> bytes:
    """What the process gets of a row: its place, its JSON, and what of that is new."""
    body, prior = orjson.loads(row.body), orjson.loads(row.prior) if row.prior is not None else {}
    new = {part: changed(body, prior, part) for part in ("values", "histograms", "tables")}
    place = {"row": row.row_id, "ts": row.emitted_us / 1e6, "current": row.is_current}
    return orjson.dumps({**place, "body": orjson.Fragment(row.body), **new})


def _bound(path: Path) -> None:
    """Cut a log that became too long. Who writes to it appends, and goes on."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            os.truncate(path, 0)
