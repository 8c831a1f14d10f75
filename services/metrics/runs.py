"""The runs that the store has heard of, and when. Runs in the writer's thread, inside its transaction."""

import sqlite3

MAX_CACHED_RUNS = 10_000


class Runs:
    """Holds the ids of runs; writes when each was last heard of, once a commit."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ids: dict[str, int] = {}
        self._heard: dict[int, int] = {}

    def forget(self) -> None:
        """After a rollback: what is held may not be in the store."""
        self._ids.clear()
        self._heard.clear()

    def id_of(self, name: str, now_us: int) -> int:
        """The run's id; it was heard of now."""
        run_id = self._ids.get(name)
        if run_id is None:
            insert = "INSERT OR IGNORE INTO runs (name, first_us, last_us) VALUES (?, ?, ?)"
            self._connection.execute(insert, (name, now_us, now_us))
            run_id = int(self._connection.execute("SELECT id FROM runs WHERE name = ?", (name,)).fetchone()[0])
            if len(self._ids) >= MAX_CACHED_RUNS:
                self._ids.clear()
            self._ids[name] = run_id
        self._heard[run_id] = now_us
        return run_id

    def save(self) -> None:
        """Within the transaction that ends now."""
        if self._heard:
            moments = [(last_us, run_id) for run_id, last_us in self._heard.items()]
            self._connection.executemany("UPDATE runs SET last_us = ? WHERE id = ?", moments)
            self._heard.clear()
