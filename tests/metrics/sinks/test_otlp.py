"""Rows and log lines at an OpenTelemetry collector: its own messages, decoded by its own classes."""

import math
from collections.abc import Callable
from typing import Any  # Any: messages that are made from descriptors

import pytest

from services.metrics.sinks.drawn import Drawn
from services.metrics.sinks.otlp import headers_of
from services.metrics.sinks.otlp_messages import metrics_request
from tests.metrics.running import MetricsProcess, batch, part, send, until
from tests.metrics.sinks.otlp_decoding import logs_in, metrics_service, plain, points_in
from tests.metrics.sinks.receiver import Receiver, Reply, Request, receiving

Make = Callable[..., MetricsProcess]


def losses_at(receiver: Receiver) -> list[float]:
    return [value for name, _, value, _ in points_in(receiver.taken) if name == "train/loss"]


def losses_at_one(request: Request) -> list[float]:
    return [value for name, _, value, _ in points_in([request]) if name == "train/loss"]


def lines_of(request: Request) -> list[int]:
    found = [plain(record.attributes) for _, record in logs_in([request]) if record.body.string_value == "line"]
    return [attributes["n"] for attributes in found]


def rows(first: int, last: int) -> list[bytes]:
    return [part(n, {"train/loss": ["last", n]}) for n in range(first, last + 1)]


def left_out_by(service: MetricsProcess, name: str) -> int:
    return next(sink.num_values_left_out for sink in service.status().sinks if sink.name == name)


def refused_by(service: MetricsProcess, name: str) -> int:
    return next(sink.num_rows_refused for sink in service.status().sinks if sink.name == name)


def test_values_and_steps_arrive_as_gauges_with_their_times(make: Make) -> None:
    with receiving() as receiver:
        service = make(otlp_endpoint=receiver.url).start()
        values: dict[str, object] = {"eval/x@4": ["last", 0.5], "eval/bad": ["last", "NaN"]}
        send(service, batch([part(7, values, axis="eval/step", attempt=3)]))
        until(lambda: points_in(receiver.taken), "the points")
        found = {name: (time, value, attributes) for name, time, value, attributes in points_in(receiver.taken)}
        assert set(found) == {"eval/x_4", "eval/bad", "eval/bad/nonfinite", "eval/step"}
        time, value, attributes = found["eval/x_4"]
        assert (value, found["eval/step"][1], found["eval/step"][0]) == (0.5, 7, time)
        assert attributes == {"run": "r", "furlong.axis": "eval/step", "furlong.attempt": 3, "furlong.key": "eval/x@4"}
        assert math.isnan(found["eval/bad"][1])
        assert abs(time / 1e9 - service.run_dir.metrics_rows.stat().st_mtime) < 5


def test_log_lines_arrive_with_severity_body_and_attributes_and_metrics_records_do_not(make: Make) -> None:
    record = (
        b'{"ts":"2026-01-02T03:04:05.678901Z","level":"warning","event":"slow_step","run":"r","service":"trainer",'
        b'"instance":"trainer-0","seconds":2.5,"ids":[1,2],"nested":{"a":true,"b":null}}'
    )
    with receiving() as receiver:
        service = make(otlp_endpoint=receiver.url).start()
        send(service, batch([record, part(1, {"train/loss": ["last", 1]})]))

        def slow() -> list[tuple[dict[str, Any], Any]]:
            return [found for found in logs_in(receiver.taken) if found[1].body.string_value == "slow_step"]

        until(slow, "the log record")
        resource, found = slow()[0]
        assert resource == {
            "service.namespace": "furlong",
            "service.name": "furlong-trainer",
            "service.instance.id": "trainer-0",
            "furlong.run": "r",
        }
        assert (found.severity_number, found.severity_text) == (13, "WARNING")
        assert found.time_unix_nano == 1767323045678901000
        attributes = plain(found.attributes)
        assert attributes["seconds"] == 2.5 and [v.int_value for v in attributes["ids"].values] == [1, 2]
        assert attributes["nested"].values[0].value.bool_value
        assert not [r for _, r in logs_in(receiver.taken) if r.body.string_value == "metrics"]


def test_partial_success_is_counted_and_not_sent_again(make: Make) -> None:
    answer = metrics_service.ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points, answer.partial_success.error_message = 2, "too old"
    with receiving(lambda request: Reply(body=answer.SerializeToString())) as receiver:
        service = make(otlp_endpoint=receiver.url).start()
        send(service, batch(rows(1, 3)))
        until(lambda: len(losses_at(receiver)) >= 3, "the points")
        until(lambda: left_out_by(service, "otlp") % 2 == 0 != left_out_by(service, "otlp"), "what was rejected")
        service.stop()
        assert losses_at(receiver) == [1, 2, 3]
        log = service.run_dir.log("metrics").read_text()
        assert '"otlp_partly_rejected"' in log and "too old" in log


