"""The gRPC call WatchAlerts: alerts of a run, first those that fire, then each as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

import orjson

from furlong.alertrules import Rule
from furlong.alertwatch import UNWATCHED_KEY
from furlong.v1 import metrics_pb2
from services.metrics.alerts.alert import Alert
from services.metrics.alerts.ledger import Ledger
from services.metrics.alerts.runwatch import fits

MAX_ALERTS = 256
LOOK_AGAIN_S = 1.0


class AlertStreams:
    """All streams of the service. Event loop only."""

    def __init__(self, ledger: Ledger, rules: Iterable[Rule] = ()) -> None:
        """rules: those that are watched."""
        self._ledger, self._rules = ledger, {rule.name: rule for rule in rules}
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """There are new alerts."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def metadata(self, request: metrics_pb2.WatchAlertsRequest) -> tuple[tuple[str, bytes], ...]:
        """What the caller is told at once: rules that it waits for and that are not watched for its run."""
        known = [name for name, rule in self._rules.items() if not request.run or fits(rule, request.run)]
        return ((UNWATCHED_KEY, orjson.dumps(sorted(set(request.halt_on) - set(known)))),)

    async def watch(
        self, request: metrics_pb2.WatchAlertsRequest, stopping: Callable[[], bool]
    ) -> AsyncGenerator[metrics_pb2.Alert]:
        """Until the caller goes away or the service stops. Raises sqlite3.Error."""
        last, firing = await asyncio.to_thread(lambda: (self._ledger.last_id(), self._ledger.firing()))
        position = request.after_id
        if position == 0 or position > last:  # the latter: a store that was made anew
            position = last
            for alert in firing:
                if alert.id <= last and _is_wanted(alert, request):
                    yield alert.to_proto()
        while not stopping():
            changed = self._changed
            alerts = await asyncio.to_thread(self._ledger.after, position, MAX_ALERTS)
            for alert in alerts:
                position = alert.id
                if _is_wanted(alert, request):
                    yield alert.to_proto()
            if not alerts:
                await _wait(changed, LOOK_AGAIN_S)


def _is_wanted(alert: Alert, request: metrics_pb2.WatchAlertsRequest) -> bool:
    return (not request.run or alert.run == request.run) and alert.attempt >= request.attempt


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), limit_s)
    except TimeoutError:
        return
