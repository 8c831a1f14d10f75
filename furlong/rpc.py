"""gRPC as Furlong uses it: channels and servers whose limits and keepalive match on both ends.

Internal calls never go through a proxy, whatever the environment says. Every call is given a deadline (`timeout=`).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from furlong.addresses import NotReachable, PortTaken, join_host_port

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either side takes; larger things are streamed."""

KEEPALIVE_MS = 20_000

_SIZES = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

CLIENT_OPTIONS: list[tuple[str, Any]] = [  # Any: gRPC options are ints or strings
    *_SIZES,
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_SIZES,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a shared one
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
]


def channel(address: str) -> grpc.Channel:
    """A blocking channel to `HOST:PORT`. Nothing is connected yet."""
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)


def aio_channel(address: str) -> grpc.aio.Channel:
    """An asyncio channel to `HOST:PORT`. Nothing is connected yet."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


@dataclass
class Server:
    """A running asyncio gRPC server with health and reflection; NOT_SERVING until `set_serving`."""

    grpc: grpc.aio.Server
    address: str
    """`HOST:PORT` as clients reach it."""
    port: int
    health: health.aio.HealthServicer
    names: Sequence[str]

    async def set_serving(self, *, serving: bool) -> None:
        """Say to health checks whether the service can work."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.names):
            await self.health.set(name, status)

    async def drain(self, budget_s: float) -> None:
        """NOT_SERVING, no new calls, and up to budget_s seconds for the running ones."""
        await self.health.enter_graceful_shutdown()
        await self.grpc.stop(budget_s)


async def start_server(
    register: Callable[[grpc.aio.Server], None],
    *,
    names: Sequence[str],
    host: str,
    port: int = 0,
    options: Sequence[tuple[str, Any]] = (),
) -> Server:
    """Listen on host:port (0: a free one) and answer; health says NOT_SERVING.

    register: adds the servicers, for example `lambda server: add_RouterServicer_to_server(servicer, server)`.
    names: full service names, for health and reflection: ("furlong.v1.Router",).
    options: of gRPC, instead of those of SERVER_OPTIONS with the same names.
    Raises PortTaken naming the address.
    """
    server = grpc.aio.server(options=list({**dict(SERVER_OPTIONS), **dict(options)}.items()))
    register(server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    bound = bind(server, host, port)
    await server.start()
    running = Server(server, join_host_port(host, bound), bound, servicer, tuple(names))
    await running.set_serving(serving=False)
    return running


@dataclass
class SyncServer:
    """A running gRPC server on threads, for a process that has no event loop; NOT_SERVING until `set_serving`."""

    grpc: grpc.Server
    address: str
    """`HOST:PORT` as clients reach it."""
    health: health.HealthServicer
    names: Sequence[str]

    def set_serving(self, *, serving: bool) -> None:
        """Say to health checks whether the service can work."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.names):
            self.health.set(name, status)

    def drain(self, budget_s: float) -> None:
        """NOT_SERVING, no new calls, and up to budget_s seconds for the running ones."""
        self.health.enter_graceful_shutdown()
        self.grpc.stop(budget_s).wait(budget_s + 1.0)


def start_sync_server(
    register: Callable[[grpc.Server], None], *, names: Sequence[str], host: str, port: int = 0, num_threads: int = 4
) -> SyncServer:
    """`start_server` on threads. Raises PortTaken naming the address."""
    server = grpc.server(ThreadPoolExecutor(num_threads, thread_name_prefix="grpc"), options=SERVER_OPTIONS)
    register(server)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    bound = bind(server, host, port)
    server.start()
    running = SyncServer(server, join_host_port(host, bound), servicer, tuple(names))
    running.set_serving(serving=False)
    return running


def bind(server: grpc.aio.Server | grpc.Server, host: str, port: int) -> int:
    """Add host:port to a server; the port it got. Raises PortTaken."""
    address = join_host_port(host, port)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise PortTaken(f"cannot listen on {address}: {error}. Is the port taken? Port 0 finds a free one.") from error
    if bound == 0:
        raise PortTaken(f"cannot listen on {address}. Is the port taken? Port 0 finds a free one.")
    return bound


def is_serving(address: str, service: str, *, timeout_s: float = 2.0) -> bool:
    """Whether a service answers SERVING now."""
    with channel(address) as to_peer:
        stub = health_pb2_grpc.HealthStub(to_peer)
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = stub.Check(request, timeout=timeout_s)  # type: ignore[missing-attribute]
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def wait_serving(address: str, service: str, *, timeout_s: float, poll_s: float = 0.05) -> None:
    """Block until a service answers SERVING. Raises NotReachable naming service, address and limit."""
    deadline = time.monotonic() + timeout_s
    while not is_serving(address, service, timeout_s=max(0.1, min(2.0, timeout_s))):
        if time.monotonic() > deadline:
            raise NotReachable(f"{service} at {address} was not SERVING within {timeout_s:g} s")
        time.sleep(poll_s)
