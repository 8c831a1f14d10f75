"""Runs users' functions, sync or async, on threads of their own with a time limit.

A call that outlives its limit is abandoned and its thread replaced, so that it delays no other call; too many
abandoned threads are an error. Never runs a user's function on the event loop, and never goes on in a process that a
user's function forked.
"""

import asyncio
import contextlib
import inspect
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from furlong.process import ExitCode

MAX_ABANDONED = 256
"""Threads that may hang in users' functions before further calls are refused."""
START_SLACK_S = 10.0
"""What a call may wait for a thread beyond the limits of the calls before it."""


class CallTimeout(Exception):
    """A user's function took longer than its limit."""


@dataclass
class _Call:
    function: Callable[[], Any]  # Any: what a user's function gives
    read: Callable[[Any], Any]
    timeout_s: float
    loop: asyncio.AbstractEventLoop
    started: asyncio.Event
    done: "asyncio.Future[Any]"
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _worker: "threading.Thread | None" = None
    _abandoned: bool = False

    def claim(self) -> bool:
        """Whether to run it: False when nobody waits for it any more."""
        with self._lock:
            if not self._abandoned:
                self._worker = threading.current_thread()
            return not self._abandoned

    def release(self) -> bool:
        """It has run. Whether this worker is still one of the pool's: False when another took its place."""
        with self._lock:
            self._worker = None
            return not self._abandoned

    def abandon(self) -> "threading.Thread | None":
        """Nobody waits for it any more; the worker that runs it just now."""
        with self._lock:
            self._abandoned = True
            return self._worker

    def tell(self, what: Callable[..., object], *values: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits any more
            self.loop.call_soon_threadsafe(what, *values)

    def finish(self, result: Any, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


class CallPool:
    """A few daemon threads for users' functions."""

    def __init__(self, num_workers: int, *, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_workers = num_workers
        self._name = name
        self._num_open = 0
        """Calls that are waited for."""
        self._workers: list[threading.Thread] = []
        self._abandoned: list[threading.Thread] = []

    async def call(
        self, function: Callable[[], Any], *, timeout_s: float, read: Callable[[Any], Any] = lambda result: result
    ) -> Any:
        """The function's result, awaited if it is awaitable. The limit counts from when the function starts.

        read: makes something of the result on the same thread, within the same limit: a user's object may do anything
        when it is looked at. Raises CallTimeout, or what the function or `read` raised.
        """
        self._workers = [thread for thread in self._workers if thread.is_alive()]
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_ABANDONED:
            raise CallTimeout(f"{len(self._abandoned)} earlier calls of {self._name} never returned")
        if len(self._workers) < self._num_workers:
            self._start_worker()
        loop = asyncio.get_running_loop()
        call = _Call(function, read, timeout_s, loop, asyncio.Event(), loop.create_future())
        start_limit_s = timeout_s * (2 + self._num_open // self._num_workers) + START_SLACK_S
        self._num_open += 1
        self._calls.put(call)
        try:
            await _started(call, start_limit_s)
            await asyncio.wait({call.done}, timeout=timeout_s)
            if not call.done.done():
                raise CallTimeout(f"took longer than {timeout_s:g} s")
            return call.done.result()
        finally:
            self._num_open -= 1
            self._abandon(call)

    def close(self) -> None:
        """Let idle threads end. Threads that hang are daemons: they end with the process."""
        for _ in self._workers:
            self._calls.put(None)

    def _abandon(self, call: _Call) -> None:
        if call.done.done():
            return
        call.done.cancel()
        worker = call.abandon()
        if worker is not None:  # it hangs in the function: another takes its place
            self._abandoned.append(worker)
            self._workers = [thread for thread in self._workers if thread is not worker]
            self._start_worker()

    def _start_worker(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._workers) + 1}", daemon=True)
        thread.start()
        self._workers.append(thread)

    def _work(self) -> None:
        own_pid = os.getpid()
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                if not call.claim():
                    continue
                call.tell(call.started.set)
                result, error = _run(call, runner)
                if os.getpid() != own_pid:  # the function forked: the copy must not go on with our calls, and fork anew
                    os._exit(ExitCode.CRASHED)
                still_ours = call.release()
                call.tell(call.finish, result, error)
                if not still_ours:
                    return


async def _started(call: _Call, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):  # wait_for may swallow a cancellation
            await call.started.wait()
    except TimeoutError:
        raise CallTimeout(f"got no thread within {limit_s:g} s") from None


def _run(call: _Call, runner: asyncio.Runner) -> tuple[Any, BaseException | None]:
    try:
        result = call.function()
        if inspect.isawaitable(result):
            result = runner.run(_await(result, call.timeout_s))
        result = call.read(result)
    except BaseException as error:  # a user's function may raise anything, SystemExit too; who called it is told
        plain = isinstance(error, Exception) and not isinstance(error, StopIteration)  # a future takes no StopIteration
        return None, error if plain else RuntimeError(f"raised {error!r}")
    return result, None


async def _await(awaitable: Any, timeout_s: float) -> Any:
    task = asyncio.ensure_future(awaitable)
    finished, _ = await asyncio.wait({task}, timeout=timeout_s)
    if finished:
        return task.result()
    task.cancel()
    await asyncio.wait({task}, timeout=1.0)
    raise CallTimeout(f"took longer than {timeout_s:g} s")
