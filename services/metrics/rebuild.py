"""Makes again, from the records, what a damaged store lost of its rows: no row is silently incomplete, none is doubled.

A contribution that could be read stands as it is; one that is gone is reduced anew from the batches. A row that is gone
is made again under its own id, so that a sink that has it does not get it twice.
"""

import sqlite3
import time
import zlib
from collections.abc import Iterator

import orjson

from services.metrics.points import fill_points
from services.metrics.reducer import (
    Part,
    RowKey,
    Step,
    dump_contribution,
    merge,
    read_part,
    row_line,
)
from services.metrics.soundness import drop_contradicted, drop_unreadable, load_contributions

DAMAGED_CRC = -1
"""Of a batch whose text is not what was stored: it is kept to be read, and no number is taken from it."""

_Place = tuple[RowKey, str, str]


def rebuild(connection: sqlite3.Connection, *, all_batches: bool) -> int:
    """Within the caller's transaction; how many rows were made again.

    all_batches: none was lost. Else a row that is reduced anew may lack records, and is marked incomplete.
    """
    all_records = not _find_damaged_batches(connection) and all_batches
    drop_unreadable(connection)
    _name_runs(connection)
    _restore_steps(connection)
    drop_contradicted(connection)
    restored = _restore_contributions(connection)
    connection.execute("DELETE FROM contributions WHERE step_id NOT IN (SELECT id FROM steps)")
    connection.execute(
        "DELETE FROM steps WHERE id NOT IN (SELECT step_id FROM contributions)"
        " AND (last_row_id IS NULL OR last_row_id NOT IN (SELECT id FROM rows))"
    )
    num_rows = _restore_rows(connection, doubtful=set() if all_records else restored)
    for table in ("attempts", "points", "series"):  # what they hold is said by steps and rows
        connection.execute(f"DELETE FROM {table}")
    connection.execute(
        "INSERT INTO attempts SELECT run, axis, attempt, min(step) FROM steps GROUP BY run, axis, attempt"
    )
    fill_points(connection)
    connection.execute(
        "UPDATE cursors SET row_id = min(row_id, (SELECT coalesce(max(id), 0) FROM rows))"
        " WHERE sink NOT LIKE '%batches'"
    )
    connection.execute("UPDATE totals SET value = 0 WHERE name = 'records_removed'")
    connection.execute(
        "UPDATE totals SET value = (SELECT coalesce(sum(num_records), 0) FROM batches) WHERE name = 'records_stored'"
    )
    return num_rows


def _find_damaged_batches(connection: sqlite3.Connection) -> bool:
    """Mark them; whether there are any."""
    damaged = [
        (batch_id,)
        for batch_id, crc, body in connection.execute("SELECT id, crc, body FROM batches")
        if not isinstance(body, bytes) or crc != zlib.crc32(body)
    ]
    connection.executemany(f"UPDATE batches SET crc = {DAMAGED_CRC} WHERE id = ?", damaged)
    return bool(damaged)


def _name_runs(connection: sqlite3.Connection) -> None:
    """Runs whose names were lost, by what their rows and records say."""
    for table in ("rows", "batches"):
        moment = "emitted_us" if table == "rows" else "received_us"
        lost = connection.execute(
            f"SELECT run_id, min({moment}), max({moment}), body FROM {table}"
            " WHERE run_id NOT IN (SELECT id FROM runs) GROUP BY run_id"
        ).fetchall()
        for run_id, first_us, last_us, body in lost:
            name = _run_named(body.split(b"\n", 1)[0]) or f"unknown-{run_id}"
            connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?)", (run_id, name, first_us, last_us))


def _run_named(line: bytes) -> str:
    try:
        return str(orjson.loads(line).get("run", ""))
    except (ValueError, AttributeError):
        return ""


def _restore_steps(connection: sqlite3.Connection) -> None:
    """The steps of rows that are there."""
    orphans = connection.execute(
        "SELECT step_id, max(id), emitted_us, body FROM rows"
        " WHERE step_id NOT IN (SELECT id FROM steps) GROUP BY step_id"
    ).fetchall()
    for step_id, row_id, emitted_us, body in orphans:
        row = orjson.loads(body)
        connection.execute(
            "INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?, ?, ?, '[]', ?, ?)",
            (step_id, row["run"], row["axis"], row["step"], row["attempt"], row.get("rollout_id"), emitted_us, row_id),
        )


