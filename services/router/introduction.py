"""What a router that was started by hand, alone, says of itself: where it is, what to do with it, and that it stops."""

import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

from furlong import addresses
from furlong.addresses import Address
from furlong.service import ServiceContext

Serve = Callable[[ServiceContext], AbstractAsyncContextManager[None]]


def introduced(serve: Serve) -> Serve:
    """A service that tells of itself on stderr once it serves, and that it stops, which may take a while."""

    @contextlib.asynccontextmanager
    async def serve_and_tell(context: ServiceContext) -> AsyncGenerator[None]:
        async with serve(context):
            if (own := addresses.find(context.run_dir, context.instance)) is not None:
                _say("\n".join(_lines(context, own)))
            yield
            limit_s = context.config.run.drain_budget_s
            _say(f"furlong router stops; requests in flight have {limit_s:g} s to end. A second Ctrl-C ends it at once")

    return serve_and_tell


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed is no reason not to serve
        print(text, file=sys.stderr, flush=True)


def _lines(context: ServiceContext, own: Address) -> list[str]:
    router, folder = context.config.router, context.run_dir.root
    token = f' -H "Authorization: Bearer $(cat {router.router_token_file})"' if router.router_token_file else ""
    num_workers = len(router.router_worker_urls)
    workers = f"; {num_workers} worker{'s' * (num_workers != 1)} from --worker-urls" if num_workers else ""
    grpc = f" and gRPC {own.grpc}" if own.grpc else ""
    return [
        f"furlong router serves {own.http}{grpc} and keeps its workers in {folder}{workers}",
        f'  register  curl {own.http}/workers{token} -d \'{{"url": "http://HOST:PORT"}}\'',
        f"  look      curl {own.http}/workers{token}",
        f"  use       {own.http}/v1/chat/completions, /generate and every other path of its workers",
        f"  metrics   {own.http}/metrics",
        f"  log       {context.run_dir.log(context.instance)}",
    ]
