"""POST /v1/records as log shippers and curl use it: what is answered is on disk, once."""

import contextlib
import gzip
import http.client
import json
import shutil
import signal
import socket
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from services.metrics.http.body import MAX_BODY_BYTES
from tests.metrics.asking import get, post, request
from tests.metrics.running import MetricsProcess, until

Make = Callable[..., MetricsProcess]


def events(service: MetricsProcess, run: str) -> list[Any]:
    return [line["record"]["event"] for line in get(service.http, f"/api/logs?run={run}&last=10000")["logs"]]


def line(run: str, event: object) -> bytes:
    return json.dumps({"run": run, "event": event}).encode()


@pytest.mark.parametrize(
    ("name", "content_type", "body"),
    [
        ("fluent-bit-json", "application/json", b'[{"date":1796317421.5,"event":"a","log":"x"},{"event":"b"}]'),
        ("fluent-bit-lines", "application/x-ndjson", b'{"event":"a"}\n{"event":"b"}\n'),
        ("vector", "application/json", b'[{"event":"a","message":"x"}, {"event":"b"}]'),
        ("curl-d", "application/x-www-form-urlencoded", b'{"event":"a"}{"event":"b"}'),
        ("no-newline", "text/plain", b'{"event":"a"}\r\n\r\n{"event":"b"}'),
    ],
)
def test_senders_are_understood(service: MetricsProcess, name: str, content_type: str, body: bytes) -> None:
    said = post(service.http, body, f"/v1/records?run={name}", Content_Type=content_type)
    assert (said["status"], said["taken"], said["num_refused"], said["skipped_known"]) == (200, 2, 0, 0)
    assert events(service, name) == ["a", "b"]


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", lambda body: gzip.compress(body[:10]) + gzip.compress(body[10:]) + b"\0" * 8),
        ("deflate", zlib.compress),
    ],
)
def test_packed_bodies_are_taken(service: MetricsProcess, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    said = post(service.http, pack(line(encoding, "a") + b"\n" + line(encoding, "b")), Content_Encoding=encoding)
    assert said["taken"] == 2 and events(service, encoding) == ["a", "b"]


def test_encoding_that_is_not_taken_is_refused_with_a_remedy(service: MetricsProcess) -> None:
    said = post(service.http, b"xx", Content_Encoding="zstd")
    assert said["status"] == 415 and "zstd" in said["error"] and "gzip" in said["remedy"]


@pytest.mark.parametrize("damage", [lambda b: b[:-12], lambda b: b[:-300] + b"\xff" * 300, lambda b: b[:-4] + b"abcd"])
def test_packed_body_that_is_damaged_gives_no_wrong_record(
    service: MetricsProcess, damage: Callable[[bytes], bytes]
) -> None:
    whole = b"".join(line("damaged", f"{n} {hash(n * 7919)}") + b"\n" for n in range(5000))
    said = post(service.http, damage(gzip.compress(whole)), Content_Encoding="gzip")
    assert said["status"] == 400 and "packed" in said["error"] and said["remedy"]
    assert "damaged" not in {run["run"] for run in get(service.http, "/api/runs")["runs"]}


def test_bomb_is_refused_early(service: MetricsProcess) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(300)) + packer.flush()
    assert len(bomb) < 1 << 20
    said = post(service.http, bomb, Content_Encoding="gzip")
    assert said["status"] == 413 and "unpacked" in said["error"]


