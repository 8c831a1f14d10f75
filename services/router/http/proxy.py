"""What all passages share: workers, limits, and the connections to workers.

Never parses or changes a body; how one request travels stands in `passage.py`.
"""

from typing import Protocol

from services.router.http.connections import Connections
from services.router.http.exchange import NoObserver, Observer
from services.router.http.paths import lends_key
from services.router.http.request import Request
from services.router.http.wants import want_of
from services.router.settings import RouterSettings
from services.router.workers.workers import ANY, Want, Worker, Workers


class IsToken(Protocol):
    """Knows the router's token."""

    def is_within(self, authorization: bytes, /) -> bool:
        """Whether the value of an Authorization header has the token in it."""


class Proxy:
    """Keeps the connections to workers."""

    def __init__(
        self,
        workers: Workers,
        settings: RouterSettings,
        observer: Observer | None = None,
        token: IsToken | None = None,
    ) -> None:
        self.workers = workers
        self.settings = settings
        self.observer: Observer = observer if observer is not None else NoObserver()
        self._token = token
        self._by_affinity = settings.policy in ("session", "prefix")
        self._connections: dict[Worker, Connections] = {}

    def want_of(self, request: Request) -> Want:
        """What a request wants of its worker."""
        if request.labels is None and not self._by_affinity:
            return ANY
        return want_of(request, self.settings)

    def lines_for(self, worker: Worker, request: Request) -> list[bytes]:
        """The headers that go on to a worker, as lines: its own key instead of the client's, never the router's."""
        key = worker.api_key
        if key is not None and not lends_key(request.place.path):
            key = None
        if key is None and not (request.authorized and self._holds_token(request)):
            return [*request.lines]
        lines = [line for line in request.lines if line[:14].lower() != b"authorization:"]
        if key is not None:
            lines.append(b"authorization: Bearer %b\r\n" % key.encode("latin-1", "replace"))
        return lines

    def _holds_token(self, request: Request) -> bool:
        token = self._token
        values = (value for name, value in request.headers if name == b"authorization")
        return token is not None and any(token.is_within(value) for value in values)

    def connections_to(self, worker: Worker) -> Connections:
        """The connections of one worker."""
        found = self._connections.get(worker)
        if found is None:
            limits = self.settings
            found = Connections(
                worker.url,
                connect_timeout_s=limits.connect_timeout_s,
                idle_s=limits.idle_connection_s,
                worker_ca=limits.worker_ca,
            )
            if not worker.removed:
                self._connections[worker] = found
        return found

    def forget(self, worker: Worker) -> None:
        """Close a removed worker's unused connections; those in use end with their requests."""
        if (connections := self._connections.pop(worker, None)) is not None:
            connections.close()

    def drop_old_connections(self) -> None:
        """Close connections that were unused for too long."""
        for connections in self._connections.values():
            connections.drop_old()

    def close(self) -> None:
        """Close all unused connections."""
        for connections in self._connections.values():
            connections.close()
