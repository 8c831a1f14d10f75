"""Sinks that are removed while they hang: nobody else waits for them, nor does the service's end."""

import contextlib
import socket
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
