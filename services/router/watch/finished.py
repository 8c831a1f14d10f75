"""What is read of a request that is over. The http part's Passage has these attributes."""

from collections.abc import Sequence
from typing import Protocol

CLIENT_LEFT = "client_left"
"""The kind of error of a request whose client went away: nobody's failure."""
WORKER_STATUS = "worker_status"
"""The kind that a request is counted under whose worker answered 5xx: the client got that answer as it came."""


class WorkerUrl(Protocol):
    """Its text is the worker's address."""

    def __str__(self) -> str: ...


class HasUrl(Protocol):
    """A worker; hashed by identity."""

    @property
    def url(self) -> WorkerUrl: ...


class Finished(Protocol):
    """Times are of one monotonic clock, in seconds; 0.0: not reached."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str:
        """Without query."""
        ...

    @property
    def path_class(self) -> str: ...
    @property
    def status(self) -> int:
        """0: no head of an answer was sent."""
        ...

    @property
    def worker(self) -> HasUrl | None:
        """The last one that was tried."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The request's; read only for a line in the log."""
        ...

    @property
    def request_id(self) -> bytes: ...
    @property
    def bytes_in(self) -> int:
        """Of the request's body."""
        ...

    @property
    def bytes_out(self) -> int:
        """Of the answer's body."""
        ...

    @property
    def started(self) -> float:
        """Its head was read."""
        ...

    @property
    def sent(self) -> float:
        """Its sending to the last worker began."""
        ...

    @property
    def first_byte(self) -> float:
        """The first byte of the answer came from the worker."""
        ...

    @property
    def ended(self) -> float: ...
    @property
    def queued_s(self) -> float:
        """Its wait for a worker."""
        ...

    @property
    def num_tries(self) -> int: ...
    @property
    def error(self) -> str:
        """A word for what went wrong: any error that the router itself answered, or a broken answer. Empty: nothing."""
        ...

    @property
    def error_message(self) -> str: ...
    @property
    def client(self) -> str: ...
