"""Ships a process's records to the metrics service: `Telemetry`. Recording never blocks and never raises.

A record goes on a bounded queue; a thread (shipper.py) sends it, and keeps it on disk while the service is away. With
the service down, stopped or full, after `close` and in a forked child, the caller notices nothing; `stats` tells what
was dropped.
"""

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import orjson

from furlong import addresses, records
from furlong.clock import now_iso
from furlong.config import RunConfig
from furlong.jsonline import NO_SECRETS, Secrets, to_line
from furlong.recordqueue import Priority, RecordQueue
from furlong.rundir import RunDir
from furlong.shipper import HEARTBEAT_S, FlushRequest, Shipper
from furlong.spool import Spool, left_over

MAX_RECORD_BYTES = 4 * 1024 * 1024 - 1024
"""The metrics service refuses larger records; metrics are split before that."""
_QUEUE_BYTES = 32 * 1024 * 1024
_WARNING = 30


@dataclass(frozen=True)
class Stats:
    """What became of the records of this process so far."""

    num_taken: int
    """Signs of life, which this process adds on its own, are records too."""
    num_acknowledged: int
    """On disk in the metrics service; left-over records of an earlier start count too."""
    num_refused: int
    num_dropped_logs: int
    """Debug and info lines for which there was no room."""
    num_dropped_warnings: int
    num_dropped_metrics: int
    num_waiting: int
    spooled_bytes: int
    connected: bool
    last_error: str

    @property
    def num_dropped(self) -> int:
        return self.num_dropped_logs + self.num_dropped_warnings + self.num_dropped_metrics


