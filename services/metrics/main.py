"""The metrics service's process. What it is made of stands in parts.py."""

import contextlib
from collections.abc import AsyncGenerator

from furlong.config import RunConfig
from furlong.service import ServiceContext, run_async
from services.metrics.parts import running


def main(config: RunConfig, *, rank: int, foreground: bool) -> int:
    """Run the metrics service until it is asked to stop; the exit code."""
    return run_async(config, service="metrics", foreground=foreground, serve=serve)


@contextlib.asynccontextmanager
async def serve(context: ServiceContext) -> AsyncGenerator[None]:
    """SERVING while entered. Leaving it drains: streams, waiting rows, sinks, store."""
    async with running(context):
        yield
