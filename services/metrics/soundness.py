"""Whether what a store holds of a row can be right: it is JSON of ours, and a row is what its parts come to.

SQLite notices a page that is broken, not a byte that is another one.
"""

import math
import sqlite3

import orjson

from services.metrics.reducer import RowKey, Step, load_contribution, row_line


def drop_unreadable(connection: sqlite3.Connection) -> None:
    """What can be read as a table's, but is no JSON of ours: it is made again."""
    for table, key, is_well in (
        ("batches", "id", lambda body: isinstance(body, bytes)),
        ("rows", "id", is_row),
        ("contributions", "step_id, part, producer", is_contribution),
    ):
        where = " AND ".join(f"{name} = ?" for name in key.split(", "))
        found = connection.execute(f"SELECT {key}, body FROM {table}")  # the names are ours
        bad = [keys for *keys, body in found if not is_well(body)]
        connection.executemany(f"DELETE FROM {table} WHERE {where}", bad)
    steps = connection.execute("SELECT id, expected FROM steps")
    bad = [(step_id,) for step_id, expected in steps if not is_names(expected)]
    connection.executemany("UPDATE steps SET expected = '[]' WHERE id = ?", bad)


def drop_contradicted(connection: sqlite3.Connection) -> None:
    """Rows and contributions that do not say the same: one of them is wrong, and the records say what is right."""
    steps = connection.execute("SELECT id FROM steps WHERE last_row_id IN (SELECT id FROM rows)").fetchall()
    bad = [(step_id,) for (step_id,) in steps if not agrees(connection, step_id)]
    connection.executemany("DELETE FROM rows WHERE id = (SELECT last_row_id FROM steps WHERE id = ?)", bad)
    connection.executemany("DELETE FROM contributions WHERE step_id = ?", bad)


def agrees(connection: sqlite3.Connection, step_id: int) -> bool:
    """Whether the newest row of a step is what its contributions come to. Without contributions it stands alone."""
    find = (
        "SELECT s.run, s.axis, s.step, s.attempt, s.rollout_id, r.body FROM steps s JOIN rows r ON r.id = s.last_row_id"
        " WHERE s.id = ?"
    )
    found = connection.execute(find, (step_id,)).fetchone()
    if found is None:
        return True
    *key, rollout_id, body = found
    step = Step(RowKey(*key), rollout_id=rollout_id)
    load_contributions(connection, step, step_id)
    try:
        line, _ = row_line(step, complete=True, amends=False)
        return not step.contributions or _is_near(_bare(line), _bare(body))
    except (ValueError, TypeError, ArithmeticError):
        return False


def _is_near(one: object, other: object) -> bool:
    """Equal, but for the last digits of numbers: a sum of large integers is rounded when it is kept."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_near, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other


def _bare(body: bytes) -> dict[str, object]:
    row: dict[str, object] = orjson.loads(body)
    return {name: value for name, value in row.items() if name not in ("complete", "amends")}


def load_contributions(connection: sqlite3.Connection, step: Step, step_id: int) -> None:
    """What the producers said of a step."""
    find = "SELECT part, producer, incarnation, body FROM contributions WHERE step_id = ?"
    for part, who, incarnation, body in connection.execute(find, (step_id,)):
        step.contributions[part, who] = load_contribution(incarnation, body)


def is_row(body: object) -> bool:
    """Whether it can be a row's JSON."""
    if not isinstance(body, bytes):  # one bit makes text of bytes
        return False
    try:
        row = orjson.loads(body)
        step, attempt = row["step"], row["attempt"]
        for value in row["values"].values():
            float(value)
        return isinstance(row["run"], str) and isinstance(row["axis"], str) and type(step) is type(attempt) is int
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def is_contribution(body: object) -> bool:
    """Whether it can be a producer's say."""
    if not isinstance(body, bytes):
        return False
    try:
        load_contribution(1, body)
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def is_names(expected: object) -> bool:
    """Whether it can be the names of a step's parts."""
    try:
        return all(isinstance(name, str) for name in orjson.loads(expected))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return False
