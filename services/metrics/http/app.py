"""HTTP for people and probes: /healthz, /readyz, /api/status, /api/rows. Reads only."""

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Query, Response
from google.protobuf.json_format import MessageToDict

from furlong.records import AXES
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
        ready = is_ready() and not (writer.failing or writer.holding)
        response.status_code = 200 if ready else 503
        return {"status": "ready" if ready else "not ready", "reason": writer.failing or writer.holding}

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
            **writer.counts.shown(),
            "store_error": writer.failing,
            "holding": writer.holding,
        }

    @app.get("/api/rows")
    async def api_rows(axis: str = "rollout/step", last: int = Query(default=100, ge=1, le=MAX_ROWS)) -> Response:
        if axis not in AXES:
            return Response(f'{{"error": "axis must be one of {", ".join(AXES)}"}}', 400, media_type=_JSON)
        found = await asyncio.to_thread(reader.newest, axis, last)
        return Response(b"[" + b",\n".join(found) + b"]", media_type=_JSON)

    return app
