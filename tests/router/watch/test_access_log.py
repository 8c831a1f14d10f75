"""Which requests have a line, what stands in it, and that a flood of failures stays a few lines."""

from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from furlong.logs import configure
from services.router.watch.access_log import BURST, MAX_WINDOWS, WINDOW_S, AccessLog
from tests.router.watch.passages import Clock, FakePassage, FakeWorker, observer_of

Lines = list[structlog.typing.EventDict]
TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def lines() -> Iterator[Lines]:
    configure(run="r", service="router", instance="router", level="debug", path=None, telemetry=None)
    with capture_logs() as captured:
        yield captured  # type: ignore[misc]


def test_one_in_so_many_good_requests_has_a_line(lines: Lines) -> None:
    observer = observer_of(access_log_every=10)
    for number in range(35):
        observer.finished(FakePassage(request_id=b"id-%d" % number))
    assert [line["request_id"] for line in lines] == ["id-9", "id-19", "id-29"]
    assert {(line["event"], line["log_level"]) for line in lines} == {("request", "info")}


def test_every_request_or_no_good_one_has_a_line(lines: Lines) -> None:
    every, none = observer_of(access_log_every=1), observer_of(access_log_every=0)
    for observer in (every, none):
        for _ in range(3):
            observer.finished(FakePassage())
    assert len(lines) == 3
    none.finished(FakePassage(status=502, error="worker_broken"))
    assert [line["event"] for line in lines[3:]] == ["request_failed"]


def test_line_says_what_there_is_to_say(lines: Lines) -> None:
    passage = FakePassage(
        FakeWorker(), 502, headers=[(b"traceparent", TRACE)], error="worker_broken", error_message="closed", num_tries=2
    )
    observer_of().finished(passage)
    [line] = lines
    assert line == {
        "event": "request_failed",
        "log_level": "info",
        "request_id": "id-1",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "method": "POST",
        "path": "/generate",
        "status": 502,
        "worker": "http://127.0.0.1:30000",
        "tries": 2,
        "queued_s": 0.0,
        "first_byte_s": 0.004,
        "seconds": 0.04,
        "bytes_in": 10,
        "bytes_out": 20,
        "client": "127.0.0.1:5",
        "error": "worker_broken",
        "error_message": "closed",
    }


def test_errors_of_the_worker_and_refusals_of_the_router_have_lines_and_a_workers_400_has_none(lines: Lines) -> None:
    observer = observer_of()
    observer.finished(FakePassage(FakeWorker(), 500))
    observer.finished(FakePassage(status=404, error="unknown_worker"))
    observer.finished(FakePassage(FakeWorker(), 400))
    assert [(line["status"], line.get("error")) for line in lines] == [(500, "worker_status"), (404, "unknown_worker")]


def test_client_that_left_is_told_at_debug(lines: Lines) -> None:
    observer_of().finished(FakePassage(error="client_left", status=0))
    assert [line["log_level"] for line in lines] == ["debug"]


def test_long_path_and_message_are_cut(lines: Lines) -> None:
    AccessLog().failed(FakePassage(path="/" + "x" * 50_000, error="e", error_message="m" * 50_000, status=404))
    assert len(lines[0]["path"]) < 230 and len(lines[0]["error_message"]) < 530


def test_flood_of_one_kind_is_summed_and_another_kind_is_still_told(lines: Lines) -> None:
    clock, worker = Clock(), FakeWorker()
    access_log = AccessLog(now=clock)
    for number in range(5000):
        access_log.failed(FakePassage(worker, 502, error="worker_broken", request_id=b"id-%d" % number))
    access_log.failed(FakePassage(worker, 504, error="worker_late"))
    assert len(lines) == BURST + 1
    clock.at += WINDOW_S
    access_log.tell_sums()
    access_log.tell_sums()
    [told] = lines[BURST + 1 :]
    assert (told["event"], told["num_more"], told["worker"]) == ("requests_failed_alike", 5000 - BURST, worker.url)
    assert told["message"] == f"{5000 - BURST} more like this in the last 10 s"
    assert (told["error"], told["request_id"]) == ("worker_broken", "id-4999")


def test_failures_after_a_window_are_told_again_after_its_sum(lines: Lines) -> None:
    clock = Clock()
    access_log = AccessLog(now=clock)
    for _ in range(BURST + 3):
        access_log.failed(FakePassage(status=503, error="queue_full"))
    clock.at += WINDOW_S
    access_log.failed(FakePassage(status=503, error="queue_full"))
    assert [line["event"] for line in lines[BURST:]] == ["requests_failed_alike", "request_failed"]


def test_failures_of_any_number_of_workers_stay_bounded(lines: Lines) -> None:
    access_log = AccessLog(now=Clock())
    for number in range(3 * MAX_WINDOWS):
        access_log.failed(FakePassage(FakeWorker(f"http://10.0.0.1:{number}"), 502, error="e"))
    assert len(lines) <= MAX_WINDOWS + BURST
    access_log.tell_sums(everything=True)
    assert lines[-1]["num_more"] == 2 * MAX_WINDOWS - BURST
