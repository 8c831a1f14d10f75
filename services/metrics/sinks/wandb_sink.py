"""The rows in Weights & Biases, through a process of its own (wandb_process.py). Imports no wandb.

Every point carries its own axis (`train/step`, `rollout/step`, `eval/step`); wandb's step counter is not used. The
run's id is kept in the run directory. wandb writes its file late, so the durable cursor follows a while behind what was
handed over: a process that is killed costs no point, and may repeat the newest ones.
"""

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from services.metrics.rows import Row
from services.metrics.sinks.flags import wandb_mode as choose_mode
from services.metrics.sinks.sink import Cursor, Sink, SinkContext, option_of

SAFE_AFTER_S = 30.0  # measured: wandb writes a point to its file within 18 s
_LINE_LIMIT = 16 * 1024 * 1024


@dataclass(frozen=True)
class WandbRun:
    """What the run in wandb is called and where it goes. No secrets: the key is in the environment."""

    folder: Path
    project: str
    group: str
    team: str
    name: str
    dir: str
    mode: str
    init_timeout_s: float
    finish_timeout_s: float
    config: Mapping[str, object]


class SinkProcessFailed(Exception):
    """The process that talks to wandb failed, or said that wandb did."""


def make(options: Mapping[str, object], context: SinkContext) -> "WandbSink":
    """Options: project, group, team, run_name, dir, mode, init_timeout_s."""
    run = WandbRun(
        folder=context.run_dir.metrics_store,
        project=option_of(options, context, "project", str, "furlong"),
        group=option_of(options, context, "group", str, ""),
        team=option_of(options, context, "team", str, ""),
        name=option_of(options, context, "run_name", str, "") or context.run or "",
        dir=option_of(options, context, "dir", str, "") or str(context.run_dir.root),
        mode=option_of(options, context, "mode", str, choose_mode(None, os.environ)),
        init_timeout_s=option_of(options, context, "init_timeout_s", float, 30.0),
        finish_timeout_s=max(2.0, context.drain_budget_s / 2),
        config=context.run_config or {},
    )
    return WandbSink(run, log_path=context.log_path)


class WandbSink(Sink[Row]):
    """Owns the process and what was handed to it."""

    name = "wandb"

    def __init__(self, run: WandbRun, *, log_path: Path) -> None:
        self._run, self._log_path = run, log_path
        self.start_timeout_s = run.init_timeout_s + 15.0  # an earlier process may still be finishing
        self.write_timeout_s = 60.0
        self.finish_timeout_s = run.finish_timeout_s + 5.0
        self._process: asyncio.subprocess.Process | None = None
        self._handed: deque[tuple[float, int]] = deque()  # when, up to which row
        self._safe = 0

    async def start(self, durable: Cursor) -> Cursor:
        """Start the process and have it start the run."""
        self._process = await self._spawn()
        settings = {**vars(self._run), "folder": str(self._run.folder)}
        answer = await self._ask(settings)
        if "ready" not in answer:
            raise SinkProcessFailed(str(answer.get("error", answer)))
        self._safe = max(durable.row_id, self._finished_earlier())
        self._handed.clear()
        return Cursor(self._safe)

    async def write(self, rows: Sequence[Row]) -> Cursor:
        """Hand rows over; the cursor is that of rows that wandb must have written by now."""
        points = _points(rows)
        answer = await self._ask({"through": rows[-1].row_id, "points": points})
        if "error" in answer:
            await self._retry_in_place(rows, points, str(answer["error"]))
        now = time.monotonic()
        self._handed.append((now, rows[-1].row_id))
        while self._handed and now - self._handed[0][0] > SAFE_AFTER_S:
            self._safe = self._handed.popleft()[1]
        return Cursor(self._safe)

    async def finish(self) -> Cursor | None:
        """Have the process finish the run."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        process.stdin.close()
        answer = orjson.loads(await process.stdout.readline() or b"{}")
        await process.wait()
        self._process = None
        if "finished" not in answer:
            raise SinkProcessFailed("the process ended before it finished the run")
        return Cursor(self._finished_earlier())

    async def abort(self) -> None:
        """End the process; a run that it can still finish, it finishes when its stdin ends, else it is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 2.0)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _retry_in_place(self, rows: Sequence[Row], points: Sequence[Mapping[str, object]], error: str) -> None:
        """wandb's log() raised: the same points again, with pauses, before the process is given up.

        What the process took of them it does not take twice.
        """
        pause_s = 0.2
        for _ in range(4):
            await asyncio.sleep(pause_s)
            pause_s *= 2
            answer = await self._ask({"through": rows[-1].row_id, "points": points})
            if "error" not in answer:
                return
            error = str(answer["error"])
        raise SinkProcessFailed(error)

    async def _spawn(self) -> asyncio.subprocess.Process:
        environment = {
            key: value
            for key, value in os.environ.items()
            if key != "WANDB_SERVICE" and (value or not key.startswith("WANDB_"))  # wandb refuses an empty one
        }
        with self._log_path.open("ab") as stderr:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.metrics.sinks.wandb_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=environment,
                limit=_LINE_LIMIT,
                start_new_session=True,  # a Ctrl-C is for the service, which then has it finish
            )

    async def _ask(self, question: Mapping[str, object]) -> dict[str, object]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise SinkProcessFailed("the process is not running")
        try:
            process.stdin.write(orjson.dumps(question) + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise SinkProcessFailed(f"the process is gone; see {self._log_path.name}") from error
        if not line:
            raise SinkProcessFailed(f"the process ended with {await process.wait()}; see {self._log_path.name}")
        answer: dict[str, object] = orjson.loads(line)
        return answer

    def _finished_earlier(self) -> int:
        """The last row of a run that was finished, perhaps after the service was killed."""
        try:
            return int((self._run.folder / "wandb_finished").read_text())
        except (OSError, ValueError):
            return 0


def _points(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [{"row": row.row_id, "values": values} for row in rows if (values := point_of(row))]


def point_of(row: Row) -> dict[str, object]:
    """What wandb gets of a row: its values beside its axis; of an amended row only what changed. Empty: nothing.

    A row that a newer attempt has replaced is not drawn.
    """
    if not row.is_current:
        return {}
    body = orjson.loads(row.body)
    values = body["values"]
    if row.prior is not None:
        before = orjson.loads(row.prior)["values"]
        values = {name: value for name, value in values.items() if before.get(name) != value}
    if not values:
        return {}
    prefix = body["axis"].split("/")[0]
    beside = {body["axis"]: body["step"], f"{prefix}/attempt": body["attempt"]}
    if "rollout_id" in body and body["axis"] == "train/step":
        beside["train/rollout_id"] = body["rollout_id"]
    return {**values, **beside}
