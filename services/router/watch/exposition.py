"""A snapshot as metrics for Prometheus. The only file that knows their names; holds nothing.

Sums over all workers never fall. What is said of one worker ends a while after it left.
"""

from collections.abc import Iterator, Mapping

from furlong import __version__
from services.router.watch.counters import ODD_STATUS
from services.router.watch.snapshot import Snapshot, cells_by_class, whole
from services.router.watch.text_format import Counter, Family, Gauge, Histogram, both, label

PREFIX = "furlong_router_"
"""Rows of metrics that another service shows begin so too; none of them has a name that stands here."""
STATES = ("joining", "ready", "unready", "draining")


def exposition(snapshot: Snapshot) -> str:
    """The text of a scrape."""
    return "".join(family.text() for family in families(snapshot))


def families(snapshot: Snapshot) -> Iterator[Family]:
    """All that is told."""
    yield from _of_requests(cells_by_class(snapshot))
    yield from _of_whole(snapshot)
    yield from _of_worker_requests({url: snapshot["cells"].get(url, {}) for url in snapshot["shown"]})
    yield from _of_worker_counts({url: snapshot["of_worker"].get(url, {}) for url in snapshot["shown"]})
    yield from _of_worker_states(snapshot["workers"])
    yield from _of_processes(snapshot["processes"])


def _of_requests(cells: Mapping[str, Snapshot]) -> Iterator[Family]:
    requests = _counter("requests", "Requests that are over, by the status that the client got; none: no answer.")
    seconds = _histogram("request_seconds", "From a request's head to its end.")
    first = _histogram("first_byte_seconds", "From sending a request to a worker to the first byte of the answer.")
    queue = _histogram("queue_seconds", "Waiting for a worker, of the requests that had to wait.")
    received = _counter("received_bytes", "Bytes of requests' bodies.")
    sent = _counter("sent_bytes", "Bytes of answers' bodies.")
    for path_class, cell in sorted(cells.items()):
        labels = label("path_class", path_class)
        for status, number in cell["statuses"].items():
            requests.add(both(labels, label("status", status_text(status))), number)
        for family, name in ((seconds, "total"), (first, "first"), (queue, "queue")):
            family.add_times(labels, cell[name], cell[f"{name}_s"])
        received.add(labels, cell["bytes_in"])
        sent.add(labels, cell["bytes_out"])
    yield from (requests, seconds, first, queue, received, sent)


def _of_whole(snapshot: Snapshot) -> Iterator[Family]:
    errors = _counter("errors", "Requests that went wrong, by kind.")
    for kind, number in snapshot["errors"].items():
        errors.add(label("kind", kind), number)
    retries = _counter("retries", "Requests that were sent to another worker, by reason.")
    for kind, number in snapshot["retries"].items():
        retries.add(label("reason", kind), number)
    probes = _counter("probes", "Health probes that ended.")
    probes.add(label("result", "good"), snapshot["probes_good"])
    probes.add(label("result", "bad"), snapshot["probes_bad"])
    opened = _counter("connections_opened", "Connections that clients opened.")
    opened.add("", snapshot["connections_opened"])
    connections = _gauge("connections", "Connections of clients that are open.")
    connections.add("", snapshot["connections_opened"] - snapshot["connections_closed"])
    waiting = _gauge("queue_length", "Requests that wait for a worker.")
    waiting.add("", snapshot["num_waiting"])
    build = _gauge("build_info", "The version of the router.")
    build.add(label("version", __version__), 1)
    yield from (errors, retries, probes, opened, connections, waiting, build)
    if "process_restarts" in snapshot:
        restarts = _counter("process_restarts", "Processes of the router that ended and were started anew.")
        restarts.add("", snapshot["process_restarts"])
        yield restarts


