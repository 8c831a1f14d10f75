"""A line of text says when it was written, how bad it is and who wrote it, in the forms that programs use."""

import datetime

import pytest

from services.metrics.tailing.heading import HeadingReader, TextLine

NOW = datetime.datetime(2026, 11, 29, 12, 0, 0, 250_000, tzinfo=datetime.UTC)


def read(text: str) -> TextLine:
    return HeadingReader().read(text, now=NOW)


def local(text: str) -> str:
    """A local time as records have it."""
    moment = datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest.mark.parametrize(
    ("line", "time"),
    [
        ("[2026-11-29 17:03:41] The server is fired up", "2026-11-29T17:03:41"),
        ("[2026-11-29 17:03:41 TP0] Load weight begin", "2026-11-29T17:03:41"),
        ("[2026-11-29 17:03:41.123 DP1 TP0] Load weight begin", "2026-11-29T17:03:41.123"),
        ("2026-11-29 17:03:41,123 - root - INFO - hello", "2026-11-29T17:03:41.123"),
        ("2026-11-29 17:03:41,123\tINFO worker.py:1 -- Started", "2026-11-29T17:03:41.123"),
        ("INFO 2026-11-29 17:03:41 x", "2026-11-29T17:03:41"),
        ("INFO 11-28 17:03:41 [loader.py:12] x", "2026-11-28T17:03:41"),
        ("INFO 12-30 17:03:41 [loader.py:12] last year's", "2025-12-30T17:03:41"),
        ("2026-11-29T17:03:41.123456Z x", "2026-11-29T17:03:41.123456+00:00"),
        ("2026-11-29T17:03:41+02:00 x", "2026-11-29T17:03:41+02:00"),
        ("2026-11-29T17:03:41.5-0330 x", "2026-11-29T17:03:41.500-03:30"),
    ],
)
def test_time_is_read(line: str, time: str) -> None:
    assert (read(line).ts, read(line).is_dated) == (local(time), True)


@pytest.mark.parametrize(
    "line", ["hello", "2026-13-45 99:99:99 x", "INFO 13-45 17:03:41 x", f"{'x' * 60} 2026-11-29 17:03:41"]
)
def test_line_without_a_time_has_that_of_its_reading(line: str) -> None:
    assert (read(line).ts, read(line).is_dated) == ("2026-11-29T12:00:00.250000Z", False)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("2026-11-29 17:03:41,123 - root - WARNING - hello", "warning"),
        ("ERROR:root:boom", "error"),
        ("[2026-11-29 17:03:41] FATAL: gone", "critical"),
        ("[error    ] task_failed", "error"),
        ("x.py:71: UserWarning: old", "warning"),
        ("W1129 17:03:41.123456 12345 socket.cpp:12] late", "warning"),
        ("Traceback (most recent call last):", "error"),
        ("no errors and no information here", "info"),
        ('127.0.0.1 - "GET /error HTTP/1.1" 200 OK', "info"),
    ],
)
def test_level_is_guessed(line: str, level: str) -> None:
    assert read(line).level == level


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(TaskRunner pid=123) hello", ("hello", "TaskRunner", "123", "")),
        ("\x1b[36m(WorkerDict pid=12, ip=10.0.0.7)\x1b[0m hello", ("hello", "WorkerDict", "12", "10.0.0.7")),
        ("(pid=9) hello", ("hello", "", "9", "")),
        ("(f pid=9) hello [repeated 3x across cluster]", ("hello [repeated 3x across cluster]", "f", "9", "")),
        ("(raylet) hello", ("(raylet) hello", "", "", "")),
    ],
)
def test_prefix_of_ray_is_read(line: str, expected: tuple[str, str, str, str]) -> None:
    found = read(line)
    assert (found.text, found.actor, found.pid, found.ip) == expected


def test_time_behind_the_prefix_of_ray_is_read() -> None:
    assert read("(Engine pid=5) [2026-11-29 17:03:41 TP0] x").ts == local("2026-11-29T17:03:41")
