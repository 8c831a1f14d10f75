"""What comes before every address: HEAD and OPTIONS, and who may ask at all.

The service listens on loopback and has no token, so a web page in a browser on this machine could reach it. Requests
that come from another site, or under a host name that is not this machine's, are refused.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.metrics.http.errors import Problem


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, methods: "MethodTable") -> None:
        self._app, self._methods = app, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if problem := _foreign(headers):
            await problem.answer()(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            allowed = self._methods.of(scope["path"])
            answer = Response(status_code=204, headers={"Allow": ", ".join(allowed)}) if allowed else None
            await (answer or Problem(404, "Not Found", "GET /docs lists the addresses.").answer())(scope, receive, send)
        elif scope["method"] == "HEAD":
            await _head(self._app, {**scope, "method": "GET"}, receive, send)
        else:
            await self._app(scope, receive, send)


class MethodTable:
    """Which methods an address takes; filled once the routes are there."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}

    def add(self, path: str, methods: Iterable[str]) -> None:
        self._known.setdefault(path, set()).update(methods)

    def of(self, path: str) -> list[str]:
        """In alphabetical order; none for an unknown address."""
        methods = self._known.get(path) or next(
            (known for pattern, known in self._known.items() if _matches(pattern, path)), None
        )
        if methods is None:
            return []
        return sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])})


def _matches(pattern: str, path: str) -> bool:
    ours, theirs = pattern.split("/"), path.split("/")
    return len(ours) == len(theirs) and all(a == b or a.startswith("{") for a, b in zip(ours, theirs, strict=True))


async def _head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to GET without its body; one that would go on for ever ends at once."""
    begun = False

    async def first_only(message: Message) -> None:
        nonlocal begun
        if message["type"] == "http.response.start" and not begun:
            begun = True
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def gone() -> Message:
        return {"type": "http.disconnect"} if begun else await receive()

    await app(scope, gone, first_only)


def _foreign(headers: Headers) -> Problem | None:
    host = headers.get("host", "")
    if host and not _is_ours(host):
        return Problem(403, f"the host {host[:100]!r} is not this machine's loopback", "Use http://127.0.0.1:PORT.")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return Problem(403, f"requests from {origin[:100]!r} are not taken", "Ask from a program, not from a page.")
    return None


def _is_ours(host: str) -> bool:
    """Names cannot be trusted, as a page's own name may be made to lead here; addresses and localhost can."""
    name = urlsplit(f"//{host}").hostname if not host.startswith("//") else None
    if name is None:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
