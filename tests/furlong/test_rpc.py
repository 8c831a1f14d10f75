"""gRPC between services: real servers and channels on loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from furlong import rpc
from furlong.addresses import NotReachable

NAME = "furlong.test.Echo"
METHOD = f"/{NAME}/Echo"
LIMIT_S = 10.0


def register(server: grpc.aio.Server) -> None:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


@pytest.fixture
async def server() -> AsyncIterator[rpc.Server]:
    running = await rpc.start_server(register, names=(NAME,), host="127.0.0.1")
    yield running
    await running.drain(0.0)


async def echo(address: str, message: bytes) -> bytes:
    async with rpc.aio_channel(address) as channel:
        return await channel.unary_unary(METHOD)(message, timeout=LIMIT_S)


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "https_proxy", "grpc_proxy", "all_proxy"])
async def test_no_call_goes_through_a_proxy(server: rpc.Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert await echo(server.address, b"x") == b"x"
    await server.set_serving(serving=True)
    assert await asyncio.to_thread(rpc.is_serving, server.address, NAME)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6(host: str) -> None:
    running = await rpc.start_server(register, names=(NAME,), host=host)
    assert running.address == f"[::1]:{running.port}"
    assert await echo(running.address, b"x") == b"x"
    await running.drain(0.0)


async def test_a_taken_port_is_told_with_its_address(server: rpc.Server) -> None:
    with pytest.raises(rpc.PortTaken, match=f"127.0.0.1:{server.port}"):
        await rpc.start_server(register, names=(NAME,), host="127.0.0.1", port=server.port)


async def test_a_port_taken_by_something_else_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(rpc.PortTaken, match=f"127.0.0.1:{port}"):
            await rpc.start_server(register, names=(NAME,), host="127.0.0.1", port=port)


async def test_an_address_that_is_not_ours_is_told() -> None:
    with pytest.raises(rpc.PortTaken, match=r"192\.0\.2\.1"):
        await rpc.start_server(register, names=(NAME,), host="192.0.2.1")


async def test_health_follows_the_service(server: rpc.Server) -> None:
    async def serving(name: str) -> bool:
        return await asyncio.to_thread(rpc.is_serving, server.address, name)

    assert not await serving(NAME) and not await serving("")
    await server.set_serving(serving=True)
    assert await serving(NAME) and await serving("")
    assert not await serving("furlong.test.Unknown")
    await server.set_serving(serving=False)
    assert not await serving(NAME)


async def test_draining_says_so_and_lets_calls_end() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    def register_slow(server: grpc.aio.Server) -> None:
        async def slow(request: bytes, context: object) -> bytes:
            begun.set()
            await go.wait()
            return request

        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(slow)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))

    running = await rpc.start_server(register_slow, names=(NAME,), host="127.0.0.1")
    await running.set_serving(serving=True)
    call = asyncio.create_task(echo(running.address, b"x"))
    await begun.wait()
    async with rpc.aio_channel(running.address) as channel:
        ask = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        watch = ask(health_pb2.HealthCheckRequest(service=NAME), timeout=LIMIT_S)
        statuses = aiter(watch)
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.SERVING
        drained = asyncio.create_task(running.drain(5.0))
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    go.set()
    assert await call == b"x"
    await drained
    assert not await asyncio.to_thread(rpc.is_serving, running.address, NAME)


async def test_nobody_there_is_not_serving_and_waiting_says_so() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert not await asyncio.to_thread(rpc.is_serving, address, NAME, timeout_s=0.5)
        with pytest.raises(NotReachable, match=f"{NAME} at {address} was not SERVING within 0.3 s"):
            await asyncio.to_thread(rpc.wait_serving, address, NAME, timeout_s=0.3)


async def test_waiting_ends_once_it_serves(server: rpc.Server) -> None:
    waiting = asyncio.create_task(asyncio.to_thread(rpc.wait_serving, server.address, NAME, timeout_s=LIMIT_S))
    await server.set_serving(serving=True)
    await waiting


async def test_messages_above_grpcs_own_limit_pass(server: rpc.Server) -> None:
    message = b"x" * (16 * 1024 * 1024)
    assert await echo(server.address, message) == message


async def test_messages_above_our_limit_are_refused_by_name(server: rpc.Server) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo(server.address, b"x" * (rpc.MAX_MESSAGE_BYTES + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def pings_until_goaway(server_options: list[tuple[str, int]], seconds: float) -> bool:
    """Whether a server of these options ends an idle channel that pings it every 100 ms."""
    server = grpc.aio.server(options=server_options)
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    often = [option for option in rpc.CLIENT_OPTIONS if option[0] != "grpc.keepalive_time_ms"]
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[*often, ("grpc.keepalive_time_ms", 100)]
    ) as channel:
        await channel.unary_unary(METHOD)(b"x", timeout=LIMIT_S)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        try:
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), seconds)
        except TimeoutError:
            ended = False
        else:
            ended = True
        assert await channel.unary_unary(METHOD)(b"x", timeout=LIMIT_S) == b"x"
    await server.stop(0)
    return ended


async def test_an_idle_channel_that_pings_is_not_sent_away() -> None:
    assert not await pings_until_goaway(rpc.SERVER_OPTIONS, 4.0)  # one of gRPC's own limits does so after 3


@pytest.mark.slow
async def test_a_server_of_grpcs_own_limits_would_send_it_away() -> None:
    assert await pings_until_goaway([], 4.0)
