"""The door: tells the paths of a request apart and hands it to the control surface, the pass-through, or a refusal.

A raw ASGI callable, so that what is passed on costs nothing of a web framework.
"""

import orjson

from services.router.http.answers import answer_error, answer_json, answer_unavailable
from services.router.http.asgi import App, BodyTooLarge, ClientLeft, ClientRequest, Receive, Scope, Send
from services.router.http.headers import first_value
from services.router.http.paths import PathKind, kind_of
from services.router.router import Router

ADMIN_REMEDY = "weights, memory, profiles and pauses are set on each engine directly, by the rollout service"


class Front:
    """The ASGI application of the HTTP server."""

    def __init__(self, router: Router, control: App) -> None:
        self._router = router
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["extensions"]["furlong.head_too_large"]:
            message = f"request line and headers must have at most {self._router.settings.max_head_bytes} bytes"
            await answer_error(send, 431, "head_too_large", message, headers=[(b"connection", b"close")])
            return
        kind = kind_of(scope["path"])
        if kind is PathKind.PASS:
            await self._router.proxy(scope, receive, send)
        elif kind is PathKind.CONTROL:
            await self._call_control(scope, receive, send)
        elif kind is PathKind.READINESS:
            await answer_readiness(self._router, send)
        elif kind is PathKind.ABORT:
            await self._abort(ClientRequest(scope, receive), send)
        else:
            message = f"{scope['path'][:200]} is an admin path of the engines, which the router refuses: {ADMIN_REMEDY}"
            await answer_error(send, 403, "admin_path_refused", message)

    async def _call_control(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD") and first_value(scope["headers"], b"origin") is not None:
            message = "a web page (Origin header) may not change the router"
            await answer_error(send, 403, "origin_refused", message)
            return
        await self._control(scope, receive, send)

    async def _abort(self, request: ClientRequest, send: Send) -> None:
        """Abort one request by its rid. To end all of them is an admin's matter."""
        try:
            await request.begin()
            body = await request.small_body(max_bytes=self._router.settings.max_control_body_bytes)
            asked = orjson.loads(body)
        except ClientLeft:
            return
        except (BodyTooLarge, orjson.JSONDecodeError) as error:
            await answer_error(send, 400, "bad_request", f"{error}. Example: {{'rid': 'my-request'}}")
            return
        if request.method != "POST":
            await answer_error(send, 405, "bad_request", "use POST", headers=[(b"allow", b"POST")])
        elif isinstance(asked, dict) and asked.get("abort_all"):
            await answer_error(send, 403, "admin_path_refused", f"abort_all is refused: {ADMIN_REMEDY}; abort by rid")
        elif not isinstance(asked, dict) or not isinstance(asked.get("rid"), str) or not asked["rid"]:
            await answer_error(send, 400, "bad_request", "rid must name the request to abort")
        else:
            answers = await self._router.abort(orjson.dumps({"rid": asked["rid"]}))
            done = any(isinstance(status, int) and status < 300 for status in answers.values())
            await answer_json(send, 200 if done else 502, {"rid": asked["rid"], "workers": answers})


async def answer_readiness(router: Router, send: Send) -> None:
    """200 when a worker takes requests, else 503."""
    num_ready = router.workers.num_ready()
    if num_ready:
        await answer_json(send, 200, {"status": "ready", "num_ready_workers": num_ready})
    else:
        await answer_unavailable(send, "no_ready_worker", "no worker is ready", router.settings)
