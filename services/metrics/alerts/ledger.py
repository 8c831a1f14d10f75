"""Alerts in the store: written together with how far the rows were judged, so that a kill repeats and skips none.

Everything here blocks for as long as a short SQLite call takes.
"""

import dataclasses
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import orjson
import structlog

from services.metrics.alerts.alert import Alert, State
from services.metrics.alerts.rowwatch import RowFacts
from services.metrics.alerts.runwatch import facts_of
from services.metrics.rows import RowReader

log = structlog.get_logger()

CURSOR = "alerts"
"""Among the sinks' cursors: retention keeps what is not judged yet."""
SERVICES_MARK = "alerts/services"
WARM_UP_ROWS = 4_000


class Ledger:
    """Reads."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader

    def cursor(self) -> int:
        """The last row that was judged. Never beyond the rows that there are: a damaged store may have lost some."""
        return min(self._reader.cursor(CURSOR)[0], self._reader.last_row_id())

    def services(self) -> dict[str, Any]:  # Any: JSON
        """What was known of the runs' services."""
        tree = _loaded(self._reader.mark(SERVICES_MARK))
        return tree if isinstance(tree, dict) else {}

    def last_id(self) -> int:
        """The newest alert."""
        return int(self._reader.query("SELECT coalesce(max(id), 0) FROM alerts")[0][0])

    def after(self, alert_id: int, limit: int, run: str = "") -> list[Alert]:
        """The next alerts, of one run or of all."""
        of_run = "AND r.name = ?" if run else ""
        return self._alerts(
            f"WHERE a.id > ? {of_run} ORDER BY a.id LIMIT ?", (alert_id, *([run] if run else []), limit)
        )

    def firing(self) -> list[Alert]:
        """The alerts whose last word is that they fire."""
        newest = "SELECT max(id) FROM alerts GROUP BY run_id, rule"
        return self._alerts(f"WHERE a.id IN ({newest}) AND a.state = ? ORDER BY a.id", (str(State.FIRING),))

    def rows_before(self, run: str, through_row_id: int) -> list[RowFacts]:
        """The last rows of a run up to one, oldest first: what a rule's windows are built from."""
        found = self._reader.query(
            "SELECT body, emitted_us FROM rows WHERE run_id = (SELECT id FROM runs WHERE name = ?) AND id <= ?"
            " ORDER BY id DESC LIMIT ?",
            (run, through_row_id, WARM_UP_ROWS),
        )
        facts = [row_facts(run, body, emitted_us) for body, emitted_us in reversed(found)]
        return [row for row in facts if row is not None]

    def position(self, target: str) -> int | None:
        """The last alert that a target was given; None: it is new."""
        position = _loaded(self._reader.mark(_target_mark(target)))
        return min(position, self.last_id()) if isinstance(position, int) else None

    def targets(self, prefix: str) -> list[str]:
        """Those that have a position, by the beginning of their name."""
        start = _target_mark(prefix)
        found = self._reader.query("SELECT name FROM marks WHERE substr(name, 1, ?) = ?", (len(start), start))
        return [name.removeprefix(_target_mark("")) for (name,) in found]

    def _alerts(self, condition: str, values: Sequence[object]) -> list[Alert]:
        found = self._reader.query(
            f"SELECT a.id, a.body FROM alerts a JOIN runs r ON r.id = a.run_id {condition}", values
        )
        alerts = []
        for alert_id, body in found:
            try:
                alerts.append(Alert.from_json(orjson.loads(body), id=alert_id))
            except (ValueError, KeyError, TypeError) as error:  # a damaged line
                log.warning("alert_not_readable", alert=alert_id, error=repr(error))
        return alerts


def row_facts(run: str, body: bytes, emitted_us: int) -> RowFacts | None:
    """A stored row as rules see it; None when it is damaged."""
    try:
        return facts_of(run, orjson.loads(body), emitted_us)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("row_not_judged", run=run, error=repr(error))
        return None


def write(connection: sqlite3.Connection, alerts: Sequence[Alert], cursor: int, services: bytes | None) -> list[Alert]:
    """Store alerts and how far the rows are judged, within the writer's transaction; the alerts with their ids.

    services: None leaves what is there.
    """
    stored = []
    for alert in alerts:
        tree = alert.to_json()
        del tree["id"]
        insert = "INSERT INTO alerts (run_id, rule, state, at_us, body) VALUES (?, ?, ?, ?, ?)"
        run_id, body = _run_id(connection, alert.run), orjson.dumps(tree).decode()
        done = connection.execute(insert, (run_id, alert.rule, str(alert.state), alert.at_us, body))
        stored.append(dataclasses.replace(alert, id=done.lastrowid or 0))
    connection.execute("INSERT OR REPLACE INTO cursors (sink, row_id, position) VALUES (?, ?, 0)", (CURSOR, cursor))
    if services is not None:
        connection.execute("INSERT OR REPLACE INTO marks (name, body) VALUES (?, ?)", (SERVICES_MARK, services))
    return stored


def position_mark(target: str, alert_id: int) -> dict[str, bytes | None]:
    """How far a target is, to be put among the marks."""
    return {_target_mark(target): orjson.dumps(alert_id)}


def no_position_mark(target: str) -> dict[str, bytes | None]:
    """The same for one that is done."""
    return {_target_mark(target): None}


def _target_mark(target: str) -> str:
    return f"alerts/target/{target}"


def _run_id(connection: sqlite3.Connection, name: str) -> int:
    now_us = time.time_ns() // 1000
    insert = "INSERT OR IGNORE INTO runs (name, first_us, last_us) VALUES (?, ?, ?)"
    connection.execute(insert, (name, now_us, now_us))
    return int(connection.execute("SELECT id FROM runs WHERE name = ?", (name,)).fetchone()[0])


def _loaded(body: bytes | None) -> object:
    try:
        return None if body is None else orjson.loads(body)
    except ValueError:
        return None
