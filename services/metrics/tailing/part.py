"""Followed files and read endpoints as a part of the metrics service. Nothing runs when nothing is asked for."""

import asyncio
import contextlib
import glob
import os
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from furlong.config import ConfigError, RunConfig
from furlong.config.destinations import scrape_problems, tail_problems
from furlong.process import ExitCode
from furlong.rundir import RunDir
from furlong.v1 import metrics_pb2
from services.metrics.engines.scraper import Endpoint, Scraper
from services.metrics.tailing.pace import Pace
from services.metrics.tailing.store_link import WriterLink
from services.metrics.tailing.tailer import ENGINES_MARK, TailedFile, Tailer

if TYPE_CHECKING:
    from services.metrics.parts import Parts

CLOSE_S = 5.0
DEFAULT_RUN = "default"
"""The run of lines that name none, in a service that belongs to no run."""


class Following:
    """What other parts may use."""

    def __init__(self, tailer: Tailer | None = None, endpoints: list[Endpoint] | None = None) -> None:
        self._tailer, self._endpoints = tailer, endpoints or []

    def files(self) -> list[metrics_pb2.TailedFile]:
        """How each file is followed."""
        return [_file(file) for file in self._tailer.status()] if self._tailer else []

    def endpoints(self) -> list[metrics_pb2.ScrapedEndpoint]:
        """How each endpoint is read."""
        return [
            metrics_pb2.ScrapedEndpoint(
                instance=e.instance,
                url=e.url,
                num_readings=e.num_readings,
                num_failures=e.num_failures,
                last_error=e.failing,
            )
            for e in self._endpoints
        ]


@contextlib.asynccontextmanager
async def following_files(parts: "Parts") -> AsyncGenerator[Following]:
    """Raises ConfigError for paths and URLs that cannot be used."""
    config, run_dir = parts.context.config, parts.context.run_dir
    problems = [*tail_problems(config.metrics.tail), *scrape_problems(config.metrics.scrape)]
    if problems:
        raise ConfigError(problems)
    paths = files_to_follow(config, run_dir, alone=parts.alone)
    if not paths and not config.metrics.scrape:
        yield Following()
        return
    run = DEFAULT_RUN if parts.alone else config.run.name
    producer = f"{run}/tail"
    pace = Pace(producer)
    parts.on_commit.append(pace.committed)

    def left_out(count: int) -> None:
        parts.writer.counts.num_engine_values_left_out = count

    tailer = Tailer(
        WriterLink(parts.writer, producer=producer, prefixes=("tail/", ENGINES_MARK)),
        run=run,
        patterns=paths,
        interval_s=config.metrics.scrape_interval_s,
        pace=pace,
        is_own=lambda path: is_own_file(path, run_dir),
        on_death=lambda reason: parts.context.stop.request(reason, code=ExitCode.CRASHED),
        on_left_out=left_out,
    )
    reading = Scraper(config.metrics.scrape, interval_s=config.metrics.scrape_interval_s, take=tailer.add_sample)
    tailer.start()
    try:
        async with reading.running(parts.context.watch):
            yield Following(tailer, reading.endpoints)
    finally:
        await asyncio.to_thread(tailer.close, min(CLOSE_S, parts.left_s()))


def files_to_follow(config: RunConfig, run_dir: RunDir, *, alone: bool) -> list[str]:
    """What is asked for, and what the run's SGLang engines print."""
    paths = list(config.metrics.tail)
    if config.rollout.rollout_engine == "sglang" and not alone:
        paths.append(os.path.join(glob.escape(str(run_dir.root.absolute())), "logs", "engine-*.out"))
    return paths


def is_own_file(path: str, run_dir: RunDir) -> bool:
    """What this service and the run's other services write: it comes by another way, or would feed itself."""
    real, root = os.path.realpath(path), os.path.realpath(run_dir.root)
    if not real.startswith(root + os.sep):
        return False
    place = os.path.relpath(real, root)
    if place == run_dir.metrics_rows.name or place.split(os.sep)[0] in ("metrics", "spool"):
        return True
    return place.startswith(f"logs{os.sep}") and place.endswith(".jsonl")


def _file(file: TailedFile) -> metrics_pb2.TailedFile:
    counts = file.counts
    return metrics_pb2.TailedFile(
        path=file.path,
        behind_bytes=file.behind_bytes,
        num_lines=counts.lines,
        size_bytes=counts.bytes,
        num_records=counts.records,
        num_clipped=counts.clipped,
        num_invalid=counts.invalid,
        num_welded=counts.welded,
        num_partial=counts.partial,
        num_truncations=counts.truncations,
    )