def test_what_is_refused_for_good_is_found_by_halving_and_counted(make: Make) -> None:
    def answer(request: Request) -> Reply:
        return Reply(
            400 if any(value == 37 for name, _, value, _ in points_in([request]) if name == "train/loss") else 200
        )

    with receiving(answer) as receiver:
        service = make(otlp_endpoint=receiver.url).start()
        send(service, batch(rows(1, 100)))
        until(lambda: len(losses_at(receiver)) >= 99, "99 points")
        until(lambda: refused_by(service, "otlp") == 1, "one refused")
        assert losses_at(receiver) == [n for n in range(1, 101) if n != 37]
        assert refused_by(service, "otlp_logs") == 0


@pytest.mark.parametrize("path", ["/v1/metrics", "/v1/logs"])
def test_what_was_taken_of_a_parted_write_is_not_sent_again_when_the_rest_fails(make: Make, path: str) -> None:
    """A batch of log lines too, of which the first were taken."""
    failed: list[Request] = []

    def answer(request: Request) -> Reply:
        said = [*losses_at_one(request), *lines_of(request)]
        if request.path != path or not said:
            return Reply()
        if len(said) > 8:
            return Reply(413)
        if not failed and any(losses_at_one(one) or lines_of(one) for one in receiver.taken):
            failed.append(request)
            return Reply(503)
        return Reply()

    def everything() -> list[object]:
        return [said for one in receiver.taken if one.path == path for said in (losses_at_one(one) or lines_of(one))]

    with receiving(answer) as receiver:
        service = make(otlp_endpoint=receiver.url).start()
        lines = [b'{"event":"line","level":"info","run":"r","instance":"x-0","n":%d}' % n for n in range(1, 31)]
        send(service, batch(rows(1, 30) if path == "/v1/metrics" else lines))
        until(lambda: len(set(map(str, everything()))) >= 30, "all of it")
        service.stop()
        assert failed and everything() == list(range(1, 31))


@pytest.mark.parametrize("status", [429, pytest.param(503, marks=pytest.mark.slow)])
def test_collector_that_is_busy_is_asked_again_when_it_says(make: Make, status: int) -> None:
    busy = [True]
    with receiving(lambda request: Reply(status, {"Retry-After": "1"}) if busy else Reply()) as receiver:
        service = make(otlp_endpoint=receiver.url).start()
        send(service, batch(rows(1, 10)))
        until(lambda: [r for r in receiver.requests if r.path == "/v1/metrics"], "a try")
        busy.clear()
        until(lambda: len(losses_at(receiver)) >= 10, "the points")
        assert losses_at(receiver) == list(range(1, 11))


def test_headers_come_from_the_environment_and_are_told_nowhere(make: Make) -> None:
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20HUSHHUSH,x-tenant=a"}
    with receiving(lambda request: Reply(401, body=b"Bearer HUSHHUSH is wrong")) as receiver:
        service = make(otlp_endpoint=receiver.url, environment=headers).start()
        send(service, batch(rows(1, 1)))
        until(lambda: receiver.requests, "a request")
        seen = receiver.requests[0].headers
        assert (seen["authorization"], seen["x-tenant"]) == ("Bearer HUSHHUSH", "a")
        until(lambda: '"sink_failing"' in service.run_dir.log("metrics").read_text(), "failing")
        assert "HUSH" not in service.run_dir.log("metrics").read_text()


def test_kill_sends_the_newest_again_with_the_same_identity(make: Make) -> None:
    with receiving() as receiver:
        service = make(otlp_endpoint=receiver.url).start()
        send(service, batch(rows(1, 50)))
        until(lambda: losses_at(receiver), "a point")
        service.kill()
        service.start()
        send(service, batch(rows(51, 60), first=51))
        until(lambda: len(set(losses_at(receiver))) >= 60, "all points")
        identities = {(time, value) for name, time, value, _ in points_in(receiver.taken) if name == "train/loss"}
        assert len(identities) == 60 and len({time for time, _ in identities}) == 60


def test_histogram_keeps_its_bins() -> None:
    spread = {"edges": [0, 1, 2], "counts": [3, 4]}
    message = metrics_service.ExportMetricsServiceRequest()
    message.ParseFromString(metrics_request([Drawn(1, "r", "rollout/step", 1, 1, 5, {}, {"rollout/len": spread}, {})]))
    metric = next(m for m in message.resource_metrics[0].scope_metrics[0].metrics if m.name == "rollout/len")
    point = metric.histogram.data_points[0]
    assert (list(point.explicit_bounds), list(point.bucket_counts), point.count) == ([0, 1, 2], [0, 3, 4, 0], 7)


def test_headers_are_read_as_opentelemetry_writes_them() -> None:
    assert headers_of("a=b%2Cc, d = e ,bad,=x,f=") == {"a": "b,c", "d": "e"}


def test_a_value_named_like_its_axis_does_not_hide_the_step() -> None:
    message = metrics_service.ExportMetricsServiceRequest()
    message.ParseFromString(metrics_request([Drawn(1, "r", "rollout/step", 7, 1, 5, {"rollout/step": 99.0}, {}, {})]))
    (metric,) = message.resource_metrics[0].scope_metrics[0].metrics
    assert [point.as_double for point in metric.gauge.data_points] == [7.0]
