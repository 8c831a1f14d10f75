"""Sinks that are added while the service runs get every row from the first on, once."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.event_files import by_rule
from tests.metrics.sinks.otlp_decoding import logs_in, points_in
from tests.metrics.sinks.receiver import receiving

Make = Callable[..., MetricsProcess]


def add(service: MetricsProcess, kind: str, **options: str) -> None:
    body = json.dumps({"name": kind, "kind": kind, "options": options}).encode()
    request = urllib.request.Request(f"{service.http}/api/sinks", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=20).close()


def test_late_sinks_have_it_all(make: Make, tmp_path: Path) -> None:
    service = make().start()
    send(service, batch([b'{"event": "early"}', *(part(n, {"train/loss": ["last", n]}) for n in range(1, 301))]))
    service.wait_rows(300)
    with receiving() as receiver:
        add(service, "tensorboard", dir="board")
        add(service, "webhook", url=receiver.url)
        add(service, "otlp", endpoint=receiver.url)
        add(service, "otlp_logs", endpoint=receiver.url)
        send(service, batch([part(301, {"train/loss": ["last", 301]})], first=302))
        service.flush()
        posted = [row["step"] for r in receiver.taken if r.path == "/" for row in json.loads(r.body)["rows"]]
        assert posted == list(range(1, 302))
        assert [value for name, _, value, _ in points_in(receiver.taken) if name == "train/loss"] == posted
        until(lambda: "early" in {log.body.string_value for _, log in logs_in(receiver.taken)}, "the log line")
        assert by_rule(service.run_dir.root / "board")["r/train/train/loss"] == [(n, float(n)) for n in posted]
