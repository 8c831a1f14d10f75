"""The router process: listens on HTTP and gRPC, publishes both addresses, drains when it is asked to stop."""

import asyncio
import contextlib
import functools
import os
import resource
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop

from furlong import addresses
from furlong.addresses import join_host_port
from furlong.config import RunConfig
from furlong.config.routerrules import router_host
from furlong.config.sections import RouterSection
from furlong.folderlock import FolderLock
from furlong.service import ServiceContext, run_async
from services.router.control.app import control_app
from services.router.footprint import settle
from services.router.http.front import Front
from services.router.http.server import bind, on_socket, serve_http
from services.router.introduction import introduced
from services.router.processes.handdown import Logging
from services.router.processes.primary import Primary
from services.router.router import Router
from services.router.settings import RouterSettings
from services.router.watch.reporting import Recorder
from services.router.watch.watching import watching

if TYPE_CHECKING:
    from furlong import rpc

log = structlog.get_logger()

DRAIN_SHARE = 0.8
"""Part of the drain budget that running requests get; the rest is for ending the process."""
CLIENTS_SHARE = 0.75
"""Part of the open files that connections of clients may be."""

PUBLISH_AGAIN_S = 5.0


@dataclass(frozen=True)
class Listening:
    """A router that answers."""

    router: Router
    http: str
    """Base address."""
    grpc: str | None
    """HOST:PORT. None: it does not answer gRPC."""
    tasks: tuple["asyncio.Task[None]", ...]
    """Background tasks; none of them ends by itself."""


def main(config: RunConfig, *, rank: int, foreground: bool, alone: bool = False) -> int:
    """Run the router until it is asked to stop; the exit code. alone: of no run."""
    ships = not alone or bool(config.metrics.metrics_addr)
    logging = Logging(config=config.model_dump_json(), foreground=foreground, ships=ships)
    serve = functools.partial(_serve, logging=logging, grpc_port=_grpc_port(config, alone=alone))
    return run_async(
        config,
        service="router",
        foreground=foreground,
        serve=introduced(serve) if alone else serve,
        loop_factory=uvloop.new_event_loop,
        alone=alone,
    )


@contextlib.asynccontextmanager
async def listening(
    settings: RouterSettings,
    *,
    host: str,
    http_port: int,
    grpc_port: int | None,
    drain_s: float,
    sock: socket.socket | None = None,
    state_file: Path | None = None,
    recorder: Recorder | None = None,
    logging: Logging | None = None,
) -> AsyncGenerator[Listening]:
    """A router that answers on both surfaces while inside. Leaving it drains. Raises PortTaken, ConfigError.

    grpc_port: None: it answers HTTP only.
    sock: one that listens already, instead of one at http_port.
    state_file: where the workers are kept over a restart; None: nowhere.
    recorder: where rows of the router's numbers go; None: nowhere.
    logging: where logs of more processes go, if there are any; None: warnings to stderr.
    """
    sock = sock or bind(host, http_port)
    primary = Primary(settings, drain_s=drain_s, logging=logging) if settings.processes > 1 else None
    router = Router(settings, state_file=state_file, workers=primary.workers if primary is not None else None)
    try:
        router.start()
        grpc_server = await _start_grpc(router, host, grpc_port) if grpc_port is not None else None
    except BaseException:
        sock.close()
        await router.close()
        raise
    http = f"{'https' if settings.tls_cert else 'http'}://{join_host_port(host, sock.getsockname()[1])}"
    tend = asyncio.create_task(router.tend(), name="tend_router")
    try:
        control = control_app(router)
        async with (
            watching(router.observer, recorder) as watchers,
            primary.running(router, control) if primary is not None else contextlib.nullcontext(()) as keepers,
            serve_http(
                Front(router.proxy, control),
                primary.accept_on(sock) if primary is not None else on_socket(sock),
                drain_s=drain_s,
            ) as serving,
        ):
            if grpc_server is not None:
                await grpc_server.set_serving(serving=True)
            try:
                grpc_address = grpc_server.address if grpc_server is not None else None
                yield Listening(router, http, grpc_address, (tend, serving, *watchers, *keepers))
            finally:
                router.stop_taking()
                if primary is not None:
                    primary.stop()
                if grpc_server is not None:
                    await grpc_server.drain(min(1.0, drain_s))
    finally:
        tend.cancel()
        await router.close()
        if primary is not None:
            primary.close()