def _restore_contributions(connection: sqlite3.Connection) -> set[int]:
    """Those that are lost, from the records; the steps that they are of."""
    restored: set[int] = set()
    known = _known_places(connection)
    lost: dict[RowKey, Step] = {}
    for producer, incarnation, part in _parts(connection):
        if (part.key, part.part, producer) not in known:
            merge(lost.setdefault(part.key, Step(part.key)), part, producer=producer, incarnation=incarnation)
    for step in lost.values():
        step_id, expected = _step(connection, step)
        restored.add(step_id)
        for (part_name, producer), contribution in step.contributions.items():
            connection.execute(
                "INSERT OR IGNORE INTO contributions VALUES (?, ?, ?, ?, ?)",
                (step_id, part_name, producer, contribution.incarnation, dump_contribution(contribution)),
            )
        connection.execute(
            "UPDATE steps SET rollout_id = coalesce(rollout_id, ?), expected = ? WHERE id = ?",
            (step.rollout_id, orjson.dumps(sorted(step.expected | expected)), step_id),
        )
    return restored


def _known_places(connection: sqlite3.Connection) -> set[_Place]:
    found = connection.execute(
        "SELECT s.run, s.axis, s.step, s.attempt, c.part, c.producer"
        " FROM contributions c JOIN steps s ON s.id = c.step_id"
    )
    return {(RowKey(run, axis, step, attempt), part, who) for run, axis, step, attempt, part, who in found}


def _parts(connection: sqlite3.Connection) -> Iterator[tuple[str, int, Part]]:
    """All that the metrics records which are left say, in their order."""
    batches = connection.execute(
        "SELECT coalesce(p.producer, 'unknown'), coalesce(p.incarnation, 1), b.body FROM batches b"
        f" LEFT JOIN producers p ON p.id = b.producer_id WHERE b.crc != {DAMAGED_CRC} ORDER BY b.id"
    )
    for producer, incarnation, body in batches:
        if b"metrics" not in body:
            continue
        for line in body.split(b"\n"):
            try:
                record = orjson.loads(line)
                if record.get("event") == "metrics":
                    yield producer, incarnation, read_part(record)
            except (ValueError, TypeError, ArithmeticError, AttributeError):  # it was in no row before either
                continue


def _step(connection: sqlite3.Connection, step: Step) -> tuple[int, set[str]]:
    """Its id, and the parts that were expected already."""
    key = step.key
    place = (key.run, key.axis, key.step, key.attempt)
    opened_us = 0 if step.is_complete else time.time_ns() // 1000  # one that is complete waits for nothing
    connection.execute(
        "INSERT OR IGNORE INTO steps (run, axis, step, attempt, expected, opened_us) VALUES (?, ?, ?, ?, '[]', ?)",
        (*place, opened_us),
    )
    find = "SELECT id, expected FROM steps WHERE run = ? AND axis = ? AND step = ? AND attempt = ?"
    step_id, expected = connection.execute(find, place).fetchone()
    return int(step_id), set(orjson.loads(expected))


def _restore_rows(connection: sqlite3.Connection, *, doubtful: set[int]) -> int:
    lost = connection.execute(
        "SELECT id, run, axis, step, attempt, rollout_id, expected, opened_us, last_row_id FROM steps"
        " WHERE last_row_id IS NOT NULL AND last_row_id NOT IN (SELECT id FROM rows)"
    ).fetchall()
    for step_id, run, axis, number, attempt, rollout_id, expected, opened_us, row_id in lost:
        step = Step(RowKey(run, axis, number, attempt), set(orjson.loads(expected)), rollout_id)
        load_contributions(connection, step, step_id)
        line, _ = row_line(step, complete=step.is_complete and step_id not in doubtful, amends=False)
        connection.execute(
            "INSERT OR IGNORE INTO runs (name, first_us, last_us) VALUES (?, ?, ?)", (run, opened_us, opened_us)
        )
        connection.execute(
            "INSERT INTO rows SELECT ?, ?, id, NULL, ?, ? FROM runs WHERE name = ?",
            (row_id, step_id, opened_us, line, run),
        )
    return len(lost)
