"""The control surface over HTTP: workers in and out, and how the router is. The only file that imports FastAPI.

    POST   /workers {"url": ...}          register; registering again starts the worker's registration anew
    GET    /workers, /workers/ID          what is registered
    DELETE /workers/ID or /workers/URL    take out (the URL with its characters escaped or not)
    POST   /add_worker, /remove_worker    the same with url in the query or the body, as sgl-router before 0.2.2 has it
    GET    /list_workers                  {"urls": [...]}
    GET    /healthz, /readyz              the process answers; a worker takes requests
    GET    /router/metrics                counters

A worker registered here needs no policy version to be confirmed: it takes requests once a health probe was answered.
"""

import json
import math

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from services.router.http.answers import error_content
from services.router.router import Router
from services.router.workers.urls import BadUrl
from services.router.workers.workers import TooManyWorkers, Worker

MAX_DISCARDED_BYTES = 4 * 1024 * 1024
"""How much of too large a body is read to its end: a client that is cut off while it sends may never see the answer."""


class WorkerView(BaseModel):
    """A worker as clients see it."""

    id: str
    url: str
    state: str
    in_flight: int
    num_requests: int
    num_failures: int
    policy_version: int | None
    last_error: str

    @classmethod
    def of(cls, worker: Worker) -> "WorkerView":
        """What there is to say of a worker now."""
        return cls(
            id=worker.worker_id,
            url=str(worker.url),
            state=worker.state.name,
            in_flight=worker.in_flight,
            num_requests=worker.num_requests,
            num_failures=worker.num_failures,
            policy_version=worker.policy_version,
            last_error=worker.last_error,
        )


class WorkerList(BaseModel):
    """All workers, in the order of registration."""

    workers: list[WorkerView]


class UrlList(BaseModel):
    """The addresses of registered workers."""

    urls: list[str]


class Refusal(Exception):
    """A call that is answered with an error."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def control_app(router: Router) -> FastAPI:
    """The control surface as an ASGI application."""
    app = FastAPI(title="Furlong router", docs_url=None, redoc_url=None, openapi_url="/router/openapi.json")
    _handle_errors(app)
    _add_worker_routes(app, router)
    _add_old_routes(app, router)
    _add_status_routes(app, router)
    return app


def _add_worker_routes(app: FastAPI, router: Router) -> None:
    @app.post("/workers")
    async def add_worker(request: Request) -> WorkerView:
        """Register a worker."""
        return _add(router, await _url_in_body(request, router))

    @app.get("/workers")
    async def list_workers() -> WorkerList:
        """All workers."""
        return WorkerList(workers=[WorkerView.of(worker) for worker in router.workers.all()])

    @app.get("/workers/{name:path}")
    async def get_worker(name: str) -> WorkerView:
        """One worker, by id or address."""
        worker = router.workers.find(name)
        if worker is None:
            raise _unknown(name)
        return WorkerView.of(worker)

    @app.delete("/workers/{name:path}")
    async def remove_worker(name: str) -> UrlList:
        """Take a worker out; requests in flight end in peace."""
        return _remove(router, name)


def _add_old_routes(app: FastAPI, router: Router) -> None:
    @app.post("/add_worker")
    async def add_worker(request: Request) -> WorkerView:
        """Register a worker."""
        return _add(router, await _url_in_query_or_body(request, router))

    @app.post("/remove_worker")
    async def remove_worker(request: Request) -> UrlList:
        """Take a worker out."""
        return _remove(router, str(await _url_in_query_or_body(request, router)))

    @app.get("/list_workers")
    async def list_workers() -> UrlList:
        """The addresses of registered workers."""
        return _urls(router)


def _add_status_routes(app: FastAPI, router: Router) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, object]:
        """Whether a worker takes requests."""
        num_ready = router.workers.num_ready()
        if num_ready:
            return {"status": "ready", "num_ready_workers": num_ready}
        response.status_code = 503
        response.headers["retry-after"] = str(math.ceil(router.settings.health_interval_s))
        return error_content("no_ready_worker", "no worker is ready")

    @app.get("/router/metrics")
    async def metrics() -> dict[str, int]:
        """Counters of the workers that are registered now, and of the queue."""
        everyone = router.workers.all()
        return {
            "num_workers": len(everyone),
            "num_ready_workers": router.workers.num_ready(),
            "num_waiting": router.workers.num_waiting(),
            "num_in_flight": sum(worker.in_flight for worker in everyone),
            "num_requests": sum(worker.num_requests for worker in everyone),
            "num_failures": sum(worker.num_failures for worker in everyone),
        }


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refusal(_: Request, error: Refusal) -> JSONResponse:
        return JSONResponse(error_content(error.kind, str(error)), error.status)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        kind = "not_found" if error.status_code == 404 else "bad_request"
        return JSONResponse(error_content(kind, error.detail), error.status_code, error.headers)


def _add(router: Router, url: object) -> WorkerView:
    try:
        return WorkerView.of(router.add(url, admit=True))
    except BadUrl as error:
        raise Refusal(400, "bad_url", str(error)) from error
    except TooManyWorkers as error:
        raise Refusal(429, "too_many_workers", str(error)) from error


def _remove(router: Router, name: str) -> UrlList:
    if not router.remove(name):
        raise _unknown(name)
    return _urls(router)


def _urls(router: Router) -> UrlList:
    return UrlList(urls=[str(worker.url) for worker in router.workers.all() if not worker.removed])


def _unknown(name: str) -> Refusal:
    return Refusal(404, "unknown_worker", f"no worker has the id or address {name[:200]!r}. GET /workers lists them.")


async def _url_in_query_or_body(request: Request, router: Router) -> object:
    return request.query_params.get("url") or await _url_in_body(request, router)


async def _url_in_body(request: Request, router: Router) -> object:
    """The url in a JSON body, whatever it is. Raises Refusal."""
    limit = router.settings.max_control_body_bytes
    body, size_bytes = b"", 0
    async for piece in request.stream():
        size_bytes += len(piece)
        body = body + piece if size_bytes <= limit else b""
        if size_bytes > MAX_DISCARDED_BYTES:
            break
    if size_bytes > limit:
        raise Refusal(400, "bad_request", f"the body must have at most {limit} bytes")
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise Refusal(
            400, "bad_request", f"the body must be JSON such as {{'url': 'http://127.0.0.1:30000'}}: {error}"
        ) from error
    if not isinstance(asked, dict) or "url" not in asked:
        raise Refusal(400, "bad_request", "the body must be a JSON object with the key 'url'")
    return asked["url"]
