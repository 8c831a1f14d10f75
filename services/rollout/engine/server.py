"""The process: bind, load, serve, drain, exit.

It owns the socket, the port file, the signals and the exit code. It must never say that it listens before it can
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path

import structlog
import uvicorn

from services.rollout.engine.architecture import UnsupportedModelError
from services.rollout.engine.control import ControlEndpoints
from services.rollout.engine.engine import Engine, build_engine
from services.rollout.engine.generate import GenerateEndpoints
from services.rollout.engine.http import Application
from services.rollout.engine.openai import OpenAIEndpoints
from services.rollout.engine.options import EngineOptions
from services.rollout.engine.updates import WeightEndpoints
from services.rollout.engine.weights import UpdateError

log = structlog.get_logger()
EXIT_DONE, EXIT_CRASHED, EXIT_BAD_CONFIG = 0, 1, 2
CLOSE_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 75
BACKLOG = 2048
STOPPING = "The engine is shutting down."


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the engine has its own, and exits with 0 after a drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def serve(options: EngineOptions) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    try:
        listener = _bind(options.host, options.port)
    except OSError as error:
        log.error("engine_cannot_bind", host=options.host, port=options.port, error=str(error))
        return EXIT_BAD_CONFIG
    crash: list[BaseException] = []

    def on_crash(error: BaseException) -> None:
        crash.append(error)
        log.error("model_thread_crashed", error=repr(error), exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)

    started = time.monotonic()
    try:
        engine = build_engine(options, on_crash=on_crash)
    except (UnsupportedModelError, UpdateError, OSError, ValueError) as error:
        log.error("engine_refused", model_path=options.model_path, error=str(error))
        listener.close()
        return EXIT_BAD_CONFIG
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(engine, listener, started, crash))
    log.info("engine_stopped", crashed=bool(crash))
    return EXIT_CRASHED if crash else EXIT_DONE


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


async def _serve(engine: Engine, listener: socket.socket, started: float, crash: list[BaseException]) -> None:
    loop = asyncio.get_running_loop()
    engine.collector.bind(loop)
    engine.scheduler.start()
    server = _Server(_uvicorn_config(_application(engine)))
    drain: list[asyncio.Task[None]] = []

    def stop() -> None:
        server.should_exit = True
        server.force_exit = bool(crash)
        if drain:  # asked twice: hurry
            engine.scheduler.abort(None, message=STOPPING)
        else:
            drain.append(asyncio.ensure_future(_drain(engine)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    listener.listen(BACKLOG)
    port = listener.getsockname()[1]
    if engine.options.port_file is not None:
        _write_port(engine.options.port_file, port)
    seconds = round(time.monotonic() - started, 3)
    log.info("engine_listening", host=engine.options.host, port=port, load_seconds=seconds)
    await server.serve(sockets=[listener])
    for task in drain:
        task.cancel()
    await asyncio.to_thread(engine.scheduler.stop, CLOSE_TIMEOUT_S)


async def _drain(engine: Engine) -> None:
    """Let running samples end within the budget, then abort: each caller gets what there is."""
    engine.draining = True
    budget_s = engine.options.drain_timeout_s
    log.info("engine_draining", active=len(engine.collector.active), budget_s=budget_s)
    await asyncio.sleep(budget_s)
    log.warning("engine_drain_expired", active=len(engine.collector.active))
    engine.scheduler.abort(None, message=STOPPING)


def _application(engine: Engine) -> Application:
    app = Application()
    for endpoints in (
        GenerateEndpoints(engine),
        OpenAIEndpoints(engine),
        ControlEndpoints(engine),
        WeightEndpoints(engine),
    ):
        endpoints.register(app)
    return app


def _uvicorn_config(app: Application) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def _write_port(path: Path, port: int) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)