def test_body_that_says_it_is_too_large_is_refused_before_it_is_sent(service: MetricsProcess) -> None:
    address = urlsplit(service.http)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    connection.putrequest("POST", "/v1/records")
    connection.putheader("Content-Length", str(MAX_BODY_BYTES + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["remedy"]


def test_chunked_body_is_taken_and_the_connection_kept(service: MetricsProcess) -> None:
    address = urlsplit(service.http)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    body = line("chunked", "a") + b"\n" + line("chunked", "b")
    for _ in range(2):
        connection.request("POST", "/v1/records", iter([body[:9], body[9:40], body[40:]]), encode_chunked=True)
        assert json.loads(connection.getresponse().read())["taken"] == 2
    assert events(service, "chunked") == ["a", "b", "a", "b"]


def test_refusals_say_which_and_why(service: MetricsProcess) -> None:
    said = post(service.http, b'{"event":"a","run":"why"}\n{"half\n7\n{"event":"b","run":"no/name"}\n{"event":"c"}')
    assert said["status"] == 200 and said["taken"] == 2
    assert [item["index"] for item in said["refused"]] == [1, 2, 3]
    reasons = [item["reason"] for item in said["refused"]]
    assert "not JSON" in reasons[0] and "object" in reasons[1] and "no/name" in reasons[2]


def test_many_refusals_are_counted_and_the_first_told(service: MetricsProcess) -> None:
    said = post(service.http, b'{"event":"a"}\n' + b"x\n" * 250)
    assert (said["taken"], said["num_refused"], len(said["refused"])) == (1, 250, 100)


@pytest.mark.parametrize("body", [b"no", b"[1,2]", b'{"half'])
def test_post_of_which_nothing_can_be_taken_is_an_error(service: MetricsProcess, body: bytes) -> None:
    said = post(service.http, body)
    assert said["status"] == 400 and said["error"] and said["remedy"] and said["taken"] == 0


def test_empty_post_is_no_error(service: MetricsProcess) -> None:
    assert post(service.http, b"")["status"] == 200


def test_run_comes_from_the_record_else_the_query_else_the_header(service: MetricsProcess) -> None:
    body = b'{"event":"own","run":"of-record"}\n{"event":"none"}\n{"event":"null","run":null}'
    post(service.http, body, "/v1/records?run=of-query", X_Furlong_Run="of-header")
    post(service.http, b'{"event":"headed"}', X_Furlong_Run="of-header")
    assert events(service, "of-record") == ["own"]
    assert events(service, "of-query") == ["none", "null"]
    assert events(service, "of-header") == ["headed"]


@pytest.mark.parametrize("run", ["a/b", "../up", "", "x" * 129, "é"])
def test_run_that_is_no_name_is_refused(service: MetricsProcess, run: str) -> None:
    said = post(service.http, json.dumps({"event": "a", "run": run}).encode())
    assert said["status"] == 400 and "run must be" in said["error"]


def test_numbers_that_make_no_row_are_taken_and_listed_in_the_answer(service: MetricsProcess) -> None:
    good = {"event": "metrics", "run": "noticed", "axis": "train/step", "step": 1, "values": {"a": 1}}
    no_axis = {key: value for key, value in good.items() if key != "axis"}
    records = [good, no_axis, {**good, "step": 1.5}, {"run": "another"}, {**good, "values": {"a": 2, "b": "much"}}]
    said = post(service.http, b"no record\n" + b"\n".join(json.dumps(one).encode() for one in records))
    assert (said["taken"], said["num_refused"], said["num_noticed"]) == (5, 1, 3)
    assert [one["index"] for one in said["noticed"]] == [2, 3, 5]
    assert all(
        word in one["reason"]
        for word, one in zip(("axis must", "got 1.5", "b is no number"), said["noticed"], strict=True)
    )
    many = post(service.http, b"\n".join([json.dumps(no_axis).encode()] * 150))
    assert (many["num_noticed"], len(many["noticed"])) == (150, 100)


def test_what_is_told_of_a_large_post_names_the_right_record(service: MetricsProcess) -> None:
    lines = [line("named", n) for n in range(12_000)]
    for number in (100, 5_000, 9_999):
        lines[number] = b'{"event":"metrics","run":"named","step":1,"values":{"a":1}}'
    lines[6_000] = b"no record"
    said = post(service.http, b"\n".join(lines))
    assert [one["index"] for one in said["noticed"]] == [100, 5_000, 9_999]
    assert [one["index"] for one in said["refused"]] == [6_000]


NUMBERED = {"X_Furlong_Producer": "shipper", "X_Furlong_Incarnation": "7"}


def test_numbered_post_that_is_sent_again_doubles_nothing(service: MetricsProcess) -> None:
    body = b"\n".join(line("again", n) for n in range(3)) + b'\n{"half'
    first = post(service.http, body, **NUMBERED, X_Furlong_Sequence="1")
    again = post(service.http, body, **NUMBERED, X_Furlong_Sequence="1")
    # four numbers are known, that of the refused line too: only the fifth is new
    longer = b"\n".join(line("again", n) for n in (0, 1, 2, "refused then", 3))
    more = post(service.http, longer, **NUMBERED, X_Furlong_Sequence="1")
    assert (first["taken"], first["num_refused"]) == (3, 1)
    assert (again["taken"], again["skipped_known"]) == (0, 3)
    assert (more["taken"], more["skipped_known"]) == (1, 4)
    assert events(service, "again") == [0, 1, 2, 3]


def test_another_incarnation_counts_anew(service: MetricsProcess) -> None:
    for incarnation in ("1", "2"):
        said = post(
            service.http,
            line("anew", incarnation),
            X_Furlong_Producer="anew",
            X_Furlong_Incarnation=incarnation,
            X_Furlong_Sequence="1",
        )
        assert said["taken"] == 1
    assert events(service, "anew") == ["1", "2"]


@pytest.mark.parametrize(
    "headers",
    [
        {"X_Furlong_Sequence": "1"},
        {"X_Furlong_Producer": "p", "X_Furlong_Incarnation": "1"},
        {"X_Furlong_Producer": "p", "X_Furlong_Incarnation": "x", "X_Furlong_Sequence": "1"},
        {"X_Furlong_Producer": "p", "X_Furlong_Incarnation": "1", "X_Furlong_Sequence": "0"},
        {"X_Furlong_Producer": "p p"},
    ],
)
def test_half_a_numbering_is_refused(service: MetricsProcess, headers: dict[str, str]) -> None:
    said = post(service.http, b'{"event":"a"}', **headers)
    assert said["status"] == 400 and said["remedy"]


def test_unnumbered_posts_are_new_each_and_none_is_counted_missing(service: MetricsProcess) -> None:
    for _ in range(3):
        post(service.http, line("each", "same"))
    assert events(service, "each") == ["same"] * 3
    assert get(service.http, "/api/status")["num_missing"] == 0


def test_posts_side_by_side_lose_nothing(service: MetricsProcess) -> None:
    def send(sender: int) -> None:
        for number in range(10):
            assert post(service.http, line("beside", sender * 100 + number))["taken"] == 1

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(events(service, "beside")) == sorted(s * 100 + n for s in range(8) for n in range(10))


def test_large_post_keeps_its_order(service: MetricsProcess) -> None:
    body = b"\n".join(line("large", n) for n in range(9_000))
    assert post(service.http, body)["taken"] == 9_000
    assert events(service, "large") == list(range(9_000))


def test_numbers_become_rows(service: MetricsProcess) -> None:
    body = b'{"event":"metrics","run":"rows","axis":"my/axis","step":3,"values":{"my/loss":0.25,"my/bad":"NaN"}}'
    assert post(service.http, body)["taken"] == 1
    (row,) = get(service.http, "/api/rows?run=rows")["rows"]
    assert (row["axis"], row["step"], row["values"]["my/loss"], row["values"]["my/bad"]) == ("my/axis", 3, 0.25, "NaN")


def test_answered_records_survive_a_kill(make: Make) -> None:
    service = make().start()
    assert post(service.http, line("r", "kept"))["taken"] == 1
    service.signal(signal.SIGKILL)
    service.kill()
    service.start()
    assert "kept" in events(service, "r")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MB that can be filled."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], check=False, timeout=10)
    if mounted.returncode:
        pytest.skip("this user may not mount a disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=10)


def test_sender_is_told_to_hold_when_the_disk_is_full_and_taken_when_it_has_room(small_disk: Path) -> None:
    service = MetricsProcess(small_disk, metrics_min_free_bytes=3_000_000).start()
    try:
        filler = small_disk / "filler"
        filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 2_000_000))
        until(lambda: post(service.http, line("r", "early"))["status"] == 429, "the disk found full")
        status, headers, body = request(service.http, "POST", "/v1/records", line("r", "held"))
        assert status == 429 and int(headers["retry-after"]) > 0 and json.loads(body)["remedy"]
        assert request(service.http, "GET", "/readyz")[0] == 503
        filler.unlink()
        until(lambda: post(service.http, line("r", "again"))["status"] == 200, "room again")
        assert events(service, "r").count("again") == 1 and "held" not in events(service, "r")
    finally:
        service.end()


def test_client_that_goes_in_the_middle_leaves_no_half_record(service: MetricsProcess) -> None:
    address = urlsplit(service.http)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/records HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n" + line("gone", "a")[:20]
        )
    assert post(service.http, line("gone", "b"))["taken"] == 1
    assert events(service, "gone") == ["b"]