def _of_worker_requests(shown: Mapping[str, Mapping[str, Snapshot]]) -> Iterator[Family]:
    requests = _counter("worker_requests", "Requests that are over, by the worker that had them last.")
    seconds = _histogram("worker_request_seconds", "From a request's head to its end.")
    first = _histogram("worker_first_byte_seconds", "From sending a request to the first byte of the answer.")
    received = _counter("worker_received_bytes", "Bytes of requests' bodies.")
    sent = _counter("worker_sent_bytes", "Bytes of answers' bodies.")
    for url, cells in shown.items():
        labels = label("worker", url)
        for path_class, cell in sorted(cells.items()):
            of_class = both(labels, label("path_class", path_class))
            for status, number in cell["statuses"].items():
                requests.add(both(of_class, label("status", status_text(status))), number)
        total = whole(cells.values())
        seconds.add_times(labels, total["total"], total["total_s"])
        first.add_times(labels, total["first"], total["first_s"])
        received.add(labels, total["bytes_in"])
        sent.add(labels, total["bytes_out"])
    yield from (requests, seconds, first, received, sent)


def _of_worker_counts(shown: Mapping[str, Snapshot]) -> Iterator[Family]:
    errors = _counter("worker_errors", "Requests that went wrong, by the worker that had them last, and kind.")
    probes = _counter("worker_probes", "Health probes that ended.")
    seconds = _counter("worker_probe_seconds", "How long they took in all.")
    for url, counts in shown.items():
        labels = label("worker", url)
        for kind, number in counts.get("errors", {}).items():
            errors.add(both(labels, label("kind", kind)), number)
        probes.add(both(labels, label("result", "good")), counts.get("probes_good", 0))
        probes.add(both(labels, label("result", "bad")), counts.get("probes_bad", 0))
        seconds.add(labels, counts.get("probe_s", 0.0))
    yield from (errors, probes, seconds)


def _of_worker_states(workers: Mapping[str, Snapshot]) -> Iterator[Family]:
    in_flight = _gauge("worker_in_flight", "Requests that a worker is answering.")
    ready = _gauge("worker_ready", "1 while a worker takes requests.")
    breaker = _gauge(
        "worker_breaker_open", "1 while a worker gets at most one request at a time: its last ones failed."
    )
    version = _gauge("worker_policy_version", "Version of the weights that a worker holds, once it is confirmed.")
    states = dict.fromkeys(STATES, 0)
    for url, worker in workers.items():
        labels, state = label("worker", url), worker["state"].lower()
        states[state] = states.get(state, 0) + 1
        in_flight.add(labels, worker["in_flight"])
        ready.add(labels, state == "ready")
        breaker.add(labels, worker["breaker"] != "closed")
        if worker["policy_version"] is not None:
            version.add(labels, worker["policy_version"])
    number = _gauge("workers", "Workers by state.")
    for state, count in states.items():
        number.add(label("state", state), count)
    yield from (in_flight, ready, breaker, version, number)


def _of_processes(processes: Mapping[str, Mapping[str, float]]) -> Iterator[Family]:
    named: dict[str, Family] = {
        "resident_bytes": _gauge("process_resident_bytes", "Memory of the router's process."),
        "open_files": _gauge("process_open_files", "Its open files and sockets."),
        "loop_lag_s": _gauge("process_loop_lag_seconds", "The latest that its event loop was in the last 10 to 20 s."),
        "started_at": _gauge("process_start_time_seconds", "When it started, in seconds since 1970."),
        "cpu_s": _counter("process_cpu_seconds", "Its processor time."),
    }
    for process, numbers in processes.items():
        for name, family in named.items():
            family.add(label("process", process), numbers[name])
    yield from named.values()


def status_text(status: str) -> str:
    """The label's value: `none` for no answer, `other` for what HTTP has no name for."""
    return {"0": "none", str(ODD_STATUS): "other"}.get(status, status)


def _counter(name: str, text: str) -> Counter:
    return Counter(PREFIX + name, text)


def _gauge(name: str, text: str) -> Gauge:
    return Gauge(PREFIX + name, text)


def _histogram(name: str, text: str) -> Histogram:
    return Histogram(PREFIX + name, text)
