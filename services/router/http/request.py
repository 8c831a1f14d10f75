"""A client's request: its head, judged, and what came of its body. Pure.

Owns which shapes of requests are refused: all that two readers could understand differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from services.router.http.headers import (
    LABELS,
    NAMED_WORKER,
    NOT_TO_WORKER,
    PLAIN_CONNECTION,
    REQUEST_ID,
    without_named,
)
from services.router.http.paths import PathKind, kind_of
from services.router.watch.path_classes import ADMIN, path_class_of

KEEP_BYTES = 256 * 1024
"""A body up to this size is taken whole before the request goes anywhere: it can then be sent again."""
MAX_CACHED_PATH_BYTES = 256
IDEMPOTENT = frozenset(("GET", "HEAD"))


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a request is refused."""

    status: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may have."""

    max_head_bytes: int
    max_url_bytes: int
    max_body_bytes: int
    """0: no limit."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a target asks for."""

    path: str
    """Decoded, without query."""
    kind: PathKind
    path_class: str


class Request:
    """One request. Made when its first byte came; `judge` once its head is there."""

    __slots__ = (
        "authorized",
        "connection",
        "content_length",
        "expects_100",
        "headers",
        "http_10",
        "keep_alive",
        "labels",
        "lines",
        "method",
        "named_worker",
        "objection",
        "pieces",
        "place",
        "request_id",
        "size_bytes",
        "target",
        "whole",
    )

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        """As sent, byte for byte; after `judge` without the scheme and host that clients of forward proxies send."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.lines: list[bytes] = []
        """The headers that travel on, as lines."""
        self.connection: list[bytes] | None = None
        self.place = NOWHERE
        self.http_10 = False
        self.keep_alive = False
        self.content_length: int | None = None
        """None: the body comes in chunks. -1: there is none and none was declared."""
        self.expects_100 = False
        self.authorized = False
        """It has an Authorization header, or several."""
        self.request_id: bytes | None = None
        self.labels: bytes | None = None
        self.named_worker: bytes | None = None
        self.objection: Objection | None = None
        self.pieces: list[bytes] = []
        """What came of the body and was not taken yet."""
        self.size_bytes = 0
        """What came of the body."""
        self.whole = False
        """Whether all of it came."""

    @property
    def ready(self) -> bool:
        """Whether it can go its way: whole, or too large to wait for."""
        if self.whole or self.objection is not None:
            return True
        return bool(self.pieces) if self.content_length is None else self.content_length > KEEP_BYTES

    @property
    def idempotent(self) -> bool:
        """Whether running it twice is the same as once."""
        return self.method in IDEMPOTENT

    @property
    def body(self) -> bytes:
        """What came of the body and was not taken yet, in one piece."""
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return self.pieces[0] if self.pieces else b""

    def take_body(self) -> bytes:
        """The same, which is then no longer kept."""
        body = self.body
        self.pieces = []
        return body

    def judge(self, *, method: bytes, version: str, keep_alive: bool, upgrade: bool, limits: Limits) -> None:
        """Sort the head. Sets `objection` if it is refused."""
        self.method = method.decode("ascii")
        self.http_10 = version == "1.0"
        self.keep_alive = keep_alive and not self.http_10
        num_hosts = 0
        codings: list[bytes] | None = None
        length: bytes | None = None
        lines = self.lines
        headers = self.headers
        for number, (name, value) in enumerate(headers):
            low = name.lower()
            if low not in NOT_TO_WORKER:
                lines.append(b"%b: %b\r\n" % (name, value))
                if low == b"authorization":
                    self.authorized = True
            elif low == b"host":
                num_hosts += 1
            elif low == b"content-length":
                length = value
            elif low == b"transfer-encoding":
                codings = [*(codings or ()), value]
            elif low == b"connection":
                if value.lower() not in PLAIN_CONNECTION:
                    self.connection = [*(self.connection or ()), value]
            elif low == REQUEST_ID:
                self.request_id = value
            elif low == b"expect":
                self.expects_100 = value.lower() == b"100-continue" and not self.http_10
            elif low == LABELS:
                self.labels = value
            elif low == NAMED_WORKER:
                self.named_worker = value
            headers[number] = (low, value)
        if length is not None:
            self.content_length = int(length)
        elif codings is None:
            self.content_length = -1
        if self.connection is not None:
            self.lines = without_named(lines, self.connection)
        target = self.target
        if target[:1] != b"/":
            self.target = target = origin_form(target)
        path = target.partition(b"?")[0]
        self.place = place_of(path) if len(path) <= MAX_CACHED_PATH_BYTES else place_of.__wrapped__(path)
        if version not in ("1.1", "1.0"):
            self.objection = Objection(505, "http_version", f"HTTP/{version} is not spoken here: use HTTP/1.1")
        elif upgrade:
            message = "the router carries plain HTTP/1.1: leave the Upgrade header out"
            self.objection = Objection(501, "upgrade_refused", message)
        elif len(target) > limits.max_url_bytes or codings is not None or num_hosts != 1 or b"#" in target:
            self._look_closer(codings, num_hosts, limits)
        elif limits.max_body_bytes and (self.content_length or 0) > limits.max_body_bytes:
            self.objection = body_too_large(limits.max_body_bytes)

    def _look_closer(self, codings: Sequence[bytes] | None, num_hosts: int, limits: Limits) -> None:
        if len(self.target) > limits.max_url_bytes:
            message = f"the request target must have at most {limits.max_url_bytes} bytes"
            self.objection = Objection(414, "url_too_large", message)
        elif b"#" in self.target:
            self.objection = Objection(400, "bad_request", "the request target must have no fragment (#)")
        elif num_hosts > 1 or (num_hosts == 0 and not self.http_10):
            self.objection = Objection(400, "bad_request", f"one Host header is needed, got {num_hosts}")
        elif codings is not None and self.http_10:
            self.objection = Objection(400, "bad_request", "HTTP/1.0 knows no transfer-encoding")
        elif codings is not None and [coding.strip().lower() for coding in codings] != [b"chunked"]:
            self.objection = Objection(501, "transfer_encoding", "the only transfer-encoding known here is chunked")


@lru_cache(maxsize=1024)
def place_of(raw_path: bytes) -> Place:
    """Where a path leads. raw_path: as sent, without query."""
    path = unquote(raw_path.decode("latin-1"))
    kind = kind_of(path)
    return Place(path, kind, ADMIN if kind is PathKind.ADMIN else path_class_of(path))


NOWHERE = Place("", PathKind.CONTROL, "other")


def origin_form(target: bytes) -> bytes:
    """PATH?QUERY of a request target, which a client of a forward proxy sends with scheme and host before it."""
    if target.startswith(b"/"):
        return target
    _, found, rest = target.partition(b"://")
    slash = rest.find(b"/")
    return rest[slash:] if found and slash >= 0 else b"/"


def body_too_large(max_bytes: int) -> Objection:
    """The objection to a body of more than so many bytes."""
    return Objection(413, "body_too_large", f"the body must have at most {max_bytes} bytes")
