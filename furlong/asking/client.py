"""Asks a metrics service over HTTP. Standard library only: the command line starts fast.

Every call has a limit. Proxies are not used, as between all services.
"""

import http.client
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

CONNECT_S = 5.0
ANSWER_S = 30.0
SILENCE_S = 40.0
"""A live stream says something every 15 s."""
MAX_LINE_BYTES = 16 * 1024 * 1024

Params = Mapping[str, str | int | bool | Sequence[str] | None]


class Unreachable(Exception):
    """The service does not answer."""


class Refused(Exception):
    """The service answered that it cannot."""

    def __init__(self, error: str, remedy: str, *, close: Sequence[str] = ()) -> None:
        super().__init__(error)
        self.error, self.remedy, self.close = error, remedy, list(close)


@dataclass(frozen=True)
class LiveEvent:
    """One server-sent event."""

    name: str
    place: str
    """Empty: it has none."""
    data: bytes


class MetricsClient:
    """One service. Raises Unreachable and Refused."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for what is no address."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError("must be http://HOST:PORT")
        self.url = f"http://{parts.netloc}"
        self._host, self._port = parts.hostname, parts.port or 80

    def get(self, path: str, params: Params | None = None) -> Any:  # Any: JSON
        """An answer, whole."""
        connection = self._connect(ANSWER_S)
        try:
            return orjson.loads(self._answer(connection, path, params or {}, {}).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{self.url} does not answer: {error}") from error
        finally:
            connection.close()

    def send(self, method: str, path: str, params: Params | None = None, body: object = None) -> Any:  # Any: JSON
        """Ask for a change: POST or DELETE; the answer, None when it is empty. Not tried again."""
        connection = self._connect(ANSWER_S)
        content = None if body is None else orjson.dumps(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            said = self._answer(connection, path, params or {}, headers, method=method, body=content).read()
            return orjson.loads(said) if said else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{self.url} does not answer: {error}") from error
        finally:
            connection.close()

    def live(self, params: Params, place: str | None) -> Iterator[LiveEvent]:
        """What comes, from a place on. Raises Unreachable when the stream ends, whatever ended it."""
        connection = self._connect(SILENCE_S)
        try:
            headers = {"Last-Event-ID": place} if place else {}
            answer = self._answer(connection, "/api/live", params, headers)
            name, at, data = "", "", b""
            while line := answer.readline(MAX_LINE_BYTES):
                field, _, value = line.rstrip(b"\r\n").partition(b": ")
                if field == b"event":
                    name = value.decode()
                elif field == b"id":
                    at = value.decode()
                elif field == b"data":
                    data = value
                elif not field and name:
                    yield LiveEvent(name, at, data)
                    name, at, data = "", "", b""
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url} went away: {error}") from error
        finally:
            connection.close()
        raise Unreachable(f"{self.url} ended the stream")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
        except OSError as error:
            raise Unreachable(f"{self.url} cannot be reached: {error.strerror or error}") from error
        connection.sock.settimeout(timeout_s)
        return connection

    def _answer(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        params: Params,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        body: bytes | None = None,
    ) -> http.client.HTTPResponse:
        given = {key: str(value).lower() if isinstance(value, bool) else value for key, value in params.items()}
        query = urlencode({key: value for key, value in given.items() if value is not None}, doseq=True)
        connection.request(method, f"{path}?{query}" if query else path, body=body, headers=dict(headers))
        answer = connection.getresponse()
        if 200 <= answer.status < 300:
            return answer
        try:
            said = orjson.loads(answer.read())
            refused = Refused(said["error"], said["remedy"], close=said.get("close", ()))
        except (ValueError, KeyError, TypeError):
            raise Unreachable(f"{self.url}{path} answered {answer.status}; is it a metrics service?") from None
        if answer.status == 503:
            raise Unreachable(f"{self.url}: {refused.error}")
        raise refused
