"""What Prometheus is told, read back by the official parser."""

import math

from prometheus_client.parser import text_string_to_metric_families

from services.router.watch.exposition import exposition
from services.router.watch.reporting import values_of
from services.router.watch.snapshot import merge
from tests.router.watch.passages import FakePassage, FakeWorker, observer_of

Labels = tuple[tuple[str, str], ...]


def read(text: str) -> dict[tuple[str, Labels], float]:
    """By name (without furlong_router_) and labels; each once."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(s.name.removeprefix("furlong_router_"), tuple(sorted(s.labels.items()))): s.value for s in samples}
    assert len(found) == len(samples), "a series stands twice"
    return found


def test_every_number_is_told() -> None:
    worker = FakeWorker(in_flight=3, policy_version=7)
    observer = observer_of(worker)
    for _ in range(4):
        observer.finished(FakePassage(worker))
    observer.finished(FakePassage(worker, status=0, error="client_left", first_byte=0.0))
    observer.retry("worker_unreachable")
    observer.probe(worker, False, 0.5)
    observer.connection_opened()
    found = read(exposition(merge([observer.snapshot()])))
    at, of = ("worker", worker.url), ("path_class", "generate")
    assert found["requests_total", (of, ("status", "200"))] == 4
    assert found["worker_requests_total", (of, ("status", "none"), at)] == 1
    assert found["request_seconds_bucket", (("le", "0.02"), of)] == 0
    assert found["request_seconds_bucket", (("le", "0.05"), of)] == 5
    assert found["request_seconds_bucket", (("le", "+Inf"), of)] == found["request_seconds_count", (of,)] == 5
    assert math.isclose(found["first_byte_seconds_sum", (of,)], 0.016, rel_tol=1e-6)
    assert found["worker_first_byte_seconds_bucket", (("le", "0.005"), at)] == 4
    assert (found["received_bytes_total", (of,)], found["worker_sent_bytes_total", (at,)]) == (50, 100)
    assert found["errors_total", (("kind", "client_left"),)] == 1
    assert found["worker_errors_total", (("kind", "client_left"), at)] == 1
    assert found["retries_total", (("reason", "worker_unreachable"),)] == 1
    assert found["worker_probes_total", (("result", "bad"), at)] == found["probes_total", (("result", "bad"),)] == 1
    assert found["worker_in_flight", (at,)] == 3 and found["worker_policy_version", (at,)] == 7
    assert (found["workers", (("state", "ready"),)], found["workers", (("state", "draining"),)]) == (1, 0)
    assert (found["connections", ()], found["queue_length", ()]) == (1, 0)
    assert found["process_resident_bytes", (("process", "0"),)] > 1e6
    assert found["process_open_files", (("process", "0"),)] > 2


def test_observer_that_saw_nothing_can_be_scraped() -> None:
    assert read(exposition(merge([observer_of().snapshot()])))["queue_length", ()] == 0


def test_every_family_stands_once_with_its_samples_together() -> None:
    workers = [FakeWorker(f"http://127.0.0.1:{port}") for port in (1, 2)]
    observer = observer_of(*workers)
    for worker in workers:
        observer.finished(FakePassage(worker, error="x"))
    lines = exposition(merge([observer.snapshot()])).splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    current = ""
    for line in lines:
        if line.startswith("# HELP"):
            current = line.split()[2]
        assert current in line


def test_odd_text_in_a_label_breaks_nothing() -> None:
    odd = 'a"b\\c\nd{},= é'
    observer = observer_of()
    observer.finished(FakePassage(error=odd))
    assert read(exposition(merge([observer.snapshot()])))["errors_total", (("kind", odd),)] == 1


def test_no_metric_has_the_name_of_a_row_that_the_metrics_service_shows() -> None:
    worker = FakeWorker(policy_version=1)
    observer = observer_of(worker)
    before = merge([observer.snapshot()])
    observer.finished(FakePassage(worker, queued_s=0.1))
    after = merge([observer.snapshot()])
    rows = {key.removeprefix("router/") for key in values_of(before, after, seconds=1.0)}
    own = {name for name, _ in read(exposition(after))}
    assert len(rows) > 15 and not rows & own
