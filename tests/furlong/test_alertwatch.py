"""Hearing alerts: from a server on a real port that comes, goes and comes again elsewhere."""

import queue
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from furlong import rpc
from furlong.alertwatch import UNWATCHED_KEY, AlertWatch, HeardAlert
from furlong.v1 import metrics_pb2, metrics_pb2_grpc

LIMIT_S = 10.0


class Service(metrics_pb2_grpc.MetricsServicer):
    """Streams what it is given; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[metrics_pb2.WatchAlertsRequest] = []
        self.alerts: queue.Queue[metrics_pb2.Alert | None] = queue.Queue()
        self.watched = threading.Event()
        self.left = threading.Event()
        self.server = rpc.start_sync_server(
            lambda server: metrics_pb2_grpc.add_MetricsServicer_to_server(self, server),
            names=("furlong.v1.Metrics",),
            host="127.0.0.1",
        )

    def WatchAlerts(
        self, request: metrics_pb2.WatchAlertsRequest, context: grpc.ServicerContext
    ) -> Iterator[metrics_pb2.Alert]:
        self.requests.append(request)
        context.send_initial_metadata(((UNWATCHED_KEY, b'["y", "other"]'),))
        context.add_callback(self.left.set)
        context.add_callback(lambda: self.alerts.put(None))
        self.watched.set()
        while (alert := self.alerts.get()) is not None:
            yield alert


@pytest.fixture
def service() -> Iterator[Service]:
    one = Service()  # type: ignore[abstract]  # only what is called here
    yield one
    one.alerts.put(None)
    one.server.drain(0.1)


class Ear:
    """An AlertWatch and what it heard."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.heard: queue.Queue[HeardAlert] = queue.Queue()
        self.watch = AlertWatch(run="r", attempt=3, find_address=lambda: self.address, on_alert=self.heard.put).start()

    def next(self) -> HeardAlert:
        return self.heard.get(timeout=LIMIT_S)


@pytest.fixture
def ear(service: Service) -> Iterator[Ear]:
    one = Ear(service.server.address)
    yield one
    one.watch.close(LIMIT_S)


def alert(number: int) -> metrics_pb2.Alert:
    return metrics_pb2.Alert(id=number, run="r", rule="x", state=metrics_pb2.Alert.FIRING, attempt=3, halt=True)


def test_it_asks_for_its_run_and_attempt_and_hears_each_alert_once(service: Service, ear: Ear) -> None:
    for number in (1, 1, 2):
        service.alerts.put(alert(number))
    assert [ear.next().alert_id, ear.next().alert_id] == [1, 2]
    assert (service.requests[0].run, service.requests[0].attempt, service.requests[0].after_id) == ("r", 3, 0)


def test_a_service_that_is_started_again_elsewhere_is_found_and_nothing_is_heard_twice(
    service: Service, ear: Ear
) -> None:
    service.alerts.put(alert(1))
    assert ear.next().alert_id == 1
    service.server.drain(0.0)
    other = Service()  # type: ignore[abstract]
    ear.address = other.server.address
    other.alerts.put(alert(1))
    other.alerts.put(alert(2))
    assert ear.next().alert_id == 2
    assert other.requests[0].after_id == 1
    other.alerts.put(None)
    other.server.drain(0.1)


def test_without_a_service_it_waits_and_closes_at_once(service: Service) -> None:
    ear = Ear(None)
    ear.address = service.server.address
    assert service.watched.wait(LIMIT_S)
    begun = time.monotonic()
    ear.watch.close(LIMIT_S)
    assert time.monotonic() - begun < 5 and service.left.wait(LIMIT_S)


def test_rules_that_nobody_watches_are_told_once_over_new_streams(service: Service) -> None:
    told: queue.Queue[tuple[str, list[str]]] = queue.Queue()
    heard: queue.Queue[HeardAlert] = queue.Queue()
    watch = AlertWatch(
        run="r",
        attempt=0,
        find_address=lambda: service.server.address,
        on_alert=heard.put,
        halt_on=("x", "y"),
        on_unwatched=lambda address, rules: told.put((address, rules)),
    ).start()
    assert told.get(timeout=LIMIT_S) == (service.server.address, ["y"])
    service.alerts.put(None)  # the stream ends, and a new one is opened
    service.alerts.put(alert(1))
    assert heard.get(timeout=LIMIT_S).alert_id == 1
    assert len(service.requests) == 2 and list(service.requests[0].halt_on) == ["x", "y"] and told.empty()
    watch.close(LIMIT_S)


def test_a_listener_that_raises_ends_nothing(service: Service) -> None:
    heard: queue.Queue[int] = queue.Queue()

    def take(one: HeardAlert) -> None:
        heard.put(one.alert_id)
        raise ValueError("no")

    watch = AlertWatch(run="r", attempt=0, find_address=lambda: service.server.address, on_alert=take).start()
    service.alerts.put(alert(1))
    service.alerts.put(alert(2))
    assert [heard.get(timeout=LIMIT_S), heard.get(timeout=LIMIT_S)] == [1, 2]
    watch.close(LIMIT_S)
