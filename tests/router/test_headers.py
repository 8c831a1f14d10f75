"""Which headers travel on."""

from services.router.http.headers import request_head, response_headers

SENT = [
    (b"host", b"router"),
    (b"accept", b"a"),
    (b"accept", b"b"),
    (b"connection", b"keep-alive, X-Mine"),
    (b"x-mine", b"1"),
    (b"te", b"trailers"),
    (b"transfer-encoding", b"chunked"),
    (b"content-length", b"7"),
    (b"expect", b"100-continue"),
    (b"cookie", b"c"),
]


def test_request_head_is_the_workers_own() -> None:
    head = request_head("POST", b"/a?b=%20", SENT, host=b"w:1", content_length=7, close=False)
    assert head == (
        b"POST /a?b=%20 HTTP/1.1\r\nhost: w:1\r\naccept: a\r\naccept: b\r\ncookie: c\r\ncontent-length: 7\r\n\r\n"
    )


def test_a_body_without_length_goes_in_chunks() -> None:
    head = request_head("POST", b"/", [], host=b"w", content_length=None, close=True)
    assert head == b"POST / HTTP/1.1\r\nhost: w\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"


def test_no_body_declares_nothing() -> None:
    assert b"content-length" not in request_head("GET", b"/", [], host=b"w", content_length=-1, close=False)


def test_answer_keeps_repeated_headers_and_the_length_of_encoded_bytes() -> None:
    headers = [
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"content-encoding", b"gzip"),
        (b"content-length", b"99"),
        (b"keep-alive", b"timeout=5"),
        (b"connection", b"close, x-hop"),
        (b"x-hop", b"1"),
    ]
    assert response_headers(200, headers) == headers[:4]


def test_length_is_dropped_where_it_says_nothing() -> None:
    assert response_headers(304, [(b"content-length", b"9"), (b"etag", b"e")]) == [(b"etag", b"e")]
    assert response_headers(200, [(b"content-length", b"9"), (b"transfer-encoding", b"chunked")]) == []
