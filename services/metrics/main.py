"""The metrics service's process: puts the parts together, starts and stops them in order."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable

import structlog

from furlong import addresses, logs, rpc
from furlong.config import ConfigError, RunConfig
from furlong.config.errors import Problem
from furlong.process import ExitCode
from furlong.service import ServiceContext, run_async
from furlong.v1 import metrics_pb2_grpc
from services.metrics.collector import collect_for_ever
from services.metrics.http import make_app, serve_http
from services.metrics.ingest import MetricsServicer
from services.metrics.rows import RowReader
from services.metrics.sinks.jsonl import JsonlSink
from services.metrics.sinks.sink import Sink, SinkTask
from services.metrics.sinks.wandb_sink import WandbRun, WandbSink, choose_mode
from services.metrics.store import NewerSchema
from services.metrics.writer import Writer

log = structlog.get_logger()

SERVICE_NAME = "furlong.v1.Metrics"
STORE_NAME = "metrics.db"


def main(config: RunConfig, *, rank: int, foreground: bool) -> int:
    """Run the metrics service until it is asked to stop; the exit code."""
    return run_async(config, service="metrics", foreground=foreground, serve=serve)


@contextlib.asynccontextmanager
async def serve(context: ServiceContext) -> AsyncGenerator[None]:
    """SERVING while entered. Leaving it drains: streams, waiting rows, sinks, store."""
    config, run_dir = context.config, context.run_dir
    path = run_dir.metrics_store / STORE_NAME
    sinks: list[SinkTask] = []
    try:
        writer = Writer(
            path,
            row_timeout_s=config.metrics.metrics_row_timeout_s,
            secrets=logs.secrets(),
            on_rows=_in_loop(lambda: [sink.notify() for sink in sinks]),
            on_death=lambda reason: context.stop.request(reason, code=ExitCode.CRASHED),
        )
    except (NewerSchema, OSError) as error:
        raise ConfigError([Problem("run.run_dir", str(run_dir.root), f"must hold a usable store: {error}")]) from error
    writer.start()
    reader = RowReader(path)
    sinks += [SinkTask(sink, reader, writer) for sink in _make_sinks(context, reader)]
    servicer = MetricsServicer(writer, reader, sinks)
    ready = asyncio.Event()
    app = make_app(writer=writer, reader=reader, status=servicer.status, is_ready=ready.is_set)
    async with serve_http(app, host=config.run.host, port=config.metrics.metrics_port) as http:
        server = await rpc.start_server(
            lambda grpc_server: metrics_pb2_grpc.add_MetricsServicer_to_server(servicer, grpc_server),
            names=[SERVICE_NAME],
            host=config.run.host,
        )
        collecting = context.watch(asyncio.create_task(collect_for_ever(run_dir.spool, writer), name="collector"))
        addresses.publish(run_dir, context.instance, grpc=server.address, http=http)
        await server.set_serving(serving=True)
        ready.set()
        try:
            yield
        finally:
            ready.clear()
            collecting.cancel()
            await _drain(context, server, servicer, writer, reader, sinks)


async def _drain(
    context: ServiceContext,
    server: rpc.Server,
    servicer: MetricsServicer,
    writer: Writer,
    reader: RowReader,
    sinks: list[SinkTask],
) -> None:
    """Stop taking, hand on what waits, finish the sinks, within the run's budget."""
    deadline = time.monotonic() + max(1.0, context.config.run.drain_budget_s - 3.0)
    await server.set_serving(serving=False)
    await asyncio.to_thread(context.telemetry.flush, 1.0)
    servicer.stop()
    await server.drain(2.0)
    await asyncio.wrap_future(writer.emit_waiting())
    left_s = max(1.0, deadline - time.monotonic())
    await asyncio.gather(*(sink.close(left_s) for sink in sinks))
    reader.close()
    await asyncio.to_thread(writer.close, 5.0)  # the last connection to close tidies the store's files


def _make_sinks(context: ServiceContext, reader: RowReader) -> list[Sink]:
    config, run_dir = context.config, context.run_dir
    sinks: list[Sink] = [JsonlSink(run_dir.metrics_rows, reader)]
    if config.metrics.use_wandb:
        run = WandbRun(
            folder=run_dir.metrics_store,
            project=config.metrics.wandb_project or "furlong",
            group=config.metrics.wandb_group,
            team=config.metrics.wandb_team,
            name=config.metrics.wandb_run_name or config.run.name,
            dir=config.metrics.wandb_dir or str(run_dir.root),
            mode=choose_mode(config.metrics.wandb_mode, os.environ),
            init_timeout_s=config.metrics.wandb_init_timeout_s,
            finish_timeout_s=max(2.0, config.run.drain_budget_s / 2),
            config=config.model_dump(mode="json"),
        )
        sinks.append(WandbSink(run, log_path=run_dir.log("wandb").with_suffix(".log")))
    return sinks


def _in_loop(act: Callable[[], object]) -> Callable[[], None]:
    """The same, called from another thread."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(act)

    return call
