"""The pass-through as an ASGI callable: for all paths that are not the router's own. Keeps the connections to workers.

Never parses or changes a body; how one request travels stands in `passage.py`.
"""

import asyncio
from weakref import WeakKeyDictionary

from services.router.http.answers import answer_error
from services.router.http.asgi import ClientLeft, ClientRequest, Receive, Scope, Send
from services.router.http.connections import Connections
from services.router.http.passage import Passage
from services.router.settings import RouterSettings
from services.router.workers.workers import Worker, Workers


class Proxy:
    """Carries each request to a worker."""

    def __init__(self, workers: Workers, settings: RouterSettings) -> None:
        self._workers = workers
        self._settings = settings
        self._connections: WeakKeyDictionary[Worker, Connections] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ClientRequest(scope, receive)
        if request.wants_upgrade:
            message = "the router carries plain HTTP/1.1: leave the Upgrade header out"
            await answer_error(send, 501, "upgrade_refused", message, headers=[(b"connection", b"close")])
            return
        passage = Passage(self._workers, self._settings, self._connections_to, request, send)
        try:
            await request.begin()
            await passage.run()
        except ClientLeft:
            return
        except asyncio.CancelledError:
            if not passage.client_left:  # the router's time to drain is over
                await passage.cut_short()

    def forget(self, worker: Worker) -> None:
        """Close a removed worker's unused connections; those in use end with their requests."""
        self._connections_to(worker).close()

    def drop_old_connections(self) -> None:
        """Close connections that were unused for too long."""
        for connections in list(self._connections.values()):
            connections.drop_old()

    def close(self) -> None:
        """Close all unused connections."""
        for connections in list(self._connections.values()):
            connections.close()

    def _connections_to(self, worker: Worker) -> Connections:
        found = self._connections.get(worker)
        if found is None:
            limits = self._settings
            found = Connections(worker.url, connect_timeout_s=limits.connect_timeout_s, idle_s=limits.idle_connection_s)
            self._connections[worker] = found
        return found
