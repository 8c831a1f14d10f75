"""Which headers travel on, and which heads are refused."""

import pytest

from services.router.http.headers import request_head, without_named
from services.router.http.request import KEEP_BYTES, Limits, Request

LIMITS = Limits(max_head_bytes=1000, max_url_bytes=100, max_body_bytes=50)

SENT = [
    (b"Host", b"router"),
    (b"Accept", b"a"),
    (b"accept", b"b"),
    (b"Connection", b"keep-alive, X-Mine"),
    (b"X-Mine", b"1"),
    (b"TE", b"trailers"),
    (b"Content-Length", b"7"),
    (b"Expect", b"100-continue"),
    (b"X-Furlong-Labels", b"pool=a"),
    (b"X-Request-Id", b"mine"),
    (b"Cookie", b"c"),
]


def judged(
    headers: list[tuple[bytes, bytes]], *, target: bytes = b"/a?b=%20", version: str = "1.1", limits: Limits = LIMITS
) -> Request:
    request = Request()
    request.target = target
    request.headers = list(headers)
    request.judge(method=b"POST", version=version, keep_alive=True, upgrade=False, limits=limits)
    return request


def test_request_head_is_the_workers_own() -> None:
    request = judged(SENT)
    assert request.objection is None and request.content_length == 7 and request.expects_100
    assert (request.labels, request.request_id) == (b"pool=a", b"mine")
    head = request_head("POST", request.target, request.lines, host=b"w:1", content_length=7)
    assert head == (
        b"POST /a?b=%20 HTTP/1.1\r\nhost: w:1\r\nAccept: a\r\naccept: b\r\nCookie: c\r\ncontent-length: 7\r\n\r\n"
    )


def test_a_body_without_length_goes_in_chunks() -> None:
    head = request_head("POST", b"/", [], host=b"w", content_length=None, close=True)
    assert head == b"POST / HTTP/1.1\r\nhost: w\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"


def test_no_body_declares_nothing() -> None:
    assert b"content-length" not in request_head("GET", b"/", [], host=b"w", content_length=-1)


def test_headers_that_connection_names_are_dropped() -> None:
    lines = [b"X-Hop: 1\r\n", b"x-keep: 2\r\n", b"x-hop-too: 3\r\n"]
    assert without_named(lines, [b"close, x-hop", b"Keep-Alive"]) == [b"x-keep: 2\r\n", b"x-hop-too: 3\r\n"]


HOST = (b"host", b"a")
CHUNKED = (b"transfer-encoding", b"chunked")


@pytest.mark.parametrize(
    ("headers", "target", "version", "status"),
    [
        ([], b"/", "1.1", 400),
        ([HOST, HOST], b"/", "1.1", 400),
        ([HOST], b"/flush_cache#x", "1.1", 400),
        ([HOST], b"/" + b"a" * 100, "1.1", 414),
        ([HOST], b"/", "2.0", 505),
        ([HOST, (b"transfer-encoding", b"gzip, chunked")], b"/", "1.1", 501),
        ([HOST, CHUNKED, CHUNKED], b"/", "1.1", 501),
        ([HOST, CHUNKED], b"/", "1.0", 400),
        ([HOST, (b"content-length", b"51")], b"/", "1.1", 413),
    ],
)
def test_refused_heads(headers: list[tuple[bytes, bytes]], target: bytes, version: str, status: int) -> None:
    objection = judged(headers, target=target, version=version).objection
    assert objection is not None and objection.status == status


def test_http_10_needs_no_host() -> None:
    assert judged([], version="1.0").objection is None


@pytest.mark.parametrize(
    ("target", "origin"),
    [(b"http://h:1/a?b", b"/a?b"), (b"http://h", b"/"), (b"*", b"/"), (b"/x?http://y/z", b"/x?http://y/z")],
)
def test_targets_of_forward_proxies_lose_scheme_and_host(target: bytes, origin: bytes) -> None:
    assert judged([HOST], target=target).target == origin


def test_a_small_body_is_waited_for_and_a_large_one_is_not() -> None:
    free = Limits(max_head_bytes=1000, max_url_bytes=100, max_body_bytes=0)
    small = judged([HOST, (b"content-length", b"%d" % KEEP_BYTES)], limits=free)
    large = judged([HOST, (b"content-length", b"%d" % (KEEP_BYTES + 1))], limits=free)
    chunked = judged([HOST, CHUNKED])
    assert (small.ready, large.ready, chunked.ready) == (False, True, False)
    chunked.pieces.append(b"x")
    small.whole = True
    assert chunked.ready and small.ready
