"""Request ids and trace ids, taken from whatever a client sends."""

import multiprocessing
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.watch.ids import is_request_id, new_request_id, parse_trace_id, trace_id_of

TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize("given_id", [b"a", b"req-7/x:9", b"~" * 128])
def test_fit_id_of_the_client_is_taken(given_id: bytes) -> None:
    assert is_request_id(given_id)


@pytest.mark.parametrize("given_id", [b"", b"a b", b"a" * 129, b"a\nb", b"a\n", b"\xc3\xa9", b"a\x00", b"\t"])
def test_unfit_id_is_not(given_id: bytes) -> None:
    assert not is_request_id(given_id)


def test_made_ids_are_fit_and_differ() -> None:
    made = [new_request_id() for _ in range(1000)]
    assert all(map(is_request_id, made))
    assert len(set(made)) == 1000 and all(re.fullmatch(rb"[0-9a-f]{16}-[0-9a-f]+", one) for one in made)


def test_forked_child_makes_ids_of_its_own() -> None:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sending.send(new_request_id()))
    child.start()
    assert receiving.poll(10)
    assert receiving.recv()[:16] != new_request_id()[:16]
    child.join(10)


def test_trace_id_is_read() -> None:
    assert trace_id_of([(b"traceparent", TRACE)]) == TRACE_ID
    assert parse_trace_id(b"01" + TRACE[2:] + b"-more") == TRACE_ID


@pytest.mark.parametrize(
    "traceparent",
    [
        b"",
        TRACE.upper(),
        TRACE + b"-more",
        b"ff" + TRACE[2:],
        b"01" + TRACE[2:] + b"more",
        b"00-" + b"0" * 32 + TRACE[35:],
        TRACE[:36] + b"0" * 16 + b"-01",
        TRACE + b"\n",
        b" " + TRACE,
    ],
)
def test_void_trace_context_has_no_trace_id(traceparent: bytes) -> None:
    assert parse_trace_id(traceparent) == ""


def test_trace_context_that_stands_twice_has_no_trace_id() -> None:
    assert trace_id_of([(b"traceparent", TRACE), (b"traceparent", TRACE)]) == ""


@given(st.binary(max_size=200))
def test_any_bytes_are_told_apart(value: bytes) -> None:
    assert is_request_id(value) == (0 < len(value) <= 128 and all(0x21 <= byte <= 0x7E for byte in value))
    assert parse_trace_id(value) == "" or re.fullmatch("[0-9a-f]{32}", parse_trace_id(value))
