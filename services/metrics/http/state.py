"""GET /healthz, /readyz, /api/status: probes, and what the service says of itself."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response
from google.protobuf.message import Message

from furlong.v1.metrics_pb2 import GetMetricsStatusResponse
from services.metrics.writer import Writer


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
        known = _tree(await status())
        return {
            **known,
            "num_rows_waiting": writer.rows.num_waiting,
            **writer.counts.shown(),
            "store_error": writer.failing,
            "holding": writer.holding,
            "lost_to_retention": dict(writer.retention.lost),
        }

    return routes


def _tree(message: Message) -> dict[str, object]:
    """Its fields but for the counts, which stand beside it; numbers of 64 bits as numbers, not as strings."""
    tree: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.name != "counts":
            tree[field.name] = [_tree(item) for item in value] if field.is_repeated else value
    return tree