class Telemetry:
    """The records of one process on their way. Any thread; `for_run` makes it."""

    def __init__(
        self,
        *,
        run: str,
        service: str,
        instance: str,
        find_address: Callable[[], str | None],
        spool_folder: Path,
        queue_records: int = 10_000,
        spool_bytes: int = 64 * 1024 * 1024,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.attempt = 1
        """Counted up by the trainer at each start from a checkpoint; stands in each metrics record."""
        self._identity: Mapping[str, object] = {"run": run, "service": service, "instance": instance}
        self._secrets = Secrets.from_environment()
        self._producer, self._instance = f"{run}/{instance}", instance
        self._find_address: Callable[[], str | None] | None = find_address
        self._spool_folder, self._spool_bytes = spool_folder, spool_bytes
        self._queue = RecordQueue(max_records=queue_records, max_bytes=_QUEUE_BYTES)
        self._wake_at = queue_records // 2 + 1
        self._heartbeat_s = heartbeat_s
        self._closed = False
        self._warned: set[str] = set()
        self._started = False
        self._shipper = self._new_shipper()
        _all.add(self)
        atexit.register(self.close, 2.0)

    @classmethod
    def for_run(cls, config: RunConfig, run_dir: RunDir, *, service: str, instance: str) -> "Telemetry":
        """The telemetry of one process of a run. The service's address is looked up anew for each connection."""

        return cls(
            run=config.run.name,
            service=service,
            instance=instance,
            find_address=lambda: addresses.find_metrics(run_dir, config.metrics.metrics_addr),
            spool_folder=run_dir.spool,
            queue_records=config.metrics.telemetry_queue_size,
            spool_bytes=config.metrics.telemetry_spool_bytes,
        )

    @property
    def stats(self) -> Stats:
        """Counts as of now."""
        shipper, spool = self._shipper, self._spool
        dropped = [a + b for a, b in zip(self._queue.num_dropped, spool.num_dropped, strict=True)]
        return Stats(
            num_taken=self._queue.num_put,
            num_acknowledged=shipper.num_acknowledged,
            num_refused=shipper.num_refused,
            num_dropped_logs=dropped[Priority.LOG],
            num_dropped_warnings=dropped[Priority.WARNING],
            num_dropped_metrics=dropped[Priority.METRICS],
            num_waiting=len(self._queue),
            spooled_bytes=shipper.spooled_bytes,
            connected=shipper.connected,
            last_error=shipper.last_error,
        )

    def identify(self, identity: Mapping[str, object], secrets: Secrets = NO_SECRETS) -> None:
        """What every record of this process carries, and what none may carry."""
        self._identity, self._secrets = dict(identity), secrets

    def ship(self, line: bytes, level: int) -> None:
        """Send a log line that is encoded already. level: as in the standard library, 30 is a warning."""
        if len(line) > MAX_RECORD_BYTES:
            self._warn("record_too_large", f"{len(line)} bytes, at most {MAX_RECORD_BYTES}")
            return
        self._put(line, Priority.WARNING if level >= _WARNING else Priority.LOG)

    def record(self, obj: Mapping[str, object]) -> None:
        """Send one record, an object of your own; `ts`, the run, service and instance are added."""
        try:
            self._send({"ts": now_iso(), **self._identity, **obj})
        except Exception as error:  # `obj` is not a mapping, or a value's own code
            self._warn("record_not_sent", repr(error))

    def metrics(
        self,
        axis: str,
        step: int,
        values: Mapping[str, records.Value],
        *,
        part: str,
        parts: Sequence[str],
        rollout_id: int | None = None,
    ) -> None:
        """Send this process's part of the row (axis, step).

        part: our name among `parts`, all that the row waits for. A value that is no number is left out with a warning.
        """
        try:
            if axis not in records.AXES:
                raise ValueError(f"axis must be one of {', '.join(records.AXES)}, got {axis!r}")
            head: dict[str, object] = {
                "ts": now_iso(),
                "level": "info",
                "event": "metrics",
                **self._identity,
                "axis": axis,
                "step": int(step),
                "attempt": int(self.attempt),
                "part": part,
                "parts": list(parts),
            }
            if rollout_id is not None:
                head["rollout_id"] = int(rollout_id)
            self._send_values(head, records.encode_all(values, refuse=self._refuse))
        except Exception as error:  # whatever was given: training goes on without the row
            self._warn("metrics_not_sent", repr(error))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was recorded so far is acknowledged; whether it was, within timeout_s seconds."""
        request = self._request_flush()
        return request.done.wait(max(0.0, timeout_s)) if request is not None else False

    def close(self, timeout_s: float) -> bool:
        """Send what is left, at most timeout_s seconds; the rest stays in the spool. Whether all was acknowledged.

        The service is told that this process ends, if it recorded anything. A service that is away is not waited for.
        Records after this are dropped.
        """
        if self._closed:
            return False
        if self._started and self._find_address is not None:
            self._beat(closing=True)
        request = self._request_flush()
        self._closed = True
        shipper = self._shipper
        shipper.request_close(max(0.0, timeout_s))
        if shipper.is_alive():
            shipper.join(timeout_s + 1.0)
        atexit.unregister(self.close)
        return request is not None and request.done.is_set()

    def switch_off(self) -> None:
        """Drop all records, where nobody will ever take them: they would only fill the spool. Before the first one."""
        self._closed = True
        atexit.unregister(self.close)

    # -- inside

    def _new_shipper(self) -> Shipper:
        self._spool = Spool(
            self._spool_folder,
            self._instance,
            producer=self._producer,
            incarnation=time.time_ns() // 1000,
            max_bytes=self._spool_bytes,
        )
        return Shipper(
            self._queue,
            self._spool,
            find_address=self._find_address,
            take_left_over=lambda: left_over(self._spool_folder, instance=self._instance),
            report_drops=self._report_drops,
            beat=self._beat,
            heartbeat_s=self._heartbeat_s,
        )

    def _start(self) -> None:
        """Start the thread with the first record: who records nothing, as a child that only execs, has none."""
        self._started = True
        try:
            self._shipper.start()
        except RuntimeError:  # another thread was first, or the interpreter is closing
            pass

    def _put(self, line: bytes, priority: Priority) -> None:
        if self._closed:
            return
        waiting = self._queue.put(line, priority)
        if not self._started:
            self._start()
        if self._shipper.idle or waiting == self._wake_at:
            self._shipper.wake.set()

    def _send(self, fields: Mapping[str, object]) -> bool:
        line = to_line(fields, secrets=self._secrets, max_bytes=1 << 40)
        if len(line) > MAX_RECORD_BYTES:
            self._warn("record_too_large", f"{len(line)} bytes, at most {MAX_RECORD_BYTES}")
            return False
        self._put(line, Priority.METRICS)
        return True

    def _refuse(self, name: str, error: Exception) -> None:
        self._warn(f"value_not_sent {name}", f"{type(error).__name__}: {error}")

    def _send_values(self, head: dict[str, object], values: dict[str, records.Encoded]) -> None:
        """As one record, or as several of the same part when one would be too large."""
        try:
            line = orjson.dumps({**head, "values": values})
        except TypeError:  # a part, or a name, that JSON cannot hold as it is
            clean = orjson.loads(to_line(head, secrets=self._secrets))
            clean["parts"] = [str(part) for part in clean["parts"]]
            values = {records.name_of(name): value for name, value in values.items()}
            line = orjson.dumps({**clean, "values": values})
        if len(line) > MAX_RECORD_BYTES:
            self._send_halves(head, values, len(line))
            return
        if self._secrets.needles and self._secrets.in_line(line):
            line = orjson.dumps(self._secrets.redact_tree(orjson.loads(line)))
        self._put(line, Priority.METRICS)

    def _send_halves(self, head: dict[str, object], values: dict[str, records.Encoded], size_bytes: int) -> None:
        names = list(values)
        if len(names) <= 1:
            name = names[0][:100] if names else "the part's own names"
            self._warn(f"value_not_sent {name}", f"{size_bytes} bytes, a record has at most {MAX_RECORD_BYTES}")
            return
        middle = len(names) // 2
        self._send_values(head, {name: values[name] for name in names[:middle]})
        self._send_values(head, {name: values[name] for name in names[middle:]})

    def _report_drops(self, dropped: list[int]) -> None:
        fields = {
            "ts": now_iso(),
            "level": "warning",
            "event": "telemetry_dropped",
            **self._identity,
            "num_logs": dropped[Priority.LOG],
            "num_warnings": dropped[Priority.WARNING],
            "num_metrics": dropped[Priority.METRICS],
        }
        self._put(to_line(fields, secrets=self._secrets), Priority.WARNING)

    def _beat(self, *, closing: bool = False) -> None:
        """A sign of life, or of an end that is meant: who falls silent without one is gone."""
        stats = self.stats
        fields: dict[str, object] = {
            "ts": now_iso(),
            "level": "debug",
            "event": "heartbeat",
            **self._identity,
            "every_s": self._heartbeat_s,
            "num_dropped": {
                "logs": stats.num_dropped_logs,
                "warnings": stats.num_dropped_warnings,
                "metrics": stats.num_dropped_metrics,
            },
            "queue": stats.num_waiting,
            "spooled_bytes": stats.spooled_bytes,
        }
        if closing:
            fields["closing"] = True
        priority = Priority.WARNING if closing else Priority.LOG  # an end that nobody hears of would look like a death
        self._put(to_line(fields, secrets=self._secrets), priority)

    def _warn(self, event: str, reason: str) -> None:
        """Once an event: what cannot be sent is said, and not said at every step."""
        if event in self._warned or len(self._warned) > 100:
            return
        self._warned.add(event)
        import structlog  # here: logs imports this module

        structlog.get_logger().warning("telemetry_cannot_send", what=event, reason=reason)

    def _request_flush(self) -> FlushRequest | None:
        if self._closed:
            return None
        if not self._started:
            self._start()
        request = FlushRequest(self._queue.num_put)
        self._shipper.flushes.append(request)
        self._shipper.wake.set()
        return request

    def _in_forked_child(self) -> None:
        """A producer of its own, without gRPC: its records go to the spool and are collected when it has ended."""
        if self._closed:
            return
        self._find_address = None
        self._started = False
        self._shipper = self._new_shipper()


_all: WeakSet[Telemetry] = WeakSet()


def _in_forked_child() -> None:
    for telemetry in list(_all):
        telemetry._in_forked_child()


os.register_at_fork(after_in_child=_in_forked_child)