def _grpc_port(config: RunConfig, *, alone: bool) -> int | None:
    """None: nobody needs it. Alone, only Furlong's rollout service does, which is told where it is."""
    router = config.router
    wanted = not alone or router.router_require_policy_version or "router_grpc_port" in router.model_fields_set
    return router.router_grpc_port if wanted else None


async def _start_grpc(router: Router, host: str, port: int) -> "rpc.Server":
    """Answer furlong.v1.Router. gRPC is imported here: it takes 14 MB, which a router alone does without."""
    from furlong import rpc
    from furlong.v1 import router_pb2_grpc
    from services.router.control.grpc_service import NAME, RouterServicer

    servicer = RouterServicer(router)
    return await rpc.start_server(
        lambda server: router_pb2_grpc.add_RouterServicer_to_server(servicer, server),
        names=(NAME,),
        host=host,
        port=port,
    )


@contextlib.asynccontextmanager
async def _serve(context: ServiceContext, *, logging: Logging, grpc_port: int | None) -> AsyncGenerator[None]:
    config = context.config
    stack = contextlib.AsyncExitStack()
    remedy = "Stop it, or give another folder."
    stack.enter_context(FolderLock(context.run_dir.router_state.parent, service="router", remedy=remedy))
    settings = _within_files(RouterSettings.of(config), _raise_file_limit())
    async with (
        stack,
        listening(
            settings,
            host=router_host(config),
            http_port=config.router.router_port,
            grpc_port=grpc_port,
            drain_s=DRAIN_SHARE * config.run.drain_budget_s,
            state_file=context.run_dir.router_state,
            recorder=context.telemetry,
            logging=logging,
        ) as running,
    ):
        for task in running.tasks:
            context.watch(task)
        if not _published(context, running):
            publishing = asyncio.create_task(_publish_when_there_is_room(context, running), name="publish_router")
            stack.callback(context.watch(publishing).cancel)
        log.info("router_listening", http=running.http, grpc=running.grpc)
        settle()
        yield


def _published(context: ServiceContext, running: Listening) -> bool:
    """Tell the run where it listens; whether that could be written down."""
    told = _told_besides(context.config)
    try:
        addresses.publish(context.run_dir, context.instance, grpc=running.grpc, http=running.http, extra=told)
    except OSError as error:
        remedy = "free or mend the disk: until then only who knows its port finds this router"
        log.error("address_not_published", path=str(context.run_dir.addresses), error=str(error), remedy=remedy)
        return False
    return True


async def _publish_when_there_is_room(context: ServiceContext, running: Listening) -> None:
    """A router that did not start on a full disk would be one more thing that is down."""
    while True:
        await asyncio.sleep(PUBLISH_AGAIN_S)
        if _published(context, running):
            log.info("address_published", http=running.http)
            return


def _told_besides(config: RunConfig) -> dict[str, str]:
    """What `furlong status` needs to ask this router: where its token stands."""
    token_file = config.router.router_token_file
    return {"token_file": os.path.abspath(token_file)} if token_file else {}


def _raise_file_limit() -> int:
    """Each request in flight takes two sockets; the usual soft limit is 1024 files. The limit from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _within_files(settings: RouterSettings, num_files: int) -> RouterSettings:
    """With no more connections of clients than leave files for workers: the unused ones of clients alone must not take
    them all."""
    if num_files == resource.RLIM_INFINITY:
        return settings
    most = max(1, int(CLIENTS_SHARE * num_files)) * settings.processes
    if settings.max_connections <= most:
        return settings
    asked_for = settings.max_connections != RouterSection().router_max_connections
    tell = log.warning if asked_for else log.info
    tell(
        "connections_limited_by_files",
        asked=settings.max_connections,
        max_connections=most,
        max_files=num_files,
        remedy="raise `ulimit -Hn`, or lower --router-max-connections",
    )
    return replace(settings, max_connections=most)
