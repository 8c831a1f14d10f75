"""The HTTP server around the application: listens, serves while entered, lets the service have its signals."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator

import uvicorn
from fastapi import FastAPI

from furlong.addresses import PortTaken, join_host_port


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
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        ws="none",
        timeout_keep_alive=75,
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
        listener.listen(2048)
    except OSError as error:
        listener.close()
        address = join_host_port(host, port)
        raise PortTaken(f"cannot listen on {address}: {error.strerror}. Port 0 finds a free one.") from error
    return listener
