"""Hears a run's alerts from the metrics service, in a thread of its own. Never blocks or raises into who uses it.

Without a metrics service it waits and tries again; what began meanwhile and still fires is heard then.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import orjson
import structlog

from furlong import addresses, rpc
from furlong.config import RunConfig
from furlong.rundir import RunDir
from furlong.v1 import metrics_pb2, metrics_pb2_grpc

log = structlog.get_logger()

STREAM_S = 3_600.0
"""A stream is opened anew after this: every call has an end."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
UNWATCHED_KEY = "furlong-unwatched-bin"
"""In the initial metadata: rules that the caller stops for and that the service does not watch, as a JSON list."""


@dataclass(frozen=True)
class HeardAlert:
    """An alert as it came over the wire."""

    alert_id: int
    run: str
    rule: str
    firing: bool
    """False: it is over."""
    severity: str
    axis: str
    step: int
    attempt: int
    summary: str
    remedy: str
    evidence: str
    """JSON object."""
    at_us: int
    halt: bool
    diverged: bool


class AlertWatch:
    """One stream, opened again and again until `close`."""

    def __init__(
        self,
        *,
        run: str,
        attempt: int,
        find_address: Callable[[], str | None],
        on_alert: Callable[[HeardAlert], object],
        halt_on: Sequence[str] = (),
        on_unwatched: Callable[[str, list[str]], object] | None = None,
    ) -> None:
        """attempt: alerts of earlier ones are not heard. on_alert: called in the thread; must be quick.

        halt_on: rules that must be watched. on_unwatched: told, in the thread, the service's address and which of them
        are not; again only when that changes.
        """
        self._run_name, self._attempt, self._halt_on = run, attempt, tuple(halt_on)
        self._find_address, self._on_alert, self._on_unwatched = find_address, on_alert, on_unwatched
        self._unwatched: list[str] = []
        self._after_id = 0
        self._heard: set[int] = set()
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._thread = threading.Thread(target=self._run, name="alert-watch", daemon=True)

    @classmethod
    def for_run(
        cls,
        config: RunConfig,
        run_dir: RunDir,
        *,
        attempt: int,
        on_alert: Callable[[HeardAlert], object],
        on_unwatched: Callable[[str, list[str]], object] | None = None,
    ) -> "AlertWatch":
        """That of a run; the service's address is looked up anew for each stream."""

        return cls(
            run=config.run.name,
            attempt=attempt,
            find_address=lambda: addresses.find_metrics(run_dir, config.metrics.metrics_addr),
            on_alert=on_alert,
            halt_on=config.metrics.halt_on,
            on_unwatched=on_unwatched,
        )

    def start(self) -> "AlertWatch":
        self._thread.start()
        return self

    def close(self, timeout_s: float) -> None:
        """Hear no more."""
        self._closed.set()
        call = self._call
        if call is not None:
            call.cancel()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            address = self._find_address()
            if address is not None:
                self._hear(address)
            self._closed.wait(self._backoff_s * random.uniform(0.5, 1.0))
            self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)

    def _hear(self, address: str) -> None:
        request = metrics_pb2.WatchAlertsRequest(
            run=self._run_name, after_id=self._after_id, attempt=max(0, self._attempt), halt_on=self._halt_on
        )
        with rpc.channel(address) as channel:
            stream = metrics_pb2_grpc.MetricsStub(channel).WatchAlerts(request, timeout=STREAM_S)
            self._call = stream
            if self._closed.is_set():
                stream.cancel()
            try:
                metadata = dict(stream.initial_metadata())
                self._backoff_s = FIRST_BACKOFF_S
                self._take_unwatched(address, metadata.get(UNWATCHED_KEY))
                for alert in stream:
                    self._take(alert)
            except grpc.RpcError as error:
                log.debug("alert_stream_ended", address=address, reason=str(_code(error)))
            finally:
                self._call = None

    def _take_unwatched(self, address: str, said: str | bytes | None) -> None:
        """None: a service that does not tell."""
        try:
            names = [name for name in self._halt_on if name in orjson.loads(said or b"[]")]
            is_new, self._unwatched = names != self._unwatched, names
            if names and is_new and self._on_unwatched is not None:
                self._on_unwatched(address, names)
        except Exception as error:  # who listens must not end the listening
            log.warning("unwatched_rules_not_taken", error=repr(error))

    def _take(self, alert: metrics_pb2.Alert) -> None:
        """Once each: a stream that begins anew may tell again what still fires."""
        if alert.id in self._heard:
            return
        if len(self._heard) > 10_000:
            self._heard.clear()
        self._heard.add(alert.id)
        self._after_id = max(self._after_id, alert.id)
        try:
            self._on_alert(_heard(alert))
        except Exception as error:  # who listens must not end the listening
            log.warning("alert_not_taken", alert=alert.id, error=repr(error))


def _heard(alert: metrics_pb2.Alert) -> HeardAlert:
    return HeardAlert(
        alert_id=alert.id,
        run=alert.run,
        rule=alert.rule,
        firing=alert.state == metrics_pb2.Alert.FIRING,
        severity=alert.severity,
        axis=alert.axis,
        step=alert.step,
        attempt=alert.attempt,
        summary=alert.summary,
        remedy=alert.remedy,
        evidence=alert.evidence,
        at_us=alert.at_us,
        halt=alert.halt,
        diverged=alert.diverged,
    )


def _code(error: grpc.RpcError) -> object:
    return error.code() if isinstance(error, grpc.Call) else error
