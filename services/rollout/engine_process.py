"""One engine as a child process: started, waited for, told to stop, its last words read.

It dies with this process, whatever ends it. Its output goes to a file. Never leaves a process behind.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import structlog

from furlong.addresses import join_host_port
from furlong.config import RunConfig
from services.rollout.engine_command import EnginePlace, engine_command, engine_environment

log = structlog.get_logger()

LAST_WORDS_BYTES = 4096
PORT_TRIES = 3
POLL_S = 0.05
PROGRESS_S = 10.0


class EngineStartFailed(Exception):
    """An engine ended, or was not ready in time."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        """refused: it ended by itself, with an exit code, so the same start would fail the same way."""
        super().__init__(text)
        self.refused = refused


class EngineProcess:
    """A running child."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path, output_start: int) -> None:
        self._process = process
        self.url = ""
        """Base address of its HTTP API. Empty until it answers."""
        self._output = output
        self._output_start = output_start

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; minus the signal's number when one ended it."""
        return self._process.poll()

    async def wait(self) -> int:
        """Its exit status, once it ends."""
        while (status := self._process.poll()) is None:  # noqa: ASYNC110  (the kernel gives no event to wait on)
            await asyncio.sleep(POLL_S)
        return status

    async def stop(self, budget_s: float) -> None:
        """SIGTERM, and SIGKILL to whatever of its process group is left after the budget.

        Only the engine itself is asked: SGLang takes it for a crash when its own children end before it.
        """
        if self.exit_status is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(budget_s):
                    await self.wait()
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """End the whole process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The end of its output; not that of an earlier engine in the same file."""
        return last_words(self._output, since=self._output_start)


async def start_engine(
    config: RunConfig, *, name: str, index: int, output: Path, num_gpus: int, inherited: Mapping[str, str]
) -> EngineProcess:
    """Start an engine and wait until it answers. Raises EngineStartFailed with its last output."""
    tries = PORT_TRIES if config.rollout.rollout_engine == "sglang" else 1
    for attempt in range(1, tries + 1):
        port_file = output.with_suffix(".port")
        port_file.unlink(missing_ok=True)
        place = EnginePlace(index, os.getpid(), free_port(config.run.host), port_file, num_gpus)
        process = _spawn(config, place, output, inherited)
        try:
            await _wait_ready(config, name, process, place)
            return process
        except EngineStartFailed:
            clash = "address already in use" in process.last_words().lower()
            if not clash or attempt == tries:
                raise
            log.warning("engine_port_taken", engine=name, port=place.port, attempt=attempt)
        finally:
            port_file.unlink(missing_ok=True)
            if not process.url:
                process.kill()
                await process.wait()
    raise AssertionError("unreachable")


def _spawn(config: RunConfig, place: EnginePlace, output: Path, inherited: Mapping[str, str]) -> EngineProcess:
    """A session of its own, so that Ctrl-C reaches us alone and we can end all of its processes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        output_start = file.tell()
        try:
            process = subprocess.Popen(  # its leash needs this thread to be the main one: it ends with the process
                engine_command(config, place),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=engine_environment(config, place, inherited),
                start_new_session=True,
            )
        except OSError as error:
            text = f"cannot start {engine_command(config, place)[0]}: {error.strerror}"
            raise EngineStartFailed(text, refused=True) from error
    return EngineProcess(process, output, output_start)


async def _wait_ready(config: RunConfig, name: str, process: EngineProcess, place: EnginePlace) -> None:
    """Set the process's url once its HTTP API answers 200."""
    started = told = time.monotonic()
    limit_s = config.run.start_timeout_s
    async with aiohttp.ClientSession() as session:
        while True:
            if (status := process.exit_status) is not None:
                how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
                text = f"{name} ended {how} while starting:\n{process.last_words()}"
                raise EngineStartFailed(text, refused=status > 0)
            url = _url(config, place)
            if url and await _answers(config, session, url):
                process.url = url
                log.info("engine_started", engine=name, url=url, pid=process.pid, seconds=time.monotonic() - started)
                return
            now = time.monotonic()
            if now - started > limit_s:
                raise EngineStartFailed(
                    f"{name} was not ready within {limit_s:g} s (--start-timeout-s):\n{process.last_words()}"
                )
            if now - told > PROGRESS_S:
                told = now
                log.info("engine_starting", engine=name, pid=process.pid, seconds=round(now - started))
            await asyncio.sleep(POLL_S)


def _url(config: RunConfig, place: EnginePlace) -> str:
    port = place.port
    if config.rollout.rollout_engine == "cpu":
        try:
            port = int(place.port_file.read_text() or 0)
        except FileNotFoundError:
            return ""
    return f"http://{join_host_port(config.run.host, port)}" if port else ""


async def _answers(config: RunConfig, session: aiohttp.ClientSession, url: str) -> bool:
    """SGLang's /health generates a token; the CPU engine holds no weights yet, and its /ping says that it listens."""
    path = "/health" if config.rollout.rollout_engine == "sglang" else "/ping"
    try:
        async with session.get(f"{url}{path}", timeout=aiohttp.ClientTimeout(total=30)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((bare, 0))
        return int(probe.getsockname()[1])


def count_gpus() -> int:
    """GPUs of this host, without any vendor's library."""
    return sum(1 for path in Path("/dev").glob("nvidia[0-9]*"))


def last_words(output: Path, *, since: int = 0) -> str:
    """The last few lines of an output file, of what stands after an offset in bytes."""
    try:
        with output.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - LAST_WORDS_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-20:])
    except OSError:
        return ""
