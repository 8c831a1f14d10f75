"""Whatever is sent over HTTP, the answer is JSON that says what it is, and the service lives on."""

import json
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.metrics.asking import get, request
from tests.metrics.running import MetricsProcess

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(max_size=30)
VALUES = st.one_of(
    TEXT, st.integers(-(2**70), 2**70).map(str), st.sampled_from(["", "0", "1", "true", "NaN", "1e5", "None"])
)
NAMES = ("run", "axis", "key", "attempt", "last", "after", "before", "level", "service", "instance", "rollout_id")
NAMES += ("text", "firing", "max_points")
PATHS = ("runs", "rows", "series", "points", "logs", "alerts", "status", "place", "nothing")
HEADERS = ("X-Furlong-Producer", "X-Furlong-Incarnation", "X-Furlong-Sequence", "X-Furlong-Run", "Content-Type")
HEADER_TEXT = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=20)
SCALAR = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT
TREE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
METRICS = st.fixed_dictionaries(
    {"event": st.just("metrics"), "values": st.dictionaries(TEXT, TREE, max_size=3) | TREE},
    optional={
        "axis": st.sampled_from(["train/step", "x", "a/b", "", "é", "a//b"]) | TREE,
        "step": st.integers(-3, 2**70) | TREE,
        "attempt": TREE,
        "part": TREE,
        "parts": TREE,
        "run": st.sampled_from(["fuzz", "a/b"]) | TREE,
        "ts": TREE,
        "level": TREE,
    },
)


@pytest.fixture(scope="module", autouse=True)
def lives_on(service: MetricsProcess) -> Iterator[None]:
    """After everything, it still takes and answers."""
    yield
    status, _, body = request(service.http, "POST", "/v1/records?run=after", b'{"event":"still here"}')
    assert status == 200 and json.loads(body)["taken"] == 1
    assert get(service.http, "/readyz")["status"] == "ready"
    assert b"Traceback" not in (service.run_dir.root / "stderr").read_bytes()
    assert b"http_request_failed" not in service.run_dir.log("metrics").read_bytes()


def check(status: int, body: bytes) -> Any:
    tree = json.loads(body)
    assert status < 500, body
    assert status == 200 or (tree["error"] and tree["remedy"])
    assert b"Traceback" not in body
    return tree


@given(path=st.sampled_from(PATHS), params=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=5))
@FUZZ
def test_any_question_is_answered_or_refused(service: MetricsProcess, path: str, params: list[tuple[str, str]]) -> None:
    query = urlencode([(name, value.encode("utf-8", "replace")) for name, value in params])
    status, _, answer = request(service.http, "GET", f"/api/{path}?{query}")
    check(status, answer)


@given(body=st.binary(max_size=300), encoding=st.sampled_from(["", "gzip", "deflate", "br", "GZIP ", "x"]))
@FUZZ
def test_any_bytes_are_taken_or_refused(service: MetricsProcess, body: bytes, encoding: str) -> None:
    headers = {"Content-Encoding": encoding} if encoding else {}
    status, _, answer = request(service.http, "POST", "/v1/records?run=fuzz", body, headers)
    check(status, answer)


@given(records=st.lists(METRICS | TREE, max_size=4), packed=st.booleans())
@FUZZ
def test_any_json_is_counted_to_the_last_record(service: MetricsProcess, records: list[object], packed: bool) -> None:
    body = json.dumps(records).encode()
    headers = {"Content-Encoding": "deflate"} if packed else {}
    status, _, said = request(
        service.http, "POST", "/v1/records?run=fuzz", zlib.compress(body) if packed else body, headers
    )
    tree = check(status, said)
    assert tree["taken"] + tree["num_refused"] + tree["skipped_known"] == len(records)


@given(headers=st.dictionaries(st.sampled_from(HEADERS), HEADER_TEXT))
@FUZZ
def test_any_headers_are_taken_or_refused(service: MetricsProcess, headers: dict[str, str]) -> None:
    named = {name: value.encode("latin-1").strip() for name, value in headers.items()}
    status, _, body = request(service.http, "POST", "/v1/records", b'{"event":"a"}', named)  # type: ignore[arg-type]
    if body.startswith(b"{"):  # else the HTTP parser itself refused a control character
        check(status, body)
    assert status < 500
