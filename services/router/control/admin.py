"""Engines' admin paths through the router: to the worker that the header x-furlong-worker names, or to every worker.

One worker's answer comes back as it is. Of many: {"workers": {URL: {"status", "body"}}}, 200 when each succeeded. Who
may ask is the gate's matter; the router's token goes to no worker. The paths are the engines', so OpenAPI has none.
"""

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from services.router.control.bodies import read_body
from services.router.control.fan_out import FanOut, Headers, Told
from services.router.control.joins import tree_of
from services.router.control.refusals import Refusal, unavailable
from services.router.http.asgi import Receive, Scope, Send
from services.router.http.headers import first_value
from services.router.http.paths import PathKind, kind_of
from services.router.router import Router
from services.router.workers.worker import Worker

CHOICE = b"x-furlong-worker"
WITH_BODY = ("POST", "PUT", "PATCH")
PASSED = (b"content-type", b"accept", b"x-request-id", b"traceparent", b"tracestate")


class AdminCalls:
    """The ASGI application for paths that are none of the router's own."""

    def __init__(self, router: Router, fan_out: FanOut) -> None:
        self._router = router
        self._fan_out = fan_out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path: str = request.scope["path"]
        if kind_of(path) is not PathKind.ADMIN:
            raise Refusal(404, "not_found", f"the router has no path {path[:200]}")
        headers = request.scope["headers"]
        name = first_value(headers, CHOICE)
        workers = _chosen(self._router, name)
        body = await read_body(request, self._router.settings.max_control_body_bytes)
        query = request.scope["query_string"].decode("latin-1")
        said = await self._fan_out.change(
            workers,
            request.method,
            f"{path}?{query}" if query else path,
            timeout_s=self._router.settings.first_byte_timeout_s,
            body=body if body or request.method in WITH_BODY else None,
            headers=[(key, value) for key, value in headers if key in PASSED],
        )
        return _of_one(said[0]) if name is not None else _of_many(said)


def _chosen(router: Router, name: bytes | None) -> list[Worker]:
    if name is None:
        workers = router.workers.everyone()
        if not workers:
            raise unavailable(router.settings, "no_ready_worker", "no worker is registered")
        return workers
    worker = router.workers.find(name.decode("latin-1"))
    if worker is None:
        raise Refusal(404, "unknown_worker", f"{CHOICE.decode()} names no worker: its id or address is wanted")
    return [worker]


def _of_one(told: Told) -> Response:
    if told.answer is None:
        raise Refusal(502, "worker_failed", told.error)
    headers: Headers = told.answer.headers
    kind = first_value(headers, b"content-type")
    sent = {"content-type": kind.decode("latin-1")} if kind else None
    return Response(told.answer.body, told.answer.status, sent)


def _of_many(said: list[Told]) -> Response:
    content = {told.url: {"status": told.status, "body": _readable(told)} for told in said}
    failed = [told.url for told in said if not told.good]
    if failed:
        message = f"{len(failed)} of {len(said)} workers failed"
        raise Refusal(502, "workers_failed", message, more={"workers": content})
    return JSONResponse({"workers": content})


def _readable(told: Told) -> Any:  # Any: JSON's own open tree
    if told.answer is None:
        return told.error
    try:
        return tree_of(told.answer.body)
    except ValueError:
        return told.answer.body.decode("utf-8", "replace")
