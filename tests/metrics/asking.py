"""Asks a metrics service over HTTP, as curl would."""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


def request(
    http_base: str, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and body."""
    address = urlsplit(http_base)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def get(http_base: str, path: str) -> Any:  # Any: JSON
    """The answer's JSON; it must be a success."""
    status, _, body = request(http_base, "GET", path)
    assert status == 200, body
    return json.loads(body)


def refusal(http_base: str, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a question that is refused; it says what is wrong and what to do."""
    status, _, body = request(http_base, "GET", path)
    said = json.loads(body)
    assert status >= 400 and said["error"] and said["remedy"], body
    return status, said


def post(http_base: str, body: bytes, path: str = "/v1/records", **headers: str) -> dict[str, Any]:
    """Post records; the answer, with its status under "status"."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, said = request(http_base, "POST", path, body, named)
    return {"status": status, **json.loads(said)}
