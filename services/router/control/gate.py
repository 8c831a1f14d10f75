"""Before every control call: who may make it, and the one spelling of its path. An ASGI middleware; knows no route."""

from services.router.control.token import Token
from services.router.http.answers import answer_error
from services.router.http.asgi import App, Receive, Scope, Send
from services.router.http.calls import CALLER, IN_A_CIRCLE
from services.router.http.headers import first_value
from services.router.http.paths import (
    ABORT,
    FAN_OUT,
    NEED_NO_TOKEN,
    OWN,
    OWN_FOLDERS,
    READINESS,
    PathKind,
    kind_of,
    plain_path,
)

READS = ("GET", "HEAD")
FLUSH = "/flush_cache"
SELF = "this router sent the request itself: its own address is registered as a worker. GET /workers, and take it out"
CHALLENGE = [(b"www-authenticate", b'Bearer realm="furlong-router"')]
NEED_TOKEN = "send the router's token as `Authorization: Bearer TOKEN`; it stands in the file of --router-token-file"
NO_TOKEN_SET = (
    "is an admin path of the engines, which this router refuses: with --router-token-file it is for those who have the "
    "token. The rollout service makes such calls on each engine directly"
)


class Gate:
    """Lets a request through to the control surface, or answers it."""

    def __init__(self, app: App, token: Token, identity: bytes) -> None:
        self._app = app
        self._identity = identity
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        plain = plain_path(path)
        admin = kind_of(path) is PathKind.ADMIN
        if path.startswith(OWN_FOLDERS):
            plain = path  # as the routes read it, of which an id or an address may be anything
        elif plain in OWN or plain in READINESS or plain in FAN_OUT:
            scope["path"] = plain
            scope["raw_path"] = plain.encode()
        if first_value(scope["headers"], CALLER) == self._identity:
            await answer_error(send, IN_A_CIRCLE, "circle", SELF)
        elif _from_a_web_page(scope, admin or plain == FLUSH) and plain != ABORT:
            await answer_error(send, 403, "origin_refused", "a web page (Origin header) may not change the router")
        elif admin and not self._token.needed:
            await answer_error(send, 403, "admin_path_refused", f"{path[:200]} {NO_TOKEN_SET}")
        elif (admin or plain not in NEED_NO_TOKEN) and not self._token.allows(scope["headers"]):
            await answer_error(send, 401, "unauthorized", NEED_TOKEN, headers=CHALLENGE)
        elif admin and plain.encode() != scope["raw_path"]:
            await answer_error(send, 400, "bad_request", f"spell the path of an admin call plainly: {plain[:200]}")
        else:
            await self._app(scope, receive, send)


def _from_a_web_page(scope: Scope, reads_change: bool) -> bool:
    """Whether a browser sent it for a page, and it could change something. reads_change: even a GET does."""
    if scope["method"] not in READS:
        return first_value(scope["headers"], b"origin") is not None
    site = first_value(scope["headers"], b"sec-fetch-site")
    return reads_change and site is not None and site != b"none"
