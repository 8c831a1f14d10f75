"""What a request wants of its worker: labels, a session, the start of its prompt."""

from dataclasses import replace

import orjson
import pytest

from services.router.http.request import Limits, Request
from services.router.http.wants import labels_in, want_of
from tests.router.conftest import QUICK, StartRouter, StartWorker
from tests.router.raw_client import exchange, post

FREE = Limits(max_head_bytes=100_000, max_url_bytes=10_000, max_body_bytes=0)
PREFIX = replace(QUICK, policy="prefix", prefix_chars=8)


def request(body: object, *, headers: tuple[tuple[bytes, bytes], ...] = (), whole: bool = True) -> Request:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    made = Request()
    made.target = b"/generate"
    made.headers = [(b"host", b"h"), (b"content-length", b"%d" % len(data)), *headers]
    made.judge(method=b"POST", version="1.1", keep_alive=True, upgrade=False, limits=FREE)
    made.pieces, made.size_bytes, made.whole = [data], len(data), whole
    return made


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        ({"text": "hello world"}, b"hello wo"),
        ({"prompt": "hello world"}, b"hello wo"),
        ({"text": ["hello world", "x"]}, b"hello wo"),
        ({"input_ids": list(range(20))}, b"[0,1,2,3,4,5,6,7]"),
        ({"input_ids": [list(range(20)), [1]]}, b"[0,1,2,3,4,5,6,7]"),
        ({"messages": [{"role": "user", "content": "hi"}]}, b'[{"role"'),
        ({"text": ""}, b""),
        ({"text": {"a": 1}}, b""),
        ([1, 2], b""),
        (b"not json", b""),
        (b'{"text":"\xff"}', b""),
        (b"", b""),
        (b'{"input_ids": [1, ' + b"[" * 300 + b"]" * 300 + b"]}", b""),
        (b'{"messages": [{"a": ' + b"[" * 300 + b"]" * 300 + b"}]}", b""),
    ],
)
def test_the_start_of_a_prompt(body: object, prefix: bytes) -> None:
    assert want_of(request(body), PREFIX).prefix == prefix


def test_a_body_that_is_not_at_hand_wants_nothing() -> None:
    assert want_of(request({"text": "hello"}, whole=False), PREFIX).prefix == b""


def test_a_session_by_header_or_body() -> None:
    by_header = replace(QUICK, policy="session", session_key="header:X-Session-Id")
    by_body = replace(QUICK, policy="session", session_key="body:user")
    asked = request({"user": "u1", "text": "x"}, headers=((b"x-session-id", b"s1"),))
    assert (want_of(asked, by_header).session, want_of(asked, by_body).session) == (b"s1", b"u1")
    assert want_of(request({"user": {"a": 1}}), by_body).session == b""
    assert want_of(request({}), by_header).session == b""


def test_labels_of_a_header() -> None:
    assert labels_in(b"pool=eval, zone = a,,=x") == {("pool", "eval"), ("zone", "a")}


async def test_a_labelled_request_goes_to_a_worker_that_has_the_labels_or_is_told(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router()
    plain, labelled = await start_worker(), await start_worker()
    await router.add(plain)
    said = {"url": labelled.url, "labels": {"pool": "eval"}}
    async with router.http.post(f"{router.url}/workers", json=said) as answer:
        assert answer.status == 202
    for _ in range(4):
        answered = await exchange(router.port, post(b"/generate", extra=b"X-Furlong-Labels: pool=eval\r\n"))
        assert answered.status == 200
    assert len(labelled.requests) == 4 and labelled.requests[0].header(b"x-furlong-labels") == []
    refused = await exchange(router.port, post(b"/generate", extra=b"x-furlong-labels: pool=other\r\n"))
    assert refused.status == 503 and b"pool=other" in refused.body


async def test_a_session_stays_with_its_worker(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(policy="session", bounded_load=100.0)
    workers = [await start_worker() for _ in range(3)]
    for worker in workers:
        await router.add(worker)
    for number in range(30):
        extra = b"x-session-id: %d\r\n" % (number % 5)
        assert (await exchange(router.port, post(b"/generate", extra=extra))).status == 200
    homes = [{seen.header(b"x-session-id")[0] for seen in worker.requests} for worker in workers]
    assert sum(map(len, homes)) == 5
