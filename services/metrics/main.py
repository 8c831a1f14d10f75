"""The metrics service's process. What it is made of stands in parts.py."""

import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

from furlong import addresses
from furlong.config import RunConfig
from furlong.service import ServiceContext, run_async
from services.metrics.memory import give_large_blocks_back
from services.metrics.parts import running


def main(config: RunConfig, *, rank: int, foreground: bool, alone: bool = False) -> int:
    """Run the metrics service until it is asked to stop; the exit code. alone: of many runs, and of none."""
    give_large_blocks_back()
    return run_async(config, service="metrics", foreground=foreground, serve=_serve(alone=alone), alone=alone)


def _serve(*, alone: bool) -> Callable[[ServiceContext], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def serve(context: ServiceContext) -> AsyncGenerator[None]:
        """SERVING while entered. Leaving it drains: streams, waiting rows, sinks, store."""
        async with running(context, alone=alone):
            if alone:
                _introduce(context)
            yield

    return serve


def _introduce(context: ServiceContext) -> None:
    """Where it is, and what to do with it."""
    own = addresses.find(context.run_dir, context.instance)
    if own is None:
        return
    folder = context.run_dir.root
    lines = [
        f"furlong metrics serves {own.http} and gRPC {own.grpc}; everything is kept in {folder}",
        f'  post   curl {own.http}/v1/records -d \'{{"run": "mine", "event": "hello"}}\'',
        f"  watch  furlong tail --url {own.http}",
        f"  ask    {own.http}/docs",
        f"  runs   furlong up --config run.toml --name NAME --metrics-addr {own.grpc}",
        f"  log    {context.run_dir.log(context.instance)}",
    ]
    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed is no reason not to serve
        print("\n".join(lines), file=sys.stderr, flush=True)
