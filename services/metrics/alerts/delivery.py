"""Hands alerts to one target, such as a webhook: own durable position, own retries. A target never slows another."""

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.metrics.alerts import ledger
from services.metrics.alerts.alert import Alert
from services.metrics.alerts.ledger import Ledger
from services.metrics.writer import StoreFailed, Writer

log = structlog.get_logger()

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 60.0
MAX_ALERTS = 64


class NotWanted(Exception):
    """The target will never take this alert; the next may do better."""


class Target(Protocol):
    """Where alerts go. `send` may raise anything: it is tried again, and NotWanted is not."""

    @property
    def name(self) -> str:
        """Under which its position is kept."""

    @property
    def timeout_s(self) -> float:
        """How long `send` may take."""

    async def send(self, alert: Alert) -> None:
        """Hand over one alert. It may come twice after a kill; its id tells."""


@dataclass
class DeliveryState:
    """How a target is."""

    num_sent: int = 0
    num_refused: int = 0
    last_error: str = ""


class Delivery:
    """Drives one target until it is closed."""

    def __init__(
        self,
        target: Target,
        ledger_: Ledger,
        writer: Writer,
        *,
        run: str = "",
        on_end: Callable[[], object] | None = None,
    ) -> None:
        """run: whose alerts are handed over. Empty: all runs'.

        on_end: called once there is no more to hand over: the delivery ends and its position is forgotten. None: never.
        """
        self.target, self.state = target, DeliveryState()
        self._ledger, self._writer, self._of_run, self._on_end = ledger_, writer, run, on_end
        self._new = asyncio.Event()
        self._backoff_s = FIRST_BACKOFF_S
        self._caught_up = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"alerts-to-{target.name}")

    def notify(self) -> None:
        """There are new alerts. Event loop only."""
        self._caught_up.clear()
        self._new.set()

    async def close(self, timeout_s: float) -> None:
        """Hand over what is left, within timeout_s seconds; what is not stays for the next start."""
        self.notify()
        waiting = asyncio.create_task(self._caught_up.wait())
        await asyncio.wait({waiting, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=2.0)

    async def _run(self) -> None:
        while True:
            try:
                await self._drive()
                return
            except (StoreFailed, sqlite3.Error) as error:
                await self._failed(error)
            except Exception as error:  # the top of a supervised task: whatever a target raises
                await self._failed(error)

    async def _drive(self) -> None:
        position = await asyncio.to_thread(self._ledger.position, self.target.name)
        if position is None:  # a new target is not told what was before it
            position = await asyncio.to_thread(self._ledger.last_id)
            await self._save(position)
        while True:
            self._new.clear()
            alerts = await asyncio.to_thread(self._ledger.after, position, MAX_ALERTS, self._of_run)
            for alert in alerts:
                await self._send(alert)
                position = alert.id
                await self._save(position)
            if alerts or self._new.is_set():
                continue
            self._caught_up.set()
            if self._on_end is not None:
                self._on_end()  # from here on nobody notifies it
                self._writer.put_marks(ledger.no_position_mark(self.target.name))  # if not, the next start does
                return
            await self._new.wait()

    async def _send(self, alert: Alert) -> None:
        try:
            await asyncio.wait_for(self.target.send(alert), self.target.timeout_s)
        except NotWanted as error:
            self.state.num_refused += 1
            log.warning("alert_refused", target=self.target.name, alert=alert.id, error=str(error))
            return
        self.state.num_sent += 1
        if self.state.last_error:
            log.info("alert_target_recovered", target=self.target.name)
        self.state.last_error, self._backoff_s = "", FIRST_BACKOFF_S

    async def _save(self, position: int) -> None:
        await asyncio.wrap_future(self._writer.put_marks(ledger.position_mark(self.target.name, position)))

    async def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"[:500]
        if text != self.state.last_error:  # once a cause
            log.warning("alert_target_failing", target=self.target.name, error=text, retry_s=self._backoff_s)
        self.state.last_error = text
        await asyncio.sleep(self._backoff_s * random.uniform(0.5, 1.0))
        self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)


Send = Callable[[Alert], Awaitable[None]]


@dataclass(frozen=True)
class FunctionTarget:
    """A coroutine function as a target."""

    name: str
    function: Send
    timeout_s: float = 20.0

    async def send(self, alert: Alert) -> None:
        await self.function(alert)
