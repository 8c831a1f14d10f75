"""Alerts to the wandb sinks of their runs. Each run is served at its own pace: one whose wandb is down slows no other.

What waits for a run's sinks stands in the store: its delivery begins with an alert and ends when there is no more.
wandb knows no end of an alert, so only those that fire are sent.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any  # Any: sinks of rows and of batches

from services.metrics.alerts import ledger
from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.delivery import Delivery, FunctionTarget, NotWanted
from services.metrics.alerts.ledger import Ledger
from services.metrics.sinks.task import SinkTask
from services.metrics.writer import Writer

NAME = "wandb"
PREFIX = f"{NAME}/"
"""Before a run's name: what its position is kept under."""
OLD_S = 900.0
"""An alert that a run's wandb did not take for so long is given up there."""
TIMEOUT_S = 20.0

Tasks = Callable[[], Iterable[SinkTask[Any]]]


class WandbDelivery:
    """Used as a Delivery is. Event loop only."""

    def __init__(self, tasks: Tasks, expected: Tasks, ledger_: Ledger, writer: Writer) -> None:
        """tasks: the sinks that there are now, of every kind. expected: also those that may come back."""
        self._tasks, self._expected, self._ledger, self._writer = tasks, expected, ledger_, writer
        self._runs: dict[str, Delivery] = {}
        self._handing_over: Delivery | None = None

    async def start(self) -> None:
        """Go on with what waited when the service ended. Raises sqlite3.Error."""
        for target in await asyncio.to_thread(self._ledger.targets, PREFIX):
            self._begin(target.removeprefix(PREFIX))
        self._handing_over = Delivery(FunctionTarget(NAME, self._hand_over, TIMEOUT_S), self._ledger, self._writer)

    def notify(self) -> None:
        """There are new alerts."""
        if self._handing_over is not None:
            self._handing_over.notify()

    async def close(self, timeout_s: float) -> None:
        """Hand over what is left, within timeout_s seconds; what is not stays for the next start."""
        end_s = time.monotonic() + timeout_s
        if self._handing_over is not None:
            await self._handing_over.close(timeout_s)
        left_s = max(0.0, end_s - time.monotonic())
        await asyncio.gather(*(delivery.close(left_s) for delivery in list(self._runs.values())))

    async def _hand_over(self, alert: Alert) -> None:
        """Note durably that it waits for its run's sinks."""
        if alert.state is not State.FIRING or not any(map(_takes_alerts, self._expected())):
            return
        if (delivery := self._runs.get(alert.run)) is not None:
            delivery.notify()
            return
        mark = ledger.position_mark(f"{PREFIX}{alert.run}", alert.id - 1)
        await asyncio.wrap_future(self._writer.put_marks(mark))
        self._begin(alert.run)

    def _begin(self, run: str) -> None:
        target = _RunTarget(run, self._tasks, self._expected)
        self._runs[run] = Delivery(target, self._ledger, self._writer, run=run, on_end=lambda: self._runs.pop(run))


class _RunTarget:
    """The sinks of one run."""

    def __init__(self, run: str, tasks: Tasks, expected: Tasks) -> None:
        self.name, self.timeout_s = f"{PREFIX}{run}", TIMEOUT_S
        self._run = run
        self._tasks, self._expected = tasks, expected
        self._alert_id = 0
        self._took: set[str] = set()
        """The sinks that took that alert."""

    async def send(self, alert: Alert) -> None:
        """To each sink that has not taken it yet. Raises NotWanted once it is old."""
        if alert.state is not State.FIRING:
            return
        if alert.id != self._alert_id:
            self._alert_id, self._took = alert.id, set()
        tasks = [task for task in self._tasks() if _takes_alerts(task) and _run_of(task) == self._run]
        giving = (self._give(task, alert) for task in tasks if task.sink.name not in self._took)
        errors = [error for error in await asyncio.gather(*giving) if error]
        # one that was removed for a while may come back, and a new run has its own in a moment
        if not tasks and any(map(_takes_alerts, self._expected())):
            errors = [LookupError(f"no wandb sink of run {self._run} is at work")]
        if errors and time.time() - alert.at_us / 1e6 > OLD_S:
            raise NotWanted(f"not taken within {OLD_S:g} s: {errors[0]!r}") from errors[0]
        if errors:
            raise errors[0]

    async def _give(self, task: SinkTask[Any], alert: Alert) -> Exception | None:
        sink: Any = task.sink
        try:
            await sink.alert(alert)
        except Exception as error:  # whatever a sink raises; the others are not to suffer for it
            return error
        self._took.add(sink.name)
        return None


def _run_of(task: SinkTask[Any]) -> str | None:
    return getattr(task.source, "run", None)


def _takes_alerts(task: SinkTask[Any]) -> bool:
    return task.kind == "wandb" and hasattr(task.sink, "alert")
