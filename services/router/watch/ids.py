"""Ids of requests, taken from the client or made here, and the trace that a request belongs to. Pure but for a counter.

Never changes a header: traceparent and tracestate travel on as they came, whatever is wrong with them.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator

TRACEPARENT = b"traceparent"
MAX_REQUEST_ID_BYTES = 128

_fits = re.compile(rb"[!-~]{1,%d}\Z" % MAX_REQUEST_ID_BYTES).match
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z", re.DOTALL)


class _Maker:
    """Ids of this process: a random beginning, and a number that counts up."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Another beginning, for a forked child."""
        self.prefix = os.urandom(8).hex().encode()
        self.numbers: Iterator[int] = itertools.count(1)


_maker = _Maker()
os.register_at_fork(after_in_child=_maker.renew)


def new_request_id() -> bytes:
    """An id that no other request has: 16 random hexadecimal digits of this process, and a number."""
    return b"%b-%x" % (_maker.prefix, next(_maker.numbers))


def is_request_id(value: bytes) -> bool:
    """Whether a client's id is taken: 1 to 128 visible ASCII characters, so that it can stand in a line or a header."""
    return _fits(value) is not None


def trace_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The trace id (32 hexadecimal digits) of the W3C trace context; empty when there is none, or none that is valid.

    A context that stands there twice says nothing. Header names are lower case.
    """
    found = [value for name, value in headers if name == TRACEPARENT]
    return parse_trace_id(found[0]) if len(found) == 1 else ""


def parse_trace_id(traceparent: bytes) -> str:
    """The trace id in the value of a traceparent header; empty when it is not valid.

    As W3C Trace Context (section 3.2) has it: version ff is void, version 00 has exactly four fields, later versions
    may have more; ids of nothing but zeros are void.
    """
    match = _TRACEPARENT.match(traceparent)
    if match is None:
        return ""
    version, trace_id, parent_id, _, more = match.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not parent_id.strip(b"0"):
        return ""
    return trace_id.decode()