def test_methods_are_told(service: MetricsProcess) -> None:
    assert request(service.http, "OPTIONS", "/v1/records")[1]["allow"] == "OPTIONS, POST"
    status, headers, body = request(service.http, "HEAD", "/api/runs")
    assert status == 200 and int(headers["content-length"]) > 0 and body == b""
    status, headers, body = request(service.http, "PUT", "/v1/records")
    assert status == 405 and "POST" in headers["allow"] and json.loads(body)["remedy"]


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
def test_web_page_of_another_site_gets_nothing(service: MetricsProcess, headers: dict[str, str]) -> None:
    status, _, body = request(service.http, "POST", "/v1/records", line("evil", "a"), headers)
    assert status == 403 and json.loads(body)["remedy"]
    assert "evil" not in {run["run"] for run in get(service.http, "/api/runs")["runs"]}


def test_row_adds_up_over_a_restart_also_for_senders_that_number_nothing(make: Make) -> None:
    def said(values: dict[str, Any]) -> bytes:
        return json.dumps({"event": "metrics", "run": "mine", "axis": "epoch", "step": 1, "values": values}).encode()

    service = make().start()
    post(service.http, said({"a": 1.0, "tokens": ["sum", 3], "loss": ["mean", 2.0, 4]}))
    service.kill()
    service.start()
    post(service.http, said({"b": 2.0, "tokens": ["sum", 4], "loss": ["mean", 6.0, 4]}))
    (row,) = get(service.http, "/api/rows?run=mine&axis=epoch")["rows"]
    assert row["values"] == {"a": 1.0, "b": 2.0, "loss": 1.0, "tokens": 7}


@pytest.mark.slow
def test_posts_that_never_end_hold_bounded_memory_and_nobody_else_up(make: Make) -> None:
    service = make().start()
    assert service.process is not None
    address = urlsplit(service.http)
    half = b'{"event":"x","t":"' + b"y" * (4 << 20)
    posts = []
    for _ in range(100):
        post_ = socket.create_connection((address.hostname, address.port), timeout=10)
        posts.append(post_)
        with contextlib.suppress(OSError):  # it is told to come again
            post_.sendall(b"POST /v1/records HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50000000\r\n\r\n" + half)
    large = b"\n".join(line("well", "z" * 300) for _ in range(20_000))
    assert post(service.http, large)["taken"] == 20_000
    assert psutil.Process(service.process.pid).memory_info().rss < 300e6
    for post_ in posts:
        post_.close()
