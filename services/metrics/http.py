"""HTTP for people and probes: /healthz, /readyz, /api/status, /api/rows. Reads only."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

import uvicorn
from fastapi import FastAPI, Query, Response
from google.protobuf.json_format import MessageToDict

from furlong.addresses import join_host_port
from furlong.records import AXES
from furlong.rpc import PortTaken
from furlong.v1.metrics_pb2 import GetMetricsStatusResponse
from services.metrics.rows import RowReader
from services.metrics.writer import Writer

MAX_ROWS = 10_000
_JSON = "application/json"


def make_app(
    *,
    writer: Writer,
    reader: RowReader,
    status: Callable[[], Awaitable[GetMetricsStatusResponse]],
    is_ready: Callable[[], bool],
) -> FastAPI:
    """The application; `status` is what gRPC's GetStatus says."""
    app = FastAPI(title="Furlong metrics", docs_url=None, redoc_url=None)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, str]:
        ready = is_ready() and not writer.failing
        response.status_code = 200 if ready else 503
        return {"status": "ready" if ready else "not ready", "reason": writer.failing}

    @app.get("/api/status")
    async def api_status() -> dict[str, object]:
        known = MessageToDict(
            await status(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for name in ("num_records", "num_rows", "num_refused"):
            known[name] = int(known[name])  # protobuf writes 64-bit integers as strings
        for sink in known["sinks"]:
            sink["num_rows_behind"] = int(sink["num_rows_behind"])
        return {
            **known,
            "num_rows_waiting": writer.rows.num_waiting,
            **vars(writer.counts),
            "store_error": writer.failing,
        }

    @app.get("/api/rows")
    async def api_rows(axis: str = "rollout/step", last: int = Query(default=100, ge=1, le=MAX_ROWS)) -> Response:
        if axis not in AXES:
            return Response(f'{{"error": "axis must be one of {", ".join(AXES)}"}}', 400, media_type=_JSON)
        found = await asyncio.to_thread(reader.newest, axis, last)
        return Response(b"[" + b",\n".join(found) + b"]", media_type=_JSON)

    return app


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the service's."""
        yield


@contextlib.asynccontextmanager
async def serve_http(app: FastAPI, *, host: str, port: int) -> AsyncGenerator[str]:
    """Serve while entered; the base address. Raises PortTaken."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2, ws="none"
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield f"http://{join_host_port(host, listener.getsockname()[1])}"
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=3.0)
        task.cancel()
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        address = join_host_port(host, port)
        raise PortTaken(f"cannot listen on {address}: {error.strerror}. Port 0 finds a free one.") from error
    return listener
