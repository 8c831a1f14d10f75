"""GET /healthz, /readyz, /api/status: probes, and what the service says of itself."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response
from google.protobuf.json_format import MessageToDict

from furlong.v1.metrics_pb2 import GetMetricsStatusResponse
from services.metrics.writer import Writer

_LONG = ("num_records", "num_rows", "num_refused", "num_rows_behind", "num_rows_refused")
"""protobuf writes 64-bit integers as strings."""


def router(
    *, writer: Writer, status: Callable[[], Awaitable[GetMetricsStatusResponse]], is_ready: Callable[[], bool]
) -> APIRouter:
    """The routes. status: what gRPC's GetStatus says."""
    routes = APIRouter(tags=["state"])

    @routes.get("/healthz", summary="Whether the process lives")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz", summary="Whether records are taken", responses={503: {"description": "They are not."}})
    async def readyz(response: Response) -> dict[str, str]:
        reason = writer.failing or writer.holding or ("" if is_ready() else "starting or stopping")
        response.status_code = 503 if reason else 200
        return {"status": "not ready" if reason else "ready", "reason": reason}

    @routes.get("/api/status", summary="What the service holds, its sinks and its counts")
    async def api_status() -> dict[str, object]:
        known = MessageToDict(
            await status(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for tree in (known, *known["sinks"]):
            tree.update({name: int(tree[name]) for name in _LONG if name in tree})
        del known["counts"]  # they stand beside it
        return {
            **known,
            "num_rows_waiting": writer.rows.num_waiting,
            **writer.counts.shown(),
            "store_error": writer.failing,
            "holding": writer.holding,
            "lost_to_retention": dict(writer.retention.lost),
        }

    return routes
