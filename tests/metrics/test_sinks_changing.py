"""Sinks that are removed while they hang: nobody else waits for them, nor does the service's end."""

import contextlib
import socket
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import orjson
import pytest

from tests.metrics.running import MetricsProcess, batch, part, send, until

Make = Callable[..., MetricsProcess]


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of what accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/in"


def ask(service: MetricsProcess, method: str, path: str, tree: object = None) -> int:
    body = orjson.dumps(tree) if tree is not None else None
    request = urllib.request.Request(f"{service.http}{path}", body, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return int(answer.status)


def num_removed(service: MetricsProcess) -> int:
    with urllib.request.urlopen(f"{service.http}/api/status", timeout=20) as answer:
        return int(orjson.loads(answer.read())["num_removed"])


def remove_webhook(service: MetricsProcess) -> None:
    with contextlib.suppress(OSError):  # the service may stop before it has answered
        ask(service, "DELETE", "/api/sinks/webhook")


@pytest.mark.slow
def test_removing_one_that_hangs_holds_up_no_other_and_no_stop(make: Make, silent: str) -> None:
    service = make(metrics_webhook=silent).start()
    send(service, batch([part(n, {"train/loss": ["last", n]}) for n in range(20)]))
    service.wait_rows(20)
    removing = threading.Thread(target=remove_webhook, args=(service,))
    removing.start()
    until(lambda: "webhook" not in [sink.name for sink in service.status().sinks], "it is leaving")
    begun = time.monotonic()
    new = {"name": "copy", "kind": "jsonl", "options": {"path": "copy.jsonl"}}
    assert ask(service, "POST", "/api/sinks", new) == 201
    copy = service.run_dir.root / "copy.jsonl"
    until(lambda: copy.exists() and len(copy.read_text().splitlines()) == 20, "the copy")
    assert service.stop() == 3
    assert time.monotonic() - begun < 8
    removing.join(20)


@pytest.mark.slow
def test_rows_of_a_removed_one_outlive_their_age_until_it_is_restored(make: Make) -> None:
    service = make(metrics_retention_days=1e-5).start()
    assert ask(service, "DELETE", "/api/sinks/jsonl") == 204
    send(service, *(batch([part(n, {"train/loss": ["last", n]})], first=n) for n in range(1, 9)))
    until(lambda: num_removed(service), "records are removed")
    time.sleep(2.5)  # what must not happen: rows go as the records do
    assert ask(service, "POST", "/api/sinks/jsonl/restore") == 200
    assert [row["step"] for row in service.wait_rows(8)] == list(range(1, 9))


def test_one_that_was_added_and_removed_leaves_no_cursor(make: Make) -> None:
    service = make().start()
    send(service, batch([part(1, {"train/loss": ["last", 1]})]))
    ask(service, "POST", "/api/sinks", {"name": "copy", "kind": "jsonl", "options": {"path": "copy.jsonl"}})
    until(lambda: (service.run_dir.root / "copy.jsonl").exists(), "the copy")
    assert ask(service, "DELETE", "/api/sinks/copy") == 204
    with contextlib.closing(sqlite3.connect(service.run_dir.metrics_store / "metrics.db")) as store:
        assert store.execute(
            "SELECT (SELECT count(*) FROM sinks), count(*) FROM cursors WHERE sink = 'copy'"
        ).fetchall() == [(0, 0)]
